"""A folder of bounded size that holds remote files while they are needed.

    scratch = Scratch('/scratch', max_bytes=20 << 30)
    with scratch.hold(file) as path:        # waits for room, downloads, verifies
        LatentShard(path)
    # deleted, unless another process holds it
    with scratch.hold_all(files) as paths:  # several; room is reserved for all at once
        ...

Threads and processes of one machine share a folder and its bound, and holders of the same file
share one copy. Only locks record who holds a file, and they end with the process. So a killed
process leaves nothing to clean up: its room is free at once, and its partial download is resumed by
the next holder of the file, or deleted when its room is needed. A copy from another process is used
only after a comparison of its size and checksum.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import os
import pathlib
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import logging

from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import remote
from coyo11m_tfds.storage.file_state import ignore_bytes
from coyo11m_tfds.storage.locks import FileLock
from coyo11m_tfds.storage.source_files import SourceFile, is_remote

# Beside the entries: held for moments, while all entries are looked at together.
_MUTEX = '.lock'
_ENTRY = 'held'  # begins the names of their folders; the size of the file and a hash follow

# An empty file beside the copies of an entry, locked shared by every holder; while it is, room for
# all files is taken.
_HOLDERS = 'holders'

# Of several files that are held together; small ones mostly wait for the storage.
_DOWNLOADS_AT_ONCE = 8

_LONGEST_POLL = 0.5  # seconds
_SECONDS_BETWEEN_MESSAGES = 60.0


def choose_folder(program: str, data_dir: str, chosen: str = '') -> str:
    """Returns the local folder where a program keeps stores and downloads; it need not exist.

    Args:
        program: Its name.
        data_dir: Folder of its data sets; '' if unknown.
        chosen: The user's choice, instead of `.PROGRAM` in a local `data_dir` or else the cache.

    Raises:
        ValueError: `chosen` is a URL.
    """
    _check_local(chosen)
    if chosen:
        return os.path.expanduser(chosen)
    if not data_dir or is_remote(data_dir):
        return user_cache(program)
    return os.path.normpath(os.path.join(data_dir, f'.{program}'))


def _check_local(folder: str) -> None:
    if is_remote(folder):
        raise ValueError(f'scratch_dir is {folder!r}, expected a local folder.')


def user_cache(*names: str) -> str:
    """Returns a folder within this user's cache, which need not exist."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return os.path.join(cache, *names)


def user_temp(name: str) -> str:
    """Returns a folder for temporary files that is this user's alone, made if it is not there.

    Raises:
        PermissionError: Another user has made it, or may write to it.
    """
    folder = os.path.join(tempfile.gettempdir(), f'{name}-{os.getuid()}')
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f'{folder}: is a link, or others may use it; expected a folder of mode 0700 that '
            f'belongs to user {os.getuid()}. Remove it, or set scratch_dir in the config.'
        )
    return folder


class _Wanted:
    """Remote files to be held together.

    Attributes:
        size: Bytes of all of them.
        entry: Folder of the copies.
        paths: Path of each copy.
    """

    def __init__(self, files: Sequence[SourceFile], folder: pathlib.Path):
        self.size = sum(file.size for file in files)
        versions = '\n'.join(f'{file.path} {file.version}' for file in files)
        digest = hashlib.sha256(versions.encode()).hexdigest()
        self.entry = folder / f'{_ENTRY}-{self.size}-{digest[:16]}'
        # Files of different folders may have the same name.
        prefixes = [''] if len(files) == 1 else [f'{number}-' for number in range(len(files))]
        self.paths = {
            file: str(self.entry / f'{prefix}{file.name}')
            for prefix, file in zip(prefixes, files, strict=True)
        }

    def __str__(self) -> str:
        first, *others = self.paths
        return f'{first.path} (with {len(others)} more files)' if others else first.path


