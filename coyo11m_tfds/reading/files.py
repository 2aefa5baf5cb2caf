"""Files in memory, mapped or fetched, and copies of rows of their bytes."""

import bisect
import collections
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, NoReturn

import google_crc32c
import numpy as np
import numpy.ma  # else np.unique imports it, and a fork in that moment would wait for ever

from coyo11m_tfds import storage
from coyo11m_tfds.storage import disk, stored_file
from coyo11m_tfds.storage.stored_file import StoredFile

# A file is checked for changes at most this often.
_CHECK_SECONDS = 1.0

# A process may have 65,530 mappings (vm.max_map_count), and other libraries need some.
MAX_FILES = 60_000

# A file and an offset in it make one number: 8 TB and 1,000,000 files.
_FILE_SHIFT = 43

# Of a row, in bytes; times the bytes of all files, it has to be less than 2**63.
_GATHERED_AT_ONCE = 1 << 15

# Whole pages, and more than a value has, because they are read in the place of bad records. The
# system has no memory of their own for them.
_NUM_ZEROS = 1 << 28

_MAP_FIXED = 0x10  # of Linux and macOS: map at this address, instead of what is mapped there

Range = tuple[int, int, int]  # number of the file, first byte, one past the last byte


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


class HeldFiles:
    """Numbered files whose bytes are in memory: shards of splits, and files of their columns.

    A byte in memory has a *place*, a number. `locate` returns the places of ranges of files, and no
    method reads anything but bytes of these files and zeros, whatever places it gets. From place 0
    on there are `_NUM_ZEROS` zeros, for records that are not there.

    Attributes:
        size: Bytes of each file, int64 `(num_files,)`, corrected when a file is opened.
        attempts: How often bytes are read that turn out to be damaged.
    """

    attempts = 1

    def __init__(self) -> None:
        self.size = np.zeros(0, np.int64)
        self._columns: dict[int, StoredFile] = {}
        # Of each split, the number of its first shard, and the path of its n-th.
        self._splits: list[tuple[int, Callable[[int], str]]] = []

    def add_shards(self, path_of: Callable[[int], str], size: Sequence[int] | np.ndarray) -> int:
        """Adds the shards of a split; they are numbered from the result on."""
        self._splits.append((len(self.size), path_of))
        return self._add_sizes(size)

    def add_column(self, files: Sequence[StoredFile]) -> int:
        """Adds files that must not change; they are numbered from the result on."""
        self._columns |= dict(enumerate(files, len(self.size)))
        return self._add_sizes([file.size for file in files])

    def path_of(self, number: int) -> str:
        """Returns the path of a file."""
        file = self._columns.get(number)
        if file:
            return file.path
        split = bisect.bisect(self._splits, number, key=lambda split: split[0]) - 1
        first, path_of = self._splits[split]
        return path_of(number - first)

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places where ranges of files begin and end, at most at the ends of files."""
        raise NotImplementedError

    def gather(self, places: np.ndarray, nbytes: int) -> np.ndarray:
        """Copies `nbytes` bytes from each place; returns void `(n,)` with items of this size."""
        raise NotImplementedError

    def views(self, begin: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes from each `begin` to its `end` as uint8, without a copy."""
        raise NotImplementedError

    def crc32c(
        self, begin: np.ndarray, end: np.ndarray, before: Iterable[int] = itertools.repeat(0)
    ) -> np.ndarray:
        """Returns the CRC-32C of the bytes from each `begin` to its `end`, after others; uint32."""
        crcs = map(google_crc32c.extend, before, self.views(begin, end))
        return np.fromiter(crcs, np.uint32, len(begin))

    def request(self, ranges: Sequence[Range]) -> None:
        """Begins to read ranges, after those that were requested before; does not wait."""
        raise NotImplementedError

    def take(self, ranges: Iterable[Range]) -> None:
        """Waits for requested ranges, in the order of the requests; then `locate` knows them."""

    def take_again(self, ranges: Iterable[Range]) -> None:
        """Reads ranges anew, because their bytes may have been changed on their way."""

    def drop(self, ranges: Iterable[Range]) -> None:
        """Frees ranges that were taken; nothing may read from their places afterwards."""

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Raises an OSError if bytes in memory may have changed with their files."""

    def close(self) -> None:
        """Ends the reads that are under way, if nobody else needs them."""

    def _add_sizes(self, size: Sequence[int] | np.ndarray) -> int:
        first = len(self.size)
        self.size = np.append(self.size, np.array(size, np.int64))
        return first


class MappedFiles(HeldFiles):
    """Files that are mapped, each from its first use on, into one range of memory.

    One array covers the range and nothing else. So NumPy refuses what lies outside, and the range
    lives as long as any array of its bytes. The system reads what is used and frees what it needs,
    so nothing is taken or dropped; other threads may use the same files, so nothing is closed. All
    files are added before any is used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._opening = threading.Lock()
        self._states: dict[int, tuple[int, ...]] = {}  # of the open files

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places where ranges of files begin and end, at most at the ends of files."""
        self._open(number)
        start = self._starts[number]
        size = self.size[number]
        return start + np.minimum(offset, size), start + np.minimum(offset + nbytes, size)

    def gather(self, places: np.ndarray, nbytes: int) -> np.ndarray:
        """Copies `nbytes` bytes from each place; returns void `(n,)` with items of this size."""
        return gather_rows(self._bytes, places, nbytes)

    def views(self, begin: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes from each `begin` to its `end` as uint8, without a copy."""
        places = zip(begin.tolist(), end.tolist(), strict=True)
        return [self._bytes[first:last] for first, last in places]

    def request(self, ranges: Sequence[Range]) -> None:
        """Asks the system to read ranges ahead, without waiting for it."""
        self._open(np.array([number for number, _, _ in ranges], np.int64))
        for number, begin, end in ranges:
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            nbytes = min(end, int(self.size[number])) - page
            if nbytes > 0:
                # A system that reads nothing ahead does no harm.
                with contextlib.suppress(OSError):
                    start = int(self._starts[number]) + page
                    self._range.madvise(mmap.MADV_WILLNEED, start, nbytes)

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Checks that open files are unchanged, each at most once a second."""
        now = time.monotonic()
        # A batch may use hundreds of files, too many to check for each batch.
        due_numbers = numbers[self._check_times[numbers] < now - _CHECK_SECONDS]
        if not len(due_numbers):
            return
        due_numbers = np.unique(due_numbers)
        for number in due_numbers.tolist():
            path = self.path_of(number)
            opened_state = self._states[number]
            with _explain_errors(path):
                state = _stat_state(os.stat(path))
            if state != opened_state:
                raise _changed_error(path, opened_state[0], state[0])
        self._check_times[due_numbers] = now

    def _add_sizes(self, size: Sequence[int] | np.ndarray) -> int:
        first = super()._add_sizes(size)
        if len(self.size) > MAX_FILES:
            raise ValueError(
                f'{self.path_of(0)}: {len(self.size)} files cannot be mapped at once, at most '
                f"{MAX_FILES} can; read them with engine='chunks'"
            )
        self._reserve()
        return first

    def _reserve(self) -> None:
        """Reserves a range for all files; it reads as zeros where no file is mapped yet."""
        self._starts, nbytes = _lay_out(self.size)
        self._range = _map_zeros(nbytes)
        self._bytes = np.frombuffer(self._range, np.uint8)
        self._is_open = np.zeros(len(self.size), bool)
        self._check_times = np.zeros(len(self.size))  # of the last checks, in seconds

    def _open(self, numbers: np.ndarray) -> None:
        is_open = self._is_open[numbers]
        if is_open.all():
            return
        for number in np.unique(numbers[~is_open]).tolist():
            with self._opening:
                # Another thread may have opened it meanwhile.
                if not self._is_open[number]:
                    self._map(number)

    def _map(self, number: int) -> None:
        path = self.path_of(number)
        in_column = self._columns.get(number)
        with _explain_errors(path), open(path, 'rb') as file:
            stat = os.fstat(file.fileno())
            # Of a file that has grown, the index names no more bytes than there is room for.
            size = min(stat.st_size, int(self.size[number]))
            # The system maps no empty files, and nobody reads from them.
            if size:
                _map_at(self._bytes, int(self._starts[number]), file, size)
        # The version of the mapped file, which may no longer be the one at the path.
        if in_column and disk.local_version(stat) != in_column.version:
            raise _changed_error(path, in_column.size, stat.st_size)
        self.size[number] = size
        self._states[number] = _stat_state(stat)
        self._check_times[number] = time.monotonic()
        self._is_open[number] = True


def gather_rows(data: np.ndarray, places: np.ndarray, nbytes: int) -> np.ndarray:
    """Copies rows that begin anywhere in an array of bytes; an IndexError for rows outside of it.

    Returns void `(n,)`, with items of `nbytes` bytes.
    """
    # NumPy refuses arrays whose items could reach beyond 2**63 bytes.
    if nbytes <= _GATHERED_AT_ONCE:
        return _items(data, nbytes)[places]
    rows = np.empty((len(places), nbytes), np.uint8)
    for begin in range(0, nbytes, _GATHERED_AT_ONCE):
        size = min(_GATHERED_AT_ONCE, nbytes - begin)
        piece = _items(data, size)[places + begin]
        rows[:, begin : begin + size] = piece.view(np.uint8).reshape(len(rows), size)
    return rows.view((np.void, nbytes))[:, 0]


def _items(data: np.ndarray, nbytes: int) -> np.ndarray:
    """Returns an item of `nbytes` bytes at every byte: they overlap, and share the memory."""
    num_items = max(0, len(data) - nbytes + 1)
    return np.ndarray(num_items, np.dtype((np.void, nbytes)), data, strides=(1,))


def _lay_out(size: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns where each file begins in the range that holds all, and the bytes of the range."""
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    # No file lies at the beginning, so that zeros are there.
    ends = _NUM_ZEROS + np.cumsum(room)
    return ends - room, _NUM_ZEROS + int(room.sum())


