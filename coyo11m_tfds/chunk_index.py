"""Where chunks of records start inside the shards of a split.

    index = ChunkIndex.load(data_dir, 'train')            # None where the data set has no index
    index.shard_lengths                                   # int64 (num_shards,)
    offset, nbytes = index.byte_range(shard=0, first=64, count=64)

A file `chunk_index-<split>.npy` lies beside the shards: a flat int64 array which holds, for one
shard after the other, [number of records, byte offsets of the records 0, 32, 64, ..., file size].
numpy and epath suffice to read it, locally or on gs://.
"""

from collections.abc import Sequence

import numpy as np
from etils import epath

from coyo11m_tfds import schema


class ChunkIndex:
    """Byte offsets of every `schema.CHUNK_STRIDE`-th record of every shard.

    Attributes:
        shard_lengths: records of each shard, int64 `(num_shards,)`.
    """

    def __init__(self, flat: np.ndarray):
        """Takes the array as it is in the file.

        Raises:
            ValueError: it does not follow the format.
        """
        flat = np.asarray(flat)
        if flat.ndim != 1 or flat.dtype != np.int64:
            raise ValueError(f'expected a flat int64 array, got {flat.dtype} {flat.shape}')
        self._flat = flat
        self._first_offset = _first_offsets(flat)
        self.shard_lengths: np.ndarray = flat[self._first_offset - 1]

    @classmethod
    def load(cls, data_dir: epath.PathLike, split: str) -> 'ChunkIndex | None':
        """Reads the index of a split, None where there is none.

        Raises:
            ValueError: the file is damaged.
        """
        path = index_path(data_dir, split)
        if not path.exists():
            return None
        try:
            with path.open('rb') as file:
                return cls(np.load(file))
        except (ValueError, EOFError) as error:
            raise ValueError(
                f'{path}: is not a chunk index ({error}). Build the data set again.'
            ) from error

    def byte_range(
        self, shard: np.ndarray | int, first: np.ndarray | int, count: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Says which bytes of a shard hold some consecutive records.

        Args:
            shard: which shard.
            first: first record, a multiple of `schema.CHUNK_STRIDE`.
            count: number of records, at least 1; a multiple of `schema.CHUNK_STRIDE`, or what
                reaches the end of the shard. All three broadcast against each other.

        Returns:
            `(offset, nbytes)`, int64, of the arguments' common shape.

        Raises:
            ValueError: a range starts or ends where the index has no offset.
        """
        shard, first, count = np.broadcast_arrays(shard, first, count)
        if ((shard < 0) | (shard >= len(self.shard_lengths))).any():
            raise ValueError(f'no such shard among {len(self.shard_lengths)}: {shard}')
        length = self.shard_lengths[shard]
        end = first + count
        ends_well = (end == length) | ((end < length) & (end % schema.CHUNK_STRIDE == 0))
        good = (first >= 0) & (first % schema.CHUNK_STRIDE == 0) & (count >= 1) & ends_well
        if not good.all():
            bad = int(np.argmin(good))
            raise ValueError(
                f'records [{first.flat[bad]}, {end.flat[bad]}) of shard {shard.flat[bad]}, which '
                f'has {length.flat[bad]}, do not start and end at a multiple of '
                f"{schema.CHUNK_STRIDE} or at the shard's end"
            )
        start_at = self._first_offset[shard] + first // schema.CHUNK_STRIDE
        end_at = self._first_offset[shard] + -(-end // schema.CHUNK_STRIDE)
        offset = self._flat[start_at]
        return offset, self._flat[end_at] - offset


def index_path(data_dir: epath.PathLike, split: str) -> epath.Path:
    """The index file of a split."""
    return epath.Path(data_dir) / f'chunk_index-{split}.npy'


def save(
    data_dir: epath.PathLike,
    split: str,
    shard_lengths: Sequence[int],
    offsets: Sequence[np.ndarray],
    shard_sizes: Sequence[int],
) -> None:
    """Writes the index of a split.

    Args:
        data_dir: folder of the shards.
        split: name of the split.
        shard_lengths: number of records of each shard.
        offsets: for each shard, byte offsets of the records 0, 32, 64, ...
        shard_sizes: bytes of each shard's file.
    """
    parts = [
        part
        for length, shard_offsets, size in zip(shard_lengths, offsets, shard_sizes, strict=True)
        for part in ([length], shard_offsets, [size])
    ]
    flat = np.concatenate([np.asarray(part, np.int64) for part in parts])
    ChunkIndex(flat)  # raises rather than write what cannot be read
    with index_path(data_dir, split).open('wb') as file:
        np.save(file, flat)


def _first_offsets(flat: np.ndarray) -> np.ndarray:
    """Returns where each shard's offsets begin in the flat array, int64 `(num_shards,)`."""
    starts, at = [], 0
    while at < len(flat):
        length = int(flat[at])
        last = at + 1 - (-length // schema.CHUNK_STRIDE)
        if length < 1 or last >= len(flat) or (np.diff(flat[at + 1 : last + 1]) <= 0).any():
            raise ValueError(f'entry {at} does not begin the offsets of a shard')
        starts.append(at + 1)
        at = last + 1
    return np.asarray(starts, np.int64)
