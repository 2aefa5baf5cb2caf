"""Numbered files in memory, mapped or fetched, whose bytes are gathered by their addresses."""

import collections
import contextlib
import ctypes
import errno
import mmap
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np
import numpy.ma  # else np.unique imports it, and a fork in that moment would wait for ever

from coyo11m_tfds import storage
from coyo11m_tfds.storage import disk, stored_file
from coyo11m_tfds.storage.stored_file import StoredFile

# A file is checked for changes at most this often.
_CHECK_SECONDS = 1.0

# A process may have 65,530 mappings (vm.max_map_count), and other libraries need some.
MAX_FILES = 60_000

# A file and an offset in it make one number: 8 TB and 500,000 files.
_FILE_SHIFT = 43

Range = tuple[int, int, int]  # number of the file, first byte, one past the last byte

_Region = tuple[int, int]  # address and number of bytes


class ReadCounts(NamedTuple):
    """Sums over the reads since a counter was made."""

    num_bytes: int = 0  # of all chunks, with rows of columns, or of all batches read by rows
    num_chunks: int = 0  # runs of records that were read
    chunks_in_flight: int = 0  # runs of records that are being read now
    bad_records: int = 0  # that could not be read and were left out, again in every epoch


class ReadCounter:
    """Counts what is read, as `ReadCounts`; one counter may serve several data sets."""

    def __init__(self) -> None:
        self._counts = ReadCounts()
        self._lock = threading.Lock()  # chunks are read by several threads

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            'a ReadCounter cannot be pickled or copied, because threads of this process add to it: '
            'make one in each process, and send what `read` returns'
        )

    def read(self) -> ReadCounts:
        """Returns the sums so far."""
        return self._counts

    def add(self, **amounts: int) -> None:
        """Adds to the named sums."""
        with self._lock:
            sums = {name: getattr(self._counts, name) + n for name, n in amounts.items()}
            self._counts = self._counts._replace(**sums)


class MappedFiles:
    """Numbered files, each mapped from its first use to the end of this object."""

    def __init__(
        self, path_of: Callable[[int], str], num_files: int, versions: Sequence[str] | None = None
    ):
        """Takes the versions that the files must have, as in `StoredFile`."""
        if num_files > MAX_FILES:
            raise ValueError(
                f'{path_of(0)}: {num_files} files cannot be mapped at once, at most {MAX_FILES} '
                "can; read them with engine='chunks'"
            )
        # 0 while a file is not open.
        self.address = np.zeros(num_files, np.int64)
        self.size = np.zeros(num_files, np.int64)
        self.path_of = path_of
        self._versions = versions
        self._states: dict[int, tuple[int, ...]] = {}
        self._check_times = np.zeros(num_files)  # of the last checks, in seconds
        self._mapped: list[_Region] = []
        # Not at exit: another thread may still read.
        weakref.finalize(self, _unmap, self._mapped).atexit = False
        self._opening = threading.Lock()

    def open(self, numbers: np.ndarray) -> None:
        for number in numbers.tolist():
            if number not in self._states:
                with self._opening:
                    if number not in self._states:
                        self._open(number)

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns where ranges of files begin and end in memory, at most at the ends of files.

        All memory between the two can be read as long as this object lives.
        """
        self.open(np.unique(number))
        address, size = self.address[number], self.size[number]
        return address + np.minimum(offset, size), address + np.minimum(offset + nbytes, size)

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Checks that open files are unchanged, each at most once a second."""
        now = time.monotonic()
        # A batch may use hundreds of files, too many to check for each batch.
        due_numbers = numbers[self._check_times[numbers] < now - _CHECK_SECONDS]
        if not len(due_numbers):
            return
        due_numbers = np.unique(due_numbers)
        for number in due_numbers.tolist():
            path, opened_state = self.path_of(number), self._states[number]
            with _explain_errors(path):
                state = _stat_state(os.stat(path))
            if state != opened_state:
                raise _changed_error(path, opened_state[0], state[0])
        self._check_times[due_numbers] = now

    def will_need(self, number: int, begin: int, end: int) -> None:
        """Asks the system to read ahead a range of an open file, without waiting for it."""
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = min(end, int(self.size[number])) - page
        if nbytes > 0:
            _libc.madvise(int(self.address[number]) + page, nbytes, mmap.MADV_WILLNEED)

    def _open(self, number: int) -> None:
        path = self.path_of(number)
        with _explain_errors(path), open(path, 'rb') as file:
            stat = os.fstat(file.fileno())
            # The system maps no empty files, and nobody reads from them.
            if stat.st_size:
                region = _map(file, stat.st_size), stat.st_size
                self._mapped.append(region)
                self.address[number], self.size[number] = region
        # The version of the mapped file, which may no longer be the one at the path.
        if self._versions and disk.local_version(stat) != self._versions[number]:
            size = int(self._versions[number].partition('-')[0])
            raise _changed_error(path, size, stat.st_size)
        self._states[number], self._check_times[number] = _stat_state(stat), time.monotonic()


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


def _unmap(regions: list[_Region]) -> None:
    for address, size in regions:
        _libc.munmap(address, size)


