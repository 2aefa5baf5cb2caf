"""Writes one TFRecord shard: a pure function of its task, in memory that no size changes."""

from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np
import pyarrow as pa

from coyo11m_tfds import schema
from coyo11m_tfds.convert.tasks import (
    THIS_WRITER,
    ShardResult,
    ShardSegment,
    ShardTask,
    make_column_file,
)
from coyo11m_tfds.dataset import chunk_index, column_file, columns, records
from coyo11m_tfds.report.statistics import (
    ChannelSums,
    ShardStatistics,
    split_moments,
    sum_channels,
)
from coyo11m_tfds.source import formats, latent_file
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.stored_file import StoredFile

# Rows read at once, and their bytes: 128 rows of three crops are 9 MB with their float32 numbers,
# which stay in the processor's cache.
ROWS_AT_ONCE = 128
_BYTES_AT_ONCE = 8 << 20

Features = dict[str, np.ndarray | Sequence[bytes]]


def write_shard(task: ShardTask, latents_paths: Sequence[str], path: str) -> ShardResult:
    """Writes the shard's file to a local path, from a local path of each segment's file.

    Raises:
        RuntimeError: If another version of the package has planned the task.
        ValueError: For a source that has changed, and for latents that are not finite if the task
            does not drop such records.
        OSError: If the shard cannot be written; it names the file.
    """
    # A worker on another machine may have another version, and shards would differ in silence.
    if task.writer != THIS_WRITER:
        raise RuntimeError(
            f'{task.filename}: was planned by {task.writer}, but this worker has {THIS_WRITER}. '
            'Install the same version on all workers, then start the build again.'
        )
    source = _SourceReader(task)
    # The errors of a full disk do not name the file.
    with naming(path), open(path, 'wb') as file, records.RecordWriter(file) as writer:
        for segment, latents_path in zip(task.segments, latents_paths, strict=True):
            for features in source.read_segment(segment, latents_path):
                writer.write(features)
    return ShardResult(
        split=task.split,
        index=task.index,
        num_records=writer.num_records,
        num_bytes=writer.num_bytes,
        crc32c=writer.crc32c,
        index_entries=chunk_index.make_entries(writer.chunk_offsets, writer.checksums),
        statistics=source.statistics,
        writer=THIS_WRITER,
        read=tuple(source.read),
        sources=source.list_places(),
    )


def init_worker() -> None:
    """Limits this process to one thread, because one such process runs on each core."""
    latent_file.use_one_thread()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


