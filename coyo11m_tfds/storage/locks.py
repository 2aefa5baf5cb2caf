"""Locks and temporary folders that a killed process cannot leave behind.

The lock of a folder is the file or object `FOLDER.lock`. It is advisory: it saves double work, and
its loss does no harm. On a disk the system locks the file (`flock`) until the holder ends. In a
bucket the holder replaces the object three times in `COYO11M_LEASE_SECONDS` (40); a process that
sees the same generation for that time takes over the lock.
"""

import contextlib
import datetime
import errno
import fcntl
import glob
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Protocol, Self

from absl import logging

from coyo11m_tfds import storage
from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.file_state import StrPath

SUFFIX = '.lock'  # after the path of the locked folder

# Numbers of the errors by which a file system says that it has no locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_SECONDS_BETWEEN_LINES = 60
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between two looks
_LONGEST_COURTESY = 5.0  # seconds after an interruption


def lease_seconds() -> float:
    """Returns the seconds without a renewal after which the holder of a lock counts as dead."""
    return retry.seconds('COYO11M_LEASE_SECONDS', 40.0)


def describe_this_process() -> str:
    """Returns what a lock says of its holder: process, host, and the time of now."""
    now = datetime.datetime.now(datetime.UTC)
    return f'process {os.getpid()} on {socket.gethostname()}, since {now:%Y-%m-%d %H:%M:%S} UTC'


# --- Files ------------------------------------------------------------------------------------

# Of this process, so that a fork can close its copies of them.
_held: 'set[FileLock]' = set()


class FileLock:
    """An `flock` on a file, held until it is released; excludes threads and processes."""

    def __init__(self, path: StrPath, *, shared: bool = False, wait: bool = True):
        """Takes the lock, alone or `shared` with other shared holders; makes the file.

        Without `wait`, raises a BlockingIOError if another one holds it.
        """
        self._path = path
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if not wait:
            mode |= fcntl.LOCK_NB
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _held.add(self)
            try:
                fcntl.flock(self._descriptor, mode)
                # Its holder may have moved or removed the file; then others lock a new one.
                if self.is_at_path():
                    return
            # Also a Ctrl-C while it waits: the file must not stay open.
            except BaseException:
                self.release()
                raise
            # The locked file is not the one at the path any more: once more, with that one.
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def is_at_path(self) -> bool:
        """Returns whether the locked file is still the one at its path."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        if self in _held:
            _held.remove(self)
            # Closing alone would not release it while a child that is being forked has a copy.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)


def _close_copies() -> None:
    # In a forked child, so that a worker does not keep the locks of a killed parent.
    while _held:
        os.close(_held.pop()._descriptor)


os.register_at_fork(after_in_child=_close_copies)


@contextlib.contextmanager
def temporary_folder(parent: StrPath, prefix: str) -> Iterator[str]:
    """Makes a new folder for a `with` block; deletes those of `prefix` that killed ones left.

    Its name is `prefix` and 32 hex digits, and its lock lies next to it.
    """
    # The whole form of the name: a user's folder may begin like it.
    pattern = glob.escape(os.path.join(parent, prefix)) + '[0-9a-f]' * 32 + SUFFIX
    for lock in glob.glob(pattern):
        _remove_unless_held(lock)
    folder = os.path.join(parent, f'{prefix}{uuid.uuid4().hex}')
    # The lock exists before and after the folder: without one, a folder counts as abandoned.
    with FileLock(folder + SUFFIX):
        os.mkdir(folder, 0o700)
        try:
            yield folder
        finally:
            _remove_folder(folder)


def sweep_folder(parent: StrPath) -> None:
    """Deletes everything in a folder except what living processes hold there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        # Listed to the end first: what is removed here may be a later entry, such as a lock.
        for path in [entry.path for entry in entries]:
            lock = path if path.endswith(SUFFIX) else path + SUFFIX
            if os.path.exists(lock):
                _remove_unless_held(lock)
            elif os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.remove(path)


