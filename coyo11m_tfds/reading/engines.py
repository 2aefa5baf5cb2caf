"""Reads a split with a chunk index in one of two ways: by rows of mapped files, or by chunks.

By rows, each batch is gathered when it is needed, and the system reads later rows in advance. By
chunks, a block of batches is filled while the loop uses the block before it.

A chunk is a run of records that lie one after the other in a shard. A block is some consecutive
batches that are planned together; its records lie in few chunks, but in any order.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.memory.fetched_files import FetchedFiles, SplitCache
from coyo11m_tfds.memory.files import MAX_FILES, HeldFiles, MappedFiles
from coyo11m_tfds.process import preparation
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.reading import block_loop, damage
from coyo11m_tfds.reading.batches import MASK, Ahead, ArraySpec, Batch, Batches
from coyo11m_tfds.reading.cached_files import CachedFiles, CacheWatch
from coyo11m_tfds.reading.column_reader import open_column
from coyo11m_tfds.reading.opened_splits import OpenedSplit, engine_name, open_splits
from coyo11m_tfds.reading.options import ReadOptions
from coyo11m_tfds.reading.row_reader import (
    BatchFeatures,
    RowReader,
    check_text_feature,
    stored_specs,
)
from coyo11m_tfds.sampling.filters import KeptRecords, find_kept
from coyo11m_tfds.sampling.mixture import BatchShares, Cursor, Position
from coyo11m_tfds.sampling.order import RecordBlock, eval_blocks
from coyo11m_tfds.storage import json_digest, range_cache


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
        mapped_files: MappedFiles | None = None,
    ):
        """Adds its files to mapped ones, which it shares with readers of other splits."""
        self.options = options
        self.is_mapped = opened.is_mapped
        self._split = opened.indexed
        stored = options.stored
        features = options.feature_names
        # Before the files of columns are opened, perhaps in a bucket.
        check_text_feature(stored.folder, text, features)
        num_records = int(self._split.index.shard_lengths.sum())
        self._columns = {}
        try:
            for name, described in stored.find_columns(features, text).items():
                column = open_column(described, stored.folder, options.split, num_records)
                self._columns[name] = column
        except ValueError as error:
            # What its description says of a column was true when the column was added.
            raise DamagedError(*error.args) from error
        # A column replaces the feature of its name in the records.
        specs = stored_specs(stored)
        for name, column in self._columns.items():
            specs[name] = ArraySpec(column.shape, column.dtype)
        # A single text of the records needs no choice.
        has_choice = text.in_columns or text.size > text.texts[0].size
        self._features = BatchFeatures(
            features,
            specs,
            seed=seed,
            caption_dropout=caption_dropout,
            crop=crop,
            all_crops=all_crops,
            with_mask=with_mask,
            text=text if has_choice else None,
        )
        stored.check_features(sorted(self._features.in_records))
        # Before the first batch, whose memory later ones use again.
        preparation.keep_freed_memory()
        self._bad_records = damage.BadRecords(
            options.on_bad_records, options.max_bad_fraction, num_records, options.counter
        )
        # One for all reads: it remembers which records have been compared with their checksums.
        self.mapped_reader = None
        if self.is_mapped:
            self.mapped_reader = self._row_reader(mapped_files or MappedFiles(), options.verify)
        self._cache = None
        if options.cache_dir and not self.is_mapped:
            ranges = range_cache.open_cache(options.cache_dir, options.cache_gb * 1e9)
            self._cache = SplitCache(ranges, self._split.index.shard_digest)
        self._cache_watch = self._watch_cache()

    @property
    def raw_nbytes(self) -> int:
        """Size of a sample in the files, in bytes."""
        column_nbytes = sum(column.row_nbytes for column in self._columns.values())
        return self._split.record_nbytes + column_nbytes

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Returns shape and dtype of each array in a batch of `size` rows."""
        return self._features.spec(size)

    def read_blocks(self, blocks: Iterator[RecordBlock], in_flight: int) -> Iterator[Batch]:
        """Yields the batches of all blocks; fetches `in_flight` chunks at once."""
        if self.mapped_reader:
            return map(self.mapped_reader.gather_latents, self.read_mapped(blocks))
        if self._cache_watch:
            return self._read_kept(self._cache_watch, blocks, in_flight)
        return self._read_fetched(blocks, in_flight)

    def read_mapped(self, blocks: Iterator[RecordBlock]) -> Iterator[Batch]:
        """Yields batches as `RowReader.read` does: with the places of latents."""
        assert self.mapped_reader
        return self._read_by_rows(self.mapped_reader, blocks)

    def read_block(self, block: RecordBlock, pool: ThreadPool) -> Batch:
        """Reads a block of one chunk with the threads of a pool."""
        reader = self._fetching_reader(1, pool)
        parts = self._read_parts(reader, iter([block]))
        # To the end, so that the files are closed.
        ((_, values),) = block_loop.fill_blocks(reader, parts)
        return values

    def _row_reader(self, files: HeldFiles, verify: str) -> RowReader:
        """Returns a reader of the split out of files to which it is added now."""
        return RowReader(
            self._split,
            self._features,
            self.options.stored.record_layout,
            verify=verify,
            bad_records=self._bad_records,
            columns=self._columns,
            files=files,
        )

    def _read_parts(
        self, reader: RowReader, blocks: Iterator[RecordBlock]
    ) -> Iterator[block_loop.PartRead]:
        """Yields the rows of blocks as `block_loop.read_parts` does."""
        return block_loop.read_parts(reader, blocks, self.options.chunk, self._piece_size())

    def _fetching_reader(self, in_flight: int, pool: ThreadPool | None = None) -> RowReader:
        """Returns a reader that fetches files; without a `pool`, with threads of its own."""
        # Whatever `verify` says: bytes may change on each of their ways.
        return self._row_reader(self._make_files(in_flight, pool), damage.ALWAYS)

    def _make_files(self, in_flight: int, pool: ThreadPool | None = None) -> FetchedFiles:
        """Returns files of which the ranges of `in_flight` chunks are fetched at once."""
        # The records of a chunk are one range of a shard, and its rows are one of each column.
        ranges_per_chunk = 1 + len(self._columns)
        max_in_flight = in_flight * ranges_per_chunk
        return FetchedFiles(max_in_flight, self.options.counter, pool, self._cache)

    def _watch_cache(self) -> CacheWatch | None:
        """Returns what tells when the cache holds the split; None if it is never mapped."""
        num_shards = len(self._split.index.shard_lengths)
        columns = self._columns.values()
        num_files = num_shards + sum(len(column.files) for column in columns)
        if not self._cache or num_files > MAX_FILES:
            return None
        # Rows without checksums are compared only with those of the pages in the cache.
        if any(column.unchecked for column in columns):
            return None
        # Fetches what is damaged in the cache, one range after the other.
        files = CachedFiles(self._make_files(1), self._cache)
        # A crash of the machine may have left checksums of pages that were never written. So what
        # the cache holds is compared at least once.
        verify = self.options.verify
        if verify == damage.NEVER:
            verify = damage.ONCE
        return CacheWatch(
            self._row_reader(files, verify),
            files,
            self._cache,
            num_shards,
            self._records_to_read,
            chunk=self.options.chunk,
            piece=self._piece_size(),
        )

    def _piece_size(self) -> int:
        """Returns the fewest records of a chunk that are fetched without the others."""
        # A condition may leave out most records. Without one, chunks are fetched whole, so that
        # blocks with pieces of one chunk share its request.
        if self.options.source.where:
            return schema.CHUNK_STRIDE
        return self.options.chunk

    def _records_to_read(self, shard: int) -> np.ndarray:
        """Returns the numbers of a shard's records that are read, or of one for each chunk."""
        kept = kept_records(self.options)
        # Without a condition chunks are fetched whole, so that one record stands for its chunk.
        if kept is None:
            num_records = self._split.index.shard_lengths[shard]
            return np.arange(0, num_records, self.options.chunk)
        number = np.arange(kept.lengths[shard])
        return kept.locate(np.full_like(number, shard), number)

    def _read_by_rows(
        self, reader: RowReader, blocks: Iterator[RecordBlock], is_cached: bool = False
    ) -> Iterator[Batch]:
        """Yields batches with the places of latents, and counts their bytes."""
        row_nbytes = 0
        for shape, dtype in self.spec(1).values():
            row_nbytes += dtype.itemsize * math.prod(shape)
        for _, rows, batch in self._read_parts(reader, blocks):
            # Nobody knows which pages the system has read for it, so the bytes of rows count.
            if self.options.counter:
                num_bytes = len(rows) * row_nbytes
                self.options.counter.add(num_bytes=num_bytes)
                if is_cached:
                    self.options.counter.add(cache_hits=1, cache_bytes=num_bytes)
            yield batch

    def _read_kept(
        self, watch: CacheWatch, blocks: Iterator[RecordBlock], in_flight: int
    ) -> Iterator[Batch]:
        """Yields batches of fetched blocks until the cache holds all, and then of the cache."""
        # The block at which the cache turned out to be complete: taken, but not fetched.
        first_by_rows: list[RecordBlock] = []

        def fetched_blocks() -> Iterator[RecordBlock]:
            for block in blocks:
                if watch.is_complete():
                    first_by_rows.append(block)
                    # Ends the fetching reader, which yields the blocks that it has begun.
                    return
                yield block

        yield from self._read_fetched(fetched_blocks(), in_flight)
        others = itertools.chain(first_by_rows, blocks)
        by_rows = self._read_by_rows(watch.reader, others, is_cached=True)
        yield from map(watch.reader.gather_latents, by_rows)

    def _read_fetched(self, blocks: Iterator[RecordBlock], in_flight: int) -> Iterator[Batch]:
        """Yields the batches of blocks, which are filled one ahead."""
        # Here, so that the threads that fetch belong to the one that reads, and end with it.
        reader = self._fetching_reader(in_flight)
        parts = self._read_parts(reader, blocks)
        filled_blocks = block_loop.fill_blocks(reader, parts)
        # A thread fills a block while the loop uses the one before it.
        for (steps, size), values in Ahead(filled_blocks, 1, 'chunks'):
            for step in range(steps):
                first = step * size
                rows = slice(first, first + size)
                # A batch that is kept must not keep its block.
                yield {name: x[rows].copy() for name, x in values.items()}


