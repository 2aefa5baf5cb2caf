"""A folder of bounded size where remote files are while they are needed.

    scratch = Scratch('/scratch', max_bytes=20 << 30)
    with scratch.hold(file) as path:        # waits for room, downloads, verifies
        LatentShard(path)
    # deleted, unless somebody else holds it

Threads and processes of one machine share a folder and its bound, and who holds the same file
shares one copy. What one of them has is told by locks alone, which end with the process, so a
killed one leaves nothing that has to be cleaned up: its room is free at once, and what it had
downloaded is gone on with by the next who wants the file, or deleted when its room is needed.
"""

import collections
import contextlib
import hashlib
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from absl import logging

from coyo11m_tfds.progress import Progress
from coyo11m_tfds.storage import remote
from coyo11m_tfds.storage.file_lock import FileLock
from coyo11m_tfds.storage.file_state import ignore_bytes
from coyo11m_tfds.storage.source_files import SourceFile

# Beside the entries: held for moments, by whoever looks at all entries together.
_MUTEX = '.lock'
_ENTRY = 'held'  # begins the names of their folders; the size of the file and a hash follow

# Empty files in the folder of an entry, beside the copy.
_HOLDERS = 'holders'  # locked shared by every holder, for as long as it holds; tells the room taken
_DOWNLOAD = 'download'  # locked by the one that downloads
_KEEP = 'keep'  # there if a holder wants the copy to stay

_LONGEST_POLL = 0.5  # seconds
_SECONDS_BETWEEN_MESSAGES = 60.0


class _Entry(NamedTuple):
    """An entry as it is found: its folder, the room it takes, when it was held last."""

    folder: pathlib.Path
    in_use: bool
    num_bytes: int
    last_used: float


