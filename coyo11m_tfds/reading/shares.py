"""Which part of the batches one of several processes gets.

shares.check_share(256, process_index=1, process_count=4, lanes=16)
shares.own_lanes(16, 1, 4)              # range(4, 8)
"""

import math
import os

from coyo11m_tfds.dataset.stored_dataset import IndexedSplit


def check_dropout(caption_dropout: float) -> None:
    """Raises a ValueError unless it is in [0, 1]."""
    if not 0 <= caption_dropout <= 1:
        raise ValueError(f'caption_dropout={caption_dropout} is not in [0, 1]')


def check_share(
    batch_size: int, process_index: int, process_count: int, lanes: int | None = None
) -> None:
    """Checks that processes get equal parts of a batch, and of the lanes that it is taken from.

    Raises:
        ValueError: they do not; the message names a batch size and a number of lanes that work.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f'process_index={process_index} is not in [0, {process_count})')
    shared = process_count if lanes is None else lanes
    if batch_size > 0 and shared > 0 and not (batch_size % shared or shared % process_count):
        return
    working, working_lanes = nearest_shares(batch_size, lanes or 1, process_count)
    asked, advice = f'batch_size={batch_size}', f'batch_size={working}'
    if lanes is not None:
        asked, advice = f'{asked} with lanes={lanes}', f'{advice} with lanes={working_lanes}'
    raise ValueError(
        f'{asked} cannot be shared by {process_count} processes equally; {advice} works'
    )


def nearest_shares(
    batch_size: int, lanes: int, process_count: int, device_count: int = 1
) -> tuple[int, int]:
    """The nearest batch size and number of lanes that go together.

    Processes and devices get equal parts of the batch, processes equal numbers of its lanes.
    """
    multiple = math.lcm(process_count, device_count)
    working = max(1, round(batch_size / multiple)) * multiple
    shared = [n for n in range(process_count, working + 1, process_count) if working % n == 0]
    return working, min(shared, key=lambda n: abs(n - lanes))


def own_lanes(lanes: int, process_index: int, process_count: int) -> range:
    """The lanes of one process."""
    each = lanes // process_count
    return range(process_index * each, (process_index + 1) * each)


def eval_share(
    data_dir: str | os.PathLike[str],
    name: str,
    split: IndexedSplit,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> tuple[range, int]:
    """The records of a split that one process evaluates, and how many batches all of them have."""
    size = int(split.index.shard_lengths.sum())
    if not size:
        raise ValueError(f'{data_dir}: split {name!r} is empty')
    num_batches = -(-size // batch_size)
    each = num_batches * (batch_size // process_count)
    begin = min(size, process_index * each)
    return range(begin, min(size, begin + each)), num_batches
