"""Writes one TFRecord shard: a pure function of its task, run in whichever process.

    result = shard_writer.write_shard(task)

A shard holds some rows of one `.pt` file. The rows are read `ROWS_AT_ONCE` at a time from the
memory-mapped file, so memory does not grow with the file or the shard.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from etils import epath

from coyo11m_tfds import captions, latent_shards, moments, records, schema, vectors

ROWS_AT_ONCE = 256
VECTORS_IN_PT = 'pt'  # the config's `text_vectors` for `embeddings` inside the .pt files


@dataclasses.dataclass(frozen=True)
class TextVectors:
    """Where text vectors come from.

    Attributes:
        store: folder of a `vectors.VectorStore`, or `VECTORS_IN_PT`.
        dim: numbers of one vector.
        encoder: name for the metadata.
    """

    store: str
    dim: int
    encoder: str


@dataclasses.dataclass(frozen=True)
class ShardTask:
    """What one shard is made of.

    Attributes:
        split: its split.
        index: its number within the split.
        path: file to write.
        latents_path: the `.pt` file.
        rows: rows of the `.pt` file in the order of the records, int32 `(n,)`.
        captions_store: folder of a `captions.CaptionStore`.
        text_vectors: None where records hold no text vector.
    """

    split: str
    index: int
    path: str
    latents_path: str
    rows: np.ndarray
    captions_store: str
    text_vectors: TextVectors | None


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
        latent_moments: of each of the 4 channels.
        text_moments: of each number of the text vectors, None where there are none.
    """

    split: str
    index: int
    num_records: int
    num_bytes: int
    crc32c: int
    chunk_offsets: np.ndarray
    latent_moments: moments.Moments
    text_moments: moments.Moments | None


def write_shard(task: ShardTask) -> ShardResult:
    """Writes the shard's file.

    Raises:
        ValueError: the source holds numbers that are not finite.
        OSError: the file cannot be written, e.g. because the disk is full.
    """
    source = _OpenSource(task)
    with epath.Path(task.path).open('wb') as file:
        writer = records.RecordWriter(file)
        for start in range(0, len(task.rows), ROWS_AT_ONCE):
            for example in source.examples(task.rows[start : start + ROWS_AT_ONCE]):
                writer.write(records.encode_example(example))
    return ShardResult(
        split=task.split,
        index=task.index,
        num_records=writer.num_records,
        num_bytes=writer.num_bytes,
        crc32c=writer.crc32c,
        chunk_offsets=np.asarray(writer.chunk_offsets, np.int64),
        latent_moments=source.latent_moments,
        text_moments=source.text_moments,
    )


def init_worker() -> None:
    """Prepares a process that shares the machine with one such process per core."""
    latent_shards.use_one_thread()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


class _OpenSource:
    """What a task reads, opened, and the moments of what has been read."""

    def __init__(self, task: ShardTask):
        self._latents = latent_shards.LatentShard(task.latents_path)
        self._captions = captions.CaptionStore(task.captions_store)
        self.latent_moments = moments.Moments(schema.LATENT_SHAPE[0])
        self._text_vectors = task.text_vectors
        self._vectors: vectors.VectorStore | None = None
        self.text_moments: moments.Moments | None = None
        if task.text_vectors:
            self.text_moments = moments.Moments(task.text_vectors.dim)
            if task.text_vectors.store != VECTORS_IN_PT:
                self._vectors = vectors.VectorStore(task.text_vectors.store, task.text_vectors.dim)

    def examples(self, rows: np.ndarray) -> Iterator[dict[str, bytes | int]]:
        """Reads some rows at once and yields the features of one record each."""
        keys = self._latents.keys[rows]
        columns = {
            schema.KEY: keys.tolist(),
            schema.CAPTION: self._captions.texts(self._captions.find(keys)),
            schema.LATENTS: self._read_latents(rows, keys),
        }
        if self._text_vectors:
            columns[schema.TEXT_EMBEDDING] = self._read_vectors(rows, keys)
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    def _read_latents(self, rows: np.ndarray, keys: np.ndarray) -> list[bytes]:
        raw, values = self._latents.latents(rows)
        finite = moments.add_latents(self.latent_moments, values)
        self._check_finite(finite, keys, schema.PT_LATENTS)
        return [row.tobytes() for row in raw]

    def _read_vectors(self, rows: np.ndarray, keys: np.ndarray) -> list[bytes]:
        if self._vectors:
            text = self._vectors.read(self._vectors.find(keys))
        else:
            with np.errstate(over='ignore'):  # becomes inf, which is reported below
                text = self._latents.embeddings(rows).astype(np.float16)
        self._check_finite(np.isfinite(text).all(axis=1), keys, schema.PT_EMBEDDINGS)
        moments.add_vectors(self.text_moments, text)
        return [row.tobytes() for row in text]

    def _check_finite(self, finite: np.ndarray, keys: np.ndarray, name: str) -> None:
        if not finite.all():
            raise ValueError(
                f'{self._latents.path}: {name} of key {keys[finite.argmin()]} are not finite (or '
                'too large to be). Remove the sample or make it again: one such number ruins a '
                'training run.'
            )
