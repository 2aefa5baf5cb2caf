"""Readers of the same samples: this pipeline, its peers, and bare TFRecord reading.

    stream = readers.READERS['ours'].open(folder_of_its_format, None)
    batch = next(iter(stream.epoch()))    # key int64 (256,), latents float16 (256, 4, 32, 32)

All give key and latents of every sample, shuffled, in batches of 256; the last batch of an epoch is
left out where it is not full. Each reads the format of a writer of `writers.WRITERS`, set up as its
own documentation advises for speed, with 2 workers where it works with processes. Where a reader
hands samples to Python, that code takes one crop, that of the key modulo 3; TFDS decodes all three.
"""

import dataclasses
import importlib
import importlib.util
import pathlib
from collections.abc import Callable

from benchmarks import peer_readers, tf_readers
from benchmarks.streams import Open, from_the_start
from benchmarks.writers import WRITERS, import_streaming_base

ROWS = ('rows', 'rows_always', 'rows_in_place')
OURS = (*ROWS, 'ours', 'ours_configured', 'tf_data')
BARE = 'tfrecord'
# Those that go through their files in order and shuffle as they go, or are made to stream; and
# those that fetch samples one by one from mapped files, which needs a local disk.
STREAMING = ('mds', 'webdataset', 'litdata', 'datasets_streamed', 'grain')
RANDOM_ACCESS = ('datasets', 'torch')


@dataclasses.dataclass(frozen=True)
class Reader:
    """One way to read.

    Attributes:
        title: for tables and the picture.
        open: from the folder that its writer has filled, and a state or None.
        writer: in `WRITERS`, whose format it reads; empty for the source itself.
        package: distribution that has to be installed for it.
        module: what that one is imported as.
        prepare: starts a process that is to read this folder, with all imports: not measured.
        keeps_place: it resumes from a state, and does not read from the start.
    """

    title: str
    open: Open
    writer: str
    package: str
    module: str
    prepare: Callable[[pathlib.Path], None]
    keeps_place: bool = True

    def is_installed(self) -> bool:
        """True if it can be run here, and its data be written."""
        writable = not self.writer or WRITERS[self.writer].is_installed()
        return writable and importlib.util.find_spec(self.module) is not None


def _importing(*modules: str) -> Callable[[pathlib.Path], None]:
    def prepare(folder: pathlib.Path) -> None:
        for module in modules:
            importlib.import_module(module)

    return prepare


def _prepare_ours(folder: pathlib.Path) -> None:
    """As `train_lib.main` begins."""
    from coyo11m_tfds.reading import process_settings

    process_settings.apply()
    from train_lib import process

    process.prepare()
    importlib.import_module('input_pipeline')


def _prepare_bare(folder: pathlib.Path) -> None:
    """With the memory settings of this pipeline, which make it a sixth faster as well."""
    from coyo11m_tfds.reading import process_settings

    process_settings.keep_freed_memory()
    _importing('tensorflow')(folder)


def _prepare_grain(folder: pathlib.Path) -> None:
    from absl import flags

    # Grain asks for its flags, which a program without absl's `app.run` leaves unread.
    flags.FLAGS.mark_as_parsed()
    _importing('grain', 'msgpack')(folder)


def _prepare_mds(folder: pathlib.Path) -> None:
    import_streaming_base()


_HERE = ('coyo11m_tfds', 'coyo11m_tfds')
_TORCH = 'torch.utils.data'

READERS = {
    'rows': Reader(
        'this pipeline by rows',
        tf_readers.rows,
        'builder',
        *_HERE,
        _importing('input_pipeline'),
    ),
    'rows_always': Reader(
        'by rows, all checksums',
        tf_readers.rows_always,
        'builder',
        *_HERE,
        _importing('input_pipeline'),
    ),
    'rows_in_place': Reader(
        'by rows, latents in place',
        tf_readers.rows,
        'in_place',
        *_HERE,
        _importing('input_pipeline'),
    ),
    'ours': Reader('this pipeline by chunks', tf_readers.ours, 'builder', *_HERE, _prepare_ours),
    'tf_data': Reader(
        'this pipeline by tf.data',
        tf_readers.through_tf_data,
        'builder',
        *_HERE,
        _prepare_ours,
    ),
    'ours_configured': Reader(
        'by chunks as configured',
        tf_readers.ours_configured,
        'builder',
        *_HERE,
        _prepare_ours,
    ),
    BARE: Reader(
        'bare TFRecord reading',
        from_the_start(tf_readers.tfrecord),
        'builder',
        *_HERE,
        _prepare_bare,
        keeps_place=False,
    ),
    'tfds': Reader(
        '`tfds.as_numpy`, shuffle, batch',
        tf_readers.tfds,
        'builder',
        'tensorflow-datasets',
        'tensorflow_datasets',
        _importing('tensorflow', 'tensorflow_datasets'),
    ),
    'mds': Reader(
        'MosaicML `StreamingDataset`',
        peer_readers.mds,
        'mds',
        'mosaicml-streaming',
        'streaming',
        _prepare_mds,
    ),
    'webdataset': Reader(
        'WebDataset',
        from_the_start(peer_readers.webdataset),
        'webdataset',
        'webdataset',
        'webdataset',
        _importing(_TORCH, 'webdataset'),
        keeps_place=False,
    ),
    'litdata': Reader(
        'litdata `StreamingDataset`',
        peer_readers.litdata,
        'litdata',
        'litdata',
        'litdata',
        _importing(_TORCH, 'litdata'),
    ),
    'datasets_streamed': Reader(
        'HF `IterableDataset`',
        from_the_start(peer_readers.datasets_streamed),
        'datasets',
        'datasets',
        'datasets',
        _importing(_TORCH, 'datasets'),
        keeps_place=False,
    ),
    'grain': Reader(
        'Grain over ArrayRecord',
        peer_readers.grain,
        'array_record',
        'grain',
        'grain',
        _prepare_grain,
    ),
    'datasets': Reader(
        'HF `Dataset`, mapped Arrow',
        peer_readers.datasets,
        'datasets',
        'datasets',
        'datasets',
        _importing(_TORCH, 'datasets'),
    ),
    'torch': Reader(
        'torch `DataLoader`, mapped `.pt`',
        peer_readers.torch,
        '',
        'torch',
        'torch',
        _importing(_TORCH),
    ),
}
