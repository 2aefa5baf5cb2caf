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
        self.folder, self.build = folder, build
        self._receipts = Receipts(folder, sub_folder(build), ShardResult.from_json)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Marks the build as under way, so that its files can be attributed to it."""
        name = f'{sub_folder(self.build)}/{_SETTINGS_FILE}'
        self.folder.write(name, json.dumps(settings).encode())

    def save(self, task: ShardTask, local_file: str, result: ShardResult) -> None:
        """Stores a shard from a local file, and then its receipt."""
        self.folder.store(local_file, task.filename, result.crc32c)
        files = {task.filename: FileState(result.num_bytes, result.crc32c)}
        self._receipts.write(task.filename, task.fingerprint, files, result.to_json())

    def recorded(self) -> set[str]:
        """Returns the names of the shards that have a receipt; does not check the receipts."""
        names = (os.path.split(name) for name in self.folder.sizes() if name.endswith('.json'))
        return {x.removesuffix('.json') for top, x in names if top == sub_folder(self.build)}

    def load(self, tasks: Sequence[ShardTask]) -> list[ShardResult]:
        """Returns the results of the finished tasks; reads local shards for their checksums."""
        tasks_by_name = {task.filename: task for task in tasks}
        receipts = {
            name: receipt
            for name, receipt in self._receipts.read(tasks_by_name).items()
            if _is_of_task(receipt, tasks_by_name[name])
        }
        finished = self._receipts.check_files(receipts, 'Checking finished shards')
        if receipts:
            shards = format_count(len(tasks), 'shard is', 'shards are')
            logging.info('%d of %s already finished', len(finished), shards)
        return [receipt.facts for receipt in finished.values()]


def _is_of_task(receipt: Receipt, task: ShardTask) -> bool:
    result: ShardResult = receipt.facts
    is_same_task = receipt.origin == task.fingerprint
    # The fingerprint covers what was planned, the digests what the worker has really read.
    is_same_source = result.read == tuple(segment.digest for segment in task.segments)
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
            return ''

    def publish(
        self, build: str, files: Mapping[str, FileState], local: Mapping[str, str], overwrite: bool
    ) -> None:
        """Makes a build the data set, from all its `files`, of which some are still `local`."""
        existing = self.find_build()
        if existing not in (None, build) and not overwrite:
            raise FileExistsError(
                f'{self.files.folder}: build {existing} was completed here while {build} was under '
                'way. Rename the config of one of them, or replace the data set with --overwrite.'
            )
        # As late as possible, because from here on readers rely on these files.
        self.files.verify({name: state for name, state in files.items() if name not in local})
        # Until the last is there, there is no data set. In this order a reader that finds metadata
        # of the ID in `dataset_info.json` has seen the features of that build as well.
        self.files.remove([schema.INFO_FILE])
        for name in sorted(local, key=_publication_order):
            self.files.store(local[name], name, files[name].crc32c)
        self.files.verify({name: files[name] for name in local})

    def remove_others(self, build: str, resumable_too: bool = True) -> None:
        """Removes the files of other builds; interrupted ones stay without `resumable_too`."""
        sizes = self.files.sizes()
        own_names = self._recorded_files(build, sizes)
        for other in sorted(_build_ids(sizes) - {build}):
            # A complete build is removed by its record, so that files of users with its ID stay.
            names = self._recorded_files(other, sizes) or _files_of(other, sizes)
            names = (names & sizes.keys()) - own_names
            size = format_bytes(sum(sizes[name] for name in names))
            if not resumable_too and any(_builder_of(name) == other for name in sizes):
                logging.warning(
                    f'{self.files.folder}: build {other} was interrupted and has left {size}. The '
                    'same command with --overwrite resumes it; the next completed build removes '
                    'the files.'
                )
                continue
            action = f'removing {format_count(len(names), "file")} of build {other}, {size}'
            logging.info('%s: %s', self.files.folder, action)
            self._remove(other, names, sizes)
        self._remove(build, _files_of(build, sizes) - own_names, sizes)
        self.files.sweep(_SUB_FOLDER)

    def _recorded_files(self, build: str, listing: Iterable[str]) -> set[str]:
        """Names in the record of checksums of a build, and its own; empty if it has none."""
        name = schema.of_build(schema.CHECKSUMS_FILE, build)
        data = self.files.read(name) if name in listing else None
        try:
            return {name, *manifest.parse_checksums(data)} if data else set()
        except ValueError:
            return set()

    def _remove(self, build: str, names: set[str], listing: Iterable[str]) -> None:
        """Removes files of a build; what proves that they are its own comes last."""
        working_files = {name for name in listing if _builder_of(name) == build}
        proofs = (
            schema.of_build(schema.CHECKSUMS_FILE, build),
            f'{sub_folder(build)}/{_SETTINGS_FILE}',
        )
        for group, proof in zip((names, working_files), proofs, strict=True):
            self.files.remove(group - {proof})
            self.files.remove(group & {proof})


def tidy(final: str) -> None:
    """Removes the files of builds that were killed after they completed the data set in `final`."""
    if job.process_index():
        return
    folder = DataFolder(final)
    try:
        build = folder.find_build()
        sizes = folder.files.sizes() if build else {}
        # Mere readers come here as well, and need no lock where nothing is left over.
        if not build or not (_build_ids(sizes) - {build} or any('/' in name for name in sizes)):
            return
        with locks.hold(final, wait=False):
            folder.remove_others(build, resumable_too=False)
    except TimeoutError as error:
        logging.info('%s', error)
    except OSError as error:
        logging.warning('%s: cannot remove what an interrupted build left: %s', final, error)


def _publication_order(name: str) -> tuple[bool, bool, str]:
    return name == schema.INFO_FILE, name == schema.FEATURES_FILE, name


def _builder_of(name: str) -> str:
    """The ID of the build that a file in its sub-folder belongs to; '' for another file."""
    top, slash, _ = name.partition('/')
    return top.removeprefix(_SUB_FOLDER) if slash and top.startswith(_SUB_FOLDER) else ''


def _files_of(build: str, names: Iterable[str]) -> set[str]:
    """Names that have the ID of a build, without those in its sub-folder."""
    return {name for name in names if '/' not in name and schema.build_of(name) == build}


def _build_ids(names: Iterable[str]) -> set[str]:
    """The IDs of builds that have left their records, of checksums or of finished shards."""
    stem = schema.CHECKSUMS_FILE.partition('.')[0]
    complete = {schema.build_of(name) for name in names if name.startswith(f'{stem}-')}
    return (complete | {_builder_of(name) for name in names}) - {''}
