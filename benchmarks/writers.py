"""Conversions of a source by this project's builder, by its peers, and by `cp`.

    writers.WRITERS['mds'].write(source_folder, out_folder, marks)

All read the same files and write key, latents and caption of every sample; each as its own
documentation advises for speed: latents as raw bytes, nothing compressed, shards of the same size.
Peers read the `.pt` files memory-mapped and the captions into a dict, as a user would. Each marks
`imported` before it reads anything, and `writing` when captions (or the plan) are ready and the
first sample is about to be written. None flushes what it has written unless it always does.
"""

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import subprocess
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.measure import Marks
from coyo11m_tfds import schema

SHARD_BYTES = 128 * 1024 * 1024

TFDS_WRITERS = ('tfds', 'tfds_unshuffled')
# Formats of streaming loaders, and formats for random access.
SHARD_WRITERS = ('mds', 'webdataset', 'litdata')
RANDOM_ACCESS_WRITERS = ('datasets', 'array_record')

Write = Callable[[pathlib.Path, pathlib.Path, Marks], None]


@dataclasses.dataclass(frozen=True)
class Writer:
    """One way to convert a source.

    Attributes:
        title: for the table.
        write: converts (source, into an existing empty folder, marks).
        package: distribution that has to be installed for it.
        module: its name in an import.
        copies_latents: whether what it writes holds them.
    """

    title: str
    write: Write
    package: str
    module: str
    copies_latents: bool = True

    def is_installed(self) -> bool:
        """True if it can be run here."""
        return importlib.util.find_spec(self.module.partition('.')[0]) is not None


def read_captions(source: pathlib.Path) -> dict[int, str]:
    """Returns the caption of each key."""
    import pyarrow.parquet as pq

    columns = [schema.PARQUET_KEY, schema.DEFAULT_CAPTION_COLUMN]
    table = pq.read_table(source / schema.CAPTIONS_FILE, columns=columns)
    keys, captions = (table.column(name).to_pylist() for name in columns)
    return dict(zip(keys, captions, strict=True))


def samples(
    source: pathlib.Path, captions: dict[int, str]
) -> Iterator[tuple[int, np.ndarray, str]]:
    """Yields key, latents float16 `(3, 4, 32, 32)` (in mapped memory) and caption."""
    import torch

    for path in sorted((source / schema.LATENTS_FOLDER).iterdir()):
        tensors = torch.load(path, mmap=True, weights_only=True)
        keys = tensors[schema.PT_KEYS].tolist()
        latents = tensors[schema.PT_LATENTS].numpy()
        for key, row in zip(keys, latents, strict=True):
            yield key, row, captions[key]


def _builder(
    num_workers: int,
    check_crc: bool,
    source: pathlib.Path,
    out: pathlib.Path,
    marks: Marks,
    latents: str = 'records',
) -> None:
    # The builder imports `building` when it builds.
    from coyo11m_tfds.build import local_runner
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig

    marks.mark('imported')
    config = Coyo11mConfig(
        name='benchmark',
        source=str(source),
        shard_bytes=SHARD_BYTES,
        num_workers=num_workers,
        check_crc=check_crc,
        latents=latents,
    )
    # The only way to learn, from outside, when a worker is ready and begins.
    marked = functools.partial(_marked_write_shard, marks, local_runner.write_shard)
    with unittest.mock.patch.object(local_runner, 'write_shard', marked):
        Builder(data_dir=out, config=config).download_and_prepare()


def _marked_write_shard(marks: Marks, write_shard: Callable, *args):
    marks.mark('writing')
    return write_shard(*args)


def _tfds(disable_shuffling: bool, source: pathlib.Path, out: pathlib.Path, marks: Marks) -> None:
    from benchmarks.generator_builder import GeneratorBuilder

    def begin():
        marks.mark('writing')
        return samples(source, captions)

    marks.mark('imported')
    captions = read_captions(source)
    builder = GeneratorBuilder(begin, disable_shuffling=disable_shuffling, data_dir=out)
    builder.download_and_prepare()


def _mds(source: pathlib.Path, out: pathlib.Path, marks: Marks) -> None:
    mds_writer = import_streaming_base().MDSWriter
    marks.mark('imported')
    captions = read_captions(source)
    marks.mark('writing')
    columns = {schema.KEY: 'int64', schema.LATENTS: 'bytes', schema.CAPTION: 'str'}
    with mds_writer(out=str(out), columns=columns, size_limit=SHARD_BYTES) as writer:
        for key, latents, caption in samples(source, captions):
            row = {schema.KEY: np.int64(key), schema.LATENTS: latents.tobytes()}
            writer.write(row | {schema.CAPTION: caption})


def import_streaming_base() -> types.ModuleType:
    """Imports `streaming.base` of mosaicml-streaming without all of `streaming`.

    The package itself imports torchvision for data sets of its own, and torchvision cannot be
    imported where its build is for CUDA and torch's for CPUs.
    """
    spec = importlib.util.find_spec('streaming')
    sys.modules['streaming'] = importlib.util.module_from_spec(spec)
    return importlib.import_module('streaming.base')


