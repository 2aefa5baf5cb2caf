"""Reading one column of a Parquet file together with its keys, and finding rows by key.

    for keys, values in keyed_parquet.batches('coyo11m-meta.parquet', 'caption_llava'):
        ...                                             # int64 (n,), pyarrow.Array (n,)

    order = keyed_parquet.order_by_key(keys, path)      # checks that no key comes twice
    rows = keyed_parquet.find(keys[order], order, wanted)

What comes batch by batch takes a few MB, however large the file.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema

ROWS_AT_ONCE = 16384


def open_with_column(path: str, column: str) -> pq.ParquetFile:
    """Opens a Parquet file that must hold `column` and an integer `key`.

    pandas writes a named index as an ordinary column, so both kinds of key look the same here; but
    an index of evenly spaced numbers it only describes in the metadata, which is understood too.

    Raises:
        ValueError: it is no Parquet file, or lacks a column or any row.
    """
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f'{path}: is damaged or not a Parquet file ({error}). Copy or download it again.'
        ) from None
    names = file.schema_arrow.names
    in_metadata = [schema.PARQUET_KEY] if _key_range(file) else []
    for name in (schema.PARQUET_KEY, column):
        if name not in names + in_metadata:
            raise ValueError(f"{path}: has no column '{name}'; its columns are {', '.join(names)}.")
    if not in_metadata:
        kind = file.schema_arrow.field(schema.PARQUET_KEY).type
        if not pa.types.is_integer(kind):
            raise ValueError(f"{path}: column '{schema.PARQUET_KEY}' is {kind}, expected int64.")
    if file.metadata.num_rows == 0:
        raise ValueError(f'{path}: has no rows.')
    return file


def batches(path: str, column: str) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """Yields `(keys int64 (n,), values of the column (n,))` in file order, a few MB at a time.

    Raises:
        ValueError: as `open_with_column`; a key is null; or a page of the file is damaged.
    """
    with open_with_column(path, column) as file:
        key_range = _key_range(file)
        columns = [column] if key_range else [schema.PARQUET_KEY, column]
        done = 0
        try:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                if key_range:
                    keys = np.array(key_range[done : done + len(batch)], np.int64)
                else:
                    keys = _to_int64(batch.column(schema.PARQUET_KEY), path)
                yield keys, batch.column(column)
                done += len(batch)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f'{path}: cannot be read, probably damaged ({error}).') from error


def order_by_key(keys: np.ndarray, path: str) -> np.ndarray:
    """Returns the order that sorts `keys`, int64 `(n,)`.

    Raises:
        ValueError: a key occurs more than once.
    """
    order = np.argsort(keys, kind='stable')
    sorted_keys = keys[order]
    repeats = np.flatnonzero(sorted_keys[1:] == sorted_keys[:-1])
    if repeats.size:
        raise ValueError(
            f'{path}: {repeats.size} rows repeat the key of another, e.g. key '
            f'{sorted_keys[repeats[0]]}; expected one row a key. Remove the repeated rows.'
        )
    return order


def find(sorted_keys: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Finds each wanted key.

    Args:
        sorted_keys: int64 `(n,)`, ascending, not empty.
        order: int64 `(n,)`, the row of each sorted key.
        wanted: int64 `(m,)`.

    Returns:
        int64 `(m,)`: the row of each wanted key, -1 where there is none.
    """
    places = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return np.where(sorted_keys[places] == wanted, order[places], -1)


def _key_range(file: pq.ParquetFile) -> range | None:
    """The keys, if pandas wrote them as a description of a `RangeIndex` instead of a column."""
    for index in (file.schema_arrow.pandas_metadata or {}).get('index_columns', []):
        if isinstance(index, dict) and index.get('name') == schema.PARQUET_KEY:
            return range(index['start'], index['stop'], index['step'])
    return None


def _to_int64(keys: pa.Array, path: str) -> np.ndarray:
    if keys.null_count:
        raise ValueError(f"{path}: column '{schema.PARQUET_KEY}' has nulls.")
    try:
        return keys.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path}: column '{schema.PARQUET_KEY}' does not fit int64 ({error})."
        ) from None
