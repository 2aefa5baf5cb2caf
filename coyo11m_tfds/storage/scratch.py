"""Folders for remote files while they are needed; the next holder deletes those of killed ones."""

import concurrent.futures
import contextlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coyo11m_tfds import schema, storage
from coyo11m_tfds.process import threads
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.file_state import OnBytes, StrPath, ignore_bytes
from coyo11m_tfds.storage.stored_file import StoredFile, common_path

# Of several files that are held together; small ones mostly wait for the storage.
_DOWNLOADS_AT_ONCE = 8


def choose_folder(program: str, data_dir: str, chosen: str = '') -> str:
    """Returns the user's choice or, without one, `.PROGRAM` in a local `data_dir` or the cache.

    Raises:
        ValueError: The user has chosen a folder that is not local.
    """
    if chosen:
        return _find_chosen(chosen)
    if not data_dir or not storage.local_path(data_dir):
        return user_cache(program)
    return os.path.normpath(os.path.join(storage.expand_home(data_dir), f'.{program}'))


def _find_chosen(folder: StrPath) -> str:
    """Returns the path of a folder that the user has chosen.

    Raises a ValueError for a URL: what lies in scratch is opened as a local file.
    """
    if storage.local_path(folder) is None:
        raise ValueError(f'scratch_dir is {os.fspath(folder)!r}, expected a local folder.')
    return storage.expand_home(folder)


def user_cache(*names: str) -> str:
    """Returns a folder within this user's cache, which need not exist."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return os.path.join(cache, *names)


def check_out(out: str, scratch_dir: StrPath) -> None:
    """Checks that files can be stored in `out`, and that the user's choice of scratch is local.

    Raises a ValueError or an OSError if not.
    """
    if scratch_dir:
        _find_chosen(scratch_dir)
    if os.path.isfile(out):
        raise ValueError(f'{out} is a file; expected a folder.')
    # Of a bucket, only a trial tells.
    storage.open_writable_folder(out).check_writable()


@contextlib.contextmanager
def scratch_folder(out: str, chosen: StrPath) -> Iterator[str]:
    """Makes a folder for this run, in a local `out` so that parts are only renamed.

    It lies in the folder `chosen` by the user, if there is one; `out` may be a URL.
    """
    is_new = not os.path.exists(out)
    if chosen:
        chosen = _find_chosen(chosen)
    if storage.local_path(out):
        parent = Path(chosen or out)
        # What another host of a shared disk has must stay, even if locks do not reach so far.
        prefix = f'.{platform.node()}-'
        Path(out).mkdir(parents=True, exist_ok=True)
    else:
        parent = Path(chosen or user_cache(schema.NAME))
        prefix = 'parts-'
    parent.mkdir(parents=True, exist_ok=True)
    try:
        with locks.temporary_folder(parent, prefix) as folder:
            yield folder
    finally:
        # Made above, and left empty by a run that has failed. There may be no folder, if this is a
        # bucket, or it is not empty.
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(out)


class Scratch:
    """Local copies of remote files, in a folder that need not exist; local ones stay in place."""

    def __init__(self, folder: StrPath):
        """Takes the folder; ValueError for a URL."""
        self._folder = _find_chosen(folder)

    @contextlib.contextmanager
    def make_folder(self) -> Iterator[str]:
        """Returns a new local folder, which is removed after the `with` block."""
        os.makedirs(self._folder, exist_ok=True)
        with locks.temporary_folder(self._folder, 'held-') as folder:
            yield folder

    @contextlib.contextmanager
    def hold(self, file: StoredFile, **options: Any) -> Iterator[str]:
        """Returns the local path of one file; see `hold_all`."""
        with self.hold_all([file], **options) as paths:
            yield paths[0]

    @contextlib.contextmanager
    def hold_all(
        self, files: Sequence[StoredFile], *, on_bytes: OnBytes = ignore_bytes, shows: bool = False
    ) -> Iterator[list[str]]:
        """Returns local paths, valid within the `with` block; `shows` the progress of downloads.

        They are in the order of `files`. Without `shows`, `on_bytes(n)` counts what is downloaded.
        """
        remote = [file for file in files if not file.local_path]
        # No folder is made for nothing.
        if not remote:
            yield [file.path for file in files]
            return
        with self.make_folder() as folder:
            # Files of different folders may have the same name, and names may be long.
            paths = {}
            for number, file in enumerate(remote):
                _, extension = os.path.splitext(file.name)
                paths[file] = os.path.join(folder, f'{number}{extension}')
            if shows:
                num_bytes = sum(file.size for file in remote)
                with Progress(f'Downloading {common_path(files)}', num_bytes, 'B') as progress:
                    _fetch_all(paths, progress.add)
            else:
                _fetch_all(paths, on_bytes)
            yield [paths.get(file, file.path) for file in files]


def _fetch_all(paths: Mapping[StoredFile, str], on_bytes: OnBytes) -> None:
    """Fetches files to their paths, several at a time; the first error ends all downloads."""
    # A single file in this thread, so that an interrupt ends the download at once.
    if len(paths) == 1:
        [(file, path)] = paths.items()
        file.fetch(path, on_bytes)
        return

    def count(num_bytes: int) -> None:
        """Counts a block of a download, which can be ended here."""
        on_bytes(num_bytes)
        threads.end_if_stopped()

    with ThreadPool(_DOWNLOADS_AT_ONCE) as pool:
        downloads = [pool.submit(file.fetch, path, count) for file, path in paths.items()]
        # In the order in which they end: an error must not wait for the files before it.
        for download in concurrent.futures.as_completed(downloads):
            download.result()
