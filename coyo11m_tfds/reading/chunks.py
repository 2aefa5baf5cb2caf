"""Runs of records, each read at its offset with one request.

    reader = ChunkReader(split, parser, on_bad_records=STOP)
    rows = reader.locate(reads)                     # of `order.Reads`: int64 (n, 8)
    batch = reader.read(ByteReads.of_row(row))      # in a graph

TensorFlow reads and checks the records. Only a run that it could not read is read again here,
record by record: that tells which one is bad and why, and a transient fault is no error. A
record is bad if its bytes are wrong or its file ends before it. A file that is missing, refused or
out of reach is an error, whatever the policy for bad records.
"""

from typing import NamedTuple, Self

import numpy as np
import tensorflow as tf
from absl import logging

from coyo11m_tfds import records, schema
from coyo11m_tfds.reading import bad_records
from coyo11m_tfds.reading.bad_records import DEFAULT_MAX_FRACTION, SKIP, STOP, BadRecords
from coyo11m_tfds.reading.counter import ReadCounter
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.order import Reads
from coyo11m_tfds.reading.parser import Batch, Parser
from coyo11m_tfds.storage import retry

__all__ = ['SKIP', 'STOP', 'ByteReads', 'ChunkReader']

# How often a run that TensorFlow could not read is read again. On gs:// TensorFlow itself tries
# each of these for minutes.
_ATTEMPTS = 3


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

    @classmethod
    def of_row(cls, row: tf.Tensor) -> Self:
        """Takes one row of `ChunkReader.locate`."""
        # Not `tf.unstack`: TensorFlow 2.21 crashes while it optimizes `skip(n)` or `take(n)` if n
        # is another than the first output of its operation.
        return cls(*(row[i] for i in range(len(cls._fields))))


