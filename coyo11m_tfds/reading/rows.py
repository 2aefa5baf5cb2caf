"""The engine `rows`: batches out of local, memory-mapped TFRecord shards, without TensorFlow.

    read = functools.partial(rows.read_rows, reader)
    blocks = row_plan.train_blocks(order, range(16), batch_size=256, start=1000)
    batch = next(read(blocks))

There are no windows in memory: the plan says which records come, and each batch is gathered out of
the page cache when it is due. What the following batches need is asked for ahead, so that a disk
reads it meanwhile.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from coyo11m_tfds.reading.counter import ReadCounter
from coyo11m_tfds.reading.row_plan import Block
from coyo11m_tfds.reading.row_reader import Batch, RowReader

# Gives the batches of blocks of rows.
Read = Callable[[Iterator[Block]], Iterator[Batch]]


def fill_up(batches: Iterator[Batch], blank: Batch, size: int, count: int) -> Iterator[Batch]:
    """`count` batches of `size` rows, filled up with rows of zeros; `blank` is one without rows."""
    enough = itertools.chain(batches, itertools.repeat(blank))
    return (_filled_up(batch, size) for batch in itertools.islice(enough, count))


def read_rows(
    reader: RowReader, blocks: Iterator[Block], counter: ReadCounter | None = None
) -> Iterator[Batch]:
    """The batches of all blocks, one after the other; `counter` is told of each."""
    blocks = iter(blocks)
    block = next(blocks, None)
    if block is not None:
        for run in reader.prefetch(block.shard.ravel(), block.record.ravel()):
            reader.will_need(run)
    while block is not None:
        steps, size = block.shard.shape
        rows = reader.find(*(x.ravel() for x in block))
        block = next(blocks, None)
        runs = [] if block is None else reader.prefetch(block.shard.ravel(), block.record.ravel())
        for step in range(steps):
            for run in runs[step::steps]:
                reader.will_need(run)
            some = rows.part(slice(step * size, (step + 1) * size))
            batch = reader.read(some, reader.check(some))
            if counter:
                counter.add_bytes(sum(x.nbytes for x in batch.values()))
            yield batch


def _filled_up(batch: Batch, size: int) -> Batch:
    """Puts rows of zeros, or of empty strings, after those of a batch."""

    def padded(x: np.ndarray) -> np.ndarray:
        shape = (size - len(x), *x.shape[1:])
        pad = np.full(shape, b'', object) if x.dtype == object else np.zeros(shape, x.dtype)
        return np.concatenate([x, pad])

    return {name: padded(x) if len(x) < size else x for name, x in batch.items()}
