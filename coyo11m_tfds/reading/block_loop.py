"""The loop that reads blocks, by rows of mapped files and by chunks of fetched ones.

A block is some consecutive batches that are planned together; a chunk is a run of records that lie
one after the other in a shard. The records of a block lie in few chunks, but in any order. Each
block is planned while the block before it is read, so that its ranges are on their way in time.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.memory.files import Range
from coyo11m_tfds.reading import damage
from coyo11m_tfds.reading.batches import Batch
from coyo11m_tfds.reading.row_reader import Chunk, LocatedRecords, RowReader
from coyo11m_tfds.sampling.order import RecordBlock

# Fewest records of chunks to gather together, so that the cost of NumPy's calls is small.
_PART_RECORDS = 1024


class _Part(NamedTuple):
    """Records of a block that are located together, while their bytes are in memory."""

    records: RecordBlock  # arrays `(n,)`
    rows: np.ndarray  # of the records in the block
    chunks: list[Chunk]  # that hold the records, and no others
    chunk_numbers: np.ndarray  # in `chunks`, of the chunk of each record
    reads_size: int  # records that are gathered together


class _Plan(NamedTuple):
    """How a block is read."""

    shape: tuple[int, ...]  # batches, and records of each
    chunks: list[Chunk]
    parts: list[_Part]

    @property
    def ranges(self) -> list[Range]:
        """The ranges of files that hold all records of the block."""
        return _ranges_of(self.chunks)

    @property
    def num_reads(self) -> int:
        """Number of batches in which the rows of the block are read."""
        return sum(-(-len(x.rows) // x.reads_size) for x in self.parts)


# The shape of a block, the numbers of some of its rows, and their batch with places of latents.
PartRead = tuple[tuple[int, ...], np.ndarray, Batch]


def read_parts(
    reader: RowReader, blocks: Iterator[RecordBlock], chunk: int, piece: int
) -> Iterator[PartRead]:
    """Yields the rows of blocks as they are located: of mapped files, in the order of the batches.

    Args:
        reader: Reader of the files, which are closed at the end.
        blocks: The records to read.
        chunk: Records of a chunk, which are read together.
        piece: Fewest records of a chunk that may be fetched without the others.
    """
    with contextlib.closing(reader.files):
        # A plan is made one block ahead.
        plans = _plan_blocks(reader, blocks, chunk, piece)
        plan = next(plans)
        # The first block has no block before it that could request its ranges.
        if plan:
            reader.files.request(plan.ranges)
        while plan:
            next_plan = next(plans)
            yield from _read_planned(reader, plan, next_plan)
            plan = next_plan


def _plan_blocks(
    reader: RowReader, blocks: Iterator[RecordBlock], chunk: int, piece: int
) -> Iterator[_Plan | None]:
    """Yields the plans of blocks, and None after the last one, which has no next block."""
    for block in blocks:
        yield _plan(reader, block, chunk, piece)
    yield None


def _plan(reader: RowReader, block: RecordBlock, chunk: int, piece: int) -> _Plan:
    """Returns how a block is read, before its bytes are in memory."""
    is_mapped = reader.files.is_mapped
    # The system reads ahead just what is requested: the rest of a chunk would come for nothing.
    if is_mapped:
        piece = schema.CHUNK_STRIDE
    records = RecordBlock(*(x.ravel() for x in block))
    chunks, chunk_numbers = reader.find_chunks(records.shard, records.record, chunk, piece)
    shape = block.shard.shape
    # Mapped files take no memory for chunks: rows are read in the order of the batches.
    if is_mapped:
        rows = np.arange(len(records.shard))
        part = _Part(records, rows, chunks, chunk_numbers, reads_size=shape[1])
        return _Plan(shape, chunks, [part])
    # A chunk is freed after the last of its rows, so rows are read chunk by chunk.
    all_rows = np.argsort(chunk_numbers, kind='stable')
    sorted_numbers = chunk_numbers[all_rows]
    part_chunks = -(-_PART_RECORDS // chunk)
    parts = []
    for first in range(0, len(chunks), part_chunks):
        last = first + part_chunks
        begin, end = np.searchsorted(sorted_numbers, (first, last))
        rows = all_rows[begin:end]
        part = _Part(
            RecordBlock(*(x[rows] for x in records)),
            rows,
            chunks[first:last],
            chunk_numbers[rows] - first,
            reads_size=len(rows),
        )
        parts.append(part)
    return _Plan(shape, chunks, parts)


def _read_planned(reader: RowReader, plan: _Plan, next_plan: _Plan | None) -> Iterator[PartRead]:
    """Yields batches of the rows of a block, and requests the next block.

    Fetched bytes are dropped when the next batch is taken.
    """
    files = reader.files
    next_ranges = next_plan.ranges if next_plan else []
    # Those of both blocks are kept, and not requested again.
    shared = set(plan.ranges).intersection(next_ranges)
    new_ranges = [x for x in next_ranges if x not in shared]
    # A few at each read: they come while this block is used.
    per_read = -(-len(new_ranges) // plan.num_reads)
    for part in plan.parts:
        # Only now: the chunks of a whole block would take several times the memory.
        ranges = _ranges_of(part.chunks)
        files.take(ranges)
        located = reader.locate(*part.records)
        for first in range(0, len(part.rows), part.reads_size):
            # Before the read, so that they are on their way meanwhile.
            files.request(new_ranges[:per_read])
            del new_ranges[:per_read]
            rows = slice(first, first + part.reads_size)
            batch = _read_rows(reader, part, located, rows)
            yield plan.shape, part.rows[rows], batch
        files.drop(x for x in ranges if x not in shared)


def _read_rows(reader: RowReader, part: _Part, located: LocatedRecords, rows: slice) -> Batch:
    """Reads some rows of a part; those of damaged records come from the last attempt."""
    files = reader.files
    records = located.rows(rows)
    codes = reader.check(records)
    for _ in range(files.attempts - 1):
        is_bad = codes != damage.GOOD
        if not is_bad.any():
            break
        # Only the chunks of bad records, each once.
        bad_numbers = part.chunk_numbers[rows][is_bad]
        numbers = np.unique(bad_numbers).tolist()
        ranges = _ranges_of([part.chunks[number] for number in numbers])
        files.take_again(ranges)
        # A length may have been damaged: with new bytes, records may lie elsewhere.
        records = reader.locate(*part.records).rows(rows)
        codes = reader.check(records)
        if (codes == damage.GOOD).all():
            path = files.path_of(ranges[0][0])
            logging.warning('%s: a read failed and succeeded when tried again.', path)
    return reader.read(records, codes)


def fill_blocks(
    reader: RowReader, parts: Iterator[PartRead]
) -> Iterator[tuple[tuple[int, ...], Batch]]:
    """Yields the shape of each block, and the values of all its rows."""
    block: Batch = {}
    num_missing = 0  # rows of the block that have no values yet
    for shape, rows, batch in parts:
        values = reader.gather_latents(batch)
        # Shapes and dtypes are those of the first values, also of columns and tokens.
        if not block:
            num_missing = math.prod(shape)
            for name, x in values.items():
                block[name] = np.empty((num_missing, *x.shape[1:]), x.dtype)
        for name, x in values.items():
            block[name][rows] = x
        num_missing -= len(rows)
        if not num_missing:
            yield shape, block
            # A new one, because the loop still copies batches out of the old one.
            block = {}


def _ranges_of(chunks: Iterable[Chunk]) -> list[Range]:
    """Returns the ranges of all chunks in one list."""
    return list(itertools.chain.from_iterable(chunks))
