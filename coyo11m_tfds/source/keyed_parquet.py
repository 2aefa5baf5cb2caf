"""Reading one column of a Parquet file together with its keys, and finding rows by key.

    for keys, values in keyed_parquet.batches('coyo11m-meta.parquet', 'caption_llava'):
        ...                                             # int64 (n,), pyarrow.Array (n,)

    order, duplicates = keyed_parquet.order_by_key(keys)   # the first row of each key
    places = keyed_parquet.find(keys[order], wanted)

Reading in batches takes 150 MB with all libraries, however large the file and its row groups, and
however often a text occurs, if it is read as a dictionary. Where `name` is given, it stands for the
file in messages: a path may be that of a copy.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.process.progress import Progress

# What is read at once: this many rows, or fewer if these have more bytes.
ROWS_AT_ONCE = 16384
BYTES_AT_ONCE = 16 << 20

_READ_BYTES = 1 << 20

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


def open_with_column(
    path: str, column: str, name: str = '', *, as_dictionary: bool = False
) -> pq.ParquetFile:
    """Opens a Parquet file that must hold `column` and an integer `key`.

    pandas writes a named index as an ordinary column, so both kinds of key look the same here; but
    an index of evenly spaced numbers it only describes in the metadata, which is understood too.
    With `as_dictionary`, a column of text is read as `pa.DictionaryArray`.

    Raises:
        ValueError: it is no Parquet file, or lacks a column or any row.
    """
    name = name or path
    with naming_damage(name):
        # Neither mapped nor fetched in whole column chunks: both would fill memory with as much of
        # the file as has been read (4.8 GB of 5.2 GB, against 0.15 GB), and be no faster.
        file = pq.ParquetFile(
            path,
            memory_map=False,
            pre_buffer=False,
            buffer_size=_READ_BYTES,
            read_dictionary=[column] if as_dictionary else None,
            page_checksum_verification=True,  # of the pages that have one
        )
        names, key_range = file.schema_arrow.names, _key_range(file)
    in_metadata = [schema.PARQUET_KEY] if key_range else []
    for wanted in (schema.PARQUET_KEY, column):
        if wanted not in names + in_metadata:
            raise ValueError(
                f"{name}: has no column '{wanted}'; its columns are {', '.join(names)}."
            )
    if not in_metadata:
        kind = file.schema_arrow.field(schema.PARQUET_KEY).type
        if not pa.types.is_integer(kind):
            raise ValueError(f"{name}: column '{schema.PARQUET_KEY}' is {kind}, expected int64.")
    if file.metadata.num_rows == 0:
        raise ValueError(f'{name}: has no rows.')
    if key_range and len(key_range) != file.metadata.num_rows:
        raise ValueError(
            f'{name}: has {file.metadata.num_rows:,} rows, but its metadata describes '
            f'{len(key_range):,} keys. Write it again.'
        )
    return file


def batches(
    path: str,
    column: str,
    name: str = '',
    *,
    row_bytes: int = 0,
    as_dictionary: bool = False,
    quiet: bool = False,
) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """Yields `(keys int64 (n,), values of the column (n,))` in file order, a few MB at a time.

    Shows its progress in the log or on the terminal.

    Args:
        path: of the file.
        column: to read beside the keys.
        name: what errors call the file.
        row_bytes: of a value in memory, where they are all of one size.
        as_dictionary: as for `open_with_column`.
        quiet: show nothing, as for one of many files.

    Raises:
        ValueError: as `open_with_column`; a key is null; or a page of the file is damaged.
    """
    name = name or path
    with (
        naming_damage(name),
        open_with_column(path, column, name, as_dictionary=as_dictionary) as file,
        _progress(f"Reading '{column}' of {name}", file.metadata.num_rows, quiet) as count,
    ):
        row_bytes = max(1, row_bytes, *_mean_bytes(file, column))
        rows_at_once = max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // row_bytes))
        key_range = _key_range(file)
        columns = [column] if key_range else [schema.PARQUET_KEY, column]
        done = 0
        # Threads would take a column each, and one of the two takes hardly any time.
        for batch in file.iter_batches(rows_at_once, columns=columns, use_threads=False):
            if key_range:
                keys = np.array(key_range[done : done + len(batch)], np.int64)
            else:
                keys = _to_int64(batch.column(schema.PARQUET_KEY), name)
            yield keys, batch.column(column)
            done += len(batch)
            count(len(batch))
        if done != file.metadata.num_rows:
            raise ValueError(f'{done:,} of {file.metadata.num_rows:,} rows are there')


@contextlib.contextmanager
def _progress(what: str, num_rows: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    if quiet:
        yield lambda num_rows: None
        return
    with Progress(what, num_rows, 'rows') as progress:
        yield progress.add


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Turns whatever Arrow raises for a damaged file into a ValueError with the file's `name`.

    Errors that name the file already pass unchanged, and so do those of the disk.
    """
    try:
        yield
    except _OF_DAMAGE as error:
        is_named = type(error) is ValueError and str(error).startswith(f'{name}: ')
        is_of_disk = isinstance(error, OSError) and error.errno is not None
        if is_named or is_of_disk:
            raise
        what = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        raise ValueError(
            f'{name}: is damaged or not a Parquet file ({what}). Copy or download it again.'
        ) from error


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


