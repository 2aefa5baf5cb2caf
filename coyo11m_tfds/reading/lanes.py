"""One lane of the planned order as a tf.data pipeline: chunks, windows, parts of batches.

    reader = ChunkReader(split, parser)
    lanes = LaneReader(order, reader, parallel_reads=4)
    batches = lanes.read(range(16), position=order.locate(step))

Every step of it handles a chunk, a window or a part of a batch; none handles a record. Two cores
make 72,000 samples/s of it: 24 us of a core each, 17 of which TensorFlow takes to read and check a
record (benchmarks/README.md).
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from coyo11m_tfds.reading.chunks import ByteReads, ChunkReader
from coyo11m_tfds.reading.order import Epoch, Order
from coyo11m_tfds.reading.padding import pad_rows
from coyo11m_tfds.reading.parser import Batch


def read_chunks(rows: tf.data.Dataset, reader: ChunkReader, parallel_reads: int) -> tf.data.Dataset:
    """Turns rows of `ChunkReader.locate` into parsed batches, one for each row, in their order."""

    @tf.autograph.experimental.do_not_convert
    def read(row: tf.Tensor) -> Batch:
        run = ByteReads.of_row(row)
        batch = reader.read(run)
        return tf.cond(run.pad > 0, lambda: pad_rows(batch, run.pad), lambda: batch)

    return rows.map(read, num_parallel_calls=parallel_reads, deterministic=True)


@dataclasses.dataclass(frozen=True)
class LaneReader:
    """Reads lanes of an order."""

    order: Order
    reader: ChunkReader
    parallel_reads: int  # chunks being read at a time in each lane

    def read(self, lanes: range, position: tuple[int, int]) -> tf.data.Dataset:
        """Some lanes' part of every batch without end, from (epoch, step of it) `position` on."""
        # In parallel, so that all begin at once: one after the other, each would wait for its own
        # first window.
        parts = tf.data.Dataset.range(lanes.start, lanes.stop).interleave(
            lambda lane: self._lane(lane, position),
            cycle_length=len(lanes),
            block_length=1,
            num_parallel_calls=len(lanes),
            deterministic=True,
        )
        return parts.batch(len(lanes), drop_remainder=True).map(_join)

    @tf.autograph.experimental.do_not_convert
    def _lane(self, lane: tf.Tensor, position: tuple[int, int]) -> tf.data.Dataset:
        """Batches of `lane_batch` records."""

        def plans(plan_of_epoch: Callable[[Epoch, int], Iterator]) -> Iterator:
            epoch, step = position
            while True:
                yield from plan_of_epoch(self.order.epoch(epoch), step)
                epoch, step = epoch + 1, 0

        def reads(lane: np.ndarray) -> Iterator[np.ndarray]:
            for block in plans(lambda plan, step: plan.lane_reads(int(lane), step)):
                yield self.reader.locate(block)

        def windows(lane: np.ndarray) -> Iterator[np.ndarray]:
            return plans(lambda plan, step: plan.lane_windows(int(lane), step))

        def rows_of(generator: Callable, width: int) -> tf.data.Dataset:
            spec = tf.TensorSpec([None, width], tf.int64)
            return tf.data.Dataset.from_generator(
                generator, output_signature=spec, args=(lane,)
            ).unbatch()

        chunks = read_chunks(
            rows_of(reads, len(ByteReads._fields)), self.reader, self.parallel_reads
        )
        window = self.order.window
        picked = tf.data.Dataset.zip(chunks.rebatch(window), rows_of(windows, window))
        # One window ahead: the next is read while this one is given out.
        return picked.map(_pick).prefetch(1).rebatch(self.order.lane_batch, drop_remainder=True)


def _pick(batch: Batch, window: tf.Tensor) -> Batch:
    """The records of a window in the order in which they are given out."""
    given = tf.boolean_mask(window, window >= 0)
    return {name: tf.gather(x, given) for name, x in batch.items()}


def _join(batch: Batch) -> Batch:
    """Puts the parts `(lanes, lane_batch, ...)` of a batch one after the other."""
    return {
        name: tf.reshape(x, [x.shape[0] * x.shape[1], *x.shape[2:]]) for name, x in batch.items()
    }
