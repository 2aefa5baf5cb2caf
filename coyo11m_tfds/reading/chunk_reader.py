"""Reads blocks of rows by chunks that are fetched, with the rows of columns that belong to them.

    files = FetchedFiles(split.file, split.file_sizes, at_once, counter)
    parts = ChunkReader(split, reader, files, chunk=64).read(blocks)

A block of batches is filled chunk by chunk. One request fetches a chunk. Its records are found,
compared with their checksums and gathered as in mapped files, and its bytes are dropped. While the
loop uses one block, the next one is filled.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from absl import logging

from coyo11m_tfds.dataset.stored_dataset import IndexedSplit
from coyo11m_tfds.reading.batches import Ahead, Batch
from coyo11m_tfds.reading.files import FetchedFiles, Range
from coyo11m_tfds.reading.order import Block
from coyo11m_tfds.reading.row_reader import RowReader, gathered

# How often a chunk with a damaged record is fetched: its bytes may have been changed on the way.
_ATTEMPTS = 3

# At least so many records of chunks are gathered together, so that NumPy's calls cost little.
_GROUP_RECORDS = 1024

# The ranges of files that hold the values of its records; the first one has the records.
_Chunk = tuple[Range, ...]


class _Plan(NamedTuple):
    """A block of rows, and the chunks that they are in.

    Attributes:
        block: The rows.
        chunks: All chunks that hold any of the rows.
        rows: Places in the block, ordered by their chunks.
        ends: For each chunk one past its last place in `rows`.
    """

    block: Block
    chunks: list[_Chunk]
    rows: np.ndarray
    ends: np.ndarray


class ChunkReader:
    """Reads blocks of rows with a reader of fetched files, so many records at a time."""

    def __init__(self, split: IndexedSplit, reader: RowReader, files: FetchedFiles, chunk: int):
        self._split = split
        self._reader, self._files, self._chunk = reader, files, chunk

    def read(self, blocks: Iterator[Block]) -> Iterator[Batch]:
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
        rows = np.argsort(of_chunk, kind='stable')
        ends = np.cumsum(np.bincount(of_chunk))
        found = self._find_chunks(chunks >> 32, (chunks & 0xFFFFFFFF) * self._chunk)
        return _Plan(block, found, rows, ends)

    def _find_chunks(self, shard: np.ndarray, first: np.ndarray) -> list[_Chunk]:
        """What the chunks that begin with some records need of the files."""
        count = np.minimum(self._split.index.shard_lengths[shard] - first, self._chunk)
        begin, nbytes = self._split.index.byte_range(shard, first, count)
        records = zip(shard.tolist(), begin.tolist(), (begin + nbytes).tolist(), strict=True)
        number = self._split.first_numbers[shard] + first
        of_columns = [column.ranges(number, count) for column in self._reader.columns.values()]
        return [
            (record, *itertools.chain(*rows))
            for record, *rows in zip(records, *of_columns, strict=True)
        ]

    def _gather(self, plan: _Plan, kept: set[_Chunk]) -> Batch:
        """The values of a block; forgets its chunks but for those that are kept."""
        values: Batch = {}
        each = -(-_GROUP_RECORDS // self._chunk)
        for first in range(0, len(plan.chunks), each):
            chunks = plan.chunks[first : first + each]
            start = plan.ends[first - 1] if first else 0
            rows = plan.rows[start : plan.ends[first + len(chunks) - 1]]
            self._files.take(_ranges(chunks))
            for name, x in self._gather_some(plan.block, rows).items():
                if name not in values:
                    values[name] = np.empty((len(plan.rows), *x.shape[1:]), x.dtype)
                values[name][rows] = x
            self._files.drop(_ranges(chunk for chunk in chunks if chunk not in kept))
        return values

    def _gather_some(self, block: Block, rows: np.ndarray) -> Batch:
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
            good = self._reader.check(found)
            if good.all():
                path = self._files.path_of(damaged[0][0][0])
                logging.warning('%s: a read failed and succeeded when tried again.', path)
        return {name: gathered(x) for name, x in self._reader.read(found, good).items()}


def _ranges(chunks: Iterable[_Chunk]) -> Iterator[Range]:
    return itertools.chain.from_iterable(chunks)