# How keys are read that a condition compares: all of the split once, with nothing else to do, so in
# larger requests than those of training.
_KEYS_CHUNK = 256
_KEYS_IN_FLIGHT = 16


def kept_records(options: ReadOptions) -> KeptRecords | None:
    """Returns the records of a split that the condition of its source keeps; None for all."""
    source = options.source
    split = options.stored.split(options.split)
    if source.where is None or split is None:
        return None
    # A run plans, trains and evaluates with the same source: it reads the columns once.
    if options.split not in source.kept:
        lengths = split.index.shard_lengths
        read_keys = functools.partial(read_split_keys, options, int(lengths.sum()))
        source.kept[options.split] = find_kept(
            source.where, source.stored, options.split, lengths, read_keys
        )
    return source.kept[options.split]


def read_split_keys(options: ReadOptions, num_records: int, size: int) -> Iterator[np.ndarray]:
    """Yields the keys of all records, `size` at a time; masked where a bad record is skipped."""
    key_options = ReadOptions(
        data=options.stored,
        batch_size=size,
        features=(schema.KEY,),
        split=options.split,
        chunk=_KEYS_CHUNK,
        parallel_reads=_KEYS_IN_FLIGHT,
        on_bad_records=options.on_bad_records,
        max_bad_fraction=options.max_bad_fraction,
        # Each is read once, so ALWAYS compares no more than ONCE, and remembers nothing.
        verify=damage.ALWAYS,
        **options.cache_fields,
    )
    splits = open_splits(key_options)
    assert splits, 'a source with a condition has a chunk index'
    for batch in EvalReader(key_options, splits[0]).read():
        # Zeros fill the last batch.
        keys = batch[schema.KEY][:num_records]
        is_readable = batch[MASK][:num_records]
        if is_readable.all():
            yield keys
        else:
            yield np.ma.array(keys, mask=~is_readable)
        num_records -= len(keys)


