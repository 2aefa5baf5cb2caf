"""Times the store of captions on a Parquet file as large as the real one.

    python -m benchmarks.captions --dir=/tmp/captions    # takes 10 GB there and two minutes

Makes 11.4 million captions of 200 to 600 bytes under random keys in no order, in row groups as
pandas makes them; then builds the store of them, opens it, and asks for a million random keys, a
tenth of which it does not hold. Every step is a fresh process, whose peak memory is all that was
resident, with mapped files and libraries. The answers are compared with what was written. Files are
in the page cache if it has room. The next run uses the folder's Parquet file again.

On 2 cores, which others were using too (the best and the median of 5 runs):

    build  build s        best    13.2342   median    18.1094
    build  peak MB        best   890.5687   median   900.8701
    ask    open s         best     0.0007   median     0.0008
    ask    find s         best     0.0980   median     0.1043
    ask    lengths s      best     0.0104   median     0.0107
    ask    texts s        best     0.6563   median     0.6809
    ask    all answers s  best     0.7690   median     0.8017
    ask    peak MB        best  5447.4998   median  5447.5776

The last figure is the store itself: for so many texts it is mapped, and what is mapped counts as
resident, though it is the page cache's. Most of the time of a build goes into writing 4.8 GB.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import measure
from coyo11m_tfds import keyed_random, schema
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.source import caption_store

SEED = 0
CAPTION_BYTES = (200, 600)
ROW_GROUP = 2**20  # pandas' default
ROWS_AT_ONCE = 2**16
SHARE_OF_ABSENT = 0.1


def main() -> None:
    """Runs the steps, each in a process of its own, and prints a table."""
    flags = parse_flags()
    folder = pathlib.Path(flags.dir)
    if flags.step:
        figures = STEPS[flags.step](folder, flags)
        peak = measure.memory_of(os.getpid()).peak_rss
        print(json.dumps(figures | {'peak MB': peak / 1e6}))
        return
    folder.mkdir(parents=True, exist_ok=True)
    parquet = parquet_path(folder, flags.rows)
    if not parquet.exists():
        run_step('make', flags)
    print(f'{flags.rows:,} captions, Parquet file of {readable(parquet.stat().st_size)}')
    for step in ('build', 'ask'):
        print_row(step, [run_step(step, flags) for _ in range(flags.repeats)])
    shutil.rmtree(folder / 'cache')


def make(folder: pathlib.Path, flags: argparse.Namespace) -> dict[str, float]:
    """Writes the Parquet file, which appears when it is complete."""
    random = np.random.default_rng(SEED)
    text = make_text(random)
    columns = pa.schema(
        [(schema.PARQUET_KEY, pa.int64()), (schema.DEFAULT_CAPTION_COLUMN, pa.large_string())]
    )
    start = time.perf_counter()
    path = parquet_path(folder, flags.rows)
    unfinished = path.with_suffix('.unfinished')
    with pq.ParquetWriter(unfinished, columns) as writer:
        for group in range(0, flags.rows, ROW_GROUP):
            parts = []
            for first in range(group, min(group + ROW_GROUP, flags.rows), ROWS_AT_ONCE):
                stop = min(first + ROWS_AT_ONCE, group + ROW_GROUP, flags.rows)
                keys = make_keys(np.arange(first, stop))
                values = [pa.array(keys), make_captions(keys, text, random)]
                parts.append(pa.RecordBatch.from_arrays(values, schema=columns))
            writer.write_table(pa.Table.from_batches(parts), row_group_size=ROW_GROUP)
    unfinished.rename(path)
    return {'make s': time.perf_counter() - start}


def build(folder: pathlib.Path, flags: argparse.Namespace) -> dict[str, float]:
    """Builds the store again."""
    shutil.rmtree(folder / 'cache', ignore_errors=True)
    start = time.perf_counter()
    prepare(folder, lambda: contextlib.nullcontext(str(parquet_path(folder, flags.rows))))
    return {'build s': time.perf_counter() - start}


def ask(folder: pathlib.Path, flags: argparse.Namespace) -> dict[str, float]:
    """Opens the store and asks for many keys at once."""
    random = np.random.default_rng(SEED + 1)
    numbers = random.integers(0, round(flags.rows / (1 - SHARE_OF_ABSENT)), flags.asked)
    keys = make_keys(numbers)

    start = time.perf_counter()
    store = prepare(folder, refuse)
    opened = time.perf_counter()
    rows = store.find(keys)
    found = time.perf_counter()
    lengths = store.lengths(rows[rows >= 0])
    measured = time.perf_counter()
    texts = store.texts(rows[rows >= 0])
    read = time.perf_counter()

    np.testing.assert_array_equal(rows >= 0, numbers < flags.rows)
    for key, length, text in zip(keys[rows >= 0].tolist(), lengths, texts, strict=True):
        if len(text) != length or not text.startswith(b'%d ' % key):
            raise ValueError(f'The caption of key {key} is {text!r}, expected {length} bytes.')
    return {
        'open s': opened - start,
        'find s': found - opened,
        'lengths s': measured - found,
        'texts s': read - measured,
        'all answers s': read - opened,
    }


STEPS: dict[str, Callable[[pathlib.Path, argparse.Namespace], dict[str, float]]] = {
    'make': make,
    'build': build,
    'ask': ask,
}


def prepare(
    folder: pathlib.Path, local_file: caption_store.LocalFile
) -> caption_store.CaptionStore:
    """Opens the store, or builds it."""
    return caption_store.prepare_store(
        local_file,
        name='captions',
        version='1',
        column=schema.DEFAULT_CAPTION_COLUMN,
        cache_dir=folder / 'cache',
        drop_duplicates=False,
    )


def refuse() -> contextlib.AbstractContextManager[str]:
    """Stands for the Parquet file where it must not be needed."""
    raise ValueError('There is no store to ask; run the step build first.')


def make_keys(numbers: np.ndarray) -> np.ndarray:
    """Returns int64 keys in no order, another for every number."""
    return keyed_random.splitmix64(numbers).view(np.int64)


def make_text(random: np.random.Generator) -> bytes:
    """Returns 2 MB of made-up words, of which captions are cut out."""
    words = [bytes(random.integers(97, 123, n, np.uint8)) for n in random.integers(2, 11, 20_000)]
    return b' '.join(words[i] for i in random.integers(0, len(words), 300_000))


def make_captions(keys: np.ndarray, text: bytes, random: np.random.Generator) -> pa.Array:
    """Returns large_string `(n,)`; every caption begins with its key, for checking answers."""
    shortest, longest = CAPTION_BYTES
    lengths = random.integers(shortest, longest + 1, len(keys)).tolist()
    starts = random.integers(0, len(text) - longest, len(keys)).tolist()
    values = [
        (b'%d %b' % (key, text[start : start + length]))[:length]
        for key, start, length in zip(keys.tolist(), starts, lengths, strict=True)
    ]
    return pa.array(values, pa.large_binary()).cast(pa.large_string())


def parquet_path(folder: pathlib.Path, num_rows: int) -> pathlib.Path:
    """Path of the Parquet file of so many rows."""
    return folder / f'captions-{num_rows}.parquet'


def run_step(step: str, flags: argparse.Namespace) -> dict[str, float]:
    """Runs one step in a process of its own and returns its figures."""
    options = [f'--{name}={value}' for name, value in vars(flags).items() if name != 'step']
    command = [sys.executable, '-m', 'benchmarks.captions', *options, f'--step={step}']
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(result.stdout)


def print_row(step: str, results: list[dict[str, float]]) -> None:
    """Prints the best of several results, and the median beside it."""
    for name in results[0]:
        values = sorted(result[name] for result in results)
        print(
            f'{step:6} {name:14} best {values[0]:10.4f}   median {values[len(values) // 2]:10.4f}'
        )


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dir', required=True, help='folder for the files; made if need be')
    parser.add_argument('--rows', type=int, default=11_400_000, help='captions (%(default)s)')
    parser.add_argument('--asked', type=int, default=10**6, help='random keys (%(default)s)')
    parser.add_argument('--repeats', type=int, default=3, help='runs of each step (%(default)s)')
    parser.add_argument('--step', choices=STEPS, help='run this step only, in this process')
    return parser.parse_args()


if __name__ == '__main__':
    main()
