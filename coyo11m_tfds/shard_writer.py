"""Writes one TFRecord shard: a pure function of its task, run in whichever process.

    result = shard_writer.write_shard(task, ['/scratch/000000-000009.pt'], '/scratch/shard')

A shard holds some rows of one `.pt` file, or of several small ones. One file is open at a time, and
its rows are read `ROWS_AT_ONCE` at a time, so memory does not grow with the files or the shard.
"""

import base64
import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np
import pyarrow as pa

from coyo11m_tfds import columns, latent_shards, records, schema
from coyo11m_tfds.shard_inputs import PackedInputs, StoreInputs
from coyo11m_tfds.shard_statistics import ShardStatistics
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.source_files import SourceFile

# What is read at once, 5 MB with the float32 numbers, stays in the processor's cache.
ROWS_AT_ONCE = 128
VECTORS_IN_PT = 'pt'  # the config's `text_vectors` for `embeddings` inside the .pt files


@dataclasses.dataclass(frozen=True)
class TextVectors:
    """The text vectors of a data set: `dim` numbers each, made by `encoder`."""

    dim: int
    encoder: str
    in_pt: bool  # from the `.pt` files, not from a sidecar


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
    """What one shard is made of.

    Attributes:
        split: its split.
        index: its number within the split.
        filename: name of the file to write.
        group: number that it shares with the tasks that read the same files, and no others.
        parts: the files, in the order of the records.
        inputs: which rows, and the captions and vectors that go with them.
        text_vectors: None where records hold no text vector.
        drop_bad: leave out and count what is not finite, instead of stopping.
        check_crc: whether contents of the `.pt` file are compared with their CRC-32.
        num_bytes: expected size of the shard, within 1%.
        fingerprint: hex digest of all that decides the shard's bytes.
        in_place: leave the latents out, and say where they are.
    """

    split: str
    index: int
    filename: str
    group: int
    parts: tuple[ShardPart, ...]
    inputs: StoreInputs | PackedInputs
    text_vectors: TextVectors | None
    drop_bad: bool
    check_crc: bool
    num_bytes: int
    fingerprint: str
    in_place: bool = False

    @property
    def source(self) -> str:
        """The file or files that it reads, for messages."""
        first = self.parts[0].file.path
        if len(self.parts) == 1:
            return first
        return f'{first} to {self.parts[-1].file.name} ({len(self.parts)} files)'


@dataclasses.dataclass(frozen=True)
class ShardResult:
    """What was written.

    Attributes:
        split: as in the task.
        index: as in the task.
        num_records: records in the file.
        num_bytes: size of the file.
        crc32c: checksum of the file.
        chunk_offsets: byte offsets of the records 0, 32, 64, ..., int64.
        statistics: of the records.
        sources: where the latents of records without them are; else None.
    """

    split: str
    index: int
    num_records: int
    num_bytes: int
    crc32c: int
    chunk_offsets: np.ndarray
    statistics: ShardStatistics
    sources: columns.ShardSources | None = None

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
        sources = fields.get('sources') and columns.ShardSources.from_json(fields['sources'])
        read = {'chunk_offsets': offsets, 'statistics': statistics, 'sources': sources}
        return cls(**(fields | read))


def write_shard(task: ShardTask, latents_paths: Sequence[str], path: str) -> ShardResult:
    """Writes the shard's file.

    Args:
        task: what to write.
        latents_paths: the file of each part, as a local one.
        path: local file to write.

    Raises:
        ValueError: the source has changed since it was planned; or it holds numbers that are not
            finite, and the task does not allow to drop them.
        OSError: the file cannot be written, e.g. because the disk is full.
    """
    source = _OpenSource(task)
    with naming(path), open(path, 'wb') as file, records.RecordWriter(file) as writer:
        for part, latents_path in zip(task.parts, latents_paths, strict=True):
            for some in source.columns(part, latents_path):
                writer.write(some)
    return ShardResult(
        split=task.split,
        index=task.index,
        num_records=writer.num_records,
        num_bytes=writer.num_bytes,
        crc32c=writer.crc32c,
        chunk_offsets=np.asarray(writer.chunk_offsets, np.int64),
        statistics=source.statistics,
        sources=source.sources if task.in_place else None,
    )


def init_worker() -> None:
    """Prepares a process that shares the machine with one such process per core."""
    latent_shards.use_one_thread()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers, and they would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


class _OpenSource:
    """What a task reads, and the statistics of what has been read."""

    def __init__(self, task: ShardTask):
        self._task = task
        self._inputs = task.inputs.open()
        # All at once, 2 MB a shard: it takes half the time of a few at a time.
        self._captions = self._inputs.captions(slice(None))
        self.statistics = ShardStatistics(task.text_vectors and task.text_vectors.dim)
        self.sources = columns.ShardSources()

    def columns(
        self, part: ShardPart, latents_path: str
    ) -> Iterator[dict[str, np.ndarray | list[bytes]]]:
        """Yields the features of the records of one file that are good, some rows at a time.

        What is yielded is overwritten by what comes next.
        """
        latents = latent_shards.LatentShard(latents_path, name=part.file.path)
        self._check_unchanged(part, latents)
        records = part.records
        if self._task.in_place:
            self.sources.begin(part.file, latents)
        for start in range(records.start, records.stop, ROWS_AT_ONCE):
            yield self._columns(latents, slice(start, min(start + ROWS_AT_ONCE, records.stop)))

    def _columns(
        self, file: latent_shards.LatentShard, some: slice
    ) -> dict[str, np.ndarray | list[bytes]]:
        keys = self._inputs.keys[some]
        captions = self._captions[some]
        raw, latents = file.latents(self._inputs.rows[some])
        text = self._read_vectors(file, some)
        good = self.statistics.add(keys, captions, latents, text)
        found = {schema.KEY: keys, schema.CAPTION: captions}
        if self._task.in_place:
            self.sources.add(self._inputs.rows[some][good])
        else:
            found[schema.LATENTS] = raw
        if text is not None:
            found[schema.TEXT_EMBEDDING] = text.view(np.uint8)
        if good.all():
            return found
        if not self._task.drop_bad:
            self._refuse(file.path, keys[good.argmin()])
        return {
            name: column[good] if isinstance(column, np.ndarray) else list(compress(column, good))
            for name, column in found.items()
        }

    def _read_vectors(self, file: latent_shards.LatentShard, some: slice) -> np.ndarray | None:
        if not self._task.text_vectors:
            return None
        if not self._task.text_vectors.in_pt:
            return self._inputs.vectors(some)
        with np.errstate(over='ignore'):  # becomes inf, which counts as not finite
            return file.embeddings(self._inputs.rows[some]).astype(np.float16)

    def _check_unchanged(self, part: ShardPart, file: latent_shards.LatentShard) -> None:
        rows, keys = self._inputs.rows[part.records], self._inputs.keys[part.records]
        if file.digest != part.digest or not np.array_equal(file.keys[rows], keys):
            raise ValueError(f'{file.path}: has changed since the build began. Start it again.')

    def _refuse(self, path: str, key: int) -> None:
        text = f' (or its {schema.PT_EMBEDDINGS})' if self._task.text_vectors else ''
        raise ValueError(
            f'{path}: {schema.PT_LATENTS} of key {key}{text} are not finite, or '
            'too large to be. One such number ruins a training run. Remove the sample or make it '
            'again, or set bad_data to "drop" in the config.'
        )
