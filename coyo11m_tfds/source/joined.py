"""Values of other files, brought into the order in which a program reads them.

    joined.make(folder, rows, facts)    # rows: batches as of `SCHEMA`, in any order
    found = joined.Joined(folder)
    found.places, found.sizes           # int64 (n,) ascending, int32 (n,)
    found.read(found.places[:256])      # list of bytes

A place is any number; values come out sorted by it. DuckDB sorts them into one Parquet file of
small row groups, on the disk as far as they exceed its share of memory. 11.4 million captions of
200 to 600 bytes take 79 s of two busy cores and 1.34 GB at most, with reading and checking them.
"""

import contextlib
import functools
import glob
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from coyo11m_tfds.process import machine
from coyo11m_tfds.storage import file_state, held_folder, json_digest
from coyo11m_tfds.storage.file_lock import FileLock

FORMAT = 1  # of the files; another number has them made again

# Place of a value; its size, or what whoever makes it says instead; the value, null for none.
SCHEMA = pa.schema([('place', pa.int64()), ('size', pa.int32()), ('value', pa.large_binary())])

_ROWS, _RECORD = 'rows.parquet', 'record.json'
_ROW_GROUP = 2048  # rows, the fewest that DuckDB makes; a shard of 128 MB has 5,300
_MEMORY = '600MB'
_THREADS = 4  # at most; each takes some of the memory


class Joined:
    """Values in the order of their places.

    Attributes:
        folder: where they lie.
        facts: what is known of them besides, JSON.
    """

    def __init__(self, folder: str):
        """Opens what `make` has made, without a look at its checksum."""
        self.folder = folder
        record = _read_record(folder)
        self.facts: dict[str, Any] = record['facts']
        self._starts = np.array(record['starts'], np.int64)
        self._file = pq.ParquetFile(os.path.join(folder, _ROWS), pre_buffer=False)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Those that have a row, each once, int64 `(n,)`, ascending."""
        return self._file.read(['place']).column(0).to_numpy()

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of each value, or what stands for it, int32 `(n,)`."""
        return self._file.read(['size']).column(0).to_numpy()

    def read(self, places: np.ndarray) -> list[bytes]:
        """Returns the values of some places, int64 `(m,)`, ascending, that all have one."""
        if not len(places):
            return []
        first, last = np.searchsorted(self._starts, places[[0, -1]], side='right') - 1
        rows = self._file.read_row_groups(range(first, last + 1), ['place', 'value'])
        found = np.searchsorted(rows.column(0).to_numpy(), places)
        return rows.column(1).take(found).to_pylist()


def make(folder: str, rows: Iterable[pa.RecordBatch], facts: Mapping[str, Any]) -> None:
    """Sorts rows into a new folder.

    Args:
        folder: made by this.
        rows: as of `SCHEMA`; no place comes twice.
        facts: that are kept with them; read when all rows are there.

    Raises:
        OSError: the files cannot be written, e.g. because the disk is full.
        Exception: whatever `rows` raises.
    """
    os.mkdir(folder)
    path = os.path.join(folder, _ROWS)
    raised: list[BaseException] = []
    spilled = os.path.join(folder, 'spilled')
    threads = min(_THREADS, machine.usable_cpus())
    config = {'memory_limit': _MEMORY, 'threads': str(threads), 'temp_directory': spilled}
    with duckdb.connect(config=dict(config)) as connection:
        connection.execute('SET enable_progress_bar = false')
        reader = pa.RecordBatchReader.from_batches(SCHEMA, _keeping_error(rows, raised))
        connection.register('unsorted', reader)
        quoted = path.replace("'", "''")
        try:
            connection.execute(
                f"COPY (SELECT * FROM unsorted ORDER BY place) TO '{quoted}' "
                f'(FORMAT parquet, ROW_GROUP_SIZE {_ROW_GROUP})'
            )
        except duckdb.Error as error:
            if raised:
                raise raised[0] from None
            raise OSError(
                f'{path}: cannot be sorted ({str(error).splitlines()[0]}). Make room on the disk, '
                'or leave out values that are far longer than captions are.'
            ) from error
    shutil.rmtree(spilled, ignore_errors=True)
    groups = pq.read_metadata(path)
    numbers = range(groups.num_row_groups)
    record = {
        'format': FORMAT,
        'state': file_state.of_file(path),
        'starts': [groups.row_group(n).column(0).statistics.min for n in numbers],
        'facts': dict(facts),
    }
    with open(os.path.join(folder, _RECORD), 'w', encoding='utf-8') as file:
        json.dump(record | {'checksum': json_digest.sha256(record)}, file)


def batch(places: np.ndarray, values: np.ndarray) -> pa.RecordBatch:
    """Rows as of `SCHEMA`, of places, int64 `(n,)`, and numbers, `(n, width)`."""
    size = values.itemsize * values.shape[1]
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    rows = pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(values), buffers)
    sizes = pa.array(np.full(len(values), size, np.int32))
    return pa.RecordBatch.from_arrays(
        [pa.array(places), sizes, rows.cast(pa.large_binary())], schema=SCHEMA
    )


def kept(cache_dir: str, origin: Any, make_folder: Callable[[str], None]) -> Joined:
    """Opens what is in `cache_dir` if it is whole and of the same origin; else makes it.

    While the result lives, `sweep` leaves it there.

    Args:
        cache_dir: existing local folder.
        origin: all that decides the content, JSON.
        make_folder: calls `make` with the folder that it is given.
    """
    folder = os.path.join(cache_dir, f'joined-{json_digest.sha256([FORMAT, origin])[:32]}')
    while not (found := _open_whole(folder)):
        with held_folder.make(cache_dir, 'joining-') as making:
            made = os.path.join(making, 'made')
            make_folder(made)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(made, folder)
    return found


def sweep(cache_dir: str) -> None:
    """Removes from `cache_dir` what no process has open: values of other builds."""
    for folder in glob.glob(os.path.join(glob.escape(cache_dir), f'joined-{"[0-9a-f]" * 32}')):
        with (
            contextlib.suppress(BlockingIOError, FileNotFoundError),
            FileLock(os.path.join(folder, _RECORD), wait=False),
        ):
            shutil.rmtree(folder)


def _open_whole(folder: str) -> Joined | None:
    try:
        lock = FileLock(os.path.join(folder, _RECORD), shared=True)
    except FileNotFoundError:
        return None
    try:
        state = file_state.of_file(os.path.join(folder, _ROWS))
        if list(state) != _read_record(folder)['state']:
            raise ValueError(f'found {state}')
        found = Joined(folder)
    except (ValueError, LookupError, TypeError, AttributeError, FileNotFoundError) as error:
        logging.warning('%s is damaged and made again (%s).', folder, error)
        shutil.rmtree(folder)
        lock.release()
        return None
    weakref.finalize(found, lock.release)
    return found


def _read_record(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, _RECORD), encoding='utf-8') as file:
        record = json.load(file)
    if record.pop('checksum') != json_digest.sha256(record) or record['format'] != FORMAT:
        raise ValueError(f'{_RECORD} is damaged or of another format')
    return record


def _keeping_error(
    rows: Iterable[pa.RecordBatch], raised: list[BaseException]
) -> Iterator[pa.RecordBatch]:
    """Yields rows; DuckDB would pass on no more than the text of an error."""
    try:
        yield from rows
    except BaseException as error:
        raised.append(error)
        raise
