"""Files in memory, mapped ones, and copies of rows of their bytes."""

import bisect
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import google_crc32c
import numpy as np
import numpy.ma  # else np.unique imports it, and a fork in that moment would wait for ever

from coyo11m_tfds.storage import disk
from coyo11m_tfds.storage.stored_file import StoredFile

# A file is checked for changes at most this often.
_CHECK_SECONDS = 1.0

# A process may have 65,530 mappings (vm.max_map_count), and other libraries need some.
MAX_FILES = 60_000

# Of a row, in bytes; times the bytes of all files, it has to be less than 2**63.
_GATHERED_AT_ONCE = 1 << 15

# Whole pages, and more than a value has, because they are read in the place of bad records. The
# system has no memory of their own for them.
NUM_ZEROS = 1 << 28

_MAP_FIXED = 0x10  # of Linux and macOS: map at this address, instead of what is mapped there

Range = tuple[int, int, int]  # number of the file, first byte, one past the last byte


class HeldFiles:
    """Numbered files whose bytes are in memory: shards of splits, and files of their columns.

    A byte in memory has a *place*, a number. `locate` returns the places of ranges of files, and no
    method reads anything but bytes of these files and zeros, whatever places it gets. From place 0
    on there are `NUM_ZEROS` zeros, for records that are not there: so a whole batch is read by the
    same calls, whether some of its records are missing or not.

    Attributes:
        size: Bytes of each file, int64 `(num_files,)`, corrected when a file is opened.
        is_mapped: Whether rows are read without the rest of their chunk.
        attempts: How often bytes are read that turn out to be damaged.
    """

    is_mapped = False
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

    def in_column(self, number: int) -> StoredFile | None:
        """Returns a file of a column as it was added; None for a shard."""
        return self._columns.get(number)

    def path_of(self, number: int) -> str:
        """Returns the path of a file."""
        file = self._columns.get(number)
        if file:
            return file.path
        # The split that began last before this number.
        num_begun = bisect.bisect(self._splits, number, key=lambda split: split[0])
        first, path_of = self._splits[num_begun - 1]
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
        views = self.views(begin, end)
        crcs = map(google_crc32c.extend, before, views)
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

    is_mapped = True
    map_flags = mmap.MAP_SHARED

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
        # Of a file that has been cut, what lies behind its end is not mapped.
        size = self.size[number]
        begin = np.minimum(offset, size)
        end = np.minimum(offset + nbytes, size)
        return start + begin, start + end

    def gather(self, places: np.ndarray, nbytes: int) -> np.ndarray:
        """Copies `nbytes` bytes from each place; returns void `(n,)` with items of this size."""
        return gather_rows(self._bytes, places, nbytes)

    def views(self, begin: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes from each `begin` to its `end` as uint8, without a copy."""
        places = zip(begin.tolist(), end.tolist(), strict=True)
        return [self._bytes[first:last] for first, last in places]

    def request(self, ranges: Sequence[Range]) -> None:
        """Asks the system to read ranges ahead, without waiting for it."""
        numbers = [number for number, _, _ in ranges]
        self._open(np.array(numbers, np.int64))
        for number, begin, end in ranges:
            # The system takes advice only about ranges that begin with a page.
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            # A file that has been cut is not mapped behind its end.
            size = int(self.size[number])
            nbytes = min(end, size) - page
            if nbytes > 0:
                # A system that reads nothing ahead does no harm.
                with contextlib.suppress(OSError):
                    start = int(self._starts[number]) + page
                    self._range.madvise(mmap.MADV_WILLNEED, start, nbytes)

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Checks that open files are unchanged, each at most once a second."""
        now = time.monotonic()
        # A batch may use hundreds of files, too many to check for each batch.
        is_due = self._check_times[numbers] < now - _CHECK_SECONDS
        due_numbers = numbers[is_due]
        if not len(due_numbers):
            return
        due_numbers = np.unique(due_numbers)
        for number in due_numbers.tolist():
            path = self.path_of(number)
            opened_state = self._states[number]
            # By path, not by descriptor: a file that was replaced is another one, too.
            with explain_errors(path):
                state = _stat_state(os.stat(path))
            if state != opened_state:
                raise changed_error(path, opened_state[0], state[0])
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
        # Anew for every addition: nothing is mapped yet, and a reserved range costs nothing.
        self._starts, nbytes = _lay_out(self.size)
        self._range = map_zeros(nbytes)
        self._bytes = np.frombuffer(self._range, np.uint8)
        self._is_open = np.zeros(len(self.size), bool)
        self._check_times = np.zeros(len(self.size))  # of the last checks, in seconds

    def _open(self, numbers: np.ndarray) -> None:
        """Maps those of some files that are not mapped yet."""
        is_open = self._is_open[numbers]
        # Nearly always, without the lock.
        if is_open.all():
            return
        for number in np.unique(numbers[~is_open]).tolist():
            with self._opening:
                # Another thread may have opened it meanwhile.
                if not self._is_open[number]:
                    self._map(number)

    def _map(self, number: int) -> None:
        """Maps a file; raises an OSError for a file of a column that has changed."""
        path = self.path_of(number)
        in_column = self._columns.get(number)
        with explain_errors(path), open(path, 'rb') as file:
            stat = os.fstat(file.fileno())
            # Of a file that has grown, the index names no more bytes than there is room for.
            size = min(stat.st_size, int(self.size[number]))
            self._map_bytes(number, file, size)
        # The version of the mapped file, which may no longer be the one at the path.
        if in_column and disk.local_version(stat) != in_column.version:
            raise changed_error(path, in_column.size, stat.st_size)
        self.size[number] = size
        self._states[number] = _stat_state(stat)
        self._check_times[number] = time.monotonic()
        # Last, because other threads look at it without the lock.
        self._is_open[number] = True

    def _map_bytes(self, number: int, file: BinaryIO, size: int) -> None:
        # The system maps no empty files, and nobody reads from them.
        if size:
            _map_at(self._bytes, int(self._starts[number]), file, size, self.map_flags)


def gather_rows(data: np.ndarray, places: np.ndarray, nbytes: int) -> np.ndarray:
    """Returns copies of rows that begin anywhere in an array of bytes.

    They are void `(n,)`, with items of `nbytes` bytes. Raises an IndexError for rows outside of it.
    """
    # NumPy refuses arrays whose items could reach beyond 2**63 bytes: as it counts, overlapping
    # items take their size each. So large rows are copied in pieces.
    if nbytes <= _GATHERED_AT_ONCE:
        return _items(data, nbytes)[places]
    rows = np.empty((len(places), nbytes), np.uint8)
    for begin in range(0, nbytes, _GATHERED_AT_ONCE):
        size = min(_GATHERED_AT_ONCE, nbytes - begin)
        items = _items(data, size)
        piece = items[places + begin].view(np.uint8)
        rows[:, begin : begin + size] = piece.reshape(len(rows), size)
    return rows.view((np.void, nbytes))[:, 0]


def _items(data: np.ndarray, nbytes: int) -> np.ndarray:
    """Returns an item of `nbytes` bytes at every byte: they overlap, and share the memory."""
    # Rows begin anywhere, so every byte is the index of an item; NumPy then checks the bounds.
    num_items = max(0, len(data) - nbytes + 1)
    return np.ndarray(num_items, np.dtype((np.void, nbytes)), data, strides=(1,))


def _lay_out(size: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns where each file begins in the range that holds all, and the bytes of the range."""
    # A file can only be mapped at the beginning of a page.
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    # No file lies at the beginning, so that zeros are there.
    ends = NUM_ZEROS + np.cumsum(room)
    return ends - room, NUM_ZEROS + int(room.sum())


def map_zeros(nbytes: int) -> mmap.mmap:
    """Returns zeros, for which the system has no memory of their own."""
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)


# Python's own mappings keep a descriptor until Python 3.13, and have an address of their own.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,  # address
    ctypes.c_size_t,  # bytes
    ctypes.c_int,  # protection
    ctypes.c_int,  # flags
    ctypes.c_int,  # descriptor of the file
    ctypes.c_long,  # offset in the file
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map_at(data: np.ndarray, start: int, file: BinaryIO, size: int, flags: int) -> None:
    """Maps a file over bytes of a mapped array, from a page on; both are unmapped together."""
    # `_lay_out` has left room for the whole file there.
    address = data[start : start + size].ctypes.data
    flags |= _MAP_FIXED
    mapped = _libc.mmap(address, size, mmap.PROT_READ, flags, file.fileno(), 0)
    if mapped != address:
        raise _system_error()


def replace_bytes(data: np.ndarray, start: int, new: bytes) -> None:
    """Replaces bytes of a private mapping, for this process alone.

    Their pages then take memory. Only one thread at a time may replace bytes of an array.
    """
    if not new:
        return
    address = data[start : start + len(new)].ctypes.data
    # Whole pages are made writable, and read-only again: NumPy's array must not be written to.
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + len(new) - page
    if _libc.mprotect(page, size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise _system_error()
    ctypes.memmove(address, new, len(new))
    _libc.mprotect(page, size, mmap.PROT_READ)


def _system_error() -> OSError:
    """Returns the error that the last call of the C library has left."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _stat_state(stat: os.stat_result) -> tuple[int, ...]:
    """Returns what differs between two states of a file at a path, its size first."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev


@contextlib.contextmanager
def explain_errors(path: str) -> Iterator[None]:
    """Turns errors of the system into ones that say what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f'{path} is missing: restore it.') from error
    except OSError as error:
        # It comes from a bucket or the hub, and says already what to do.
        if error.errno is None:
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


def changed_error(path: str, size_before: int, size: int) -> OSError:
    """Makes the error for a file that was changed or replaced in the middle of a run."""
    return OSError(
        f'{path}: has changed while it was read: it had {size_before} bytes, now it has {size}, or '
        'another time of change. Start again from a checkpoint when the data set is complete.'
    )
