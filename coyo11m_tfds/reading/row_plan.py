"""The planned order as blocks of rows: which record is where in the next batches.

for block in row_plan.train_blocks(order, lanes=range(16), start_step=1000):
    block.epoch, block.shard, block.record        # int64 (steps, local batch)
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from coyo11m_tfds.reading.order import Epoch, Order

# At least so many rows are planned together, so that NumPy's calls cost little for each.
_BLOCK_ROWS = 8192


class Block(NamedTuple):
    """Rows of consecutive batches of one process.

    Attributes:
        epoch: they are all of this one.
        shard, record: int64 `(steps, local batch)`.
    """

    epoch: int
    shard: np.ndarray
    record: np.ndarray


def train_blocks(
    order: Order, lanes: range, start_step: int, stride: int = 1, block_rows: int = 0
) -> Iterator[Block]:
    """Some lanes' part of every `stride`-th batch from a step on, without end.

    A block ends where windows end: their records lie in the same chunks. It has the fewest windows
    that make `block_rows` rows, or of 0 as many as cost little to plan.
    """
    epoch, step = order.locate(start_step)
    skip = 0  # batches before the next that is wanted
    windows = max(1, -(-(block_rows or _BLOCK_ROWS) // (order.window * len(lanes))))
    while True:
        plan = order.epoch(epoch)
        while step < plan.steps:
            end_window = step * order.lane_batch // order.window + windows
            end = min(plan.steps, max(step + 1, -(-end_window * order.window // order.lane_batch)))
            block = _block(plan, lanes, step, end - step)
            if skip < end - step:
                yield Block(plan.number, block.shard[skip::stride], block.record[skip::stride])
            skip = (skip - (end - step)) % stride
            step = end
        epoch, step = epoch + 1, 0


def _block(plan: Epoch, lanes: range, step: int, count: int) -> Block:
    parts = np.array([plan.lane_records(lane, step, count) for lane in lanes])
    # (lanes, 2, steps * lane_batch) to (2, steps, lanes * lane_batch)
    by_lane = parts.reshape(len(lanes), 2, count, -1)
    shard, record = by_lane.transpose(1, 2, 0, 3).reshape(2, count, -1)
    return Block(plan.number, shard, record)


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
                steps = max(1, len(number[part]) // batch)
                yield Block(0, shard[part].reshape(steps, -1), record[part].reshape(steps, -1))
