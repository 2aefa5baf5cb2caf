"""How much a host reads.

counter = ReadCounter()
batches = input_pipeline.train_dataset(path, batch_size=256, seed=0, counter=counter)
...
counter.read().num_bytes
"""

from typing import NamedTuple

import tensorflow as tf


class ReadCounts(NamedTuple):
    """Sums since the counter was made.

    Attributes:
        num_bytes: in all chunks that have been read.
        num_chunks: that have been read.
        chunks_in_flight: now being read.
        bad_records: that could not be read and were left out; one is counted in every epoch.
    """

    num_bytes: int
    num_chunks: int
    chunks_in_flight: int
    bad_records: int


class ReadCounter:
    """Counts chunks while tf.data reads them; one counter may serve several data sets.

    No Python runs for a chunk.
    """

    def __init__(self):
        # In the order of the methods below: bytes, begun, done, bad.
        self._sums = tf.Variable(tf.zeros([4], tf.int64), trainable=False)

    def read(self) -> ReadCounts:
        """The sums until now."""
        num_bytes, begun, done, bad = self._sums.numpy().tolist()
        return ReadCounts(num_bytes, done, begun - done, bad)

    def begin(self) -> tf.Operation:
        """In a graph: one chunk is being read."""
        return self._add(begun=1)

    def end(self, num_bytes: tf.Tensor) -> tf.Operation:
        """In a graph: one chunk has been read."""
        return self._add(num_bytes=num_bytes, done=1)

    def add_bad(self, num_records: int) -> None:
        """Some records could not be read."""
        self._add(bad=num_records)

    def _add(
        self, num_bytes: tf.Tensor | int = 0, begun: int = 0, done: int = 0, bad: int = 0
    ) -> tf.Operation:
        amounts = [tf.cast(x, tf.int64) for x in (num_bytes, begun, done, bad)]
        return self._sums.assign_add(tf.stack(amounts), read_value=False)
