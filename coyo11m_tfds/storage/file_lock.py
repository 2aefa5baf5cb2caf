"""Locks that a killed process cannot leave behind: `flock` on a file.

    with FileLock('/scratch/.lock'):                  # waits
        ...
    FileLock('/scratch/x', shared=True, wait=False)   # BlockingIOError if it is held otherwise

They exclude threads and processes of one machine alike. The kernel releases a lock when the last
descriptor is closed. A forked child has copies of its parent's, so it closes them at once, or a
worker would keep the locks of a parent that was killed.
"""

import fcntl
import os
from typing import Self

_held: 'set[FileLock]' = set()


class FileLock:
    """A lock that is held from its making to its release; a context manager."""

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False, wait: bool = True):
        """Takes the lock.

        Args:
            path: the file, made if it is not there.
            shared: any number may hold it shared, or one alone exclusively.
            wait: until others release it.

        Raises:
            BlockingIOError: `wait` is false and others hold it.
        """
        self._path = path
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _held.add(self)
            try:
                fcntl.flock(self._descriptor, how)
                # Its holder may have moved or removed the file; then others lock a new one.
                if self.is_at_path():
                    return
            except BaseException:
                self.release()
                raise
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def is_at_path(self) -> bool:
        """False if the file was moved or removed since it was locked."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Releases it, unless that was done before."""
        if self in _held:
            _held.remove(self)
            # Closing alone would not do while a child that is just being forked has a copy.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)


def _close_copies() -> None:
    while _held:
        os.close(_held.pop()._descriptor)


os.register_at_fork(after_in_child=_close_copies)
