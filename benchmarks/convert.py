"""Times the conversion of a source: this builder, its peers, and `cp` of the same bytes.

    python -m benchmarks.convert --dir /tmp/bench                # 2 GB, 3 repeats, five minutes
    python -m benchmarks.convert --dir /tmp/bench --gb 8 --only builder2,cp

All writers read the same memory-mapped `.pt` files and write key, latents and caption of every
sample in the fastest way of their documentation. benchmarks/README.md has details and results.
"""

import functools
import importlib
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import runner, source
from benchmarks.runner import Figures, Side
from coyo11m_tfds import schema

SHARD_BYTES = 128 * 2**20
_SETTLE_SECONDS = 2
FLAGS = {'gb': (2.0, 'size of the source'), 'cold': (False, 'read the source from the disk')}
COLUMNS = {
    **runner.RATE,
    'MB/s': runner.column('rate', scale=source.SAMPLE_BYTES / 1e6),
    'seconds': runner.column('seconds', '.1f'),
}


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Makes the source; returns what converts it, after the output before it is deleted."""
    source_dir = source.make(folder, source.num_samples_of(flags.gb))
    out = folder / 'out'

    def run_side(side: Side) -> Figures:
        """Converts the source once, with the machine as it was before the last run."""
        shutil.rmtree(out, ignore_errors=True)
        # A file system mounted with `discard` tells the disk of every deleted block when its
        # journal is written, which is at somebody's next `fsync`.
        os.sync()
        time.sleep(_SETTLE_SECONDS)
        runner.prepare_cache([source_dir], flags.cold)
        out.mkdir()
        return runner.run(side, source_dir=source_dir, out=out)

    return run_side


def convert(
    *, writer: str, module: str, source_dir: str, out: str, limit: int = sys.maxsize, **options: Any
) -> Figures:
    """Converts a source, or its first `limit` samples, which the builder and `cp` ignore.

    `writer` is a function of this module; `module` and pandas are imported before the clock starts.
    """
    importlib.import_module(module)
    # As `build` and HF datasets do when they start; Arrow would, when it first converts an array.
    importlib.import_module('pandas')
    folder = pathlib.Path(out)
    num_samples = min(source.num_samples(source_dir), limit)
    meter = runner.Meter()
    # By its name, because settings are JSON.
    write = globals()[writer]
    write(pathlib.Path(source_dir), folder, num_samples, **options)
    written = 0
    paths = list(folder.rglob('*'))
    # The names of its files are on the disk when the folder itself is.
    paths.append(folder)
    # The clock stops when the disk has all: some writers flush, others leave that to the system.
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        written += os.fstat(descriptor).st_size
        os.close(descriptor)
    figures = meter.rate(num_samples)
    # A writer that drops samples would look fast.
    is_in_place = 'latents' in options
    if written < num_samples * source.SAMPLE_BYTES and not is_in_place:
        raise RuntimeError(f'{writer} has written {written:,} bytes for {num_samples:,} samples')
    return figures


def builder(source_dir: pathlib.Path, out: pathlib.Path, _: int = 0, **options: Any) -> Any:
    """This project's builder, which writes all samples; returns it."""
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig

    options = {'shard_bytes': SHARD_BYTES, **options}
    config = Coyo11mConfig(name='bench', source=str(source_dir), **options)
    dataset_builder = Builder(data_dir=out, config=config)
    dataset_builder.download_and_prepare()
    return dataset_builder


