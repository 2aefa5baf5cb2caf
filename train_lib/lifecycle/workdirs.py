"""The folder of a run, local or `gs://`: its absolute path, its check and its lock."""

import contextlib
from collections.abc import Iterator

from absl import logging
from etils import epath

from coyo11m_tfds import storage
from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.storage import locks


def absolute(folder: epath.PathLike) -> epath.Path:
    """Returns the absolute path of a folder; a URL stays unchanged."""
    # `epath.Path.absolute` puts the current folder even before gs://.
    return epath.Path(storage.make_absolute(folder))


def check_takes_checkpoints(folder: epath.PathLike) -> None:
    """Raises a ValueError for a folder that Orbax takes for another one, or cannot name."""
    place = str(absolute(folder))
    if not foreign_text.is_readable(place):
        raise ValueError(
            f'{place}: its checkpoints could not be written; expected a folder whose path is UTF-8.'
        )
    # Arrays would stay where they are not looked for, or those of other folders would be read.
    wrong = [character for character in '*?[\\' if character in place]
    if storage.local_path(place) is None:
        # It cuts a URL off at a #, and TensorStore goes up at each part that is two dots.
        if '#' in place:
            wrong.append('#')
        if '..' in place.split('/'):
            wrong.append('..')
    if wrong:
        raise ValueError(
            f'{place}: its checkpoints could not be read; expected a folder without '
            f'{" and ".join(sorted(wrong))} in its path.'
        )


def check_writable(folder: epath.PathLike) -> None:
    """Raises an OSError unless files can be made and removed in a folder.

    The folder need not exist yet.
    """
    # Before TensorFlow writes logs, which silently retries a bucket that does not exist.
    storage.open_writable_folder(folder).check_writable()


@contextlib.contextmanager
def lock_workdir(folder: epath.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder; one process of a run calls this.

    Raises a TimeoutError, which names the holder, if another run trains there.
    """
    # A killed process releases the folder: on this machine at once, and on `gs://` after
    # `COYO11M_LEASE_SECONDS` (40) without a renewal.
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
