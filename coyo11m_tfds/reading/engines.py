"""Reads a split with a chunk index in one of two ways: by rows of mapped files, or by chunks.

By rows, each batch is gathered from the page cache when it is needed, and rows of later batches are
announced to the system, so that the disk reads them in advance. By chunks, a block of batches is
filled chunk by chunk, as from mapped files, while the loop uses the block before it.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit, StoredDataset
from coyo11m_tfds.reading import damage, process_settings
from coyo11m_tfds.reading.batches import Ahead, ArraySpec, Batch
from coyo11m_tfds.reading.column_reader import ColumnReader, open_column
from coyo11m_tfds.reading.files import MAX_FILES, FetchedFiles, Range, ReadCounter
from coyo11m_tfds.reading.options import AUTO, CHUNKS, ROWS, TF_DATA, ReadOptions
from coyo11m_tfds.reading.order import Block
from coyo11m_tfds.reading.row_reader import Part, RowChoices, RowReader, gathered

# How often a chunk with a damaged record is fetched: its bytes may have been changed on the way.
_ATTEMPTS = 3

# At least so many records of chunks are gathered together, so that NumPy's calls cost little.
_GROUP_RECORDS = 1024

# The ranges of files that hold the values of its records; the first one has the records.
_Chunk = tuple[Range, ...]


class Opened(NamedTuple):
    """A split with a chunk index, and the engine that reads it."""

    split: IndexedSplit
    engine: str


def open_sources(options: ReadOptions) -> list[Opened] | None:
    """Opens the split of each source; None for a single source without a chunk index.

    Raises the errors of `open_split`, and a ValueError if a source has no chunk index although it
    is one of several or has a condition.
    """
    found = [open_split(x.stored, options.split, options.engine) for x in options.sources]
    if opened := [x for x in found if x]:
        if len(opened) == len(found):
            return opened
    elif len(found) == 1 and not options.source.where:
        return None
    without = options.sources[found.index(None)].stored.folder
    raise ValueError(
        f'{without}: cannot be mixed or filtered without a chunk index. Build it again.'
    )


def open_split(stored: StoredDataset, name: str, engine: str) -> Opened | None:
    """Opens a split to read it by rows or by chunks; None without a chunk index.

    Raises a ValueError if `engine` is 'rows' and its files cannot be mapped, and the errors of
    `StoredDataset.split`.
    """
    split = None if engine == ROWS and not stored.can_map else stored.split(name)
    if split is None and engine == ROWS:
        raise ValueError(
            f'{stored.folder}: engine={ROWS!r} needs local files, also of latents in place, and a '
            f'chunk index of split {name!r}: set engine={CHUNKS!r}'
        )
    if split is None:
        return None
    if engine in (AUTO, TF_DATA):
        by_rows = stored.can_map and len(split.index.shard_lengths) <= MAX_FILES
        engine = ROWS if by_rows else CHUNKS
    return Opened(split, engine)


class SplitReader:
    """Reads blocks of rows of one split, and counts the bad records of all blocks together."""

    def __init__(
        self, options: ReadOptions, opened: Opened, text: texts.TextMixture, **choices: Any
    ):
        """Opens the columns; `choices` holds further fields of `RowChoices`.

        Raises a ValueError if features or texts are not in the data set, or a `DamagedError` if the
        file of a column is missing or has changed.
        """
        self._split, self.options, stored = opened.split, options, options.stored
        _check_text(stored.folder, text, options)
        num_records = int(self._split.index.shard_lengths.sum())
        found = stored.find_columns(options.features, text)
        where = stored.folder, options.split, num_records
        try:
            self._columns = {name: open_column(found[name], *where) for name in found}
        except ValueError as error:
            raise DamagedError(*error.args) from error
        of_columns = {x: ArraySpec(c.shape, c.dtype) for x, c in self._columns.items()}
        self._choices = RowChoices(
            tuple(options.features),
            _stored_rows(stored) | of_columns,
            text=text if text.in_columns or text.size > text.texts[0].size else None,
            **choices,
        )
        stored.check_features(sorted(self._choices.in_records))
        process_settings.keep_freed_memory()
        self._bad_records = damage.BadRecords(
            options.on_bad_records, options.max_bad_fraction, num_records, options.counter
        )
        self._mapped = self._row_reader(None) if opened.engine == ROWS else None

    @property
    def is_mapped(self) -> bool:
        """Whether rows are read from mapped files, without memory for windows."""
        return self._mapped is not None

    @property
    def raw_nbytes(self) -> int:
        """Size of a sample in the files, in bytes."""
        of_columns = sum(column.row_nbytes for column in self._columns.values())
        return self._split.record_nbytes + of_columns

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Shape and dtype of each array in batches of `size` rows."""
        return self._choices.spec(size)

    def read_blocks(self, blocks: Iterator[Block], in_flight: int) -> Iterator[Part]:
        """Yields the batches of all blocks; fetches `in_flight` chunks at once."""
        split, counter = self._split, self.options.counter
        if self._mapped:
            return _read_rows(self._mapped, blocks, counter)
        at_once = in_flight * (1 + len(self._columns))
        files = FetchedFiles(split.file, split.file_sizes, at_once, counter)
        reader = self._row_reader(files)
        return _ChunkReader(split, reader, files, self.options).read(blocks)

    def _row_reader(self, files: FetchedFiles | None) -> RowReader:
        return RowReader(
            self._split,
            self._choices,
            self.options.stored.record_layout,
            verify=damage.ALWAYS if files else self.options.verify,
            bad_records=self._bad_records,
            columns={name: ColumnReader(opened, files) for name, opened in self._columns.items()},
            files=files,
        )


