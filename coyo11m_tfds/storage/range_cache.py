"""Ranges of remote files, kept on a local disk for later epochs, runs and other processes.

    cache = range_cache.open_cache('/mnt/disk/cache', 100e9)
    begin, end = cache.widen(file, 5_000, 90_000)    # (4_096, 90_112): whole pages
    cache.keep(file, begin, file.read_range(begin, end - begin))
    cache.read(file, 5_000, 90_000)                  # the bytes; None where they are not kept

A kept file is sparse and has the pages of the remote one in their places, so that it can be mapped.
Behind them stand their CRC-32Cs, each of which is written after its page; 0 is a page that is not
kept. So `read` notices what a crash of the machine, damage or another program left there. Nothing
is locked: whoever writes a page writes the same bytes.
"""

import contextlib
import errno
import functools
import os
import re
import threading
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from absl import logging

from coyo11m_tfds import storage
from coyo11m_tfds.process.errors import FieldError, describe_error
from coyo11m_tfds.process.sizes import format_bytes
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.stored_file import StoredFile

_PAGE = 4096  # bytes; at most as large as a page of memory, whose multiples are mapped
_CRC = np.dtype('<u4')
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

# The share of its limit that a process takes at once, before it looks again how much others took:
# the limit may be exceeded by as much for each other process.
_SHARE = 1 / 64


def open_cache(folder: str, num_bytes: float) -> 'RangeCache':
    """Returns the cache in a local folder, one for all readers of this process.

    It takes up to `num_bytes` of the disk.

    Raises:
        FieldError: The folder cannot be made; its field is `cache_dir`.
    """
    path = storage.make_absolute(folder)
    return _open_in_process(os.getpid(), path, num_bytes)


@functools.cache
def _open_in_process(process: int, folder: str, num_bytes: float) -> 'RangeCache':
    """Returns the cache of a process: a forked one must not share locks with its parent."""
    del process
    return RangeCache(folder, num_bytes)