def user_cache(*names: str) -> str:
    """Returns a folder within this user's cache, which need not exist."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return os.path.join(cache, *names)


class Scratch:
    """Local copies of remote files in a folder of bounded size."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        """Makes the folder if it is not there.

        Args:
            folder: local; others may keep files there, they are left alone and do not count.
            max_bytes: most that copies, also unfinished ones, may take together.
        """
        self._folder = pathlib.Path(folder)
        self._max_bytes = max_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mine = threading.local()

    @contextlib.contextmanager
    def hold(
        self,
        file: SourceFile,
        *,
        keep: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Iterator[str]:
        """Gives a local path of a file, valid within the `with` block.

        It waits while others hold so much that there is no room. A thread that holds one file and
        waits for another may wait for a thread that does the same, so hold one at a time where
        that can happen.

        Args:
            file: of a local file this is just its path.
            keep: leave the copy when nobody holds it any more, until its room is needed; what was
                not used for longest goes first. If holders disagree, it is kept.
            on_bytes: as in `remote.fetch`, if this holder is the one that downloads; while it waits
                for room it is told 0, so that it may raise an exception to stop waiting.

        Raises:
            ValueError: the file is larger than the bound, or than what this thread leaves of it
                with what it holds already, so that it would wait for itself.
            PermissionError: credentials are missing or refused.
            OSError: the download fails; what has come stays.
        """
        if not file.is_remote:
            yield file.path
            return
        entry = self._folder / _name_of(file)
        path = entry / file.name
        self._check_room(file, entry)
        held = self._wait_for_room(file, entry, keep, on_bytes or ignore_bytes)
        self._holdings[entry] += 1
        try:
            with FileLock(entry / _DOWNLOAD):
                if not path.exists():
                    remote.fetch(file, str(path), on_bytes)
            yield str(path)
        finally:
            self._holdings[entry] -= 1
            self._leave(entry, path, held)

    @contextlib.contextmanager
    def hold_showing(self, file: SourceFile) -> Iterator[str]:
        """Does as `hold`, and shows how far a download is in the log or on the terminal."""
        if not file.is_remote:
            yield file.path
            return
        with contextlib.ExitStack() as stack:
            with Progress(f'Downloading {file.path}', file.size, 'B') as progress:
                path = stack.enter_context(self.hold(file, on_bytes=progress.add))
            yield path

    @property
    def _holdings(self) -> collections.Counter:
        """How often this thread holds each entry."""
        if not hasattr(self._mine, 'holdings'):
            self._mine.holdings = collections.Counter()
        return self._mine.holdings

    def _check_room(self, file: SourceFile, entry: pathlib.Path) -> None:
        mine = sum(_reserved(e) for e, times in self._holdings.items() if times and e != entry)
        if mine + file.size > self._max_bytes:
            besides = f' beside the {mine:,} that this thread holds' if mine else ''
            raise ValueError(
                f'{file.path} has {file.size:,} bytes, but {self._folder} may take '
                f'{self._max_bytes:,}{besides}. Allow it more.'
            )

    def _wait_for_room(
        self, file: SourceFile, entry: pathlib.Path, keep: bool, on_bytes: Callable[[int], None]
    ) -> FileLock:
        pause = 0.01
        message_at = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
        while (held := self._enter(file, entry, keep)) is None:
            if time.monotonic() >= message_at:
                message_at += _SECONDS_BETWEEN_MESSAGES
                logging.info(
                    'Waiting for %s bytes of %s in %s for %s: others hold files there.',
                    f'{file.size:,}',
                    f'{self._max_bytes:,}',
                    self._folder,
                    file.path,
                )
            on_bytes(0)
            # Polling, because the death of a holder wakes nobody up.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        return held

    def _enter(self, file: SourceFile, entry: pathlib.Path, keep: bool) -> FileLock | None:
        """Becomes a holder if the file is held already or there is room for it."""
        with FileLock(self._folder / _MUTEX):
            others = [e for e in self._entries() if e.folder != entry]
            used = sum(other.num_bytes for other in others if other.in_use)
            if used + file.size > self._max_bytes:
                return None
            idle = sorted((o for o in others if not o.in_use), key=lambda o: o.last_used)
            excess = used + file.size + sum(o.num_bytes for o in idle) - self._max_bytes
            for other in idle:
                if excess > 0 or other.num_bytes == 0:  # who was killed may have got nothing yet
                    shutil.rmtree(other.folder)
                    excess -= other.num_bytes
            entry.mkdir(exist_ok=True)
            if keep:
                (entry / _KEEP).touch()
            return FileLock(entry / _HOLDERS, shared=True, wait=False)

    def _leave(self, entry: pathlib.Path, path: pathlib.Path, held: FileLock) -> None:
        try:
            with FileLock(self._folder / _MUTEX):
                os.utime(entry / _HOLDERS)
                held.release()
                last = not _is_locked(entry / _HOLDERS)
                # Without a copy the download failed; what has come of it may be gone on with.
                if last and path.exists() and not (entry / _KEEP).exists():
                    shutil.rmtree(entry)
        finally:
            held.release()

    def _entries(self) -> list[_Entry]:
        return [_look_at(folder) for folder in self._folder.glob(f'{_ENTRY}-*')]


def _look_at(folder: pathlib.Path) -> _Entry:
    holders = folder / _HOLDERS
    in_use = _is_locked(holders)
    if in_use:
        num_bytes = _reserved(folder)
    else:
        parts = (path for path in folder.iterdir() if path.suffix != '.json')
        num_bytes = sum(path.stat().st_size for path in parts)
    last_used = holders.stat().st_mtime if holders.exists() else 0.0
    return _Entry(folder, in_use, num_bytes, last_used)


def _reserved(entry: pathlib.Path) -> int:
    """Bytes of the whole file, also of what is yet to come."""
    return int(entry.name.split('-')[1])


def _is_locked(path: pathlib.Path) -> bool:
    """Whether somebody has locked this file; to be asked by who has the mutex."""
    if not path.exists():
        return False
    try:
        FileLock(path, wait=False).release()
    except BlockingIOError:
        return True
    return False


def _name_of(file: SourceFile) -> str:
    version = hashlib.sha256(f'{file.path} {file.version}'.encode()).hexdigest()
    return f'{_ENTRY}-{file.size}-{version[:16]}'
