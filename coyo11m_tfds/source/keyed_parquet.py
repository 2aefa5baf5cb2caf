"""Reads and checks one column of a Parquet file and the keys of its rows.

It takes 150 MB of memory with all libraries, whatever the size of the file and of row groups.
"""

import base64
import contextlib
import functools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.foreign import arrow_texts, foreign_text
from coyo11m_tfds.foreign.file_names import find_first
from coyo11m_tfds.pictures import image_kinds
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage.file_state import OnBytes, ignore_bytes, naming
from coyo11m_tfds.storage.stored_file import RangeReader, StoredFile

# The most bytes to read at once.
_ROWS_AT_ONCE = 16384
_BYTES_AT_ONCE = 16 << 20
# The size of texts that are stored as differences from others is unknown until they are read.
_DIFFERENCES_AT_ONCE = 1024
# Texts that take less in the file occur often: a dictionary of them takes little memory. A
# dictionary of texts that all differ would take 20 times as long to read.
_REPEATED_BYTES = 16

# Most footers are shorter, and so take one request.
_TAIL_BYTES = 1 << 15

# Of columns that are fetched alone. Reading a gap costs less than another request.
_FETCHED_AT_ONCE = 8 << 20
_REQUESTS_AT_ONCE = 8
_GAP = 64 << 10
_PADDING = 100

# What Arrow, or the reading of its metadata, raises, depending on which byte is damaged.
_OF_DAMAGE = (
    pa.ArrowException,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)

# A page begins with its header in Thrift's compact protocol: its type, two sizes and, if there is
# one, its CRC-32. Each is a byte 0x15 and a number, whose bytes but the last are above 0x7f.
_WITH_CHECKSUM = re.compile(rb'(?:\x15[\x80-\xff]*[\x00-\x7f]){4}', re.DOTALL)


