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
from typing import Any, TypeAlias

import google_crc32c
import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import manifest, pt_archive
from coyo11m_tfds.dataset.column_file import row_dtype
from coyo11m_tfds.storage.stored_file import StoredFile

# Where latents may lie: values of the config's field `latents`.
IN_RECORDS = 'records'
IN_PLACE = 'in_place'
LATENT_STORAGE = IN_RECORDS, IN_PLACE

MAX_ROW_NBYTES = 2 * schema.MAX_TEXT_DIM  # of an added column: as much as a text embedding
OUTLINE_ENDS = 64 << 10  # bytes at each end of a file

_RESTORE = 'Restore it, or build the data set again.'
_ADDED = 'added'  # the kind of an `AddedColumn`, as descriptions name it
# Names of all integers, and of float16, float32 and float64.
_DTYPES = {np.dtype(code).name for code in np.typecodes['AllInteger'] + 'efd'}


@dataclasses.dataclass(frozen=True)
class InPlaceFile:
    """A file of the source that holds latents.

    Piece p of row r lies at byte `starts[p] + r * stride`; a row has several pieces if its crops
    lie apart. In formats with an offset for each row, r is that offset divided by a short stride.
    """

    path: str  # absolute, or a URL on gs:// or, with its commit, on hf://
    version: str  # of a remote file, see `StoredFile`; '' for a local one
    digest: str  # of the file's outline
    starts: tuple[int, ...]  # in bytes
    stride: int  # in bytes

    def read_row(self, descriptor: int, row: int, row_nbytes: int) -> bytes:
        """Reads the pieces of a row, one after the other, from an open copy of the file.

        The result is shorter than `row_nbytes` if the copy ends within the row.
        """
        piece_nbytes = row_nbytes // len(self.starts)
        pieces = []
        for start in self.starts:
            pieces.append(os.pread(descriptor, piece_nbytes, start + row * self.stride))
        return b''.join(pieces)

    def check(self, file: StoredFile | None) -> StoredFile:
        """Returns `file`, the one at `path`, whose state is that of the build.

        Raises:
            ValueError: It is None, as there is no file at the path, or it has changed.
        """
        if file is None:
            raise ValueError(
                f'{self.path}: is missing, but holds latents. {_RESTORE} If the source was moved: '
                'python -m coyo11m_tfds.add_column --data_dir=DATA --name=latents --source=SOURCE'
            )
        if file.local_path:
            current = outline_digest(self.path)
            if current != self.digest:
                raise changed_file_error(self.path, 'outline has digest', current, self.digest)
        # The checksum of a remote file covers the directory of a `.pt` file too.
        elif file.version != self.version:
            raise changed_file_error(self.path, 'version is', file.version, self.version)
        return file


def outline_digest(path: str | os.PathLike[str]) -> str:
    """Returns a hex digest of a local file of latents without reading the whole file."""
    # The directory of a `.pt` file has checksums of all contents.
    if os.fspath(path).endswith('.pt'):
        return pt_archive.open_archive(path).digest
    # The middle may change without a change of the digest. The checksum of each row reveals that.
    with open(path, 'rb', buffering=0) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, OUTLINE_ENDS, 0)
        tail_start = max(0, size - OUTLINE_ENDS)
        tail = os.pread(descriptor, OUTLINE_ENDS, tail_start)
    outline = b'%d ' % size + head + tail
    return hashlib.sha256(outline).hexdigest()


def changed_file_error(path: str, kind: str, current: str, recorded: str) -> ValueError:
    """Makes the error for a file of latents whose state is not the recorded one.

    `kind` says what was compared, as the beginning of a sentence: 'version is'.
    """
    return ValueError(
        f'{path}: has changed since the data set was built, and latents lie in it: its {kind} '
        f'{current}, expected {recorded}. {_RESTORE}'
    )


