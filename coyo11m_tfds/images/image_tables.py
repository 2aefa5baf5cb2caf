"""Tables of a folder of images, `metadata.jsonl` or `metadata.csv`: a row of fields for an image.

A row names its image by a path relative to the table, in the column `file_name`. If no image has
exactly this path, it is the only one whose path differs in slashes, in case, in the form of its
letters in Unicode, or in quotes of URLs.
"""

import collections
import csv
import dataclasses
import functools
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.foreign.file_names import list_names, normalize_path
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage.stored_file import StoredFile

# Of a folder that has both, the first counts.
NAMES = 'metadata.jsonl', 'metadata.csv'

# Also of tables that are not read.
_SUFFIXES = '.jsonl', '.csv', '.tsv', '.parquet'
_FILE_NAME = 'file_name'
_MAX_CELL = 64 << 20  # characters

Fields = dict[str, Any]


class ImageTables:
    """The tables of a folder."""

    def __init__(
        self,
        files: Mapping[str, StoredFile],
        images: Mapping[str, str],
        caption_columns: Sequence[str],
    ):
        """Takes the files of the folder by their names, and for each image the name of its table.

        In `caption_columns`, cells of CSV are never numbers.
        """
        self._files = files
        self._images = images
        self._caption_columns = caption_columns
        # The images of a folder follow each other, so that few tables are in use at once.
        self.read = functools.lru_cache(maxsize=4)(self._read)
        self._reported_tables = set[str]()

    def _read(self, name: str) -> dict[str, Fields]:
        """Returns the rows of a table by the names of their images.

        Raises a ValueError that names the row if the table is damaged, or if all rows name
        something else than images.
        """
        path = self._files[name].path
        text = foreign_text.decode(self._files[name].read())
        if name.lower().endswith('.csv'):
            table = _parse_csv(text, path, self._caption_columns)
        else:
            table = _parse_json_lines(text, path)
        matches = self._match(name, table)
        without_row = self._find_without_row(name, matches)
        if matches.unknown and not (matches.rows or matches.elsewhere):
            raise ValueError(
                f'{path}: no row names an image, but {list_names(matches.unknown)}; there are '
                f'images such as {list_names(without_row)}. Write their paths, relative to the '
                f'table, as its {_FILE_NAME!r}, or remove it.'
            )
        # A table is read again when others have been in use since.
        if name not in self._reported_tables:
            _log_unmatched(path, matches, without_row)
        self._reported_tables.add(name)
        return matches.rows

    def _match(self, name: str, table: Iterator['_Row']) -> '_Matches':
        """Finds the image of each row."""
        folder = os.path.dirname(name)
        matches = _Matches()
        others = list[_Row]()
        for row in table:
            if not row.is_readable():
                matches.unreadable.append(str(row))
            image = os.path.normpath(os.path.join(folder, row.file_name))
            if image in self._images:
                self._add(name, image, row, matches)
            else:
                others.append(row)
        # After those with exactly the path of an image, which they must not replace.
        for row in others:
            image = self._find_similar(folder, row.file_name)
            if image:
                self._add(name, image, row, matches)
            else:
                matches.unknown.append(str(row))
        return matches

    def _add(self, name: str, image: str, row: '_Row', matches: '_Matches') -> None:
        """Adds a row of the table `name`, which counts if this is the table of the image."""
        if self._images[image] == name:
            matches.add(image, row)
        else:
            matches.elsewhere.append(str(row))

    def _find_similar(self, folder: str, file_name: str) -> str:
        """Returns the only image of a similar path, or ''."""
        path = normalize_path(f'{folder}/{file_name}')
        images = self._images_by_normal_name.get(path, [])
        # Of several, each may be the one that is meant.
        return images[0] if len(images) == 1 else ''

    @functools.cached_property
    def _images_by_normal_name(self) -> Mapping[str, Sequence[str]]:
        """The images with each normal path; computed only where a row names none exactly."""
        images = collections.defaultdict[str, list[str]](list)
        for image in self._images:
            images[normalize_path(image)].append(image)
        return images

    def _find_without_row(self, name: str, matches: '_Matches') -> list[str]:
        """Returns the images of the table `name` that have no row in it."""
        images = []
        for image, table in self._images.items():
            if table == name and image not in matches.rows:
                images.append(image)
        return images


def _log_unmatched(path: str, matches: '_Matches', without_row: Sequence[str]) -> None:
    """Logs, by name, the rows of a table and the images that have no partner."""
    clauses = []
    first = 'of which the first row counts'
    utf8 = 'not in UTF-8, in which the table has to be saved'
    closer = 'an image with a closer table'
    for one, several, names in (
        ('row names no image', 'rows name no image', matches.unknown),
        ('image has no row', 'images have no row', without_row),
        (f'row repeats an image, {first}', f'rows repeat an image, {first}', matches.repeated),
        (f'row names {closer}', f'rows name {closer}', matches.elsewhere),
        (f'row is {utf8}', f'rows are {utf8}', matches.unreadable),
    ):
        if names:
            count = format_count(len(names), one, several)
            clauses.append(f'{count}: {list_names(names)}')
    if clauses:
        logging.warning('%s: %s.', path, '; '.join(clauses))


