"""The folder of a data set: what lies there, and how a build becomes the data set.

    folder = DataFolder('OUT/coyo11m_tfds/latents/1.0.0')
    folder.find_build()                          # ID of the data set, None where there is none
    folder.publish('3f9a1c20', files, small)     # now it is that build
    folder.remove_others('3f9a1c20')             # files of the one before, and of killed builds

All files of a build but three have its ID in their names, and lie here from the start.
`dataset_info.json`, which is written last, has the ID in its template for the names of shards: it
alone makes them the data set. So nothing is ever moved or copied, and the data set that is to be
replaced can be read until then.
"""

import json
from collections.abc import Iterable, Mapping

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.process import job
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState

SETTINGS_FILE = 'settings.json'
_SUB_FOLDER = 'building-'


def sub_folder(build: str) -> str:
    """Where a build keeps what only it needs, in the folder of the data set."""
    return f'{_SUB_FOLDER}{build}'


def _builder_of(name: str) -> str:
    """The ID of the build that a file in its sub-folder belongs to; '' for another file."""
    top, slash, _ = name.partition('/')
    return top.removeprefix(_SUB_FOLDER) if slash and top.startswith(_SUB_FOLDER) else ''


class DataFolder:
    """The folder of a data set, `.../NAME/CONFIG/VERSION`.

    Attributes:
        files: Store of the files in the folder.
    """

    def __init__(self, final: str):
        """Does not touch the storage.

        Args:
            final: the folder, local or `gs://`.
        """
        self.files = Destination(final)

    def find_build(self) -> str | None:
        """The ID of the data set; '' if its files have none, None if there is no data set."""
        data = self.files.read(schema.INFO_FILE)
        if data is None:
            return None
        try:
            return schema.build_of(json.loads(data)['splits'][0]['filepathTemplate'])
        except (LookupError, TypeError, ValueError):
            return ''

    def has_data_set(self) -> bool:
        """True if there is a data set."""
        return self.find_build() is not None

    def publish(
        self, build: str, files: Mapping[str, FileState], local: Mapping[str, str], overwrite: bool
    ) -> None:
        """Makes a build the data set, in place of the one that is there, if any.

        Args:
            build: its ID.
            files: states of all its files, by name; all but those of `local` are in the folder.
            local: paths of the files that have no ID in their names.
            overwrite: whether there may be a data set of another build.

        Raises:
            OSError: a file differs from what was stored.
            FileExistsError: another build has become the data set meanwhile.
        """
        found = self.find_build()
        if found not in (None, build) and not overwrite:
            raise FileExistsError(
                f'{self.files.folder}: build {found} was completed here while {build} was under '
                'way. Give the config of one of them another name, or replace the data set with '
                '--overwrite.'
            )
        self.files.verify({name: state for name, state in files.items() if name not in local})
        # Until the last is there, there is no data set. In this order a reader that finds metadata
        # of the ID in `dataset_info.json` has seen the features of that build as well.
        self.files.remove([schema.INFO_FILE])
        for name in sorted(local, key=_order):
            self.files.put(local[name], name, files[name].crc32c)
        self.files.verify({name: files[name] for name in local})

    def remove_others(self, build: str) -> None:
        """Removes what other builds have left beside the data set, and the records of its own.

        Args:
            build: ID of the data set.
        """
        there = self.files.sizes()
        kept = self._recorded(build, there)
        for other in sorted(_builds(there) - {build}):
            doomed = self._recorded(other, there) or _files_of(other, there)
            doomed = (doomed & there.keys()) - kept
            logging.info(
                '%s: removing %d files of build %s, %s',
                self.files.folder,
                len(doomed),
                other,
                readable(sum(there[name] for name in doomed)),
            )
            self._remove(other, doomed, there)
        self._remove(build, _files_of(build, there) - kept, there)
        self.files.sweep()

    def tidy(self, build: str) -> None:
        """Finishes what a killed builder had begun to remove; tells what other builds have left.

        Args:
            build: ID of the data set.
        """
        there = self.files.sizes()
        under_way = {_builder_of(name) for name in there} - {'', build}
        for other in sorted(under_way):
            size = sum(there[name] for name in _files_of(other, there))
            logging.warning(
                '%s: build %s was interrupted and has left %s. The command that began it '
                'resumes it with --overwrite; the next build that is completed removes them.',
                self.files.folder,
                other,
                readable(size),
            )
        kept = self._recorded(build, there)
        for other in sorted(_builds(there) - under_way - {build}):
            self._remove(other, (self._recorded(other, there) & there.keys()) - kept, there)
        self._remove(build, _files_of(build, there) - kept, there)
        self.files.sweep()

    def has_leftovers(self, build: str) -> bool:
        """True if other builds have left something, or this one what only it needed."""
        there = self.files.sizes()
        return bool(_builds(there) - {build}) or any('/' in name for name in there)

    def _recorded(self, build: str, there: Iterable[str]) -> set[str]:
        """Names in the record of checksums of a build, and its own; empty if it has none."""
        name = schema.of_build(schema.CHECKSUMS_FILE, build)
        data = self.files.read(name) if name in there else None
        try:
            return {name, *manifest.parse(data)} if data else set()
        except ValueError:
            return set()

    def _remove(self, build: str, names: set[str], there: Iterable[str]) -> None:
        """Removes files of a build; what proves that they are its own comes last."""
        checksums = schema.of_build(schema.CHECKSUMS_FILE, build)
        self.files.remove(names - {checksums})
        self.files.remove(names & {checksums})
        in_work = {name for name in there if _builder_of(name) == build}
        last = f'{sub_folder(build)}/{SETTINGS_FILE}'
        self.files.remove(in_work - {last})
        self.files.remove(in_work & {last})


def _order(name: str) -> tuple[bool, bool, str]:
    return name == schema.INFO_FILE, name == schema.FEATURES_FILE, name


def _files_of(build: str, names: Iterable[str]) -> set[str]:
    """Names that have the ID of a build, without those in its sub-folder."""
    return {name for name in names if '/' not in name and schema.build_of(name) == build}


def _builds(names: Iterable[str]) -> set[str]:
    """The IDs of builds that have left their records, of checksums or of finished shards."""
    stem = schema.CHECKSUMS_FILE.partition('.')[0]
    found = {schema.build_of(name) for name in names if name.startswith(f'{stem}-')}
    return (found | {_builder_of(name) for name in names}) - {''}


def tidy(final: str) -> None:
    """Tidies the folder of a data set that is there; see `DataFolder.tidy`.

    Where nothing is left this is one listing. Of the processes of a job only the first does it, and
    it never waits for a builder that is alive. Without write access it only warns.

    Args:
        final: folder of the data set, local or `gs://`.
    """
    if job.process_index():
        return
    folder = DataFolder(final)
    try:
        build = folder.find_build()
        if not build or not folder.has_leftovers(build):
            return
        with locks.hold(final, wait_seconds=None):
            folder.tidy(build)
    except TimeoutError as error:
        logging.info('%s', error)
    except OSError as error:
        logging.warning('%s: cannot remove what an interrupted build left: %s', final, error)