def four_builds(source_dir: pathlib.Path, out: pathlib.Path, _: int, **options: Any) -> None:
    """Builds a data set from each file, with a column `score` of random numbers in [0, 1)."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from coyo11m_tfds import add_column

    captions = source_dir / schema.CAPTIONS_FILE
    keys = pq.read_table(captions, columns=[schema.PARQUET_KEY]).column(0)
    scores = np.random.default_rng(0).random(len(keys), np.float32)
    pq.write_table(pa.table({schema.PARQUET_KEY: keys, 'score': scores}), out / 'scores')
    for path in source.pt_files(source_dir):
        # Not in `out`, which may get another name after the build.
        one_file = source_dir.with_name(f'{source_dir.name}-{path.stem}')
        latents_folder = one_file / schema.LATENTS_FOLDER
        if not one_file.exists():
            latents_folder.mkdir(parents=True)
            (latents_folder / path.name).symlink_to(path)
            (one_file / schema.CAPTIONS_FILE).symlink_to(captions)
        data_dir = builder(one_file, out / path.stem, **options).data_dir
        add_column.add(data_dir, 'score', parquet=out / 'scores', column='score')


def cp(source_dir: pathlib.Path, out: pathlib.Path, _: int) -> None:
    """A copy without shared blocks (reflinks)."""
    subprocess.run(['cp', '--recursive', '--reflink=never', source_dir, out], check=True)


def _rows(source_dir: pathlib.Path, limit: int) -> Iterator[dict[str, Any]]:
    """Yields the first samples as peers store them, latents as bytes."""
    for key, latents, caption in source.samples(source_dir, limit):
        yield {schema.KEY: key, schema.LATENTS: latents.tobytes(), schema.CAPTION: caption}


def litdata(source_dir: pathlib.Path, out: pathlib.Path, limit: int) -> None:
    """litdata's own format, in chunks of the size of a shard."""
    import litdata

    litdata.optimize(
        fn=functools.partial(_rows, limit=limit),
        inputs=[source_dir],  # one worker, so nothing has to be divided
        output_dir=str(out),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        verbose=False,
    )


def datasets(source_dir: pathlib.Path, out: pathlib.Path, limit: int) -> None:
    """Arrow files of HF datasets."""
    import datasets

    features = {
        schema.KEY: datasets.Value('int64'),
        schema.LATENTS: datasets.Value('binary'),
        schema.CAPTION: datasets.Value('string'),
    }
    datasets.Dataset.from_generator(
        lambda: _rows(source_dir, limit),
        features=datasets.Features(features),
        cache_dir=str(out),
        fingerprint='benchmark',  # it would otherwise be made of all captions
    )


def array_record(source_dir: pathlib.Path, out: pathlib.Path, limit: int) -> None:
    """ArrayRecord files of MessagePack, of the size of a shard, which can be read at random."""
    import msgpack
    from array_record.python.array_record_module import ArrayRecordWriter

    rows = _rows(source_dir, limit)
    per_file = SHARD_BYTES // source.SAMPLE_BYTES
    num_files = -(-limit // per_file)  # rounded up
    for number in range(num_files):
        path = out / f'{number:06d}.array_record'
        writer = ArrayRecordWriter(str(path), 'group_size:1,uncompressed')
        for row in itertools.islice(rows, per_file):
            writer.write(msgpack.packb(row))
        writer.close()


def _side(title: str, writer: str, module: str, **options: Any) -> Side:
    """Returns a side that calls the function `writer` of this module, with options."""
    settings = {'writer': writer, 'module': module, **options}
    return Side(title, convert, settings, ours=writer == 'builder')


_MODULE = 'coyo11m_tfds.coyo11m_tfds_dataset_builder'
_IN_PLACE = {'module': _MODULE, 'num_workers': 1, 'latents': 'in_place'}
FOUR_BUILDS = _side('four data sets in place', 'four_builds', **_IN_PLACE)
SIDES = {
    'builder': _side('this builder, 1 worker', 'builder', _MODULE, num_workers=1),
    'builder2': _side('this builder, 2 workers', 'builder', _MODULE, num_workers=2),
    'in_place': _side('latents in place, 1 worker', 'builder', **_IN_PLACE),
    'litdata': _side('litdata `optimize`, 1 worker', 'litdata', 'litdata'),
    'datasets': _side('HF `Dataset.from_generator`', 'datasets', 'datasets'),
    'array_record': _side(
        '`ArrayRecordWriter`', 'array_record', 'array_record.python.array_record_module'
    ),
    'cp': _side('`cp` of the source', 'cp', 'subprocess'),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, COLUMNS, FLAGS, prepare))
