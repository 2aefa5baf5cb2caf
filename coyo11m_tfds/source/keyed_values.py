"""Values by key, sorted by the place, usually the number of a record, where a program needs them.

Runs are sorted in memory, kept on the disk, and merged into one Parquet file of small row groups.
On one core, 11 million captions of 200 to 600 bytes take 56 s and at most 1.2 GB with reading and
checking; 6 million of 2 KB take 65 s and 1.1 GB.
"""

import contextlib
import errno
import functools
import glob
import itertools
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import file_state, json_digest, locks

# Of the files; another number has them made again.
_FORMAT = 4
_SCHEMA = pa.schema([('place', pa.int64()), ('size', pa.int32()), ('value', pa.large_binary())])
_ROWS = 'rows.parquet'
_RECORD = 'record.json'
# Raised for a folder in the place of a file, and for a file in that of a folder.
_WRONG_KINDS = IsADirectoryError, NotADirectoryError
# Sorted at a time, in about four times as much memory.
_RUN_BYTES = 128 << 20
# Of a run; one of each run is in memory while all are merged.
_PIECES = 128


class KeyedValues:
    """Values in the order of their places, with facts about them, as JSON."""

    def __init__(self, folder: str):
        """Opens what `KeyedValuesWriter` made; raises a ValueError for a damaged record."""
        self.folder = folder
        self.facts: dict[str, Any] = _read_values_record(folder)['facts']
        self._file = pq.ParquetFile(os.path.join(folder, _ROWS), pre_buffer=False)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Places that have a value, distinct and ascending, int64 `(n,)`."""
        return self._file.read(['place']).column(0).to_numpy()

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Size of each value in bytes, or a code in place of a value, int32 `(n,)`."""
        return self._file.read(['size']).column(0).to_numpy()

    def read(self, places: np.ndarray) -> list[bytes]:
        """Returns the values of some places, int64 `(m,)`, ascending; all must have a value."""
        if not len(places):
            return []
        # Only the row groups that hold these places: the last that begin at or before them.
        ends = places[[0, -1]]
        first, last = np.searchsorted(self._first_places, ends, side='right') - 1
        groups = self._file.read_row_groups(range(first, last + 1), ['place', 'value'])
        places_in_groups = groups.column('place').to_numpy()
        rows = np.searchsorted(places_in_groups, places)
        return groups.column('value').take(rows).to_pylist()

    def read_array(self, places: np.ndarray) -> np.ndarray:
        """Like `read`, for values that are numbers of one `dtype` and `shape`: `(m, *shape)`."""
        values = np.frombuffer(b''.join(self.read(places)), self.facts['dtype'])
        return values.reshape(len(places), *self.facts['shape'])

    @functools.cached_property
    def _first_places(self) -> np.ndarray:
        """The first place of each row group."""
        metadata = self._file.metadata
        first_places = []
        for number in range(metadata.num_row_groups):
            first_places.append(metadata.row_group(number).column(0).statistics.min)
        return np.array(first_places, np.int64)


