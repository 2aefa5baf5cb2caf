"""Which record comes when: the planned order of the training samples, in NumPy alone.

    order = Order(shard_lengths=(5007, 4801, 5200), seed=0, batch_size=256)
    order.locate(1000)            # (epoch, step in the epoch)
    order.epoch(0).steps          # steps in the first epoch
    order.batch_records(1000)     # shards and records of global batch 1000

The order is a pure function of `(seed, step)` and the lengths of the shards:

1. A chunk is a run of at most C consecutive records of one shard.
2. Epoch e visits the chunks in a permutation drawn from `(seed, e)`; the i-th goes to lane i mod L.
3. Within a lane, each window of W records is permuted by `(seed, e, lane, window)`.
4. Global batch s takes the next B/L records of every lane, in lane order.
5. Which crop is taken, which of several texts, and whether the text is dropped come from hashes of
   `(seed, e, key)`.

An epoch ends for all lanes with the shortest one; what the others have left over is a different,
random tail each time. Any step is found by computing where it is: a lane that starts there reads
less than W + C records that it does not need.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.keyed_random import Permutation, derive, splitmix64

# The first number hashed after the seed, one for each purpose.
CHUNKS, WINDOWS, CROP, DROP, TEXT = range(5)


class Reads(NamedTuple):
    """Runs of records to read, one after the other; int64 arrays of equal length.

    A run starts at record `first` of its shard, where the chunk index knows the offset; its first
    `skip` records are thrown away, the next `count` kept, and `pad` empty ones put after them.
    """

    epoch: np.ndarray
    shard: np.ndarray
    first: np.ndarray
    skip: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # instead of the method of tuples
    pad: np.ndarray


def _reads(epoch: int, shard: np.ndarray, begin: np.ndarray, count: np.ndarray) -> Reads:
    """Reads of `count` records from record `begin`, which need not be one that the index knows."""
    skip = begin % schema.CHUNK_STRIDE
    zeros = np.zeros_like(begin)
    return Reads(zeros + epoch, shard, begin - skip, skip, count, zeros)


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    """The order of the training samples.

        order = Order((5007, 4801, 5200), seed=0, batch_size=256)
        order.locate(1000)            # (epoch, step in the epoch)
        order.epoch(0).steps          # steps in the first epoch
        order.batch_records(1000)     # shards and records of global batch 1000

    Only the number of shards counts: planning 10^9 records in 190,000 shards takes 0.1 s and 34 MB
    until any step's first reads are known.

    Raises:
        ValueError: for settings that do not fit together, naming some that do.
    """

    shard_lengths: np.ndarray  # records in each shard; any sequence becomes int64
    seed: int
    batch_size: int  # records in a global batch
    chunk: int = 64  # records read together
    lanes: int = 16  # streams that every batch takes an equal part of
    window: int = 1024  # records shuffled together

    def __post_init__(self):
        lengths = np.asarray(self.shard_lengths, np.int64)
        object.__setattr__(self, 'shard_lengths', lengths)
        self._check_settings()
        self._check_enough_records()
        # A window longer than a lane is the lane: the order stays the same, and less is padded.
        longest_lane = -(-self.num_chunks // self.lanes) * self.chunk
        object.__setattr__(self, 'window', min(self.window, longest_lane))

    def _check_settings(self) -> None:
        check_chunk(self.chunk)
        if self.window < 1:
            raise ValueError(f'window={self.window} must be at least 1; window=1024 works')
        if self.batch_size < 1 or self.lanes < 1 or self.batch_size % self.lanes:
            working = divisors(self.batch_size) or [1]
            nearest = min(working, key=lambda d: abs(d - self.lanes))
            raise ValueError(
                f'lanes={self.lanes} does not divide batch_size={self.batch_size}; '
                f'batch_size={max(1, self.batch_size)} with lanes={nearest} works'
            )

    def _check_enough_records(self) -> None:
        if not self.shard_lengths.sum():
            raise ValueError(f'there are no records in {len(self.shard_lengths)} shards')
        if self._fewest_in_a_lane(self.chunk, self.lanes) >= self.lane_batch:
            return
        lanes = [d for d in reversed(divisors(self.batch_size)) if d <= self.lanes]
        for lane_count, chunk in itertools.product(lanes, (self.chunk, schema.CHUNK_STRIDE)):
            if self._fewest_in_a_lane(chunk, lane_count) >= self.batch_size // lane_count:
                advice = f'lanes={lane_count}, chunk={chunk} works'
                break
        else:
            advice = f'a batch_size of at most {self.shard_lengths.sum()} with lanes=1 works'
        raise ValueError(
            f'{self.shard_lengths.sum()} records are too few for '
            f'batch_size={self.batch_size}, lanes={self.lanes}, chunk={self.chunk}: each lane '
            f'must hold at least {self.lane_batch} records; {advice}'
        )

    def _fewest_in_a_lane(self, chunk: int, lanes: int) -> int:
        """The fewest records that any permutation of the chunks can leave a lane with."""
        short = np.sort(self.shard_lengths % chunk)
        short = short[short > 0]
        chunks = (int((-(-self.shard_lengths // chunk)).sum())) // lanes
        return int(short[:chunks].sum()) + max(0, chunks - len(short)) * chunk

    @property
    def lane_batch(self) -> int:
        """Records that one lane gives to a global batch."""
        return self.batch_size // self.lanes

    @functools.cached_property
    def chunk_ends(self) -> np.ndarray:
        """One past the number of the last chunk of each shard; int64 `(num_shards,)`."""
        return np.cumsum(-(-self.shard_lengths // self.chunk))

    @property
    def num_chunks(self) -> int:
        return int(self.chunk_ends[-1])

    @functools.cached_property
    def short_chunks(self) -> tuple[np.ndarray, np.ndarray]:
        """The chunks that are not full, and how many records each of them lacks."""
        lacking = -self.shard_lengths % self.chunk
        return self.chunk_ends[lacking > 0] - 1, lacking[lacking > 0]

    def chunk_place(self, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard that a chunk lies in, and the record of the shard that it begins with."""
        shard = np.searchsorted(self.chunk_ends, chunk, side='right')
        first_chunk = np.where(shard > 0, self.chunk_ends[shard - 1], 0)
        return shard, (chunk - first_chunk) * self.chunk

    @functools.cached_property
    def _epochs(self):
        # Lanes ask for the same epoch at about the same time, and are at most one apart.
        return functools.lru_cache(maxsize=4)(functools.partial(Epoch, self))

    def epoch(self, number: int) -> 'Epoch':
        """The plan of one epoch."""
        return self._epochs(number)

    @functools.cached_property
    def _epoch_ends(self) -> list[int]:
        return [0]

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch that a step lies in, and how many steps of that epoch came before it."""
        if step < 0:
            raise ValueError(f'step={step} is negative')
        ends = self._epoch_ends
        while ends[-1] <= step:
            ends.append(ends[-1] + self.epoch(len(ends) - 1).steps)
        epoch = bisect.bisect_right(ends, step) - 1
        return epoch, step - ends[epoch]

    def batch_records(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards and records of one global batch in order, each int64 `(batch_size,)`."""
        epoch, step = self.locate(step)
        lanes = [self.epoch(epoch).lane_records(lane, step) for lane in range(self.lanes)]
        shard, record = zip(*lanes, strict=True)
        return np.concatenate(shard), np.concatenate(record)


