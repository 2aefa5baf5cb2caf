"""Files mapped into memory, and rows of bytes gathered out of them.

    files = MappedFiles(split.file)
    files.open(np.array([3, 17]))
    files.memory.gather(files.address[[3, 17]] + offsets, nbytes=8192)     # void8192 (2,)

Rows of one batch lie in as many files as it has rows. So places are addresses: one call of NumPy
gathers from all files together, without Python for a row, and without its lock.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np

from coyo11m_tfds.storage import source_files

# A file is checked for changes at most this often.
_CHECK_SECONDS = 1.0

# A process may have 65,530 mappings (vm.max_map_count), and other libraries need some.
MAX_FILES = 60_000

# Places in memory are counted from here, as NumPy takes no array at address 0, to what a processor
# of 64 bits gives programs. Times the bytes of a row, 32 KB at most, it has to be less than 2**63.
_ORIGIN = 1 << 12
_END = 1 << 48


class Memory:
    """All memory of this process as one array of NumPy; callers must know what lies where."""

    def __init__(self):
        everything = (ctypes.c_ubyte * (_END - _ORIGIN)).from_address(_ORIGIN)
        self._bytes = np.frombuffer(everything, np.uint8)
        self._zeros = np.zeros(mmap.PAGESIZE * 16, np.uint8)
        self.zeros: int = self._zeros.ctypes.data  # an address with 64 KB of zeros

    def gather(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Copies `nbytes` from each address; void `(n,)` of that size."""
        kind = np.dtype((np.void, nbytes))
        rows = np.ndarray(_END - _ORIGIN - nbytes, kind, self._bytes, strides=(1,))
        return rows[addresses - _ORIGIN]

    def view(self, begin: int, end: int) -> np.ndarray:
        """The bytes between two addresses as they are, uint8; not copied."""
        return self._bytes[begin - _ORIGIN : end - _ORIGIN]


class MappedFiles:
    """Numbered files, mapped when they are first asked for and as long as this lives.

    Several threads may use it.

    What is mapped must not be truncated: the system ends a process that reads there (SIGBUS). A
    mapping keeps no descriptor, so that `ulimit -n` does not bound the number of files.

    Attributes:
        memory: that they are mapped into.
        address: where each file begins, int64; 0 for one that is not open, or is empty.
        size: bytes of each file, int64.
        path_of: the path of each file, by its number.
    """

    def __init__(
        self,
        path_of: Callable[[int], str],
        num_files: int,
        versions: Sequence[str] | None = None,
    ):
        """Opens nothing.

        Args:
            path_of: the path of each file, by its number.
            num_files: how many there are.
            versions: of the files that may be mapped, as of `SourceFile`; None for any.

        Raises:
            ValueError: there are too many files.
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
        """Maps those that are not mapped yet.

        Raises:
            FileNotFoundError, PermissionError, OSError: a file cannot be opened, or has changed
                since its version was found.
        """
        for number in numbers.tolist():
            if number not in self._states:
                with self._opening:
                    if number not in self._states:
                        self._open(number)

    def locate(
        self, number: np.ndarray, offset: np.ndarray, nbytes: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The addresses of places in files, and of the end of what is there of them.

        Args:
            number: of each file, int64 `(n,)`.
            offset: of each place in its file.
            nbytes: how much is wanted from there on.

        Returns:
            `(address, limit)`, int64 `(n,)`: what reaches beyond the end of its file is cut there.

        Raises:
            FileNotFoundError, PermissionError, OSError: a file cannot be opened.
        """
        self.open(np.unique(number))
        start = self.address[number]
        return start + offset, start + np.minimum(offset + nbytes, self.size[number])

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Checks that open files have not changed, each at most once a second.

        Raises:
            OSError: one has another size or time of change, was replaced, or is gone.
        """
        now = time.monotonic()
        due = np.unique(numbers[self._checked[numbers] < now - _CHECK_SECONDS])
        for number in due.tolist():
            path, before = self.path_of(number), self._states[number]
            with naming(path):
                state = _state(os.stat(path))
            if state != before:
                raise changed(path, before[0], state[0])
        self._checked[due] = now

    def will_need(self, number: int, offset: int, nbytes: int) -> None:
        """Has the system read a part of an open file ahead, without waiting for it."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(offset + nbytes, int(self.size[number]))
        if end > start:
            address = int(self.address[number]) + start
            _libc.madvise(address, end - start, mmap.MADV_WILLNEED)

    def _open(self, number: int) -> None:
        path = self.path_of(number)
        with naming(path), _open_file(path) as file:
            found = os.fstat(file.fileno())
            state = _state(found)
            if state[0]:
                self.address[number] = _map(file, state[0])
                self._mapped.append((int(self.address[number]), state[0]))
                self.size[number] = state[0]
        # Of what is mapped, not of what the path leads to by now.
        if self._versions and source_files.local_version(found) != self._versions[number]:
            raise changed(path, int(self._versions[number].partition('-')[0]), state[0])
        self._states[number], self._checked[number] = state, time.monotonic()


# Python's own mappings keep a descriptor until Python 3.13, which can do without.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(file: BinaryIO, size: int) -> int:
    """Maps a file; returns its address."""
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _unmap(mapped: list[tuple[int, int]]) -> None:
    for address, size in mapped:
        _libc.munmap(address, size)


def _open_file(path: str) -> BinaryIO:
    """Opens a file; where there are too many open, with as many allowed as can be."""
    try:
        return open(path, 'rb')
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return open(path, 'rb')


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turns errors of the system into ones that say what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing(path) from error
    except PermissionError as error:
        raise PermissionError(
            f'{path}: access was refused: let this user read the file.'
        ) from error
    except OSError as error:
        if error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise OSError(
                f'{path} cannot be opened: this process may have only {limit} files open at once '
                '(ulimit -n), and has them. Raise that limit.'
            ) from error
        raise OSError(f'{path}: cannot be read ({error.strerror or error}).') from error


def changed(path: str, before: int, now: int) -> OSError:
    """The error for a file that is no longer what it was; takes its bytes before and now."""
    return OSError(
        f'{path}: has changed while it was read: it had {before} bytes, now it has {now}, or '
        'another time of change. Start again from a checkpoint when the data set is complete.'
    )


def missing(path: str) -> FileNotFoundError:
    """The error for a file that is not there."""
    return FileNotFoundError(f'{path} is missing: restore it.')
