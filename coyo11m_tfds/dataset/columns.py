"""Columns: features that lie outside the records, as rows of a fixed size in other files.

`columns-<build>.json` names the files, with their versions at the time of the build.
`column_<feature>-<split>-<build>.npy` holds for every record the place of its values, or the values
themselves, with the CRC-32C of the row.
"""

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, TypeAlias

import google_crc32c
import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import manifest, pt_archive
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage.stored_file import ChecksumScan, StoredFile

IN_RECORDS, IN_PLACE = LATENT_STORAGE = ('records', 'in_place')  # the config's `latents`

MAX_ROW_NBYTES = 2 * schema.MAX_TEXT_DIM  # of an added column: as much as a text embedding
OUTLINE_ENDS = 64 << 10  # bytes at each end of a file

_RESTORE = 'Restore it, or build the data set again.'
_ADDED = 'added'  # the kind of an `AddedColumn`, as descriptions name it
_DTYPES = {np.dtype(code).name for code in np.typecodes['AllInteger'] + 'efd'}


@dataclasses.dataclass(frozen=True)
class InPlaceFile:
    """A file of the source that holds latents.

    Piece p of row r lies at byte `starts[p] + r * stride`; a row has several pieces if its crops
    lie apart. In formats with an offset for each row, r is that offset divided by a short stride.
    """

    path: str  # absolute, or a URL on gs://
    version: str  # of a remote file, see `StoredFile`; '' for a local one
    digest: str  # of the file's outline
    starts: tuple[int, ...]
    stride: int

    def check(self, file: StoredFile | None) -> StoredFile:
        """Returns `file`, the one at `path`; ValueError if it is missing or has changed."""
        if file is None:
            raise ValueError(
                f'{self.path}: is missing, but holds latents. {_RESTORE} If the source was moved: '
                'python -m coyo11m_tfds.add_column --data_dir=DATA --name=latents --source=SOURCE'
            )
        if file.local_path:
            kind, current, recorded = 'outline has digest', outline_digest(self.path), self.digest
        else:
            # The checksum of a bucket covers the directory of a `.pt` file too.
            kind, current, recorded = 'version is', file.version, self.version
        if current != recorded:
            raise changed_file_error(self.path, kind, current, recorded)
        return file