class Scratch:
    """Local copies of remote files in a folder of bounded size."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        """Makes the folder if it is not there.

        Args:
            folder: Local; other files in it are left alone and do not count.
            max_bytes: Most that copies, finished or not, may take together.

        Raises:
            ValueError: The folder is a URL.
        """
        _check_local(os.fspath(folder))
        self._folder = pathlib.Path(folder)
        self._max_bytes = max_bytes
        self._folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def hold(
        self, file: SourceFile, *, on_bytes: Callable[[int], None] | None = None
    ) -> Iterator[str]:
        """Gives a local path of one file; see `hold_all`."""
        with self.hold_all([file], on_bytes=on_bytes) as paths:
            yield paths[0]

    @contextlib.contextmanager
    def hold_all(
        self, files: Sequence[SourceFile], *, on_bytes: Callable[[int], None] | None = None
    ) -> Iterator[list[str]]:
        """Gives local paths of some files, valid within the `with` block.

        Waits while others hold so much that there is no room for all of them. Room is taken for all
        or none, so that holders never wait for each other. A thread that holds files must not ask
        for more, or it may wait for itself.

        Args:
            files: Different ones, one or more. For a local file its own path is given.
            on_bytes: As in `remote.fetch`, from several threads, if this holder is the one that
                downloads; it is called with 0 while this waits for room, so that it may raise an
                exception to stop waiting.

        Raises:
            ValueError: The files are larger than the bound.
            PermissionError: Credentials are missing or refused.
            OSError: The download fails; what was received stays.
        """
        remote_files = [file for file in files if file.is_remote]
        if not remote_files:
            yield [file.path for file in files]
            return
        wanted = _Wanted(remote_files, self._folder)
        if wanted.size > self._max_bytes:
            raise ValueError(
                f'{wanted} has {wanted.size:,} bytes, but {self._folder} may take '
                f'{self._max_bytes:,}. Allow it more.'
            )
        on_bytes = on_bytes or ignore_bytes
        held = self._wait_for_room(wanted, on_bytes)
        try:
            _complete(wanted.paths, on_bytes)
            yield [wanted.paths.get(file, file.path) for file in files]
        finally:
            self._leave(wanted, held)

    @contextlib.contextmanager
    def hold_showing(self, file: SourceFile) -> Iterator[str]:
        """Does as `hold`, and shows the progress of a download in the log or on the terminal."""
        if not file.is_remote:
            yield file.path
            return
        with contextlib.ExitStack() as stack:
            with Progress(f'Downloading {file.path}', file.size, 'B') as progress:
                path = stack.enter_context(self.hold(file, on_bytes=progress.add))
            yield path

    def _wait_for_room(self, wanted: _Wanted, on_bytes: Callable[[int], None]) -> FileLock:
        pause = 0.01
        message_at = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
        while (held := self._enter(wanted)) is None:
            if time.monotonic() >= message_at:
                message_at += _SECONDS_BETWEEN_MESSAGES
                logging.info(
                    'Waiting for %s bytes of %s in %s for %s: others hold files there.',
                    f'{wanted.size:,}',
                    f'{self._max_bytes:,}',
                    self._folder,
                    wanted,
                )
            on_bytes(0)
            # Polling, because the death of a holder wakes no waiter.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        return held

    def _enter(self, wanted: _Wanted) -> FileLock | None:
        """Becomes a holder if the files are held already or there is room for them."""
        with FileLock(self._folder / _MUTEX):
            room, idle = self._max_bytes - wanted.size, []
            for folder in set(self._folder.glob(f'{_ENTRY}-*')) - {wanted.entry}:
                if _is_locked(folder / _HOLDERS):
                    room -= int(folder.name.split('-')[1])  # also what is not downloaded yet
                else:
                    parts = [path for path in folder.iterdir() if path.suffix != '.json']
                    size = sum(path.stat().st_size for path in parts)
                    idle.append((folder.stat().st_mtime, size, folder))
            if room < 0:
                return None
            for _, size, folder in sorted(idle, reverse=True):  # those held last may stay
                room -= size
                if room < 0 or not size:
                    shutil.rmtree(folder)
            wanted.entry.mkdir(exist_ok=True)
            return FileLock(wanted.entry / _HOLDERS, shared=True, wait=False)

    def _leave(self, wanted: _Wanted, held: FileLock) -> None:
        with held, FileLock(self._folder / _MUTEX):
            os.utime(wanted.entry)
            held.release()
            is_held = _is_locked(wanted.entry / _HOLDERS)
            # What a failed download has received stays for the next attempt.
            if not is_held and all(map(os.path.exists, wanted.paths.values())):
                shutil.rmtree(wanted.entry)


def _is_locked(path: pathlib.Path) -> bool:
    """True if a process has locked this file; only the holder of the mutex may ask."""
    if not path.exists():
        return False
    try:
        FileLock(path, wait=False).release()
    except BlockingIOError:
        return True
    return False


def _complete(paths: Mapping[SourceFile, str], on_bytes: Callable[[int], None]) -> None:
    """Downloads files that are not there or damaged."""
    stopped = threading.Event()

    def tell(num_bytes: int) -> None:
        on_bytes(num_bytes)
        if stopped.is_set():
            raise concurrent.futures.CancelledError

    if len(paths) == 1:  # in this thread, so that an interrupt ends it at once
        [(file, path)] = paths.items()
        remote.fetch(file, path, on_bytes)
        return
    with concurrent.futures.ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as threads:
        try:
            list(threads.map(remote.fetch, paths, paths.values(), itertools.repeat(tell)))
        except BaseException:
            stopped.set()
            raise
