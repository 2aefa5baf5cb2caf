"""Where the records of one split lie: its shards and their chunk index, without TensorFlow.

split = indexed_split.load(data_dir, 'train', shard_lengths, path_of_first_shard)
split.file(3), split.index.byte_range(3, 64, 32)
"""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import chunk_index, manifest, schema
from coyo11m_tfds.storage import source_files, stored_files

# In TFDS' file names, with as many digits as the number of shards needs and at least five.
_FIRST_SHARD = re.compile(r'0{5,}(?=-of-\d+)')


@dataclasses.dataclass(frozen=True)
class IndexedSplit:
    """One split with a chunk index.

    Attributes:
        index: where its records are.
        file_prefix, file_suffix: of the path of every shard; its number is between them.
        digits: of that number.
    """

    index: chunk_index.ChunkIndex
    file_prefix: str
    file_suffix: str
    digits: int

    @property
    def is_remote(self) -> bool:
        """True if reading waits for a network."""
        return source_files.is_remote(self.file_prefix)

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
        return f'{self.file_prefix}{shard:0{self.digits}}{self.file_suffix}'


def load(
    data_dir: str | os.PathLike[str],
    split: str,
    shard_lengths: Sequence[int],
    first_shard: str,
) -> IndexedSplit | None:
    """Reads the chunk index of a split; None where there never was one.

    Args:
        data_dir: folder of the data set.
        split: its name.
        shard_lengths: records of each shard, as `dataset_info.json` has them.
        first_shard: path of the first one. It tells all: TFDS takes seconds to make those of a
            hundred thousand shards.

    Raises:
        ValueError: the index is damaged, or of other shards.
        OSError: it cannot be read, or it is missing and the record of checksums names it.
    """
    build = schema.build_of(os.path.basename(first_shard))
    index = chunk_index.ChunkIndex.load(data_dir, split, build)
    if index is None:
        _check_not_lost(os.fspath(data_dir), split, build)
        return None
    if list(shard_lengths) != index.shard_lengths.tolist():
        raise ValueError(
            f'{data_dir}: {schema.INFO_FILE} has {len(shard_lengths)} shards of '
            f'{sum(shard_lengths)} records for split {split!r}, its chunk index '
            f'{len(index.shard_lengths)} of {index.shard_lengths.sum()}; build the data set again'
        )
    numbers = list(_FIRST_SHARD.finditer(first_shard))
    if not numbers:
        raise ValueError(
            f'{data_dir}/{schema.INFO_FILE}: names the shards of split {split!r} {first_shard}, '
            'expected a filepathTemplate with {SHARD_X_OF_Y}; build the data set again'
        )
    number = numbers[-1]
    before, after = first_shard[: number.start()], first_shard[number.end() :]
    return IndexedSplit(index, before, after, len(number[0]))


def _check_not_lost(data_dir: str, split: str, build: str) -> None:
    """Raises an error if the data set had an index: without it, records come in another order."""
    recorded = f'{data_dir}/{schema.of_build(schema.CHECKSUMS_FILE, build)}'
    try:
        file = source_files.describe(recorded)
    except ValueError:  # no such file: the data set was made elsewhere
        return
    try:
        names = manifest.parse(bytes(stored_files.read(file, stored_files.Content).data))
    except ValueError as error:
        raise ValueError(f'{recorded}: is damaged ({error}).') from error
    name = chunk_index.file_name(split, build)
    if name in names:
        raise FileNotFoundError(
            f'{data_dir}/{name}: is missing, and {recorded} names it. Restore it or build the data '
            'set again.'
        )
