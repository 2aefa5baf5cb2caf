"""Records by number and by key, for readers that bring an order of their own.

Of mapped files, only the rows that are read are gathered. Of other files, a whole chunk is fetched
and kept for a while, because its neighbours are often read next.
"""

import bisect
import collections
import dataclasses
import functools
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, SupportsIndex, overload

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.process.errors import FieldError
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.reading import damage
from coyo11m_tfds.reading.batches import CROP, NOISE_SEED, Batch
from coyo11m_tfds.reading.engines import SplitReader, read_split_keys
from coyo11m_tfds.reading.opened_splits import open_splits
from coyo11m_tfds.reading.options import TF_DATA, ReadOptions
from coyo11m_tfds.reading.row_reader import LocatedRecords, RowReader
from coyo11m_tfds.sampling.order import RecordBlock

# Runs whose places are remembered, 4 KB each: those of 2 million records, 57 GB of latents.
_LOCATED_RUNS = 1 << 16
_KEPT_CHUNKS = 64  # of 32 records with 27 KB each, these take 55 MB
_KEYS_AT_ONCE = 1 << 18  # in a batch; they take 2 MB


class Records:
    """The records of a split, by number and by key; see `input_pipeline.records`.

    Attributes:
        spec: Shape and dtype of each value of a record, by name.
    """

    def __init__(self, options: ReadOptions, crop: int | None = None):
        self._options = options.for_source(options.source)
        self._crop = crop
        stored = options.stored
        splits = open_splits(options)
        if splits is None or options.source.where or options.engine == TF_DATA:
            raise ValueError(
                f'{stored.folder}: only records of a whole data set with a chunk index have '
                "numbers, with engine 'rows' or 'chunks': build it again, or leave out 'where'"
            )
        # These come from seed and epoch, and a record by number has none.
        others = {CROP, NOISE_SEED} & set(options.feature_names)
        if others:
            raise ValueError(f'features has {min(others)!r}, which only samples in batches have')
        crops = stored.latents[1][0]
        middle = schema.middle_crop(crops)
        if crop is not None and not 0 <= middle + crop < crops:
            problem = f'expected {-middle} to {crops - 1 - middle}, or None for all crops'
            raise FieldError('crop', crop, problem)
        (self._opened,) = splits
        index = self._opened.indexed.index
        self._ends = np.cumsum(index.shard_lengths)  # of the shards, in numbers of records
        self._length = int(index.shard_lengths.sum())
        self._rows = self._open_rows()
        # Of the process that has opened them, see `_rows_here`.
        self._process = os.getpid()
        # Of a batch of one record, without the axis of the batch.
        specs = self._rows.reader.spec(1).items()
        self.spec = {name: spec._replace(shape=spec.shape[1:]) for name, spec in specs}

    def __reduce__(self):
        # Another process opens the files itself: mappings and threads cannot be pickled.
        return type(self), (self._options, self._crop)

    def __repr__(self) -> str:
        values = [f'{name} {dtype}{list(shape)}' for name, (shape, dtype) in self.spec.items()]
        place = f'{self._options.stored.folder}, {self._options.split!r}'
        num_records = format_count(len(self), 'record')
        return f'Records({place}: {num_records} of {", ".join(values)})'

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(self._length))

    @overload
    def __getitem__(self, number: SupportsIndex) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, number: slice | Sequence[int] | np.ndarray) -> Batch: ...

    def __getitem__(self, number: Any) -> dict[str, Any]:
        if isinstance(number, slice):
            return self._read_batch(np.arange(*number.indices(self._length)))
        try:
            index = operator.index(number)
        except TypeError:
            return self._read_batch(_as_numbers(number))
        if not -self._length <= index < self._length:
            raise self._index_error(index)
        index %= self._length
        # On so few numbers Python is faster than NumPy.
        shard = bisect.bisect_right(self._ends, index)
        record = index - int(self._opened.indexed.first_numbers[shard])
        batch = self._rows_here().read_one(shard, record)
        return {name: x[0] for name, x in batch.items()}

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the records of some numbers; torch calls it for a batch."""
        # Read together, because the cost of NumPy's calls is that of one batch.
        batch = self._read_batch(_as_numbers(numbers))
        rows = zip(*batch.values(), strict=True)
        return [dict(zip(batch, values, strict=True)) for values in rows]

    _getitems = __getitems__  # called by versions of Grain that read several records at once

    def find(self, key: int) -> int:
        """Returns the number of the record with a key; KeyError if the split has none.

        The first call reads all records of the split, and keeps 16 bytes for each.
        """
        try:
            key = operator.index(key)
        except TypeError:
            raise TypeError(f'key={key!r}: expected a whole number') from None
        keys, numbers = self._sorted_keys
        place = bisect.bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            raise KeyError(
                f'{self._options.stored.folder}: no record of split {self._options.split!r} has '
                f'key {key}; it may be in another split, or the build dropped it'
            )
        return int(numbers[place])

    @functools.cached_property
    def _sorted_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys of all records that can be read, ascending, and the number of each record."""
        # A split without records cannot be read.
        if not self._length:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # A damaged record elsewhere is no reason not to find this one.
        options = dataclasses.replace(self._options, on_bad_records=damage.SKIP)
        batches = list(read_split_keys(options, self._length, _KEYS_AT_ONCE))
        keys = np.ma.concatenate(batches)
        # Bad records are masked, and have no key.
        is_readable = ~np.ma.getmaskarray(keys)
        readable = np.flatnonzero(is_readable)
        by_key = np.argsort(keys.data[readable])
        numbers = readable[by_key]
        return keys.data[numbers], numbers

    def _read_batch(self, numbers: np.ndarray) -> Batch:
        """Reads records by number, `(n,)`, from the end if it is negative; in their order."""
        # An empty list has the dtype float64, which is no dtype of numbers of records.
        if numbers.shape == (0,):
            no_rows = self._rows.reader.spec(0)
            return {name: np.empty(*spec) for name, spec in no_rows.items()}
        is_outside = (numbers < -self._length) | (numbers >= self._length)
        if is_outside.any():
            first_outside = numbers[is_outside.argmax()]
            raise self._index_error(first_outside)
        index = numbers.astype(np.int64) % self._length
        shard = np.searchsorted(self._ends, index, side='right')
        record = index - self._opened.indexed.first_numbers[shard]
        return self._rows_here().read(shard, record)

    def _index_error(self, number: int) -> IndexError:
        place = f'{self._options.stored.folder}: split {self._options.split!r}'
        return IndexError(
            f'{place} has {format_count(self._length, "record")}, and none with number {number}'
        )

    def _rows_here(self) -> '_MappedRows | _FetchedRows':
        """Returns what reads records in this process, also after a fork."""
        # A fork has no threads, and perhaps locks that no thread will release.
        if self._process != os.getpid():
            self._rows = self._open_rows()
            self._process = os.getpid()
        return self._rows

    def _open_rows(self) -> '_MappedRows | _FetchedRows':
        """Opens the files in this process, mapped if they can be."""
        options = self._options
        reader = SplitReader(
            options,
            self._opened,
            options.stored.choose_texts(options.text).first,
            with_mask=False,
            crop=self._crop,
            all_crops=self._crop is None,
        )
        lengths = self._opened.indexed.index.shard_lengths
        if reader.is_mapped:
            return _MappedRows(reader, lengths)
        return _FetchedRows(reader, lengths)


