"""The beginning of a file that is being downloaded, kept on disk with the version of that file.

    with PartFile('/scratch/x.pt.part', file, print) as part:
        part.resume()                       # part.size bytes are there from an earlier process
        part.append(rest)
        if part.checksum() == file.checksum:
            part.move_to('/scratch/x.pt')

The version is in `x.pt.part.json` beside it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, Self

import google_crc32c

from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.source_files import SourceFile

_BLOCK = 1 << 20  # bytes read at a time


class PartFile:
    """An unfinished file, open for writing; callers must exclude other processes.

    Attributes:
        file: the file that it will be.
        size: bytes that are there.
    """

    def __init__(self, path: str, file: SourceFile, on_bytes: Callable[[int], None]):
        """Opens it; it counts as empty before `resume` or `read`.

        Args:
            path: an existing file.
            file: the file that it will be.
            on_bytes: is told how many more bytes are there; a negative number if they are dropped.
        """
        self.file = file
        self._path = path
        self._on_bytes = on_bytes
        self._stream = open(path, 'r+b', buffering=0)  # noqa: SIM115  closed by __exit__
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._stream.close()

    def resume(self) -> None:
        """Reads what an earlier process left, or drops it if it is of another version."""
        if self._recorded_version() != self.file.version:
            self._stream.truncate(0)
            path = self._record_path
            with naming(path), open(path, 'w', encoding='utf-8') as record:
                json.dump({'version': self.file.version}, record)
        self.read()

    def read(self) -> None:
        """Reads what is there as the beginning of the file."""
        while block := self._stream.read(_BLOCK):
            self._count(block)

    def append(self, block: bytes) -> None:
        """Writes the next block.

        Raises:
            OSError: the disk is full, or writing fails for another reason.
        """
        rest = memoryview(block)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:  # names no file by itself
            raise OSError(error.errno, error.strerror, self._path) from None
        self._count(block)

    def restart(self) -> None:
        """Drops everything."""
        self._stream.seek(0)
        self._stream.truncate()
        self._on_bytes(-self.size)
        self._begin()

    def checksum(self) -> str:
        """Returns the checksum of what is there, written as in `SourceFile`."""
        return f'{self._kind}:{self._hash.digest().hex()}'

    def is_whole(self) -> bool:
        """True if it has the size of the file and, if the storage knows one, the checksum."""
        found = self.checksum()
        return self.size == self.file.size and found == (self.file.checksum or found)

    def move_to(self, target: str) -> None:
        """Makes it the whole file, which survives a loss of power when this returns."""
        os.fsync(self._stream.fileno())
        os.replace(self._path, target)
        os.unlink(self._record_path)
        folder = os.open(os.path.dirname(target) or '.', os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _begin(self) -> None:
        self.size = 0
        self._kind = (self.file.checksum or 'sha256:').partition(':')[0]
        if self._kind == 'crc32c':
            self._hash: Any = google_crc32c.Checksum()
        else:
            self._hash = hashlib.new(self._kind.removeprefix('git-'), usedforsecurity=False)
        if self._kind == 'git-sha1':
            self._hash.update(b'blob %d\0' % self.file.size)

    def _count(self, block: bytes) -> None:
        self._hash.update(block)
        self.size += len(block)
        self._on_bytes(len(block))

    @property
    def _record_path(self) -> str:
        return f'{self._path}.json'

    def _recorded_version(self) -> str | None:
        try:
            with open(self._record_path, encoding='utf-8') as record:
                return json.load(record)['version']
        except (FileNotFoundError, ValueError):  # or a half-written one
            return None
