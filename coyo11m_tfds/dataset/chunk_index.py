"""Offsets and digests of the runs of records in the shards of a split.

The file `chunk_index-<split>-<build>.npy` is a flat int64 array. For each shard it holds [number of
records, entries of the records 0, 32, 64, ..., file size]. The low 43 bits of an entry are the
offset of the record, the 20 bits above them a digest of the checksums behind the 32 records that
begin there. So readers notice records of another shard, but for one case in a million.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import keyed_random, manifest

_OFFSET_BITS = 43  # no shard has so many bytes: 8 TB
_OFFSET = (1 << _OFFSET_BITS) - 1
_DIGEST_BITS = 63 - _OFFSET_BITS

# One for each place of a run, so that records that changed places give another digest. Odd, so that
# every bit of a checksum counts.
_WEIGHTS = keyed_random.splitmix64(np.arange(schema.CHUNK_STRIDE)) | np.uint64(1)


class ChunkIndex:
    """Entries of every `schema.CHUNK_STRIDE`-th record of every shard."""

    def __init__(self, flat: np.ndarray):
        """Takes the array in the file; raises a ValueError if it does not follow the format."""
        flat = np.asarray(flat)
        if flat.ndim != 1 or flat.dtype != np.int64:
            raise ValueError(f'expected a flat int64 array, got {flat.dtype} {flat.shape}')
        self._flat = flat
        self._first_entry = np.fromiter(_first_entries(flat), np.int64)
        _check_ascending(flat, self._first_entry)
        # Number of records in each shard, int64 `(num_shards,)`; it stands before the entries.
        self.shard_lengths: np.ndarray = flat[self._first_entry - 1]

    @classmethod
    def parse(cls, data: bytes) -> 'ChunkIndex':
        """Returns the index of the content of its file; raises a ValueError if it is damaged."""
        dtype, shape, start = manifest.parse_npy_header(data, len(data))
        return cls(np.frombuffer(data, dtype, offset=start).reshape(shape))

    def byte_range(
        self, shard: np.ndarray | int, first: np.ndarray | int, count: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns offset and size in bytes of runs of records, int64 in their common shape.

        A run has `count` records, from the record `first` of a shard on. Both ends are at a
        multiple of `schema.CHUNK_STRIDE`, or at the end of the shard.
        """
        shard, first, count = np.broadcast_arrays(shard, first, count)
        end = first + count
        entries_at = self._first_entry[shard]
        begin_entry = entries_at + first // schema.CHUNK_STRIDE
        # Rounded up: behind a shard's last entry stands its size, so a range may end there too.
        end_entry = entries_at + -(-end // schema.CHUNK_STRIDE)
        begin_offset = self._flat[begin_entry] & _OFFSET
        end_offset = self._flat[end_entry] & _OFFSET
        return begin_offset, end_offset - begin_offset

    def shard_digest(self, shard: int) -> str:
        """Returns a hex digest of a shard's entries, by which it is told from other shards."""
        first_entry = int(self._first_entry[shard])
        length = int(self.shard_lengths[shard])
        num_entries = -(-length // schema.CHUNK_STRIDE)
        # With the length before the entries, and the size behind them.
        end = first_entry + num_entries + 1
        entries = self._flat[first_entry - 1 : end]
        return hashlib.sha256(entries.tobytes()).hexdigest()

    def digests(self, shard: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Returns the digests of runs, int64 `(n,)`, by their shards and first records.

        Each is of the `schema.CHUNK_STRIDE` records from `first` on; see `run_digests`.
        """
        entry = self._first_entry[shard] + first // schema.CHUNK_STRIDE
        # Without the offset in the low bits.
        return self._flat[entry] >> _OFFSET_BITS


def run_digests(checksums: np.ndarray) -> np.ndarray:
    """Returns digests of 20 bits, int64 `(n,)`, of runs of checksums.

    The checksums are uint32 `(n, schema.CHUNK_STRIDE)`, with zeros behind the last of a shard.
    """
    # Modulo 2**64, without a check for an overflow.
    mixed = (checksums * _WEIGHTS).sum(axis=1)
    # The highest bits of a product depend on all bits of its factors, the lowest on few.
    return (mixed >> np.uint64(64 - _DIGEST_BITS)).astype(np.int64)


def make_entries(offsets: Sequence[int], checksums: bytes | bytearray) -> list[int]:
    """Returns a shard's entries, from `chunk_offsets` and `checksums` of its `RecordWriter`."""
    # The last run of a shard may be shorter.
    num_checksums = schema.CHUNK_STRIDE * len(offsets)
    padded = checksums.ljust(4 * num_checksums, b'\0')
    runs = np.frombuffer(padded, '<u4').reshape(-1, schema.CHUNK_STRIDE)
    digests = run_digests(runs)
    # The offset in the low bits, the digest above them.
    entries = np.array(offsets, np.int64) | (digests << _OFFSET_BITS)
    return entries.tolist()


def index_file_name(split: str, build: str = '') -> str:
    """Returns the name of the index of a split, in a data set of a build."""
    return schema.of_build(f'chunk_index-{split}.npy', build)


def write_chunk_index(
    data_dir: str | os.PathLike[str],
    split: str,
    shard_lengths: Sequence[int],
    entries: Sequence[Sequence[int]],
    shard_sizes: Sequence[int],
    build: str = '',
) -> None:
    """Writes the index of a split into a local folder.

    Args:
        data_dir: The folder.
        split: Name of the split.
        shard_lengths: Number of records of each shard.
        entries: What `make_entries` returns for each shard.
        shard_sizes: Size of each shard in bytes.
        build: ID of the build; '' for a name without one.

    Raises:
        ValueError: The shards make no index that can be read.
    """
    numbers: list[int] = []
    for length, shard_entries, size in zip(shard_lengths, entries, shard_sizes, strict=True):
        numbers.append(length)
        numbers += shard_entries
        numbers.append(size)
    flat = np.array(numbers, np.int64)
    # Raises rather than write what cannot be read.
    ChunkIndex(flat)
    path = os.path.join(data_dir, index_file_name(split, build))
    np.save(path, flat)


def _first_entries(flat: np.ndarray) -> Iterator[int]:
    """Yields where each shard's entries begin in the flat array."""
    # One by one, Python's integers are faster than NumPy's.
    numbers = memoryview(flat)
    position = 0
    while position < len(flat):
        length = numbers[position]
        num_entries = -(-length // schema.CHUNK_STRIDE)
        size_at = position + 1 + num_entries
        # Before it is followed: a damaged length may lead anywhere.
        if length < 0 or size_at >= len(flat):
            raise _wrong_entry(position)
        yield position + 1
        position = size_at + 1


def _check_ascending(flat: np.ndarray, first_entry: np.ndarray) -> None:
    """Raises a ValueError unless each shard's offsets rise up to its size."""
    offsets = flat & _OFFSET
    # Of each number, whether the next one is larger.
    ascends = np.append(offsets[1:] > offsets[:-1], True)
    # Between two shards numbers may fall: after the length of a shard comes its first offset, and
    # after its size the length of the next shard.
    length_at = first_entry - 1
    ascends[length_at] = True
    # The size of the shard before; before the first shard that is at -1, the end of the array,
    # where the size of the last shard is. A size has no digest in its upper bits.
    size_at = first_entry - 2
    ascends[size_at] = flat[size_at] >> _OFFSET_BITS == 0
    if not ascends.all():
        bad_entry = ascends.argmin()
        shard = np.searchsorted(length_at, bad_entry, side='right') - 1
        raise _wrong_entry(int(length_at[shard]))


def _wrong_entry(entry: int) -> ValueError:
    return ValueError(f'entry {entry} does not begin the offsets of a shard')
