"""Conditions on the numbers of records, and the records that they keep.

A parser reads a condition; no part of it runs as code. Constants are rounded to the column's dtype,
so `score == 0.1` finds 0.1 in float32.
"""

import ast
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import google_crc32c
import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.columns import AddedColumn
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.stored_dataset import StoredDataset

SYNTAX = (
    "comparisons (<, <=, >, >=, ==, !=, in, not in) of columns of numbers, 'key' and numbers, "
    'joined by and, or, not and parentheses'
)

_COMPARE: dict[type[ast.cmpop], Callable] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# In characters; so little text cannot nest deeply enough to overflow the stack.
_MAX_LENGTH = 2000
_BLOCK_ROWS = 1 << 18  # of a column, read at once; a multiple of 8

Columns = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on the numbers of a record, such as `score > 3 and key != 5`."""

    text: str  # in a canonical spelling
    names: tuple[str, ...]  # of the columns that it compares, with `key` if it compares keys

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the condition of a text; raises a ValueError, with the syntax, for others."""
        try:
            if len(text) > _MAX_LENGTH:
                raise ValueError(f'it has more than {_MAX_LENGTH} characters')
            tree = ast.parse(text.strip(), mode='eval').body
            names = _list_names(tree)
            condition = cls(ast.unparse(tree), names)
            # Without rows it raises the same errors as with them, now rather than in a run.
            condition.evaluate(dict.fromkeys(names, np.empty(0)))
            return condition
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise ValueError(f'where={text[:100]!r}: {reason}; expected {SYNTAX}') from None

    def evaluate(self, columns: Columns) -> np.ndarray:
        """Returns which rows of its columns meet the condition, bool `(n,)`."""
        # A number beyond the range of float16 becomes infinite, and compares as it should.
        with np.errstate(over='ignore'):
            return _evaluate(ast.parse(self.text, mode='eval').body, columns)

    def check_columns(self, stored: StoredDataset) -> None:
        """Raises a ValueError if a data set lacks a column of numbers that it compares."""
        available = [schema.KEY]
        for name, column in stored.columns.items():
            is_added = isinstance(column, AddedColumn) and not column.feature
            if is_added and column.shape == ():
                available.append(name)
        for name in self.names:
            if name not in available:
                raise ValueError(
                    f'{stored.folder}: where={self.text!r}: {name!r} is not a column of single '
                    f'numbers; there are {available}. python -m '
                    'coyo11m_tfds.add_column --parquet adds some.'
                )

    def identity(self, stored: StoredDataset, split: str) -> str:
        """Returns the condition and the CRC-32Cs of the columns that it compares."""
        crcs = []
        for name in self.names:
            column = stored.columns.get(name)
            if column and split in column.crc32c:
                crcs.append(f'{name} {column.crc32c[split]}')
        return f'{self.text} [{", ".join(crcs)}]'


def _list_names(tree: ast.expr) -> tuple[str, ...]:
    """Returns the distinct names in a condition."""
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names[node.id] = None
    return tuple(names)


def _evaluate(node: ast.expr, columns: Columns) -> np.ndarray:
    """Returns which rows meet a condition, bool `(n,)`; raises a ValueError for anything else."""
    match node:
        case ast.BoolOp(operation, values):
            combine = operator.and_ if isinstance(operation, ast.And) else operator.or_
            results = [_evaluate(value, columns) for value in values]
            return functools.reduce(combine, results)
        case ast.UnaryOp(ast.Not(), operand):
            return ~_evaluate(operand, columns)
        case ast.Compare(left, kinds, others):
            # `0 < a < b` is `0 < a and a < b`.
            results = []
            for right, kind in zip(others, kinds, strict=True):
                results.append(_compare(left, right, kind, columns))
                left = right
            return functools.reduce(operator.and_, results)
    raise ValueError(f'{ast.unparse(node)!r} does not compare anything')