def outline_digest(path: str | os.PathLike[str]) -> str:
    """Returns a hex digest of a local file of latents without reading the whole file."""
    # The directory of a `.pt` file has checksums of all contents.
    if os.fspath(path).endswith('.pt'):
        return pt_archive.open_archive(path).digest
    # The middle may change without a change of the digest. The checksum of each row reveals that.
    with open(path, 'rb', buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        offsets = 0, max(0, size - OUTLINE_ENDS)
        ends = [os.pread(file.fileno(), OUTLINE_ENDS, offset) for offset in offsets]
    return hashlib.sha256(b'%d ' % size + b''.join(ends)).hexdigest()


def changed_file_error(path: str, kind: str, current: str, recorded: str) -> ValueError:
    return ValueError(
        f'{path}: has changed since the data set was built, and latents lie in it: its {kind} '
        f'{current}, expected {recorded}. {_RESTORE}'
    )


@dataclasses.dataclass(frozen=True)
class InPlaceColumn:
    name: str
    dtype: str  # one of `schema.LATENT_DTYPES`
    shape: tuple[int, ...]  # of a row, `(crops, C, H, W)`
    files: tuple[InPlaceFile, ...]
    build: str  # ID of the build that wrote this description
    crc32c: Mapping[str, str]  # of the places of each split, 8 hex digits

    @property
    def can_map(self) -> bool:
        return all(storage.local_path(file.path) for file in self.files)

    @property
    def row_nbytes(self) -> int:
        return schema.latents_nbytes(self.dtype, self.shape)

    def find_files(self) -> list[StoredFile | None]:
        """Finds the files at the paths of `files`; None for missing ones."""
        # A listing of a folder in a bucket is one request, the states of its files are many.
        folders = sorted({os.path.dirname(file.path) for file in self.files})
        listings = [storage.list_folder(folder, missing_ok=True) for folder in folders]
        by_path = {file.path: file for listing in listings for file in listing.values()}
        return [by_path.get(file.path) for file in self.files]

    def locate(self, folder: str | os.PathLike[str], split: str, num_records: int) -> np.ndarray:
        """Returns the file's number, the row and its CRC-32C for each record; uint32 `(n, 3)`."""
        path = os.path.join(folder, column_file_name(self.name, split, self.build))
        try:
            return _load_places(path, num_records, self.crc32c.get(split, ''))
        except ValueError as error:
            message = f'{path}: is not a column ({error}). Build the data set again.'
            raise ValueError(message) from None


@dataclasses.dataclass(frozen=True)
class AddedColumn:
    """A column in files next to the shards, with one row for each record, in the records' order."""

    name: str
    dtype: str  # NumPy's name
    shape: tuple[int, ...]  # of a row: `(n,)` for n numbers, `()` for a single one
    files: Mapping[str, str]  # name of the file of each split
    crc32c: Mapping[str, str]  # of the values of each split, 8 hex digits
    feature: str = ''  # feature of the records that this column can replace
    mean: Sequence[float] = ()  # of text embeddings over the train split
    std: Sequence[float] = ()
    # Fields of `sidecar.SidecarHeader` for embeddings and tokens.
    encoder: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def locate(
        self, folder: str | os.PathLike[str], split: str, num_records: int
    ) -> tuple[StoredFile, int, np.dtype]:
        """Returns the file of a split, the offset of its first row, and the dtype of its rows."""
        if split not in self.files:
            raise ValueError(
                f'{folder}: its column {self.name!r} has no split {split!r}, only '
                f'{", ".join(sorted(self.files))}. Add the column again.'
            )
        path = os.path.join(folder, self.files[split])
        try:
            file = storage.describe_file(path)
            head = file.read_range(0, min(file.size, manifest.NPY_HEADER_BYTES))
            dtype, shape, start = manifest.parse_npy_header(head, file.size)
        except ValueError as error:
            raise ValueError(f'{path}: is not a column ({error}). Add it again.') from None
        expected = row_dtype(self.dtype, self.shape, int(self.crc32c[split], 16))
        if dtype != expected or shape != (num_records,):
            raise ValueError(
                f'{path}: holds {shape} of {dtype}, expected {(num_records,)} of {expected}. Add '
                'the column again.'
            )
        return file, start, dtype


Column: TypeAlias = InPlaceColumn | AddedColumn


class ColumnWriter:
    """Writes the file of an added column: the values of each record, each row with its CRC-32C."""

    def __init__(
        self, file: BinaryIO, dtype: np.typing.DTypeLike, shape: tuple[int, ...], num_records: int
    ):
        self._file, self._num_records = file, num_records
        self._dtype, self._shape = np.dtype(dtype), shape
        self._crc32c = 0
        # Keeps the place of the header that `finish` writes, which has the same size.
        self._write_header()

    def write(self, values: np.ndarray) -> None:
        rows = np.empty(len(values), row_dtype(self._dtype, self._shape, self._crc32c))
        rows['value'] = values
        contiguous = np.ascontiguousarray(rows['value'])
        rows[_crc32c_field(rows.dtype)] = row_checksums(contiguous)
        # Of the values alone: the CRC-32C of bytes followed by their own CRC-32C is a constant.
        self._crc32c = google_crc32c.extend(self._crc32c, contiguous.tobytes())
        self._file.write(rows.data)

    def finish(self) -> str:
        """Completes the file; returns the checksum of all values for `AddedColumn`."""
        # Both the header and the description hold it: readers notice the file of another column.
        self._file.seek(0)
        self._write_header()
        return f'{self._crc32c:08x}'

    def _write_header(self) -> None:
        kind = row_dtype(self._dtype, self._shape, self._crc32c)
        descr = np.lib.format.dtype_to_descr(kind)
        header = {'descr': descr, 'fortran_order': False, 'shape': (self._num_records,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class ColumnScan(ChecksumScan):
    """Checks the file of an added column block by block: compares each row with its CRC-32C."""

    def __init__(self, start: int, dtype: np.dtype):
        self._dtype, self._header_left, self._rest = dtype, start, b''
        self._values_crc32c = self._num_rows = self._num_wrong = 0
        self._first_wrong = 0, 0, 0  # the arguments of `wrong_rows_message`

    def add(self, block: bytes) -> None:
        super().add(block)
        header = min(self._header_left, len(block))
        self._header_left -= header
        data = self._rest + block[header:]
        # Blocks end anywhere: what is left of a row waits for the next block.
        num_whole = len(data) // self._dtype.itemsize
        self._rest = data[num_whole * self._dtype.itemsize :]
        rows = np.frombuffer(data, self._dtype, num_whole)
        values, stored = np.ascontiguousarray(rows['value']), rows[_crc32c_field(self._dtype)]
        self._values_crc32c = google_crc32c.extend(self._values_crc32c, values.tobytes())
        computed = row_checksums(values)
        wrong = np.flatnonzero(computed != stored)
        if len(wrong) and not self._num_wrong:
            row = wrong[0]
            self._first_wrong = self._num_rows + row, computed[row], stored[row]
        self._num_rows += num_whole
        self._num_wrong += len(wrong)

    @property
    def problem(self) -> str:
        """Describes the damage of the rows; '' if there is none."""
        if self._num_wrong:
            return wrong_rows_message(*self._first_wrong, self._num_wrong)
        if _crc32c_field(self._dtype).endswith(f'{self._values_crc32c:08x}'):
            return ''
        return 'its rows are not those that its header was written for'


def wrong_rows_message(row: int, computed: int, expected: int, count: int) -> str:
    """Returns the message about the first of `count` rows with a wrong CRC-32C."""
    suffix = ''
    if count > 1:
        suffix = f'; {format_count(count - 1, "more row differs", "more rows differ")} too'
    return f'row {row} has CRC-32C {computed:08x}, expected {expected:08x}{suffix}'


def row_dtype(dtype: np.typing.DTypeLike, shape: tuple[int, ...], crc32c: int) -> np.dtype:
    """Returns the dtype of a row in the file of an added column; `crc32c` is that of all values."""
    value = ('value', np.dtype(dtype).newbyteorder('<'), shape)
    return np.dtype([value, (f'crc32c_{crc32c:08x}', '<u4')])


def _crc32c_field(dtype: np.dtype) -> str:
    assert dtype.names is not None
    return dtype.names[1]


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """Returns the CRC-32C of each row of a contiguous array `(n, ...)`, uint32 `(n,)`."""
    nbytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    raw = rows.reshape(-1).view(np.uint8).reshape(len(rows), nbytes)
    return np.array([google_crc32c.value(row) for row in raw], np.uint32)


def column_file_name(column: str, split: str, build: str = '') -> str:
    return schema.of_build(f'column_{column}-{split}.npy', build)


def is_column_file_name(name: str) -> bool:
    """Whether `column_file_name` can have returned this name."""
    return name.startswith('column_') and name.endswith('.npy') and '/' not in name


def unused_column_files(
    names: Iterable[str], columns: Mapping[str, Column], build: str
) -> set[str]:
    """Returns the files of columns that no added column uses, such as a killed command leaves."""
    added = [column for column in columns.values() if isinstance(column, AddedColumn)]
    used_files = {file for column in added for file in column.files.values()}
    # The places of latents belong to the build, whose record of checksums names them.
    latents_prefix = f'column_{schema.LATENTS}-'
    return {
        name
        for name in {*names} - used_files
        if is_column_file_name(name)
        and schema.build_of(name) == build
        and not name.startswith(latents_prefix)
    }


def write_columns(
    folder: str | os.PathLike[str], columns: Mapping[str, Column], build: str = ''
) -> None:
    kinds = {InPlaceColumn: IN_PLACE, AddedColumn: _ADDED}
    descriptions = {
        name: {'kind': kinds[type(column)], **dataclasses.asdict(column)}
        for name, column in columns.items()
    }
    for fields in descriptions.values():
        del fields['name']
    file_name = schema.of_build(schema.COLUMNS_FILE, build)
    manifest.write_sealed(folder, file_name, 'columns', descriptions)


def read_columns(folder: str | os.PathLike[str], build: str = '') -> dict[str, Column]:
    """Reads the columns of a data set, local or on gs://, by name; {} if it has none."""
    # It is sealed, and not in the record of checksums that `manifest.SmallFiles` compares, because
    # adding a column replaces it after that record.
    path = os.path.join(folder, schema.of_build(schema.COLUMNS_FILE, build))
    return manifest.read_parsed(path, parse_columns) or {}


def parse_columns(data: bytes) -> dict[str, Column]:
    """Parses the content of `schema.COLUMNS_FILE`; raises a ValueError if it is damaged."""
    try:
        descriptions = manifest.parse_sealed(data, 'columns')
        return {name: _parse_column(name, **fields) for name, fields in descriptions.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def _parse_column(name: str, kind: str, **fields: Any) -> Column:
    expected = IN_PLACE if name == schema.LATENTS else _ADDED
    if kind != expected:
        raise ValueError(f'column {name!r} is of kind {kind!r}, expected {expected!r}')
    if kind == _ADDED:
        added = AddedColumn(name, **fields | {'shape': tuple(fields['shape'])})
        if not _is_possible(added):
            raise ValueError(f'column {name!r} has impossible fields: {fields}')
        return added
    dtype, shape = fields['dtype'], tuple(fields['shape'])
    if not schema.are_latents(dtype, shape):
        raise ValueError(f'column {name!r} has impossible latents, {shape} of {dtype!r}')
    files = [InPlaceFile(**file | {'starts': tuple(file['starts'])}) for file in fields['files']]
    for file in files:
        # Places in a file are numbers of 64 bits; whether they are in it is checked with the file.
        are_offsets = all(type(n) is int and 0 <= n < 2**62 for n in (*file.starts, file.stride))
        pieces = len(file.starts)
        are_crops = pieces == len(files[0].starts) > 0 == shape[0] % pieces
        is_path = isinstance(file.path, str) and bool(os.path.dirname(file.path))
        if not (is_path and are_offsets and are_crops and file.stride < 2**30):
            raise ValueError(
                f'{file.path!r} has rows at {file.starts!r} with stride {file.stride!r}'
            )
    if not all(map(_is_crc32c, fields['crc32c'].values())):
        raise ValueError(f'column {name!r} has CRC-32C {fields["crc32c"]}')
    return InPlaceColumn(name, dtype, shape, tuple(files), fields['build'], fields['crc32c'])


def _is_possible(column: AddedColumn) -> bool:
    """Whether `add_column` can have written the description."""
    are_sizes = all(type(n) is int and 0 < n <= MAX_ROW_NBYTES for n in column.shape)
    return (
        column.dtype in _DTYPES
        and len(column.shape) < 2
        and are_sizes
        and np.dtype(column.dtype).itemsize * math.prod(column.shape) <= MAX_ROW_NBYTES
        and all(isinstance(x, str) and is_column_file_name(x) for x in column.files.values())
        and column.crc32c.keys() == column.files.keys()
        and all(map(_is_crc32c, column.crc32c.values()))
        and column.feature in ('', *schema.TEXT_DTYPES)
        and all(isinstance(x, float) for x in (*column.mean, *column.std))
        and isinstance(column.encoder, Mapping)
    )


def _is_crc32c(x: object) -> bool:
    return isinstance(x, str) and re.fullmatch('[0-9a-f]{8}', x) is not None


def _load_places(path: str, num_records: int, crc32c: str) -> np.ndarray:
    """Returns the array in a `.npy` file, uint32 `(num_records, 3)`, of this CRC-32C."""
    file = storage.describe_file(path)
    # Processes on one machine share the pages of a mapped file.
    data: Any = np.memmap(path, np.uint8, 'r') if file.local_path else file.read()
    head = bytes(data[: manifest.NPY_HEADER_BYTES])
    dtype, shape, start = manifest.parse_npy_header(head, file.size)
    if dtype != np.uint32 or shape != (num_records, 3):
        raise ValueError(f'it holds {shape} of {dtype}, expected {(num_records, 3)} of uint32')
    places = np.frombuffer(data, dtype, offset=start).reshape(shape)
    if (computed := array_crc32c(places)) != crc32c:
        raise ValueError(f'its CRC-32C is {computed}, expected {crc32c}')
    return places


def array_crc32c(array: np.ndarray) -> str:
    """Returns the CRC-32C of a contiguous array's bytes, in 8 hex digits."""
    return f'{google_crc32c.value(array.reshape(-1).view(np.uint8)):08x}'
