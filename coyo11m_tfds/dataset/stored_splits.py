"""Splits and shards of a data set, read from its metadata files without TFDS.

splits = stored_splits.parse(pathlib.Path('1.0.0/dataset_info.json').read_bytes())
splits[0].name, splits[0].file_names, splits[0].shard_lengths, splits[0].num_bytes
"""

import dataclasses
import json
import os
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import records
from coyo11m_tfds.dataset.chunk_index import ChunkIndex
from coyo11m_tfds.storage import source_files, stored_files


@dataclasses.dataclass(frozen=True)
class StoredSplit:
    """One split.

    Attributes:
        name: e.g. 'train'.
        file_names: of its shards.
        shard_lengths: records of each.
        num_bytes: of all shards together.
        build: the ID in the names of all files of its build; '' where they have none.
    """

    name: str
    file_names: Sequence[str]
    shard_lengths: Sequence[int]
    num_bytes: int
    build: str = ''

    @property
    def num_records(self) -> int:
        """Of all shards together."""
        return sum(self.shard_lengths)


@dataclasses.dataclass(frozen=True)
class StoredShard:
    """One shard, as the metadata describe it.

    Attributes:
        index_name: name of the file of `index`.
        number: of the shard.
        length: its records.
        index: of the split, if there is one that can be used.
    """

    index_name: str
    number: int
    length: int
    index: ChunkIndex | None

    def compare(self, scan: records.RecordScan) -> str:
        """How they differ from what the shard holds; '' if they do not."""
        if scan.num_records != self.length:
            return f'has {scan.num_records} records, expected {self.length} ({schema.INFO_FILE})'
        if self.index is None or not self.length:
            return ''
        first = np.arange(0, self.length, schema.CHUNK_STRIDE)
        count = np.minimum(self.length - first, schema.CHUNK_STRIDE)
        offsets, nbytes = self.index.byte_range(self.number, first, count)
        found = np.array([*scan.chunk_offsets, scan.num_bytes])
        wrong = np.flatnonzero(found != [*offsets, offsets[-1] + nbytes[-1]])
        if not len(wrong):
            return ''
        place = int(wrong[0])
        what = 'ends' if place == len(first) else f'has record {first[place]}'
        expected = [*offsets, offsets[-1] + nbytes[-1]][place]
        return f'{what} at byte {found[place]}, expected {expected} ({self.index_name})'


def parse(data: bytes) -> list[StoredSplit]:
    """The splits, from the content of `schema.INFO_FILE`.

    Raises:
        ValueError: it is damaged, or names no split.
    """
    try:
        info = json.loads(data)
        splits = [_split(info, split) for split in info['splits']]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error
    if not splits:
        raise ValueError('it names no split')
    return splits


def find_build(folder: str | os.PathLike[str]) -> str:
    """The ID in the names of a data set's files.

    It is '' where they have none, and where `schema.INFO_FILE` is missing or damaged.

    Args:
        folder: of the data set, local or on gs://.

    Raises:
        OSError: the storage cannot be reached.
    """
    try:
        file = source_files.describe(f'{os.fspath(folder).rstrip("/")}/{schema.INFO_FILE}')
        return parse(bytes(stored_files.read(file, stored_files.Content).data))[0].build
    except ValueError:
        return ''


def _split(info: dict, split: dict) -> StoredSplit:
    # protobuf writes 64-bit integers as strings, and leaves out empty lists and zeros.
    lengths = [int(length) for length in split.get('shardLengths', [])]
    count = len(lengths)
    digits = max(5, len(str(count)))
    names = [
        split['filepathTemplate'].format(
            DATASET=info['name'],
            SPLIT=split['name'],
            FILEFORMAT=info['fileFormat'],
            SHARD_X_OF_Y=f'{shard:0{digits}}-of-{count:0{digits}}',
        )
        for shard in range(count)
    ]
    if len(set(names)) < count:
        raise ValueError(
            f'its filepathTemplate {split["filepathTemplate"]!r} names several shards alike, '
            'expected {SHARD_X_OF_Y} in it'
        )
    build = schema.build_of(split['filepathTemplate'])
    return StoredSplit(split['name'], names, lengths, int(split.get('numBytes', 0)), build)