class Epoch:
    """The plan of one epoch.

    A chunk that is not full shifts all that follow it in its lane; `invert` tells where these
    chunks (at most one a shard) are, so that any place in a lane is found without a walk along it.

    Attributes:
        number: which epoch.
        lane_lengths: records in each lane, int64 `(lanes,)`.
        steps: global batches in this epoch; it varies a little from epoch to epoch.
    """

    def __init__(self, order: Order, number: int):
        self.order, self.number = order, number
        key = int(derive(order.seed, CHUNKS, number))
        self._permutation = Permutation(order.num_chunks, key)
        self._short = self._short_chunks_of_lanes()
        chunks = [len(range(lane, order.num_chunks, order.lanes)) for lane in range(order.lanes)]
        lacks = [short.lacking[-1] for short in self._short]
        self.lane_lengths = np.array(chunks, np.int64) * order.chunk - np.array(lacks)
        self.steps = int(self.lane_lengths.min()) // order.lane_batch

    def lane_reads(self, lane: int, step: int = 0, block: int = 256) -> Iterator[Reads]:
        """The reads of a lane from the window on that its part of batch `step` begins in.

        The records kept and padded make whole windows. Each block has at most `block` reads.
        """
        order, short = self.order, self._short[lane]
        begin = step * order.lane_batch // order.window * order.window
        windows_end = self._num_windows * order.window
        end = min(int(self.lane_lengths[lane]), windows_end)
        first, last = short.chunk_of(np.array([begin, end - 1]))[0]
        for start in range(first, last + 1, block):
            index = np.arange(start, min(start + block, last + 1))
            shard, record = order.chunk_place(self._chunk(lane, index))
            length = np.minimum(order.shard_lengths[shard] - record, order.chunk)
            in_lane = short.start_of(index)
            cut = np.maximum(begin - in_lane, 0)
            count = np.minimum(length, end - in_lane) - cut
            reads = _reads(self.number, shard, record + cut, count)
            if index[-1] == last:
                reads.pad[-1] = windows_end - end
            yield reads

    def lane_windows(self, lane: int, step: int = 0, block: int = 16) -> Iterator[np.ndarray]:
        """In which order a lane gives out the records of its windows, from batch `step` on.

        Yields int64 `(at most block, window)`: each row is one window's order, with -1 in the
        place of what is not given out: what was before `step`, and what is left over at the end.
        """
        order = self.order
        begin, end = step * order.lane_batch, self.steps * order.lane_batch
        for start in range(begin // order.window, self._num_windows, block):
            windows = np.arange(start, min(start + block, self._num_windows))
            place = windows[:, None] * order.window + np.arange(order.window)
            given = (place >= begin) & (place < end)
            yield np.where(given, self._permuted(lane, windows), -1)

    def lane_records(self, lane: int, step: int, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """A lane's shards and records in `count` batches from `step` on, without reading.

        The batches are within this epoch; both are int64 `(count * lane_batch,)`.
        """
        order = self.order
        begin, end = step * order.lane_batch, (step + count) * order.lane_batch
        windows = np.arange(begin // order.window, -(-end // order.window))
        visited = (self._permuted(lane, windows) + windows[:, None] * order.window).ravel()
        skipped = begin - windows[0] * order.window
        index, within = self._short[lane].chunk_of(visited[skipped : skipped + end - begin])
        # Each chunk is looked up once, not once for each of its records.
        first = int(index.min())
        chunks = self._chunk(lane, np.arange(first, int(index.max()) + 1))
        shard, record = order.chunk_place(chunks)
        return shard[index - first], record[index - first] + within

    def _short_chunks_of_lanes(self) -> list['_ShortChunks']:
        lanes = self.order.lanes
        chunk, lacking = self.order.short_chunks
        index, lane = np.divmod(self._permutation.invert(chunk), lanes)
        by_lane = np.lexsort((index, lane))
        bounds = np.searchsorted(lane[by_lane], np.arange(1, lanes))
        return [
            _ShortChunks(self.order.chunk, index[part], lacking[part])
            for part in np.split(by_lane, bounds)
        ]

    @property
    def _num_windows(self) -> int:
        return -(-self.steps * self.order.lane_batch // self.order.window)

    def _chunk(self, lane: int, index: np.ndarray) -> np.ndarray:
        """The chunks that a lane visits at the given places in the lane."""
        return self._permutation.apply(index * self.order.lanes + lane)

    def _permuted(self, lane: int, windows: np.ndarray) -> np.ndarray:
        """The permutation of each window; int64 `(len(windows), window)`.

        Records are sorted by their hashes, which differ from each other, so that every sort gives
        the same. The last window of a lane is shorter: what it lacks is sorted to its end.
        """
        order = self.order
        keys = derive(order.seed, WINDOWS, self.number, lane, windows)[:, None]
        place = np.arange(order.window)
        size = self.lane_lengths[lane] - windows[:, None] * order.window
        hashes = splitmix64(keys ^ place.astype(np.uint64))
        return np.argsort(np.where(place < size, hashes, np.uint64(2**64 - 1)), axis=1)


class _ShortChunks:
    """Where a lane's short chunks are, and with that, where every record of the lane is."""

    def __init__(self, full: int, index: np.ndarray, lacking: np.ndarray):
        self._full = full
        self._index = index  # places among the lane's chunks, ascending
        self.lacking = np.concatenate([[0], np.cumsum(lacking)])  # before each of them, and in all
        self._ends = self.start_of(self._index + 1)

    def start_of(self, index: np.ndarray) -> np.ndarray:
        """The record of the lane that its chunk `index` begins with."""
        before = np.searchsorted(self._index, index)
        return index * self._full - self.lacking[before]

    def chunk_of(self, record: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chunk of the lane that holds its record `record`, and the place in that chunk."""
        before = np.searchsorted(self._ends, record, side='right')
        return np.divmod(record + self.lacking[before], self._full)


def check_chunk(chunk: int) -> None:
    """Raises a ValueError for a chunk that does not begin and end where the index has offsets."""
    if chunk < 1 or chunk % schema.CHUNK_STRIDE:
        nearest = max(1, round(chunk / schema.CHUNK_STRIDE)) * schema.CHUNK_STRIDE
        raise ValueError(
            f'chunk={chunk} is not a multiple of {schema.CHUNK_STRIDE}, the stride of the chunk '
            f'index; chunk={nearest} works'
        )


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest_shares(
    batch_size: int, lanes: int, process_count: int, device_count: int = 1
) -> tuple[int, int]:
    """The nearest batch size and number of lanes that go together.

    Processes and devices get equal parts of the batch, processes equal numbers of its lanes.
    """
    multiple = math.lcm(process_count, device_count)
    working = max(1, round(batch_size / multiple)) * multiple
    shared = [d for d in divisors(working) if d % process_count == 0]
    return working, min(shared, key=lambda d: abs(d - lanes))


def consecutive_reads(shard_lengths: np.ndarray, begin: int, end: int, chunk: int) -> Reads:
    """Reads of records `[begin, end)`, counted over all shards, by at most `chunk` at a time."""
    order = Order(shard_lengths, seed=0, batch_size=1, chunk=chunk, lanes=1)
    shard, record = order.chunk_place(np.arange(order.num_chunks))
    starts = (np.cumsum(order.shard_lengths) - order.shard_lengths)[shard] + record
    length = np.minimum(order.shard_lengths[shard] - record, chunk)
    cut = np.clip(begin - starts, 0, length)
    count = np.clip(end - starts, 0, length) - cut
    wanted = count > 0
    return _reads(0, shard[wanted], (record + cut)[wanted], count[wanted])


def sample_crops(seed: int, epoch: int, keys: np.ndarray) -> np.ndarray:
    """The crop (0, 1 or 2) that epoch `epoch` takes of each key; int64, same shape as `keys`."""
    return (derive(seed, CROP, epoch, keys) >> np.uint64(33)).astype(np.int64) % schema.NUM_CROPS


def sample_drops(seed: int, epoch: int, keys: np.ndarray, probability: float) -> np.ndarray:
    """True if epoch `epoch` drops the caption of each key; bool, same shape as `keys`."""
    hashed = derive(seed, DROP, epoch, keys) >> np.uint64(11)
    return hashed.astype(np.int64) < int(probability * 2**53)


def sample_texts(seed: int, epoch: int, keys: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Which of some texts epoch `epoch` takes of each key, in shares by weight.

    Returns the number of a weight, int64, same shape as `keys`.
    """
    sums = list(itertools.accumulate(weights))
    ends = np.array([int(x / sums[-1] * 2**53) for x in sums], np.int64)
    hashed = derive(seed, TEXT, epoch, keys) >> np.uint64(11)
    return np.searchsorted(ends[:-1], hashed.astype(np.int64), side='right')
