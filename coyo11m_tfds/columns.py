"""Features that lie elsewhere than in the records: rows of a fixed size in other files.

    column = columns.read(folder, build)['latents']     # {} where all is in the records
    column.files[3].path, column.files[3].start     # a `.pt` file, where its latents begin
    column.locate(folder, 'train', num_records)     # uint32 (records, 2): number of file, row

`columns-<build>.json` beside the shards names the files and what they were when the data set was
built; `column_<feature>-<split>-<build>.npy` has the place of every record, in the order of the
shards. All of it may lie on gs://.
"""

import dataclasses
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coyo11m_tfds import npy, pt_archive, schema
from coyo11m_tfds.storage import json_digest, remote, source_files, stored_files
from coyo11m_tfds.storage.source_files import SourceFile

RECORDS, IN_PLACE = LATENTS_LIE = ('records', 'in_place')  # the config's `latents`

MAX_ROW_NBYTES = 2 * schema.MAX_TEXT_DIM  # of an added column: `mapped_files` gathers no more

_BESIDE = 'beside'  # the kind of a column in files beside the shards
_FORMAT = 1
_NPY_HEADER = 4096  # bytes in which the header of a `.npy` file ends
_DTYPES = {np.dtype(code).name for code in np.typecodes['AllInteger'] + 'efd'}


@dataclasses.dataclass(frozen=True)
class ColumnFile:
    """A `.pt` file that rows are read from.

    Attributes:
        path: absolute, or a URL on gs://.
        version: of a remote file, see `SourceFile`; '' for a local one, which its digest tells.
        digest: of the directory of its archive, see `pt_archive.Archive`.
        start: where the first row begins, in bytes.
    """

    path: str
    version: str
    digest: str
    start: int

    def check(self, found: SourceFile | None) -> SourceFile:
        """Compares the file with what it was; of a local one it reads the directory, but no rows.

        Args:
            found: what is there now, None for nothing.

        Returns:
            The same.

        Raises:
            ValueError: it is missing, or another one.
        """
        advice = 'Restore it, or build the data set again.'
        if found is None:
            raise ValueError(f'{self.path} is missing, and latents lie in it. {advice}')
        if found.is_remote:  # the checksum of a bucket covers the directory
            what, now, before = 'version is', found.version, self.version
        else:
            now, before = pt_archive.open_archive(self.path).digest, self.digest
            what = 'directory has digest'
        if now != before:
            raise ValueError(
                f'{self.path}: has changed since the data set was built, and latents lie in it: '
                f'its {what} {now}, expected {before}. {advice}'
            )
        return found


