"""Times the conversion of a source: this builder, its peers, and `cp` of the same bytes.

    python -m benchmarks.convert --dir /tmp/bench                # 2 GB, 3 repeats, five minutes
    python -m benchmarks.convert --dir /tmp/bench --gb 8 --only builder2,cp

All writers read the same memory-mapped `.pt` files and write key, latents and caption of every
sample in the fastest way of their documentation. benchmarks/README.md has details and results.
"""

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
_COLUMNS = {
    **runner.RATE,
    'MB/s': runner.column('rate', scale=source.SAMPLE_BYTES / 1e6),
    'seconds': runner.column('seconds', '.1f'),
}


def begin(flags, folder: pathlib.Path, stack) -> runner.Once:
    """Makes the source; each run deletes the output before it and converts the source."""
    made, out = source.make(folder, source.num_samples_of(flags.gb)), folder / 'out'

    def once(side: Side) -> Figures:
        shutil.rmtree(out, ignore_errors=True)
        # A file system mounted with `discard` tells the disk of every deleted block when its
        # journal is written, which is at somebody's next `fsync`.
        os.sync()
        time.sleep(_SETTLE_SECONDS)
        runner.prepare_cache([made], flags.cold)
        out.mkdir()
        return runner.run(side, made=made, out=out)

    return once


def convert(
    *, writer: str, module: str, made: str, out: str, limit: int = sys.maxsize, **options: Any
) -> Figures:
    """Converts a source, or its first `limit` samples, into the empty folder `out`.

    `writer` is a function of this module; `module` is imported before the clock starts. The builder
    and `cp` ignore `limit`.
    """
    importlib.import_module(module)
    folder, samples = pathlib.Path(out), min(source.num_samples(made), limit)
    meter = runner.Meter()
    globals()[writer](pathlib.Path(made), folder, samples, **options)
    written = 0
    for path in [folder, *folder.rglob('*')]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        written += os.fstat(descriptor).st_size
        os.close(descriptor)
    figures = meter.rate(samples)
    if written < samples * source.SAMPLE_BYTES and 'latents' not in options:
        raise RuntimeError(f'{writer} has written {written:,} bytes for {samples:,} samples')
    return figures


def builder(made: pathlib.Path, out: pathlib.Path, _: int, **settings: Any) -> None:
    """This project's builder, which writes all samples."""
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig

    config = Coyo11mConfig(name='bench', source=str(made), shard_bytes=SHARD_BYTES, **settings)
    Builder(data_dir=out, config=config).download_and_prepare()


def parts(made: pathlib.Path, out: pathlib.Path, _: int, **settings: Any) -> None:
    """Builds a data set from each file, with a column `score` of random numbers in [0, 1)."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from coyo11m_tfds import add_column
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig

    keys = pq.read_table(made / schema.CAPTIONS_FILE, columns=[schema.PARQUET_KEY]).column(0)
    scores = np.random.default_rng(0).random(len(keys), np.float32)
    pq.write_table(pa.table({schema.PARQUET_KEY: keys, 'score': scores}), out / 'scores')
    for path in source.pt_files(made):
        # Not in `out`, which may get another name.
        part = made.with_name(f'{made.name}-{path.stem}')
        if not part.exists():
            (part / schema.LATENTS_FOLDER).mkdir(parents=True)
            (part / schema.LATENTS_FOLDER / path.name).symlink_to(path)
            (part / schema.CAPTIONS_FILE).symlink_to(made / schema.CAPTIONS_FILE)
        config = Coyo11mConfig(name='bench', source=str(part), **settings)
        built = Builder(data_dir=out / path.stem, config=config)
        built.download_and_prepare()
        add_column.add(built.data_dir, 'score', parquet=out / 'scores', column='score')


def cp(made: pathlib.Path, out: pathlib.Path, _: int) -> None:
    """A copy without shared blocks (reflinks)."""
    subprocess.run(['cp', '--recursive', '--reflink=never', made, out], check=True)


def _rows(made: pathlib.Path, limit: int) -> Iterator[dict[str, Any]]:
    for key, latents, caption in source.samples(made, limit):
        yield {schema.KEY: key, schema.LATENTS: latents.tobytes(), schema.CAPTION: caption}


def litdata(made: pathlib.Path, out: pathlib.Path, limit: int) -> None:
    """litdata `optimize`."""
    import litdata

    litdata.optimize(
        fn=_litdata_rows,
        inputs=[(str(made), limit)],  # one worker, so nothing has to be divided
        output_dir=str(out),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        verbose=False,
    )


def _litdata_rows(source_and_limit: tuple[str, int]) -> Iterator[dict[str, Any]]:
    made, limit = source_and_limit
    yield from _rows(pathlib.Path(made), limit)


def datasets(made: pathlib.Path, out: pathlib.Path, limit: int) -> None:
    """HF datasets."""
    import datasets

    types = {schema.KEY: 'int64', schema.LATENTS: 'binary', schema.CAPTION: 'string'}
    datasets.Dataset.from_generator(
        lambda: _rows(made, limit),
        features=datasets.Features({name: datasets.Value(of) for name, of in types.items()}),
        cache_dir=str(out),
        fingerprint='benchmark',  # it would otherwise be made of all captions
    )


def array_record(made: pathlib.Path, out: pathlib.Path, limit: int) -> None:
    """ArrayRecord, which Grain reads."""
    import msgpack
    from array_record.python.array_record_module import ArrayRecordWriter

    rows, per_file = _rows(made, limit), SHARD_BYTES // source.SAMPLE_BYTES
    for number in range(-(-limit // per_file)):
        path = out / f'{number:06d}.array_record'
        writer = ArrayRecordWriter(str(path), 'group_size:1,uncompressed')
        for row in itertools.islice(rows, per_file):
            writer.write(msgpack.packb(row))
        writer.close()


def _side(title: str, writer: str, module: str, **options: Any) -> Side:
    settings = {'writer': writer, 'module': module, **options}
    return Side(title, convert, settings, ours=writer == 'builder')


_BUILDER = 'builder', 'coyo11m_tfds.coyo11m_tfds_dataset_builder'
PARTS = _side('four data sets in place', 'parts', _BUILDER[1], num_workers=1, latents='in_place')
SIDES = {
    'builder': _side('this builder, 1 process', *_BUILDER, num_workers=1),
    'builder2': _side('this builder, 2 processes', *_BUILDER, num_workers=2),
    'in_place': _side('latents in place, 1 process', *_BUILDER, num_workers=1, latents='in_place'),
    'litdata': _side('litdata `optimize`, 1 worker', 'litdata', 'litdata'),
    'datasets': _side('HF `Dataset.from_generator`', 'datasets', 'datasets'),
    'array_record': _side(
        '`ArrayRecordWriter`', 'array_record', 'array_record.python.array_record_module'
    ),
    'cp': _side('`cp` of the source', 'cp', 'subprocess'),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, _COLUMNS, FLAGS, begin))