class _MappedRows:
    """Reads records from mapped files."""

    def __init__(self, reader: SplitReader, shard_lengths: np.ndarray):
        assert reader.mapped_reader
        self.reader = reader
        self._row_reader = reader.mapped_reader
        # A run is located in 0.3 ms; a record of it is then read in 0.05 ms.
        locate = functools.partial(_locate_run, self._row_reader, shard_lengths)
        self._locate_run = functools.lru_cache(_LOCATED_RUNS)(locate)

    def read(self, shard: np.ndarray, record: np.ndarray) -> Batch:
        """Reads records of any shards, in their order; arguments are int64 `(n,)`."""
        # No choice depends on the epoch here.
        epoch = np.zeros_like(shard)
        return self._gather(self._row_reader.locate(epoch, shard, record))

    def read_one(self, shard: int, record: int) -> Batch:
        """Reads a batch of one record, with the places of its whole run, which are kept."""
        run, place = divmod(record, schema.CHUNK_STRIDE)
        located_run = self._locate_run(shard, run)
        return self._gather(located_run.rows(slice(place, place + 1)))

    def _gather(self, located: LocatedRecords) -> Batch:
        """Returns the batch of located records, after their checks."""
        reader = self._row_reader
        codes = reader.check(located)
        return reader.gather_latents(reader.read(located, codes))


