"""Runs of records, each read at its offset with one request, and what to do about bad ones.

    reader = ChunkReader(split, blank=parser.blank(), on_bad_records=STOP)
    rows = byte_reads(split.index, order.epoch(0).lane_reads(0))     # int64 (n, 8)
    records, good = reader.read(ByteReads(*row))                      # in a graph

TensorFlow reads and checks the records. Only a run that it could not read is read again here,
record by record: that tells which one is bad and why, and a fault that has passed is no error.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from coyo11m_tfds import chunk_index, records, schema
from coyo11m_tfds.dataset import IndexedSplit
from coyo11m_tfds.order import Reads
from coyo11m_tfds.reading.counter import ReadCounter

STOP, SKIP = 'stop', 'skip'


class ByteReads(NamedTuple):
    """An `order.Reads` with places in bytes, as int64 tensors: what reading one run needs."""

    epoch: tf.Tensor
    shard: tf.Tensor
    first: tf.Tensor
    offset: tf.Tensor
    nbytes: tf.Tensor
    skip: tf.Tensor
    count: tf.Tensor
    pad: tf.Tensor


def byte_reads(index: chunk_index.ChunkIndex, reads: Reads) -> np.ndarray:
    """Where in their files the reads are; int64 `(n, len(ByteReads._fields))`."""
    stride = schema.CHUNK_STRIDE
    whole = -(-(reads.skip + reads.count) // stride) * stride
    num_records = np.minimum(whole, index.shard_lengths[reads.shard] - reads.first)
    offset, nbytes = index.byte_range(reads.shard, reads.first, num_records)
    columns = (reads.epoch, reads.shard, reads.first, offset, nbytes)
    return np.stack([*columns, reads.skip, reads.count, reads.pad], axis=1)


class ChunkReader:
    """Reads runs of records of one split."""

    def __init__(
        self,
        split: IndexedSplit,
        blank: bytes,
        on_bad_records: str = STOP,
        counter: ReadCounter | None = None,
    ):
        """Opens nothing.

        Args:
            split: whose records are read.
            blank: stands in the place of a record that cannot be read.
            on_bad_records: 'stop' is an error for the first bad record, 'skip' leaves them out.
            counter: is told of every chunk.

        Raises:
            ValueError: `on_bad_records` is neither.
        """
        if on_bad_records not in (STOP, SKIP):
            raise ValueError(f'on_bad_records={on_bad_records!r} is neither {STOP!r} nor {SKIP!r}')
        self._split = split
        self._blank = blank
        self._stops = on_bad_records == STOP
        self._counter = counter
        self._told = set()  # files that a bad record was reported of

    def read(self, read: ByteReads) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads one run, in a graph.

        Returns:
            Serialized records, string `(count,)`, and which of them could be read, bool `(count,)`.
        """
        file = self._split.file_tensor(read.shard)
        begun = [self._counter.begin()] if self._counter else []
        with tf.control_dependencies(begun):
            found = _read_run(file, read)
        intact = tf.strings.length(found[0]) > 0
        serialized, good = tf.cond(
            intact,
            lambda: (found, tf.ones_like(found, tf.bool)),
            lambda: self._read_again(file, read),
        )
        ended = [self._counter.end(read.nbytes)] if self._counter else []
        with tf.control_dependencies([serialized, *ended]):
            return tf.identity(serialized), good

    def _read_again(self, file: tf.Tensor, read: ByteReads) -> tuple[tf.Tensor, tf.Tensor]:
        arguments = [file, tf.stack(read)]
        outputs = tf.numpy_function(self._read_singly, arguments, [tf.string, tf.bool])
        return tuple(tf.ensure_shape(output, [None]) for output in outputs)

    def _read_singly(self, file: bytes, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads a run record by record, and reports or refuses what is bad in it."""
        path, read = file.decode(), ByteReads(*row.tolist())
        data, problem = _read_bytes(path, read)
        found = list(records.split(data))[read.skip : read.skip + read.count]
        found += [None] * (read.count - len(found))
        good = np.array([record is not None for record in found])
        if good.all():
            logging.warning('%s: a read failed and went well when it was repeated.', path)
        else:
            self._report(path, read.first + read.skip, good, problem)
        serialized = [self._blank if record is None else record for record in found]
        return np.array(serialized, object), good

    def _report(self, path: str, first: int, good: np.ndarray, problem: str) -> None:
        """Raises, or counts and warns once a file."""
        bad = first + np.flatnonzero(~good)
        what = f'{path}: record {bad[0]} cannot be read: {problem}.'
        if self._stops:
            raise ValueError(
                f'{what} Restore the file or build the data set again, or set on_bad_records='
                f"'{SKIP}' to go on without such records."
            )
        if self._counter:
            self._counter.add_bad(len(bad))
        if path not in self._told:
            self._told.add(path)
            logging.warning('%s It is left out, with what else is bad in this file.', what)


def _read_run(file: tf.Tensor, read: ByteReads) -> tf.Tensor:
    """Reads and checks one run; strings `(count,)`, empty ones if anything went wrong."""
    # `ignore_errors` asks again after an error. This data set has nothing more to give then, while
    # one of records that cannot open its file would fail in the same way for ever.
    run = tf.data.Dataset.from_tensors((file, read.offset, read.nbytes, read.skip + read.count))
    nothing = tf.data.Dataset.from_tensors(tf.fill([read.skip + read.count], ''))
    found = run.map(_read_at).ignore_errors().concatenate(nothing).take(1).get_single_element()
    return found[read.skip :]


def _read_at(file: tf.Tensor, offset: tf.Tensor, nbytes: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Reads records, string `(count,)`; fails if there are fewer.

    The buffer is as large as they are, so that it is one request to the file system.
    """
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[file], compression_type='', buffer_size=nbytes, byte_offsets=[offset]
    )
    single = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
    return single.batch(count, drop_remainder=True).take(1).get_single_element()


def _read_bytes(path: str, read: ByteReads) -> tuple[bytes, str]:
    """The bytes of a run, as many as there are, and what to say of records that are bad."""
    try:
        with tf.io.gfile.GFile(path, 'rb') as file:
            file.seek(read.offset)
            data = file.read(read.nbytes)
    except tf.errors.OpError as error:
        return b'', error.message
    if len(data) < read.nbytes:
        return data, 'the file is shorter than its chunk index says'
    return data, 'its checksum is wrong, or its file has other records than its chunk index says'
