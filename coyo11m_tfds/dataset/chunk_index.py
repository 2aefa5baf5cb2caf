"""Offsets of the chunks of records in the shards of a split.

The file `chunk_index-<split>-<build>.npy` beside the shards is a flat int64 array. For each shard
it holds [number of records, byte offsets of the records 0, 32, 64, ..., file size].
"""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest, npy

# No shard has so many bytes: 8 TB. What is larger may not be added to an address.
_END = 1 << 43


class ChunkIndex:
    """Byte offsets of every `schema.CHUNK_STRIDE`-th record of every shard.

    Attributes:
        shard_lengths: Number of records in each shard, int64 `(num_shards,)`.
    """

    def __init__(self, flat: np.ndarray):
        """Takes the array in the file; raises a ValueError if it does not follow the format."""
        flat = np.asarray(flat)
        if flat.ndim != 1 or flat.dtype != np.int64:
            raise ValueError(f'expected a flat int64 array, got {flat.dtype} {flat.shape}')
        if flat.max(initial=0) >= _END:
            raise _no_shard(int(flat.argmax()))
        self._flat = flat
        self._first_offset = np.fromiter(_first_offsets(flat), np.int64)
        _check_rising(flat, self._first_offset)
        self.shard_lengths: np.ndarray = flat[self._first_offset - 1]

    @classmethod
    def load(
        cls, data_dir: str | os.PathLike[str], split: str, build: str = ''
    ) -> 'ChunkIndex | None':
        """Reads the index of a split; None if the data set has none.

        Raises a DamagedError if the file is damaged, and an OSError if it cannot be read.
        """
        path = os.path.join(data_dir, file_name(split, build))
        data = manifest.read_file(path)
        try:
            return None if data is None else cls.parse(data)
        except ValueError as error:
            raise manifest.DamagedError(
                f'{path}: is not a chunk index ({error}). Build the data set again.'
            ) from error

    @classmethod
    def parse(cls, data: bytes) -> 'ChunkIndex':
        """Parses the content of an index file; raises a ValueError if it is damaged."""
        dtype, shape, start = npy.parse_header(data, len(data))
        return cls(np.frombuffer(data, dtype, offset=start).reshape(shape))

    def byte_range(
        self, shard: np.ndarray | int, first: np.ndarray | int, count: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the bytes of consecutive records; the arguments broadcast against each other.

        `first` is a multiple of `schema.CHUNK_STRIDE`. So is `count`, at least 1, unless the
        records end with the shard. Returns offsets and numbers of bytes, int64.
        """
        shard, first, count = np.broadcast_arrays(shard, first, count)
        end = first + count
        start_at = self._first_offset[shard] + first // schema.CHUNK_STRIDE
        end_at = self._first_offset[shard] + -(-end // schema.CHUNK_STRIDE)
        offset = self._flat[start_at]
        return offset, self._flat[end_at] - offset


def file_name(split: str, build: str = '') -> str:
    """Returns the name of a split's index file."""
    return schema.of_build(f'chunk_index-{split}.npy', build)


def save(
    data_dir: str | os.PathLike[str],
    split: str,
    shard_lengths: Sequence[int],
    offsets: Sequence[Sequence[int] | np.ndarray],
    shard_sizes: Sequence[int],
    build: str = '',
) -> None:
    """Writes the index of a split into a local folder.

    `offsets` are those of the records 0, 32, 64, ... of each shard; all sizes are in bytes.
    """
    parts = [
        part
        for length, shard_offsets, size in zip(shard_lengths, offsets, shard_sizes, strict=True)
        for part in ([length], shard_offsets, [size])
    ]
    flat = np.concatenate([np.asarray(part, np.int64) for part in parts])
    ChunkIndex(flat)  # raises rather than write what cannot be read
    np.save(os.path.join(data_dir, file_name(split, build)), flat)


def _first_offsets(flat: np.ndarray) -> Iterator[int]:
    """Yields where each shard's offsets begin in the flat array."""
    entries, at = memoryview(flat), 0  # Python's integers are faster one by one
    while at < len(flat):
        length = entries[at]
        size_at = at + 1 - (-length // schema.CHUNK_STRIDE)
        if length < 0 or size_at >= len(flat):
            raise _no_shard(at)
        yield at + 1
        at = size_at + 1


def _check_rising(flat: np.ndarray, first_offset: np.ndarray) -> None:
    """Raises unless each shard's offsets are not negative and rise."""
    rises = np.append(flat[1:] > flat[:-1], True)
    # But from the end of a shard to the next one's length, and from there to its first offset.
    rises[first_offset - 2] = True
    rises[first_offset - 1] = flat[first_offset] >= 0
    if not rises.all():
        shard = np.searchsorted(first_offset - 1, rises.argmin(), side='right') - 1
        raise _no_shard(int(first_offset[shard]) - 1)


def _no_shard(entry: int) -> ValueError:
    return ValueError(f'entry {entry} does not begin the offsets of a shard')