def _map_zeros(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)


# Python's own mappings keep a descriptor until Python 3.13, and have an address of their own.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def _map_at(data: np.ndarray, start: int, file: BinaryIO, size: int) -> None:
    """Maps a file over bytes of a mapped array, from a page on; both are unmapped together."""
    address = data[start : start + size].ctypes.data
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, mmap.PROT_READ, flags, file.fileno(), 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _stat_state(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev


class FetchedFiles(HeldFiles):
    """Ranges of files, each fetched with one request and held until it is dropped."""

    attempts = 3

    def __init__(
        self,
        max_in_flight: int,
        counter: ReadCounter | None = None,
        pool: ThreadPoolExecutor | None = None,
    ):
        """Takes the number of ranges that may be in flight or wait to be taken.

        The threads of a `pool` keep their connections for the next object.
        """
        super().__init__()
        self._max_in_flight = max_in_flight
        self._counter = counter or ReadCounter()
        self._owns_pool = pool is None
        self._pool = pool or ThreadPoolExecutor(max_in_flight, 'fetch')
        self._is_finalizing = sys.is_finalizing  # of one that outlives all modules
        self._queue: collections.deque[Range] = collections.deque()
        self._in_flight: dict[Range, Future[bytes]] = {}
        self._data: dict[Range, bytes] = {}
        self._zeros = np.frombuffer(_map_zeros(_NUM_ZEROS), np.uint8)
        self._index()

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places where ranges begin and end, of ranges that lie in taken ones."""
        place = _place(number, offset)
        limit = self._ends[self._find(place)]
        return np.minimum(place, limit), np.minimum(place + nbytes, limit)

    def gather(self, places: np.ndarray, nbytes: int) -> np.ndarray:
        """Copies `nbytes` bytes from each place; returns void `(n,)` with items of this size."""
        index = self._find(places)
        in_range = places - self._begins[index]
        rows = np.empty(len(places), np.dtype((np.void, nbytes)))
        # The rows are many, and lie in few ranges.
        for number in np.unique(index).tolist():
            chosen = np.flatnonzero(index == number)
            rows[chosen] = gather_rows(self._held[number], in_range[chosen], nbytes)
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
                self._fill_flight()
        self._index()

    def take_again(self, ranges: Iterable[Range]) -> None:
        """Fetches ranges anew, because their bytes may have been changed on their way."""
        for key in ranges:
            self._data[key] = self._fetch(key)
        self._index()

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
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, place: np.ndarray) -> np.ndarray:
        """Returns which of the held ranges each place lies in, or behind."""
        return np.searchsorted(self._begins, place, side='right') - 1

    def _index(self) -> None:
        keys = sorted(self._data)
        number, begin, _ = np.array(keys, np.int64).reshape(-1, 3).T
        # The zeros come first, at place 0.
        self._held = [self._zeros]
        self._held += [np.frombuffer(self._data[key], np.uint8) for key in keys]
        self._begins = np.append(0, _place(number, begin))
        self._ends = self._begins + [len(data) for data in self._held]

    def _fill_flight(self) -> None:
        while self._queue and len(self._in_flight) < self._max_in_flight:
            key = self._queue.popleft()
            self._in_flight[key] = self._pool.submit(self._fetch, key)

    def _fetch(self, key: Range) -> bytes:
        number, begin, end = key
        # Rows of columns are no chunks, but their bytes count.
        num_chunks = int(number not in self._columns)
        self._counter.add(chunks_in_flight=num_chunks)
        try:
            with _explain_errors(self.path_of(number)):
                data = self._read(number, begin, end)
            self._counter.add(num_bytes=len(data), num_chunks=num_chunks)
        finally:
            self._counter.add(chunks_in_flight=-num_chunks)
        return data

    def _read(self, number: int, begin: int, end: int) -> bytes:
        file = self._columns.get(number)
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


def _place(number: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Returns the place of a byte of a file, behind the zeros, which have those of no file."""
    return (number + 1 << _FILE_SHIFT) + offset


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