def tell_unread(files: Mapping[str, StoredFile], used_names: Collection[str]) -> None:
    """Logs, by name, the tables among all files of a source that are not used."""
    paths = []
    has_parquet = False
    for name in sorted(files):
        if name.lower().endswith(_SUFFIXES) and name not in used_names:
            paths.append(files[name].path)
            has_parquet = has_parquet or name.lower().endswith('.parquet')
    if not paths:
        return
    tables = format_count(len(paths), 'table is', 'tables are')
    names_in_order = ' before '.join(NAMES)
    advice = (
        f'An image that is a file has the closest table in its folder or above, {names_in_order}.'
    )
    if has_parquet:
        advice += ' A build takes captions by key from a Parquet file (build --captions).'
    logging.warning(f'{tables} not read: {list_names(paths)}. {advice}')


class _Row(NamedTuple):
    """A row of a table."""

    place: str  # in messages
    file_name: str
    fields: Fields

    def __str__(self) -> str:
        """Returns where the row is, and what it names, for messages."""
        return f'{self.place} ({self.file_name})'

    def is_readable(self) -> bool:
        """Whether all texts of the row are UTF-8."""
        texts = [value for value in self.fields.values() if isinstance(value, str)]
        return all(map(foreign_text.is_readable, texts))


@dataclasses.dataclass
class _Matches:
    """The rows of a table by their images, and those without an image of their own."""

    rows: dict[str, Fields] = dataclasses.field(default_factory=dict)
    repeated: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    elsewhere: list[str] = dataclasses.field(default_factory=list)  # of images of other tables
    unreadable: list[str] = dataclasses.field(default_factory=list)

    def add(self, image: str, row: _Row) -> None:
        """Adds a row; of several for an image the first counts."""
        if image in self.rows:
            self.repeated.append(str(row))
        else:
            self.rows[image] = row.fields


def _parse_csv(text: str, path: str, caption_columns: Sequence[str]) -> Iterator[_Row]:
    """Yields the rows of a CSV; raises a ValueError that names a row which is none."""
    # By default, a caption of more than 131,072 characters would be an error.
    csv.field_size_limit(_MAX_CELL)
    # Strict, because a quote in a wrong place may swallow the rows that follow it.
    reader = csv.reader(io.StringIO(text, newline=''), strict=True)
    number = 0
    columns = list[str]()
    try:
        # Blank lines are no rows.
        for cells in filter(None, reader):
            if not columns:
                columns = [name.strip() for name in cells]
                _check_header(columns, path)
                continue
            number += 1
            if len(cells) != len(columns):
                count = format_count(len(cells), 'cell')
                raise ValueError(
                    f'{path}: row {number} (line {reader.line_num}) has {count}, '
                    f'expected {len(columns)} as in its header. Put texts with commas or line '
                    'ends between double quotes.'
                )
            fields: Fields = {}
            for name, cell in zip(columns, cells, strict=True):
                # A caption may be '42'.
                fields[name] = cell if name in caption_columns else _parse_cell(cell)
            file_name = cells[columns.index(_FILE_NAME)]
            yield _Row(f'row {number}', file_name, fields)
    except csv.Error as error:
        raise ValueError(
            f'{path}: row {number + 1} (up to line {reader.line_num}) is no row of CSV ({error}). '
            'Put texts with commas, quotes or line ends between double quotes, and write each '
            'quote in them twice.'
        ) from None


def _check_header(columns: list[str], path: str) -> None:
    """Raises a ValueError unless a table can be used with columns of these names."""
    has_repeated_names = len(set(columns)) < len(columns)
    if _FILE_NAME not in columns or has_repeated_names:
        raise ValueError(
            f'{path}: its header is {columns}, expected different names, separated by commas, '
            f'with {_FILE_NAME!r} among them.'
        )


def _parse_json_lines(text: str, path: str) -> Iterator[_Row]:
    """Yields the rows of lines of JSON; raises a ValueError that names a line which is none."""
    # Not by `splitlines`: texts in JSON may hold other ends of lines.
    for number, line in enumerate(text.split('\n'), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{path}: line {number} is no JSON ({error}).') from None
        file_name = None
        if isinstance(fields, dict):
            file_name = fields.get(_FILE_NAME)
        if not isinstance(file_name, str):
            raise ValueError(
                f'{path}: line {number} is {line[:100]}, expected an object with a text '
                f'{_FILE_NAME!r}.'
            )
        yield _Row(f'line {number}', file_name, fields)


def _parse_cell(cell: str) -> int | float | str:
    """Returns the number that a cell is, or its text."""
    # Python reads digits with underscores, which others use in names, and those of all scripts.
    if '_' in cell or not cell.isascii():
        return cell
    for number in (int, float):
        try:
            return number(cell)
        except ValueError:
            pass
    return cell