def _stored_rows(stored: StoredDataset) -> dict[str, ArraySpec]:
    """The shape and dtype of the large features of a data set."""
    dtype, shape = stored.latents
    known: dict[str, ArraySpec] = {
        schema.LATENTS: ArraySpec(shape, np.dtype(getattr(ml_dtypes, dtype, dtype))),
        schema.TEXT_EMBEDDING: ArraySpec((stored.text_dim,), np.dtype(np.float16)),
        schema.TOKENS: ArraySpec((stored.num_tokens,), np.dtype(np.int32)),
    }
    return {n: x for n, x in known.items() if all(x.shape)}


def _check_text(folder: str, text: texts.TextMixture, options: ReadOptions) -> None:
    """Raises a ValueError if the features include another kind of text than `text`."""
    other = schema.TEXT_DTYPES.keys() & set(options.features) - {text.feature}
    if text.in_columns and other:
        raise ValueError(
            f'{folder}: features has {min(other)!r}, but '
            f'text={text.names[0] or texts.RECORDS_TEXT!r} holds '
            f'{text.feature!r}; ask for that feature.'
        )


def _read_rows(
    reader: RowReader, blocks: Iterator[Block], counter: ReadCounter | None
) -> Iterator[Part]:
    block = next(blocks, None)
    if block is not None:
        for run in reader.prefetch(block.shard.ravel(), block.record.ravel()):
            reader.will_need(run)
    while block is not None:
        steps, size = block.shard.shape
        rows = reader.find(*(x.ravel() for x in block))
        block = next(blocks, None)
        runs = [] if block is None else reader.prefetch(block.shard.ravel(), block.record.ravel())
        for step in range(steps):
            for run in runs[step::steps]:
                reader.will_need(run)
            some = rows.part(slice(step * size, (step + 1) * size))
            batch = reader.read(some, reader.check(some))
            if counter:
                counter.add(num_bytes=sum(x.nbytes for x in batch.values()))
            yield batch


class _Plan(NamedTuple):
    """A block of rows, and the chunks that they are in."""

    block: Block
    chunks: list[_Chunk]  # or parts of chunks
    rows: np.ndarray  # places in the block, ordered by their chunks
    numbers: np.ndarray  # in `chunks`, of the chunk that holds each of `rows`


