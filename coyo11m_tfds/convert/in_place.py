"""A build that leaves the latents in the source's `.pt` files and records where they lie.

sources = ShardSources()                          # of one shard
sources.begin(file, opened)
sources.add(rows, latents)

in_place.write(folder, {'train': [sources, ...], 'validation': [...]})
"""

import base64
import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.dataset.columns import Column, ColumnFile
from coyo11m_tfds.source.pt_file import LatentShard
from coyo11m_tfds.storage import source_files
from coyo11m_tfds.storage.source_files import SourceFile


class ShardSources:
    """Where the latents of a shard's records are: runs of rows of some files."""

    def __init__(self):
        self._files: list[ColumnFile] = []
        self._rows: list[np.ndarray] = []
        self._counts: list[int] = []
        self._dtype = ''

    def begin(self, file: SourceFile, opened: LatentShard) -> None:
        """Begins a file: rows that are added next are of this file.

        Raises:
            ValueError: its latents do not lie row after row.
        """
        self._files.append(describe(file, opened))
        self._counts.append(0)
        self._dtype = opened.dtype

    def add(self, rows: np.ndarray, latents: np.ndarray) -> None:
        """Appends records, by their rows and the bytes of these, uint8 `(n, bytes of a row)`."""
        self._rows.append(np.stack([rows, columns.checksums(latents)], axis=1).astype('<u4'))
        self._counts[-1] += len(rows)

    def to_json(self) -> dict:
        """Returns it as what JSON can hold."""
        return {
            'dtype': self._dtype,
            'files': [dataclasses.asdict(file) for file in self._files],
            'counts': self._counts,
            'rows': base64.b64encode(self.rows.tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, fields: Mapping) -> 'ShardSources':
        """The inverse of `to_json`."""
        made = cls()
        made._dtype, made._counts = fields['dtype'], list(fields['counts'])
        made._files = [ColumnFile(**file) for file in fields['files']]
        made._rows = [np.frombuffer(base64.b64decode(fields['rows']), '<u4').reshape(-1, 2)]
        return made

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def counts(self) -> Sequence[tuple[ColumnFile, int]]:
        """Files that have records, and how many, in the order of the records."""
        found = zip(self._files, self._counts, strict=True)
        return [(file, count) for file, count in found if count]

    def places(self, number: Mapping[ColumnFile, int]) -> np.ndarray:
        """The file's number, the row and its CRC-32C of each record, uint32 `(n, 3)`."""
        of_file = [np.full(count, number[file], '<u4') for file, count in self.counts]
        return np.column_stack([np.concatenate([np.empty(0, '<u4'), *of_file]), self.rows])

    @property
    def rows(self) -> np.ndarray:
        """Row and CRC-32C of each record, uint32 `(n, 2)`."""
        return np.concatenate([np.empty((0, 2), '<u4'), *self._rows])


def describe(file: SourceFile, opened: LatentShard) -> ColumnFile:
    """Describes a file of latents in place for the data set; raises as `ShardSources.begin`."""
    if opened.latents_start is None:
        raise ValueError(
            f'{file.path}: its {schema.PT_LATENTS} do not lie row after row, so that they cannot '
            "be read in place. Save it again as .contiguous(), or set latents='records'."
        )
    version = file.version if file.is_remote else ''
    return ColumnFile(path_of(file), version, opened.digest, opened.latents_start)


def path_of(file: SourceFile) -> str:
    """The path or URL of a file of the source, for readers in other folders."""
    return file.path if file.is_remote else os.path.abspath(file.path)


def check_within_reach(file: SourceFile, final: str) -> None:
    """Checks that readers of a data set can read its source.

    Args:
        file: of the source.
        final: folder of the data set, local or `gs://`.

    Raises:
        ValueError: the source is not local or on gs://, or is local and the data set is not.
    """
    is_remote = source_files.is_remote(final)
    if not file.path.startswith('gs://') and (file.is_remote or is_remote):
        where = 'on gs://, as the data set is' if is_remote else 'local or on gs://'
        raise ValueError(
            f"{file.path}: latents='in_place' reads this file in training, so it must be {where}. "
            "Mirror the source first (python -m coyo11m_tfds.mirror), or set latents='records'."
        )


def write(
    folder: str | os.PathLike[str], splits: Mapping[str, Sequence[ShardSources]], build: str = ''
) -> None:
    """Writes the files that say where latents lie into a local folder.

    Args:
        folder: of the data set.
        splits: of each split its shards, in their order.
        build: ID of the build.
    """
    shards = [shard for of_split in splits.values() for shard in of_split]
    files = sorted({file for shard in shards for file, _ in shard.counts}, key=lambda f: f.path)
    number = {file: n for n, file in enumerate(files)}
    crc32c = {}
    for split, of_split in splits.items():
        places = np.concatenate([shard.places(number) for shard in of_split])
        crc32c[split] = columns.array_crc32c(places)
        path = os.path.join(folder, columns.file_name(schema.LATENTS, split, build))
        np.save(path, places)
    dtype = next(shard.dtype for shard in shards if shard.dtype)
    column = Column(schema.LATENTS, dtype, tuple(files), build, crc32c)
    columns.write(folder, {schema.LATENTS: column}, build)