@dataclasses.dataclass(frozen=True)
class Column:
    """One feature.

    Attributes:
        name: of the feature.
        dtype: of its numbers.
        files: that its rows lie in.
        build: ID of the build that described it.
    """

    name: str
    dtype: str
    files: tuple[ColumnFile, ...]
    build: str = ''

    @property
    def is_remote(self) -> bool:
        """True if reading it waits for a network."""
        return any(source_files.is_remote(file.path) for file in self.files)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row in a file."""
        return schema.NUM_CROPS * schema.LATENT_NBYTES

    def find_files(self) -> list[SourceFile | None]:
        """What lies where each of its files was, None for nothing; a bucket is asked by folders.

        Raises:
            OSError: the storage cannot be reached.
        """
        folders = {os.path.dirname(file.path) for file in self.files}
        listed = [stored_files.list_folder(folder, missing_ok=True) for folder in sorted(folders)]
        found = {file.path: file for files in listed for file in files.values()}
        return [found.get(file.path) for file in self.files]

    def check_files(self) -> list[SourceFile]:
        """Its files, after a comparison with what they were; raises as `ColumnFile.check`."""
        found = zip(self.files, self.find_files(), strict=True)
        return [file.check(there) for file, there in found]

    def locate(self, folder: str | os.PathLike[str], split: str, num_records: int) -> np.ndarray:
        """Where each record's row is: number of the file, row; uint32 `(n, 2)`.

        It is memory-mapped, or read whole from gs://: 8 bytes a record.

        Raises:
            ValueError: the file is missing or damaged, or not as long as the split.
            OSError: it cannot be read.
        """
        path = os.path.join(folder, file_name(self.name, split, self.build))
        try:
            places = _load_places(path)
        except ValueError as error:
            raise ValueError(f'{path}: is no column ({error}). Build the data set again.') from None
        if len(places) != num_records:
            raise ValueError(
                f'{folder}: its column {self.name!r} has {len(places)} rows for split {split!r} of '
                f'{num_records} records. Build the data set again.'
            )
        return places


@dataclasses.dataclass(frozen=True)
class AddedColumn:
    """Values in files beside the shards, a row a record, in their order.

    Attributes:
        name: that it is asked for by.
        dtype: of its numbers, as NumPy calls it.
        shape: of a row: `(n,)` for n numbers, `()` for a single one.
        files: of each split the name of its file.
        feature: of the records that it can take the place of; '' for none.
        mean, std: of each number, over the train split; empty but for text embeddings.
        encoder: name of what made the values, and what else their file says of itself; {} if that
            is nothing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    files: Mapping[str, str]
    feature: str = ''
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    encoder: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row in a file and in a batch."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def locate(
        self, folder: str | os.PathLike[str], split: str, num_records: int
    ) -> tuple[SourceFile, int]:
        """The file of a split, and where its first row begins.

        Raises:
            ValueError: the file is missing, or not as long as the split.
            OSError: it cannot be read.
        """
        if split not in self.files:
            raise ValueError(f'{folder}: its column {self.name!r} has no split {split!r}.')
        path = os.path.join(folder, self.files[split])
        try:
            file = source_files.describe(path)
            head = remote.read_range(file, 0, min(file.size, _NPY_HEADER))
            dtype, shape, start = _parse_header(head, file.size)
        except ValueError as error:
            raise ValueError(f'{path}: is no column ({error}). Add it again.') from None
        if dtype != self.dtype or shape != (num_records, *self.shape):
            raise ValueError(
                f'{path}: holds {dtype} {shape}, expected {self.dtype} '
                f'{(num_records, *self.shape)}. Add the column again.'
            )
        return file, start


def file_name(column: str, split: str, build: str = '') -> str:
    """The name of the file with a column's values in one split, or with their places."""
    return schema.of_build(f'column_{column}-{split}.npy', build)


def is_file_name(name: str) -> bool:
    """True if it is the name of such a file."""
    return name.startswith('column_') and name.endswith('.npy') and '/' not in name


def left_over(
    names: Iterable[str], columns: Mapping[str, Column | AddedColumn], build: str
) -> set[str]:
    """Names of files of columns of a build that are none of these: a killed command left them."""
    used = {
        file for x in columns.values() if isinstance(x, AddedColumn) for file in x.files.values()
    }
    found = {name for name in names if is_file_name(name) and schema.build_of(name) == build}
    return {x for x in found - used if not x.startswith(f'column_{schema.LATENTS}-')}


def write(
    folder: str | os.PathLike[str], columns: Mapping[str, Column | AddedColumn], build: str = ''
) -> None:
    """Describes the columns of a build in a local folder; replaces what is there."""
    kinds = {Column: IN_PLACE, AddedColumn: _BESIDE}
    described = {
        name: {'kind': kinds[type(column)], **dataclasses.asdict(column)}
        for name, column in columns.items()
    }
    for fields in described.values():
        del fields['name']
    content = {'format': _FORMAT, 'columns': described}
    path = os.path.join(folder, schema.of_build(schema.COLUMNS_FILE, build))
    with open(f'{path}.part', 'w') as file:
        json.dump(content | {'digest': json_digest.sha256(content)}, file, indent=1)
        file.write('\n')
    os.replace(f'{path}.part', path)