class KeyedFile:
    """An open Parquet file with a column of keys and one of values; a context manager."""

    def __init__(
        self, path: str, *columns: str, name: str = '', key_column: str = schema.PARQUET_KEY
    ):
        """Opens a file, called `name` in messages; its values are in the first existing column."""
        self.name = name or path
        self._path = path
        self._key_column = key_column
        with naming_damage(self.name):
            self._file = open_parquet(path)
            arrow = self._file.schema_arrow
            self.num_rows = self._file.metadata.num_rows
            # Without any of them, the last is the one that the error names.
            self.column = find_first(columns, arrow.names) or columns[-1]
            self._columns = [self.column]  # to read
            # Keys that pandas described as a range are in no column.
            self._range: range | None = None
            if key_column not in arrow.names:
                self._range = _pandas_indexes(arrow).get(key_column)
            if self._range is None:
                self._columns.append(key_column)
            self.metadata = dict[str, str]()
            for entry, value in (arrow.metadata or {}).items():
                name_of_entry = foreign_text.decode_utf8(entry)
                self.metadata[name_of_entry] = foreign_text.decode_utf8(value)
            # Without rows, a column may have any type, or be missing.
            if self.num_rows:
                self._check(arrow)
            self.kind = pa.null()  # of the values
            if self.column in arrow.names:
                self.kind = arrow.types[arrow.names.index(self.column)]
            if self.num_rows:
                self._plan_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def _plan_reading(self) -> None:
        """Chooses how many rows are read at once at most, and whether as a dictionary."""
        # Before the metadata of columns, whose reading would abort the process.
        check_not_encrypted(self._file, self._columns)
        chunks = column_chunks(self._file.metadata, self.column)
        self._row_bytes = _largest_row_bytes(self._file.metadata, chunks)
        self._rows_at_once = _ROWS_AT_ONCE
        # Arrow makes no dictionaries of differences.
        if arrow_texts.holds_text(self.kind) and _has_differences(chunks):
            self._rows_at_once = _DIFFERENCES_AT_ONCE
        elif arrow_texts.is_flat(self.kind) and self._row_bytes < _REPEATED_BYTES:
            self._file = open_parquet(self._path, read_dictionary=[self.column])

    @functools.cached_property
    def has_checksums(self) -> bool:
        """Whether the first pages of both columns, if there are any, have a checksum."""
        if not self.num_rows:
            return True
        with naming_damage(self.name), open(self._path, 'rb') as file:
            for column in self._columns:
                # The writer decides for a whole file.
                chunk = column_chunks(self._file.metadata, column)[0]
                file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
                if not _WITH_CHECKSUM.match(file.read(64)):
                    return False
        return True

    def keys(self) -> np.ndarray:
        """Reads all keys, int64 `(n,)`; raises a ValueError for nulls, and for larger numbers."""
        if not self.num_rows:
            return np.empty(0, np.int64)
        if self._range is not None:
            return np.arange(self._range.start, self._range.stop, self._range.step)
        with naming_damage(self.name):
            keys = pa.chunked_array(list(self._read(self._key_column, 1 << 20)))
            # With nulls, NumPy would get floats.
            if keys.null_count:
                raise ValueError(
                    f"{self.name}: column '{self._key_column}' has nulls, expected a key in every "
                    'row.'
                )
            if arrow_texts.is_text(keys.type):
                self._check_texts_of_keys(keys.cast(pa.large_string()))
            try:
                return keys.cast(pa.int64()).to_numpy()
            except pa.ArrowInvalid as error:
                raise ValueError(
                    f"{self.name}: column '{self._key_column}' does not fit int64 ({error})."
                ) from None

    def _check_texts_of_keys(self, texts: pa.ChunkedArray) -> None:
        """Raises a ValueError for a text that is no key; Arrow takes others, such as `0x10`."""
        # Nearly all have only digits, which Arrow finds out faster.
        others = texts.filter(pc.invert(pc.ascii_is_decimal(texts)))
        for data in others.cast(pa.large_binary()):
            text = foreign_text.decode_utf8(data.as_py())
            if schema.parse_integer(text) is None:
                raise ValueError(
                    f"{self.name}: column '{self._key_column}' has {text[:100]!r}, expected "
                    'integers of 64 bits, or texts of their decimal digits.'
                )

    def values(self, row_bytes: int = 0) -> Iterator[pa.Array]:
        """Yields the values of all rows; texts that often repeat as a `pa.DictionaryArray`.

        `row_bytes` is the size of a value in memory, if all have the same size.
        """
        if not self.num_rows:
            return
        # A value may take less in the file than in memory, or more.
        max_rows = _BYTES_AT_ONCE // max(row_bytes, self._row_bytes)
        # A single row may be larger than what is read at once.
        rows_at_once = max(1, min(self._rows_at_once, max_rows))
        with naming_damage(self.name):
            yield from self._read(self.column, rows_at_once)

    def _read(self, column: str, rows_at_once: int) -> Iterator[pa.Array]:
        """Yields a column in pieces; raises a ValueError if it ends before the last row."""
        count = 0
        for batch in self._file.iter_batches(rows_at_once, columns=[column], use_threads=False):
            yield batch.column(0)
            count += len(batch)
        if count != self.num_rows:
            raise ValueError(f'it has {count:,} of {format_count(self.num_rows, "row")}')

    def _check(self, arrow: pa.Schema) -> None:
        """Raises a ValueError unless each column is there once, and the keys can be keys."""
        # Parquet allows several columns of one name, of which Arrow would read any.
        for column in self._columns:
            count = arrow.names.count(column)
            if count != 1:
                has = f'{count} columns' if count else 'no column'
                raise ValueError(
                    f"{self.name}: has {has} '{column}'; its columns are {', '.join(arrow.names)}. "
                    'Name one of them.'
                )
        if self._range is not None:
            if len(self._range) != self.num_rows:
                raise ValueError(
                    f'{self.name}: has {format_count(self.num_rows, "row")}, but its metadata '
                    f'describes {format_count(len(self._range), "key")}. Write it again.'
                )
            return
        kind = arrow.field(self._key_column).type
        if not _can_be_keys(kind):
            raise ValueError(
                f"{self.name}: column '{self._key_column}' is {kind}, expected integers, or texts "
                'of their decimal digits.'
            )


def _has_differences(chunks: Iterable[pq.ColumnChunkMetaData]) -> bool:
    """Whether chunks of a column hold texts as differences from the ones before."""
    encodings = set[str]()
    for chunk in chunks:
        encodings.update(chunk.encodings)
    return any('DELTA' in encoding for encoding in encodings)


