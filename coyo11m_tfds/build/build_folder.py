"""The folder in which a data set is built, and how it takes the place of the data set.

    folder = BuildFolder('OUT/coyo11m_tfds/latents/1.0.0', lock.check)
    folder.finish()              # completes what a killed build had begun
    folder.begin()               # now `folder.work` may be filled
    folder.commit(files, digest) # its `data` becomes the data set, and the folder is gone
    settle('OUT/coyo11m_tfds/latents/1.0.0')    # for an existing data set

It is `1.0.0.building`, beside the data set. A data set that is to be replaced stays in its place
until the new one is complete. The journal in the folder has the state of the build:

| state | meaning |
|---|---|
| none | a first build is under way; beside a complete data set: leftovers |
| building | a first build is under way |
| replacing | a complete data set will be replaced; kept for the next `--overwrite` to resume |
| complete | `data` is whole: it is to be moved into its place, or has been |

So a kill loses nothing, and the next build, with `--overwrite` or without, finishes what is
`complete`; that takes neither the source nor the settings.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping

from absl import logging
from etils import epath

from coyo11m_tfds import schema
from coyo11m_tfds.process import job
from coyo11m_tfds.storage import build_lock
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState

OFFERS = 'offers'  # its sub-folder for those of `shared_tasks`
_JOURNAL, _FAILURE = 'journal.json', 'failure.json'
_BUILDING, _REPLACING, _COMPLETE = 'building', 'replacing', 'complete'


class BuildFolder:
    """The folder of a build, for the holder of the data set's lock.

    Attributes:
        final: folder of the data set.
        work: the folder; shards and metadata go into its sub-folder `schema.BUILD_DATA`.
    """

    def __init__(self, final: str, check: Callable[[], None] = lambda: None):
        """Does not touch the storage.

        Args:
            final: folder of the data set, `.../NAME/CONFIG/VERSION`, local or `gs://`.
            check: of the lock; called before each step that cannot be undone.
        """
        self.final = final
        parent, _, self._version = final.rpartition('/')
        self._parent = Destination(parent)
        self._data = f'{self._version}{schema.BUILD_SUFFIX}/{schema.BUILD_DATA}'
        self.work = Destination(final + schema.BUILD_SUFFIX)
        self._check = check

    def is_complete(self) -> bool:
        """True if the data set is in its place."""
        return (epath.Path(self.final) / schema.INFO_FILE).exists()

    def finish(self) -> str:
        """Completes a build that was killed after its `data` were complete.

        Returns:
            The digest that `commit` was given; '' if there was nothing to do.
        """
        journal = self._read_journal()
        if journal.get('state') != _COMPLETE:
            return ''
        if self._parent.identity(self._version, schema.INFO_FILE) != journal['identity']:
            if self._parent.identity(self._data, schema.INFO_FILE) != journal['identity']:
                logging.warning('%s: changed after it was complete', self.work.folder)
                return ''
            logging.info('%s: finishing what an interrupted build began', self.final)
            self._promote()
        self._remove()
        return journal['digest']

    def begin(self) -> None:
        """Makes it the folder of a build that is under way, keeping what is finished."""
        # In this order: a process that still helps another builder stores nothing more, or its file
        # is gone before it can be moved.
        self.withdraw()
        self.work.sweep()
        self._write_journal(_REPLACING if self.is_complete() else _BUILDING)

    def withdraw(self) -> None:
        """Ends all offers to other processes of a job; see `shared_tasks`."""
        self.work.keep_only(OFFERS, [], self._check)

    def commit(self, files: Mapping[str, FileState], digest: str) -> None:
        """Makes its `data` the data set, in place of the old one if there is one.

        Args:
            files: states of all files of the data set, by name; other files are removed.
            digest: of the build; `finish` returns it if this is interrupted.

        Raises:
            OSError: a file differs from what was stored.
            build_lock.Lost: another builder took over.
        """
        self._check()
        # An interrupted build of other settings may have left shards under other names.
        self.work.keep_only(schema.BUILD_DATA, files, self._check)
        self.work.verify(schema.BUILD_DATA, files)
        identity = self._parent.identity(self._data, schema.INFO_FILE)
        self._check()
        self._write_journal(_COMPLETE, identity=identity, digest=digest)
        self._promote()
        self._parent.verify(self._version, files)
        self._remove()

    def tidy(self) -> None:
        """Removes it beside a complete data set, unless the next `--overwrite` can resume it."""
        if self._read_journal().get('state') == _REPLACING:
            logging.info(
                '%s: kept, an interrupted build with --overwrite. Run that again to resume it, or '
                'delete the folder.',
                self.work.folder,
            )
        else:
            self._remove()

    @contextlib.contextmanager
    def telling_failure(self) -> Iterator[None]:
        """Within it, an error leaves a message for the other processes of the job."""
        if not job.has_others():
            yield
            return
        self.work.keep_only('', [_JOURNAL], self._check)
        try:
            yield
        except BaseException as error:
            said = {'message': f'{type(error).__name__}: {error}'}
            try:
                self._check()
                self.work.put_bytes(_FAILURE, json.dumps(said).encode())
            except Exception as failure:  # it must not hide the first error
                logging.warning('%s: cannot tell the other processes: %s', self.final, failure)
            raise

    def failure(self) -> str:
        """The message of the first process of the job if it failed; '' if it did not."""
        return self._read(_FAILURE).get('message', '')

    def _promote(self) -> None:
        self._parent.promote(
            self._data, self._version, schema.INFO_FILE, replace=True, check=self._check
        )

    def _remove(self) -> None:
        self.work.remove(last=_JOURNAL, check=self._check)

    def _read_journal(self) -> dict:
        return self._read(_JOURNAL)

    def _write_journal(self, state: str, **entries: str) -> None:
        self.work.put_bytes(_JOURNAL, json.dumps({'state': state, **entries}).encode())

    def _read(self, name: str) -> dict:
        return json.loads(self.work.read_all('', [name]).get(name, b'{}'))


def settle(final: str) -> None:
    """Finishes or removes what an interrupted build has left beside a complete data set.

    Where nothing is left this is one listing. Of the processes of a job only the first does it, and
    it never waits for a builder that is alive. Without write access it only warns.

    Args:
        final: folder of the data set, local or `gs://`.
    """
    if job.process_index():
        return
    parent, _, version = final.rpartition('/')
    left = {version + suffix for suffix in (schema.BUILD_SUFFIX, build_lock.SUFFIX)}
    try:
        if left.isdisjoint(path.name for path in epath.Path(parent).iterdir()):
            return
        with build_lock.hold(final, wait_seconds=None) as lock:
            folder = BuildFolder(final, lock.check)
            folder.finish()
            if folder.is_complete():
                folder.tidy()
    except TimeoutError as error:
        logging.info('%s', error)
    except Exception as error:  # TensorFlow's are no OSErrors; reading the data set still works
        logging.warning('%s: cannot remove what an interrupted build left: %s', final, error)