class RangeCache:
    """A folder with ranges of remote files; what came first stays, and a full one takes no more.

    Threads and processes share it.
    """

    def __init__(self, folder: str, num_bytes: float):
        """Makes the folder, which may take so many bytes together with what is in it.

        Raises:
            FieldError: The folder cannot be made; its field is `cache_dir`.
        """
        self._folder = folder
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._allowance = 0.0  # bytes that may be written before the next look at the folder
        self._is_full = False
        self._has_failed = False
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            # A full disk is no wrong argument: the run goes on without the cache.
            if error.errno not in _NO_ROOM:
                raise FieldError('cache_dir', folder, describe_error(error)) from error
            self._give_up(error)

    def path_of(self, file: StoredFile) -> str:
        """Returns the path of the local file with the kept pages of a remote one in their places.

        It has at least the size of the remote file, if any of its pages is kept.
        """
        return os.path.join(self._folder, _key(file))

    def widen(self, file: StoredFile, begin: int, end: int) -> tuple[int, int]:
        """Returns the range of whole pages around a range of a file; only those can be kept."""
        first = begin // _PAGE * _PAGE
        last = _num_pages(end) * _PAGE
        # The last page of a file may not be full.
        return first, min(last, file.size)

    def read(self, file: StoredFile, begin: int, end: int) -> bytes | None:
        """Returns a range of a file; None unless all of its pages are kept and intact."""
        first, last = self.widen(file, begin, end)
        # An error means that the file is not there, or not ours.
        with contextlib.suppress(OSError), open(self.path_of(file), 'rb', buffering=0) as kept:
            crcs = _read_crcs(kept, file, first, last)
            # 0 stands for a page that is not kept; one page in 2**32 has this CRC-32C, and is
            # fetched each time.
            num_pages = _num_pages(last - first)
            if len(crcs) < num_pages or not crcs.all():
                return None
            data = os.pread(kept.fileno(), last - first, first)
            if np.array_equal(crcs, _compute_crcs(data)):
                return data[begin - first : end - first]
        return None

    def holds(self, file: StoredFile, ranges: np.ndarray) -> bool:
        """Returns whether all ranges of a file, int64 `(n, 2)` with begins and ends, are kept.

        Compares no checksums.
        """
        crcs = np.zeros(0, _CRC)
        with contextlib.suppress(OSError), open(self.path_of(file), 'rb', buffering=0) as kept:
            crcs = _read_crcs(kept, file, 0, file.size)
        if len(crcs) < _num_pages(file.size):
            return False
        # With sums of missing pages, a range is looked up in two steps, however long it is.
        missing_before = np.append(0, np.cumsum(crcs == 0))
        first = ranges[:, 0] // _PAGE
        last = _num_pages(ranges[:, 1])
        return bool((missing_before[first] == missing_before[last]).all())

    def keep(self, file: StoredFile, begin: int, data: bytes) -> None:
        """Keeps a result of `widen` if there is room; a disk that refuses it gets no more.

        Replaces what is kept of it.
        """
        if self._has_failed:
            return
        crcs = _compute_crcs(data)
        # One thread at a time, so that each look at the folder finds what all others have taken.
        with self._lock:
            try:
                self._write(file, begin, data, crcs)
            except OSError as error:
                self._give_up(error)

    def _write(self, file: StoredFile, begin: int, data: bytes, crcs: np.ndarray) -> None:
        """Writes pages and then their checksums, if there is room; OSError if the disk fails."""
        path = self.path_of(file)
        # Whole pages, and behind them their checksums.
        num_pages = _num_pages(file.size)
        size = num_pages * (_PAGE + _CRC.itemsize)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with naming(path), open(descriptor, 'r+b', buffering=0) as kept:
            kept_crcs = _read_crcs(kept, file, begin, begin + len(data))
            is_new = len(kept_crcs) < len(crcs) or not kept_crcs.all()
            # What replaces damaged bytes takes no room; what is new, also that of checksums.
            if is_new and not self._take(len(data) + _PAGE):
                return
            # It is new, or somebody has cut it or put another file there.
            if os.fstat(descriptor).st_size != size:
                os.truncate(descriptor, size)
            _write_at(kept, data, begin)
            # Only now: a process may be killed between the two.
            _write_at(kept, crcs.tobytes(), _crc_place(file, begin))

    def _take(self, num_bytes: int) -> bool:
        """Takes room for some bytes; returns whether there is as much."""
        if self._is_full:
            return False
        # To measure takes time for each file of the folder, so room is taken for many writes.
        if self._allowance < num_bytes:
            used = self._measure()
            share = max(self._num_bytes * _SHARE, num_bytes)
            self._allowance = min(self._num_bytes - used, share)
            if self._allowance < num_bytes:
                self._is_full = True
                logging.info(
                    '%s: is full, with %s: what is fetched from now on is not kept; for more, '
                    'raise cache_gb.',
                    self._folder,
                    format_bytes(used),
                )
                return False
        self._allowance -= num_bytes
        return True

    def _measure(self) -> int:
        """Returns the bytes that all files of the folder take on the disk."""
        total = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    # The file system counts blocks of 512 bytes.
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def _give_up(self, error: OSError) -> None:
        """Keeps nothing more from here on, and says so once: reading goes on without a cache."""
        # Another thread may have said so while this one waited.
        if self._has_failed:
            return
        self._has_failed = True
        logging.warning(
            '%s: nothing more is kept there in this process, which reads on without: %s',
            self._folder,
            describe_error(error),
        )


def _key(file: StoredFile) -> str:
    """Returns the name of the local file: of the place, the size and the version of a file."""
    # Many commits leave a file as it is, and its version tells the others apart.
    place = re.sub('^(hf://datasets/[^/]+/[^/@]+)@[^/]+', r'\1', file.path)
    return json_digest.sha256([place, file.size, file.version])[:32]


def _num_pages(num_bytes: Any) -> Any:
    """Returns the pages of some bytes, of which the last may not be full; an int or an array."""
    return -(-num_bytes // _PAGE)


def _crc_place(file: StoredFile, begin: int) -> int:
    """Returns where the checksum of the page from byte `begin` on lies."""
    crcs_begin = _num_pages(file.size) * _PAGE
    page = begin // _PAGE
    return crcs_begin + page * _CRC.itemsize


def _read_crcs(kept: BinaryIO, file: StoredFile, begin: int, end: int) -> np.ndarray:
    """Reads the checksums of whole pages; fewer of a file that has been cut there."""
    num_bytes = _num_pages(end - begin) * _CRC.itemsize
    data = os.pread(kept.fileno(), num_bytes, _crc_place(file, begin))
    # Somebody may have cut the file in the middle of a checksum.
    num_whole = len(data) // _CRC.itemsize
    return np.frombuffer(data, _CRC, num_whole)


def _compute_crcs(data: bytes) -> np.ndarray:
    """Returns the CRC-32C of each page, of which the last may be short."""
    pages = (data[begin : begin + _PAGE] for begin in range(0, len(data), _PAGE))
    return np.fromiter(map(google_crc32c.value, pages), _CRC)


def _write_at(kept: BinaryIO, data: bytes, position: int) -> None:
    """Writes all of some bytes: a disk that becomes full first takes a part."""
    unwritten = memoryview(data)
    while unwritten:
        count = os.pwrite(kept.fileno(), unwritten, position)
        unwritten = unwritten[count:]
        position += count