def read(folder: str | os.PathLike[str], build: str = '') -> dict[str, Column | AddedColumn]:
    """The columns of a data set, local or on gs://, by feature; {} where all is in the records.

    Args:
        folder: of the data set.
        build: ID of the build that made it.

    Raises:
        ValueError: the description is damaged.
        OSError: it cannot be read.
    """
    path = os.path.join(folder, schema.of_build(schema.COLUMNS_FILE, build))
    try:
        file = source_files.describe(path)
    except ValueError:
        return {}
    try:
        return parse(bytes(stored_files.read(file, stored_files.Content).data))
    except ValueError as error:
        raise ValueError(f'{path}: is damaged ({error}). Build the data set again.') from None


def parse(data: bytes) -> dict[str, Column | AddedColumn]:
    """The columns, from the content of `schema.COLUMNS_FILE`.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    try:
        content = json.loads(data)
        if content.pop('digest') != json_digest.sha256(content):
            raise ValueError('its digest is wrong')
        if content['format'] != _FORMAT:
            raise ValueError(f'its format is {content["format"]!r}, expected {_FORMAT}')
        return {name: _column(name, **column) for name, column in content['columns'].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def _column(name: str, kind: str, **fields: Any) -> Column | AddedColumn:
    expected = IN_PLACE if name == schema.LATENTS else _BESIDE
    if kind != expected:
        raise ValueError(f'column {name!r} is of kind {kind!r}, expected {expected!r}')
    if kind == _BESIDE:
        added = AddedColumn(name, **fields | {'shape': tuple(fields['shape'])})
        if not _is_possible(added):
            raise ValueError(f'column {name!r} cannot have {fields}')
        return added
    files = tuple(ColumnFile(**file) for file in fields['files'])
    for file in files:
        # A place in a file is a number of 64 bits; whether it is in there is checked with the file.
        is_place = isinstance(file.path, str) and type(file.start) is int
        if not is_place or not 0 <= file.start < 2**63:
            raise ValueError(f'{file.path!r} begins at {file.start!r}')
    if fields['dtype'] not in schema.LATENT_DTYPES:
        raise ValueError(f'column {name!r} has dtype {fields["dtype"]!r}')
    return Column(name, fields['dtype'], files, fields['build'])


def _is_possible(column: AddedColumn) -> bool:
    """Whether all that is said of it is what `add_column` may say: its file may hold it."""
    lengths_fit = all(type(n) is int and 0 < n <= MAX_ROW_NBYTES for n in column.shape)
    return (
        column.dtype in _DTYPES
        and len(column.shape) < 2
        and lengths_fit
        and column.row_nbytes <= MAX_ROW_NBYTES
        and all(isinstance(x, str) and is_file_name(x) for x in column.files.values())
        and column.feature in ('', *schema.TEXT_DTYPES)
        and all(isinstance(x, float) for x in (*column.mean, *column.std))
        and isinstance(column.encoder, Mapping)
    )


def _load_places(path: str) -> np.ndarray:
    """The array in a `.npy` file, uint32 `(n, 2)`; raises as `_parse_header`."""
    file = source_files.describe(path)
    if file.is_remote:
        data: Any = stored_files.read(file, stored_files.Content).data
    else:
        data = np.memmap(path, np.uint8, 'r')
    dtype, shape, start = _parse_header(bytes(data[:_NPY_HEADER]), file.size)
    if dtype != np.uint32 or shape[1:] != (2,):
        raise ValueError(f'it has {dtype} {shape}')
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _parse_header(head: bytes, num_bytes: int) -> tuple[np.dtype, tuple[int, ...], int]:
    """The dtype and the shape of the array in a `.npy` file, and where its numbers begin.

    Args:
        head: the first bytes of the file, with all of its header.
        num_bytes: of the file.

    Raises:
        ValueError: it is no such file.
    """
    stream = io.BytesIO(head)
    dtype, shape = npy.read_header(stream)
    expected = stream.tell() + dtype.itemsize * math.prod(shape)
    if num_bytes != expected:
        raise ValueError(f'it has {num_bytes:,} bytes, expected {expected:,}')
    return dtype, shape, stream.tell()