@dataclasses.dataclass(frozen=True)
class InPlaceColumn:
    """The latents of a data set that lie in the files of its source, one row for each record."""

    name: str
    dtype: str  # one of `schema.LATENT_DTYPES`
    shape: tuple[int, ...]  # of a row, `(crops, C, H, W)`
    files: tuple[InPlaceFile, ...]
    build: str  # ID of the build that wrote this description
    crc32c: Mapping[str, str]  # of the places of each split, 8 hex digits
    # Numbers of the files whose rows have no CRC-32C yet: a build has read only their heads.
    unchecked: tuple[int, ...] = ()
    # Names of the files with the places of each split, where they are not those of the build.
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def places_file(self, split: str) -> str:
        """Returns the name of the file with the places of a split.

        `verify` writes one under another name when it adds checksums to a data set in use.
        """
        return self.places.get(split) or column_file_name(self.name, split, self.build)

    @property
    def can_map(self) -> bool:
        """Whether all files are local, so that they can be memory-mapped."""
        return all(storage.local_path(file.path) for file in self.files)

    @property
    def row_nbytes(self) -> int:
        """Size of a row in bytes, with all crops."""
        return schema.latents_nbytes(self.dtype, self.shape)

    def find_files(self) -> list[StoredFile | None]:
        """Returns what lies at the path of each of `files`; None for a missing file."""
        by_path: dict[str, StoredFile] = {}
        folders = {os.path.dirname(file.path) for file in self.files}
        # A listing of a folder in a bucket is one request, the states of its files would be many.
        for folder in sorted(folders):
            listing = storage.list_folder(folder, missing_ok=True)
            for file in listing.values():
                by_path[file.path] = file
        return [by_path.get(file.path) for file in self.files]

    def locate(self, folder: str | os.PathLike[str], split: str, num_records: int) -> np.ndarray:
        """Returns the file's number, the row and its CRC-32C for each record; uint32 `(n, 3)`.

        The CRC-32C of a row in one of the `unchecked` files is 0. `folder` is that of the data set,
        and the split has `num_records` records. Raises a ValueError if the file of these places is
        damaged, missing, or of another split.
        """
        path = os.path.join(folder, self.places_file(split))
        try:
            # A split without a CRC-32C is damaged too: '' equals none.
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

    @property
    def row_nbytes(self) -> int:
        """Size of a row in its file in bytes, with its CRC-32C."""
        return row_dtype(self.dtype, self.shape, crc32c=0).itemsize

    def locate(
        self, folder: str | os.PathLike[str], split: str, num_records: int
    ) -> tuple[StoredFile, int, np.dtype]:
        """Returns the file of a split, the offset of its first row, and the dtype of its rows.

        `folder` is that of the data set, and the split has `num_records` records. The dtype is that
        of `row_dtype`. Raises a ValueError if the file is missing or not that of this column.
        """
        if split not in self.files:
            raise ValueError(
                f'{folder}: its column {self.name!r} has no split {split!r}, only '
                f'{", ".join(sorted(self.files))}. Add the column again.'
            )
        path = os.path.join(folder, self.files[split])
        # Before any value is read: the file may be another column's, or that of another split.
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


def column_file_name(column: str, split: str, build: str = '') -> str:
    """Returns the name of a column's file of a split, in a data set of a build."""
    return schema.of_build(f'column_{column}-{split}.npy', build)


def is_column_file_name(name: str) -> bool:
    """Returns whether `column_file_name` can have returned this name."""
    return name.startswith('column_') and name.endswith('.npy') and '/' not in name


def unused_column_files(
    names: Iterable[str], columns: Mapping[str, Column], build: str
) -> set[str]:
    """Returns the files of columns that no column uses, such as a killed command leaves."""
    used_files: set[str] = set()
    for column in columns.values():
        if isinstance(column, AddedColumn):
            used_files.update(column.files.values())
        else:
            for split in column.crc32c:
                used_files.add(column.places_file(split))
                # That of the build stays: a run that began with it opens it again to evaluate.
                used_files.add(column_file_name(column.name, split, column.build))
    # Without its description, a column of latents may use any of its files.
    latents_prefix = f'column_{schema.LATENTS}-'
    has_latents = schema.LATENTS in columns
    unused_files = set()
    for name in set(names) - used_files:
        # Files of another build are not this one's to remove.
        is_of_build = is_column_file_name(name) and schema.build_of(name) == build
        if is_of_build and (has_latents or not name.startswith(latents_prefix)):
            unused_files.add(name)
    return unused_files


