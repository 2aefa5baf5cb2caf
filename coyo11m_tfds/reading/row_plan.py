"""The planned order as blocks of rows: which record is where in the next batches.

for block in row_plan.train_blocks(order, lanes=range(16), batch_size=256, start=1000):
    block.epoch, block.shard, block.record        # int64 (steps, local batch)
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from coyo11m_tfds.reading.order import Order

# At least so many rows are planned together, so that NumPy's calls cost little for each.
_BLOCK_ROWS = 8192


class Block(NamedTuple):
    """Rows of consecutive batches of one process; int64 `(steps, local batch)`.

    Attributes:
        epoch: that each row is read in.
        shard, record: where it is.
    """

    epoch: np.ndarray
    shard: np.ndarray
    record: np.ndarray


def train_blocks(
    order: Order,
    lanes: range,
    batch_size: int,
    start: int,
    stride: int = 1,
    block_rows: int = 0,
) -> Iterator[Block]:
    """Some lanes' part of every `stride`-th batch, without end.

    A block ends where windows end: their records lie in the same chunks. It has the fewest windows
    that make `block_rows` rows, or of 0 as many as cost little to plan.

    Args:
        order: of the samples.
        lanes: that are read.
        batch_size: samples of a batch, of all lanes.
        start: samples of every lane before the first batch.
        stride: of W, batches 0, W, 2 W and so on after the start.
        block_rows: see above.
    """
    each = batch_size // order.settings.lanes
    windows = max(1, -(-(block_rows or _BLOCK_ROWS) // (order.window * len(lanes))))
    skip = 0  # batches before the next that is wanted
    while True:
        count = max(1, -(-(order.end_of_windows(start, windows) - start) // each))
        if skip < count:
            yield _block(order, lanes, start, each, range(skip, count, stride))
        skip = (skip - count) % stride
        start += count * each


def _block(order: Order, lanes: range, start: int, each: int, batches: range) -> Block:
    """Some of the batches after `start`, of `each` samples of every lane."""
    found = order.samples(lanes, start + batches.start * each, start + batches.stop * each)

    def rows(x: np.ndarray) -> np.ndarray:
        """From `(lanes, steps * each)` to `(steps, lanes * each)`, and of the steps some."""
        by_step = x.reshape(len(lanes), -1, each).transpose(1, 0, 2)
        return by_step[:: batches.step].reshape(len(batches), -1)

    epoch = np.broadcast_to(found.epoch, found.shard.shape)
    return Block(rows(epoch), rows(found.shard), rows(found.record))


def eval_blocks(shard_lengths: np.ndarray, begin: int, end: int, batch: int) -> Iterator[Block]:
    """Records `[begin, end)`, counted over all shards, in batches; the last may be short."""
    ends = np.cumsum(shard_lengths)
    each = max(1, _BLOCK_ROWS // batch) * batch
    for start in range(begin, end, each):
        number = np.arange(start, min(start + each, end))
        shard = np.searchsorted(ends, number, side='right')
        record = number - np.where(shard > 0, ends[shard - 1], 0)
        whole = len(number) // batch * batch
        for part in (slice(0, whole), slice(whole, None)):
            if len(number[part]):
                rows = [
                    x[part].reshape(max(1, len(number[part]) // batch), -1)
                    for x in (np.zeros_like(number), shard, record)
                ]
                yield Block(*rows)
