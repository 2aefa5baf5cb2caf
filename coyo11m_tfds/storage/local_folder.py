"""`destination.Destination` on a local (or locally mounted) disk.

    folder = LocalFolder('/data/set')
    folder.put(f'{folder.staging("")}/x', 'sub/x', crc32c)
    folder.read_all('sub')   # {'x': b'...'}

Files are staged in a hidden folder of the same disk, flushed and renamed.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from coyo11m_tfds.storage import file_state, held_folder
from coyo11m_tfds.storage.file_state import FileState, naming
from coyo11m_tfds.storage.names import stays_inside

T = TypeVar('T')

_STAGING = '.staging'
# Files that are read at a time: enough to keep the queue of one disk filled.
_READERS = 4


class LocalFolder:
    """A local folder; methods without a docstring are documented in `Destination`."""

    def __init__(self, folder: str):
        self._folder = folder

    def staging(self, fallback: str) -> str:
        del fallback
        folder = os.path.join(self._folder, _STAGING)
        _make_folders(folder)
        return folder

    def put(self, local_file: str, name: str, crc32c: int) -> None:
        target = self._path(name)
        _make_folders(os.path.dirname(target))
        try:
            _move(local_file, target)
        except OSError as error:
            if error.errno != errno.EXDEV:  # from another file system it has to be copied
                raise
            with self._new_file() as path:
                copied = file_state.copy(local_file, path).crc32c
                if copied != crc32c:
                    raise OSError(
                        f'{local_file}: CRC-32C is {copied:08x}, expected {crc32c:08x}; write it '
                        'again.'
                    ) from None
                _move(path, target)
            os.remove(local_file)

    def put_bytes(self, name: str, data: bytes) -> None:
        target = self._path(name)
        _make_folders(os.path.dirname(target))
        with self._new_file() as path:
            with naming(path), open(path, 'wb') as file:
                file.write(data)
            _move(path, target)

    def read_all(self, folder: str, names: Collection[str] | None) -> dict[str, bytes]:
        return _of_all(_read, self._files(folder, names), map)

    def inventory(
        self, folder: str, on_bytes: Callable[[int], None], names: Collection[str] | None
    ) -> dict[str, FileState]:
        files = self._files(folder, names)
        with ThreadPoolExecutor(_READERS) as pool:
            return _of_all(lambda path: file_state.of_file(path, on_bytes), files, pool.map)

    def read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return _read(self._path(name))
        return None

    def sizes(self) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    found[os.path.relpath(path, self._folder)] = os.path.getsize(path)
        return found

    def verify(self, states: Mapping[str, FileState]) -> None:
        there = self.sizes()
        found = {name: there[name] for name in states.keys() & there.keys()}
        wanted = {name: state.size for name, state in states.items()}
        file_state.compare(self._folder, found, wanted)

    def sweep(self) -> None:
        held_folder.sweep(os.path.join(self._folder, _STAGING))
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # no folder, or not an empty one
                    os.rmdir(entry.path)

    def remove(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path(name))
            while name := os.path.dirname(name):
                folders.add(name)
        for folder in sorted(folders, reverse=True):
            with contextlib.suppress(OSError):  # not empty, or gone
                os.rmdir(self._path(folder))

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[str]:
        """Yields a new path in the staging folder; a file still there at the end is deleted."""
        path = os.path.join(self.staging(''), uuid.uuid4().hex)
        try:
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    def _path(self, name: str) -> str:
        if name and not stays_inside(name):
            raise ValueError(f'{name!r} is not the name of a file in {self._folder}.')
        return os.path.join(self._folder, name) if name else self._folder

    def _files(self, folder: str, names: Collection[str] | None = None) -> dict[str, str]:
        """Paths of the files directly in a sub-folder by name, sorted; only of these names."""
        try:
            with os.scandir(self._path(folder)) as entries:
                files = sorted((e.name, e.path) for e in entries if e.is_file())
        except FileNotFoundError:
            return {}
        return {name: path for name, path in files if names is None or name in names}


def _of_all(
    look: Callable[[str], T], files: Mapping[str, str], apply: Callable[..., Iterable[T | None]]
) -> dict[str, T]:
    """Looks at files, by name; leaves out those that others have removed since they were listed."""

    def look_if_there(path: str) -> T | None:
        with contextlib.suppress(FileNotFoundError):
            return look(path)
        return None

    found = zip(files, apply(look_if_there, files.values()), strict=True)
    return {name: value for name, value in found if value is not None}


def _move(path: str, target: str) -> None:
    """Renames a file; when it returns, content and new name are safely on the disk."""
    _sync(path)
    os.replace(path, target)
    _sync(os.path.dirname(target))


def _read(path: str) -> bytes:
    with naming(path), open(path, 'rb') as file:
        return file.read()


def _make_folders(folder: str) -> None:
    """Makes a folder and those above it, so that they survive a loss of power."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(os.path.abspath(folder))
    _make_folders(parent)
    os.makedirs(folder, exist_ok=True)  # another process may have been faster
    _sync(parent)


def _sync(path: str) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path or os.curdir, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        # Some network file systems have no fsync of a folder.
        if not (os.path.isdir(path or os.curdir) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)