def write_columns(
    folder: str | os.PathLike[str], columns: Mapping[str, Column], build: str = ''
) -> None:
    """Writes the description of the columns of a build, by name, into a local folder."""
    descriptions = {}
    for name, column in columns.items():
        kind = IN_PLACE if isinstance(column, InPlaceColumn) else _ADDED
        fields = dataclasses.asdict(column)
        del fields['name']
        if isinstance(column, InPlaceColumn):
            # Most data sets have checksums from their build on.
            for optional in ('unchecked', 'places'):
                if not fields[optional]:
                    del fields[optional]
        descriptions[name] = {'kind': kind, **fields}
    file_name = schema.of_build(schema.COLUMNS_FILE, build)
    manifest.write_sealed(folder, file_name, 'columns', descriptions)


def read_columns(folder: str | os.PathLike[str], build: str = '') -> dict[str, Column]:
    """Reads the columns of a data set, local or on gs://, by name; {} if it has none."""
    # It is sealed, and not in the record of checksums that `manifest.SmallFiles` compares, because
    # adding a column replaces it after that record.
    path = os.path.join(folder, schema.of_build(schema.COLUMNS_FILE, build))
    return manifest.read_parsed(path, parse_columns) or {}


def parse_columns(data: bytes) -> dict[str, Column]:
    """Returns the columns in `schema.COLUMNS_FILE` by name; ValueError if it is damaged."""
    try:
        descriptions = manifest.parse_sealed(data, 'columns')
        return {name: _parse_column(name, **fields) for name, fields in descriptions.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def _parse_column(name: str, kind: str, **fields: Any) -> Column:
    """Returns the column of a description, of which every field is one that can be written."""
    # Only latents lie in place.
    expected = IN_PLACE if name == schema.LATENTS else _ADDED
    if kind != expected:
        raise ValueError(f'column {name!r} is of kind {kind!r}, expected {expected!r}')
    if kind == IN_PLACE:
        return _parse_in_place(name, fields)
    shape = tuple(fields['shape'])
    added = AddedColumn(name, **fields | {'shape': shape})
    if not _is_possible(added):
        raise ValueError(f'column {name!r} has impossible fields: {fields}')
    return added


def _parse_in_place(name: str, fields: Mapping[str, Any]) -> InPlaceColumn:
    """Returns the column of a description, in which nothing leads a reader out of a file."""
    dtype = fields['dtype']
    shape = tuple(fields['shape'])
    if not schema.are_latents(dtype, shape):
        raise ValueError(f'column {name!r} has impossible latents, {shape} of {dtype!r}')
    files = _parse_files(fields['files'], num_crops=shape[0])
    crc32c = fields['crc32c']
    if not all(map(_is_crc32c, crc32c.values())):
        raise ValueError(f'column {name!r} has CRC-32C {crc32c}')
    places = fields.get('places', {})
    are_names = all(map(_is_own_file_name, places.values()))
    if not are_names or not places.keys() <= crc32c.keys():
        raise ValueError(f'column {name!r} has places in {places}')
    unchecked = tuple(fields.get('unchecked', ()))
    numbers = range(len(files))
    if not set(unchecked) <= set(numbers):
        raise ValueError(f'column {name!r} has unchecked files {unchecked}')
    return InPlaceColumn(
        name,
        dtype,
        shape,
        files,
        build=fields['build'],
        crc32c=crc32c,
        unchecked=unchecked,
        places=places,
    )


def _parse_files(
    descriptions: Sequence[Mapping[str, Any]], num_crops: int
) -> tuple[InPlaceFile, ...]:
    """Returns the files of a description, each with rows at possible offsets."""
    files = []
    for fields in descriptions:
        # JSON has lists for tuples.
        starts = tuple(fields['starts'])
        files.append(InPlaceFile(**{**fields, 'starts': starts}))
    # All files of a source divide a row into as many pieces.
    num_pieces = len(files[0].starts) if files else 0
    for file in files:
        if len(file.starts) != num_pieces or not _has_places(file, num_crops):
            raise ValueError(
                f'{file.path!r} has rows at {file.starts!r} with stride {file.stride!r}'
            )
    return tuple(files)


def _has_places(file: InPlaceFile, num_crops: int) -> bool:
    """Returns whether a file has a path, and rows of pieces of equal crops at possible offsets."""
    if not isinstance(file.path, str) or not os.path.dirname(file.path):
        return False
    if not file.starts or num_crops % len(file.starts):
        return False
    offsets = list(file.starts)
    offsets.append(file.stride)
    # Places in a file are numbers of 64 bits; whether they are in it is checked with the file. With
    # rows of 32 bits, a stride of 30 bits gives none beyond them.
    for offset in offsets:
        # By its type: a bool is an int, too.
        if type(offset) is not int or not 0 <= offset < 2**62:
            return False
    return file.stride < 2**30


def _is_possible(column: AddedColumn) -> bool:
    """Returns whether `add_column` can have written the description."""
    # Rows of a damaged size could take any memory.
    if column.dtype not in _DTYPES or len(column.shape) > 1:
        return False
    for length in column.shape:
        # By its type: a bool is an int, too.
        if type(length) is not int or not 0 < length <= MAX_ROW_NBYTES:
            return False
    row_nbytes = np.dtype(column.dtype).itemsize * math.prod(column.shape)
    if row_nbytes > MAX_ROW_NBYTES:
        return False
    if not all(map(_is_own_file_name, column.files.values())):
        return False
    if column.crc32c.keys() != column.files.keys():
        return False
    if not all(map(_is_crc32c, column.crc32c.values())):
        return False
    features = ['']
    features += schema.TEXT_DTYPES
    if column.feature not in features:
        return False
    for moments in (column.mean, column.std):
        if not all(isinstance(x, float) for x in moments):
            return False
    return isinstance(column.encoder, Mapping)


def _is_own_file_name(x: object) -> bool:
    # A name with a folder could be a file outside of the data set.
    return isinstance(x, str) and is_column_file_name(x)


def _is_crc32c(x: object) -> bool:
    return isinstance(x, str) and re.fullmatch('[0-9a-f]{8}', x) is not None


def _load_places(path: str, num_records: int, crc32c: str) -> np.ndarray:
    """Returns the array in a `.npy` file, uint32 `(num_records, 3)`, of this CRC-32C."""
    file = storage.describe_file(path)
    # Processes on one machine share the pages of a mapped file.
    data: Any = np.memmap(path, np.uint8, 'r') if file.local_path else file.read()
    head = bytes(data[: manifest.NPY_HEADER_BYTES])
    dtype, shape, start = manifest.parse_npy_header(head, file.size)
    expected_shape = (num_records, 3)
    if dtype != np.uint32 or shape != expected_shape:
        raise ValueError(f'it holds {shape} of {dtype}, expected {expected_shape} of uint32')
    places = np.frombuffer(data, dtype, offset=start).reshape(shape)
    computed = array_crc32c(places)
    if computed != crc32c:
        raise ValueError(f'its CRC-32C is {computed}, expected {crc32c}')
    return places


def array_crc32c(array: np.ndarray) -> str:
    """Returns the CRC-32C of a contiguous array's bytes, in 8 hex digits."""
    raw = array.reshape(-1).view(np.uint8)
    return f'{google_crc32c.value(raw):08x}'
