"""How much a host reads.

counter = ReadCounter()
batches = input_pipeline.train_dataset(path, batch_size=256, seed=0, counter=counter)
...
counter.read().num_bytes
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf


class ReadCounts(NamedTuple):
    """Sums since the counter was made.

    Attributes:
        num_bytes: of all chunks that have been read, with their rows of columns, or of all batches
            of rows.
        num_chunks: runs of records that have been read.
        chunks_in_flight: those whose records are being read now.
        bad_records: that could not be read and were left out; one is counted in every epoch.
    """

    num_bytes: int
    num_chunks: int
    chunks_in_flight: int
    bad_records: int


class ReadCounter:
    """Counts what is read; one counter may serve several data sets.

    Chunks that tf.data reads are counted in its graph, without Python.
    """

    def __init__(self):
        self._bytes = self._begun = self._done = self._bad = 0
        self._lock = threading.Lock()  # chunks are read by several threads

    def read(self) -> ReadCounts:
        """The sums until now."""
        # Without chunks, there is no need to wait for TensorFlow.
        of_chunks = self._sums.numpy().tolist() if '_sums' in vars(self) else (0, 0, 0)
        num_bytes, begun, done = of_chunks
        with self._lock:
            begun, done = begun + self._begun, done + self._done
            return ReadCounts(num_bytes + self._bytes, done, begun - done, self._bad)

    def begin(self) -> 'tf.Operation':
        """In a graph: one chunk is being read."""
        return self._add(begun=1)

    def end(self, num_bytes: 'tf.Tensor') -> 'tf.Operation':
        """In a graph: one chunk has been read."""
        return self._add(num_bytes=num_bytes, done=1)

    @contextlib.contextmanager
    def chunk(self) -> Iterator[None]:
        """In its `with` block the records of one chunk are being read."""
        self._count(begun=1)
        try:
            yield
        except BaseException:
            self._count(begun=-1)
            raise
        self._count(done=1)

    def add_bytes(self, num_bytes: int) -> None:
        """So many bytes have been read."""
        with self._lock:
            self._bytes += num_bytes

    def add_bad(self, num_records: int) -> None:
        """Some records could not be read."""
        with self._lock:
            self._bad += num_records

    def _count(self, begun: int = 0, done: int = 0) -> None:
        with self._lock:
            self._begun += begun
            self._done += done

    @functools.cached_property
    def _sums(self) -> 'tf.Variable':
        """Of chunks: bytes, begun, done."""
        import tensorflow as tf

        with tf.init_scope():
            return tf.Variable(tf.zeros([3], tf.int64), trainable=False)

    def _add(
        self, num_bytes: 'tf.Tensor | int' = 0, begun: int = 0, done: int = 0
    ) -> 'tf.Operation':
        import tensorflow as tf

        amounts = [tf.cast(x, tf.int64) for x in (num_bytes, begun, done)]
        return self._sums.assign_add(tf.stack(amounts), read_value=False)
