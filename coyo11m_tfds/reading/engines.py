"""Reads a split with a chunk index in one of two ways: by rows of mapped files, or by chunks.

By rows, each batch is gathered when it is needed, and the system reads later rows in advance. By
chunks, a block of batches is filled while the loop uses the block before it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit, StoredDataset
from coyo11m_tfds.reading import damage, process_settings
from coyo11m_tfds.reading.batches import Ahead, ArraySpec, Batch
from coyo11m_tfds.reading.column_reader import ColumnReader, open_column
from coyo11m_tfds.reading.features import BatchFeatures, check_text_feature, stored_specs
from coyo11m_tfds.reading.files import MAX_FILES, FetchedFiles, Range, ReadCounter
from coyo11m_tfds.reading.options import CHUNKS, ROWS, TF_DATA, ReadOptions
from coyo11m_tfds.reading.order import RecordBlock
from coyo11m_tfds.reading.raw_memory import LazyBatch, gather_batch
from coyo11m_tfds.reading.row_reader import RowReader

# How often a chunk with a damaged record is fetched: its bytes may have been changed on the way.
_ATTEMPTS = 3

# Fewest records of chunks to gather together, so that the cost of NumPy's calls is small.
_GROUP_RECORDS = 1024

# The ranges of files that hold the values of its records; the first one has the records.
_Chunk = tuple[Range, ...]


class OpenedSplit(NamedTuple):
    indexed: IndexedSplit
    is_mapped: bool  # whether its files are mapped and read by rows, or fetched by chunks


def open_splits(options: ReadOptions, lanes: int | None = None) -> tuple[OpenedSplit, ...] | None:
    """Opens the split of each source; None for a single source without a chunk index."""
    splits = [_open_split(x.stored, options.split, options.engine) for x in options.sources]
    opened = tuple(x for x in splits if x)
    if len(opened) < len(splits) and (opened or len(splits) > 1 or options.source.where):
        folder = options.sources[splits.index(None)].stored.folder
        raise ValueError(
            f'{folder}: cannot be mixed or filtered without a chunk index. Build it again.'
        )
    # Without a chunk index there are no lanes.
    options.check_shares(lanes if opened else None)
    return opened or None


def engine_name(options: ReadOptions, splits: Sequence[OpenedSplit] | None) -> str:
    """Returns the engine that reads opened splits; CHUNKS if it reads one of several."""
    if splits is None or options.engine == TF_DATA:
        return TF_DATA
    return ROWS if all(x.is_mapped for x in splits) else CHUNKS


def _open_split(stored: StoredDataset, name: str, engine: str) -> OpenedSplit | None:
    split = None if engine == ROWS and not stored.can_map else stored.split(name)
    if split is None:
        if engine == ROWS:
            raise ValueError(
                f'{stored.folder}: engine={ROWS!r} needs local files, also of latents in place, '
                f'and a chunk index of split {name!r}: set engine={CHUNKS!r}'
            )
        return None
    # Others are read by chunks unless the caller wants an error.
    can_map = stored.can_map and len(split.index.shard_lengths) <= MAX_FILES
    return OpenedSplit(split, engine == ROWS or (can_map and engine != CHUNKS))


class SplitReader:
    """Reads blocks of rows of one split, and counts the bad records of all blocks together."""

    def __init__(
        self,
        options: ReadOptions,
        opened: OpenedSplit,
        text: texts.TextMixture,
        *,
        with_mask: bool,
        seed: int = 0,
        caption_dropout: float = 0.0,
        crop: int | None = None,
        all_crops: bool = False,
    ):
        self.options, stored = options, options.stored
        self._split, self.is_mapped = opened
        features = options.feature_names
        check_text_feature(stored.folder, text, features)
        num_records = int(self._split.index.shard_lengths.sum())
        columns = stored.find_columns(features, text)
        try:
            self._columns = {
                name: open_column(column, stored.folder, options.split, num_records)
                for name, column in columns.items()
            }
        except ValueError as error:
            raise DamagedError(*error.args) from error
        column_specs = {x: ArraySpec(c.shape, c.dtype) for x, c in self._columns.items()}
        self._features = BatchFeatures(
            features,
            stored_specs(stored) | column_specs,
            seed=seed,
            caption_dropout=caption_dropout,
            crop=crop,
            all_crops=all_crops,
            with_mask=with_mask,
            text=text if text.in_columns or text.size > text.texts[0].size else None,
        )
        stored.check_features(sorted(self._features.in_records))
        process_settings.keep_freed_memory()
        self._bad_records = damage.BadRecords(
            options.on_bad_records, options.max_bad_fraction, num_records, options.counter
        )
        # One for all lanes: it remembers which records have been compared with their checksums.
        self.mapped_reader = self._row_reader(None) if self.is_mapped else None

    @property
    def raw_nbytes(self) -> int:
        """Size of a sample in the files, in bytes."""
        return self._split.record_nbytes + sum(x.row_nbytes for x in self._columns.values())

    def spec(self, size: int) -> dict[str, ArraySpec]:
        return self._features.spec(size)

    def read_blocks(self, blocks: Iterator[RecordBlock], in_flight: int) -> Iterator[LazyBatch]:
        """Yields the batches of all blocks; fetches `in_flight` chunks at once."""
        if self.mapped_reader:
            return _read_rows(self.mapped_reader, blocks, self.options.counter)
        return self._chunk_reader(in_flight).read(blocks)

    def read_block(self, block: RecordBlock, pool: ThreadPoolExecutor) -> Batch:
        """Reads a block of one chunk with the threads of a pool."""
        ((_, values),) = self._chunk_reader(1, pool).read_blocks(iter([block]))
        return values

    def _chunk_reader(
        self, in_flight: int, pool: ThreadPoolExecutor | None = None
    ) -> '_ChunkReader':
        split, max_in_flight = self._split, in_flight * (1 + len(self._columns))
        counter = self.options.counter
        files = FetchedFiles(split.file, split.file_sizes, max_in_flight, counter, pool)
        return _ChunkReader(split, self._row_reader(files), files, self.options)

    def _row_reader(self, files: FetchedFiles | None) -> RowReader:
        return RowReader(
            self._split,
            self._features,
            self.options.stored.record_layout,
            verify=damage.ALWAYS if files else self.options.verify,
            bad_records=self._bad_records,
            columns={name: ColumnReader(opened, files) for name, opened in self._columns.items()},
            files=files,
        )


def _read_rows(
    reader: RowReader, blocks: Iterator[RecordBlock], counter: ReadCounter | None
) -> Iterator[LazyBatch]:
    # The first block has no block before it that could announce its rows.
    block = next(blocks, None)
    if block is not None:
        for file_range in reader.ranges_ahead(block.shard.ravel(), block.record.ravel()):
            reader.will_need(file_range)
    while block is not None:
        steps, size = block.shard.shape
        located = reader.locate(*(x.ravel() for x in block))
        block = next(blocks, None)
        ranges = []
        if block is not None:
            ranges = reader.ranges_ahead(block.shard.ravel(), block.record.ravel())
        for step in range(steps):
            # A few at each step: the disk reads them while this block is used.
            for file_range in ranges[step::steps]:
                reader.will_need(file_range)
            rows = located.rows(slice(step * size, (step + 1) * size))
            batch = reader.read(rows, reader.check(rows))
            if counter:
                counter.add(num_bytes=sum(x.nbytes for x in batch.values()))
            yield batch


class _ChunkedBlock(NamedTuple):
    block: RecordBlock
    chunks: list[_Chunk]  # or pieces of chunks
    rows: np.ndarray  # numbers of all rows of the block, ordered by their chunks
    chunk_numbers: np.ndarray  # in `chunks`, of the chunk that holds each of `rows`


class _ChunkReader:
    def __init__(
        self, split: IndexedSplit, reader: RowReader, files: FetchedFiles, options: ReadOptions
    ):
        self._split = split
        self._reader = reader
        self._files = files
        self._chunk = options.chunk
        # Records of the smallest piece that is fetched. Without a condition chunks come whole, so
        # that blocks with pieces of a chunk share it.
        self._piece = schema.CHUNK_STRIDE if options.source.where else options.chunk

    def read(self, blocks: Iterator[RecordBlock]) -> Iterator[Batch]:
        for (steps, size), values in Ahead(self.read_blocks(blocks), 1, 'chunks'):
            for step in range(steps):
                rows = slice(step * size, (step + 1) * size)
                # A batch that is kept must not keep its block.
                yield {name: x[rows].copy() for name, x in values.items()}

    def read_blocks(self, blocks: Iterator[RecordBlock]) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """Yields the shape of each block, and the values of all its rows."""
        try:
            chunked_blocks = itertools.chain(map(self._find_chunks, blocks), [None])
            current = next(chunked_blocks)
            self._files.request(_ranges_of(current.chunks if current else []))
            while current:
                next_block = next(chunked_blocks)
                shared: set[Range] = set()
                if next_block:
                    next_ranges = list(_ranges_of(next_block.chunks))
                    shared = set(_ranges_of(current.chunks)).intersection(next_ranges)
                    self._files.request(x for x in next_ranges if x not in shared)
                yield current.block.shard.shape, self._gather(current, shared)
                current = next_block
        finally:
            self._files.close()

    def _find_chunks(self, block: RecordBlock) -> _ChunkedBlock:
        shard, record = block.shard.ravel(), block.record.ravel()
        pieces, inverse = np.unique((shard << 32) + record // self._piece, return_inverse=True)
        shard, first = pieces >> 32, (pieces & 0xFFFFFFFF) * self._piece
        # Pieces of one chunk that touch are fetched together.
        is_adjacent = (np.diff(pieces, prepend=-2) == 1) & (
            np.diff(first // self._chunk, prepend=-1) == 0
        )
        begins = np.flatnonzero(~is_adjacent)
        end = first[np.append(begins[1:], len(pieces)) - 1] + self._piece
        chunk_numbers = (np.cumsum(~is_adjacent) - 1)[inverse]
        # Rows are gathered chunk by chunk, and each chunk is freed after its last row.
        rows = np.argsort(chunk_numbers, kind='stable')
        chunks = self._chunk_ranges(shard[begins], first[begins], end)
        return _ChunkedBlock(block, chunks, rows, chunk_numbers[rows])

    def _chunk_ranges(self, shard: np.ndarray, first: np.ndarray, end: np.ndarray) -> list[_Chunk]:
        count = np.minimum(self._split.index.shard_lengths[shard], end) - first
        begin, nbytes = self._split.index.byte_range(shard, first, count)
        shard_ranges = zip(shard.tolist(), begin.tolist(), (begin + nbytes).tolist(), strict=True)
        number = self._split.first_numbers[shard] + first
        column_ranges = [column.ranges(number, count) for column in self._reader.columns.values()]
        return [
            (shard_range, *itertools.chain(*ranges))
            for shard_range, *ranges in zip(shard_ranges, *column_ranges, strict=True)
        ]

    def _gather(self, chunked: _ChunkedBlock, shared: set[Range]) -> Batch:
        """Gathers the values of a block; frees all its ranges except those in `shared`."""
        values: Batch = {}
        group_chunks = -(-_GROUP_RECORDS // self._chunk)
        for first in range(0, len(chunked.chunks), group_chunks):
            numbers = first, first + group_chunks
            group = slice(*np.searchsorted(chunked.chunk_numbers, numbers))
            ranges = list(_ranges_of(chunked.chunks[slice(*numbers)]))
            self._files.take(ranges)
            for name, x in self._gather_group(chunked, group).items():
                if name not in values:
                    values[name] = np.empty((len(chunked.rows), *x.shape[1:]), x.dtype)
                values[name][chunked.rows[group]] = x
            self._files.drop(x for x in ranges if x not in shared)
        return values

    def _gather_group(self, chunked: _ChunkedBlock, group: slice) -> Batch:
        """Gathers the values of some rows; those of damaged records come from the last attempt."""
        block = RecordBlock(*(x.ravel()[chunked.rows[group]] for x in chunked.block))
        located = self._reader.locate(*block)
        good = self._reader.check(located)
        for _ in range(_ATTEMPTS - 1):
            if good.all():
                break
            numbers = set(chunked.chunk_numbers[group][~good].tolist())
            damaged = [chunked.chunks[number] for number in numbers]
            self._files.fetch_again(_ranges_of(damaged))
            located = self._reader.locate(*block)
            good = self._reader.check(located)
            if good.all():
                path = self._files.path_of(damaged[0][0][0])
                logging.warning('%s: a read failed and succeeded when tried again.', path)
        return gather_batch(self._reader.read(located, good))


def _ranges_of(chunks: Iterable[_Chunk]) -> Iterator[Range]:
    return itertools.chain.from_iterable(chunks)
