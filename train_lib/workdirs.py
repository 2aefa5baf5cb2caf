"""The folder of a run, local or `gs://`: its absolute path, its checks and its lock.

    workdirs.check_writable('gs://bucket/runs/a')   # in seconds; an OSError of one line

Check the folder first: TensorFlow, which writes logs, silently retries a bucket that does not
exist. This module does not import TensorFlow.
"""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

from absl import logging
from etils import epath

from coyo11m_tfds.storage import locks, source_files


def absolute(folder: epath.PathLike) -> epath.Path:
    """The absolute path; a URL is one."""
    path = epath.Path(folder)
    # `epath` puts the current folder even before gs://.
    return path if source_files.is_remote(os.fspath(path)) else path.absolute()


def check_writable(folder: epath.PathLike) -> None:
    """Checks that files can be made in a folder, which need not exist yet, and removed from it.

    Raises:
        PermissionError: This user may not.
        OSError: A bucket that does not exist, a file in the place of a folder, or no connection.
        ValueError: A URL of another kind.
    """
    text = os.fspath(folder)
    if not source_files.is_remote(text):
        _check_local(pathlib.Path(text).absolute())
        return
    from coyo11m_tfds.storage import gcs  # imports the client of the storage

    gcs.check_writable(text)


@contextlib.contextmanager
def held(folder: epath.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder; for one process of a run.

    A process that was killed holds nothing: on this machine at once, and on `gs://` after 40
    seconds without a sign of life. On a disk whose file system has no locks a warning is all.

    Raises:
        TimeoutError: Another run is there; the message names its process and host.
        OSError: The storage cannot be reached.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.hold(absolute(folder) / 'training', wait_seconds=None))
        except TimeoutError as error:
            raise TimeoutError(f'{error} End that run, or use another --workdir.') from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            logging.warning('%s: has no locks here: make sure that no other run uses it.', folder)
        yield


def check_readable(folder: epath.PathLike) -> None:
    """Checks that a folder exists and can be listed; raises as `check_writable`."""
    text = os.fspath(folder)
    if not source_files.is_remote(text):
        os.scandir(text).close()
        return
    from coyo11m_tfds.storage import gcs

    if not gcs.is_folder(text):
        raise FileNotFoundError(f'{text}: there is no such folder.')


def _check_local(folder: pathlib.Path) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f'{folder}: {there} is a file; name another folder.')
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f'{folder}: {there} cannot be written to by this user.')
