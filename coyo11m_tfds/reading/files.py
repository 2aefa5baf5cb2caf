"""Numbered files in memory, mapped or fetched, and rows of bytes gathered from them.

Each row of a batch may be in another file. So the place of a row is an address in this process: one
call of NumPy gathers from all files together, without Python code for each row and without Python's
lock.
"""

import collections
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.storage import disk, stored_file
from coyo11m_tfds.storage.stored_file import StoredFile

# A file is checked for changes at most this often.
_CHECK_SECONDS = 1.0

# A process may have 65,530 mappings (vm.max_map_count), and other libraries need some.
MAX_FILES = 60_000

# Places in memory are counted from here, as NumPy takes no array at address 0, to what a processor
# of 64 bits gives programs. Times what is gathered at once, it has to be less than 2**63.
_ORIGIN = 1 << 12
_END = 1 << 48
_GATHERED_AT_ONCE = 1 << 15

# A file and a place in it make one number: 8 TB and 500,000 files.
_FILE_SHIFT = 43

Range = tuple[int, int, int]  # number of the file, first byte, one past the last byte


@functools.cache
def _zeros() -> np.ndarray:
    """Returns zeros for the longest possible row; the system allocates no memory for them."""
    return np.frombuffer(mmap.mmap(-1, schema.MAX_LATENTS_NBYTES), np.uint8)


