"""The folder of a data set: shards and records of a running build, and its publication."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.tasks import THIS_WRITER, ShardResult, ShardTask
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.process import job
from coyo11m_tfds.process.sizes import format_bytes, format_count
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.receipts import Receipt, Receipts

_SETTINGS_FILE = 'settings.json'
_SUB_FOLDER = 'building-'


def sub_folder(build: str) -> str:
    """Returns the sub-folder of a data set that holds the working files of a build."""
    return f'{_SUB_FOLDER}{build}'


class FinishedShards:
    """The finished shards of a running build, and the receipts from which it can resume."""

    def __init__(self, folder: WritableFolder, build: str):
        """Does not touch the storage."""
        self.folder = folder
        self.build = build
        self._receipts = Receipts(folder, sub_folder(build), ShardResult.from_json)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Marks the build as under way, so that its files can be attributed to it."""
        name = f'{sub_folder(self.build)}/{_SETTINGS_FILE}'
        self.folder.write(name, json.dumps(settings).encode())

    def save(self, task: ShardTask, local_file: str, result: ShardResult) -> None:
        """Stores a shard from a local file, and then its receipt."""
        self.folder.store(local_file, task.filename, result.crc32c)
        state = FileState(result.num_bytes, result.crc32c)
        # Last, because it says that the shard is there.
        self._receipts.write(
            task.filename, task.fingerprint, {task.filename: state}, result.to_json()
        )

    def recorded(self) -> set[str]:
        """Returns the names of the shards that have a receipt; does not check the receipts."""
        names = set()
        working_folder = sub_folder(self.build)
        for path in self.folder.sizes():
            folder, name = os.path.split(path)
            if folder == working_folder and name.endswith('.json'):
                names.add(name.removesuffix('.json'))
        return names

    def load(self, tasks: Sequence[ShardTask]) -> list[ShardResult]:
        """Returns the results of the finished tasks; reads local shards for their checksums."""
        tasks_by_name = {task.filename: task for task in tasks}
        receipts = {}
        for name, receipt in self._receipts.read(tasks_by_name).items():
            if _is_of_task(receipt, tasks_by_name[name]):
                receipts[name] = receipt
        # Only now, because it may read whole shards: those of other tasks are written anew anyway.
        finished = self._receipts.check_files(receipts, 'Checking finished shards')
        if receipts:
            shards = format_count(len(tasks), 'shard is', 'shards are')
            logging.info('%d of %s already finished', len(finished), shards)
        return [receipt.facts for receipt in finished.values()]


def _is_of_task(receipt: Receipt, task: ShardTask) -> bool:
    """Whether a receipt is that of the shard that this process would write for a task."""
    result: ShardResult = receipt.facts
    is_same_task = receipt.origin == task.fingerprint
    # The fingerprint covers what was planned, the digests what the worker has really read.
    planned_digests = tuple(segment.digest for segment in task.segments)
    is_same_source = result.read == planned_digests
    is_same_writer = result.writer == THIS_WRITER
    return is_same_task and is_same_source and is_same_writer