class ChunkReader:
    """Reads runs of records of one split."""

    def __init__(
        self,
        split: IndexedSplit,
        parser: Parser,
        on_bad_records: str = STOP,
        counter: ReadCounter | None = None,
        max_bad_fraction: float = DEFAULT_MAX_FRACTION,
    ):
        """Opens nothing.

        Args:
            split: whose records are read.
            parser: for the records of that split.
            on_bad_records: 'stop' is an error for the first bad record, 'skip' leaves them out.
            counter: is told of every chunk.
            max_bad_fraction: see `BadRecords`.

        Raises:
            ValueError: `on_bad_records` is neither, or the fraction is not in [0, 1].
        """
        self._split = split
        self._parser = parser
        self._counter = counter
        num_records = int(split.index.shard_lengths.sum())
        self._bad_records = BadRecords(on_bad_records, max_bad_fraction, num_records, counter)

    def locate(self, reads: Reads) -> np.ndarray:
        """Where in their files the reads are; int64 `(n, len(ByteReads._fields))`."""
        index, stride = self._split.index, schema.CHUNK_STRIDE
        whole = -(-(reads.skip + reads.count) // stride) * stride
        num_records = np.minimum(whole, index.shard_lengths[reads.shard] - reads.first)
        offset, nbytes = index.byte_range(reads.shard, reads.first, num_records)
        columns = (reads.epoch, reads.shard, reads.first, offset, nbytes)
        return np.stack([*columns, reads.skip, reads.count, reads.pad], axis=1)

    def read(self, read: ByteReads) -> Batch:
        """Reads and parses one run, in a graph; in its batch are `read.count` rows."""
        if not self._counter:
            return self._read(read)
        with tf.control_dependencies([self._counter.begin()]):
            batch = self._read(read)
        with tf.control_dependencies(batch.values()):
            ended = self._counter.end(read.nbytes)
        with tf.control_dependencies([ended]):
            return {name: tf.identity(values) for name, values in batch.items()}

    def _read(self, read: ByteReads) -> Batch:
        file = self._split.file_tensor(read.shard)
        found = _read_run(file, read)
        # One decision for all that may be out of the ordinary: each takes as long as three records.
        return tf.cond(
            self._parser.is_regular(found),
            lambda: self._parser.parse_regular(found, read.epoch),
            lambda: self._parser.parse(*self._read_carefully(file, read, found), read.epoch),
        )

    def _read_carefully(
        self, file: tf.Tensor, read: ByteReads, found: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Serialized records, string `(count,)`, and which of them could be read, bool."""
        arguments = [file, tf.stack(read), found]
        outputs = tf.numpy_function(self._read_singly, arguments, [tf.string, tf.bool])
        return tuple(tf.ensure_shape(output, [None]) for output in outputs)

    def _read_singly(
        self, file: bytes, row: np.ndarray, found: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reads a run record by record if it was not found, and reports or refuses what is bad."""
        if found[0]:
            return found, np.ones(len(found), bool)
        path, read = file.decode(), ByteReads(*row.tolist())
        one_by_one, problem = self._read_again(path, read)
        good = np.array([record is not None for record in one_by_one])
        if good.all():
            logging.warning('%s: a read failed and succeeded when tried again.', path)
        else:
            numbers = read.first + read.skip + np.flatnonzero(~good)
            self._bad_records.add(path, read.shard, numbers.tolist(), problem)
        blank = self._parser.blank()
        serialized = [blank if record is None else record for record in one_by_one]
        return np.array(serialized, object), good

    def _read_again(self, path: str, read: ByteReads) -> tuple[list[bytes | None], str]:
        """The records of a run, None for those that are bad, and what to say of these.

        Bytes that are wrong are read anew, because they may have been changed on their way.
        """
        for _ in range(_ATTEMPTS):
            data = _read_bytes(path, read)
            found = self._take_apart(data, read)[read.skip :]
            if None not in found:
                break
        if len(data) < read.nbytes:
            return found, bad_records.TOO_SHORT
        return found, bad_records.DAMAGED

    def _take_apart(self, data: bytes, read: ByteReads) -> list[bytes | None]:
        """The first `skip + count` records of a run's bytes, None for those that are bad.

        Where the index knows a record, it begins anew: a damaged length costs at most so many.
        """
        first = np.arange(read.first, read.first + read.skip + read.count, schema.CHUNK_STRIDE)
        length = self._split.index.shard_lengths[read.shard]
        count = np.minimum(length - first, schema.CHUNK_STRIDE)
        offset, nbytes = self._split.index.byte_range(read.shard, first, count)
        found = []
        for begin, size, number in zip(offset - read.offset, nbytes, count, strict=True):
            some = list(records.split(data[begin : begin + size]))[:number]
            found += some + [None] * (number - len(some))
        return found[: read.skip + read.count]


def _read_run(file: tf.Tensor, read: ByteReads) -> tf.Tensor:
    """Reads and checks one run; strings `(count,)`, empty ones if anything went wrong."""
    wanted = read.skip + read.count
    # `ignore_errors` asks again after an error. A data set of one element has nothing more to give
    # then, while one of records would fail to open its file for ever, or read on at a wrong place.
    run = tf.data.Dataset.from_tensors((file, read.offset, read.nbytes, wanted))
    nothing = tf.data.Dataset.from_tensors(tf.fill([wanted], ''))
    either = run.map(_read_at).ignore_errors().concatenate(nothing)
    return either.take(1).get_single_element()[read.skip :]


def _read_at(file: tf.Tensor, offset: tf.Tensor, nbytes: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Reads records, string `(count,)`; fails if there are fewer.

    The buffer is as large as they are, so that it is one request to the file system.
    """
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[file], compression_type='', buffer_size=nbytes, byte_offsets=[offset]
    )
    single = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
    # Options, of which there are none, hide the type of the variant. TensorFlow declares it wrong,
    # and `batch` would warn of that.
    single = single.with_options(tf.data.Options())
    # No `skip` or `take` of records: each would be one more step for every one of them.
    return single.batch(count, drop_remainder=True).take(1).get_single_element()


def _read_bytes(path: str, read: ByteReads) -> bytes:
    """The bytes of a run, as many as there are.

    Raises:
        FileNotFoundError: the file is missing.
        PermissionError: access to it was refused.
        OSError: the storage is out of reach, or the file cannot be read.
    """

    def attempt() -> bytes:
        with tf.io.gfile.GFile(path, 'rb') as file:
            file.seek(read.offset)
            return file.read(read.nbytes)

    try:
        return retry.call(attempt, path, attempts=_ATTEMPTS)
    except tf.errors.OutOfRangeError:  # the file ends before the run
        return b''
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(f'{path} is missing: restore it. {_said(error)}') from error
    except tf.errors.PermissionDeniedError as error:
        raise PermissionError(
            f'{path}: access was refused: let this user read the file. {_said(error)}'
        ) from error
    except tf.errors.OpError as error:
        raise OSError(f'{path} cannot be read. {_said(error)}') from error


def _said(error: tf.errors.OpError) -> str:
    """TensorFlow's message without the body of the storage's answer."""
    return f'({error.message.partition(chr(10))[0][:300]})'
