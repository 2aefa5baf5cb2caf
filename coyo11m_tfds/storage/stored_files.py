"""Lists folders of stored files, and reads whole files with a check of their checksum."""

import pathlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import google_crc32c

from coyo11m_tfds.storage import remote, retry, source_files
from coyo11m_tfds.storage.file_state import ignore_bytes
from coyo11m_tfds.storage.source_files import StoredFile

# Bytes in a request; each file that is being read takes a few times as much memory.
_BLOCK = 8 << 20

Taken = TypeVar('Taken', bound='Taker')


def list_folder(folder: str, missing_ok: bool = False) -> dict[str, StoredFile]:
    """Returns the visible files of a folder by name; with `missing_ok`, {} for a missing folder."""
    try:
        if source_files.is_remote(folder):
            return source_files.list_files(folder, '', ('',))[1]
        paths = [path for path in pathlib.Path(folder).iterdir() if path.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        if missing_ok:
            return {}
        raise ValueError(f'{folder}: there is no such folder.') from None
    return {path.name: source_files.describe(path) for path in paths if path.name[0] != '.'}


class Taker(Protocol):
    """Protocol for the content of a file, block by block; `crc32c` is that of what was added."""

    crc32c: int

    def add(self, block: bytes) -> None:
        """Takes the next block."""


class Checksum:
    """Keeps only the checksum."""

    crc32c = 0

    def add(self, block: bytes) -> None:
        self.crc32c = google_crc32c.extend(self.crc32c, block)


class Content(Checksum):
    """Keeps the content of a small file."""

    def __init__(self):
        self.data = bytearray()

    def add(self, block: bytes) -> None:
        self.data += block
        super().add(block)


def read(
    file: StoredFile, new: Callable[[], Taken], on_bytes: Callable[[int], None] = ignore_bytes
) -> Taken:
    """Reads a file into a `Taker` from `new`, and again into a new one if its checksum is wrong."""

    def attempt() -> Taken:
        taken, done = new(), 0
        for start in range(0, file.size, _BLOCK):
            block = remote.read_range(file, start, min(_BLOCK, file.size - start))
            taken.add(block)
            on_bytes(len(block))
            done += len(block)
        if file.crc32c not in (None, taken.crc32c):
            on_bytes(-done)
            raise retry.Corrupted(
                f'CRC-32C of what was read is {taken.crc32c:08x}, the storage has {file.checksum}'
            )
        return taken

    return retry.call(attempt, f'reading {file.path}')
