"""Rows of a column, mapped: values that lie elsewhere than in the records.

latents = ColumnReader(column, folder, 'train', num_records, row_nbytes=24_576)
latents.find(np.array([3, 17]))       # addresses of the values of these records
"""

import os

import numpy as np

from coyo11m_tfds.columns import Column
from coyo11m_tfds.reading.mapped_files import MappedFiles


class ColumnReader:
    """Finds the rows of one column of a split in its files."""

    def __init__(
        self,
        column: Column,
        folder: str | os.PathLike[str],
        split: str,
        num_records: int,
        row_nbytes: int,
    ):
        """Holds the files against what the data set says of them; maps none.

        Args:
            column: what the data set says of it.
            folder: of the data set.
            split: its name.
            num_records: of the split.
            row_nbytes: bytes of one row.

        Raises:
            ValueError: a file is missing or has changed, or the column is damaged.
        """
        for file in column.files:
            file.check()
        self._places = column.load(folder, split)
        if len(self._places) != num_records:
            raise ValueError(
                f'{folder}: its column {column.name!r} has {len(self._places)} rows for split '
                f'{split!r} of {num_records} records. Build the data set again.'
            )
        self._starts = np.array([file.start for file in column.files], np.int64)
        self._row_nbytes = row_nbytes
        self._files = MappedFiles(lambda number: column.files[number].path, len(column.files))

    def find(self, number: np.ndarray) -> np.ndarray:
        """The addresses of the values of some records of the split, int64 `(n,)`.

        Raises:
            ValueError: a row is not within its file.
            OSError: a file cannot be opened.
        """
        file, row = self._places[number].astype(np.int64).T
        self._files.open(np.unique(file))
        offset = self._starts[file] + row * self._row_nbytes
        outside = offset + self._row_nbytes > self._files.size[file]
        if outside.any():
            worst = int(outside.argmax())
            raise ValueError(
                f'{self._files.path_of(int(file[worst]))}: has no row {row[worst]}, which the data '
                'set asks for. Build the data set again.'
            )
        return self._files.address[file] + offset

    def will_need(self, first: np.ndarray, last: np.ndarray) -> None:
        """Has the system begin to read the rows of runs of records; of each its ends are given."""
        (file, begin), (last_file, end) = self._places[first].T, self._places[last].T
        self._files.open(np.unique(file))
        runs = zip(file.tolist(), last_file.tolist(), begin.tolist(), end.tolist(), strict=True)
        for one, other, start, stop in runs:
            if one == other and start <= stop:
                nbytes = (stop - start + 1) * self._row_nbytes
                self._files.will_need(
                    one, int(self._starts[one]) + start * self._row_nbytes, nbytes
                )

    def check_unchanged(self, number: np.ndarray) -> None:
        """Looks whether the files of some records are what they were; see `MappedFiles`."""
        self._files.check_unchanged(np.unique(self._places[number, 0]))
