"""A file of a storage: what its listing knows about the file, and ways to read the content."""

import dataclasses
import io
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import google_crc32c

from coyo11m_tfds import storage
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.file_state import FileState, OnBytes, ignore_bytes

# Bytes in a request; each file that is being read takes a few times as much memory.
_BLOCK = 8 << 20


class FileChanged(OSError):
    """A file has changed since it was described."""


class ChecksumScan:
    """Receives the content of a file, block by block; a subclass does more with each block."""

    crc32c: int = 0  # of all blocks so far

    def add(self, block: bytes) -> None:
        """Receives the next block."""
        self.crc32c = google_crc32c.extend(self.crc32c, block)


def common_path(files: 'Sequence[StoredFile]') -> str:
    """Returns the path of the only file, or that of the folder of several files."""
    path = files[0].path
    if len(files) == 1:
        return path
    return os.path.dirname(path)


AnyScan = TypeVar('AnyScan', bound=ChecksumScan)


class _ContentScan(ChecksumScan):
    """Keeps the content."""

    def __init__(self):
        self.content = bytearray()

    def add(self, block: bytes) -> None:
        """Appends the next block."""
        self.content += block
        super().add(block)


def file_changed(file: 'StoredFile', how: str) -> FileChanged:
    """Makes the error for a file of which something is not as listed."""
    return FileChanged(
        f'{file.path} has changed since it was listed ({how}). Run the same command again, when '
        'nobody writes to it any more.'
    )


def encoded_error(path: str, encoding: str) -> OSError:
    """Makes the error for a file that its storage keeps or sends in a compressed form."""
    advice = 'A proxy between here and the hub does this: go around it with no_proxy.'
    if path.startswith('gs://'):
        advice = (
            'Its ranges cannot be read. Store it as it is: download it, unpack it and upload it '
            'again, without --gzip-local or --gzip-in-flight; or, if its bytes were not compressed '
            f'at all, `gcloud storage objects update --clear-content-encoding {path}`.'
        )
    return OSError(f'{path}: has Content-Encoding: {encoding}, expected none. {advice}')


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """One file, as it was when it was listed."""

    path: str  # local, or URL on gs:// or hf://
    size: int  # in bytes
    # Changes with the content: the checksum, or else the size and the time of the last change.
    version: str
    # `crc32c:<8 hex digits>` on gs://; on the hub `sha256:<hex>` or, for small files,
    # `git-sha1:<hex>`; None if the storage knows none.
    checksum: str | None
    recorded: FileState | None = None  # of the record of `mirror`, if there is one
    encoding: str = ''  # Content-Encoding of an object whose bytes are not those of the file
    label: str = ''  # path within a source, for formats that compute keys from it

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def local_path(self) -> str | None:
        """The path, if the file can be opened and memory-mapped where it is."""
        return storage.local_path(self.path)

    @property
    def crc32c(self) -> int | None:
        """The CRC-32C that the storage keeps; None if it keeps none."""
        kind, _, digits = (self.checksum or '').partition(':')
        return int(digits, 16) if kind == 'crc32c' else None

    @property
    def state(self) -> FileState:
        """The size, and the CRC-32C if the storage keeps it."""
        crc32c = self.crc32c
        return FileState(self.size, -1 if crc32c is None else crc32c)

    def read_range(self, start: int, length: int) -> bytes:
        """Reads `length` bytes at offset `start`.

        Raises:
            ValueError: They are not all in the file.
            FileChanged: The file has changed since it was described.
            OSError: The storage does not give them.
        """
        if not 0 <= start <= start + length <= self.size:
            raise ValueError(
                f'{self.path}: has {self.size} bytes, expected {length} from byte {start} on.'
            )
        # HTTP has no range of no bytes.
        if not length:
            return b''
        return storage.class_of(self.path).read_range(self, start, length)

    def fetch(self, target: str, on_bytes: OnBytes = ignore_bytes) -> FileState:
        """Copies the file to a local path; the calls of `on_bytes` add up to `size`.

        Returns the state of the copy: without a CRC-32C if another checksum was compared.
        """
        return storage.class_of(self.path).fetch(self, target, on_bytes)

    def read(self) -> bytes:
        """Reads the content of a small file; compares its CRC-32C, if the storage keeps one.

        Raises a `FileChanged` for a local file that has changed since it was listed.
        """
        content = bytes(self.scan(_ContentScan).content)
        # Of one that has become longer, the listed size would be a part.
        if not self.is_unchanged():
            raise file_changed(self, 'or while it was read')
        return content

    def scan(self, make_scan: Callable[[], AnyScan], on_bytes: OnBytes = ignore_bytes) -> AnyScan:
        """Reads the file into a new scan; if its CRC-32C is wrong, reads it again into another."""

        def attempt() -> AnyScan:
            # A new one: what an earlier attempt has received may be damaged.
            scan = make_scan()
            for start in range(0, self.size, _BLOCK):
                block = self.read_range(start, min(_BLOCK, self.size - start))
                scan.add(block)
                on_bytes(len(block))
            # Each range was received whole, but nothing has compared its bytes yet.
            if self.crc32c not in (None, scan.crc32c):
                on_bytes(-self.size)
                raise retry.Corrupted(
                    f'CRC-32C of what was read is {scan.crc32c:08x}, the storage has '
                    f'{self.checksum}'
                )
            return scan

        return retry.call(attempt, f'reading {self.path}')

    def check_size(self, state: FileState) -> None:
        """Compares the state of a copy with the size that the file had when it was listed."""
        if state.size != self.size:
            raise file_changed(
                self, f'it has {format_count(state.size, "byte")}, not {self.size:,}'
            )

    def is_unchanged(self) -> bool:
        """Returns whether a local file has its version; other storages compare it in every read."""
        if not self.local_path:
            return True
        return storage.describe_file(self.path).version == self.version


class RangeReader(io.RawIOBase):
    """A stored file in the form of Python's files, which each `read` requests."""

    def __init__(self, file: StoredFile):
        """Begins at the start of the file; requests nothing."""
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to an offset from the start, the position or the end; returns the position."""
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}
        # Beyond the end there is nothing to read, but it is no error to go there.
        self._position = starts[whence] + offset
        return self._position

    def tell(self) -> int:
        """Returns the position."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer, as far as the file goes; returns the number of bytes."""
        # Negative, where `seek` went beyond the end.
        num_left = self._file.size - self._position
        length = min(len(buffer), num_left)
        if length <= 0:
            return 0
        buffer[:length] = self._file.read_range(self._position, length)
        self._position += length
        return length
