"""Computes the CRC-32Cs of rows in place that a build has left out, because it read only heads."""

import dataclasses
import os
import time
from collections.abc import Sequence

import google_crc32c
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.dataset.columns import InPlaceColumn, InPlaceFile
from coyo11m_tfds.dataset.dataset_edit import DatasetEdit, edit_dataset
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile

# Files on the local disk at a time: one stream does not saturate a fast link.
_FILES_AT_ONCE = 4

# What an interruption may cost. To record 11 million checksums writes 140 MB.
_SECONDS_BETWEEN_RECORDS = 300

# Infinity and NaN have all bits of the exponent: dtype of the bits, and those of the exponent.
_EXPONENTS = {
    'float16': ('<u2', 0x7C00),
    'bfloat16': ('<u2', 0x7F80),
    'float32': ('<u4', 0x7F800000),
}


def compute_row_checksums(data_dir: str | os.PathLike[str], scratch_dir: str = '') -> list[str]:
    """Computes and records the CRC-32C of each row in place that has none yet.

    Whole files are fetched, a few at a time, and compared with the checksums of their storage. What
    is computed is recorded every few minutes and at an error, so the same call goes on.

    Args:
        data_dir: Folder of the data set, local or on gs://.
        scratch_dir: Local folder for the files; '' as for `dataset_edit.edit_dataset`.

    Returns:
        A line for each file with rows that are not finite, which the build would have left out.

    Raises:
        ValueError: A file is missing or has changed.
        OSError: A storage is out of reach, or another process changes the data set.
    """
    with edit_dataset(data_dir, scratch_dir) as edit:
        column = edit.stored.columns.get(schema.LATENTS)
        if not isinstance(column, InPlaceColumn) or not column.unchecked:
            return []
        return _ColumnChecksums(edit, column).compute()


class _ColumnChecksums:
    """The places of a column, into which checksums are filled file by file."""

    def __init__(self, edit: DatasetEdit, column: InPlaceColumn):
        self._edit = edit
        self._column = column
        self._unchecked = list(column.unchecked)
        self._places: dict[str, np.ndarray] = {}  # of each split, see `InPlaceColumn.locate`
        for split in edit.stored.splits.values():
            places = column.locate(edit.stored.folder, split.name, split.num_records)
            # What `locate` returns is read-only, and perhaps a mapped file.
            self._places[split.name] = places.copy()

    def compute(self) -> list[str]:
        """Fills in the checksums of all files; returns a line for each with rows not finite."""
        files = self._find_files()
        order = list(files)
        # Below the scratch folder, which is empty at first: nothing of others is there.
        downloads = Scratch(os.path.join(self._edit.scratch, 'source'))
        faults = []
        record_time = time.monotonic()
        num_bytes = sum(file.size for file in files.values())
        counts = {'files': len(files)}
        with Progress('Computing checksums of rows', num_bytes, 'B', counts) as progress:
            try:
                for first in range(0, len(order), _FILES_AT_ONCE):
                    numbers = order[first : first + _FILES_AT_ONCE]
                    batch = [files[number] for number in numbers]
                    with downloads.hold_all(batch, on_bytes=progress.add) as paths:
                        for number, path in zip(numbers, paths, strict=True):
                            faults += self._fill(number, path)
                            progress.add(0, files=1)
                    # Not after each batch: a record is of all rows, whatever has been added.
                    if time.monotonic() > record_time + _SECONDS_BETWEEN_RECORDS:
                        self._record()
                        record_time = time.monotonic()
            # Also at an error or a Ctrl-C: what has been computed is not computed again.
            finally:
                self._record()
        return faults

    def _find_files(self) -> dict[int, StoredFile]:
        """Returns the files without checksums by number, all as the description has them."""
        listed_files = self._column.find_files()
        files = {}
        # All are compared before the first of them is fetched.
        for number in self._unchecked:
            files[number] = self._column.files[number].check(listed_files[number])
        return files

    def _fill(self, number: int, local_path: str) -> list[str]:
        """Fills in the checksums of the rows of one file; returns its line, if it has a fault."""
        file = self._column.files[number]
        bad_records = []
        with open(local_path, 'rb') as opened:
            for split, places in self._places.items():
                records = np.flatnonzero(places[:, 0] == number)
                order = np.argsort(places[records, 1])
                # In the order of the rows, so that the reads go forward.
                for record in records[order].tolist():
                    row = int(places[record, 1])
                    data = file.read_row(opened.fileno(), row, self._column.row_nbytes)
                    places[record, 2] = google_crc32c.value(data)
                    if not _is_finite(data, self._column.dtype):
                        bad_records.append(f'record {record} of {split}')
        self._unchecked.remove(number)
        return _describe_not_finite(file, bad_records)

    def _record(self) -> None:
        """Records what has been computed, in files of new names: others may be read."""
        column = self._column
        # Nothing is new since the last record.
        if len(self._unchecked) == len(column.unchecked):
            return
        crc32c = {}
        names = {}
        new_names = []
        for split, places in self._places.items():
            digest = columns.array_crc32c(places)
            name = column.places_file(split)
            # A split without rows in these files keeps its file.
            if digest != column.crc32c[split]:
                name = columns.column_file_name(schema.LATENTS, f'{split}-{digest}', column.build)
                path = os.path.join(self._edit.staging, name)
                np.save(path, places)
                new_names.append(name)
            crc32c[split] = digest
            names[split] = name
        self._column = dataclasses.replace(
            column, crc32c=crc32c, places=names, unchecked=tuple(self._unchecked)
        )
        new_columns = {**self._edit.stored.columns, schema.LATENTS: self._column}
        self._edit.commit(new_columns, new_names)


def _is_finite(data: bytes, dtype: str) -> bool:
    """Returns whether no number of a row is infinite or NaN."""
    bits, exponent = _EXPONENTS[dtype]
    values = np.frombuffer(data, bits)
    return not ((values & exponent) == exponent).any()


def _describe_not_finite(file: InPlaceFile, records: Sequence[str]) -> list[str]:
    """Returns a line about the records of a file whose rows are not finite; none without any."""
    if not records:
        return []
    rows = format_count(len(records), 'row is', 'rows are')
    return [
        f'{file.path}: {rows} not finite, such as that of {records[0]}. Build without '
        "read_latents='heads', which leaves such rows out."
    ]
