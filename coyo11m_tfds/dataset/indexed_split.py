"""Where the records of one split lie: its shards and their chunk index, without TensorFlow.

split = stored_dataset.open_data(path).split('train')
split.file(3), split.index.byte_range(3, 64, 32)
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds.dataset import chunk_index
from coyo11m_tfds.storage import source_files


@dataclasses.dataclass(frozen=True)
class IndexedSplit:
    """One split with a chunk index.

    Attributes:
        index: where its records are.
        folder: that its shards lie in.
        file_names: of these.
    """

    index: chunk_index.ChunkIndex
    folder: str
    file_names: Sequence[str]

    @property
    def is_remote(self) -> bool:
        """True if reading waits for a network."""
        return source_files.is_remote(self.folder)

    @property
    def record_nbytes(self) -> int:
        """Bytes of a record in the files, on average; 0 if there is none."""
        return int(self.file_sizes.sum() // max(1, self.index.shard_lengths.sum()))

    @property
    def file_sizes(self) -> np.ndarray:
        """Bytes of each shard, as the index has them; int64 `(num_shards,)`."""
        lengths = self.index.shard_lengths
        shards = np.flatnonzero(lengths)
        sizes = np.zeros(len(lengths), np.int64)
        sizes[shards] = self.index.byte_range(shards, 0, lengths[shards])[1]
        return sizes

    @functools.cached_property
    def first_numbers(self) -> np.ndarray:
        """The number in the split of the first record of each shard; int64 `(num_shards,)`."""
        lengths = self.index.shard_lengths
        return np.cumsum(lengths) - lengths

    def file(self, shard: int) -> str:
        """The path of a shard."""
        return f'{self.folder}/{self.file_names[shard]}'
