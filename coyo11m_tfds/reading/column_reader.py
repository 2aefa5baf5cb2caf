"""Rows of a column, mapped: values that lie elsewhere than in the records.

latents = column_reader.open_column(column, folder, 'train', num_records)
latents.find(np.array([3, 17]))       # addresses of the values of these records
"""

import math
import os
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.columns import AddedColumn, Column
from coyo11m_tfds.reading.mapped_files import MappedFiles


def open_column(
    column: Column | AddedColumn, folder: str | os.PathLike[str], split: str, num_records: int
) -> 'ColumnReader':
    """Holds the files of a column against what the data set says of them; maps none.

    Raises:
        ValueError: a file is missing or has changed, or is not as long as the split.
    """
    if isinstance(column, AddedColumn):
        path, start = column.locate(folder, split, num_records)
        return ColumnReader([path], [start], None, np.dtype(column.dtype), column.shape)
    for file in column.files:
        file.check()
    places = column.locate(folder, split, num_records)
    paths, starts = [f.path for f in column.files], [f.start for f in column.files]
    dtype = np.dtype(getattr(ml_dtypes, column.dtype, column.dtype))
    return ColumnReader(paths, starts, places, dtype, schema.LATENTS_SHAPE)


class ColumnReader:
    """Finds the rows of one column of a split in its files.

    Attributes:
        dtype: of the numbers of a row.
        shape: of a row.
    """

    def __init__(
        self,
        paths: Sequence[str],
        starts: Sequence[int],
        places: np.ndarray | None,
        dtype: np.dtype,
        shape: tuple[int, ...],
    ):
        """Maps nothing.

        Args:
            paths: of the files.
            starts: where in each of them the first row begins, in bytes.
            places: of each record the number of its file and its row, uint32 `(n, 2)`; None where
                the rows of the first file are those of the records.
            dtype, shape: of one row.
        """
        self.dtype, self.shape = dtype, shape
        self._places, self._row_nbytes = places, dtype.itemsize * math.prod(shape)
        self._starts = np.array(starts, np.int64)
        self._files = MappedFiles(lambda number: paths[number], len(paths))

    def find(self, number: np.ndarray) -> np.ndarray:
        """The addresses of the values of some records of the split, int64 `(n,)`.

        Raises:
            ValueError: a row is not within its file.
            OSError: a file cannot be opened.
        """
        file, row = self._places_of(number)
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
        (file, begin), (last_file, end) = self._places_of(first), self._places_of(last)
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
        self._files.check_unchanged(self._places_of(number)[0])

    def _places_of(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file and the row of some records, each int64 `(n,)`."""
        if self._places is None:
            return np.zeros_like(number), number
        file, row = self._places[number].astype(np.int64).T
        return file, row