def holds_images(field: pa.Field) -> bool:
    """Whether a column has images: structs with `bytes`, or bytes under the name of a format."""
    kind = field.type
    # As the library datasets writes images.
    if pa.types.is_struct(kind):
        return any(member.name == 'bytes' and _is_bytes(member.type) for member in kind)
    # As WebDataset names them, for example `jpg`.
    return _is_bytes(kind) and f'.{field.name.lower()}' in image_kinds.TAKEN_SUFFIXES


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether a type is that of bytes."""
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _can_be_keys(kind: pa.DataType) -> bool:
    """Whether values of a type can be keys; texts must consist of digits."""
    return pa.types.is_integer(kind) or arrow_texts.is_text(kind)


def find_key_column(arrow: pa.Schema, key_column: str) -> str:
    """Returns the column of keys, '' without any: `key_column`, where '' stands for `key`.

    If there is no `key`, '' stands for integers that pandas wrote as an index with a name.
    """
    name = key_column or schema.PARQUET_KEY
    indexes = _pandas_indexes(arrow)
    kinds = {field.name: field.type for field in arrow}
    # What pandas described instead of writing it is a range of integers.
    is_of_keys = name in indexes
    if name in kinds:
        is_of_keys = _can_be_keys(kinds[name])
    if is_of_keys:
        return name
    if key_column:
        return ''
    for index in indexes:
        if index not in kinds or pa.types.is_integer(kinds[index]):
            return index
    return ''


def read_schema(file: StoredFile) -> pa.Schema:
    """Reads the schema at the end of a file, local or remote."""
    arrow, _ = read_schema_and_count(file)
    return arrow


def read_schema_and_count(file: StoredFile) -> tuple[pa.Schema, int]:
    """Reads the schema and the number of rows at the end of a file, local or remote."""
    with naming_damage(file.path):
        metadata = pq.read_metadata(pa.BufferReader(_read_footer(file)))
        _check_noted_names(metadata)
        return metadata.schema.to_arrow_schema(), metadata.num_rows


def _read_footer(file: StoredFile) -> bytes:
    """Reads the end of a file from its footer on, or more of it."""

    def read_tail(length: int) -> bytes:
        """Reads the last bytes of the file, or all of a shorter one."""
        length = min(length, file.size)
        return file.read_range(file.size - length, length)

    tail = read_tail(_TAIL_BYTES)
    # A file ends with the footer, its length in 4 bytes, and 4 bytes that name the format.
    footer_bytes = int.from_bytes(tail[-8:-4], 'little') + 8
    if footer_bytes > len(tail):
        tail = read_tail(footer_bytes)
    return tail


class RemoteColumns:
    """Some columns of a remote file, which are fetched without the others."""

    def __init__(self, file: StoredFile, columns: Collection[str]):
        """Reads the end of the file; ValueError for a damaged one."""
        self._file = file
        self._footer = _read_footer(file)
        with naming_damage(file.path):
            metadata = pq.read_metadata(pa.BufferReader(self._footer))
            # What has been read of the end is not fetched once more.
            stop = file.size - len(self._footer)
            ranges = _find_ranges(metadata, columns, stop)
        # Requests of a few MB each, several of which are under way at once.
        self._pieces: list[tuple[int, int]] = []
        for begin, end in ranges:
            for start in range(begin, end, _FETCHED_AT_ONCE):
                self._pieces.append((start, min(start + _FETCHED_AT_ONCE, end)))

    @property
    def num_bytes(self) -> int:
        """Bytes that `fetch` requests."""
        return sum(end - begin for begin, end in self._pieces)

    def fetch(self, path: str, on_bytes: OnBytes = ignore_bytes) -> None:
        """Writes a local copy of the file, with holes where the other columns are.

        Only checksums of pages tell of damage to it. `on_bytes(n)` counts what is fetched.
        """

        def fetch_piece(bounds: tuple[int, int]) -> tuple[int, bytes]:
            """Returns where a piece begins, and its bytes."""
            begin, end = bounds
            data = self._file.read_range(begin, end - begin)
            on_bytes(len(data))
            return begin, data

        with (
            ThreadPool(_REQUESTS_AT_ONCE) as threads,
            naming(path),
            open(path, 'wb') as copy,
        ):
            # Everything where it lies in the file, because the footer has the offsets of columns.
            copy.seek(self._file.size - len(self._footer))
            copy.write(self._footer)
            # A few at a time, so that no more of them are in memory.
            for first in range(0, len(self._pieces), _REQUESTS_AT_ONCE):
                pieces = self._pieces[first : first + _REQUESTS_AT_ONCE]
                for offset, data in threads.map(fetch_piece, pieces):
                    copy.seek(offset)
                    copy.write(data)


def _find_ranges(
    metadata: pq.FileMetaData, columns: Collection[str], stop: int
) -> list[tuple[int, int]]:
    """Returns the ranges before `stop` in which columns lie; neighbours are one range."""
    ranges: list[tuple[int, int]] = []
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            if not any(_is_of_column(chunk.path_in_schema, column) for column in columns):
                continue
            begin = chunk.data_page_offset
            # A chunk begins with its dictionary, if it has one.
            if chunk.has_dictionary_page:
                begin = min(begin, chunk.dictionary_page_offset or begin)
            # Arrow may read a little beyond the end that old writers note.
            end = begin + chunk.total_compressed_size + _PADDING
            ranges.append((begin, min(end, stop)))
    # The beginning of the file, which names the format, is the first range.
    joined = [(0, 0)]
    for begin, end in sorted(ranges):
        last_begin, last_end = joined[-1]
        if begin > last_end + _GAP:
            joined.append((begin, end))
        else:
            # The padding of one may reach into the next.
            joined[-1] = last_begin, max(last_end, end)
    return joined


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Turns Arrow's errors for a damaged or encrypted file into ValueErrors that name it."""
    try:
        yield
    except _OF_DAMAGE as error:
        # An error of our own has the name, and one of the disk says nothing of the file.
        is_named = type(error) is ValueError and str(error).startswith(f'{name}: ')
        is_of_disk = isinstance(error, OSError) and error.errno is not None
        if is_named or is_of_disk:
            raise
        # Of the path, of which Arrow makes a text.
        if isinstance(error, UnicodeEncodeError):
            raise ValueError(
                f'{name}: Arrow opens no file whose path is not UTF-8. Rename it or its folder.'
            ) from error
        text = f'{type(error).__name__}: {error}'
        # In one line, however Arrow breaks it.
        cause = ' '.join(text.split())[:300]
        if 'crypt' in cause:
            raise ValueError(f'{name}: is encrypted. Write it without encryption.') from error
        # So Arrow reads a null in place of a list of a fixed size.
        if 'Expected all lists to be of size' in cause:
            raise ValueError(
                f'{name}: has nulls among lists of a fixed size, which Arrow does not read. Write '
                'only rows with a list.'
            ) from error
        if isinstance(error, NotImplementedError):
            raise ValueError(
                f'{name}: has something that this version of Arrow does not read ({cause}). '
                'Write it again with other types, encodings or compression.'
            ) from error
        raise ValueError(
            f'{name}: is damaged or not a Parquet file ({cause}). Copy or download it again.'
        ) from error


