"""One writer at a time in one place, local or `gs://`; and waiting for what another process makes.

    with build_lock.hold('gs://bucket/data/coyo11m_tfds/latents/1.0.0', wait_seconds=600):
        ...             # write
    build_lock.wait_for(path, lambda: os.path.exists(path), wait_seconds=3600)   # in a job

The lock is advisory: it saves work that would be done twice, and may be lost without harm, because
builds of different plans write different files. The lock of a place is the file `<place>.lock`.
Locally the system locks it (`flock`) and releases it when the holder ends, however that happens; in
a bucket it is a lease, see `bucket_lease`. A lock that was left behind is taken over, so none ever
has to be deleted by hand.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from absl import logging

from coyo11m_tfds.storage import file_lock, lock_holder, source_files
from coyo11m_tfds.storage.file_state import naming

SUFFIX = '.lock'

_SECONDS_BETWEEN_LINES = 60
_FIRST_PAUSE = 0.1  # seconds
# The longest that `hold` looks for a sign of life. A lease shows one, or expires, in a minute.
_LONGEST_LOOK = 120.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Lock(Protocol):
    """A lock; methods other than `is_ours` are for `hold` and `wait_for`."""

    longest_pause: float  # seconds between two looks at it

    def try_acquire(self) -> str:
        """Returns '' if the lock is ours now, else who has it."""

    def is_alive(self) -> bool | None:
        """True if another process holds it; None as long as that is unknown."""

    def is_ours(self) -> bool:
        """False if another process has taken it over."""

    def release(self) -> None:
        """Lets others in."""


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


def wait_for(
    place: str | os.PathLike[str], is_there: Callable[[], bool], wait_seconds: float
) -> None:
    """Waits for what the first process of a job makes, which holds the lock of a place meanwhile.

    A line in the log says once a minute what it waits for.

    Args:
        place: what the process makes.
        is_there: called again and again.
        wait_seconds: how long to wait.

    Raises:
        TimeoutError: it is not there by then.
        RuntimeError: no process has held the lock for two thirds of `COYO11M_LEASE_SECONDS` (60):
            the first one has failed, was killed, or has not begun.
    """
    place = os.fspath(place).rstrip('/')
    lock = _open_lock(place)
    longest_idle = lock_holder.lease_seconds() * 2 / 3
    patience = _Patience(wait_seconds, min(lock.longest_pause, longest_idle / 4))
    seen = time.monotonic()
    while True:
        # In this order: the lock is released after it is there.
        if lock.is_alive():
            seen = time.monotonic()
        if is_there():
            return
        if time.monotonic() - seen > longest_idle:
            raise RuntimeError(
                f'{place}: the first process of the job, which makes it, has failed or was killed: '
                f'nothing has been heard of it for {longest_idle:.0f} s. Look into its log, mend '
                'what it says, and start the job again.'
            )
        patience.pause(
            f'waiting for {place}, which the first process of the job makes',
            f'{place} is not there after {wait_seconds:.0f} s. Look into the log of the process '
            'that makes it, the first of the job; if it is still at work, wait longer.',
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

    def is_ours(self) -> bool:
        return self._lock.is_at_path()

    def release(self) -> None:
        # Removed while it is locked: whoever locks it later finds that it is not at its path.
        with self._lock:
            if self._lock.is_at_path():
                os.remove(self._path)

    def _read(self) -> bytes:
        try:
            with open(self._path, 'rb') as file:
                return file.read()
        except FileNotFoundError:  # its holder has just left
            return b''
