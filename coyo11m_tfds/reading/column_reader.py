"""Rows of a column: values outside the records, mapped or fetched.

A row is the value of one record. It lies in its file in one or more *pieces* of equal size: a `.pt`
file may keep each crop of the latents in an array of its own.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from absl import logging

from coyo11m_tfds.dataset.columns import AddedColumn, Column
from coyo11m_tfds.memory.files import HeldFiles, Range
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage.stored_file import StoredFile

# Two rows with at most this gap in bytes are fetched together: another request would take longer.
# The rows of a chunk are neighbours in the source, except for dropped rows and other splits.
_GAP = 128 << 10

_CRC_NBYTES = 4


class OpenedColumn(NamedTuple):
    """One column of a split, whose files agree with the data set's description."""

    files: Sequence[StoredFile]  # with their present sizes and versions
    starts: np.ndarray  # of the pieces of row 0 in each file, int64 (files, pieces)
    strides: np.ndarray  # bytes from one row to the next in each file, int64 (files,)
    # For each record its file, its row and the CRC-32C of the row, uint32 (n, 3); None for one file
    # with a row for each record in order, each followed by its CRC-32C.
    places: np.ndarray | None
    dtype: np.dtype
    shape: tuple[int, ...]  # of a row
    unchecked: tuple[int, ...] = ()  # numbers of the files whose rows have no CRC-32C yet

    @property
    def row_nbytes(self) -> int:
        """Size of the values of a row, in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def piece_nbytes(self) -> int:
        """Size of a piece, in bytes; all pieces of a row have the same."""
        return self.row_nbytes // self.starts.shape[1]


def open_column(
    column: Column, folder: str | os.PathLike[str], split: str, num_records: int
) -> OpenedColumn:
    """Opens a column after comparing its files with the data set's description; reads no rows.

    Raises a ValueError for another file than the described one, and for a place outside of it.
    """
    # A column of `add_column` has one file, with a row for each record in their order.
    if isinstance(column, AddedColumn):
        file, start, row_dtype = column.locate(folder, split, num_records)
        starts = np.array([[start]])
        strides = np.array([row_dtype.itemsize])
        dtype = np.dtype(column.dtype)
        return OpenedColumn([file], starts, strides, None, dtype, column.shape)
    # The values lie in the source's own files, which may have changed since the build.
    files = []
    for described, present in zip(column.files, column.find_files(), strict=True):
        files.append(described.check(present))
    places = column.locate(folder, split, num_records)
    # NumPy alone does not know bfloat16.
    dtype = np.dtype(getattr(ml_dtypes, column.dtype, column.dtype))
    pieces = len(column.files[0].starts) if files else 1
    # A split may be in no file at all; then `starts` has no rows, but still its two axes.
    starts = np.array([file.starts for file in column.files], np.int64).reshape(-1, pieces)
    strides = np.array([file.stride for file in column.files], np.int64)
    if column.unchecked:
        first = files[column.unchecked[0]].path
        _warn_of_unchecked(os.fspath(folder), len(column.unchecked), first)
    opened = OpenedColumn(files, starts, strides, places, dtype, column.shape, column.unchecked)
    # All places now: a wrong one would give the values of something else later.
    number = _find_outside(opened, places)
    if number >= 0:
        file_number, row, _ = places[number].tolist()
        path = 'a file that is not named'
        if file_number < len(files):
            path = files[file_number].path
        raise ValueError(
            f'{folder}: its column {column.name!r} names row {row} of {path} for record {number}, '
            'but the file has no such row. Build the data set again.'
        )
    return opened


def _find_outside(opened: OpenedColumn, places: np.ndarray) -> int:
    """Returns the first record whose row is not in its file; -1 if there is none."""
    # The offset from a file's first row to the last possible row. Behind all files stands one for
    # those that are not described, in which no row is possible.
    sizes = np.array([file.size for file in opened.files], np.int64)
    last_offsets = sizes - opened.starts.max(axis=1, initial=0) - opened.piece_nbytes
    last_offsets = np.append(last_offsets, -1)
    strides = np.append(opened.strides, 1)
    file_number = np.minimum(places[:, 0], len(opened.files))
    row_offset = places[:, 1] * strides[file_number]
    is_outside = row_offset > last_offsets[file_number]
    if not is_outside.any():
        return -1
    return int(is_outside.argmax())


@functools.cache
def _warn_of_unchecked(folder: str, num_files: int, first: str) -> None:
    """Warns once of rows without checksums, also if several readers open the column."""
    logging.warning(
        '%s: the rows of %s with latents have no checksums yet, such as those of %s. python -m '
        'coyo11m_tfds.verify adds them to a data set that is local or on gs://.',
        folder,
        format_count(num_files, 'file'),
        first,
    )


class ColumnReader:
    """Locates the rows of a column in memory, and compares them with their checksums."""

    def __init__(self, opened: OpenedColumn, files: HeldFiles):
        """Adds the files of the column to others in memory."""
        self._places = opened.places
        self._values_nbytes = opened.piece_nbytes
        # Bytes to have in memory for a piece. The checksum of a row in place is in `places`.
        self._nbytes = opened.piece_nbytes
        if opened.places is None:
            self._nbytes += _CRC_NBYTES
        self._starts = opened.starts
        self._strides = opened.strides
        self._files = files
        self._first = files.add_column(opened.files)
        self._is_unchecked = np.zeros(len(opened.files), bool)
        self._is_unchecked[list(opened.unchecked)] = True

    def locate(self, number: np.ndarray) -> np.ndarray:
        """Returns the places of the pieces of some records' values, int64 `(n, pieces)`.

        Raises a ValueError for a row that its file does not have.
        """
        file, row, begin = self._offsets(number)
        num_pieces = begin.shape[1]
        # All pieces of a row are in one file.
        piece_files = np.repeat(file, num_pieces)
        places, limit = self._files.locate(piece_files, begin.ravel(), self._nbytes)
        # Of a file that has been cut since it was opened, the limit comes too early.
        is_missing = limit - places < self._nbytes
        if is_missing.any():
            # The record's index: `is_missing` has an item for each piece.
            index = int(is_missing.argmax()) // num_pieces
            path = self._files.path_of(int(file[index]))
            raise ValueError(
                f'{path}: has no row {row[index]}, which the data set needs. Build the data set '
                'again.'
            )
        return places.reshape(begin.shape)

    def match_checksums(self, number: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns whether the rows at places of `locate` have their checksums, bool `(n,)`.

        A row without a checksum yet counts as good.
        """
        is_good = np.zeros(len(number), bool)
        if self._places is None:
            # Behind the values of the row, which are one piece.
            crc_places = places[:, 0] + self._values_nbytes
            stored = self._files.gather(crc_places, _CRC_NBYTES).view('<u4')
        else:
            stored = self._places[number, 2]
            file = self._places[number, 0]
            is_good = self._is_unchecked[file]
        # Of all crops of a row, because another epoch uses another crop.
        crcs = np.zeros(len(number), np.uint32)
        for begin in places.T:
            crcs = self._files.crc32c(begin, begin + self._values_nbytes, crcs.tolist())
        return (crcs == stored) | is_good

    def place(self, number: int) -> tuple[str, int]:
        """Returns the path of the file that holds a record's row, and the number of the row."""
        file, row, _ = self._offsets(np.array([number]))
        return self._files.path_of(int(file[0])), int(row[0])

    def ranges(self, first: np.ndarray, count: np.ndarray) -> list[list[Range]]:
        """Returns the ranges to read for each run of records: its rows, and small gaps.

        `first` is the first record of each run and `count` the number of records, int64 `(n,)`.
        """
        # From runs to single records: the run of each, and its number.
        run = np.repeat(np.arange(len(first)), count)
        num_before_run = np.cumsum(count) - count
        index_in_run = np.arange(len(run)) - num_before_run[run]
        file, _, begins = self._offsets(first[run] + index_in_run)
        ranges: list[list[Range]] = [[] for _ in first]
        # The n-th pieces of neighbours are neighbours, but the pieces of one row are not.
        for begin in begins.T:
            end = begin + self._nbytes
            # A request costs a round trip, so small gaps are read over.
            gap = begin[1:] - end[:-1]
            # The first row begins a range, and each that is apart from the row before it.
            is_first = np.ones(len(run), bool)
            is_apart = is_first[1:]
            is_apart[:] = (gap < 0) | (gap > _GAP)
            is_apart |= np.diff(run) != 0
            is_apart |= np.diff(file) != 0
            starts = np.flatnonzero(is_first)
            last_rows = np.append(starts[1:], len(run)) - 1
            columns = (run[starts], file[starts], begin[starts], end[last_rows])
            # Python's numbers: they become the keys of dicts and the arguments of requests.
            rows = np.stack(columns, axis=1).tolist()
            for number, file_number, first_byte, end_byte in rows:
                ranges[number].append((file_number, first_byte, end_byte))
        return ranges

    def check_unchanged(self, number: np.ndarray) -> None:
        """Raises an OSError if a file with the rows of some records has changed."""
        file = np.zeros_like(number)
        if self._places is not None:
            file = self._places[number, 0]
        self._files.check_unchanged(self._first + file)

    def _offsets(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the file and the row of each record, and the offsets `(n, pieces)` in the file.

        The file has its number among all files in memory.
        """
        if self._places is None:
            file = np.zeros_like(number)
            row = number
        else:
            # Signed 64 bits: a row times its stride is beyond uint32 in files of over 4 GB.
            file, row, _ = self._places[number].astype(np.int64).T
        row_offset = row * self._strides[file]
        # One row may have several pieces, which all lie as far from those of row 0.
        begin = self._starts[file] + row_offset[:, None]
        return self._first + file, row, begin
