"""Tasks and results of a build: one of each for every shard."""

import base64
import dataclasses

import numpy as np

import coyo11m_tfds
from coyo11m_tfds import schema
from coyo11m_tfds.convert.in_place import ShardSources
from coyo11m_tfds.convert.shard_inputs import JoinedInputs, PackedInputs
from coyo11m_tfds.report.statistics import ShardStatistics
from coyo11m_tfds.storage.source_files import SourceFile

# The package that this process runs, as a planner tells it to its writers and these record it.
THIS_WRITER = f'{schema.NAME} {coyo11m_tfds.__version__}, records of format {schema.RECORD_FORMAT}'


@dataclasses.dataclass(frozen=True)
class TextEmbeddings:
    """The text in records: an embedding of `dim` numbers, or so many tokens, by `encoder`."""

    dim: int
    encoder: str
    in_pt: bool  # from the `.pt` files, not from a sidecar
    vocabulary: int = 0  # of tokens; 0: embeddings

    @property
    def feature(self) -> str:
        """Its name in the records."""
        return schema.TOKENS if self.vocabulary else schema.TEXT_EMBEDDING

    @property
    def nbytes(self) -> int:
        """Of one record's."""
        return self.dim * np.dtype(schema.TEXT_DTYPES[self.feature]).itemsize


@dataclasses.dataclass(frozen=True)
class ShardPart:
    """The records of a shard that come from one file.

    Attributes:
        file: the `.pt` file, which may be remote.
        digest: `LatentShard.digest` of that file.
        records: their range within the shard's.
        row_range: first and last row of that file, for people.
    """

    file: SourceFile
    digest: str
    records: slice
    row_range: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ShardTask:
    """The contents of one shard.

    Attributes:
        split: its split.
        index: its number within the split.
        filename: name of the file to write.
        group: number that it shares with the tasks that read the same files, and no others.
        parts: the files, in the order of the records.
        inputs: which rows, and the captions and embeddings that go with them.
        text_embeddings: None where records hold no text embedding.
        drop_bad: leave out and count what is not finite, instead of stopping.
        check_crc: whether contents of the `.pt` file are compared with their CRC-32.
        num_bytes: expected size of the shard, within 1%.
        fingerprint: hex digest of all that decides the shard's bytes.
        in_place: leave the latents out, and say where they are.
        writer: the package that planned it; no other may write it.
    """

    split: str
    index: int
    filename: str
    group: int
    parts: tuple[ShardPart, ...]
    inputs: JoinedInputs | PackedInputs
    text_embeddings: TextEmbeddings | None
    drop_bad: bool
    check_crc: bool
    num_bytes: int
    fingerprint: str
    in_place: bool = False
    writer: str = THIS_WRITER

    @property
    def source(self) -> str:
        """The file or files that it reads, for messages."""
        first = self.parts[0].file.path
        if len(self.parts) == 1:
            return first
        return f'{first} to {self.parts[-1].file.name} ({len(self.parts)} files)'


@dataclasses.dataclass(frozen=True)
class ShardResult:
    """One shard that was written.

    Attributes:
        split: as in the task.
        index: as in the task.
        num_records: records in the file.
        num_bytes: size of the file.
        crc32c: checksum of the file.
        chunk_offsets: byte offsets of the records 0, 32, 64, ..., int64.
        statistics: of the records.
        writer: the package that wrote it.
        read: the digests of the `.pt` files that it was made of, as they were then.
        sources: where the latents of records without them are; else None.
    """

    split: str
    index: int
    num_records: int
    num_bytes: int
    crc32c: int
    chunk_offsets: np.ndarray
    statistics: ShardStatistics
    writer: str
    read: tuple[str, ...]
    sources: ShardSources | None = None

    def to_json(self) -> dict:
        """Returns it as what JSON can hold, exactly."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        offsets = base64.b64encode(self.chunk_offsets.astype('<i8').tobytes()).decode()
        sources = self.sources and self.sources.to_json()
        return fields | {
            'chunk_offsets': offsets,
            'statistics': self.statistics.to_json(),
            'sources': sources,
        }

    @classmethod
    def from_json(cls, fields: dict) -> 'ShardResult':
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is not what `to_json` makes.
        """
        offsets = np.frombuffer(base64.b64decode(fields['chunk_offsets']), '<i8').astype(np.int64)
        statistics = ShardStatistics.from_json(fields['statistics'])
        sources = fields.get('sources') and ShardSources.from_json(fields['sources'])
        return cls(
            **fields
            | {'chunk_offsets': offsets, 'statistics': statistics, 'sources': sources}
            | {'read': tuple(fields['read'])}
        )
