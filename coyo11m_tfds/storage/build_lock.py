"""One builder at a time in one place, local or `gs://`; and waiting for what another process makes.

    with build_lock.hold('gs://bucket/data/coyo11m_tfds/latents/1.0.0', wait_seconds=600) as lock:
        ...             # write
        lock.check()    # before a step that only one may take; raises `Lost` if it is not ours
        ...
    build_lock.Watch(path).wait_for(lambda: os.path.exists(path), wait_seconds=3600)   # in a job

The lock of a place is the file `<place>.lock`. Locally the system locks it (`flock`) and releases
it when the holder ends, however that happens; in a bucket it is a lease, see `bucket_lease`. A lock
that was left behind is taken over, so none ever has to be deleted by hand.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from absl import logging

from coyo11m_tfds.storage import file_lock, lock_holder, source_files
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.lock_holder import Lost

SUFFIX = '.lock'

_SECONDS_BETWEEN_LINES = 60
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds
# The longest that `hold` looks for a sign of life. A lease shows one, or expires, in a minute.
_LONGEST_LOOK = 120.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Lock(Protocol):
    """A lock; methods other than `check` are for `hold` and `Watch`."""

    longest_pause: float  # seconds between two attempts to acquire it

    def try_acquire(self) -> str:
        """Returns '' if the lock is ours now, else who has it."""

    def is_alive(self) -> bool | None:
        """True if another process holds it; None as long as that is unknown."""

    def release(self) -> None:
        """Lets others in."""

    def check(self) -> None:
        """Makes sure that the place is still ours.

        Raises:
            Lost: it is not.
            OSError: the storage cannot be asked.
        """


@contextlib.contextmanager
def hold(place: str | os.PathLike[str], wait_seconds: float | None) -> Iterator[Lock]:
    """Keeps out all others that hold the same place, on this machine or another.

    While it waits, a line in the log says once a minute who is there.

    Args:
        place: path or URL; need not exist.
        wait_seconds: how long to wait for another holder; 0 for not at all, None to wait only
            until it is known to be alive or dead.

    Raises:
        TimeoutError: another still holds it.
        PermissionError: the lock must not be written, or credentials are missing or refused.
        OSError: the file system has no locks, or the storage cannot be reached.
    """
    place = os.fspath(place).rstrip('/')
    lock = _open_lock(place)
    longest = _LONGEST_LOOK if wait_seconds is None else wait_seconds
    patience = _Patience(longest, lock.longest_pause)
    while holder := lock.try_acquire():
        if wait_seconds is None and lock.is_alive():
            raise TimeoutError(f'{place}: {holder} is working there.')
        patience.pause(
            f'{place}: waiting for {holder}, which is working there',
            f'{place}: {holder} is still working there after {longest:.0f} s. Wait for it or '
            'end it, then run the same command again.',
        )
    try:
        yield lock
    finally:
        lock.release()


class Watch:
    """Watches the first process of a job, which holds the lock of a place while it works.

    That process has ended if no process has held the lock for two thirds of
    `COYO11M_LEASE_SECONDS` (60), and either one was seen to hold it before, or it left the message
    of a failure. No failure counts earlier, because the message may be that of an earlier job,
    whose successor has not begun yet. Safe to use from many threads.
    """

    def __init__(self, place: str | os.PathLike[str], failure: Callable[[], str] = lambda: ''):
        """Does not look at the place yet.

        Args:
            place: what the process makes.
            failure: returns the message of its failure; '' as long as there is none.
        """
        self._place, self._failure = place, failure
        self._lock = _open_lock(os.fspath(place).rstrip('/'))
        self._idle_seconds = lock_holder.lease_seconds() * 2 / 3
        self._was_alive = False
        self._idle_since: float | None = None
        self._mutex = threading.Lock()

    def look(self) -> str:
        """Returns '' as long as the process may be at work, else how it ended."""
        with self._mutex:
            is_alive, said = self._lock.is_alive(), self._failure()
            self._was_alive |= is_alive is True
            if is_alive is not False or not (self._was_alive or said):
                self._idle_since = None
                return ''
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() - self._idle_since < self._idle_seconds:
                return ''
        how = f'failed: {said}' if said else 'ended without a word; look into its log.'
        return f'{self._place}: the first process of the job, which makes it, {how}'

    def wait_for(self, is_there: Callable[[], bool], wait_seconds: float) -> None:
        """Waits for what the process makes; a line in the log says so once a minute.

        Args:
            is_there: called again and again, in pauses that grow to 10 seconds.
            wait_seconds: how long to wait.

        Raises:
            TimeoutError: it is not there by then.
            RuntimeError: the process has failed, or was killed.
        """
        patience = _Patience(wait_seconds, _LONGEST_PAUSE)
        while True:
            # In this order: the lock is released after it is there.
            ended = self.look()
            if is_there():
                return
            if ended:
                raise RuntimeError(ended)
            patience.pause(
                f'waiting for {self._place}, which the first process of the job makes',
                f'{self._place} is not there after {wait_seconds:.0f} s. Look into the log of the '
                'process that makes it, the first of the job; if it is still at work, wait longer.',
            )


class _Patience:
    """Pauses that grow, for a limited time."""

    def __init__(self, wait_seconds: float, longest_pause: float):
        self._wait_seconds, self._longest_pause = wait_seconds, longest_pause
        self._pause = _FIRST_PAUSE
        self._start = time.monotonic()
        self._next_line = self._start

    def pause(self, line: str, give_up: str) -> None:
        """Sleeps and logs `line` at growing intervals; at the end raises TimeoutError."""
        now = time.monotonic()
        left = self._start + self._wait_seconds - now
        if left <= 0:
            raise TimeoutError(give_up)
        if now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            logging.info('%s (for %.0f s, at most %.0f s)', line, now - self._start, left)
        time.sleep(min(self._pause, self._longest_pause, left))
        self._pause *= 1.5


def _open_lock(place: str) -> 'Lock':
    if not source_files.is_remote(place):
        return _LocalLock(place + SUFFIX)
    from coyo11m_tfds.storage import bucket_lease  # imports the client of the storage

    return bucket_lease.BucketLease(place)


class _LocalLock:
    """A locked file, which is removed in the end."""

    longest_pause = 1.0  # asking costs nothing

    def __init__(self, path: str):
        self._path = path

    def try_acquire(self) -> str:
        """Returns '' if the lock is ours now, else who has it."""
        os.makedirs(os.path.dirname(self._path) or os.curdir, exist_ok=True)
        try:
            self._lock = file_lock.FileLock(self._path, wait=False)
        except BlockingIOError:
            return str(lock_holder.from_json(self._read()))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise OSError(
                error.errno,
                'this file system has no locks (flock). Mount it with locks, or build on a local '
                'disk and copy the result',
                self._path,
            ) from error
        try:
            with naming(self._path), open(self._path, 'wb') as file:
                file.write(lock_holder.this_process().to_json())
                self._state = os.fstat(file.fileno())
        except BaseException:  # above all a full disk
            self._lock.release()
            raise
        return ''

    def is_alive(self) -> bool | None:
        try:
            with open(self._path, 'rb') as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def check(self) -> None:
        if not self._is_at_path():
            raise Lost(f'{self._path} was removed while it was held; another may have begun.')

    def release(self) -> None:
        # Removed while it is locked: whoever locks it later finds that it is not at its path.
        with self._lock:
            if self._is_at_path():
                os.remove(self._path)

    def _read(self) -> bytes:
        try:
            with open(self._path, 'rb') as file:
                return file.read()
        except FileNotFoundError:  # its holder has just left
            return b''

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(self._state, os.stat(self._path))
        except FileNotFoundError:
            return False
