"""The order of the training samples: a planned sequence, computed with NumPy.

Sample k of lane l is a pure function of `(seed, l, k)` and the lengths of the shards, which
docs/design.md states as contract 2, with the same letters. If a condition keeps only some records,
the order is that of a data set with only these.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.keyed_random import Permutation, derive, splitmix64
from coyo11m_tfds.reading import arguments
from coyo11m_tfds.reading.filters import Kept

# The first number hashed after the seed, one for each purpose.
CHUNKS, WINDOWS, CROP, DROP, TEXT, ROTATION = range(6)

# Fewest rows to plan together, so that NumPy's calls cost little for each.
_BLOCK_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class OrderSettings:
    """The settings that decide the order of a data set's samples.

    `input_pipeline.train_batches` describes the fields. Raises a ValueError, which names a value
    that works, if one is out of its range or not a whole number.
    """

    seed: int
    chunk: int = 64
    lanes: int = 16
    window: int = 1024

    def __post_init__(self):
        arguments.convert_fields(self)
        check_chunk(self.chunk)
        if self.window < 1:
            raise ValueError(f'window={self.window} must be at least 1; window=1024 works')
        if self.lanes < 1:
            raise ValueError(f'lanes={self.lanes} must be at least 1; lanes=16 works')


class Samples(NamedTuple):
    """Consecutive samples of some lanes."""

    epoch: np.ndarray  # of the i-th sample of all lanes, int64 (n,)
    shard: np.ndarray  # int64 (lanes, n)
    record: np.ndarray  # int64 (lanes, n)


class Order:
    """The sequence of the training samples.

    With 7.6 million records in 80 shards, planning an epoch takes 0.7 ms, and 64 batches of 256
    take 2.2 ms (one core, median of 30). The cost grows with the number of shards: the first
    samples of 10^9 records in 190,000 shards take 0.03 s and 16 MB.

    Attributes:
        shard_lengths: Number of kept records in each shard, int64 `(num_shards,)`.
        settings: Settings of the order.
        kept: The kept records; None for all.
        num_records: N, the number of kept records in all shards.
        lane_length: m, the number of samples of a lane in an epoch.
        window: Records shuffled together, at most `lane_length`.
    """

    def __init__(
        self,
        shard_lengths: Sequence[int] | np.ndarray,
        settings: OrderSettings,
        kept: Kept | None = None,
    ):
        """Takes the number of records in each shard, and the kept records; None for all.

        Raises a ValueError if there are fewer records than lanes; it names a number that works.
        """
        self.shard_lengths = np.asarray(shard_lengths if kept is None else kept.lengths, np.int64)
        self.kept = kept
        self.settings = settings
        self.num_records = int(self.shard_lengths.sum())
        self.lane_length = self.num_records // settings.lanes
        if not self.num_records:
            raise ValueError(f'there are no records in {len(self.shard_lengths)} shards')
        if not self.lane_length:
            lanes = settings.lanes
            fitting = max(n for n in range(1, self.num_records + 1) if lanes % n == 0)
            raise ValueError(
                f'{self.num_records} records are fewer than lanes={lanes}; lanes={fitting} works'
            )
        self.window = min(settings.window, self.lane_length)
        self._chunk_ends = np.cumsum(-(-self.shard_lengths // settings.chunk))
        self._windows_an_epoch = -(-self.lane_length // self.window)
        # Lanes that are read apart ask for the same epochs at about the same time.
        make = functools.partial(_Stream, self.shard_lengths, self._chunk_ends, settings)
        self._stream = functools.lru_cache(maxsize=4)(make)

    def locate(self, sample: int) -> tuple[int, int]:
        """Returns the epoch of every lane's sample number `sample`, and its position in `[0, m)`.

        Raises a ValueError for a negative number.
        """
        if sample < 0:
            raise ValueError(f'sample={sample}: expected at least 0')
        return divmod(sample, self.lane_length)

    def samples(self, lanes: range, begin: int, end: int) -> Samples:
        """Returns the samples `[begin, end)` of some lanes, over any number of epochs."""
        cuts = [begin, *range(begin - begin % self.lane_length, end, self.lane_length)[1:], end]
        parts = [self._in_epoch(lanes, *cut) for cut in itertools.pairwise(cuts)]
        shard, record = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        return Samples(np.arange(begin, end) // self.lane_length, shard, record)

    def end_of_windows(self, sample: int, count: int) -> int:
        """Returns the end of `count` windows of every lane; the first one holds `sample`."""
        epoch, place = self.locate(sample)
        number = epoch * self._windows_an_epoch + place // self.window + count
        epoch, window = divmod(number, self._windows_an_epoch)
        return epoch * self.lane_length + window * self.window

    def _in_epoch(self, lanes: range, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Shards and records of samples that are all of one epoch."""
        epoch, first = self.locate(begin)
        window = np.arange(first // self.window, -(-(first + end - begin) // self.window))
        lane = np.array(lanes)[:, None]
        place = window[:, None] * self.window + self._permuted(epoch, lane, window)
        skipped = first - window[0] * self.window
        place = place.reshape(len(lanes), -1)[:, skipped : skipped + end - begin]
        shard, number = self._stream(epoch).find(lane * self.lane_length + place)
        return shard, number if self.kept is None else self.kept.find(shard, number)

    def _permuted(self, epoch: int, lane: np.ndarray, window: np.ndarray) -> np.ndarray:
        """The permutation of each window of each lane; int64 `(lanes, windows, self.window)`.

        Records are sorted by their hashes. All hashes differ, so every sorting algorithm gives the
        same permutation. The last window of a lane is shorter: its missing records sort to the end.
        """
        keys = derive(self.settings.seed, WINDOWS, epoch, lane, window)[..., None]
        place = np.arange(self.window)
        size = self.lane_length - window[:, None] * self.window
        hashes = splitmix64(keys ^ place.astype(np.uint64))
        return np.argsort(np.where(place < size, hashes, np.uint64(2**64 - 1)), axis=-1)


class _Stream:
    """All records of an epoch in a row.

    A chunk that is not full shifts all that follow it. The inverse of the permutation tells where
    these chunks (at most one a shard) are, so that any place is found without a walk.
    """

    def __init__(
        self, lengths: np.ndarray, chunk_ends: np.ndarray, settings: OrderSettings, epoch: int
    ):
        self._chunk, self._chunk_ends = settings.chunk, chunk_ends
        self._length = int(lengths.sum())
        self._offset = int(derive(settings.seed, ROTATION, epoch)) % self._length
        key = int(derive(settings.seed, CHUNKS, epoch))
        self._permutation = Permutation(int(chunk_ends[-1]), key)
        lacking = -lengths % settings.chunk
        at = self._permutation.invert(chunk_ends[lacking > 0] - 1)
        by_place = np.argsort(at)
        self._lacking = np.concatenate([[0], np.cumsum(lacking[lacking > 0][by_place])])
        self._short_ends = (at[by_place] + 1) * settings.chunk - self._lacking[1:]

    def find(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard and the record at each place; int64, same shape."""
        rotated = (place + self._offset) % self._length
        before = np.searchsorted(self._short_ends, rotated, side='right')
        index, within = np.divmod(rotated + self._lacking[before], self._chunk)
        # Each chunk is looked up once, not once for each of its records.
        index, of_chunk = np.unique(index, return_inverse=True)
        of_chunk = of_chunk.reshape(place.shape)
        chunk = self._permutation.apply(index)
        shard = np.searchsorted(self._chunk_ends, chunk, side='right')
        first_chunk = np.where(shard > 0, self._chunk_ends[shard - 1], 0)
        first = (chunk - first_chunk) * self._chunk
        return shard[of_chunk], first[of_chunk] + within


def check_chunk(chunk: int) -> None:
    """Raises a ValueError for a chunk that does not begin and end where the index has offsets."""
    if chunk < 1 or chunk % schema.CHUNK_STRIDE:
        nearest = max(1, round(chunk / schema.CHUNK_STRIDE)) * schema.CHUNK_STRIDE
        raise ValueError(
            f'chunk={chunk} is not a multiple of {schema.CHUNK_STRIDE}, the stride of the chunk '
            f'index; chunk={nearest} works'
        )


def sample_crops(seed: int, epoch: np.ndarray | int, keys: np.ndarray, count: int) -> np.ndarray:
    """Returns the number of the crop of each key, in `[0, count)`; int64, same shape as `keys`.

    `epoch` is int64 of the same shape, or a scalar.
    """
    return (derive(seed, CROP, epoch, keys) >> np.uint64(33)).astype(np.int64) % count


def sample_drops(
    seed: int, epoch: np.ndarray | int, keys: np.ndarray, probability: float
) -> np.ndarray:
    """Returns True for keys whose caption is dropped; bool, same shape as `keys`."""
    hashed = derive(seed, DROP, epoch, keys) >> np.uint64(11)
    return hashed.astype(np.int64) < int(probability * 2**53)


def sample_texts(
    seed: int, epoch: np.ndarray | int, keys: np.ndarray, weights: Sequence[float]
) -> np.ndarray:
    """Returns which text each key gets, from 0; int64, same shape as `keys`.

    The shares of the texts are proportional to `weights`. `epoch` is as in `sample_crops`.
    """
    sums = list(itertools.accumulate(weights))
    ends = np.array([int(x / sums[-1] * 2**53) for x in sums], np.int64)
    hashed = derive(seed, TEXT, epoch, keys) >> np.uint64(11)
    return np.searchsorted(ends[:-1], hashed.astype(np.int64), side='right')


def check_share(
    batch_size: int, process_index: int, process_count: int, lanes: int | None = None
) -> None:
    """Checks that all processes get equal parts of a batch and equal numbers of lanes.

    Raises a ValueError otherwise, which names a batch size and a number of lanes that work.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f'process_index={process_index} is not in [0, {process_count})')
    shared = process_count if lanes is None else lanes
    if batch_size > 0 and shared > 0 and not (batch_size % shared or shared % process_count):
        return
    working = max(1, round(batch_size / process_count)) * process_count
    asked, advice = f'batch_size={batch_size}', f'batch_size={working}'
    if lanes is not None:
        fitting = [n for n in range(process_count, working + 1, process_count) if working % n == 0]
        working_lanes = min(fitting, key=lambda n: abs(n - lanes))
        asked, advice = f'{asked} with lanes={lanes}', f'{advice} with lanes={working_lanes}'
    raise ValueError(
        f'{asked} cannot be shared by {process_count} processes equally; {advice} works'
    )


def own_lanes(lanes: int, process_index: int, process_count: int) -> range:
    """Returns the lanes of one process."""
    each = lanes // process_count
    return range(process_index * each, (process_index + 1) * each)


class Block(NamedTuple):
    """The rows of one process's consecutive batches; all arrays are int64 `(steps, batch)`."""

    epoch: np.ndarray
    shard: np.ndarray
    record: np.ndarray


def train_blocks(
    order: Order, lanes: range, each: int, start: int, stride: int = 1, block_rows: int = 0
) -> Iterator[Block]:
    """Yields some lanes' part of every `stride`-th batch, without end.

    Only this function asks an `Order` for the samples of a batch. A block ends where windows end,
    because the records of a window lie in the same chunks. It has the fewest windows that hold
    `block_rows` rows; with 0, as many as cost little to plan. A batch takes `each` samples of every
    lane, and the first one those after `start`.
    """
    windows = max(1, -(-(block_rows or _BLOCK_ROWS) // (order.window * len(lanes))))
    skip = 0  # batches before the next that is wanted
    while True:
        count = max(1, -(-(order.end_of_windows(start, windows) - start) // each))
        if skip < count:
            yield _train_block(order, lanes, start, each, range(skip, count, stride))
        skip = (skip - count) % stride
        start += count * each


def _train_block(order: Order, lanes: range, start: int, each: int, batches: range) -> Block:
    """Returns the block of some batches after `start`."""
    found = order.samples(lanes, start + batches.start * each, start + batches.stop * each)

    def rows(x: np.ndarray) -> np.ndarray:
        """Maps `(lanes, steps * each)` to `(steps, lanes * each)`, for some of the steps."""
        by_step = x.reshape(len(lanes), -1, each).transpose(1, 0, 2)
        return by_step[:: batches.step].reshape(len(batches), -1)

    epoch = np.broadcast_to(found.epoch, found.shard.shape)
    return Block(rows(epoch), rows(found.shard), rows(found.record))


def eval_blocks(
    shard_lengths: np.ndarray, begin: int, end: int, batch: int, kept: Kept | None = None
) -> Iterator[Block]:
    """Yields the records `[begin, end)` of all shards in batches; the last may be short.

    With `kept`, `begin` and `end` count kept records, and `shard_lengths` is `kept.lengths`.
    """
    ends = np.cumsum(shard_lengths)
    whole = begin + (end - begin) // batch * batch
    each = max(1, _BLOCK_ROWS // batch) * batch
    for start, stop in [*itertools.pairwise([*range(begin, whole, each), whole]), (whole, end)]:
        if start < stop:
            number = np.arange(start, stop).reshape(-1, min(batch, stop - start))
            shard = np.searchsorted(ends, number, side='right')
            record = number - np.where(shard > 0, ends[shard - 1], 0)
            if kept is not None:
                record = kept.find(shard, record)
            yield Block(np.zeros_like(number), shard, record)
