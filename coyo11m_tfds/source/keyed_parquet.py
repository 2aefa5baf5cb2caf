"""One column of a Parquet file and the keys of its rows, read and checked.

    with KeyedFile('coyo11m-meta.parquet', 'caption_llava') as file:
        keys = file.keys()                  # int64 (n,)
        for values in file.values():        # pyarrow.Array, a few MB at a time, in file order
            ...

Reading takes 150 MB with all libraries, however large the file and its row groups, and however
often a text occurs: it is read as a dictionary. Page checksums are compared where there are any.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.process.progress import Progress

# What is read at once: this many rows, or fewer if these have more bytes.
ROWS_AT_ONCE = 16384
BYTES_AT_ONCE = 16 << 20
# Of texts that are stored as differences to others nobody knows the size before they are read.
_DIFFERENCES_AT_ONCE = 1024
# Texts that take less in the file occur often, and are read as a dictionary, as which they take
# little memory, too. Of texts that differ a dictionary would take 20 times as long.
_REPEATED_BYTES = 16

# What Arrow, or the reading of its metadata, raises, depending on which byte is damaged.
_OF_DAMAGE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError)

# A page begins with its header in Thrift's compact protocol: its type, two sizes and, if there is
# one, its CRC-32. Each is a byte 0x15 and a number, whose bytes but the last are above 0x7f.
_WITH_CHECKSUM = re.compile(rb'(?:\x15[\x80-\xff]*[\x00-\x7f]){4}', re.DOTALL)


class KeyedFile:
    """An open Parquet file with a column `key`; a context manager.

    pandas writes a named index as an ordinary column, so both kinds of key look the same here; one
    of evenly spaced numbers it only describes in the metadata, which counts if there is no column.

    Attributes:
        name: of the file in messages; the path may be that of a copy.
        column: name of the column of values.
        kind: Arrow's type of the values.
        num_rows: of the file.
        num_bytes: of the values, uncompressed but encoded.
        metadata: of the schema.
        has_checksums: whether the first pages of both columns have one.
    """

    def __init__(self, path: str, *columns: str, name: str = ''):
        """Opens a file; the values are in the first of `columns` that the file has.

        Raises:
            ValueError: it is no Parquet file, is encrypted, or lacks a column or any row.
        """
        self.name = name or path
        with naming_damage(self.name):
            self._file = _open(path)
            names = self._file.schema_arrow.names
            self.column = next((column for column in columns if column in names), columns[-1])
            self._range = None if schema.PARQUET_KEY in names else _range_index(self._file)
            self._columns = [self.column]
            if self._range is None:
                self._columns.append(schema.PARQUET_KEY)
            self.num_rows = self._file.metadata.num_rows
            self._check(names)
            self.kind = self._file.schema_arrow.field(self.column).type
            found = self._file.schema_arrow.metadata or {}
            self.metadata = {key.decode(): value.decode() for key, value in found.items()}
            check_readable(self._file, self._columns)
            chunks = column_chunks(self._file.metadata, self.column)
            self.num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
            self.has_checksums = _have_checksums(path, self._file, self._columns)
            means = [c.total_uncompressed_size // max(1, c.num_values) for c in chunks]
            self._row_bytes = max(1, *means)
            self._rows_at_once = ROWS_AT_ONCE
            # Arrow makes no dictionaries of these.
            if self.is_text and any('DELTA' in e for chunk in chunks for e in chunk.encodings):
                self._rows_at_once = _DIFFERENCES_AT_ONCE
            elif self.is_text and self._row_bytes < _REPEATED_BYTES:
                self._file = _open(path, read_dictionary=[self.column])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Closes it; a context manager does."""
        self._file.close()

    @property
    def is_text(self) -> bool:
        """Whether the values are text, of whichever of Arrow's types."""
        kind = self.kind.value_type if pa.types.is_dictionary(self.kind) else self.kind
        return str(kind) in ('string', 'large_string', 'string_view')

    def keys(self) -> np.ndarray:
        """Reads the keys of all rows, int64 `(n,)`; ValueError if one is null or not int64."""
        if self._range is not None:
            return np.arange(self._range.start, self._range.stop, self._range.step)
        with naming_damage(self.name):
            return np.concatenate(
                [self._to_int64(keys) for keys in self._read(schema.PARQUET_KEY, 1 << 20)]
            )

    def values(self, row_bytes: int = 0, quiet: bool = False) -> Iterator[pa.Array]:
        """Yields the values of all rows; texts that often repeat as a `pa.DictionaryArray`.

        Args:
            row_bytes: of a value in memory, where they are all of one size.
            quiet: show no progress, as for one of many files.

        Raises:
            ValueError: a page of the file is damaged.
        """
        row_bytes = max(row_bytes, self._row_bytes)
        rows_at_once = max(1, min(self._rows_at_once, BYTES_AT_ONCE // row_bytes))
        what = f"Reading '{self.column}' of {self.name}"
        with contextlib.ExitStack() as stack, naming_damage(self.name):
            shown = None if quiet else stack.enter_context(Progress(what, self.num_rows, 'rows'))
            for values in self._read(self.column, rows_at_once):
                yield values
                if shown:
                    shown.add(len(values))

    def _read(self, column: str, rows_at_once: int) -> Iterator[pa.Array]:
        done = 0
        for batch in self._file.iter_batches(rows_at_once, columns=[column], use_threads=False):
            yield batch.column(0)
            done += len(batch)
        if done != self.num_rows:
            raise ValueError(f'{done:,} of {self.num_rows:,} rows are there')

    def _check(self, names: list[str]) -> None:
        for column in self._columns:
            if names.count(column) != 1:
                has = f'{names.count(column)} columns' if column in names else 'no column'
                raise ValueError(
                    f"{self.name}: has {has} '{column}'; its columns are {', '.join(names)}."
                )
        if self._range is None:
            kind = self._file.schema_arrow.field(schema.PARQUET_KEY).type
            if not pa.types.is_integer(kind):
                raise ValueError(
                    f"{self.name}: column '{schema.PARQUET_KEY}' is {kind}, expected int64."
                )
        if self.num_rows == 0:
            raise ValueError(f'{self.name}: has no rows.')
        if self._range is not None and len(self._range) != self.num_rows:
            raise ValueError(
                f'{self.name}: has {self.num_rows:,} rows, but its metadata describes '
                f'{len(self._range):,} keys. Write it again.'
            )

    def _to_int64(self, keys: pa.Array) -> np.ndarray:
        if keys.null_count:
            raise ValueError(f"{self.name}: column '{schema.PARQUET_KEY}' has nulls.")
        try:
            return keys.cast(pa.int64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{self.name}: column '{schema.PARQUET_KEY}' does not fit int64 ({error})."
            ) from None


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Turns whatever Arrow raises for a damaged or encrypted file into a ValueError that names it.

    Errors that begin with the `name` already pass unchanged, and so do those of the disk.
    """
    try:
        yield
    except _OF_DAMAGE as error:
        is_named = type(error) is ValueError and str(error).startswith(f'{name}: ')
        is_of_disk = isinstance(error, OSError) and error.errno is not None
        if is_named or is_of_disk:
            raise
        what = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        if 'crypt' in what:
            raise ValueError(f'{name}: is encrypted. Write it without encryption.') from error
        raise ValueError(
            f'{name}: is damaged or not a Parquet file ({what}). Copy or download it again.'
        ) from error


def check_readable(file: pq.ParquetFile, columns: list[str], groups: int | None = None) -> None:
    """Reads a row of each row group, or of the first `groups`; OSError if columns are encrypted.

    Asking such a file for facts about these columns would abort the process.
    """
    for group in range(file.metadata.num_row_groups)[:groups]:
        next(file.iter_batches(1, row_groups=[group], columns=columns, use_threads=False), None)


def column_chunks(metadata: pq.FileMetaData, column: str) -> list[pq.ColumnChunkMetaData]:
    """What each row group has of a column."""
    paths = [metadata.schema.column(index).path for index in range(len(metadata.schema))]
    index = next(i for i, path in enumerate(paths) if f'{path}.'.startswith(f'{column}.'))
    return [metadata.row_group(g).column(index) for g in range(metadata.num_row_groups)]


def _open(path: str, **options: Any) -> pq.ParquetFile:
    # Neither mapped nor fetched in whole column chunks: both would fill memory with as much of the
    # file as has been read (4.8 GB of 5.2 GB, against 0.15 GB), and be no faster.
    options |= {'memory_map': False, 'pre_buffer': False, 'buffer_size': 1 << 20}
    return pq.ParquetFile(path, page_checksum_verification=True, **options)


def _range_index(file: pq.ParquetFile) -> range | None:
    """The keys, if pandas wrote them as a description of a `RangeIndex` instead of a column."""
    for index in (file.schema_arrow.pandas_metadata or {}).get('index_columns', []):
        if isinstance(index, dict) and index.get('name') == schema.PARQUET_KEY:
            return range(index['start'], index['stop'], index['step'])
    return None


def _have_checksums(path: str, parquet: pq.ParquetFile, columns: list[str]) -> bool:
    with open(path, 'rb') as file:
        for column in columns:
            chunk = column_chunks(parquet.metadata, column)[0]
            file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
            if not _WITH_CHECKSUM.match(file.read(64)):
                return False
    return True


def order_by_key(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(order, duplicates)` of `keys` int64 `(n,)`.

    `order` int64 `(m,)` are the first rows of each key, sorted by key; `duplicates`
    int64 `(n - m,)` are the keys of the other rows, ascending.
    """
    order = np.argsort(keys, kind='stable')
    ascending = keys[order]
    duplicate = np.zeros(len(keys), bool)
    np.equal(ascending[1:], ascending[:-1], out=duplicate[1:])
    return order[~duplicate], ascending[duplicate]


class Places:
    """Where keys are wanted, each of them once."""

    def __init__(self, wanted: np.ndarray | None):
        """Key `wanted[i]` is wanted at place i; if it is None, every key, and is its own place."""
        self._wanted = wanted
        if wanted is not None:
            self._order = np.argsort(wanted)
            self._ascending = wanted[self._order]

    def of(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places of keys, int64 `(n,)`, and which of them exist, bool `(n,)`."""
        if self._wanted is None:
            return keys, np.ones(len(keys), bool)
        if not len(self._wanted):
            return keys, np.zeros(len(keys), bool)
        # Neighbours in order of keys share most steps of the search, and those are in the cache: of
        # 11.4 million keys a million are found in 0.12 s, without sorting them first in 1.4 s.
        by_key = np.argsort(keys)
        at = np.empty(len(keys), np.int64)
        at[by_key] = np.searchsorted(self._ascending, keys[by_key])
        at = np.minimum(at, len(self._ascending) - 1)
        return self._order[at], self._ascending[at] == keys
