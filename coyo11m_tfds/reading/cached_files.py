"""Remote files that a cache holds as far as they are read: mapped, and read by rows like local.

A `RowReader` of `CachedFiles` makes no request, once a `CacheWatch` says that all is there.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from absl import logging

from coyo11m_tfds.memory.fetched_files import FetchedFiles, SplitCache
from coyo11m_tfds.memory.files import MappedFiles, Range, replace_bytes
from coyo11m_tfds.reading.row_reader import RowReader
from coyo11m_tfds.storage.stored_file import StoredFile


class CachedFiles(MappedFiles):
    """Mapped files of a cache, and local ones; damaged bytes are fetched again.

    Of a file in the cache, only the ranges may be read that it holds.
    """

    # As often as bytes that come from the bucket: a damaged cache is read from there again.
    attempts = FetchedFiles.attempts
    # What is fetched again goes into the memory of this process, too: the cache may be gone by now.
    map_flags = mmap.MAP_PRIVATE

    def __init__(self, fetched: FetchedFiles, cache: SplitCache):
        """Takes `fetched`, which will fetch the same files, and has none of them yet."""
        super().__init__()
        self._fetched = fetched
        self._cache = cache
        self._replacing = threading.Lock()

    def add_shards(self, path_of: Callable[[int], str], size: Sequence[int] | np.ndarray) -> int:
        """Adds the shards of the split; they are numbered from the result on."""
        # In both in the same order, so that a file has one number.
        self._fetched.add_shards(path_of, size)
        return super().add_shards(path_of, size)

    def add_column(self, files: Sequence[StoredFile]) -> int:
        """Adds files that must not change; they are numbered from the result on."""
        self._fetched.add_column(files)
        return super().add_column(files)

    def open_all(self, numbers: np.ndarray) -> None:
        """Maps files now; raises an OSError if one is not there, or has been cut."""
        self._open(numbers)

    def take_again(self, ranges: Iterable[Range]) -> None:
        """Fetches ranges anew, because their bytes in the cache are damaged."""
        for file_range in ranges:
            number, begin, _ = file_range
            new = self._fetched.fetch_anew(file_range)
            start = int(self._starts[number]) + begin
            # Ranges share pages: another thread that made one read-only meanwhile would end the
            # process.
            with self._replacing:
                replace_bytes(self._bytes, start, new)

    def _map(self, number: int) -> None:
        described = self._cache.describe(self, number)
        # Files that were local from the start are not copied into the cache.
        if not described:
            super()._map(number)
            return
        path = self._cache.ranges.path_of(described)
        with open(path, 'rb') as file:
            # To read beyond the end of a mapped file would end the process with SIGBUS.
            if os.fstat(file.fileno()).st_size < described.size:
                raise OSError(f'{path}: has been cut')
            self._map_bytes(number, file, described.size)
        # Other processes may write other ranges of it, so a new time of change means nothing.
        self._check_times[number] = np.inf
        self._is_open[number] = True


class CacheWatch:
    """Finds out when a cache holds all ranges of a split that a reader needs. For many threads."""

    def __init__(
        self,
        reader: RowReader,
        files: CachedFiles,
        cache: SplitCache,
        num_shards: int,
        records_of: Callable[[int], np.ndarray],
        chunk: int,
        piece: int,
    ):
        """Takes what of each shard is read.

        Args:
            reader: Reader of the cached files.
            files: The same files.
            cache: That they are kept in.
            num_shards: Number of shards, the first of the files.
            records_of: Returns the numbers of a shard's records to read, or of one for each chunk.
            chunk: Records read together.
            piece: The fewest of these that may be read alone.
        """
        self.reader = reader
        self._files = files
        self._cache = cache
        self._records_of = records_of
        self._chunk = chunk
        self._piece = piece
        self._lock = threading.Lock()
        self._is_complete = False
        # Shards that are not known to be complete, and what is read of the last one.
        self._shards = list(range(num_shards))
        self._needed: dict[int, np.ndarray] = {}
        self._held: set[int] = set()  # numbers of files

    def is_complete(self) -> bool:
        """Returns whether all is there, and mapped; from then on always."""
        with self._lock:
            # Each look goes on with the shard at which the one before it ended: what is kept
            # stays, and a look at a whole split for each block would take too long.
            while self._shards:
                if not self._needed:
                    self._needed = self._find_needed(self._shards[-1])
                for number, ranges in self._needed.items():
                    if not self._holds(number, ranges):
                        return False
                self._held |= self._needed.keys()
                self._needed = {}
                self._shards.pop()
            # If files cannot be mapped now, the next look tries again.
            if not self._is_complete:
                self._is_complete = self._open()
            return self._is_complete

    def _find_needed(self, shard: int) -> dict[int, np.ndarray]:
        """Returns what is read for a shard: ranges, int64 `(n, 2)`, by numbers of files."""
        record = self._records_of(shard)
        # A condition may keep no record of a shard, and then nothing of it is read.
        if not len(record):
            return {}
        shards = np.full_like(record, shard)
        # The same chunks as those that are fetched: only these does the cache hold in the end.
        chunks, _ = self.reader.find_chunks(shards, record, self._chunk, self._piece)
        by_file: dict[int, list[tuple[int, int]]] = {}
        for ranges in chunks:
            for number, begin, end in ranges:
                by_file.setdefault(number, []).append((begin, end))
        needed = {}
        for number, file_ranges in by_file.items():
            needed[number] = np.array(file_ranges, np.int64)
        return needed

    def _holds(self, number: int, ranges: np.ndarray) -> bool:
        """Returns whether ranges of a file are in the cache, or the file is local anyway."""
        file = self._cache.describe(self._files, number)
        return file is None or self._cache.ranges.holds(file, ranges)

    def _open(self) -> bool:
        """Maps all files that are needed; returns whether it could."""
        try:
            # Now, so that nobody can remove them before their first use.
            self._files.open_all(np.array(sorted(self._held), np.int64))
        except OSError as error:
            logging.warning('%s: what is kept is fetched again', error)
            return False
        folder = os.path.dirname(self._files.path_of(0))
        logging.info('%s: all that is read of it is in cache_dir: by rows from here on', folder)
        return True
