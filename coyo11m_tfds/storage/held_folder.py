"""Temporary folders that do not outlive their processes: those of a killed one the next removes.

    with held_folder.make('/scratch', 'heads-') as folder:     # /scratch/heads-8f3a...
        ...
    # deleted, and so are folders of this prefix that killed processes have left

Each is held by a lock beside it that ends with the process, so a folder whose lock is free belongs
to nobody. The lock's file is made before the folder and removed after it, so that no folder is ever
without one.
"""

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator

from coyo11m_tfds.storage.file_lock import FileLock

_LOCK = '.lock'
_RANDOM = '[0-9a-f]' * 32


@contextlib.contextmanager
def make(parent: str | os.PathLike[str], prefix: str) -> Iterator[str]:
    """Makes a new, empty folder that is deleted at the end of the `with` block.

    Args:
        parent: existing local folder.
        prefix: begins the name of the folder; others of the same prefix in `parent` are deleted if
            no living process of this machine holds them.

    Raises:
        OSError: the folder cannot be made.
    """
    _sweep(parent, prefix)
    folder = os.path.join(parent, f'{prefix}{uuid.uuid4().hex}')
    with FileLock(folder + _LOCK):
        os.mkdir(folder, 0o700)
        try:
            yield folder
        finally:
            _remove(folder)


def sweep(parent: str | os.PathLike[str]) -> None:
    """Deletes all that is in a folder, but what living processes hold there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        for path in [entry.path for entry in entries]:
            lock = path if path.endswith(_LOCK) else path + _LOCK
            with contextlib.suppress(OSError):  # held, or gone
                if os.path.exists(lock):
                    with FileLock(lock, wait=False):
                        _remove(lock.removesuffix(_LOCK))
                elif os.path.isdir(path):
                    shutil.rmtree(path)
                else:
                    os.remove(path)


def _sweep(parent: str | os.PathLike[str], prefix: str) -> None:
    for lock in glob.glob(f'{glob.escape(os.path.join(parent, prefix))}{_RANDOM}{_LOCK}'):
        # Held, or another user's.
        with contextlib.suppress(OSError), FileLock(lock, wait=False):
            _remove(lock.removesuffix(_LOCK))


def _remove(folder: str) -> None:
    """Deletes a folder and then its lock, which is held here."""
    # A worker that outlives its killed parent for a moment may still write; the next one sweeps.
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        os.remove(folder + _LOCK)
