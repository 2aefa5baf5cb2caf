"""Folders of a storage that can be read, and those that can also be written to, with their verbs.

Names of files are relative to their folder.
"""

import abc
import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage.file_state import FileState, OnBytes, StrPath, compute_state, ignore_bytes
from coyo11m_tfds.storage.locks import Lock
from coyo11m_tfds.storage.stored_file import StoredFile

if TYPE_CHECKING:
    from coyo11m_tfds.storage.scratch import Scratch

T = TypeVar('T')
Suffixes = str | tuple[str, ...]

# They only wait for the storage or the disk. The client of gs:// keeps ten connections.
THREADS = 10


class ReadableFolder(abc.ABC):
    """A folder on a disk, in a bucket or on the hub, which several threads may use.

    Under a name there is always a complete file or none.
    """

    folder: str  # path or URL, without a slash at the end
    keeps_checksums: ClassVar[bool] = False  # whether a listing has the CRC-32C of every file
    keeps_versions: ClassVar[bool] = False  # whether a folder can be read as it was before

    def __init__(self, folder: StrPath):
        self.folder = os.fspath(folder).rstrip('/')

    def path_of(self, name: str) -> str:
        """Returns the path or URL of a file; '' is the folder."""
        return f'{self.folder}/{name}'.rstrip('/')

    def why_unreadable(self) -> str:
        """Returns why files of this storage cannot be read, if that is known; otherwise ''."""
        return ''

    # --- Listing ---

    @abc.abstractmethod
    def list(self, sub_folder: str = '', *, deep: bool = False) -> dict[str, StoredFile]:
        """Returns the files in a sub-folder, or all below it, by relative name; {} without any."""

    def list_all(self) -> tuple[dict[str, StoredFile], tuple[str, ...]]:
        """Returns the files below the folder, and names that lead to none, as dangling links do."""
        return self.list(deep=True), ()

    @abc.abstractmethod
    def exists(self) -> bool:
        """Returns whether the folder exists."""

    @classmethod
    @abc.abstractmethod
    def describe(cls, path: str) -> StoredFile:
        """Returns the file at a whole path, unread; raises a FileNotFoundError if it is missing."""

    def pin(self) -> 'ReadableFolder':
        """Returns the folder in its present version, where a storage keeps several."""
        return self

    def is_version_of(self, folder: 'ReadableFolder') -> bool:
        """Returns whether this is one version of a folder that does not name any itself."""
        # Only a storage that keeps versions has folders that name one.
        del folder
        return False

    def list_visible(self, sub_folder: str, suffixes: Suffixes) -> dict[str, StoredFile]:
        """Returns the visible files with some suffixes in the folder and one sub-folder of it.

        With '' in the folder alone.

        Raises:
            FileNotFoundError: There is no such folder.
            ValueError: A name with a suffix leads to no file.
        """
        files = self.list()
        if sub_folder:
            for name, file in self.list(sub_folder).items():
                files[f'{sub_folder}/{name}'] = file
        # A bucket has no folders, so one without files may still have been made by a marker.
        if not files and not self.exists():
            raise FileNotFoundError(self.folder)
        visible_files = {}
        for name, file in files.items():
            if is_visible(name, suffixes):
                visible_files[name] = file
        return visible_files

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of all files below the folder, by relative name; {} without files."""
        return {name: file.size for name, file in self.list(deep=True).items()}

    def verify(self, states: Mapping[str, FileState]) -> None:
        """Checks with one listing that files have these states, or at least sizes on a disk.

        Raises:
            OSError: One has another state, or is missing.
        """
        files = self.list(deep=True)
        for name, expected in sorted(states.items()):
            problem = ''
            if name not in files:
                problem = 'is missing'
            elif not files[name].state.agrees_with(expected):
                problem = f'has {files[name].state}'
            if problem:
                raise OSError(
                    f'{self.folder}/{name}: {problem}, expected {expected}; another process has '
                    'changed it. Run the same command again.'
                )

    def inventory(
        self,
        sub_folder: str = '',
        on_bytes: OnBytes = ignore_bytes,
        names: Collection[str] | None = None,
        *,
        deep: bool = False,
    ) -> dict[str, FileState]:
        """Returns the states of files in a sub-folder by name, or with `deep` of all below it.

        With `names`, of those that exist. Reads local files; `on_bytes(n)` counts the bytes read.
        """

        def state(file: StoredFile) -> FileState:
            # A disk keeps no checksums.
            if file.local_path:
                return compute_state(file.path, on_bytes)
            return file.state

        return _map_files(state, self.list(sub_folder, deep=deep), names)

    # --- Reading ---

    def read(self, name: str) -> bytes | None:
        """Reads a small file; None if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            return self.describe(self.path_of(name)).read()
        return None

    def read_all(self, sub_folder: str, names: Collection[str] | None = None) -> dict[str, bytes]:
        """Reads the small files in a sub-folder, by name: all, or those of `names` that exist."""

        def content(file: StoredFile) -> bytes | None:
            return self.read(f'{sub_folder}/{file.name}'.lstrip('/'))

        return _map_files(content, self.list(sub_folder), names)

    @classmethod
    @abc.abstractmethod
    def read_range(cls, file: StoredFile, start: int, length: int) -> bytes:
        """Reads `length` bytes of a file from the byte `start` on; see `StoredFile.read_range`."""

    @classmethod
    @abc.abstractmethod
    def fetch(cls, file: StoredFile, target: str, on_bytes: OnBytes) -> FileState:
        """Copies a file to the local path `target`; see `StoredFile.fetch`."""