class _SourceReader:
    """Reads the source of a task, and adds up statistics, digests and places of its rows."""

    def __init__(self, task: ShardTask):
        """Reads the inputs of the task, but no latents."""
        self._task = task
        self._inputs = task.inputs.open()
        self._text = ''
        text_dim = 0
        if task.text:
            self._text = task.text.feature
            # Tokens are ids, of which no statistics are kept.
            if self._text == schema.TEXT_EMBEDDING:
                text_dim = task.text.dim
        self.statistics = ShardStatistics(text_dim, task.channels)
        self.read: list[str] = []  # digests of files
        # Of latents in place: each file with the places of its records, window by window.
        self._places: list[tuple[columns.InPlaceFile, list[np.ndarray]]] = []

    def list_places(self) -> tuple[tuple[columns.InPlaceFile, np.ndarray], ...]:
        """Returns the `sources` of a `ShardResult`; none if the latents are in the records."""
        sources = []
        for file, windows in self._places:
            places = np.empty((0, 2), '<u4')
            # All records of a file may have been dropped.
            if windows:
                places = np.concatenate(windows)
            sources.append((file, places))
        return tuple(sources)

    def read_segment(self, segment: ShardSegment, latents_path: str) -> Iterator[Features]:
        """Yields the good records of one file in windows, each of which may overwrite the last."""
        file = formats.open_file(segment.file, latents_path, self._task.latents_from)
        rows = self._inputs.rows[segment.records]
        keys = self._inputs.keys[segment.records]
        # Before a row is read: it may be that of another sample now.
        if file.digest != segment.digest or not np.array_equal(file.keys[rows], keys):
            raise _changed_source(segment.file)
        self.read.append(file.digest)
        if self._task.in_place:
            self._places.append((make_column_file(segment.file, file), []))
        is_read = np.ones(len(rows), bool)
        if segment.sampled_rows is not None:
            is_read = np.isin(rows, segment.sampled_rows)
        step = min(ROWS_AT_ONCE, _BYTES_AT_ONCE // file.row_nbytes)
        # One row may have more bytes.
        step = max(1, step)
        for start in range(0, len(rows), step):
            stop = min(start + step, len(rows))
            # The inputs are those of the whole shard, numbered from its first record.
            window = slice(segment.records.start + start, segment.records.start + stop)
            yield self._read_rows(file, window, is_read[start:stop])
        # The heads were checked above: a local file that was written since then may have other
        # rows. A remote one was copied before, so it cannot change meanwhile.
        if not segment.file.is_unchanged():
            raise _changed_source(segment.file)

    def _read_rows(
        self, file: latent_file.LatentFile, window: slice, is_read: np.ndarray
    ) -> Features:
        """Returns the good records of a window; `is_read` says of each whether to read its latents.

        Those that are not read count as good. Of a head, the middle crops are read.
        """
        keys = self._inputs.keys[window]
        rows = self._inputs.rows[window]
        captions: Sequence[bytes] = self._inputs.captions[window]
        text = self._read_text(file, window)
        raw, stored = file.latents(rows[is_read])
        if self._task.reads_heads:
            middle = schema.middle_crop(stored.shape[1])
            # The others are holes of the head.
            stored = stored[:, middle : middle + 1]
        latents, deviations = split_moments(stored, self._task.moments)
        sums = sum_channels(latents, deviations)
        # The statistics need the sums, which show infinity and NaN in a thousandth of the numbers.
        good = ~is_read
        good[is_read] = sums.are_finite
        if text is not None and self._text == schema.TEXT_EMBEDDING:
            # Infinity and NaN have all bits of the exponent; `isfinite` takes 13 times as long.
            good &= ((text.view(np.uint16) & 0x7C00) != 0x7C00).all(axis=1)
        if not good.all():
            if not self._task.drop_bad:
                self._raise_non_finite(file.path, keys[good.argmin()])
            self.statistics.add_non_finite(keys[~good])
            # `raw`, `latents` and `sums` have only the rows that were read.
            good_read = good[is_read]
            raw = raw[good_read]
            latents = latents[good_read]
            sums = ChannelSums(sums.sums[good_read], sums.squares[good_read])
            keys = keys[good]
            rows = rows[good]
            is_read = is_read[good]
            captions = list(compress(captions, good))
            if text is not None:
                text = text[good]
        self.statistics.add(
            keys,
            captions,
            latents,
            sums,
            text,
            latent_scale=self._task.latent_scale,
            is_read=is_read,
        )
        features: Features = {schema.KEY: keys, schema.CAPTION: captions}
        if self._task.in_place:
            self._add_places(file, rows, raw)
        else:
            features[schema.LATENTS] = raw
        if text is not None:
            features[self._text] = text.view(np.uint8)
        return features

    def _add_places(self, file: latent_file.LatentFile, rows: np.ndarray, raw: np.ndarray) -> None:
        """Adds where the rows of a window lie, with checksums of their bytes `raw`."""
        # Of a sample that was read in ranges, nothing has compared the bytes.
        checksums = np.zeros(len(rows), np.uint32)
        if not self._task.reads_heads:
            checksums = column_file.row_checksums(raw)
        places = np.stack([file.row_numbers(rows), checksums], axis=1)
        _, windows = self._places[-1]
        windows.append(places.astype('<u4'))

    def _read_text(self, file: latent_file.LatentFile, window: slice) -> np.ndarray | None:
        """Returns embeddings, float16 `(n, dim)`, or tokens, int32 `(n, T)`; None without text."""
        if not self._task.text:
            return None
        if self._inputs.text is not None:
            return self._inputs.text[window]
        embeddings = file.embeddings(self._inputs.rows[window])
        # What float16 cannot hold becomes inf, and the record counts as not finite.
        with np.errstate(over='ignore'):
            return embeddings.astype(np.float16)

    def _raise_non_finite(self, path: str, key: int) -> None:
        """Raises the ValueError for a row of a file whose numbers are not finite."""
        text = ''
        if self._task.text:
            text = f' (or its {schema.PT_EMBEDDINGS})'
        raise ValueError(
            f'{path}: {schema.PT_LATENTS} of key {key}{text} are not finite, or too large to be. '
            'Remove the sample or make it again, or set bad_data to "drop" in the config.'
        )


def _changed_source(file: StoredFile) -> ValueError:
    """Returns the error for a file that is no longer the one that was planned with."""
    return ValueError(f'{file.path}: has changed since the build began. Start it again.')
