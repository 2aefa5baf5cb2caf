"""The order of the training samples: a planned sequence, computed with NumPy.

Sample k of lane l is a pure function of `(seed, l, k)` and the lengths of the shards, which
docs/design.md states as contract 2, with the same letters. A *lane* is one of the streams that give
each batch an equal share, and reads a stretch of each epoch. If a condition keeps only some
records, the order is that of a data set with only these.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.keyed_random import Permutation, derive, splitmix64
from coyo11m_tfds.process import arguments
from coyo11m_tfds.process.errors import FieldError, at_least
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.sampling.filters import KeptRecords

# The first number hashed after the seed, one for each purpose.
CHUNKS, WINDOWS, CROP, DROP, TEXT, ROTATION, NOISE = range(7)

# Fewest rows to plan together, so that the cost of NumPy's calls is small for each.
_BLOCK_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class OrderSettings:
    """The settings that decide the order of a data set's samples, see `train_batches`."""

    seed: int
    chunk: int = 64
    lanes: int = 16
    window: int = 1024

    def __post_init__(self):
        arguments.convert_fields(self)
        check_chunk(self.chunk)
        if self.window < 1:
            raise FieldError('window', self.window, 'expected at least 1; window=1024 works')
        if self.lanes < 1:
            raise FieldError('lanes', self.lanes, 'expected at least 1; lanes=16 works')


class RecordBlock(NamedTuple):
    """Records to read; all arrays are int64 `(lanes, samples)`, or `(steps, batch)`."""

    epoch: np.ndarray
    shard: np.ndarray
    record: np.ndarray


