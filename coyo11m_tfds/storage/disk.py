"""Folders on a disk: files are staged in a hidden sub-folder, flushed to the disk and renamed."""

import collections
import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from coyo11m_tfds.process.sizes import format_bytes
from coyo11m_tfds.storage import file_state, locks
from coyo11m_tfds.storage.base import Suffixes, WritableFolder, is_visible
from coyo11m_tfds.storage.file_state import FileState, OnBytes, StrPath, naming, sync
from coyo11m_tfds.storage.stored_file import StoredFile, file_changed

if TYPE_CHECKING:
    from coyo11m_tfds.storage.scratch import Scratch

_STAGING = '.staging'


def local_version(state: os.stat_result) -> str:
    """Returns the version of a local file; see `StoredFile`."""
    # A disk keeps no checksum, and to compute one would read the file.
    return f'{state.st_size}-{state.st_mtime_ns}'


def _without_needless_parts(path: StrPath) -> str:
    """Returns a path without double slashes, and without `.` as a part."""
    plain = str(pathlib.PurePath(path))
    # Without its `./`, the name would be read as the home folder or as a URL.
    if plain.startswith(('~', 'gs:', 'hf:')):
        return os.path.join(os.curdir, plain)
    return plain


class Disk(WritableFolder):
    """A folder on a disk of this machine."""

    def __init__(self, folder: StrPath):
        """Takes the path of a folder, which need not exist."""
        super().__init__(_without_needless_parts(folder))
        # The base class has removed the slash at the end.
        self.folder = self.folder or '/'

    def path_of(self, name: str) -> str:
        """Returns the path of a file; ValueError for a name that would lead out of the folder."""
        if not name:
            return self.folder
        # Objects of a bucket, which are copied to disks, may have any name: one that is absolute or
        # has `..` in it would lead elsewhere.
        has_bad_segment = not {'', '.', '..'}.isdisjoint(name.split('/'))
        if has_bad_segment or '\\' in name or '\0' in name:
            raise ValueError(f'{name!r} is not the name of a file in {self.folder}.')
        return os.path.join(self.folder, name)

    # --- Listing and reading ---

    def list(self, sub_folder: str = '', *, deep: bool = False) -> dict[str, StoredFile]:
        """Returns files and links to files; with `deep`, also those of linked folders."""
        top = self.path_of(sub_folder)
        names = _walk(top) if deep else _names_in(top)
        files, _ = self._describe_all(top, names)
        return files

    def list_all(self) -> tuple[dict[str, StoredFile], tuple[str, ...]]:
        """Returns the files below the folder, and the names of dangling links."""
        return self._describe_all(self.folder, _walk(self.folder))

    def _describe_all(
        self, top: str, names: Iterable[str]
    ) -> tuple[dict[str, StoredFile], tuple[str, ...]]:
        """Returns files by their names within `top`, and the names of what is no file."""
        files: dict[str, StoredFile] = {}
        broken_names: list[str] = []
        for name in names:
            try:
                files[name] = self.describe(os.path.join(top, name))
            except FileNotFoundError:
                # It is a link to nothing, or has been removed by now.
                broken_names.append(name)
        return files, tuple(broken_names)

    def list_visible(self, sub_folder: str, suffixes: Suffixes) -> dict[str, StoredFile]:
        """Returns visible files as every storage does, but refuses what is no file.

        Raises:
            FileNotFoundError: There is no such folder.
            ValueError: A folder, or a dangling link, has the name of such a file.
        """
        names = os.listdir(self.folder)
        if sub_folder:
            # It may have no such sub-folder.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(self.path_of(sub_folder)):
                    names.append(f'{sub_folder}/{name}')
        files = {}
        for name in names:
            if not is_visible(name, suffixes):
                continue
            try:
                # Not `path_of`: the system has given the name, which may have backslashes.
                files[name] = self.describe(os.path.join(self.folder, name))
            except FileNotFoundError:
                # A dangling link, or a folder with the name of a file: not to be ignored.
                raise ValueError(
                    f'{self.folder}/{name} is missing or a folder; expected a file.'
                ) from None
        return files

    def exists(self) -> bool:
        """Returns whether the folder exists, be it empty."""
        return os.path.isdir(self.folder)

    @classmethod
    def describe(cls, path: str) -> StoredFile:
        """Returns a file, without a checksum; FileNotFoundError for a folder, too."""
        try:
            state = os.stat(path)
        except OSError as error:
            # A link that leads to itself is one to nothing.
            if error.errno == errno.ELOOP:
                raise FileNotFoundError(path) from None
            raise
        # To open a pipe would wait for somebody who writes to it.
        if not stat.S_ISREG(state.st_mode):
            raise FileNotFoundError(path)
        return StoredFile(_without_needless_parts(path), state.st_size, local_version(state), None)

    def read(self, name: str) -> bytes | None:
        """Reads a file; None if it is missing or a folder."""
        # Opened once: another process may replace the file between a look at its size and a read.
        path = self.path_of(name)
        missing = FileNotFoundError, NotADirectoryError, IsADirectoryError
        with contextlib.suppress(*missing), naming(path), open(path, 'rb') as file:
            return file.read()
        return None

    @classmethod
    def read_range(cls, file: StoredFile, start: int, length: int) -> bytes:
        """Reads `length` bytes from the byte `start` on; `FileChanged` for a shorter file."""
        with open(file.path, 'rb') as stream:
            stream.seek(start)
            content = stream.read(length)
        if len(content) != length:
            end = start + len(content)
            raise file_changed(file, f'it ends at byte {end}, not {file.size}')
        return content

    @classmethod
    def fetch(cls, file: StoredFile, target: str, on_bytes: OnBytes) -> FileState:
        """Copies a file, and compares its size with the listed one."""
        state = file_state.copy(file.path, target, on_bytes)
        file.check_size(state)
        return state

    # --- Writing ---

    def check_writable(self) -> None:
        """Raises an OSError if the folder is a file, or this user may not write to it."""
        path = pathlib.Path(self.folder).absolute()
        existing = self._existing()
        if not existing.is_dir():
            raise NotADirectoryError(f'{path}: {existing} is a file; name another folder.')
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f'{path}: {existing} cannot be written to by this user.')

    def check_space(self, num_bytes: int) -> None:
        """Raises an OSError if the disk has less room."""
        free = shutil.disk_usage(self._existing()).free
        if free < num_bytes:
            raise OSError(
                f'{self.folder} has {format_bytes(free)} free, but needs '
                f'{format_bytes(num_bytes)} more. Free some space or choose another folder.'
            )

    def _existing(self) -> pathlib.Path:
        """Returns the folder, or the closest one above it that exists."""
        path = pathlib.Path(self.folder).absolute()
        while not path.exists():
            path = path.parent
        return path

    def staging(self, fallback: StrPath) -> str:
        """Makes and returns a hidden sub-folder, from which files are only renamed."""
        folder = os.path.join(self.folder, _STAGING)
        _make_folders(folder)
        return folder

    def store(self, local_file: StrPath, name: str, crc32c: int) -> None:
        """Flushes a file to the disk and renames it; copies it from another file system."""
        local_file = os.fspath(local_file)
        target = self.path_of(name)
        _make_folders(os.path.dirname(target))
        try:
            _move_synced(local_file, target)
        except OSError as error:
            # No rename leads to another file system, so the file is copied, and the copy compared.
            if error.errno != errno.EXDEV:
                raise
            with self._new_file() as path:
                actual = file_state.copy(local_file, path).crc32c
                if actual != crc32c:
                    raise OSError(
                        f'{local_file}: CRC-32C is {actual:08x}, expected {crc32c:08x}; write it '
                        'again.'
                    ) from None
                _move_synced(path, target)
            os.remove(local_file)

    def write(self, name: str, data: bytes) -> None:
        """Writes a new file, flushes it to the disk and renames it."""
        target = self.path_of(name)
        _make_folders(os.path.dirname(target))
        with self._new_file() as path:
            with naming(path), open(path, 'wb') as file:
                file.write(data)
            _move_synced(path, target)

    def copy(self, file: StoredFile, name: str, scratch: 'Scratch', on_bytes: OnBytes) -> FileState:
        """Fetches a file of any storage into the folder; needs no `scratch`."""
        with self._new_file() as path:
            state = file.fetch(path, on_bytes)
            # The hub compares a checksum of its own, of another kind.
            if state.crc32c < 0:
                state = file_state.compute_state(path)
            self.store(path, name, state.crc32c)
        return state

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, if they exist, and sub-folders of them that become empty."""
        folders = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path_of(name))
            # All folders above it, up to this one.
            folder = os.path.dirname(name)
            while folder:
                folders.add(folder)
                folder = os.path.dirname(folder)
        # In this order the deepest come first; those that are not empty stay.
        for folder in sorted(folders, reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(self.path_of(folder))

    def sweep(self, prefix: str = _STAGING) -> None:
        """Removes what no living process holds in staging, and empty folders named `prefix...`."""
        locks.sweep_folder(os.path.join(self.folder, _STAGING))
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith((_STAGING, prefix)):
                    with contextlib.suppress(OSError):  # not an empty folder
                        os.rmdir(entry.path)

    def lock(self) -> 'DiskLock':
        """Returns the lock of the folder, a file next to it."""
        return DiskLock(self.folder + locks.SUFFIX)

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[str]:
        """Yields a new path, in a folder that a sweep by another process leaves alone."""
        with locks.temporary_folder(self.staging(''), 'put-') as folder:
            yield os.path.join(folder, 'x')


def _names_in(folder: str) -> list[str]:
    """Returns the names of all but the folders in a folder; none if it is missing."""
    # The first step of a walk is the folder itself.
    for _, _, names in os.walk(folder, onerror=_raise_unless_missing):
        return names
    return []


def _walk(top: str) -> Iterator[str]:
    """Yields the names of all files below a folder, also those of linked folders."""
    # Each folder once: first without links, so that files keep the names that they have without
    # them, then what links lead to and is new. A link to a folder above `top` would lead around.
    folders = collections.deque([top])
    seen = set(map(str, pathlib.PurePath(os.path.realpath(top)).parents))
    while folders:
        for parent, below, names in os.walk(folders.popleft(), onerror=_raise_unless_missing):
            real_parent = os.path.realpath(parent)
            if real_parent in seen:
                # `os.walk` goes on with what is left here.
                below.clear()
                continue
            seen.add(real_parent)
            # Sorted, because the first of two links to a folder decides the names of its files.
            below.sort()
            for name in below:
                path = os.path.join(parent, name)
                if os.path.islink(path):
                    folders.append(path)
            below_top = os.path.relpath(parent, top)
            for name in names:
                yield name if below_top == os.curdir else os.path.join(below_top, name)


def _raise_unless_missing(error: OSError) -> None:
    """Raises what `os.walk` would leave out, but for folders that are not there."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _move_synced(path: str, target: str) -> None:
    """Renames a file, and waits until content and new name are on the disk."""
    # The content first: after a loss of power the new name must not lead to an empty file.
    sync(path)
    try:
        os.replace(path, target)
    except IsADirectoryError:
        # It makes way only if it is empty: nobody knows what else is for.
        os.rmdir(target)
        os.replace(path, target)
    sync(os.path.dirname(target))