def read_split(options: ReadOptions, opened: OpenedSplit) -> Batches:
    """Returns this process's share of all records of an opened split, once, as batches."""
    reader = EvalReader(options, opened)
    spec = reader.spec(options.local_batch_size)
    engine = engine_name(options, [opened])
    return resumable_eval(options, spec, reader.num_batches, reader.read, engine)


def resumable_eval(
    options: ReadOptions,
    spec: Mapping[str, ArraySpec],
    num_batches: int,
    read: Callable[[int], Iterator[Batch]],
    engine: str,
) -> Batches:
    """Returns all batches of an evaluation; `read(n)` yields those after the first n."""
    # Another batch size or number of processes would give the records to other steps.
    identity = [options.source.identity(options.split), options.batch_size, options.process_count]
    digest = json_digest.sha256(identity)[:16]
    # The samples in a state count those of all processes, as if they were one lane: one of the
    # streams that training has.
    cursor = Cursor(Position(0, (0,)), BatchShares(options.batch_size), (digest,))
    return Batches(
        lambda cursor: read(cursor.position.step),
        cursor,
        spec,
        num_batches,
        options.process,
        options.batches_ahead,
        options.describe(engine),
    )


class EvalReader(SplitReader):
    """Reads one process's share of all records once, in the order of the shards."""

    def __init__(self, options: ReadOptions, opened: OpenedSplit):
        options = options.for_source(options.source)
        self._kept = kept_records(options)
        # Number of records to read in each shard.
        self._lengths = opened.indexed.index.shard_lengths
        if self._kept is not None:
            self._lengths = self._kept.lengths
        num_records = int(self._lengths.sum())
        if not num_records:
            raise ValueError(
                f'{options.stored.folder}: split {options.split!r} is empty; name another split, '
                'or build with a larger validation_fraction'
            )
        # The same for all processes: where they compute together, one that ended early would leave
        # the others waiting.
        self.num_batches = -(-num_records // options.batch_size)
        per_process = self.num_batches * options.local_batch_size
        # Consecutive records, so that each process reads few chunks of the others.
        first = options.process_index * per_process
        self._own_records = range(num_records)[first : first + per_process]
        text = options.stored.choose_texts(options.text).first
        super().__init__(options, opened, text, crop=0, with_mask=True)

    def read(self, start: int = 0) -> Iterator[Batch]:
        """Returns the batches after the first `start`, with rows of zeros to fill the last ones."""
        size = self.options.local_batch_size
        records = self._own_records[start * size :]
        blocks = eval_blocks(self._lengths, records.start, records.stop, size, self._kept)
        batches = self.read_blocks(blocks, self.options.parallel_reads)
        # Processes at the end of the split have fewer records, but as many batches.
        no_rows = {name: np.zeros(*spec) for name, spec in self.spec(0).items()}
        batches = itertools.chain(batches, itertools.repeat(no_rows))
        num_left = self.num_batches - start
        for batch in itertools.islice(batches, num_left):
            yield {name: _pad_rows(x, size) for name, x in batch.items()}


def _pad_rows(x: np.ndarray, size: int) -> np.ndarray:
    """Returns an array with rows of zeros, or of empty strings, after its own."""
    if len(x) == size:
        return x
    num_missing = size - len(x)
    padding = np.zeros((num_missing, *x.shape[1:]), x.dtype)
    # Zeros of objects are the number 0, and captions are bytes.
    if x.dtype == object:
        padding[:] = b''
    return np.concatenate([x, padding])
