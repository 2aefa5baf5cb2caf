"""How fast the storage of a split answers: one record and one chunk, at random places.

measured = probe.measure(split, chunk=64)
measured.request_seconds, measured.chunk_seconds
"""

import statistics
import time
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.storage import remote, source_files

_READS = 8  # of each size that are timed


class Measured(NamedTuple):
    """How long reads take, and what they were measured on.

    Attributes:
        is_remote: whether the files are in object storage.
        request_seconds: to read about one record at an offset, the median.
        chunk_seconds: to read one chunk at an offset, the median.
        shard_bytes: of the records of a shard, the median.
        num_shards: of the split.
    """

    is_remote: bool
    request_seconds: float
    chunk_seconds: float
    shard_bytes: float
    num_shards: int


def measure(split: IndexedSplit, chunk: int) -> Measured:
    """Reads runs of records of a split, which must have some.

    Raises:
        ValueError, OSError: a file is missing or cannot be read.
    """
    lengths = split.index.shard_lengths
    shards = np.flatnonzero(lengths)
    _, nbytes = split.index.byte_range(shards, 0, lengths[shards])
    random = np.random.default_rng()
    seconds: dict[int, list[float]] = {1: [], chunk: []}
    for count in [1, chunk] * (1 + _READS):
        seconds[count].append(_time_read(split, int(random.choice(shards)), count, chunk, random))
    return Measured(
        is_remote=split.is_remote,
        # The first read of each size may have to open a connection.
        request_seconds=statistics.median(seconds[1][1:]),
        chunk_seconds=statistics.median(seconds[chunk][1:]),
        shard_bytes=float(np.median(nbytes)),
        num_shards=len(lengths),
    )


def _time_read(
    split: IndexedSplit, shard: int, count: int, chunk: int, random: np.random.Generator
) -> float:
    """Seconds to read the first `count` records of a random chunk of a shard."""
    length = int(split.index.shard_lengths[shard])
    starts = max(length - chunk, 0) // schema.CHUNK_STRIDE + 1
    first = schema.CHUNK_STRIDE * int(random.integers(starts))
    of_chunk = min(chunk, length - first)
    place = np.array([[shard], [first], [of_chunk]])
    offset, nbytes = (int(x[0]) for x in split.index.byte_range(*place))
    file = source_files.describe(split.file(shard))
    begin = time.monotonic()
    remote.read_range(file, offset, nbytes * min(count, of_chunk) // of_chunk)
    return time.monotonic() - begin