def _as_numbers(numbers: Any) -> np.ndarray:
    """Returns a list of numbers as an array `(n,)`; TypeError for anything else."""
    values = np.asarray(numbers)
    if values.shape == (0,) or (values.ndim == 1 and values.dtype.kind in 'iu'):
        return values
    # An array may have as many values as the data set has records.
    described = repr(numbers)
    if values.ndim:
        described = f'{values.dtype}, shape {values.shape}'
    raise TypeError(f'records[{described}]: expected whole numbers, as one number or a list')


def _locate_run(
    reader: RowReader, shard_lengths: np.ndarray, shard: int, run: int
) -> LocatedRecords:
    """Returns where the records of a run lie; a run is what the chunk index has an offset for."""
    first = run * schema.CHUNK_STRIDE
    # The last run of a shard may be short.
    end = min(first + schema.CHUNK_STRIDE, shard_lengths[shard])
    record = np.arange(first, end)
    # No choice depends on the epoch here.
    epoch = np.zeros_like(record)
    return reader.locate(epoch, np.full_like(record, shard), record)


class _FetchedRows:
    """Fetches chunks, each once for all threads, and keeps those that were used last."""

    def __init__(self, reader: SplitReader, shard_lengths: np.ndarray):
        self.reader = reader
        self._shard_lengths = shard_lengths
        self._chunk = reader.options.chunk
        in_flight = reader.options.parallel_reads
        self._chunks: dict[int, Future[Batch]] = {}  # those that were used last are the last
        self._lock = threading.Lock()
        # Two pools, because a thread that reads a chunk waits for those that fetch its records and
        # columns: with one pool, all of its threads might wait.
        self._readers = ThreadPool(in_flight, 'records')
        self._fetchers = ThreadPool(2 * in_flight, 'fetch')

    def read(self, shard: np.ndarray, record: np.ndarray) -> Batch:
        """Reads records of any shards, in their order; arguments are int64 `(n,)`."""
        # Shard and number of the chunk in one number, which is a key of `_chunks`.
        chunk_keys = (shard << 32) + record // self._chunk
        chunks, inverse = np.unique(chunk_keys, return_inverse=True)
        # All are requested before the first is awaited, so that they are fetched at once.
        futures = collections.deque(map(self._request, chunks.tolist()))
        specs = self.reader.spec(len(shard))
        values = {name: np.empty(*spec) for name, spec in specs.items()}
        for number in range(len(chunks)):
            rows = np.flatnonzero(inverse == number)
            # Removed from the list, so that a chunk is freed after its rows are taken, unless it is
            # kept.
            taken = self._take_rows(futures.popleft(), shard[rows], record[rows])
            for name, x in taken.items():
                values[name][rows] = x
        return values

    def read_one(self, shard: int, record: int) -> Batch:
        """Reads a batch of one record."""
        return self.read(np.array([shard]), np.array([record]))

    def _request(self, chunk: int) -> Future[Batch]:
        """Begins to fetch a chunk, unless it is kept or in flight; does not wait."""
        with self._lock:
            # Taken out and put back, so that it becomes the last one in the dict.
            future = self._chunks.pop(chunk, None)
            # What failed is tried again: the reason may have passed.
            if future is None or (future.done() and future.exception()):
                future = self._readers.submit(self._fetch, chunk)
            self._chunks[chunk] = future
            # The first in the dict is the one that was used the longest time ago.
            if len(self._chunks) > _KEPT_CHUNKS:
                oldest = next(iter(self._chunks))
                del self._chunks[oldest]
        return future

    def _fetch(self, chunk: int) -> Batch:
        """Reads all records of a chunk, whose number has the shard in its upper 32 bits."""
        shard = chunk >> 32
        first = (chunk & 0xFFFFFFFF) * self._chunk
        # The last chunk of a shard may be short.
        end = min(first + self._chunk, self._shard_lengths[shard])
        record = np.arange(first, end)
        return self._read_block(np.full_like(record, shard), record)

    def _take_rows(self, chunk: Future[Batch], shard: np.ndarray, record: np.ndarray) -> Batch:
        """Returns some records of a chunk, when it has been fetched."""
        try:
            values = chunk.result()
        except DamagedError:
            # Perhaps others of the chunk are damaged, and not these. So these are read alone.
            return self._read_block(shard, record)
        rows = record % self._chunk
        return {name: x[rows] for name, x in values.items()}

    def _read_block(self, shard: np.ndarray, record: np.ndarray) -> Batch:
        # A block of one batch; the epoch is 0, as no choice depends on it.
        block = RecordBlock(np.zeros_like(shard)[None], shard[None], record[None])
        return self.reader.read_block(block, self._fetchers)
