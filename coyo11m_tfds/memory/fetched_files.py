"""Ranges of files, fetched into memory; a cache may keep them on a disk."""

import collections
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import storage
from coyo11m_tfds.memory.files import (
    NUM_ZEROS,
    HeldFiles,
    Range,
    changed_error,
    explain_errors,
    gather_rows,
    map_zeros,
)
from coyo11m_tfds.memory.read_counts import ReadCounter
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage import retry, stored_file
from coyo11m_tfds.storage.range_cache import RangeCache
from coyo11m_tfds.storage.stored_file import StoredFile

# A file and an offset in it make one number: 8 TB and 1,000,000 files.
_FILE_SHIFT = 43


class SplitCache(NamedTuple):
    """A cache for the files of a split."""

    ranges: RangeCache
    version_of: Callable[[int], str]  # of a shard; files of columns know their own

    def describe(self, files: HeldFiles, number: int) -> StoredFile | None:
        """Returns a remote file with its version; None for a local one, which is not kept.

        `files` are those of the split, and no others.
        """
        file = files.in_column(number)
        if file is None:
            version = self.version_of(number)
            file = StoredFile(files.path_of(number), int(files.size[number]), version, None)
        if file.local_path:
            return None
        return file


class FetchedFiles(HeldFiles):
    """Ranges of files, each fetched with one request and held until it is dropped.

    A cache may keep them, and then gives them instead of a request.
    """

    attempts = 3

    def __init__(
        self,
        max_in_flight: int,
        counter: ReadCounter | None = None,
        pool: ThreadPool | None = None,
        cache: SplitCache | None = None,
    ):
        """Takes the number of ranges that may be in flight or wait to be taken.

        A range goes from the queue into flight, and from there to the data when it is taken.

        The threads of a `pool` keep their connections for the next object.
        """
        super().__init__()
        self._cache = cache
        self._max_in_flight = max_in_flight
        self._counter = counter or ReadCounter()
        self._owns_pool = pool is None
        self._pool = pool or ThreadPool(max_in_flight, 'fetch')
        self._is_finalizing = sys.is_finalizing  # of one that outlives all modules
        self._queue: collections.deque[Range] = collections.deque()
        self._in_flight: dict[Range, Future[bytes]] = {}  # being fetched, or not taken yet
        self._data: dict[Range, bytes] = {}  # taken, and not dropped yet
        self._zeros = np.frombuffer(map_zeros(NUM_ZEROS), np.uint8)
        self._index()

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places where ranges begin and end, of ranges that lie in taken ones."""
        place = _place(number, offset)
        # A file that is shorter than its index says gave fewer bytes than were requested.
        index = self._find(place)
        limit = self._ends[index]
        return np.minimum(place, limit), np.minimum(place + nbytes, limit)

    def gather(self, places: np.ndarray, nbytes: int) -> np.ndarray:
        """Copies `nbytes` bytes from each place; returns void `(n,)` with items of this size."""
        index = self._find(places)
        in_range = places - self._begins[index]
        rows = np.empty(len(places), np.dtype((np.void, nbytes)))
        # The rows are many, and lie in few ranges.
        numbers = np.unique(index)
        for number in numbers.tolist():
            chosen = np.flatnonzero(index == number)
            data = self._held[number]
            rows[chosen] = gather_rows(data, in_range[chosen], nbytes)
        return rows

    def views(self, begin: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes from each `begin` to its `end` as uint8, without a copy."""
        index = self._find(begin)
        first = begin - self._begins[index]
        last = end - self._begins[index]
        places = zip(index.tolist(), first.tolist(), last.tolist(), strict=True)
        return [self._held[number][start:stop] for number, start, stop in places]

    def request(self, ranges: Sequence[Range]) -> None:
        """Queues ranges to be fetched, after those that were queued before."""
        self._queue.extend(ranges)
        self._fill_flight()

    def take(self, ranges: Iterable[Range]) -> None:
        """Waits for requested ranges, in the order of the requests; then `locate` knows them."""
        # Blocks that share a chunk take it twice.
        for key in ranges:
            if key not in self._data:
                self._data[key] = self._in_flight.pop(key).result()
                # At once, so that as many are in flight while the next one is awaited.
                self._fill_flight()
        self._index()

    def take_again(self, ranges: Iterable[Range]) -> None:
        """Fetches ranges anew, because their bytes may have been changed on their way."""
        for key in ranges:
            self._data[key] = self.fetch_anew(key)
        self._index()

    def fetch_anew(self, key: Range) -> bytes:
        """Returns a newly fetched range, whatever a cache holds of it, and replaces it there."""
        return self._fetch(key, uses_cache=False)

    def drop(self, ranges: Iterable[Range]) -> None:
        """Frees ranges that were taken; nothing may read from their places afterwards."""
        for key in ranges:
            del self._data[key]
        self._index()

    def close(self) -> None:
        """Ends the threads after the requests that are under way."""
        self._queue.clear()
        # At the end of the program the interpreter has ended the threads.
        if self._owns_pool and not self._is_finalizing():
            self._pool.end_pauses()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, place: np.ndarray) -> np.ndarray:
        """Returns which of the held ranges each place lies in, or behind."""
        return np.searchsorted(self._begins, place, side='right') - 1

    def _index(self) -> None:
        """Brings the held ranges into the order of their places, for `_find`."""
        keys = sorted(self._data)
        # Three columns also of no key at all.
        ranges = np.array(keys, np.int64).reshape(-1, 3)
        number = ranges[:, 0]
        begin = ranges[:, 1]
        # The zeros come first, at place 0.
        self._held = [self._zeros]
        self._held += [np.frombuffer(self._data[key], np.uint8) for key in keys]
        self._begins = np.append(0, _place(number, begin))
        # The bytes that came, which may be fewer than the range has.
        sizes = [len(data) for data in self._held]
        self._ends = self._begins + sizes

    def _fill_flight(self) -> None:
        """Begins to fetch queued ranges, as many as may be in flight."""
        while self._queue and len(self._in_flight) < self._max_in_flight:
            key = self._queue.popleft()
            self._in_flight[key] = self._pool.submit(self._fetch, key)

    def _fetch(self, key: Range, uses_cache: bool = True) -> bytes:
        """Returns the bytes of a range, and counts them; runs in the threads of the pool."""
        number, begin, end = key
        # Rows of columns are no chunks, but their bytes count.
        num_chunks = int(number not in self._columns)
        self._counter.add(chunks_in_flight=num_chunks)
        try:
            data = None
            if uses_cache:
                data = self._find_kept(key)
            if data is None:
                with explain_errors(self.path_of(number)):
                    data = self._fetch_from_afar(number, begin, end)
            self._counter.add(num_bytes=len(data), num_chunks=num_chunks)
        finally:
            self._counter.add(chunks_in_flight=-num_chunks)
        return data

    def _find_kept(self, key: Range) -> bytes | None:
        """Returns a range from the cache; None where it is not kept, or there is no cache."""
        number, begin, end = key
        if not self._cache:
            return None
        file = self._cache.describe(self, number)
        if not file:
            return None
        data = self._cache.ranges.read(file, begin, end)
        if data is None:
            self._counter.add(cache_misses=1)
        else:
            self._counter.add(cache_hits=1, cache_bytes=len(data))
        return data

    def _fetch_from_afar(self, number: int, begin: int, end: int) -> bytes:
        """Returns a range that is fetched now, and keeps it if there is a cache."""
        if not self._cache:
            return self._read_counted(number, begin, end)
        file = self._cache.describe(self, number)
        if not file:
            return self._read_counted(number, begin, end)
        # The cache keeps whole pages, so the rest of them is fetched, too.
        first, last = self._cache.ranges.widen(file, begin, end)
        data = self._read_counted(number, first, last)
        # A file of another size than the index says is not the one that its version names.
        if len(data) == last - first and self.size[number] == file.size:
            self._cache.ranges.keep(file, first, data)
        return data[begin - first : end - first]

    def _read_counted(self, number: int, begin: int, end: int) -> bytes:
        """Reads a range; counts the request if the file is remote."""
        if storage.local_path(self.path_of(number)):
            return self._read(number, begin, end)
        start = time.monotonic()
        # Counted for this thread, which reads nothing else meanwhile.
        num_retries = retry.count_retries()
        try:
            return self._read(number, begin, end)
        finally:
            self._counter.add(
                num_requests=1,
                request_seconds=time.monotonic() - start,
                num_retries=retry.count_retries() - num_retries,
            )

    def _read(self, number: int, begin: int, end: int) -> bytes:
        """Reads a range of a file of a column, which must not change, or of a shard."""
        file = self._columns.get(number)
        if file:
            data = file.read_range(begin, end - begin)
            # The read itself notices a change of an object in a bucket, but not of a local file.
            if not file.is_unchanged():
                raise changed_error(file.path, file.size, os.path.getsize(file.path))
            return data
        try:
            return self._read_range(number, begin, end)
        except stored_file.FileChanged:
            # It is shorter or longer than the index says: read what there is. Its records then
            # count as damaged, one by one, as those of a mapped file do.
            self.size[number] = storage.describe_file(self.path_of(number)).size
            return self._read_range(number, begin, end)

    def _read_range(self, number: int, begin: int, end: int) -> bytes:
        """Reads a range of a shard, as far as the shard goes."""
        size = int(self.size[number])
        file = StoredFile(self.path_of(number), size, '', None)
        first = min(begin, size)
        last = min(end, size)
        return file.read_range(first, last - first)


def _place(number: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Returns the place of a byte of a file, behind the zeros, which have those of no file."""
    file_place = (number + 1) << _FILE_SHIFT
    return file_place + offset