def _remove_unless_held(lock: str) -> None:
    """Removes the folder of a lock that no living process holds, and the lock."""
    # An error means that it is held, or another user's.
    with contextlib.suppress(OSError), FileLock(lock, wait=False):
        _remove_folder(lock.removesuffix(SUFFIX))


def _remove_folder(folder: str) -> None:
    """Deletes a folder and then its lock, which is held here."""
    # A worker that outlives its killed parent for a moment may still write; the next one sweeps.
    shutil.rmtree(folder, ignore_errors=True)
    # A folder that is still there keeps its lock, by which the next sweep finds it.
    if not os.path.exists(folder):
        os.remove(folder + SUFFIX)


# --- Folders of any storage -------------------------------------------------------------------


class Lock(Protocol):
    """The lock of a folder; see `locks.hold`."""

    # The process that had the lock when `acquire` failed last.
    holder: str = 'another process'

    def acquire(self) -> bool:
        """Tries to take the lock; returns whether it did."""

    def last_sign_of_life(self) -> float:
        """Returns when another holder was last seen to be alive, by `time.monotonic()`."""

    def is_ours(self) -> bool:
        """Returns False if another process has taken it over."""

    def release(self, patience: float) -> None:
        """Releases the lock; returns after `patience` seconds even if its storage is too slow."""


@contextlib.contextmanager
def hold(folder: StrPath, *, wait: bool = True) -> Iterator[Lock]:
    """Holds the lock of a folder for a `with` block, after its holder here or elsewhere.

    Raises:
        TimeoutError: Another one holds it and is alive; only without `wait`.
        ValueError: The folder is one of the hub.
    """
    opened = storage.open_writable_folder(folder)
    lock = opened.lock()
    start = time.monotonic()
    for _ in _poll(lambda: f'{opened.folder}: waiting for {lock.holder}, which is working there'):
        if lock.acquire():
            break
        # Only a sign after the start counts: before it, the holder may have been killed since.
        if not wait and lock.last_sign_of_life() > start:
            raise TimeoutError(
                f'{opened.folder}: {lock.holder} is working there. Wait for it, or end it.'
            )
    # By then, a lock that is not renewed is over without being released.
    patience = lease_seconds()
    try:
        yield lock
    except (KeyboardInterrupt, SystemExit):
        # Nobody waits for long for what is only a courtesy.
        patience = min(patience / 8, _LONGEST_COURTESY)
        raise
    finally:
        lock.release(patience)


def wait_for(path: StrPath, exists: Callable[[], bool]) -> None:
    """Waits until the first process of a job has made the folder or file that it holds.

    `exists()` says whether it has. Raises a RuntimeError if that process shows no sign of life.
    """
    opened = storage.open_writable_folder(path)
    lock = opened.lock()
    last_sign = time.monotonic()
    # The first process of a job that was started again may first wait for the lease of the one that
    # was killed.
    patience = 1.4 * lease_seconds()
    for _ in _poll(
        lambda: f'waiting for {opened.folder}, which the first process of the job makes'
    ):
        # In this order: the lock is released after the result is complete.
        last_sign = max(last_sign, lock.last_sign_of_life())
        if exists():
            return
        if time.monotonic() - last_sign > patience:
            raise RuntimeError(
                f'{opened.folder}: the first process of the job, which makes it, has failed or was '
                f'killed: it has given no sign of life for {patience:.0f} s. Read its log, fix the '
                'cause, and start the job again.'
            )


def _poll(describe: Callable[[], str]) -> Iterator[None]:
    """Yields after pauses that grow, without end; logs a line once a minute."""
    start = next_log = time.monotonic()
    pause = _FIRST_PAUSE
    while True:
        yield
        now = time.monotonic()
        if now >= next_log:
            next_log = now + _SECONDS_BETWEEN_LINES
            logging.info('%s (for %.0f s)', describe(), now - start)
        # A holder in a bucket renews its lock three times a lease: twice as many looks miss none.
        time.sleep(min(pause, lease_seconds() / 6))
        pause = min(1.5 * pause, _LONGEST_PAUSE)
