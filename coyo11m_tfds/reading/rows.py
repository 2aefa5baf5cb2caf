"""The engine `rows`: batches out of local, memory-mapped TFRecord shards, without TensorFlow.

    batches = rows.train_batches(reader, order, lanes=range(16), start_step=1000, prefetch=2)
    batch = next(batches)

There are no windows in memory: the plan says which records come, and each batch is gathered out of
the page cache when it is due. What the following batches need is asked for ahead, so that a disk
reads it meanwhile.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from coyo11m_tfds.reading import row_plan
from coyo11m_tfds.reading.ahead import Ahead
from coyo11m_tfds.reading.order import Order
from coyo11m_tfds.reading.row_plan import Block
from coyo11m_tfds.reading.row_reader import Batch, RowReader


def train_batches(
    reader: RowReader,
    order: Order,
    lanes: range,
    start_step: int,
    prefetch: int,
    stride: int = 1,
) -> Iterator[Batch]:
    """Some lanes' part of every `stride`-th batch from a step on, `prefetch` of them ready."""
    blocks = row_plan.train_blocks(order, lanes, start_step, stride)
    return Ahead(_read(reader, blocks), prefetch, 'rows')


def eval_batches(
    reader: RowReader,
    shard_lengths: np.ndarray,
    records: range,
    batch_size: int,
    num_batches: int,
    prefetch: int,
) -> Iterator[Batch]:
    """Records, counted over all shards, in so many full batches; rows of zeros fill them up."""
    blocks = row_plan.eval_blocks(shard_lengths, records.start, records.stop, batch_size)
    empty = reader.read(reader.find(0, *np.zeros((2, 0), np.int64)))
    read = itertools.chain(_read(reader, blocks), itertools.repeat(empty))
    full = (_fill_up(batch, batch_size) for batch in itertools.islice(read, num_batches))
    return Ahead(full, prefetch, 'rows')


def _read(reader: RowReader, blocks: Iterator[Block]) -> Iterator[Batch]:
    blocks = iter(blocks)
    block = next(blocks, None)
    if block is not None:
        for run in reader.prefetch(block.shard.ravel(), block.record.ravel()):
            reader.will_need(run)
    while block is not None:
        steps, size = block.shard.shape
        rows = reader.find(block.epoch, block.shard.ravel(), block.record.ravel())
        block = next(blocks, None)
        runs = [] if block is None else reader.prefetch(block.shard.ravel(), block.record.ravel())
        for step in range(steps):
            for run in runs[step::steps]:
                reader.will_need(run)
            yield reader.read(rows.part(slice(step * size, (step + 1) * size)))


def _fill_up(batch: Batch, size: int) -> Batch:
    """Puts rows of zeros, or of empty strings, after those of a batch."""

    def padded(x: np.ndarray) -> np.ndarray:
        shape = (size - len(x), *x.shape[1:])
        pad = np.full(shape, b'', object) if x.dtype == object else np.zeros(shape, x.dtype)
        return np.concatenate([x, pad])

    return {name: padded(x) if len(x) < size else x for name, x in batch.items()}
