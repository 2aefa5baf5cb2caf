"""`destination.Destination` on a local (or locally mounted) disk.

    folder = LocalFolder('/data/set')
    folder.put(f'{folder.staging("")}/x', 'sub/x', crc32c)
    folder.read_all('sub')   # {'x': b'...'}

Files are staged in a hidden folder of the same disk, flushed and renamed.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.file_state import FileState, naming
from coyo11m_tfds.storage.names import stays_inside

T = TypeVar('T')

_STAGING = '.staging'
_OLD = '.old'
# renameat2(2): the number for the current folder, and the flag to exchange two names.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Its errors where the kernel or the file system cannot exchange names.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
# Attempts to remove a folder that another process still writes to for a moment.
_REMOVALS = 10
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

    def identity(self, folder: str, last: str) -> str:
        path = self._path(folder)
        return str(os.stat(path).st_ino) if os.path.isfile(os.path.join(path, last)) else ''

    def verify(self, folder: str, states: Mapping[str, FileState]) -> None:
        sizes = {name: os.path.getsize(path) for name, path in self._files(folder).items()}
        wanted = {name: state.size for name, state in states.items()}
        file_state.compare(self._path(folder), sizes, wanted)

    def promote(
        self, folder: str, final: str, last: str, replace: bool, check: Callable[[], None]
    ) -> None:
        source, target = self._path(folder), self._path(final)
        is_complete, is_ready = (os.path.isfile(os.path.join(f, last)) for f in (target, source))
        if not is_complete and not is_ready:
            raise FileNotFoundError(f'{source}: {last} is missing, so the folder is not complete.')
        if _has_content(source):
            if is_complete and not (replace and is_ready):
                raise FileExistsError(
                    f'{target} exists already, so that {source} cannot take its place. Remove one '
                    'of the two.'
                )
            _sync_tree(source)
            check()
            if _has_content(target):
                _exchange(source, target)
            else:
                os.rename(source, target)
        for parent in sorted({os.path.dirname(target), os.path.dirname(source)}):
            if os.path.isdir(parent):
                _sync(parent)

    def sweep(self) -> None:
        _remove_tree(os.path.join(self._folder, _STAGING))

    def keep_only(self, folder: str, names: Collection[str], check: Callable[[], None]) -> None:
        for name, path in self._files(folder).items():
            if name not in names:
                check()
                os.remove(path)

    def remove(self, last: str, check: Callable[[], None]) -> None:
        check()
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove_tree(entry.path)
                elif entry.name != last:
                    os.remove(entry.path)
        _remove_tree(self._folder)

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
            raise ValueError(f'{name!r} is no name of a file in {self._folder}.')
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


def _has_content(folder: str) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _exchange(source: str, target: str) -> None:
    """Moves `source` to `target`, whose old content moves to `source` or `<source>.old`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, 'renameat2'):  # Linux
        paths = [os.fsencode(path) for path in (source, target)]
        if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NO_EXCHANGE:
            raise OSError(number, os.strerror(number), source, None, target)
    _remove_tree(source + _OLD)
    os.rename(target, source + _OLD)
    os.rename(source, target)


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


def _sync_tree(folder: str) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(os.path.join(parent, name))
        _sync(parent)


def _remove_tree(folder: str) -> None:
    """Removes a folder if it is there, even while others move files out of it or into it."""
    for attempts_left in reversed(range(_REMOVALS)):
        if not os.path.lexists(folder):
            return
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not attempts_left:
                raise