def _stat_state(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev


class FetchedFiles:
    """Ranges of numbered files, each fetched with one request and held until it is dropped."""

    def __init__(
        self,
        path_of: Callable[[int], str],
        size: Sequence[int] | np.ndarray,
        max_in_flight: int,
        counter: ReadCounter | None = None,
        pool: ThreadPoolExecutor | None = None,
    ):
        """Takes the number of ranges that may be in flight or wait to be taken.

        The threads of a `pool` keep their connections for the next object.
        """
        # Corrected for a file that turns out to be shorter.
        self.size = np.array(size, np.int64)
        self._path_of = path_of
        self._added: dict[int, StoredFile] = {}
        self._max_in_flight, self._counter = max_in_flight, counter or ReadCounter()
        self._owns_pool = pool is None
        self._pool = pool or ThreadPoolExecutor(max_in_flight, 'fetch')
        self._is_finalizing = sys.is_finalizing  # of one that outlives all modules
        self._queue: collections.deque[Range] = collections.deque()
        self._in_flight: dict[Range, Future[bytes]] = {}
        self._data: dict[Range, bytes] = {}
        self._index()

    def add(self, files: Sequence[StoredFile]) -> int:
        """Adds files that must not change; they are numbered from the result on."""
        first = len(self.size)
        self._added |= dict(enumerate(files, first))
        self.size = np.append(self.size, [file.size for file in files]).astype(np.int64)
        return first

    def path_of(self, number: int) -> str:
        file = self._added.get(number)
        return file.path if file else self._path_of(number)

    def request(self, ranges: Iterable[Range]) -> None:
        """Queues ranges to be fetched, after those that were queued before."""
        self._queue.extend(ranges)
        self._fill_flight()

    def take(self, ranges: Iterable[Range]) -> None:
        """Waits for requested ranges; afterwards, `locate` knows their addresses."""
        # Blocks that share a chunk take it twice.
        for key in ranges:
            if key not in self._data:
                self._data[key] = self._in_flight.pop(key).result()
                self._fill_flight()
        self._index()

    def fetch_again(self, ranges: Iterable[Range]) -> None:
        """Fetches ranges anew, because their bytes may have been changed on their way."""
        for key in ranges:
            self._data[key] = self._fetch(key)
        self._index()

    def drop(self, ranges: Iterable[Range]) -> None:
        """Frees ranges; their addresses are invalid afterwards."""
        for key in ranges:
            del self._data[key]

    def close(self) -> None:
        """Ends the threads after the requests that are under way."""
        self._queue.clear()
        # At the end of the program the interpreter has ended the threads.
        if self._owns_pool and not self._is_finalizing():
            self._pool.shutdown(wait=False, cancel_futures=True)

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Like `MappedFiles.locate`, for ranges within those that were taken, until `drop`."""
        index = np.searchsorted(self._keys, (number << _FILE_SHIFT) + offset, side='right') - 1
        address, limit = self._addresses[index] + offset, self._ends[index]
        return np.minimum(address, limit), np.minimum(address + nbytes, limit)

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Does nothing: fetched bytes cannot change."""

    def _fill_flight(self) -> None:
        while self._queue and len(self._in_flight) < self._max_in_flight:
            key = self._queue.popleft()
            self._in_flight[key] = self._pool.submit(self._fetch, key)

    def _index(self) -> None:
        keys = sorted(self._data)
        number, begin = np.array(keys, np.int64).reshape(-1, 3)[:, :2].T
        self._keys = (number << _FILE_SHIFT) + begin
        regions = [_region(self._data[key]) for key in keys]
        start, nbytes = np.array(regions, np.int64).reshape(-1, 2).T
        self._addresses, self._ends = start - begin, start + nbytes

    def _fetch(self, key: Range) -> bytes:
        number, begin, end = key
        # Rows of columns are no chunks, but their bytes count.
        num_chunks = int(number not in self._added)
        self._counter.add(chunks_in_flight=num_chunks)
        try:
            with _explain_errors(self.path_of(number)):
                data = self._read(number, begin, end)
            self._counter.add(num_bytes=len(data), num_chunks=num_chunks)
        finally:
            self._counter.add(chunks_in_flight=-num_chunks)
        return data

    def _read(self, number: int, begin: int, end: int) -> bytes:
        file = self._added.get(number)
        if file:
            data = file.read_range(begin, end - begin)
            # The read itself notices a change of an object in a bucket, but not of a local file.
            if not file.is_unchanged():
                raise _changed_error(file.path, file.size, os.path.getsize(file.path))
            return data
        try:
            return self._read_range(number, begin, end)
        except stored_file.FileChanged:
            # It is shorter or longer than the index says: read what there is.
            self.size[number] = storage.describe_file(self.path_of(number)).size
            return self._read_range(number, begin, end)

    def _read_range(self, number: int, begin: int, end: int) -> bytes:
        size = int(self.size[number])
        file = StoredFile(self.path_of(number), size, '', None)
        return file.read_range(min(begin, size), max(0, min(end, size) - begin))


def _region(data: bytes) -> _Region:
    # Empty bytes have no address. Their region is empty, so nobody reads from it.
    return np.frombuffer(data or b'\0', np.uint8).ctypes.data, len(data)


@contextlib.contextmanager
def _explain_errors(path: str) -> Iterator[None]:
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


def _changed_error(path: str, size_before: int, size: int) -> OSError:
    return OSError(
        f'{path}: has changed while it was read: it had {size_before} bytes, now it has {size}, or '
        'another time of change. Start again from a checkpoint when the data set is complete.'
    )
