"""Features that lie elsewhere than in the records: rows of a fixed size in other files.

    column = columns.read(folder)['latents']        # {} where all is in the records
    column.files[3].path, column.files[3].start     # a `.pt` file, where its latents begin
    column.locate(folder, 'train', num_records)     # uint32 (records, 2): number of file, row

`columns.json` beside the shards names the files and what they were when the data set was built;
`column_<feature>-<split>.npy` has the place of every record, in the order of the shards.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coyo11m_tfds import pt_archive, schema
from coyo11m_tfds.storage import json_digest, source_files

RECORDS, IN_PLACE = LATENTS_LIE = ('records', 'in_place')  # the config's `latents`

MAX_ROW_NBYTES = 2 * schema.MAX_TEXT_DIM  # of an added column: `mapped_files` gathers no more

_BESIDE = 'beside'  # the kind of a column in files beside the shards
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ColumnFile:
    """A `.pt` file that rows are read from.

    Attributes:
        path: absolute.
        version: its size and time of change, see `SourceFile`.
        digest: of the directory of its archive, see `pt_archive.Archive`.
        start: where the first row begins, in bytes.
    """

    path: str
    version: str
    digest: str
    start: int

    def check(self) -> None:
        """Compares the file with what it was; reads its directory and no rows.

        Raises:
            ValueError: it is missing, or another one.
        """
        advice = 'Restore it, or build the data set again.'
        try:
            version = source_files.describe(self.path).version
        except ValueError:
            raise ValueError(f'{self.path} is missing, and latents lie in it. {advice}') from None
        digest = pt_archive.open_archive(self.path).digest
        if (version, digest) != (self.version, self.digest):
            raise ValueError(
                f'{self.path}: has changed since the data set was built, and latents lie in it: '
                f'size and time are {version}, expected {self.version}. {advice}'
            )


@dataclasses.dataclass(frozen=True)
class Column:
    """One feature.

    Attributes:
        name: of the feature.
        dtype: of its numbers.
        files: that its rows lie in.
    """

    name: str
    dtype: str
    files: tuple[ColumnFile, ...]

    def locate(self, folder: str | os.PathLike[str], split: str, num_records: int) -> np.ndarray:
        """Where each record's row is: number of the file, row; uint32 `(n, 2)`, memory-mapped.

        Raises:
            ValueError: the file is missing or damaged, or not as long as the split.
        """
        path = os.path.join(folder, file_name(self.name, split))
        try:
            places = np.load(path, mmap_mode='r', allow_pickle=False)
            if places.dtype != np.uint32 or places.shape[1:] != (2,):
                raise ValueError(f'it has {places.dtype} {places.shape}')
        except (OSError, EOFError, ValueError) as error:
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

    def locate(
        self, folder: str | os.PathLike[str], split: str, num_records: int
    ) -> tuple[str, int]:
        """The file of a split, and where its first row begins.

        Raises:
            ValueError: the file is missing, or not as long as the split.
        """
        if split not in self.files:
            raise ValueError(f'{folder}: its column {self.name!r} has no split {split!r}.')
        path = os.path.join(folder, self.files[split])
        try:
            rows = np.load(path, mmap_mode='r', allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f'{path}: is no column ({error}). Add it again.') from None
        if rows.dtype != self.dtype or rows.shape != (num_records, *self.shape):
            raise ValueError(
                f'{path}: holds {rows.dtype} {rows.shape}, expected {self.dtype} '
                f'{(num_records, *self.shape)}. Add the column again.'
            )
        return path, int(rows.offset)


def file_name(column: str, split: str) -> str:
    """The name of the file with a column's values in one split, or with their places."""
    return f'column_{column}-{split}.npy'


def is_file_name(name: str) -> bool:
    """True if it is the name of such a file."""
    return name.startswith('column_') and name.endswith('.npy')


def write(folder: str | os.PathLike[str], columns: Mapping[str, Column | AddedColumn]) -> None:
    """Describes the columns of a data set in a local folder; replaces what is there."""
    kinds = {Column: IN_PLACE, AddedColumn: _BESIDE}
    described = {
        name: {'kind': kinds[type(column)], **dataclasses.asdict(column)}
        for name, column in columns.items()
    }
    for fields in described.values():
        del fields['name']
    content = {'format': _FORMAT, 'columns': described}
    path = os.path.join(folder, schema.COLUMNS_FILE)
    with open(f'{path}.part', 'w') as file:
        json.dump(content | {'digest': json_digest.sha256(content)}, file, indent=1)
        file.write('\n')
    os.replace(f'{path}.part', path)


def read(folder: str | os.PathLike[str]) -> dict[str, Column | AddedColumn]:
    """The columns of a data set in a local folder, by feature; {} where all is in the records.

    Raises:
        ValueError: the description is damaged.
    """
    path = pathlib.Path(folder) / schema.COLUMNS_FILE
    if not path.exists():
        return {}
    try:
        return parse(path.read_bytes())
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
    if kind == _BESIDE:
        return AddedColumn(name, **fields | {'shape': tuple(fields['shape'])})
    if kind != IN_PLACE:
        raise ValueError(f'column {name!r} is of kind {kind!r}')
    files = tuple(ColumnFile(**file) for file in fields['files'])
    return Column(name, fields['dtype'], files)
