"""Splits of a data set: their shards as TFDS describes them, and with a chunk index."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import chunk_index


@dataclasses.dataclass(frozen=True)
class StoredSplit:
    """A split as `schema.INFO_FILE` describes it."""

    name: str
    file_names: Sequence[str]  # of the shards
    shard_lengths: Sequence[int]  # number of records of each shard
    num_bytes: int  # of all shards
    build: str = ''  # ID in the names of its build's files; '' if the names have none
    converted: Sequence[str] = ()  # names of files in other formats, which `convert_format` adds

    @property
    def num_records(self) -> int:
        """Number of records of all shards."""
        return sum(self.shard_lengths)


@dataclasses.dataclass(frozen=True)
class IndexedSplit:
    """A split with its chunk index, by which runs of its records are found."""

    index: chunk_index.ChunkIndex
    folder: str  # of the data set
    file_names: Sequence[str]  # of the shards

    @property
    def record_nbytes(self) -> int:
        """Mean size of a record in bytes, as stored; 0 for a split without records."""
        num_records = self.index.shard_lengths.sum()
        return int(self.file_sizes.sum() // max(1, num_records))

    @property
    def file_sizes(self) -> np.ndarray:
        """Size of each shard in bytes, from the index, int64 `(num_shards,)`."""
        lengths = self.index.shard_lengths
        # A range of no records has no end in the index, so empty shards are left out.
        shards = np.flatnonzero(lengths)
        sizes = np.zeros(len(lengths), np.int64)
        _, sizes_of_shards = self.index.byte_range(shards, 0, lengths[shards])
        sizes[shards] = sizes_of_shards
        return sizes

    @functools.cached_property
    def first_numbers(self) -> np.ndarray:
        """Number within the split of each shard's first record, int64 `(num_shards,)`."""
        lengths = self.index.shard_lengths
        return np.cumsum(lengths) - lengths

    def file(self, shard: int) -> str:
        """Returns the path or URL of a shard."""
        return f'{self.folder}/{self.file_names[shard]}'


def strip_alternative_formats(info: bytes) -> bytes:
    """Returns the content of `schema.INFO_FILE` as the build wrote it."""
    # TFDS's `convert_format` converts a data set in place by adding files, and their format here.
    return re.sub(rb'\n *"alternativeFileFormats": \[[^]]*\],', b'', info, count=1)


def parse_splits(data: bytes) -> list[StoredSplit]:
    """Returns the splits in `schema.INFO_FILE`; ValueError if it is damaged or names no split."""
    try:
        info = json.loads(data)
        splits = [_parse_split(info, split) for split in info['splits']]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error
    if not splits:
        raise ValueError('it does not name the splits')
    return splits


def _parse_split(info: dict, split: dict) -> StoredSplit:
    """Returns a split of the parsed `schema.INFO_FILE`, with the names of its shards."""
    # protobuf writes 64-bit integers as strings, and leaves out empty lists and zeros.
    lengths = [int(length) for length in split.get('shardLengths', [])]
    template = split['filepathTemplate']
    count = len(lengths)
    # As TFDS pads them: at least five digits, more where a number has more.
    digits = max(5, len(str(count)))

    def name(file_format: str, shard: int) -> str:
        """Returns the name of a shard in a format."""
        fields = {
            'DATASET': info['name'],
            'SPLIT': split['name'],
            'FILEFORMAT': file_format,
            'SHARD_X_OF_Y': f'{shard:0{digits}}-of-{count:0{digits}}',
        }
        # Not `str.format`, which would evaluate whatever a damaged template holds.
        return re.sub(r'{(\w+)}', lambda field: fields[field[1]], template)

    names = [name(info['fileFormat'], shard) for shard in range(count)]
    converted = []
    for file_format in info.get('alternativeFileFormats', ()):
        converted += [name(file_format, shard) for shard in range(count)]
    # A template without the number of the shard would have all shards read from one file.
    if len(set(names)) < count:
        raise ValueError(
            f'its filepathTemplate {template!r} gives several shards one name, expected '
            '{SHARD_X_OF_Y} in it'
        )
    return StoredSplit(
        name=split['name'],
        file_names=names,
        shard_lengths=lengths,
        num_bytes=int(split.get('numBytes', 0)),
        build=schema.build_of(template),
        converted=converted,
    )