class WritableFolder(ReadableFolder):
    """A folder on a disk or in a bucket; after `store` returns, a file survives a loss of power."""

    @abc.abstractmethod
    def check_writable(self) -> None:
        """Checks that files can be stored in and removed from the folder, which need not exist.

        Raises:
            OSError: They cannot.
        """

    def check_space(self, num_bytes: int) -> None:
        """Raises an OSError if so many bytes have no room; a bucket has no limit."""
        del num_bytes

    @abc.abstractmethod
    def staging(self, fallback: StrPath) -> str:
        """Makes and returns a local folder for files of `store`: inside this one, or `fallback`."""

    @abc.abstractmethod
    def store(self, local_file: StrPath, name: str, crc32c: int) -> None:
        """Moves a file from the folder of `staging` to `name`; replaces a file of this name.

        Raises:
            OSError: A copy of it, where one has to be made, does not have this CRC-32C.
        """

    @abc.abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Stores a small file, and replaces a file of this name."""

    @abc.abstractmethod
    def copy(self, file: StoredFile, name: str, scratch: 'Scratch', on_bytes: OnBytes) -> FileState:
        """Copies a file of any storage to `name`, compares both; returns the state of the copy.

        `scratch` holds what has to pass through this machine; `on_bytes(n)` counts what is read.
        """

    @abc.abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Removes files, if they exist, and sub-folders that become empty."""

    def sweep(self, prefix: str = '') -> None:
        """Removes what killed processes left in staging, and empty folders named `prefix...`."""
        del prefix

    @abc.abstractmethod
    def lock(self) -> Lock:
        """Returns the lock of the folder, which is not yet taken; see `locks.hold`."""


def _map_files(
    function: Callable[[StoredFile], T | None],
    files: Mapping[str, StoredFile],
    names: Collection[str] | None,
) -> dict[str, T]:
    """Returns a function's results for files by name, in the order of the names.

    Leaves out those that have been removed since the listing. `names` are None for all.
    """

    def call(name: str) -> T | None:
        with contextlib.suppress(FileNotFoundError):
            return function(files[name])
        return None

    chosen = sorted(files)
    if names is not None:
        chosen = sorted(files.keys() & set(names))
    results = {}
    with ThreadPool(THREADS) as threads:
        values = threads.map(call, chosen)
        for name, value in zip(chosen, values, strict=True):
            if value is not None:
                results[name] = value
    return results


def is_visible(name: str, suffixes: Suffixes) -> bool:
    """Returns whether the name of a file has one of the suffixes and is not hidden."""
    # A leading dot marks what tools leave behind, like macOS's '._000000-000009.pt'.
    base = os.path.basename(name)
    return not base.startswith('.') and base.endswith(suffixes)
