"""The file of an added column: a row of values for each record, each followed by its CRC-32C.

It is a `.npy` file of a structured array, which NumPy reads, too. Its header holds the CRC-32C of
all values, by which readers notice the file of another column.
"""

import math
from typing import BinaryIO

import google_crc32c
import numpy as np

from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage.stored_file import ChecksumScan


class ColumnWriter:
    """Writes the file of an added column: the values of each record, each row with its CRC-32C."""

    def __init__(
        self, file: BinaryIO, dtype: np.typing.DTypeLike, shape: tuple[int, ...], num_records: int
    ):
        """Begins a column of so many rows, each of a shape, in a file that is open at its start."""
        self._file = file
        self._num_records = num_records
        self._dtype = np.dtype(dtype)
        self._shape = shape
        self._crc32c = 0
        # Keeps the place of the header that `finish` writes, which has the same size.
        self._write_header()

    def write(self, values: np.ndarray) -> None:
        """Appends the rows of the next records, `(n, *shape)` of any dtype that casts."""
        # Whatever CRC-32C is in the name of the field: only the header of the file has names.
        rows = np.empty(len(values), row_dtype(self._dtype, self._shape, self._crc32c))
        rows['value'] = values
        contiguous = np.ascontiguousarray(rows['value'])
        rows[_crc32c_field(rows.dtype)] = row_checksums(contiguous)
        # Of the values alone: the CRC-32C of bytes followed by their own CRC-32C is a constant.
        self._crc32c = google_crc32c.extend(self._crc32c, contiguous.tobytes())
        self._file.write(rows.data)

    def finish(self) -> str:
        """Completes the file; returns the CRC-32C of all values, in 8 hex digits."""
        # Both the header and the description hold it: readers notice the file of another column.
        self._file.seek(0)
        self._write_header()
        return f'{self._crc32c:08x}'

    def _write_header(self) -> None:
        """Writes the header of a file with all rows, of which the first follows it."""
        kind = row_dtype(self._dtype, self._shape, self._crc32c)
        descr = np.lib.format.dtype_to_descr(kind)
        header = {'descr': descr, 'fortran_order': False, 'shape': (self._num_records,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class ColumnScan(ChecksumScan):
    """Checks the file of an added column block by block: compares each row with its CRC-32C."""

    def __init__(self, start: int, dtype: np.dtype):
        """Takes what `AddedColumn.locate` returns: offset of the first row, and dtype of a row."""
        self._dtype = dtype
        self._header_left = start  # bytes that are still to come
        self._rest = b''  # of a row that is not whole yet
        self._values_crc32c = 0
        self._num_rows = 0
        self._num_wrong = 0
        self._first_wrong = 0, 0, 0  # the arguments of `wrong_rows_message`

    def add(self, block: bytes) -> None:
        """Checks the rows that end in the next block of the file."""
        super().add(block)
        header_nbytes = min(self._header_left, len(block))
        self._header_left -= header_nbytes
        data = self._rest + block[header_nbytes:]
        num_whole = len(data) // self._dtype.itemsize
        whole_nbytes = num_whole * self._dtype.itemsize
        # Blocks end anywhere: what is left of a row waits for the next block.
        self._rest = data[whole_nbytes:]
        self._check_rows(np.frombuffer(data, self._dtype, num_whole))

    def _check_rows(self, rows: np.ndarray) -> None:
        """Compares rows with their CRC-32Cs; remembers the first wrong one, and counts the rest."""
        values = np.ascontiguousarray(rows['value'])
        self._values_crc32c = google_crc32c.extend(self._values_crc32c, values.tobytes())
        stored = rows[_crc32c_field(self._dtype)]
        computed = row_checksums(values)
        wrong = np.flatnonzero(computed != stored)
        if len(wrong) and not self._num_wrong:
            row = wrong[0]
            self._first_wrong = self._num_rows + row, computed[row], stored[row]
        self._num_rows += len(rows)
        self._num_wrong += len(wrong)

    @property
    def problem(self) -> str:
        """Describes the damage of the rows; '' if there is none."""
        if self._num_wrong:
            return wrong_rows_message(*self._first_wrong, self._num_wrong)
        # Every row agrees with its own checksum: rows of another file would, too.
        crc32c = f'{self._values_crc32c:08x}'
        if _crc32c_field(self._dtype).endswith(crc32c):
            return ''
        return 'its rows are not those that its header was written for'


def wrong_rows_message(row: int, computed: int, expected: int, count: int) -> str:
    """Returns the message about the first of `count` rows with a wrong CRC-32C."""
    suffix = ''
    if count > 1:
        suffix = f'; {format_count(count - 1, "more row differs", "more rows differ")} too'
    return f'row {row} has CRC-32C {computed:08x}, expected {expected:08x}{suffix}'


def row_dtype(dtype: np.typing.DTypeLike, shape: tuple[int, ...], crc32c: int) -> np.dtype:
    """Returns the dtype of a row in the file of an added column.

    Its fields are `value`, of a dtype and a shape, and the CRC-32C of the row, uint32. The name of
    the second holds `crc32c`, that of all values, so the header of the file tells it.
    """
    # Little endian on every machine, because the file may be read on another one.
    value = ('value', np.dtype(dtype).newbyteorder('<'), shape)
    return np.dtype([value, (f'crc32c_{crc32c:08x}', '<u4')])


def _crc32c_field(dtype: np.dtype) -> str:
    """Returns the name of the second field of a `row_dtype`."""
    assert dtype.names is not None
    return dtype.names[1]


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """Returns the CRC-32C of each row of a contiguous array `(n, ...)`, uint32 `(n,)`."""
    nbytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    raw = rows.reshape(-1).view(np.uint8).reshape(len(rows), nbytes)
    return np.array([google_crc32c.value(row) for row in raw], np.uint32)