class _ChunkReader:
    """Reads blocks of rows with a reader of fetched files, some records at a time."""

    def __init__(
        self, split: IndexedSplit, reader: RowReader, files: FetchedFiles, options: ReadOptions
    ):
        self._split = split
        self._reader = reader
        self._files = files
        self._chunk = options.chunk
        # Records of the smallest part that is fetched. Without a condition chunks come whole, so
        # that blocks with parts of a chunk share it.
        self._run = schema.CHUNK_STRIDE if options.source.where else options.chunk

    def read(self, blocks: Iterator[Block]) -> Iterator[Batch]:
        for (steps, size), values in Ahead(self._fill(blocks), 1, 'chunks'):
            for step in range(steps):
                part = slice(step * size, (step + 1) * size)
                # A batch that is kept must not keep its block.
                yield {name: x[part].copy() for name, x in values.items()}

    def _fill(self, blocks: Iterator[Block]) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """Yields the batches of each block with their rows, and all values in turn."""
        try:
            plans = itertools.chain(map(self._plan, blocks), [None])
            plan = next(plans)
            self._files.ask(_ranges(plan.chunks if plan else []))
            while plan:
                following = next(plans)
                later = list(_ranges(following.chunks if following else []))
                both = set(later).intersection(_ranges(plan.chunks))
                self._files.ask(x for x in later if x not in both)
                yield plan.block.shard.shape, self._gather(plan, both)
                plan = following
        finally:
            self._files.close()

    def _plan(self, block: Block) -> _Plan:
        shard, record = block.shard.ravel(), block.record.ravel()
        runs, of_run = np.unique((shard << 32) + record // self._run, return_inverse=True)
        shard, first = runs >> 32, (runs & 0xFFFFFFFF) * self._run
        # Runs of one chunk that touch are fetched together.
        is_new = (np.diff(runs, prepend=-2) != 1) | (np.diff(first // self._chunk, prepend=-1) != 0)
        begins = np.flatnonzero(is_new)
        end = first[np.append(begins[1:], len(runs)) - 1] + self._run
        numbers = (np.cumsum(is_new) - 1)[of_run]
        rows = np.argsort(numbers, kind='stable')
        chunks = self._find_chunks(shard[begins], first[begins], end)
        return _Plan(block, chunks, rows, numbers[rows])

    def _find_chunks(self, shard: np.ndarray, first: np.ndarray, end: np.ndarray) -> list[_Chunk]:
        """Returns the ranges of files for chunks, or parts of them, from `first` to `end`."""
        count = np.minimum(self._split.index.shard_lengths[shard], end) - first
        begin, nbytes = self._split.index.byte_range(shard, first, count)
        records = zip(shard.tolist(), begin.tolist(), (begin + nbytes).tolist(), strict=True)
        number = self._split.first_numbers[shard] + first
        of_columns = [column.ranges(number, count) for column in self._reader.columns.values()]
        return [
            (record, *itertools.chain(*rows))
            for record, *rows in zip(records, *of_columns, strict=True)
        ]

    def _gather(self, plan: _Plan, kept: set[Range]) -> Batch:
        """Gathers the values of a block; frees all its ranges except those in `kept`."""
        values: Batch = {}
        each = -(-_GROUP_RECORDS // self._chunk)
        for first in range(0, len(plan.chunks), each):
            part = slice(*np.searchsorted(plan.numbers, (first, first + each)))
            ranges = list(_ranges(plan.chunks[first : first + each]))
            self._files.take(ranges)
            for name, x in self._gather_some(plan, part).items():
                if name not in values:
                    values[name] = np.empty((len(plan.rows), *x.shape[1:]), x.dtype)
                values[name][plan.rows[part]] = x
            self._files.drop(x for x in ranges if x not in kept)
        return values

    def _gather_some(self, plan: _Plan, part: slice) -> Batch:
        """Gathers the values of some rows; those of damaged records come from the last attempt."""
        where = Block(*(x.ravel()[plan.rows[part]] for x in plan.block))
        found = self._reader.find(*where)
        good = self._reader.check(found)
        for _ in range(_ATTEMPTS - 1):
            if good.all():
                break
            damaged = [plan.chunks[number] for number in set(plan.numbers[part][~good].tolist())]
            self._files.take_again(_ranges(damaged))
            found = self._reader.find(*where)
            good = self._reader.check(found)
            if good.all():
                path = self._files.path_of(damaged[0][0][0])
                logging.warning('%s: a read failed and succeeded when tried again.', path)
        return {name: gathered(x) for name, x in self._reader.read(found, good).items()}


def _ranges(chunks: Iterable[_Chunk]) -> Iterator[Range]:
    return itertools.chain.from_iterable(chunks)