class KeyedValuesWriter:
    """Sorts values into a new folder, about `run_bytes` bytes at a time."""

    def __init__(self, folder: str, *, run_bytes: int = _RUN_BYTES):
        os.mkdir(folder)
        self._folder = folder
        self._run_bytes = run_bytes
        self._piece_bytes = max(1, run_bytes // _PIECES)
        self._rows: list[pa.Table] = []  # of the next run, in no order
        self._num_bytes = 0
        self._runs: list[str] = []

    def add(self, places: np.ndarray, sizes: np.ndarray, values: pa.Array) -> None:
        """Adds values, or a dictionary of them; a size is in bytes, or a code <= 0 for null."""
        for rows in _pieces(places, sizes, values, self._piece_bytes):
            self._rows.append(rows)
            self._num_bytes += rows.nbytes
            if self._num_bytes >= self._run_bytes:
                self._write_run()

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Merges all runs, and writes the facts."""
        if self._rows:
            self._write_run()
        path = os.path.join(self._folder, _ROWS)
        # `KeyedValues` finds the row group of a place by the statistics.
        options: dict[str, Any] = {'use_dictionary': False, 'write_statistics': ['place']}
        with file_state.naming(path), pq.ParquetWriter(path, _SCHEMA, **options) as file:
            for rows in _row_groups(_merge_runs(self._runs), self._piece_bytes):
                file.write_table(rows)
        for run in self._runs:
            os.remove(run)
        # Last, because a folder without a record counts as damaged.
        record = {'state': file_state.compute_state(path), 'facts': dict(facts)}
        with open(os.path.join(self._folder, _RECORD), 'wb') as file:
            file.write(json_digest.seal(record))

    def _write_run(self) -> None:
        """Sorts what has been added since the last run, and writes it to the disk."""
        run = os.path.join(self._folder, f'run-{len(self._runs)}')
        rows = pa.concat_tables(self._rows).sort_by('place')
        self._rows = []
        self._num_bytes = 0
        # Compressed, because runs take as much room on the disk as all values.
        options = pa.ipc.IpcWriteOptions(compression='lz4')
        with (
            file_state.naming(run),
            pa.OSFile(run, 'wb') as file,
            pa.ipc.new_stream(file, _SCHEMA, options=options) as writer,
        ):
            rows_in_piece = -(-len(rows) // _PIECES)  # rounded up
            writer.write_table(rows, max_chunksize=rows_in_piece)
        self._runs.append(run)


def open_or_make(cache_dir: str, origin: Any, make_folder: Callable[[str], None]) -> KeyedValues:
    """Opens the values in `cache_dir` that `make_folder` makes of an `origin`, which is JSON.

    `remove_unused` keeps them as long as the result exists.
    """
    folder = os.path.join(cache_dir, f'joined-{json_digest.sha256([_FORMAT, origin])[:32]}')
    # In a loop: another process may remove what has just been made, before it is locked.
    while not (values := _open_whole(folder)):
        # Made under another name, so that a folder under the final name is always complete.
        with locks.temporary_folder(cache_dir, 'joining-') as temporary:
            new_folder = os.path.join(temporary, 'made')
            make_folder(new_folder)
            try:
                os.rename(new_folder, folder)
            except OSError as error:
                # Unless another process was faster, and made the same.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    return values


def remove_unused(cache_dir: str) -> None:
    """Removes the values of other builds from `cache_dir`, except those that a process has open."""
    # Of the names of `open_or_make`: nobody else's folder is removed.
    pattern = os.path.join(glob.escape(cache_dir), f'joined-{"[0-9a-f]" * 32}')
    for folder in glob.glob(pattern):
        # Without waiting: whoever holds the lock needs the values.
        with (
            contextlib.suppress(BlockingIOError, FileNotFoundError, *_WRONG_KINDS),
            locks.FileLock(os.path.join(folder, _RECORD), wait=False),
        ):
            shutil.rmtree(folder)


def order_by_key(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first row of each of the keys, by key, and the keys of other rows, ascending."""
    # Stable, so that the first of equal keys is the first row.
    order = np.argsort(keys, kind='stable')
    sorted_keys = keys[order]
    repeats = np.zeros(len(keys), bool)
    # Equal keys follow each other; the first of them repeats none.
    np.equal(sorted_keys[1:], sorted_keys[:-1], out=repeats[1:])
    return order[~repeats], sorted_keys[repeats]


def check_unique_keys(
    count: int, keys: Sequence[int] | np.ndarray, name: str, remedy: str = ''
) -> None:
    """Raises a ValueError if `count` > 0 rows repeat one of `keys`; `remedy` is one more."""
    if count:
        rows = format_count(count, 'row repeats', 'rows repeat')
        raise ValueError(
            f'{name}: {rows} the key of another, e.g. key {keys[0]}; expected one row a key. '
            f'Remove the duplicates{remedy}.'
        )


class KeyPlaces:
    """Places of keys: i for the i-th requested key; with None, each key is its own place."""

    def __init__(self, requested_keys: np.ndarray | None):
        self._requested_keys = requested_keys
        if requested_keys is not None:
            self._order = np.argsort(requested_keys)
            self._ascending = requested_keys[self._order]

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places of keys, int64 `(n,)`, and which keys are requested, bool `(n,)`."""
        if self._requested_keys is None:
            return keys, np.ones(len(keys), bool)
        if not len(self._requested_keys):
            return keys, np.zeros(len(keys), bool)
        # Neighbours in order of keys share most steps of the search, and those are in the cache: a
        # million of 11.4 million keys take 0.12 s, and 1.4 s without sorting them first.
        by_key = np.argsort(keys)
        ranks = np.empty(len(keys), np.int64)
        ranks[by_key] = np.searchsorted(self._ascending, keys[by_key])
        # Of a key beyond the last requested one, which the comparison then leaves out.
        ranks = np.minimum(ranks, len(self._ascending) - 1)
        return self._order[ranks], self._ascending[ranks] == keys


def _pieces(
    places: np.ndarray, sizes: np.ndarray, values: pa.Array, num_bytes: int
) -> Iterator[pa.Table]:
    """Yields all rows in tables of about `num_bytes`."""
    ends = np.cumsum(np.maximum(sizes, 0), dtype=np.int64)
    # A piece begins where the bytes so far pass the next multiple of `num_bytes`.
    num_before = ends // num_bytes
    cuts = np.flatnonzero(np.diff(num_before)) + 1
    bounds = [0]
    bounds += cuts.tolist()
    bounds.append(len(sizes))
    for begin, end in itertools.pairwise(bounds):
        # Without rows, both ends are 0.
        if begin == end:
            continue
        piece = values[begin:end]
        # Only now: without its dictionary, a whole batch may not fit into memory.
        if pa.types.is_dictionary(piece.type):
            piece = piece.dictionary_decode()
        columns = [places[begin:end], sizes[begin:end], piece.cast(pa.large_binary())]
        yield pa.table(columns, schema=_SCHEMA)


def _row_groups(tables: Iterable[pa.Table], num_bytes: int) -> Iterator[pa.Table]:
    """Joins tables to larger ones of at least `num_bytes`, except the last."""
    # Small groups would take long to read, because each has a header and pages of its own.
    group: list[pa.Table] = []
    size = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        if size >= num_bytes:
            yield pa.concat_tables(group)
            group = []
            size = 0
    if group:
        yield pa.concat_tables(group)


def _read_run(path: str) -> Iterator[pa.Table]:
    """Yields the pieces of a run, of which one at a time is in memory."""
    with pa.OSFile(path) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield pa.Table.from_batches([batch])


def _merge_runs(paths: Sequence[str]) -> Iterator[pa.Table]:
    """Yields the rows of sorted runs in the order of all places, a table at a time."""
    runs = [_read_run(path) for path in paths]
    pieces = [next(run) for run in runs]
    while pieces:
        places = [rows.column('place').to_numpy() for rows in pieces]
        # No run has a later piece that begins before the least of these.
        last_place = min(piece_places[-1] for piece_places in places)
        heads = []
        next_runs = []
        next_pieces = []
        for run, rows, piece_places in zip(runs, pieces, places, strict=True):
            count = int(np.searchsorted(piece_places, last_place, side='right'))
            heads.append(rows[:count])
            tail = rows[count:] if count < len(rows) else next(run, None)
            # A run that has given all of its rows takes part no more.
            if tail is not None:
                next_runs.append(run)
                next_pieces.append(tail)
        # Sorted again: the heads of different runs overlap.
        yield pa.concat_tables(heads).sort_by('place')
        runs = next_runs
        pieces = next_pieces


def _open_whole(folder: str) -> KeyedValues | None:
    """Opens values and holds their lock; removes damaged ones. Returns None if there are none."""
    # Before anything is read: what has no lock, `remove_unused` of another process may remove.
    try:
        lock = locks.FileLock(os.path.join(folder, _RECORD), shared=True)
    except FileNotFoundError:
        return None
    except _WRONG_KINDS as error:
        # Nobody can have locked it.
        _remove_damaged(folder, error)
        return None
    try:
        state = file_state.compute_state(os.path.join(folder, _ROWS))
        if list(state) != _read_values_record(folder)['state']:
            raise ValueError(f'{_ROWS} has {state}')
        values = KeyedValues(folder)
    except (ValueError, LookupError, TypeError, FileNotFoundError, *_WRONG_KINDS) as error:
        _remove_damaged(folder, error)
        lock.release()
        return None
    # The lock lasts as long as anybody can read the values.
    weakref.finalize(values, lock.release)
    return values


def _remove_damaged(folder: str, error: Exception) -> None:
    """Removes what is in the place of values, and says so in the log."""
    logging.warning('%s is damaged and made again (%s).', folder, error)
    if os.path.isdir(folder):
        shutil.rmtree(folder)
    else:
        os.remove(folder)


def _read_values_record(folder: str) -> dict[str, Any]:
    """Returns the record in a folder of values; raises a ValueError for a damaged one."""
    with open(os.path.join(folder, _RECORD), 'rb') as file:
        return json_digest.unseal(file.read())