def find(sorted_keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Finds each wanted key.

    Args:
        sorted_keys: int64 `(n,)`, ascending, not empty.
        wanted: int64 `(m,)`, in any order.

    Returns:
        int64 `(m,)`: the place of each wanted key in `sorted_keys`, -1 where there is none.
    """
    # Neighbours in order of keys share most steps of the search, and those are in the cache: of
    # 11.4 million keys a million are found in 0.12 s, without sorting them first in 1.4 s.
    order = np.argsort(wanted)
    ascending = wanted[order]
    places = np.minimum(np.searchsorted(sorted_keys, ascending), len(sorted_keys) - 1)
    found = np.empty(len(wanted), np.int64)
    found[order] = np.where(sorted_keys[places] == ascending, places, -1)
    return found


def check_mean_bytes(file: pq.ParquetFile, column: str, limit: int, name: str) -> None:
    """Raises a ValueError if the values of a column have more than `limit` bytes on average."""
    num_rows = file.metadata.num_rows
    mean = sum(_uncompressed_bytes(file, column)) // num_rows
    if mean > limit:
        raise ValueError(
            f"{name}: column '{column}' has {mean:,} bytes a row, expected at most {limit:,} as "
            'of captions. Choose another column, or leave out what is too long.'
        )


def _mean_bytes(file: pq.ParquetFile, column: str) -> list[int]:
    """Bytes a row of a column in each row group, uncompressed but encoded."""
    return [
        size // max(1, file.metadata.row_group(number).num_rows)
        for number, size in enumerate(_uncompressed_bytes(file, column))
    ]


def _uncompressed_bytes(file: pq.ParquetFile, column: str) -> list[int]:
    """Bytes of a column in each row group, uncompressed."""
    if column not in file.schema_arrow.names:  # keys that the metadata describes
        return []
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    index = next(i for i, path in enumerate(paths) if f'{path}.'.startswith(f'{column}.'))
    groups = range(file.metadata.num_row_groups)
    return [file.metadata.row_group(g).column(index).total_uncompressed_size for g in groups]


def _key_range(file: pq.ParquetFile) -> range | None:
    """The keys, if pandas wrote them as a description of a `RangeIndex` instead of a column."""
    for index in (file.schema_arrow.pandas_metadata or {}).get('index_columns', []):
        if isinstance(index, dict) and index.get('name') == schema.PARQUET_KEY:
            return range(index['start'], index['stop'], index['step'])
    return None


def _to_int64(keys: pa.Array, name: str) -> np.ndarray:
    if keys.null_count:
        raise ValueError(f"{name}: column '{schema.PARQUET_KEY}' has nulls.")
    try:
        return keys.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{name}: column '{schema.PARQUET_KEY}' does not fit int64 ({error})."
        ) from None