def _make_folders(folder: str) -> None:
    """Makes a folder and those above it, so that they survive a loss of power."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(os.path.abspath(folder))
    # From above: the name of a folder is safe only if that of its parent is.
    _make_folders(parent)
    # Another process may make the same folder at this moment.
    os.makedirs(folder, exist_ok=True)
    sync(parent)


class DiskLock(locks.Lock):
    """A locked file, which is removed in the end; see `locks`."""

    def __init__(self, path: str):
        """Takes the path of the file; makes nothing."""
        self._path = path

    def acquire(self) -> bool:
        """Tries to lock the file for who works in a folder; returns whether it did.

        Raises:
            OSError: The file system has no locks.
        """
        # The lock lies next to its folder, which need not exist.
        os.makedirs(os.path.dirname(self._path) or os.curdir, exist_ok=True)
        try:
            self._lock = locks.FileLock(self._path, wait=False)
        except BlockingIOError:
            with contextlib.suppress(OSError), open(self._path, encoding='utf-8') as file:
                self.holder = file.read(1000) or self.holder
            return False
        except OSError as error:
            if error.errno not in locks.NO_LOCKS:
                raise
            advice = 'Mount it with locks, or work on a local disk and copy the result'
            message = f'this file system has no locks (flock). {advice}'
            raise OSError(error.errno, message, self._path) from error
        # Only for the messages of those who wait, so a full disk is no reason to fail.
        with contextlib.suppress(OSError), open(self._path, 'w', encoding='utf-8') as file:
            file.write(locks.describe_this_process())
        return True

    def last_sign_of_life(self) -> float:
        """Returns the present, by `time.monotonic()`, while a process holds the lock; else -inf."""
        with contextlib.suppress(FileNotFoundError), open(self._path, 'rb') as file:
            # A shared lock, so that several that wait do not take each other for the holder.
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return time.monotonic()
        return float('-inf')

    def is_ours(self) -> bool:
        """Returns False if the file has been moved or removed, so that others lock a new one."""
        return self._lock.is_at_path()

    def release(self, patience: float) -> None:
        """Removes the file and releases the lock."""
        # Removed while it is locked: whoever locks it later finds that it is not at its path.
        with self._lock:
            if self._lock.is_at_path():
                os.remove(self._path)