class Memory:
    """All memory of this process as one NumPy array; callers must know the addresses."""

    def __init__(self):
        everything = (ctypes.c_ubyte * (_END - _ORIGIN)).from_address(_ORIGIN)
        self._bytes = np.frombuffer(everything, np.uint8)
        self._zeros = _zeros()
        self.zeros: int = self._zeros.ctypes.data  # an address with as many zeros as a row may have

    def gather(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Copies `nbytes` bytes from each address; returns void `(n,)` with items of this size."""
        if nbytes > _GATHERED_AT_ONCE:
            gathered = np.empty((len(addresses), nbytes), np.uint8)
            for begin in range(0, nbytes, _GATHERED_AT_ONCE):
                some = min(_GATHERED_AT_ONCE, nbytes - begin)
                rows = self.gather(addresses + begin, some).view(np.uint8)
                gathered[:, begin : begin + some] = rows.reshape(-1, some)
            return gathered.view((np.void, nbytes))[:, 0]
        kind = np.dtype((np.void, nbytes))
        rows = np.ndarray(_END - _ORIGIN - nbytes, kind, self._bytes, strides=(1,))
        return rows[addresses - _ORIGIN]

    def view(self, begin: int, end: int) -> np.ndarray:
        """Returns the bytes between two addresses as uint8, without a copy."""
        return self._bytes[begin - _ORIGIN : end - _ORIGIN]

    def crc32c(
        self, begin: np.ndarray, end: np.ndarray, before: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the CRC-32C of the bytes from each `begin` to its `end`; uint32 `(n,)`.

        `before` holds the CRC-32C of bytes that precede these.
        """
        places = zip(begin.tolist(), end.tolist(), strict=True)
        if before is None:
            crcs = [google_crc32c.value(self.view(*place)) for place in places]
        else:
            both = zip(before.tolist(), places, strict=True)
            crcs = [google_crc32c.extend(crc, self.view(*place)) for crc, place in both]
        return np.array(crcs, np.uint32)


class ReadCounts(NamedTuple):
    """Sums over the reads since a counter was made."""

    num_bytes: int = 0  # of all chunks, with rows of columns, or of all batches read by rows
    num_chunks: int = 0  # runs of records that were read
    chunks_in_flight: int = 0  # runs of records that are being read now
    bad_records: int = 0  # that could not be read and were left out, again in every epoch


class ReadCounter:
    """Counts what is read, as `ReadCounts`; one counter may serve several data sets."""

    def __init__(self):
        self._counts = ReadCounts()
        self._lock = threading.Lock()  # chunks are read by several threads

    def read(self) -> ReadCounts:
        """Returns the sums until now."""
        return self._counts

    def add(self, **amounts: int) -> None:
        """Adds to the named sums."""
        with self._lock:
            sums = {name: getattr(self._counts, name) + n for name, n in amounts.items()}
            self._counts = self._counts._replace(**sums)


class MappedFiles:
    """Numbered files, each mapped from its first use to the end of this object.

    `address` holds that of each file, int64, 0 while it is not open, and `size` its bytes, int64.
    """

    def __init__(
        self, path_of: Callable[[int], str], num_files: int, versions: Sequence[str] | None = None
    ):
        """Opens no file; `versions`, as in `StoredFile`, are those that the files must have.

        Raises a ValueError for more than `MAX_FILES`.
        """
        if num_files > MAX_FILES:
            raise ValueError(
                f'{path_of(0)}: {num_files} files cannot be mapped at once, at most {MAX_FILES} '
                "can; read them with engine='chunks'"
            )
        self.memory = Memory()
        self.address = np.zeros(num_files, np.int64)
        self.size = np.zeros(num_files, np.int64)
        self.path_of = path_of
        self._versions = versions
        self._states: dict[int, tuple[int, ...]] = {}
        self._checked = np.zeros(num_files)  # when, in seconds
        self._mapped: list[tuple[int, int]] = []
        # Not at exit: another thread may still read.
        weakref.finalize(self, _unmap, self._mapped).atexit = False
        self._opening = threading.Lock()

    def open(self, numbers: np.ndarray) -> None:
        """Maps the files that are not mapped yet.

        Raises an OSError if one is missing, refused, or has changed since its version was found.
        """
        for number in numbers.tolist():
            if number not in self._states:
                with self._opening:
                    if number not in self._states:
                        self._open(number)

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the addresses of places in files, and the limit of the bytes wanted from each.

        The arguments and the results are int64 `(n,)`. A limit is at most the end of the file.
        Raises the errors of `open`.
        """
        self.open(np.unique(number))
        start = self.address[number]
        return start + offset, start + np.minimum(offset + nbytes, self.size[number])

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Checks that open files are unchanged, each at most once a second.

        Raises an OSError if one has another size or modification time, was replaced, or is gone.
        """
        now = time.monotonic()
        due = np.unique(numbers[self._checked[numbers] < now - _CHECK_SECONDS])
        for number in due.tolist():
            path, before = self.path_of(number), self._states[number]
            with _naming(path):
                state = _state(os.stat(path))
            if state != before:
                raise _changed(path, before[0], state[0])
        self._checked[due] = now

    def will_need(self, number: int, offset: int, nbytes: int) -> None:
        """Asks the system to read a part of an open file ahead, and does not wait for it."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(offset + nbytes, int(self.size[number]))
        if end > start:
            address = int(self.address[number]) + start
            _libc.madvise(address, end - start, mmap.MADV_WILLNEED)

    def _open(self, number: int) -> None:
        path = self.path_of(number)
        with _naming(path), open(path, 'rb') as file:
            found = os.fstat(file.fileno())
            state = _state(found)
            if state[0]:
                self.address[number] = _map(file, state[0])
                self._mapped.append((int(self.address[number]), state[0]))
                self.size[number] = state[0]
        # The version of what is mapped, not of what the path leads to by now.
        if self._versions and disk.local_version(found) != self._versions[number]:
            raise _changed(path, int(self._versions[number].partition('-')[0]), state[0])
        self._states[number], self._checked[number] = state, time.monotonic()


# Python's own mappings keep a descriptor until Python 3.13, which can do without.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(file: BinaryIO, size: int) -> int:
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _unmap(mapped: list[tuple[int, int]]) -> None:
    for address, size in mapped:
        _libc.munmap(address, size)


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


class FetchedFiles:
    """Ranges of numbered files, each fetched with one request and held until it is dropped.

    Attributes:
        size: Bytes of each file, int64, corrected for a file that turns out to be shorter.
    """

    def __init__(
        self,
        path_of: Callable[[int], str],
        size: Sequence[int] | np.ndarray,
        most_at_once: int,
        counter: ReadCounter | None = None,
    ):
        """Fetches nothing; then at most `most_at_once` ranges are in flight or wait to be taken.

        `counter` counts the bytes of all ranges, and those of files that are not added as chunks.
        """
        self.memory = Memory()
        self.size = np.array(size, np.int64)
        self._path_of = path_of
        self._described: dict[int, StoredFile] = {}
        self._most_at_once, self._counter = most_at_once, counter or ReadCounter()
        self._pool = ThreadPoolExecutor(most_at_once, 'fetch')
        self._is_finalizing = sys.is_finalizing  # of one that outlives all modules
        self._asked: collections.deque[Range] = collections.deque()
        self._coming: dict[Range, Future[bytes]] = {}
        self._held: dict[Range, bytes] = {}
        self._index()

    def add(self, files: Sequence[StoredFile]) -> int:
        """Adds files that must not change; they are numbered from the result on."""
        first = len(self.size)
        self._described |= dict(enumerate(files, first))
        self.size = np.append(self.size, [file.size for file in files]).astype(np.int64)
        return first

    def path_of(self, number: int) -> str:
        """The path of a file."""
        described = self._described.get(number)
        return described.path if described else self._path_of(number)

    def ask(self, ranges: Iterable[Range]) -> None:
        """Queues ranges to be fetched, after those that were queued before."""
        self._asked.extend(ranges)
        self._begin()

    def take(self, ranges: Iterable[Range]) -> None:
        """Waits for ranges that `ask` has queued; after that `locate` finds them.

        Raises an OSError if a file is missing, refused or out of reach.
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
        """Frees ranges; their addresses are invalid afterwards."""
        for part in ranges:
            del self._held[part]

    def close(self) -> None:
        """Ends the threads after the requests that are under way."""
        self._asked.clear()
        if not self._is_finalizing():  # or the interpreter has ended them
            self._pool.shutdown(wait=False, cancel_futures=True)

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Like `MappedFiles.locate`, for places in ranges that were taken."""
        part = np.searchsorted(self._keys, (number << _FILE_SHIFT) + offset, side='right') - 1
        address = self._addresses[part] + offset
        return address, np.minimum(address + nbytes, self._ends[part])

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Does nothing: fetched bytes cannot change."""

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
        chunk = int(number not in self._described)
        self._counter.add(chunks_in_flight=chunk)
        try:
            with _naming(self.path_of(number)):
                data = self._read(number, begin, end)
            self._counter.add(num_bytes=len(data), num_chunks=chunk)
        finally:
            self._counter.add(chunks_in_flight=-chunk)
        return data

    def _read(self, number: int, begin: int, end: int) -> bytes:
        file = self._described.get(number)
        if file:
            data = file.read_range(begin, end - begin)
            if not file.is_unchanged():
                raise _changed(file.path, file.size, os.path.getsize(file.path))
            return data
        try:
            return self._read_range(number, begin, end)
        except (
            stored_file.FileChanged
        ):  # shorter or longer than the index says: what is there is read
            self.size[number] = storage.describe_file(self.path_of(number)).size
            return self._read_range(number, begin, end)

    def _read_range(self, number: int, begin: int, end: int) -> bytes:
        size = int(self.size[number])
        file = StoredFile(self.path_of(number), size, '', None)
        return file.read_range(min(begin, size), max(0, min(end, size) - begin))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turns errors of the system into ones that say what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f'{path} is missing: restore it.') from error
    except OSError as error:
        if error.errno is None:  # of a bucket
            raise
        if isinstance(error, PermissionError):
            raise PermissionError(
                f'{path}: access was refused: let this user read the file.'
            ) from error
        if error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise OSError(
                f'{path} cannot be opened: this process has reached its limit of {limit} open '
                'files (ulimit -n). Raise the limit.'
            ) from error
        raise OSError(f'{path}: cannot be read ({error.strerror or error}).') from error


def _changed(path: str, before: int, now: int) -> OSError:
    return OSError(
        f'{path}: has changed while it was read: it had {before} bytes, now it has {now}, or '
        'another time of change. Start again from a checkpoint when the data set is complete.'
    )