class DataFolder:
    """The folder of a data set, `.../NAME/CONFIG/VERSION`."""

    def __init__(self, final: str):
        """Takes the path or `gs://` URL of the folder; does not touch the storage."""
        self.files = storage.open_writable_folder(final)

    def find_build(self) -> str | None:
        """Returns the ID of the data set; '' if its files have none, None without a data set."""
        data = self.files.read(schema.INFO_FILE)
        if data is None:
            return None
        try:
            return schema.build_of(json.loads(data)['splits'][0]['filepathTemplate'])
        except (LookupError, TypeError, ValueError):
            # Damaged, or of another program: it must not be taken for an empty folder.
            return ''

    def publish(
        self, build: str, files: Mapping[str, FileState], local: Mapping[str, str], overwrite: bool
    ) -> None:
        """Makes a build the data set, from all its `files`, of which some are still `local`.

        Args:
            build: The ID of the build.
            files: The states of all its files, by their names in the folder.
            local: The local paths of those that replace files of another data set, by name.
            overwrite: Whether the build may replace another one.

        Raises:
            FileExistsError: If there is another build, and it may not be replaced.
            OSError: If a file is not there as its state says.
        """
        existing = self.find_build()
        if existing not in (None, build) and not overwrite:
            raise FileExistsError(
                f'{self.files.folder}: build {existing} was completed here while {build} was under '
                'way. Rename the config of one of them, or replace the data set with --overwrite.'
            )
        stored = {}
        for name, state in files.items():
            if name not in local:
                stored[name] = state
        # As late as possible, because from here on readers rely on these files.
        self.files.verify(stored)
        # Until the last is there, there is no data set. In this order a reader that finds metadata
        # of the ID in `dataset_info.json` has seen the features of that build as well.
        self.files.remove([schema.INFO_FILE])
        for name in sorted(local, key=_publication_order):
            self.files.store(local[name], name, files[name].crc32c)
        self.files.verify({name: files[name] for name in local})

    def remove_others(self, build: str, resumable_too: bool = True) -> None:
        """Removes the files of other builds; interrupted ones stay without `resumable_too`."""
        sizes = self.files.sizes()
        builders = {_builder_of(name) for name in sizes}
        own_names = self._recorded_files(build, sizes)
        for other in sorted(_build_ids(sizes) - {build}):
            # A complete build is removed by its record, so that files of users with its ID stay.
            names = self._recorded_files(other, sizes) or _files_of(other, sizes)
            names &= sizes.keys()
            # Both records may name files without an ID, which are now those of this build.
            names -= own_names
            num_bytes = sum(sizes[name] for name in names)
            size = format_bytes(num_bytes)
            if not resumable_too and other in builders:
                logging.warning(
                    f'{self.files.folder}: build {other} was interrupted and has left {size}. The '
                    'same command with --overwrite resumes it; the next completed build removes '
                    'the files.'
                )
                continue
            files = format_count(len(names), 'file')
            logging.info('%s: removing %s of build %s, %s', self.files.folder, files, other, size)
            self._remove(other, names, sizes)
        # Also its own working files, and files with its ID that it does not record.
        unused_names = _files_of(build, sizes) - own_names
        self._remove(build, unused_names, sizes)
        self.files.sweep(_SUB_FOLDER)

    def _recorded_files(self, build: str, listing: Iterable[str]) -> set[str]:
        """Names in the record of checksums of a build, and its own; empty if it has none."""
        name = schema.of_build(schema.CHECKSUMS_FILE, build)
        if name not in listing:
            return set()
        data = self.files.read(name)
        if not data:
            return set()
        try:
            names = set(manifest.parse_checksums(data))
        except ValueError:
            return set()
        return names | {name}

    def _remove(self, build: str, names: set[str], listing: Iterable[str]) -> None:
        """Removes files of a build, and its working files among those listed."""
        self._remove_last(names, schema.of_build(schema.CHECKSUMS_FILE, build))
        working_files = {name for name in listing if _builder_of(name) == build}
        self._remove_last(working_files, f'{sub_folder(build)}/{_SETTINGS_FILE}')

    def _remove_last(self, names: set[str], proof: str) -> None:
        """Removes files; the one that proves whose they are comes last, if it is among them."""
        self.files.remove(names - {proof})
        # After a kill before this step, the next build still knows what is left over.
        self.files.remove(names & {proof})


def tidy(final: str) -> None:
    """Removes the files of builds that were killed after they completed the data set in `final`."""
    if job.process_index():
        return
    folder = DataFolder(final)
    try:
        build = folder.find_build()
        if not build:
            return
        sizes = folder.files.sizes()
        other_builds = _build_ids(sizes) - {build}
        has_sub_folder = any('/' in name for name in sizes)
        # Mere readers come here as well, and need no lock where nothing is left over.
        if not other_builds and not has_sub_folder:
            return
        with locks.hold(final, wait=False):
            folder.remove_others(build, resumable_too=False)
    except TimeoutError as error:
        # Whoever holds the lock, a build or another reader, removes these files itself.
        logging.info('%s', error)
    except OSError as error:
        logging.warning('%s: cannot remove what an interrupted build left: %s', final, error)


def _publication_order(name: str) -> tuple[bool, bool, str]:
    """The key to sort files by: `features.json` is the last but one, `dataset_info.json` last."""
    return name == schema.INFO_FILE, name == schema.FEATURES_FILE, name


def _builder_of(name: str) -> str:
    """The ID of the build that a file in its sub-folder belongs to; '' for another file."""
    folder, slash, _ = name.partition('/')
    if not slash or not folder.startswith(_SUB_FOLDER):
        return ''
    return folder.removeprefix(_SUB_FOLDER)


def _files_of(build: str, names: Iterable[str]) -> set[str]:
    """Names that have the ID of a build, without those in its sub-folder."""
    files = set()
    for name in names:
        if '/' not in name and schema.build_of(name) == build:
            files.add(name)
    return files


def _build_ids(names: Iterable[str]) -> set[str]:
    """The IDs of builds that have left their records, of checksums or of finished shards."""
    stem = schema.CHECKSUMS_FILE.partition('.')[0]
    builds = set()
    for name in names:
        builds.add(_builder_of(name))
        if name.startswith(f'{stem}-'):
            builds.add(schema.build_of(name))
    # Of names that belong to no build.
    builds.discard('')
    return builds
