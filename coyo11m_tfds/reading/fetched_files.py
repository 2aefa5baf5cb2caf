"""Ranges of numbered files, each fetched with one request and held in memory while it is needed.

    files = FetchedFiles(split.file, sizes, most_at_once=64)
    files.ask([(3, 0, 1_700_000), (17, 81_000, 1_781_000)])     # file, begin, end
    files.take([(3, 0, 1_700_000)])                             # waits for it
    address, limit = files.locate(np.array([3]), np.array([40_000]), np.array([26_000]))
    files.drop([(3, 0, 1_700_000)])

What `MappedFiles` is to files on a local disk, this is to those on gs://: both say at which address
of this process a byte of a file lies.
"""

import collections
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from coyo11m_tfds.reading import mapped_files
from coyo11m_tfds.reading.counter import ReadCounter
from coyo11m_tfds.reading.mapped_files import Memory
from coyo11m_tfds.storage import remote, source_files
from coyo11m_tfds.storage.source_files import SourceFile

Range = tuple[int, int, int]  # number of the file, first byte, one past the last byte

# A file and a place in it make one number: 8 TB and 500,000 files.
_FILE_SHIFT = 43


class FetchedFiles:
    """Ranges of numbered files.

    Attributes:
        memory: that they lie in.
        size: bytes of each file, int64; one that turns out to be shorter gets its true size.
    """

    def __init__(
        self,
        path_of: Callable[[int], str],
        size: Sequence[int] | np.ndarray,
        most_at_once: int,
        counter: ReadCounter | None = None,
    ):
        """Fetches nothing.

        Args:
            path_of: the path of each file, by its number; local or `gs://`.
            size: bytes of each file.
            most_at_once: ranges that may be on their way, or have come and wait to be taken.
            counter: is told of every range; only those of files that were not added are chunks.
        """
        self.memory = Memory()
        self.size = np.array(size, np.int64)
        self._path_of = path_of
        self._described: dict[int, SourceFile] = {}
        self._most_at_once, self._counter = most_at_once, counter or ReadCounter()
        self._pool = ThreadPoolExecutor(most_at_once, 'fetch')
        self._is_finalizing = sys.is_finalizing  # of one that outlives all modules
        self._asked: collections.deque[Range] = collections.deque()
        self._coming: dict[Range, Future[bytes]] = {}
        self._held: dict[Range, bytes] = {}
        self._index()

    def add(self, files: Sequence[SourceFile]) -> int:
        """Adds files that must not change; returns the number of the first, the others follow."""
        first = len(self.size)
        self._described |= dict(enumerate(files, first))
        self.size = np.append(self.size, [file.size for file in files]).astype(np.int64)
        return first

    def path_of(self, number: int) -> str:
        """The path of a file."""
        described = self._described.get(number)
        return described.path if described else self._path_of(number)

    def ask(self, ranges: Iterable[Range]) -> None:
        """Begins to fetch ranges, in this order, after those that were asked for before."""
        self._asked.extend(ranges)
        self._begin()

    def take(self, ranges: Iterable[Range]) -> None:
        """Waits for ranges that were asked for; from now on `locate` knows them.

        Raises:
            FileNotFoundError, PermissionError, OSError: a file cannot be read.
        """
        for part in ranges:
            if part not in self._held:
                self._held[part] = self._coming.pop(part).result()
                self._begin()
        self._index()

    def take_again(self, ranges: Iterable[Range]) -> None:
        """Fetches ranges anew, because their bytes may have been changed on their way."""
        self._held |= {part: self._fetch(part) for part in ranges}
        self._index()

    def drop(self, ranges: Iterable[Range]) -> None:
        """Forgets ranges; nothing may refer to their bytes any more."""
        for part in ranges:
            del self._held[part]

    def close(self) -> None:
        """Ends the threads; what is on its way comes to its end."""
        self._asked.clear()
        if not self._is_finalizing():  # or the interpreter has ended them
            self._pool.shutdown(wait=False, cancel_futures=True)

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The addresses of places in files, and of the end of what is there of them.

        Args and Returns: as of `MappedFiles.locate`; the places are in ranges that were taken.
        """
        part = np.searchsorted(self._keys, (number << _FILE_SHIFT) + offset, side='right') - 1
        address = self._addresses[part] + offset
        return address, np.minimum(address + nbytes, self._ends[part])

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Fetched bytes cannot change."""

    def _begin(self) -> None:
        while self._asked and len(self._coming) < self._most_at_once:
            part = self._asked.popleft()
            self._coming[part] = self._pool.submit(self._fetch, part)

    def _index(self) -> None:
        parts = sorted(self._held)
        number, begin = np.array(parts, np.int64).reshape(-1, 3)[:, :2].T
        self._keys = (number << _FILE_SHIFT) + begin
        # An empty range has no address; nobody asks for one, as its end is its beginning.
        data = [np.frombuffer(self._held[part] or b'\0', np.uint8) for part in parts]
        starts = np.array([x.ctypes.data for x in data], np.int64)
        self._addresses = starts - begin
        self._ends = starts + np.array([len(self._held[part]) for part in parts], np.int64)

    def _fetch(self, part: Range) -> bytes:
        number, begin, end = part
        path = self.path_of(number)
        read = self._read_remote if source_files.is_remote(path) else self._read_local
        is_column = number in self._described
        with contextlib.nullcontext() if is_column else self._counter.chunk():
            data = read(path, number, begin, end)
        self._counter.add_bytes(len(data))
        return data

    def _read_remote(self, path: str, number: int, begin: int, end: int) -> bytes:
        passing = () if number in self._described else (remote.Changed,)
        try:
            with contextlib.suppress(*passing):
                return self._read_range(path, number, begin, end)
            # Shorter or longer than the index says: what is there is read.
            self.size[number] = source_files.describe(path).size
            return self._read_range(path, number, begin, end)
        except FileNotFoundError as error:
            raise mapped_files.missing(path) from error

    def _read_range(self, path: str, number: int, begin: int, end: int) -> bytes:
        size = int(self.size[number])
        file = self._described.get(number) or SourceFile(path, size, '', None)
        return remote.read_range(file, min(begin, size), max(0, min(end, size) - begin))

    def _read_local(self, path: str, number: int, begin: int, end: int) -> bytes:
        with mapped_files.naming(path), open(path, 'rb') as file:
            file.seek(begin)
            data = file.read(end - begin)
            if len(data) < end - begin:
                self.size[number] = os.fstat(file.fileno()).st_size
        before = self._described.get(number)
        if before and source_files.describe(path).version != before.version:
            raise mapped_files.changed(path, before.size, os.path.getsize(path))
        return data