def _webdataset(source: pathlib.Path, out: pathlib.Path, marks: Marks) -> None:
    import webdataset

    marks.mark('imported')
    captions = read_captions(source)
    marks.mark('writing')
    pattern = str(out / '%06d.tar')
    with webdataset.ShardWriter(
        pattern, maxcount=sys.maxsize, maxsize=SHARD_BYTES, encoder=False, verbose=0
    ) as writer:
        for key, latents, caption in samples(source, captions):
            row = {'__key__': str(key), 'latents.bin': latents.tobytes()}
            writer.write(row | {'caption.txt': caption.encode()})


def _litdata(source: pathlib.Path, out: pathlib.Path, marks: Marks) -> None:
    import litdata

    marks.mark('imported')
    litdata.optimize(
        fn=functools.partial(_litdata_rows, marks),
        inputs=[str(source)],  # one worker, so nothing has to be divided
        input_dir=str(source),
        output_dir=str(out),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        verbose=False,
    )


def _litdata_rows(marks: Marks, source: str) -> Iterator[dict]:
    captions = read_captions(pathlib.Path(source))
    marks.mark('writing')
    for key, latents, caption in samples(pathlib.Path(source), captions):
        yield {
            schema.KEY: key,
            schema.LATENTS: latents.tobytes(),
            schema.CAPTION: caption,
        }


def _datasets(source: pathlib.Path, out: pathlib.Path, marks: Marks) -> None:
    import datasets

    marks.mark('imported')
    captions = read_captions(source)

    def rows() -> Iterator[dict]:
        marks.mark('writing')
        for key, latents, caption in samples(source, captions):
            yield {
                schema.KEY: key,
                schema.LATENTS: latents.tobytes(),
                schema.CAPTION: caption,
            }

    features = datasets.Features(
        {
            schema.KEY: datasets.Value('int64'),
            schema.LATENTS: datasets.Value('binary'),
            schema.CAPTION: datasets.Value('string'),
        }
    )
    # The fingerprint would otherwise be made of all captions.
    datasets.Dataset.from_generator(
        rows, features=features, cache_dir=str(out), fingerprint='benchmark'
    )


def _array_record(source: pathlib.Path, out: pathlib.Path, marks: Marks) -> None:
    import msgpack
    from array_record.python.array_record_module import ArrayRecordWriter

    marks.mark('imported')
    captions = read_captions(source)
    marks.mark('writing')
    writer, room = None, 0
    for key, latents, caption in samples(source, captions):
        if room <= 0:
            if writer:
                writer.close()
            path = out / f'{len(list(out.iterdir())):06d}.array_record'
            writer, room = ArrayRecordWriter(str(path), 'group_size:1,uncompressed'), SHARD_BYTES
        record = msgpack.packb(
            {schema.KEY: key, schema.LATENTS: latents.tobytes(), schema.CAPTION: caption}
        )
        writer.write(record)
        room -= len(record)
    writer.close()


def _cp(source: pathlib.Path, out: pathlib.Path, marks: Marks) -> None:
    marks.mark('imported')
    marks.mark('writing')
    # Where the file system could share the blocks of both copies, nothing would be written.
    subprocess.run(['cp', '--recursive', '--reflink=never', source, out], check=True)


_NUMPY = ('numpy', 'numpy')  # for what needs nothing of its own
_HERE = ('coyo11m_tfds', 'coyo11m_tfds')

WRITERS = {
    'builder': Writer('this builder, 1 process', functools.partial(_builder, 1, True), *_HERE),
    'builder2': Writer('this builder, 2 processes', functools.partial(_builder, 2, True), *_HERE),
    'in_place': Writer(
        'the same, 1 process, latents in place',
        functools.partial(_builder, 1, True, latents='in_place'),
        *_HERE,
        copies_latents=False,
    ),
    'unchecked': Writer(
        'the same, 1 process, `check_crc=False`', functools.partial(_builder, 1, False), *_HERE
    ),
    'unchecked2': Writer(
        'the same, 2 processes, `check_crc=False`', functools.partial(_builder, 2, False), *_HERE
    ),
    'tfds': Writer(
        'TFDS `GeneratorBasedBuilder`',
        functools.partial(_tfds, False),
        'tensorflow-datasets',
        'tensorflow_datasets',
    ),
    'tfds_unshuffled': Writer(
        'the same, `disable_shuffling`',
        functools.partial(_tfds, True),
        'tensorflow-datasets',
        'tensorflow_datasets',
    ),
    'mds': Writer('MosaicML `MDSWriter`', _mds, 'mosaicml-streaming', 'streaming'),
    'webdataset': Writer('WebDataset `ShardWriter`', _webdataset, 'webdataset', 'webdataset'),
    'litdata': Writer('litdata `optimize`, 1 worker', _litdata, 'litdata', 'litdata'),
    'datasets': Writer('HF `Dataset.from_generator`', _datasets, 'datasets', 'datasets'),
    'array_record': Writer('`ArrayRecordWriter`', _array_record, 'array_record', 'array_record'),
    'cp': Writer('`cp` of the source', _cp, *_NUMPY),
}
