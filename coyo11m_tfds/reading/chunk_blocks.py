"""The engine `chunks`: batches out of chunks of records, each fetched with one request.

    read = chunk_blocks.Chunks(split, reader, files, 64).read
    blocks = row_plan.train_blocks(order, range(16), batch_size=256, start=1000)
    batches = rows.train_batches(read, blocks, prefetch=2)

A block of batches is filled chunk by chunk: `RowReader` finds the records, compares them with their
checksums and gathers their values, as in mapped files. Then the bytes of the chunk are dropped.
While one block is given out, the next one is filled.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from absl import logging

from coyo11m_tfds.dataset.stored_dataset import IndexedSplit
from coyo11m_tfds.reading.ahead import Ahead
from coyo11m_tfds.reading.column_reader import ColumnReader
from coyo11m_tfds.reading.fetched_files import FetchedFiles, Range
from coyo11m_tfds.reading.row_plan import Block
from coyo11m_tfds.reading.row_reader import Batch, RowReader

# How often a chunk with a damaged record is fetched: its bytes may have been changed on the way.
_ATTEMPTS = 3

# At least so many records are gathered together, so that NumPy's calls cost little for each.
_GROUP_RECORDS = 1024

# The ranges of files that hold the values of its records; the first one has the records.
Chunk = tuple[Range, ...]


def find_chunks(
    split: IndexedSplit,
    columns: Collection[ColumnReader],
    shard: np.ndarray,
    first: np.ndarray,
    count: np.ndarray,
) -> list[Chunk]:
    """What runs of records need of fetched files.

    Args:
        split: that they are in.
        columns: that are read with them.
        shard, first: number and first record of each run, int64 `(n,)`.
        count: its records, at least 1.
    """
    begin, nbytes = split.index.byte_range(shard, first, count)
    records = zip(shard.tolist(), begin.tolist(), (begin + nbytes).tolist(), strict=True)
    number = split.first_numbers[shard] + first
    of_columns = [column.ranges(number, count) for column in columns]
    return [
        (record, *itertools.chain(*rows))
        for record, *rows in zip(records, *of_columns, strict=True)
    ]


class _Plan(NamedTuple):
    """A block of rows, and the chunks that they are in.

    Attributes:
        block: the rows.
        chunks: all that hold any of the rows.
        rows: places in the block, ordered by their chunks.
        ends: for each chunk one past its last place in `rows`.
    """

    block: Block
    chunks: list[Chunk]
    rows: np.ndarray
    ends: np.ndarray


class Chunks:
    """Reads blocks of rows of one split."""

    def __init__(
        self,
        split: IndexedSplit,
        reader: RowReader,
        files: FetchedFiles,
        chunk: int,
    ):
        """Takes a reader of these files, and how many records are fetched together."""
        self._split = split
        self._reader, self._files, self._chunk = reader, files, chunk

    def read(self, blocks: Iterator[Block]) -> Iterator[Batch]:
        """The batches of all blocks, one after the other.

        Raises:
            ValueError, OSError: as of `RowReader.read`; or a file cannot be read.
        """
        for (steps, size), values in Ahead(self._fill(blocks), 1, 'chunks'):
            for step in range(steps):
                part = slice(step * size, (step + 1) * size)
                # A batch that is kept must not keep its block.
                yield {name: x[part].copy() for name, x in values.items()}

    def _fill(self, blocks: Iterator[Block]) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """Yields for each block its batches and their rows, and all values one after the other."""
        try:
            plans = itertools.chain(map(self._plan, blocks), [None])
            plan = next(plans)
            self._files.ask(_ranges(plan.chunks if plan else []))
            while plan:
                following = next(plans)
                both = set(following.chunks).intersection(plan.chunks) if following else set()
                if following:
                    self._files.ask(_ranges(x for x in following.chunks if x not in both))
                yield plan.block.shard.shape, self._gather(plan, both)
                plan = following
        finally:
            self._files.close()

    def _plan(self, block: Block) -> _Plan:
        shard, record = block.shard.ravel(), block.record.ravel()
        chunks, of_chunk = np.unique((shard << 32) + record // self._chunk, return_inverse=True)
        shards, first = chunks >> 32, (chunks & 0xFFFFFFFF) * self._chunk
        count = np.minimum(self._split.index.shard_lengths[shards] - first, self._chunk)
        rows = np.argsort(of_chunk, kind='stable')
        ends = np.cumsum(np.bincount(of_chunk))
        found = find_chunks(self._split, self._reader.columns.values(), shards, first, count)
        return _Plan(block, found, rows, ends)

    def _gather(self, plan: _Plan, kept: set[Chunk]) -> Batch:
        """The values of a block; forgets its chunks but for those that are kept."""
        values: Batch = {}
        each = -(-_GROUP_RECORDS // self._chunk)
        for first in range(0, len(plan.chunks), each):
            chunks = plan.chunks[first : first + each]
            start = plan.ends[first - 1] if first else 0
            rows = plan.rows[start : plan.ends[first + len(chunks) - 1]]
            self._files.take(_ranges(chunks))
            for name, x in self._read(plan.block, rows).items():
                if name not in values:
                    values[name] = np.empty((len(plan.rows), *x.shape[1:]), x.dtype)
                values[name][rows] = x
            self._files.drop(_ranges(chunk for chunk in chunks if chunk not in kept))
        return values

    def _read(self, block: Block, rows: np.ndarray) -> Batch:
        """The values of some rows; those of damaged records come from the last attempt."""
        where = Block(*(x.ravel()[rows] for x in block))
        found = self._reader.find(*where)
        good = self._reader.check(found)
        for _ in range(_ATTEMPTS - 1):
            if good.all():
                break
            damaged = self._plan(Block(*(x[~good] for x in where))).chunks
            self._files.take_again(_ranges(damaged))
            found = self._reader.find(*where)
            again = self._reader.check(found)
            if again.all():
                path = self._files.path_of(damaged[0][0][0])
                logging.warning('%s: a read failed and succeeded when tried again.', path)
            good = again
        return self._reader.read(found, good)


def _ranges(chunks: Iterable[Chunk]) -> Iterator[Range]:
    return itertools.chain.from_iterable(chunks)
