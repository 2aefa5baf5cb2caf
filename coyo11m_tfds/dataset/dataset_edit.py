"""Changes to the columns of a built data set, by one process at a time, under its lock."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import columns, manifest, stored_dataset
from coyo11m_tfds.dataset.columns import Column
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.storage import file_state, locks
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.scratch import choose_folder
from coyo11m_tfds.storage.stored_file import StoredFile


@dataclasses.dataclass(frozen=True)
class DatasetEdit:
    """A data set whose columns this process changes, under its lock."""

    stored: StoredDataset
    destination: WritableFolder
    staging: str  # local folder for files that `commit` puts into the destination
    scratch: str  # local folder for other files, empty at first
    lock: locks.Lock

    def commit(self, new_columns: Mapping[str, Column], files: Sequence[str] = ()) -> None:
        """Stores files, then the description of the columns; removes files without a use.

        `files` are names in `staging`. Raises an OSError if the lock has been lost.
        """
        build = self.stored.build
        folder = self.destination.folder
        columns_file = schema.of_build(schema.COLUMNS_FILE, build)
        columns.write_columns(self.staging, new_columns, build)
        listing = storage.list_folder(folder)
        unused_files = columns.unused_column_files(listing, new_columns, build)
        names = list(files)
        # A data set of another program has no record of checksums, and gets none.
        checksums = listing.get(schema.of_build(schema.CHECKSUMS_FILE, build))
        if checksums:
            new_files = list(files)
            new_files.append(columns_file)
            self._update_checksums(checksums, unused_files, new_files)
            names.append(checksums.name)
        # Last: a column that the description does not name does not exist, so after a kill in
        # between the same command can be repeated.
        names.append(columns_file)
        # As late as possible: everything before this line has changed no file that readers know.
        if not self.lock.is_ours():
            raise OSError(f'{folder}: another process is writing. Run the same command again.')
        for name in names:
            path = os.path.join(self.staging, name)
            state = file_state.compute_state(path)
            self.destination.store(path, name, state.crc32c)
        self.destination.remove(unused_files - set(names))

    def _update_checksums(
        self, checksums: StoredFile, unused_files: Iterable[str], new_files: Iterable[str]
    ) -> None:
        """Writes the record of checksums into `staging`, without unused files and with new ones."""
        states = manifest.parse_checksums(checksums.read())
        for name in unused_files:
            states.pop(name, None)
        for name in new_files:
            states[name] = file_state.compute_state(os.path.join(self.staging, name))
        manifest.write_checksums(self.staging, states, self.stored.build)


@contextlib.contextmanager
def edit_dataset(data_dir: str | os.PathLike[str], scratch_dir: str = '') -> Iterator[DatasetEdit]:
    """Excludes other writers of a data set, and removes temporary files at the end.

    Args:
        data_dir: Folder of the data set, local or on gs://.
        scratch_dir: Local folder for temporary files; '' for `.coyo11m_tfds` in the `--data_dir` of
            the build or, for a data set on gs://, this user's cache.

    Raises:
        ValueError: There is no such data set.
        OSError: Another process changes it, or it cannot be written to.
    """
    folder = storage.expand_home(data_dir).rstrip('/')
    # Before the first request, as these cost none.
    destination = storage.open_writable_folder(folder)
    # Three folders up: the data set is in `NAME/CONFIG/VERSION` of the build's `--data_dir`.
    parent = choose_folder(schema.NAME, f'{folder}/../../..', os.fspath(scratch_dir))
    # Without a data set, no lock may be made.
    stored_dataset.open_data(folder)
    with locks.hold(folder, wait=False) as lock:
        # Again, because another process may have changed the columns before the lock was taken.
        stored = stored_dataset.open_data(folder)
        os.makedirs(parent, exist_ok=True)
        with locks.temporary_folder(parent, 'column-') as scratch:
            # A killed command may have left files: temporary ones, and those of no column.
            destination.sweep()
            try:
                staging = destination.staging(scratch)
                edit = DatasetEdit(stored, destination, staging, scratch, lock)
                listing = storage.list_folder(folder)
                if columns.unused_column_files(listing, stored.columns, stored.build):
                    edit.commit(stored.columns)
                yield edit
            finally:
                destination.sweep()
