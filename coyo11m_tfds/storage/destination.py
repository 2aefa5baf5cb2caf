"""A folder for finished files, local or `gs://`.

    folder = Destination('gs://bucket/data/coyo11m_tfds/latents/1.0.0')   # or a local path
    staging = folder.staging(fallback='/tmp')       # write the file there, then
    folder.store(f'{staging}/x', 'parts/x', crc32c)
    folder.write('parts/x.json', b'{}')
    folder.inventory('parts')                       # {'x': FileState(size, crc32c), 'x.json': ...}
    folder.verify({'parts/x': FileState(size, crc32c)})
    folder.remove(['parts/x'])

Under a name there is always a complete file or none, and after `store` returns, the file survives a
loss of power. Files are identified by their checksums, from the file itself or from the storage's
own record, never from a cache.
"""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.storage import file_state, locks, remote, source_files
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes, naming, sync
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.source_files import StoredFile

T = TypeVar('T')

_STAGING = '.staging'
# They only wait for the storage or the disk. The client of gs:// keeps ten connections.
_THREADS = 10
_NOT_READ = -1  # in place of the CRC-32C of a local file, of which only the size is known


def stays_inside(name: str) -> bool:
    """Whether a file with this relative name lies below its folder on every system.

    Objects of a bucket may have any name. A name that is absolute, or has an empty part, `.`, `..`,
    a backslash or a NUL, could lead out of the folder as a path.
    """
    return {'', '.', '..'}.isdisjoint(name.split('/')) and '\\' not in name and '\0' not in name


