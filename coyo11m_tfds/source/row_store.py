"""Numbers of Parquet files as a matrix on disk that is looked up by key.

    store = row_store.prepare_store(files, 'aesthetic', cache_dir=folder)
    rows = store.find(keys)             # -1: the key has no row
    store.read(rows)                    # float32 (n, *store.shape)

Each file has a column `key`, and one of integers, floats or fixed-size lists of these, which are
kept as they are. A row with a null has no value: it is left out.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from coyo11m_tfds import columns
from coyo11m_tfds.source import keyed_parquet, matrix_store
from coyo11m_tfds.source.matrix_store import Hold, MatrixStore
from coyo11m_tfds.storage.source_files import SourceFile


class RowStore(MatrixStore):
    """A store that `prepare_store` made; see `MatrixStore`."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Opens a store; raises `keyed_store.UnusableStoreError` as `KeyedStore` does."""
        super().__init__(folder)
        self.open_matrix(self.facts['dtype'], self.facts['shape'])


def prepare_store(
    files: Sequence[SourceFile],
    column: str,
    *,
    cache_dir: str | os.PathLike[str],
    hold: Hold = matrix_store.own_path,
) -> RowStore:
    """Opens the store of a column that is in `cache_dir`, or builds it there.

    Args:
        files: whose rows it has, in their order.
        column: to read, beside `key`.
        cache_dir: local folder; made where there is none. See `keyed_store.prepare`.
        hold: gives the path of a file; called only if that has to be read.

    Raises:
        ValueError: see `keyed_parquet`; the column holds something else or nothing but nulls, files
            differ in what it holds, or a key is a duplicate.
        OSError: the store cannot be written.
    """

    def read(facts: dict[str, Any]) -> matrix_store.Rows:
        return _read_rows(files, column, hold, facts)

    # Held open until the store has been opened as what it is, so that no other process removes it.
    prepared = matrix_store.prepare('rows', files, column, cache_dir, read)
    return RowStore(prepared.folder)


def _read_rows(
    files: Sequence[SourceFile], column: str, hold: Hold, facts: dict[str, Any]
) -> matrix_store.Rows:
    count = 0
    for file in files:
        with hold(file) as path:
            found = _describe(path, column, file.path)
            facts.update(facts or found)
            if found != facts:
                raise ValueError(
                    f"{file.path}: its column '{column}' is {found}, expected {facts} as of "
                    f'{files[0].path}. Make it again.'
                )
            width = math.prod(found['shape'])
            for keys, values in keyed_parquet.batches(
                path, column, file.path, row_bytes=16 * width
            ):
                rows, has_value = _to_numpy(values, width)
                count += len(rows)
                yield keys[has_value], rows
    if not count:
        raise ValueError(f"{files[0].path}: column '{column}' is null in every row.")


def _describe(path: str, column: str, name: str) -> dict[str, Any]:
    """The `dtype` and the `shape` of the rows of a file."""
    with (
        keyed_parquet.naming_damage(name),
        keyed_parquet.open_with_column(path, column, name) as file,
    ):
        kind = file.schema_arrow.field(column).type
    is_list = pa.types.is_fixed_size_list(kind)
    number, shape = (kind.value_type, [kind.list_size]) if is_list else (kind, [])
    is_number = pa.types.is_integer(number) or pa.types.is_floating(number)
    nbytes = number.bit_width // 8 * math.prod(shape) if is_number else 0
    if not 1 <= nbytes <= columns.MAX_ROW_NBYTES:
        raise ValueError(
            f"{name}: column '{column}' is {kind}, expected integers, floats, or lists of a fixed "
            f'size of these, at most {columns.MAX_ROW_NBYTES:,} bytes a row.'
        )
    return {'dtype': np.dtype(number.to_pandas_dtype()).name, 'shape': shape}


def _to_numpy(values: pa.Array, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of rows without nulls, `(m, width)`, and which rows these are, bool `(n,)`."""
    has_value = values.is_valid().to_numpy(zero_copy_only=False, writable=True)
    values = values.drop_null()
    numbers = values.flatten() if pa.types.is_fixed_size_list(values.type) else values
    if numbers.null_count:
        whole = numbers.is_valid().to_numpy(zero_copy_only=False).reshape(-1, width).all(axis=1)
        has_value[has_value] = whole
        numbers = numbers.filter(pa.array(np.repeat(whole, width)))
    return numbers.to_numpy(zero_copy_only=False).reshape(-1, width), has_value
