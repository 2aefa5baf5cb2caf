"""Conditions on the numbers of records, and the records that they keep.

A condition compares added columns of single numbers, and `key`, with each other and with constants.
A parser reads it; no part of it runs as code. Constants are rounded to the column's dtype, so
`score == 0.1` finds 0.1 in float32. NaN is unequal to every number.
"""

import ast
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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
_MAX_LENGTH = 2000  # characters; what is nested deeper than that allows overflows no stack
_BLOCK_ROWS = 1 << 18  # of a column, read at once; a multiple of 8


# Maps columns by name to the value of a part of a condition for each row.
_Holds = Callable[[Mapping[str, np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Where:
    """A condition."""

    text: str  # in a canonical spelling
    names: tuple[str, ...]  # columns that it compares, with `key` if it compares keys
    holds: _Holds  # maps these columns to bool (n,), True for rows that meet the condition

    def __reduce__(self):
        # Functions that are made here cannot be pickled.
        return parse, (self.text,)


def parse(text: str) -> Where:
    """Reads a condition; raises a ValueError, which describes the syntax, for another text."""
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f'it has more than {_MAX_LENGTH} characters')
        tree = ast.parse(text.strip(), mode='eval').body
        names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        return Where(ast.unparse(tree), tuple(dict.fromkeys(names)), _condition(tree))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f'where={text[:100]!r}: {reason}; expected {SYNTAX}') from None


def _condition(node: ast.expr) -> _Holds:
    """Returns a function that evaluates a condition; raises a ValueError for anything else."""
    if isinstance(node, ast.BoolOp):
        join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        return _joined(join, [_condition(value) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        negated = _condition(node.operand)
        return lambda columns: ~negated(columns)
    if not isinstance(node, ast.Compare):
        raise ValueError(f'{ast.unparse(node)!r} does not compare anything')
    sides = [node.left, *node.comparators]
    pairs = zip(sides, node.ops, sides[1:], strict=False)
    return _joined(operator.and_, [_comparison(*pair) for pair in pairs])


def _joined(join: Callable, parts: list[_Holds]) -> _Holds:
    return lambda columns: functools.reduce(join, (part(columns) for part in parts))


def _comparison(left: ast.expr, kind: ast.cmpop, right: ast.expr) -> _Holds:
    told = ast.unparse(ast.Compare(left, [kind], [right]))
    if isinstance(kind, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise ValueError(f'{told!r} has no list of numbers')
        one_of = _joined(operator.or_, [_comparison(left, ast.Eq(), x) for x in right.elts])
        return one_of if isinstance(kind, ast.In) else lambda columns: ~one_of(columns)
    if type(kind) not in _COMPARE:
        raise ValueError(f'{told!r} does not compare numbers')
    if not any(isinstance(side, ast.Name) for side in (left, right)):
        raise ValueError(f'{told!r} compares no column')
    compare, first, second = _COMPARE[type(kind)], _value(left), _value(right)

    def holds(columns: Mapping[str, np.ndarray]) -> np.ndarray:
        # A number beyond the range of float16 becomes infinite, and compares as it should.
        with np.errstate(over='ignore'):
            return compare(first(columns), second(columns))

    return holds


def _value(node: ast.expr) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """Returns a function that looks up a column or returns a constant."""
    if isinstance(node, ast.Name):
        return operator.itemgetter(node.id)
    sign = 1
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -sign, node.operand
    value: Any = node.value if isinstance(node, ast.Constant) else None
    is_whole = type(value) is int and value < 2**63
    if not is_whole and not (type(value) is float and math.isfinite(value)):
        raise ValueError(f'{ast.unparse(node)!r} is neither a name nor a finite number of 64 bits')
    return lambda columns: sign * value


# By byte and n, the place of the byte's n-th set bit, from the lowest.
_BITS = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[:8] for byte in range(256)], np.int64
)


class Kept:
    """The kept records of a split: one bit for each record, and one count for every eight.

    `lengths` holds the kept records of each shard, int64 `(num_shards,)`.
    """

    def __init__(self, shard_lengths: np.ndarray, blocks: Iterable[np.ndarray]):
        """Takes the lengths of the shards, and for each record whether it is kept.

        `blocks` are consecutive arrays, bool `(n,)`; n is a multiple of 8 in all but the last.
        """
        ends = np.cumsum(shard_lengths)
        size = int(ends[-1]) if len(ends) else 0
        self._bits = np.zeros(size // 8 + 1, np.uint8)
        at = 0
        for block in blocks:
            packed = np.packbits(block, bitorder='little')
            self._bits[at : at + len(packed)] = packed
            at += len(packed)
        # Of 32 bits, as most of the memory is here.
        self._before = np.zeros(len(self._bits) + 1, np.uint32 if size < 2**32 else np.uint64)
        np.cumsum(np.bitwise_count(self._bits), dtype=self._before.dtype, out=self._before[1:])
        self.num_records = int(self._before[-1])
        self._shard_lengths, self._first_numbers = shard_lengths, ends - shard_lengths
        kept_ends = self._count_before(ends)
        self._first_kept = self._count_before(self._first_numbers)
        self.lengths = kept_ends - self._first_kept

    def find(self, shard: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Returns the number in its shard of the `number`-th kept record; int64, same shape."""
        kept = (self._first_kept[shard] + number).astype(self._before.dtype)
        byte = np.searchsorted(self._before, kept, side='right') - 1
        bit = _BITS[self._bits[byte], (kept - self._before[byte]).astype(np.int64)]
        return byte * 8 + bit - self._first_numbers[shard]

    def count_in_runs(self) -> int:
        """Returns the number of records in the runs of `schema.CHUNK_STRIDE` with a kept one."""
        ends = self._first_numbers + self._shard_lengths
        shards = zip(self._first_numbers.tolist(), ends.tolist(), strict=True)
        begin = np.concatenate([np.arange(*shard, schema.CHUNK_STRIDE) for shard in shards])
        end = np.append(begin[1:], ends[-1])
        return int((end - begin)[self._count_before(end) > self._count_before(begin)].sum())

    def _count_before(self, number: np.ndarray) -> np.ndarray:
        """Kept records before some records of the split, int64."""
        lower = (1 << (number & 7)) - 1
        in_byte = np.bitwise_count(self._bits[number >> 3] & lower.astype(np.uint8))
        return self._before[number >> 3].astype(np.int64) + in_byte


def check(where: Where, stored: StoredDataset) -> None:
    """Raises a ValueError if a data set lacks a column of numbers that a condition compares."""
    added = {name: x for name, x in stored.columns.items() if isinstance(x, AddedColumn)}
    there = [name for name, x in added.items() if not x.feature and x.shape == ()]
    for name in where.names:
        if name != schema.KEY and name not in there:
            raise ValueError(
                f'{stored.folder}: where={where.text!r}: {name!r} is not a column of single '
                f'numbers; there are {[schema.KEY, *there]}. python -m coyo11m_tfds.add_column '
                '--parquet adds some.'
            )


def identity(where: Where, stored: StoredDataset, split: str) -> str:
    """Returns the condition and the CRC-32Cs of the columns that it compares."""
    found = {name: stored.columns[name].crc32c for name in where.names if name in stored.columns}
    crcs = [f'{name} {of_splits[split]}' for name, of_splits in found.items() if split in of_splits]
    return f'{where.text} [{", ".join(crcs)}]'


def find_kept(
    where: Where,
    stored: StoredDataset,
    split: str,
    shard_lengths: np.ndarray,
    keys: Callable[[int], Iterator[np.ndarray]],
) -> Kept:
    """Reads the columns of a condition and finds the records that it keeps (40 million in 0.3 s).

    `keys` reads the keys of all records, in blocks of the given size, as a masked array if some
    cannot be read; their records are not kept. It is called only if the condition, which has passed
    `check`, compares keys. Raises a ValueError if a column is damaged or missing, or no record is
    kept.
    """
    num_records = int(shard_lengths.sum())
    columns = {
        name: keys(_BLOCK_ROWS) if name == schema.KEY else _values(stored, name, split, num_records)
        for name in where.names
    }
    rows = zip(*columns.values(), strict=True)
    holds = (where.holds(dict(zip(columns, x, strict=True))) for x in rows)
    kept = Kept(shard_lengths, (np.ma.filled(x, False) for x in holds))
    if not kept.num_records:
        raise ValueError(
            f'{stored.folder}: where={where.text!r} keeps none of the {num_records:,} records of '
            f'split {split!r}'
        )
    shares = [f'{x / num_records:.1%}' for x in (kept.num_records, kept.count_in_runs())]
    logging.info(
        f'{stored.folder}: {where.text} keeps {shares[0]} of split {split!r}. Reading by chunks '
        f'fetches {shares[1]} of it, in runs of {schema.CHUNK_STRIDE} records.'
    )
    return kept


def _values(stored: StoredDataset, name: str, split: str, num_records: int) -> Iterator[np.ndarray]:
    """All values of a column, some at a time; compares them with its CRC-32C."""
    column = stored.columns[name]
    assert isinstance(column, AddedColumn)
    file, start, dtype = column.locate(stored.folder, split, num_records)
    crc = 0
    for first in range(0, num_records, _BLOCK_ROWS):
        count = min(_BLOCK_ROWS, num_records - first)
        data = file.read_range(start + first * dtype.itemsize, count * dtype.itemsize)
        values = np.ascontiguousarray(np.frombuffer(data, dtype)['value'])
        crc = google_crc32c.extend(crc, values.tobytes())
        yield values
    if f'{crc:08x}' != column.crc32c[split]:
        raise DamagedError(
            f'{file.path}: its values have CRC-32C {crc:08x}, expected {column.crc32c[split]}. '
            'Add the column again.'
        )
