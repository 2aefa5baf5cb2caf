"""One Parquet file of latents, as data sets on the Hugging Face hub have them.

The latents of a row are lists of numbers, nested `(C, H, W)` or flat, or bytes. Arrow gives them
row group by row group, and a few MB of one at a time.
"""

import math
import os
import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from coyo11m_tfds.foreign import arrow_texts
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import keyed_parquet
from coyo11m_tfds.source.encoding_file import how_to_encode
from coyo11m_tfds.source.latent_file import ColumnNames, LatentFile, bytes_of, find_labels

# Each shard reads the row groups of its rows from their beginnings.
_MAX_GROUP_NBYTES = 4 << 30
_BATCH_NBYTES = 8 << 20
_FLOATS = {pa.float16(): 'float16', pa.float32(): 'float32'}
_REWRITE = 'Write the file again'


class ParquetFile(LatentFile):
    """A validated Parquet file. Without keys in it, they are hashes of its name and the row.

    Lists are checked when they are read, all rows against the shape of the first.
    """

    kind = 'a Parquet file'

    def _open(self) -> None:
        """Checks schema and row groups, finds the shape by the first row, and reads the keys."""
        with keyed_parquet.naming_damage(self.path):
            self._parquet = keyed_parquet.open_parquet(self._local_path)
            self._arrow = self._parquet.schema_arrow
            metadata = self._parquet.metadata
            num_in_groups = sum(_group_sizes(metadata))
            if num_in_groups != metadata.num_rows:
                raise ValueError(
                    f'it has {metadata.num_rows} rows, and {num_in_groups} in row groups'
                )
        if not metadata.num_rows:
            self._set_empty()
            return
        # Rows lie in pages, most of which are compressed.
        self.layout = None
        self._name = self._latents_from.name or self._only_latents()
        self._check_column(self._name)
        # Before any value is read.
        self._check_groups()
        self._find_shape()
        rows_at_once = max(1, _BATCH_NBYTES // self.row_nbytes)
        self._rows = _ColumnRows(self._parquet, self._name, rows_at_once)
        # Kept between calls, because a batch holds the rows of many.
        self._held_begin = 0  # number of the first row in `_held`
        self._held = np.empty((0, self.row_nbytes), np.uint8)
        # The keys of texts of digits, and those in the description of pandas, count as well.
        with keyed_parquet.naming_damage(self.path):
            key_column = keyed_parquet.find_key_column(self._arrow, self._latents_from.key_column)
            self.key_column = key_column or keyed_parquet.find_key_column(self._arrow, '')
        if not self.key_column:
            self._make_keys(metadata.num_rows)
            return
        with keyed_parquet.KeyedFile(
            self._local_path, self._name, name=self.path, key_column=self.key_column
        ) as file:
            self.keys = file.keys()

    def column_names(self) -> ColumnNames:
        """Returns the names of all columns but latents and keys, by their types."""
        texts = list[str]()
        numbers = list[str]()
        integers = list[str]()
        empty = list[str]()
        others = dict[str, str]()
        for field in self._arrow:
            if field.name in (self._name, self.key_column):
                continue
            # A writer that has seen only nulls gives the column no other type.
            if pa.types.is_null(field.type):
                empty.append(field.name)
            elif pa.types.is_integer(field.type):
                integers.append(field.name)
                numbers.append(field.name)
            elif pa.types.is_floating(field.type):
                numbers.append(field.name)
            elif arrow_texts.holds_text(field.type):
                texts.append(field.name)
            else:
                others[field.name] = str(field.type)
        return ColumnNames(
            tuple(texts), tuple(numbers), find_labels(integers), tuple(empty), others
        )

    def text_column(self, name: str) -> pa.Array:
        """Reads texts, large binary `(N,)` that need not be UTF-8; null for a row without one."""
        # Together they may take more bytes than Arrow's shorter types can have.
        texts = [arrow_texts.read_texts(chunk) for chunk in self._read_column(name).chunks]
        return pa.concat_arrays(texts)

    def number_column(self, name: str) -> pa.Array:
        """Reads labels or other numbers, `(N,)`; null for a row without one."""
        return self._read_column(name).combine_chunks()

    def _read_column(self, name: str) -> pa.ChunkedArray:
        """Reads a whole column; raises a ValueError unless there is one of this name."""
        self._check_column(name)
        with keyed_parquet.naming_damage(self.path):
            return self._parquet.read([name], use_threads=False).column(0)

    def _check_column(self, name: str) -> None:
        """Raises a ValueError unless exactly one column has this name."""
        self._check_has(name, self._arrow.names)
        count = self._arrow.names.count(name)
        if count > 1:
            raise ValueError(
                f"{self.path}: has {count} columns '{name}', expected one. "
                f'{_REWRITE} with different names.'
            )

    def _only_latents(self) -> str:
        """Returns the only column that seems to hold latents; raises a ValueError for others."""
        names = list[str]()
        for field in self._arrow:
            # As with MicroDiT, there may also be latents of captions.
            is_of_text = re.search('caption|text', field.name)
            if 'latent' in field.name and not is_of_text and _can_be_latents(field.type):
                names.append(field.name)
        if len(names) > 1:
            raise ValueError(
                f'{self.path}: has latents in the columns {names}, expected one; choose it with '
                f"latents_from, e.g. '{names[0]}'."
            )
        if not names:
            kinds = ', '.join(f'{field.name} {field.type}' for field in self._arrow)
            raise ValueError(
                f"{self.path}: has no column 'latents' or 'latent' of lists of numbers or of "
                f'bytes; its columns are {kinds}. Set latents_from to the name of the '
                'latents, and captions to this file if it holds captions. '
                f'{how_to_encode(os.path.dirname(self.path))}.'
            )
        return names[0]

    def _check_groups(self) -> None:
        """Raises a ValueError for row groups that take too long to read from their beginnings."""
        with keyed_parquet.naming_damage(self.path):
            # Before the metadata of columns, whose reading would abort the process.
            keyed_parquet.check_not_encrypted(self._parquet, [self._name])
            chunks = keyed_parquet.column_chunks(self._parquet.metadata, self._name)
        for group, chunk in enumerate(chunks):
            # Numbers that repeat take less in the file than in memory, where each has 2 bytes.
            nbytes = max(chunk.total_uncompressed_size, 2 * chunk.num_values)
            if nbytes > _MAX_GROUP_NBYTES:
                num_rows = self._parquet.metadata.row_group(group).num_rows
                raise ValueError(
                    f'{self.path}: row group {group} has {format_count(num_rows, "row")} with '
                    f"{nbytes:,} bytes of '{self._name}', expected at most {_MAX_GROUP_NBYTES:,}. "
                    f'{_REWRITE} with smaller row groups, e.g. row_group_size=1000.'
                )

    def _find_shape(self) -> None:
        """Sets dtype and shape by the type of the column, its first row and the config."""
        with keyed_parquet.naming_damage(self.path):
            _, values = _ColumnRows(self._parquet, self._name, rows_at_once=1).find(0)
        self._list_sizes: list[int] = []  # of a row, from the outermost list to the innermost
        # From a list to the first value in it, down to a number. Later rows must be as this one.
        while _is_list(values.type):
            self._check_nulls(values, 0, 1)
            size = int(pc.list_value_length(values)[0].as_py())
            self._list_sizes.append(size)
            values = values.flatten()[:1]
            if not size:
                raise ValueError(
                    f'{self.path}: {self._name} of row 0 has a list without numbers, expected '
                    f'latents. {_REWRITE} without such rows.'
                )
        self._check_nulls(values, 0, 1)
        dtype = _FLOATS.get(values.type, '')
        is_bytes = _is_bytes(values.type) and not self._list_sizes
        if not dtype and not is_bytes:
            raise ValueError(
                f'{self.path}: {self._name} is {self._arrow.field(self._name).type}, expected '
                'lists of float16 or float32, nested as (C, H, W) or flat, or bytes. '
                f'{_REWRITE} with such a column, or set latents_from to another one.'
            )
        if len(self._list_sizes) > 1:
            self._set_kind(self._name, dtype, tuple(self._list_sizes))
            return
        # Flat lists and bytes do not say their shape, and bytes do not say their dtype.
        expected = self._latents_from
        if not expected.shape:
            if is_bytes:
                first_row = f'{len(values[0].as_buffer()):,} bytes'
            else:
                first_row = f'{self._list_sizes[0]:,} numbers'
            raise ValueError(
                f'{self.path}: does not say the shape of {self._name}, whose first row has '
                f"{first_row}. Set latents_from, e.g. '{self._name}:{dtype or 'float16'}:4,32,32'."
            )
        self._set_kind(self._name, dtype or expected.dtype, expected.shape)
        # All rows must have the size of the shape, also the first one.
        if self._list_sizes:
            self._list_sizes = [math.prod(self.shape)]

    def _read(self, rows: np.ndarray, raw: torch.Tensor) -> None:
        """Reads rows into a tensor `(len(rows), *shape)`, batch by batch."""
        out = bytes_of(raw)
        num_read = 0
        while num_read < len(rows):
            next_row = int(rows[num_read])
            self._hold(next_row)
            places = rows[num_read:] - self._held_begin
            is_held = (places >= 0) & (places < len(self._held))
            # The rows up to the first that another batch holds.
            count = len(places)
            if not is_held.all():
                count = int(is_held.argmin())
            out[num_read : num_read + count] = self._held[places[:count]]
            num_read += count

    def _hold(self, row: int) -> None:
        """Reads the bytes of a batch that holds a row, unless they have just been read."""
        if 0 <= row - self._held_begin < len(self._held):
            return
        with keyed_parquet.naming_damage(self.path):
            begin, batch = self._rows.find(row)
            self._held = self._bytes_of_batch(batch, begin)
            self._held_begin = begin

    def _bytes_of_batch(self, values: pa.Array, begin: int) -> np.ndarray:
        """Returns the bytes of some rows, uint8 `(n, row_nbytes)`; all must have the same sizes."""
        num_rows = len(values)
        self._check_nulls(values, begin, 1)
        # Without nulls and with equal sizes, the values lie one after the other in Arrow's buffer.
        if _is_bytes(values.type):
            self._check_sizes(pc.binary_length(values), begin, 1, self.row_nbytes, 'bytes')
            return _join_bytes(values).reshape(num_rows, -1)
        per_row = 1  # lists of the level in a row
        for size in self._list_sizes:
            self._check_nulls(values, begin, per_row)
            self._check_sizes(
                pc.list_value_length(values), begin, per_row, size, 'values in a list'
            )
            values = values.flatten()
            per_row *= size
        self._check_nulls(values, begin, per_row)
        return values.to_numpy().view(np.uint8).reshape(num_rows, -1)

    def _check_nulls(self, values: pa.Array, begin: int, per_row: int) -> None:
        """Raises a ValueError if values are null; row `begin` has the first `per_row` of them."""
        if not values.null_count:
            return
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        # The first null is the example.
        index = int(is_null.argmax())
        row = begin + index // per_row
        what = 'null' if per_row == 1 else 'a list with nulls'
        raise ValueError(
            f'{self.path}: {self._name} of row {row} is {what}, expected numbers in every row. '
            f'{_REWRITE} without such rows.'
        )

    def _check_sizes(
        self, sizes: pa.Array, begin: int, per_row: int, expected: int, unit: str
    ) -> None:
        """Raises a ValueError if sizes differ; row `begin` has the first `per_row` of them."""
        is_other = sizes.to_numpy() != expected
        if is_other.any():
            index = int(is_other.argmax())
            row = begin + index // per_row
            raise ValueError(
                f'{self.path}: {self._name} of row {row} has '
                f'{sizes[index].as_py():,} {unit}, expected {expected:,} for {self.shape} of '
                f'{self.dtype}. {_REWRITE} with rows of one shape, or set latents_from.'
            )


class _ColumnRows:
    """The values of a column by the numbers of rows, of which a batch is in memory."""

    def __init__(self, parquet: pq.ParquetFile, column: str, rows_at_once: int):
        self._parquet = parquet
        self._column = column
        self._rows_at_once = rows_at_once
        self._group_ends = np.cumsum(_group_sizes(parquet.metadata))
        self._batches: Iterator[tuple[int, pa.Array]] = iter(())
        self._next_row = 0  # that `_batches` gives next
        self._group_end = 0

    def find(self, row: int) -> tuple[int, pa.Array]:
        """Returns a batch that holds a row, after the number of its first row.

        To go back, or to another row group, reads the row group from its beginning.
        """
        if not self._next_row <= row < self._group_end:
            group = int(np.searchsorted(self._group_ends, row, side='right'))
            self._start_group(group)
        # Skips the batches before.
        for begin, values in self._batches:
            self._next_row = begin + len(values)
            if row < self._next_row:
                return begin, values
        raise ValueError(f'it ends before row {row:,}')

    def _start_group(self, group: int) -> None:
        """Goes to the first row of a row group."""
        self._group_end = int(self._group_ends[group])
        self._next_row = self._group_end - self._parquet.metadata.row_group(group).num_rows
        self._batches = self._read_group(group, self._next_row)

    def _read_group(self, group: int, begin: int) -> Iterator[tuple[int, pa.Array]]:
        """Yields the batches of a row group, whose first row is `begin`, with their first rows."""
        for batch in self._parquet.iter_batches(
            self._rows_at_once, row_groups=[group], columns=[self._column], use_threads=False
        ):
            values = batch.column(0)
            # Of the library datasets, where it is imported.
            if isinstance(values, pa.ExtensionArray):
                values = values.storage
            yield begin, values
            begin += len(batch)


def _group_sizes(metadata: pq.FileMetaData) -> list[int]:
    """Returns the number of rows of each row group."""
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _can_be_latents(kind: pa.DataType) -> bool:
    """Whether values of a type can be latents: bytes, or floats in any lists."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while _is_list(kind):
        kind = kind.value_type
    return pa.types.is_floating(kind) or _is_bytes(kind)


def _is_list(kind: pa.DataType) -> bool:
    """Whether a type is that of lists, of one size or not."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list or pa.types.is_fixed_size_list(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether a type is that of bytes, of one size or not."""
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return is_binary or pa.types.is_fixed_size_binary(kind)


def _join_bytes(values: pa.Array) -> np.ndarray:
    """Returns the bytes of all values of a column of bytes, without nulls, uint8."""
    if pa.types.is_fixed_size_binary(values.type):
        width = values.type.byte_width
        _, data = values.buffers()
        return np.frombuffer(data, np.uint8, len(values) * width, values.offset * width)
    # The values lie one after the other between the first and the last offset.
    _, offsets, data = values.cast(pa.large_binary()).buffers()
    # An array may be a part of its buffers, whose offsets have 8 bytes each.
    bounds = np.frombuffer(offsets, np.int64, 1 + len(values), 8 * values.offset)
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