def check_not_encrypted(file: pq.ParquetFile, columns: list[str]) -> None:
    """Reads a row of each row group; raises an OSError if it is encrypted."""
    for group in range(file.metadata.num_row_groups):
        batches = file.iter_batches(1, row_groups=[group], columns=columns, use_threads=False)
        # A row group may have no rows.
        next(batches, None)


def _largest_row_bytes(metadata: pq.FileMetaData, chunks: list[pq.ColumnChunkMetaData]) -> int:
    """Returns the mean size of a row in the row group with the largest; `chunks` are a column's."""
    largest = 1
    for number, chunk in enumerate(chunks):
        # Not that of the chunk, which counts the values in lists: a row may have many.
        num_rows = max(1, metadata.row_group(number).num_rows)
        largest = max(largest, chunk.total_uncompressed_size // num_rows)
    return largest


def column_chunks(metadata: pq.FileMetaData, column: str) -> list[pq.ColumnChunkMetaData]:
    """Returns the metadata of a column in each row group."""
    is_of_column = []
    for index in range(len(metadata.schema)):
        is_of_column.append(_is_of_column(metadata.schema.column(index).path, column))
    # A nested column has several; the first stands for all.
    index = is_of_column.index(True)
    return [metadata.row_group(group).column(index) for group in range(metadata.num_row_groups)]


def _is_of_column(path: str, column: str) -> bool:
    """Whether a path in a schema is that of a column, or of a part of a nested one."""
    # A part is called like `caption.list.element`. Names of columns may have dots as well.
    return f'{path}.'.startswith(f'{column}.')


def open_parquet(path: str | RangeReader, **options: Any) -> pq.ParquetFile:
    """Opens a file to be read in little memory, with its checksums."""
    # Neither mapped nor fetched in whole column chunks: both would fill memory with as much of the
    # file as has been read (4.8 GB of 5.2 GB, against 0.15 GB), and be no faster.
    options |= {'memory_map': False, 'pre_buffer': False, 'buffer_size': 1 << 20}
    file = pq.ParquetFile(path, page_checksum_verification=True, **options)
    _check_noted_names(file.metadata)
    return file


def _check_noted_names(metadata: pq.FileMetaData) -> None:
    """Raises a ValueError if the names of columns are not those that Arrow noted when it wrote."""
    # The end of a file has no checksum, and with a damaged name another column of captions would be
    # the first that exists.
    entries = metadata.metadata or {}
    encoded_schema = entries.get(b'ARROW:schema')
    # Other writers note nothing.
    if not encoded_schema:
        return
    serialized_schema = pa.py_buffer(base64.b64decode(encoded_schema))
    noted = pa.ipc.read_schema(serialized_schema).names
    names = metadata.schema.to_arrow_schema().names
    if noted != names:
        raise ValueError(f'its columns are {names}, and were {noted} when it was written')


def _pandas_indexes(arrow: pa.Schema) -> dict[str, range | None]:
    """Returns the named indexes of pandas: None for a column, the keys where it described them."""
    indexes: dict[str, range | None] = {}
    metadata = arrow.pandas_metadata or {}
    for index in metadata.get('index_columns', []):
        # Pandas calls an index without a name `__index_level_0__`.
        if isinstance(index, str) and not index.startswith('__index_level_'):
            indexes[index] = None
        elif isinstance(index, dict) and isinstance(index.get('name'), str):
            indexes[index['name']] = range(index['start'], index['stop'], index['step'])
    return indexes
