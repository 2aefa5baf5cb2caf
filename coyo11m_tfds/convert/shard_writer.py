"""Writes one TFRecord shard: a pure function of its task, run in whichever process.

    result = shard_writer.write_shard(task, ['/scratch/000000-000009.pt'], '/scratch/shard')

A shard holds some rows of one `.pt` file, or of several small ones. One file is open at a time, and
its rows are read `ROWS_AT_ONCE` at a time, so memory does not grow with the files or the shard.
"""

from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np
import pyarrow as pa

from coyo11m_tfds import schema
from coyo11m_tfds.convert.in_place import ShardSources
from coyo11m_tfds.convert.tasks import THIS_WRITER, ShardPart, ShardResult, ShardTask
from coyo11m_tfds.dataset import records
from coyo11m_tfds.report.statistics import ShardStatistics
from coyo11m_tfds.source import pt_file
from coyo11m_tfds.storage.file_state import naming

# Rows read at once, 5 MB with the float32 numbers: they stay in the processor's cache.
ROWS_AT_ONCE = 128


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
        RuntimeError: this process runs another version of the package than the one that planned it.
    """
    if task.writer != THIS_WRITER:
        raise RuntimeError(
            f'{task.filename}: was planned by {task.writer}, but this worker has {THIS_WRITER}. '
            'Install the same version on all workers, then start the build again.'
        )
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
        writer=THIS_WRITER,
        read=tuple(source.read),
        sources=source.sources if task.in_place else None,
    )


def init_worker() -> None:
    """Prepares a process that shares the machine with one such process per core."""
    pt_file.use_one_thread()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


class _OpenSource:
    """The opened source of a task, and the statistics of the rows read from it."""

    def __init__(self, task: ShardTask):
        self._task = task
        self._inputs = task.inputs.open()
        embeddings = task.text_embeddings
        self._text = embeddings.feature if embeddings else ''
        self.statistics = ShardStatistics(
            embeddings.dim if embeddings and self._text == schema.TEXT_EMBEDDING else 0,
            # Who draws is told of words that no caption has; ids of parts of words tell nothing.
            embeddings.vocabulary if embeddings and embeddings.encoder == schema.WORDS else 0,
        )
        self.sources = ShardSources()
        self.read: list[str] = []  # digests of files

    def columns(
        self, part: ShardPart, latents_path: str
    ) -> Iterator[dict[str, np.ndarray | list[bytes]]]:
        """Yields the features of the records of one file that are good, some rows at a time.

        Each is overwritten by the next.
        """
        latents = pt_file.LatentShard(latents_path, name=part.file.path)
        self._check_unchanged(part, latents)
        self.read.append(latents.digest)
        records = part.records
        if self._task.in_place:
            self.sources.begin(part.file, latents)
        for start in range(records.start, records.stop, ROWS_AT_ONCE):
            yield self._columns(latents, slice(start, min(start + ROWS_AT_ONCE, records.stop)))

    def _columns(
        self, file: pt_file.LatentShard, some: slice
    ) -> dict[str, np.ndarray | list[bytes]]:
        keys = self._inputs.keys[some]
        captions = self._inputs.captions[some]
        raw, latents = file.latents(self._inputs.rows[some])
        text = self._read_text(file, some)
        embeddings = text if self._text == schema.TEXT_EMBEDDING else None
        good = self.statistics.add(keys, captions, latents, embeddings)
        found: dict[str, np.ndarray | list[bytes]] = {schema.KEY: keys, schema.CAPTION: captions}
        if self._task.in_place:
            self.sources.add(self._inputs.rows[some][good], raw[good])
        else:
            found[schema.LATENTS] = raw
        if text is not None:
            found[self._text] = text.view(np.uint8)
            if len(self.statistics.known_tokens):
                self.statistics.add_tokens(text[good])
        if good.all():
            return found
        if not self._task.drop_bad:
            self._refuse(file.path, keys[good.argmin()])
        return {
            name: column[good] if isinstance(column, np.ndarray) else list(compress(column, good))
            for name, column in found.items()
        }

    def _read_text(self, file: pt_file.LatentShard, some: slice) -> np.ndarray | None:
        if not self._task.text_embeddings:
            return None
        if not self._task.text_embeddings.in_pt:
            assert self._inputs.embeddings is not None
            return self._inputs.embeddings[some]
        with np.errstate(over='ignore'):  # becomes inf, which counts as not finite
            return file.embeddings(self._inputs.rows[some]).astype(np.float16)

    def _check_unchanged(self, part: ShardPart, file: pt_file.LatentShard) -> None:
        rows, keys = self._inputs.rows[part.records], self._inputs.keys[part.records]
        if file.digest != part.digest or not np.array_equal(file.keys[rows], keys):
            raise ValueError(f'{file.path}: has changed since the build began. Start it again.')

    def _refuse(self, path: str, key: int) -> None:
        text = f' (or its {schema.PT_EMBEDDINGS})' if self._task.text_embeddings else ''
        raise ValueError(
            f'{path}: {schema.PT_LATENTS} of key {key}{text} are not finite, or '
            'too large to be. One such number ruins a training run. Remove the sample or make it '
            'again, or set bad_data to "drop" in the config.'
        )
