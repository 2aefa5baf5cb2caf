"""How fast the storage of a split answers: one record and one chunk, at random places.

measured = probe.measure(split, columns, chunk=64)
measured.request_seconds, measured.chunk_seconds
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading.chunk_blocks import Chunk, find_chunks
from coyo11m_tfds.reading.column_reader import ColumnReader, OpenedColumn
from coyo11m_tfds.reading.fetched_files import FetchedFiles, Range
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.storage import source_files

_READS = 8  # of each size that are timed


class Measured(NamedTuple):
    """How long reads take, and what they were measured on.

    Attributes:
        is_remote: whether any of the files that were read is in object storage.
        request_seconds: to read about one record at an offset, the median.
        chunk_seconds: to read one chunk at an offset, with its rows of columns, the median.
        chunk_bytes: of these, the mean.
        shard_bytes: of the records of a shard and of their rows in place, the median.
        num_shards: of the split.
    """

    is_remote: bool
    request_seconds: float
    chunk_seconds: float
    chunk_bytes: float
    shard_bytes: float
    num_shards: int


def measure(split: IndexedSplit, columns: Sequence[OpenedColumn], chunk: int) -> Measured:
    """Reads records and chunks of a split, which must have some.

    Args:
        split: that is read.
        columns: whose rows a chunk comes with.
        chunk: records of a chunk.

    Raises:
        ValueError, OSError: a file is missing or cannot be read.
    """
    files = FetchedFiles(split.file, split.file_sizes, most_at_once=1 + len(columns))
    readers = [ColumnReader(column, files) for column in columns]
    reads: list[tuple[float, Chunk]] = []
    request_seconds: list[float] = []
    try:
        for _ in range(1 + _READS):
            ((shard, begin, end),), count = _random_chunk(split, [], chunk)
            request_seconds.append(_time(files, [(shard, begin, begin + (end - begin) // count)]))
            found, _ = _random_chunk(split, readers, chunk)
            reads.append((_time(files, found), found))
    finally:
        files.close()
    parts = [part for _, found in reads for part in found]
    return Measured(
        is_remote=any(source_files.is_remote(files.path_of(file)) for file, _, _ in parts),
        # The first read of each size may have to open a connection.
        request_seconds=statistics.median(request_seconds[1:]),
        chunk_seconds=statistics.median(seconds for seconds, _ in reads[1:]),
        chunk_bytes=sum(end - begin for _, begin, end in parts) / len(reads),
        shard_bytes=_shard_bytes(split, columns),
        num_shards=len(split.index.shard_lengths),
    )


def _random_chunk(
    split: IndexedSplit, columns: Sequence[ColumnReader], chunk: int
) -> tuple[Chunk, int]:
    """What one chunk needs, and its records."""
    random = np.random.default_rng()
    lengths = split.index.shard_lengths
    shard = random.choice(np.flatnonzero(lengths))
    starts = max(lengths[shard] - chunk, 0) // schema.CHUNK_STRIDE + 1
    first = schema.CHUNK_STRIDE * random.integers(starts)
    count = min(chunk, int(lengths[shard] - first))
    [found] = find_chunks(split, columns, *np.array([[shard], [first], [count]]))
    return found, count


def _time(files: FetchedFiles, parts: Sequence[Range]) -> float:
    """Seconds until all parts have come that are asked for together."""
    begin = time.monotonic()
    files.ask(parts)
    files.take(parts)
    seconds = time.monotonic() - begin
    files.drop(parts)
    return seconds


def _shard_bytes(split: IndexedSplit, columns: Sequence[OpenedColumn]) -> float:
    """Bytes of a shard, the median, as `shard_bytes` of a build counts them: with rows in place."""
    in_place = sum(column.row_nbytes for column in columns if column.places is not None)
    nbytes = split.file_sizes + in_place * split.index.shard_lengths
    return float(np.median(nbytes[nbytes > 0]))