class Order:
    """The sequence of the training samples.

    With 7.6 million records in 80 shards, planning an epoch takes 0.7 ms, and 64 batches of 256
    take 2.2 ms (one core, median of 30). The cost grows with the number of shards: the first
    samples of 10^9 records in 190,000 shards take 0.03 s and 16 MB.

    Attributes:
        shard_lengths: Number of kept records in each shard, int64 `(num_shards,)`.
        kept: The kept records; None for all.
        num_records: N, the number of kept records in all shards.
        lane_length: m, the number of samples of a lane in an epoch.
        window: Records shuffled together, at most `lane_length`.
    """

    def __init__(
        self,
        shard_lengths: Sequence[int] | np.ndarray,
        settings: OrderSettings,
        kept: KeptRecords | None = None,
    ):
        if kept is not None:
            shard_lengths = kept.lengths
        self.shard_lengths = np.asarray(shard_lengths, np.int64)
        self.kept = kept
        self.settings = settings
        self.num_records = int(self.shard_lengths.sum())
        self.lane_length = self.num_records // settings.lanes
        if not self.num_records:
            raise ValueError(
                f'there are no records in {format_count(len(self.shard_lengths), "shard")}'
            )
        if not self.lane_length:
            lanes = settings.lanes
            fitting_lanes = max(n for n in range(1, self.num_records + 1) if lanes % n == 0)
            raise ValueError(
                f'{format_count(self.num_records, "record is", "records are")} fewer than '
                f'lanes={lanes}; lanes={fitting_lanes} works'
            )
        self.window = min(settings.window, self.lane_length)
        # Of each shard, the number of its last chunk and one more: chunks do not span shards.
        num_chunks = -(-self.shard_lengths // settings.chunk)  # rounded up
        self._chunk_ends = np.cumsum(num_chunks)
        self._windows_per_epoch = -(-self.lane_length // self.window)  # rounded up
        # Threads that read different lanes need the same epochs at about the same time.
        make_stream = functools.partial(
            _EpochStream, self.shard_lengths, self._chunk_ends, settings
        )
        self._epoch_stream = functools.lru_cache(maxsize=4)(make_stream)

    def locate(self, sample: int) -> tuple[int, int]:
        """Returns the epoch of every lane's sample `sample`, and its position in `[0, m)`."""
        at_least(0).check('sample', sample)
        return divmod(sample, self.lane_length)

    def samples(self, lanes: range, begin: int, end: int) -> RecordBlock:
        """Returns the samples `[begin, end)` of some lanes, over any number of epochs."""
        first_epoch_begin = begin - begin % self.lane_length
        later_epoch_begins = range(first_epoch_begin, end, self.lane_length)[1:]
        shards = []
        records = []
        # From each begin of an epoch to the next: every epoch has a stream of its own.
        bounds = [begin]
        bounds += later_epoch_begins
        bounds.append(end)
        for first, last in itertools.pairwise(bounds):
            shard, record = self._samples_of_epoch(lanes, first, last)
            shards.append(shard)
            records.append(record)
        shard = np.concatenate(shards, axis=1)
        epoch = np.broadcast_to(np.arange(begin, end) // self.lane_length, shard.shape)
        return RecordBlock(epoch, shard, np.concatenate(records, axis=1))

    def end_of_windows(self, sample: int, count: int) -> int:
        """Returns the end of `count` windows of every lane; the first one holds `sample`."""
        epoch, position = self.locate(sample)
        # Windows are counted over all epochs: the last one of an epoch may be shorter.
        windows_before = epoch * self._windows_per_epoch + position // self.window
        end_epoch, end_window = divmod(windows_before + count, self._windows_per_epoch)
        return end_epoch * self.lane_length + end_window * self.window

    def _samples_of_epoch(
        self, lanes: range, begin: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns shards and records, `(lanes, samples)`, of samples that are all of one epoch."""
        epoch, first = self.locate(begin)
        last = first + end - begin
        window = np.arange(first // self.window, -(-last // self.window))
        lane = np.array(lanes)[:, None]
        # Positions in the lane: that of the window, and the permuted one in the window.
        in_window = self._permute_windows(epoch, lane, window)
        position = window[:, None] * self.window + in_window
        # Windows are permuted whole, also if only some of their samples are needed.
        skip = first - window[0] * self.window
        position = position.reshape(len(lanes), -1)[:, skip : skip + end - begin]
        # A lane owns a stretch of the stream of all records.
        position_in_stream = lane * self.lane_length + position
        shard, record = self._epoch_stream(epoch).locate(position_in_stream)
        if self.kept is not None:
            record = self.kept.locate(shard, record)
        return shard, record

    def _permute_windows(self, epoch: int, lane: np.ndarray, window: np.ndarray) -> np.ndarray:
        """Returns the permutation of each window; int64 `(lanes, windows, self.window)`."""
        # Of these numbers alone, so that reading can begin with any window.
        keys = derive(self.settings.seed, WINDOWS, epoch, lane, window)[..., None]
        position = np.arange(self.window)
        # All hashes differ, so every sorting algorithm gives the same permutation.
        hashes = splitmix64(keys ^ position.astype(np.uint64))
        # The last window of a lane may be shorter: positions beyond its end sort to the end.
        window_length = self.lane_length - window[:, None] * self.window
        is_in_window = position < window_length
        hashes = np.where(is_in_window, hashes, np.uint64(2**64 - 1))
        return np.argsort(hashes, axis=-1)


class _EpochStream:
    """All records of an epoch, one after the other: its chunks in an order of their own.

    The record at any position is computed without a table of all chunks.
    """

    def __init__(
        self, lengths: np.ndarray, chunk_ends: np.ndarray, settings: OrderSettings, epoch: int
    ):
        self._chunk = settings.chunk
        self._chunk_ends = chunk_ends
        self._length = int(lengths.sum())
        self._offset = int(derive(settings.seed, ROTATION, epoch)) % self._length
        key = int(derive(settings.seed, CHUNKS, epoch))
        self._permutation = Permutation(int(chunk_ends[-1]), key)
        # A chunk that is not full shifts all chunks that follow it. There is at most one in a
        # shard, and the inverse of the permutation gives their positions. So the chunk at any
        # position can be computed without a walk over the chunks before it.
        missing = -lengths % settings.chunk
        is_short = missing > 0
        last_chunks = chunk_ends[is_short] - 1
        positions = self._permutation.invert(last_chunks)
        by_position = np.argsort(positions)
        missing_by_position = missing[is_short][by_position]
        # By number of short chunks: how many records are missing in all of them.
        self._missing = np.concatenate([[0], np.cumsum(missing_by_position)])
        # The position in the stream at which each short chunk ends.
        ends_if_full = (positions[by_position] + 1) * settings.chunk
        self._short_ends = ends_if_full - self._missing[1:]

    def locate(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shard and the record at each position; int64, same shape."""
        # Each epoch begins elsewhere, so that the records that do not fill its lanes are others.
        rotated = (position + self._offset) % self._length
        # As if all chunks were full: then the chunk of a position is a division.
        num_short = np.searchsorted(self._short_ends, rotated, side='right')
        position_if_full = rotated + self._missing[num_short]
        index, index_in_chunk = np.divmod(position_if_full, self._chunk)
        # Each chunk is looked up once, not once for each of its records.
        index, inverse = np.unique(index, return_inverse=True)
        inverse = inverse.reshape(position.shape)
        # From the place in the stream to the number of the chunk in the split.
        chunk = self._permutation.apply(index)
        shard = np.searchsorted(self._chunk_ends, chunk, side='right')
        # That of the shard: where the shard before it ends.
        first_chunk = np.where(shard > 0, self._chunk_ends[shard - 1], 0)
        first_record = (chunk - first_chunk) * self._chunk
        return shard[inverse], first_record[inverse] + index_in_chunk


def check_chunk(chunk: int) -> None:
    """Raises a ValueError for a chunk that does not begin and end where the index has offsets."""
    if chunk < 1 or chunk % schema.CHUNK_STRIDE:
        num_strides = max(1, round(chunk / schema.CHUNK_STRIDE))
        nearest = num_strides * schema.CHUNK_STRIDE
        stride = f'{schema.CHUNK_STRIDE}, the stride of the chunk index'
        raise FieldError('chunk', chunk, f'expected a multiple of {stride}; chunk={nearest} works')


def sample_crops(seed: int, epoch: np.ndarray | int, keys: np.ndarray, count: int) -> np.ndarray:
    """Returns the number of the crop of each key, in `[0, count)`; int64, same shape as `keys`."""
    # Crops are few, so the remainders of 31 bits are as frequent as each other.
    hashes = derive(seed, CROP, epoch, keys) >> np.uint64(33)
    return hashes.astype(np.int64) % count


def sample_drops(
    seed: int, epoch: np.ndarray | int, keys: np.ndarray, probability: float
) -> np.ndarray:
    """Returns True for keys whose caption is dropped; bool, same shape as `keys`."""
    # 53 bits, which a float holds exactly: a probability of 1 drops all, and one of 0 none.
    hashes = derive(seed, DROP, epoch, keys) >> np.uint64(11)
    return hashes.astype(np.int64) < int(probability * 2**53)


def sample_noise_seeds(seed: int, epoch: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Returns a seed for the noise of each key; uint32, same shape as `keys`."""
    hashes = derive(seed, NOISE, epoch, keys) >> np.uint64(32)
    return hashes.astype(np.uint32)


def sample_texts(
    seed: int, epoch: np.ndarray | int, keys: np.ndarray, weights: Sequence[float]
) -> np.ndarray:
    """Returns which text each key gets, in shares by weight; int64, same shape as `keys`."""
    sums = list(itertools.accumulate(weights))
    total = sums[-1]
    # Each text has a range of the numbers of 53 bits, which a float holds exactly.
    ends = np.array([int(x / total * 2**53) for x in sums], np.int64)
    hashes = derive(seed, TEXT, epoch, keys) >> np.uint64(11)
    # The last range has no end, whatever rounding makes of it.
    return np.searchsorted(ends[:-1], hashes.astype(np.int64), side='right')


def train_blocks(
    order: Order,
    lanes: range,
    per_lane: int,
    start: int,
    numbers: Iterator[int],
    block_rows: int = 0,
) -> Iterator[RecordBlock]:
    """Yields the records of some lanes in some of the batches after sample `start`.

    Args:
        per_lane: Samples of a lane in each batch.
        numbers: The numbers of these batches, ascending; batch 0 begins with sample `start`.
        block_rows: A block has the fewest windows that hold so many rows; with 0, as many as cost
            little.
    """
    rows_per_window = order.window * len(lanes)
    least_rows = block_rows or _BLOCK_ROWS
    windows = max(1, -(-least_rows // rows_per_window))  # rounded up
    number = next(numbers)
    first = 0  # number of the first batch of a block
    while True:
        # A block ends where windows end, because the records of a window lie in the same chunks.
        sample = start + first * per_lane
        num_samples = order.end_of_windows(sample, windows) - sample
        # Rounded up, so that the last batch is whole; it may need some of the next window.
        end = first + max(1, -(-num_samples // per_lane))
        in_block = []
        while number < end:
            in_block.append(number)
            number = next(numbers)
        # Large strides leave out whole blocks.
        if in_block:
            yield _train_block(order, lanes, start, per_lane, np.array(in_block))
        first = end


def _train_block(
    order: Order, lanes: range, start: int, per_lane: int, numbers: np.ndarray
) -> RecordBlock:
    """Returns the records of some batches, `(batches, rows)`, with the lanes in their order.

    The batches have ascending `numbers`, counted from sample `start` of each lane.
    """
    # With a stride, other workers read the batches between: their samples are planned, too, and
    # left out.
    first = int(numbers[0])
    end = int(numbers[-1]) + 1
    samples = order.samples(lanes, start + first * per_lane, start + end * per_lane)

    def by_batch(x: np.ndarray) -> np.ndarray:
        """Returns `(lanes, all batches * per_lane)` as `(batches, lanes * per_lane)`."""
        all_batches = x.reshape(len(lanes), -1, per_lane).transpose(1, 0, 2)
        batches = all_batches[numbers - first]
        return batches.reshape(len(numbers), -1)

    return RecordBlock(*map(by_batch, samples))


def eval_blocks(
    shard_lengths: np.ndarray, begin: int, end: int, batch: int, kept: KeptRecords | None = None
) -> Iterator[RecordBlock]:
    """Yields the records `[begin, end)` of all shards in batches; the last may be short."""
    shard_ends = np.cumsum(shard_lengths)
    num_whole_batches = (end - begin) // batch
    whole_end = begin + num_whole_batches * batch
    # Whole batches, as many as it takes for planning to cost little.
    block_rows = max(1, _BLOCK_ROWS // batch) * batch
    # The short batch is a block of its own: the arrays of a block have rows of equal lengths.
    starts = list(range(begin, whole_end, block_rows))
    if whole_end < end:
        starts.append(whole_end)
    for start in starts:
        stop = end if start == whole_end else min(start + block_rows, whole_end)
        batch_rows = min(batch, stop - start)
        number = np.arange(start, stop).reshape(-1, batch_rows)
        shard = np.searchsorted(shard_ends, number, side='right')
        # A shard begins where the one before it ends.
        shard_begin = np.where(shard > 0, shard_ends[shard - 1], 0)
        record = number - shard_begin
        if kept is not None:
            record = kept.locate(shard, record)
        # Evaluation reads one epoch.
        yield RecordBlock(np.zeros_like(number), shard, record)