class Destination:
    """A folder for finished files, which need not exist yet. Several threads may use it.

    `Destination('gs://...')` returns a destination in a bucket with the same methods. On a disk,
    files are staged in a hidden sub-folder, flushed and renamed. Names are relative to the folder.
    Methods raise OSError if a file cannot be read or stored, such as on a full disk, or if
    credentials for the bucket are missing or refused (PermissionError).

    Attributes:
        folder: Path or URL of the folder, without a slash at the end.
    """

    is_remote = False

    def __new__(cls, folder: str | os.PathLike[str]) -> Self:
        kind = _Bucket if source_files.is_remote(folder) else cls
        return super().__new__(kind)  # type: ignore[return-value]

    def __init__(self, folder: str | os.PathLike[str]):
        """Does not touch the storage."""
        path = os.fspath(folder)
        if not path:
            raise ValueError('no destination given, expected a folder.')
        self.folder = path.rstrip('/') or '/'

    def staging(self, fallback: str | os.PathLike[str]) -> str:
        """Returns an existing local folder in which to write files for `store`.

        For a local destination this is a hidden sub-folder, so that `store` only renames; for a
        remote one it is `fallback`.
        """
        folder = os.path.join(self.folder, _STAGING)
        _make_folders(folder)
        return folder

    def store(self, local_file: str | os.PathLike[str], name: str, crc32c: int) -> None:
        """Moves a local file to `name`, and replaces a file of this name.

        Args:
            local_file: A file in the folder of `staging`.
            name: Its folders are made.
            crc32c: CRC-32C of the file, which a copy or an upload must have too.
        """
        local_file, target = os.fspath(local_file), self._path(name)
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

    def write(self, name: str, data: bytes) -> None:
        """Stores a small file, and replaces a file of this name."""
        target = self._path(name)
        _make_folders(os.path.dirname(target))
        with self._new_file() as path:
            with naming(path), open(path, 'wb') as file:
                file.write(data)
            _move(path, target)

    def check_space(self, needed: int) -> None:
        """Raises an OSError if so many bytes have no room; a bucket has no limit."""
        folder = pathlib.Path(self.folder).absolute()
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        if (free := shutil.disk_usage(existing).free) < needed:
            raise OSError(
                f'{self.folder} has {readable(free)} free, but needs {readable(needed)} more. '
                'Free some space or choose another folder.'
            )

    def copy(
        self,
        file: StoredFile,
        name: str,
        scratch: Scratch | None = None,
        on_bytes: Callable[[int], None] = ignore_bytes,
    ) -> FileState:
        """Copies a file of a source and returns the state of the copy.

        The original is compared with its own checksum, if it has one, and the copy with that of its
        storage. Between buckets the storage copies by itself; other remote files pass through the
        scratch folder on their way to a bucket.

        Args:
            name: Name of the copy; its folders are made, and a file of this name is replaced.
            scratch: Required for a remote file without a CRC-32C that goes to a bucket.
            on_bytes: See `remote.fetch`; called for a download.
        """
        with self._new_file() as path:
            if file.is_remote:
                remote.fetch(file, path, on_bytes)
                known = file.crc32c  # by which `fetch` has checked it
                state = (
                    file_state.compute_state(path) if known is None else FileState(file.size, known)
                )
            else:
                state = file_state.copy(file.path, path)
                _check_size(file, state)
            self.store(path, name, state.crc32c)
        return state

    def read(self, name: str) -> bytes | None:
        """Reads a small file; None if it is missing."""
        return self._read(name, None)

    def read_all(self, folder: str, names: Collection[str] | None = None) -> dict[str, bytes]:
        """Reads the (small) files directly in a sub-folder, by name; {} if it does not exist.

        With `names`, it reads only these, if they exist.
        """
        base = f'{folder}/' if folder else ''
        return self._of_all(folder, names, lambda name, found: self._read(base + name, found))

    def inventory(
        self,
        folder: str = '',
        on_bytes: Callable[[int], None] = ignore_bytes,
        names: Collection[str] | None = None,
    ) -> dict[str, FileState]:
        """Returns the states of the files directly in a sub-folder, by name; {} if it is missing.

        It reads local files completely, at the speed of the disk; remote files take one listing.

        Args:
            on_bytes: Called with the number of local bytes read, from several threads.
            names: Names of files to look at; None for all.
        """
        return self._of_all(folder, names, lambda name, found: self._state(found, on_bytes))

    def _of_all(
        self,
        folder: str,
        names: Collection[str] | None,
        look: Callable[[str, Any], T | None],
    ) -> dict[str, T]:
        """Looks at files; leaves out files that have been removed since the listing."""
        listed = self._list(folder)
        wanted = [name for name in sorted(listed) if names is None or name in names]

        def look_if_there(name: str) -> T | None:
            with contextlib.suppress(FileNotFoundError):
                return look(name, listed[name])
            return None

        with ThreadPoolExecutor(_THREADS) as pool:
            found = zip(wanted, pool.map(look_if_there, wanted), strict=True)
            return {name: value for name, value in found if value is not None}

    def _list(self, folder: str) -> Mapping[str, Any]:
        """Returns the files directly in a sub-folder, by name, for `_read` and `_state`."""
        try:
            with os.scandir(self._path(folder)) as entries:
                return {entry.name: entry.path for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return {}

    def _read(self, name: str, found: Any) -> bytes | None:
        path = found or self._path(name)
        with contextlib.suppress(FileNotFoundError), naming(path), open(path, 'rb') as file:
            return file.read()
        return None

    def _state(self, found: Any, on_bytes: Callable[[int], None]) -> FileState:
        return file_state.compute_state(found, on_bytes)

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of all files below the folder, by relative name; {} without files."""
        return {name: state.size for name, state in self._list_all().items()}

    def verify(self, states: Mapping[str, FileState]) -> None:
        """Checks with one listing that files exist; ignores other files.

        It compares checksums only in a bucket, whose listing has them.

        Args:
            states: Expected states by relative name.
        """
        listed = self._list_all()
        for name, expected in sorted(states.items()):
            found = listed.get(name)
            if found not in (expected, FileState(expected.size, _NOT_READ)):
                raise OSError(
                    f'{self.folder}/{name}: found {found or "no such file"}, expected {expected}; '
                    'another process has changed it. Run the same command again.'
                )

    def _list_all(self) -> dict[str, FileState]:
        found = {}
        for folder, _, names in os.walk(self.folder):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    state = FileState(os.path.getsize(path), _NOT_READ)
                    found[os.path.relpath(path, self.folder)] = state
        return found

    def sweep(self, prefix: str = _STAGING) -> None:
        """Removes leftovers of killed processes in the staging folder.

        Removes this folder, and sub-folders whose names begin with `prefix`, if they are empty.
        """
        locks.sweep(os.path.join(self.folder, _STAGING))
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith((_STAGING, prefix)):
                    with contextlib.suppress(OSError):  # not an empty folder
                        os.rmdir(entry.path)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, if they exist, and sub-folders that become empty."""
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
        """Yields a new path, in a folder that a sweep by another process leaves alone."""
        with locks.temporary_folder(self.staging(''), 'put-') as folder:
            yield os.path.join(folder, 'x')

    def _path(self, name: str) -> str:
        if name and not stays_inside(name):
            raise ValueError(f'{name!r} is not the name of a file in {self.folder}.')
        return os.path.join(self.folder, name) if name else self.folder


def _move(path: str, target: str) -> None:
    """Renames a file, and waits until content and new name are on the disk."""
    sync(path)
    os.replace(path, target)
    sync(os.path.dirname(target))


def _make_folders(folder: str) -> None:
    """Makes a folder and those above it, so that they survive a loss of power."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(os.path.abspath(folder))
    _make_folders(parent)
    os.makedirs(folder, exist_ok=True)  # another process may have been faster
    sync(parent)


def _check_size(file: StoredFile, state: FileState) -> None:
    if state.size != file.size:
        raise OSError(
            f'{file.path} has {state.size:,} bytes now, but had {file.size:,} when it was listed. '
            'Run the same command again, when no other program writes to it.'
        )


class _Bucket(Destination):
    """A folder in a bucket, to which files are uploaded; see `gcs`."""

    is_remote = True

    def __init__(self, folder: str | os.PathLike[str]):
        super().__init__(folder)
        self._gcs.split_url(os.fspath(folder))

    @property
    def _gcs(self) -> Any:
        from coyo11m_tfds.storage import gcs  # imports the client of the storage

        return gcs

    def staging(self, fallback: str | os.PathLike[str]) -> str:
        os.makedirs(fallback, exist_ok=True)
        return os.fspath(fallback)

    def store(self, local_file: str | os.PathLike[str], name: str, crc32c: int) -> None:
        self._gcs.upload(self._url(name), os.fspath(local_file), crc32c)
        os.remove(local_file)

    def write(self, name: str, data: bytes) -> None:
        self._gcs.write(self._url(name), data)

    def check_space(self, needed: int) -> None:
        pass

    def copy(
        self,
        file: StoredFile,
        name: str,
        scratch: Scratch | None = None,
        on_bytes: Callable[[int], None] = ignore_bytes,
    ) -> FileState:
        if file.crc32c is not None:
            state = FileState(file.size, file.crc32c)
            self._gcs.copy(file.path, self._url(name), state)
            return state
        if not file.is_remote:
            return self._upload(file, file.path, name)
        assert scratch is not None
        with scratch.hold(file, on_bytes=on_bytes) as path:
            return self._upload(file, path, name)

    def _upload(self, file: StoredFile, path: str, name: str) -> FileState:
        state = file_state.compute_state(path)
        _check_size(file, state)
        self._gcs.upload(self._url(name), path, state.crc32c)
        return state

    def _read(self, name: str, found: Any) -> bytes | None:
        return self._gcs.read(self._url(name))

    def _state(self, found: Any, on_bytes: Callable[[int], None]) -> FileState:
        return found.state

    def _list(self, folder: str) -> Mapping[str, Any]:
        return self._gcs.list_objects(self._url(folder))

    def _list_all(self) -> dict[str, FileState]:
        found = self._gcs.list_objects(self.folder, deep=True)
        return {name: x.state for name, x in found.items()}

    def sweep(self, prefix: str = '') -> None:
        """Does nothing, because a bucket has no staging folder."""

    def remove(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._gcs.delete, map(self._url, names)))

    def _url(self, name: str) -> str:
        return f'{self.folder}/{name}'.rstrip('/')
