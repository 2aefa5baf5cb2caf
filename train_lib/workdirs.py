"""The folder of a run, local or `gs://`: its absolute path, its checks and its lock.

Check the folder before TensorFlow writes logs, because it silently retries a bucket that does not
exist. This module does not import TensorFlow.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from absl import logging
from etils import epath

from coyo11m_tfds.storage import locks, source_files


def absolute(folder: epath.PathLike) -> epath.Path:
    """Returns the absolute path of a folder; a URL stays unchanged."""
    path = epath.Path(folder)
    # `epath` puts the current folder even before gs://.
    return path if source_files.is_remote(os.fspath(path)) else path.absolute()


def check_writable(folder: epath.PathLike) -> None:
    """Checks that files can be made and removed in a folder, which need not exist yet."""
    if source_files.is_remote(os.fspath(folder)):
        from coyo11m_tfds.storage import gcs  # imports the client of the storage

        gcs.check_writable(os.fspath(folder))
        return
    path = pathlib.Path(folder).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(f'{path}: {there} is a file; name another folder.')
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f'{path}: {there} cannot be written to by this user.')


@contextlib.contextmanager
def held(folder: epath.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder; one process of a run calls this.

    A killed process releases the folder: on this machine at once, and on `gs://` after
    `COYO11M_LEASE_SECONDS` (40) without a renewal. On a file system without locks this only warns.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.hold(absolute(folder) / 'training', wait=False))
        except TimeoutError as error:
            raise TimeoutError(f'{error} Or use another --workdir.') from None
        except OSError as error:
            if error.errno not in locks.NO_LOCKS:
                raise
            logging.warning('%s: its file system has no locks; let no other run use it.', folder)
        yield


def check_readable(folder: epath.PathLike) -> None:
    """Checks that a folder exists and can be listed; raises the errors of `check_writable`."""
    text = os.fspath(folder)
    if not source_files.is_remote(text):
        os.scandir(text).close()
        return
    from coyo11m_tfds.storage import gcs

    if not gcs.is_folder(text):
        raise FileNotFoundError(f'{text}: there is no such folder.')
