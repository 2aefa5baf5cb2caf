"""A folder of bounded size that holds remote files while they are needed.

    scratch = Scratch('/scratch', max_bytes=20 << 30)
    with scratch.hold(file) as path:        # waits for room, downloads, verifies
        LatentShard(path)
    # deleted
    with scratch.hold_all(files) as paths:  # several; room is reserved for all at once
        ...

Threads and processes of one machine share a folder and its bound, not the copies. Each holder has a
temporary folder, whose lock ends with the process: the next one deletes what a killed process left.
"""

import concurrent.futures
import contextlib
import glob
import itertools
import os
import pathlib
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import logging

from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import locks, remote
from coyo11m_tfds.storage.file_state import ignore_bytes
from coyo11m_tfds.storage.locks import FileLock
from coyo11m_tfds.storage.source_files import SourceFile, is_remote

# In each temporary folder is one folder. Its name is the number of bytes that its holder may take.
_HELD = 'held-'
_MUTEX = '.lock'  # held for moments, while room is counted and taken

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
        self, file: SourceFile, *, on_bytes: Callable[[int], None] = ignore_bytes
    ) -> Iterator[str]:
        """Gives a local path of one file; see `hold_all`."""
        with self.hold_all([file], on_bytes=on_bytes) as paths:
            yield paths[0]

    @contextlib.contextmanager
    def hold_all(
        self, files: Sequence[SourceFile], *, on_bytes: Callable[[int], None] = ignore_bytes
    ) -> Iterator[list[str]]:
        """Gives local paths of some files, valid within the `with` block.

        Waits while others hold so much that there is no room for all of them. Room is taken for all
        or none, so that holders never wait for each other. A thread that holds files must not ask
        for more, or it may wait for itself.

        Args:
            files: Different ones, one or more. For a local file its own path is given.
            on_bytes: As in `remote.fetch`, from several threads; it is called with 0 while this
                waits for room, so that it may raise an exception to stop waiting.

        Raises:
            ValueError: The files are larger than the bound.
            PermissionError: Credentials are missing or refused.
            OSError: The download fails.
        """
        wanted = [file for file in files if file.is_remote]
        if not wanted:
            yield [file.path for file in files]
            return
        size = sum(file.size for file in wanted)
        more = f' (with {len(wanted) - 1} more files)' if wanted[1:] else ''
        what = f'{wanted[0].path}{more}'
        if size > self._max_bytes:
            raise ValueError(
                f'{what} has {size:,} bytes, but {self._folder} may take {self._max_bytes:,}. '
                'Allow it more.'
            )
        with contextlib.ExitStack() as stack:
            room = self._wait_for_room(size, what, stack, on_bytes)
            # Files of different folders may have the same name, and names may be long.
            kinds = [os.path.splitext(file.name)[1] for file in wanted]
            names = [f'{number}{kind}' for number, kind in enumerate(kinds)]
            paths = {f: os.path.join(room, x) for f, x in zip(wanted, names, strict=True)}
            _complete(paths, on_bytes)
            yield [paths.get(file, file.path) for file in files]

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

    def _wait_for_room(
        self,
        size: int,
        what: str,
        stack: contextlib.ExitStack,
        on_bytes: Callable[[int], None],
    ) -> str:
        """Makes the folder of a holder; it is deleted when the stack is closed."""
        pause = 0.01
        message_at = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
        while (room := self._take_room(size, stack)) is None:
            if time.monotonic() >= message_at:
                message_at += _SECONDS_BETWEEN_MESSAGES
                logging.info(
                    'Waiting for %s bytes of %s in %s for %s: others hold files there.',
                    f'{size:,}',
                    f'{self._max_bytes:,}',
                    self._folder,
                    what,
                )
            on_bytes(0)
            # Polling, because the death of a holder wakes no waiter.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        return room

    def _take_room(self, size: int, stack: contextlib.ExitStack) -> str | None:
        with FileLock(self._folder / _MUTEX), contextlib.ExitStack() as made:
            # Deletes first what killed holders left.
            folder = made.enter_context(locks.temporary_folder(self._folder, _HELD))
            rooms = glob.glob(f'{_HELD}*/*', root_dir=self._folder)
            taken = sum(int(os.path.basename(room)) for room in rooms)
            if taken + size > self._max_bytes:
                return None
            room = os.path.join(folder, str(size))
            os.mkdir(room)
            stack.push(made.pop_all())
        return room


def _complete(paths: Mapping[SourceFile, str], on_bytes: Callable[[int], None]) -> None:
    """Downloads files."""
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