def _compare(left: ast.expr, right: ast.expr, kind: ast.cmpop, columns: Columns) -> np.ndarray:
    """Returns which rows meet one comparison, bool `(n,)`; ValueError for one of no numbers."""
    # As it stands in the condition, for messages.
    text = ast.unparse(ast.Compare(left, [kind], [right]))
    if isinstance(kind, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise ValueError(f'{text!r} has no list of numbers')
        # By comparisons with each number, which round it as `==` does.
        equals = [_compare(left, value, ast.Eq(), columns) for value in right.elts]
        is_in = functools.reduce(operator.or_, equals)
        return is_in if isinstance(kind, ast.In) else ~is_in
    compare = _COMPARE.get(type(kind))
    if not compare:
        raise ValueError(f'{text!r} does not compare numbers')
    # It would hold for all records or for none, and is probably a mistake.
    if not isinstance(left, ast.Name) and not isinstance(right, ast.Name):
        raise ValueError(f'{text!r} compares no column')
    return compare(_value(left, columns), _value(right, columns))


def _value(node: ast.expr, columns: Columns) -> Any:
    """Returns a column, or the number that a node stands for; a ValueError for anything else."""
    if isinstance(node, ast.Name):
        return columns[node.id]
    # Python parses a negative number as the negation of a positive one.
    sign = 1
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign = -sign
        node = node.operand
    value: Any = node.value if isinstance(node, ast.Constant) else None
    # `type`, because True is an int for `isinstance`.
    is_whole = type(value) is int and value < 2**63
    is_finite_float = type(value) is float and math.isfinite(value)
    if not is_whole and not is_finite_float:
        raise ValueError(f'{ast.unparse(node)!r} is neither a name nor a finite number of 64 bits')
    return sign * value


def _list_set_bits() -> np.ndarray:
    """Returns the position of a byte's n-th set bit, from the lowest; int64 `(256, 8)`."""
    positions = np.zeros((256, 8), np.int64)
    for byte in range(256):
        set_bits = np.flatnonzero(byte >> np.arange(8) & 1)
        positions[byte, : len(set_bits)] = set_bits
    return positions


_SET_BITS = _list_set_bits()


class KeptRecords:
    """The kept records of a split: one bit for each record, and one count for every eight.

    A list of their numbers would take 64 bits for each. A search in the counts and a look at one
    byte give the n-th kept record.
    """

    def __init__(self, shard_lengths: np.ndarray, blocks: Iterable[np.ndarray]):
        """Takes whether each record is kept, bool, in blocks of a multiple of 8 but the last."""
        shard_ends = np.cumsum(shard_lengths)
        size = int(shard_ends[-1]) if len(shard_ends) else 0
        self._bits = np.zeros(size // 8 + 1, np.uint8)
        # Blocks of a multiple of 8 records fill whole bytes.
        begin = 0
        for block in blocks:
            packed = np.packbits(block, bitorder='little')
            self._bits[begin : begin + len(packed)] = packed
            begin += len(packed)
        # The number of kept records before each byte. It has 32 bits if these are enough, because
        # it takes most of the memory.
        count_dtype = np.uint32 if size < 2**32 else np.uint64
        self._before = np.zeros(len(self._bits) + 1, count_dtype)
        counts = np.bitwise_count(self._bits)
        # Into the array that stays, without another one of its size.
        np.cumsum(counts, dtype=count_dtype, out=self._before[1:])
        self.num_records = int(self._before[-1])
        self._shard_lengths = shard_lengths
        self._first_numbers = shard_ends - shard_lengths
        self._first_kept = self._count_before(self._first_numbers)
        # Kept records of each shard, int64 `(num_shards,)`.
        self.lengths = self._count_before(shard_ends) - self._first_kept

    def locate(self, shard: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Returns the number in its shard of the `number`-th kept record; int64, same shape."""
        # In the dtype of the counts, so that the search does not convert all of them.
        number_in_split = (self._first_kept[shard] + number).astype(self._before.dtype)
        # The last byte with at most so many kept records before it holds the one.
        byte = np.searchsorted(self._before, number_in_split, side='right') - 1
        number_in_byte = (number_in_split - self._before[byte]).astype(np.int64)
        bit = _SET_BITS[self._bits[byte], number_in_byte]
        record_in_split = byte * 8 + bit
        return record_in_split - self._first_numbers[shard]

    def num_records_in_kept_runs(self) -> int:
        """Returns the number of records of all runs with at least one kept record.

        A run has `schema.CHUNK_STRIDE` records of a shard: so many are read together.
        """
        ends = self._first_numbers + self._shard_lengths
        # Runs begin anew in each shard, so the last one of a shard may be shorter.
        begins_of_shards = []
        for first, end in zip(self._first_numbers.tolist(), ends.tolist(), strict=True):
            begins_of_shards.append(np.arange(first, end, schema.CHUNK_STRIDE))
        run_begin = np.concatenate(begins_of_shards)
        run_end = np.append(run_begin[1:], ends[-1])
        has_kept = self._count_before(run_end) > self._count_before(run_begin)
        run_length = run_end - run_begin
        return int(run_length[has_kept].sum())

    def _count_before(self, number: np.ndarray) -> np.ndarray:
        """Returns how many kept records stand before a record of the split; int64, same shape."""
        byte = number >> 3
        bit = number & 7
        # A mask of the records of the byte that stand before this one.
        lower_bits = ((1 << bit) - 1).astype(np.uint8)
        num_in_byte = np.bitwise_count(self._bits[byte] & lower_bits)
        return self._before[byte].astype(np.int64) + num_in_byte


def find_kept(
    condition: Condition,
    stored: StoredDataset,
    split: str,
    shard_lengths: np.ndarray,
    read_keys: Callable[[int], Iterator[np.ndarray]],
) -> KeptRecords:
    """Reads the columns of a condition and finds the records that it keeps (40 million in 0.3 s).

    `read_keys` yields keys in blocks of a size, masked where they cannot be read: not kept. Raises
    a ValueError if it keeps no record, a DamagedError if a column differs from its CRC-32C.
    """
    num_records = int(shard_lengths.sum())
    columns = {}
    for name in condition.names:
        if name == schema.KEY:
            columns[name] = read_keys(_BLOCK_ROWS)
        else:
            columns[name] = _read_column(stored, name, split, num_records)

    def evaluate_blocks() -> Iterator[np.ndarray]:
        """Yields whether each record is kept, bool, in blocks."""
        # All columns of a large split would take too much memory.
        for values in zip(*columns.values(), strict=True):
            is_kept = condition.evaluate(dict(zip(columns, values, strict=True)))
            # Nobody knows whether a record without a key meets the condition.
            yield np.ma.filled(is_kept, False)

    kept = KeptRecords(shard_lengths, evaluate_blocks())
    # Probably a mistake in the condition, and nothing can be read.
    if not kept.num_records:
        raise ValueError(
            f'{stored.folder}: where={condition.text!r} keeps none of the {num_records:,} records '
            f'of split {split!r}'
        )
    num_in_runs = kept.num_records_in_kept_runs()
    kept_share = kept.num_records / num_records
    fetched_share = num_in_runs / num_records
    logging.info(
        f'{stored.folder}: {condition.text} keeps {kept_share:.1%} of split {split!r}. Reading by '
        f'chunks fetches {fetched_share:.1%} of it, in runs of {schema.CHUNK_STRIDE} records.'
    )
    return kept


def _read_column(
    stored: StoredDataset, name: str, split: str, num_records: int
) -> Iterator[np.ndarray]:
    """Yields the values of a column in blocks; compares them with its CRC-32C."""
    column = stored.columns[name]
    assert isinstance(column, AddedColumn)
    file, start, dtype = column.locate(stored.folder, split, num_records)
    crc = 0
    for first in range(0, num_records, _BLOCK_ROWS):
        count = min(_BLOCK_ROWS, num_records - first)
        data = file.read_range(start + first * dtype.itemsize, count * dtype.itemsize)
        rows = np.frombuffer(data, dtype)
        # A row also has a checksum; the values are copied together, as the CRC-32C covers them.
        values = np.ascontiguousarray(rows['value'])
        # All rows are read, so one checksum of all takes the place of one for each row.
        crc = google_crc32c.extend(crc, values.tobytes())
        yield values
    if f'{crc:08x}' != column.crc32c[split]:
        raise DamagedError(
            f'{file.path}: its values have CRC-32C {crc:08x}, expected {column.crc32c[split]}. '
            'Add the column again.'
        )
