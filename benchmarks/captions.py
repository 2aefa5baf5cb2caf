"""Times the store of captions on a Parquet file as large as the real one.

    python -m benchmarks.captions --dir=/tmp/captions    # takes 10 GB there and two minutes

Makes 11.4 million captions of 200 to 600 bytes under random keys in no order, in row groups as
pandas makes them; then builds the store of them, and asks it for a million random keys, a tenth of
which it does not hold.
"""

import contextlib
import pathlib
import shutil
import sys
import tempfile

import numpy as np

from benchmarks import runner, source
from benchmarks.runner import Figures, Side
from coyo11m_tfds import keyed_random, schema

FLAGS = {'rows': (11_400_000, 'captions'), 'asked': (10**6, 'random keys')}
_COLUMNS = {
    'seconds': runner.column('seconds', '.2f'),
    'all runs': runner.all_runs('seconds', '.2f'),
    'CPU s': runner.column('cpu', '.2f'),
}


def begin(flags, folder: pathlib.Path, stack) -> runner.Once:
    """Makes the Parquet file."""
    path = folder / f'captions-{flags.rows}.parquet'
    if not path.exists():
        source.write_captions(path, _keys(np.arange(flags.rows)), np.random.default_rng(0))
    cache = pathlib.Path(tempfile.mkdtemp(dir=folder))
    stack.callback(shutil.rmtree, cache, ignore_errors=True)
    settings = {'cache': cache, 'path': path, 'rows': flags.rows, 'asked': flags.asked}
    return lambda side: runner.run(side, **settings)


def _keys(numbers: np.ndarray) -> np.ndarray:
    """Keys in no order, another for every number."""
    return keyed_random.splitmix64(numbers).view(np.int64)


def build(*, cache: str, path: str, rows: int, asked: int) -> Figures:
    """Builds the store again."""
    shutil.rmtree(cache)
    pathlib.Path(cache).mkdir()
    meter = runner.Meter()
    _store(cache, path)
    return meter.read()


def ask(*, cache: str, path: str, rows: int, asked: int) -> Figures:
    """Opens the store and asks for many keys at once."""
    numbers = np.random.default_rng(1).integers(0, round(rows / 0.9), asked)
    meter = runner.Meter()
    store = _store(cache, path)
    found = store.find(_keys(numbers))
    texts = store.texts(found[found >= 0])
    figures = meter.read()
    if len(texts) != (numbers < rows).sum():
        raise ValueError(f'{len(texts)} captions found, expected {(numbers < rows).sum()}')
    return figures


def _store(cache: str, path: str):
    from coyo11m_tfds.source import caption_store

    return caption_store.prepare_store(
        lambda: contextlib.nullcontext(path),
        name='captions',
        version='1',
        column=schema.DEFAULT_CAPTION_COLUMN,
        cache_dir=pathlib.Path(cache),
        drop_duplicates=False,
    )


SIDES = {
    'build': Side('build', build, ours=True),
    'ask': Side('open, find, give the texts', ask, ours=True),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, _COLUMNS, FLAGS, begin))
