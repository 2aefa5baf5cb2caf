"""The size and the checksum of a file, by which it is known to be complete."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import google_crc32c

from coyo11m_tfds.process.sizes import format_count

StrPath = str | os.PathLike[str]
OnBytes = Callable[[int], None]

_BLOCK = 4 << 20  # bytes read at once


def ignore_bytes(num_bytes: int) -> None:
    """The default of callers that show no progress."""
    del num_bytes


class FileState(NamedTuple):
    """The state of a stored file: its size in bytes and the CRC-32C of its content."""

    size: int
    crc32c: int  # negative if unknown

    def __str__(self) -> str:
        checksum = f' with CRC-32C {self.crc32c:08x}' if self.crc32c >= 0 else ''
        return f'{format_count(self.size, "byte")}{checksum}'

    def agrees_with(self, other: 'FileState') -> bool:
        """Returns whether both may be of one file; a checksum that one lacks is not compared."""
        if self.size != other.size:
            return False
        # A disk keeps none, and the hub others.
        is_unknown = self.crc32c < 0 or other.crc32c < 0
        return is_unknown or self.crc32c == other.crc32c

    def to_json(self) -> dict[str, Any]:
        """Returns a known state as JSON values."""
        return {'size': self.size, 'crc32c': f'{self.crc32c:08x}'}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> 'FileState':
        """Returns what `to_json` had; a KeyError, TypeError or ValueError for other values."""
        size = fields['size']
        crc32c = fields['crc32c']
        if not re.fullmatch('[0-9a-f]{8}', crc32c):
            raise ValueError(f'{crc32c!r} is not a CRC-32C of 8 hex digits')
        # `type`, because true is a whole number in Python.
        if type(size) is not int or size < 0:
            raise ValueError(f'{size!r} is not a number of bytes')
        return cls(size, int(crc32c, 16))


def compute_state(path: str | os.PathLike[str], on_bytes: OnBytes = ignore_bytes) -> FileState:
    """Reads a whole local file and returns its state; `on_bytes(n)` counts the bytes read."""
    # One core computes it at 13 GB/s from the page cache, faster than disks.
    checksum = google_crc32c.Checksum()
    size = 0
    with naming(path), open(path, 'rb', buffering=0) as file:
        for block in checksum.consume(file, _BLOCK):
            size += len(block)
            on_bytes(len(block))
    return FileState(size, int.from_bytes(checksum.digest(), 'big'))


def copy(path: str, target: str, on_bytes: OnBytes = ignore_bytes) -> FileState:
    """Copies a local file and returns the state of what was read; `on_bytes(n)` counts it."""
    size = 0
    crc32c = 0
    # Computed of the blocks in memory, so that the file is read once.
    with open(path, 'rb', buffering=0) as source, naming(target), open(target, 'wb') as file:
        while block := source.read(_BLOCK):
            file.write(block)
            size += len(block)
            crc32c = google_crc32c.extend(crc32c, block)
            on_bytes(len(block))
    return FileState(size, crc32c)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the path to an `OSError` without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        # One without a number has a message of its own, to which Python would add no path.
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def sync(path: str) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk."""
    # The folder of a file that is named without one.
    path = path or os.curdir
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        # Some network file systems have no fsync of a folder.
        has_no_fsync = error.errno in (errno.EINVAL, errno.ENOTSUP)
        if not (has_no_fsync and os.path.isdir(path)):
            raise
    finally:
        os.close(handle)
