"""Gathers rows of bytes from addresses in this process.

One call of NumPy gathers the rows of a batch from all files, without Python's lock, by indexing an
array. So all memory of the process is one array. Nothing here checks an address: callers read only
between those that `MappedFiles.locate` and `FetchedFiles.locate` return, whatever the bytes are.
"""

import ctypes
import dataclasses
import itertools
import math
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import google_crc32c
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading.batches import ArraySpec, Batch

# The array begins here, as NumPy takes none at address 0, and ends where the addresses of programs
# end on processors of 64 bits. Times what is gathered at once, it has to be less than 2**63.
_ORIGIN = 1 << 12
_END = 1 << 48
_GATHERED_AT_ONCE = 1 << 15

_ALL_BYTES = np.frombuffer((ctypes.c_ubyte * (_END - _ORIGIN)).from_address(_ORIGIN), np.uint8)

# As many as the longest possible row has; the system allocates no memory for them.
_ZEROS = np.frombuffer(mmap.mmap(-1, schema.MAX_LATENTS_NBYTES), np.uint8)
ZEROS: int = _ZEROS.ctypes.data  # an address with as many zeros as a row may have


def gather(addresses: np.ndarray, nbytes: int) -> np.ndarray:
    """Copies `nbytes` bytes from each address; returns void `(n,)` with items of this size."""
    # NumPy refuses arrays whose items could reach beyond 2**63 bytes.
    pieces = range(0, nbytes, _GATHERED_AT_ONCE)
    if len(pieces) == 1:
        return _gather_piece(addresses, nbytes)
    rows = np.empty((len(addresses), nbytes), np.uint8)
    for begin in pieces:
        size = min(_GATHERED_AT_ONCE, nbytes - begin)
        piece = _gather_piece(addresses + begin, size).view(np.uint8)
        rows[:, begin : begin + size] = piece.reshape(len(rows), size)
    return rows.view((np.void, nbytes))[:, 0]


def views(begin: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    """Returns the bytes from each `begin` to its `end` as uint8, without a copy."""
    ranges = zip((begin - _ORIGIN).tolist(), (end - _ORIGIN).tolist(), strict=True)
    return [_ALL_BYTES[first:last] for first, last in ranges]


def crc32c(
    begin: np.ndarray, end: np.ndarray, before: Iterable[int] = itertools.repeat(0)
) -> np.ndarray:
    """Returns the CRC-32C of the bytes from each `begin` to its `end`, after others; uint32."""
    crcs = map(google_crc32c.extend, before, views(begin, end))
    return np.fromiter(crcs, np.uint32, len(begin))


def _gather_piece(addresses: np.ndarray, nbytes: int) -> np.ndarray:
    # An item at every byte: the items overlap, and the index of one is its address.
    item = np.dtype((np.void, nbytes))
    items = np.ndarray(_END - _ORIGIN - nbytes, item, _ALL_BYTES, strides=(1,))
    return items[addresses - _ORIGIN]


@dataclasses.dataclass(frozen=True, eq=False)
class LazyArray:
    """Values at addresses, gathered later: those of several sources are joined without a copy."""

    addresses: np.ndarray  # of each value, int64 of any shape
    row: ArraySpec  # of a value
    owners: list[Any]  # objects that keep this memory valid

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.addresses.shape, *self.row.shape

    @property
    def row_nbytes(self) -> int:
        return self.row.dtype.itemsize * math.prod(self.row.shape)

    @property
    def nbytes(self) -> int:
        return self.addresses.size * self.row_nbytes

    def reshape(self, *shape: int) -> 'LazyArray':
        """Returns these values with other leading axes; `shape` ends with the shape of a value."""
        leading = shape[: len(shape) - len(self.row.shape)]
        return dataclasses.replace(self, addresses=self.addresses.reshape(leading))

    def __getitem__(self, index: Any) -> 'LazyArray':
        return dataclasses.replace(self, addresses=self.addresses[index])

    def gather(self) -> np.ndarray:
        values = gather(self.addresses.ravel(), self.row_nbytes)
        return values.view(self.row.dtype).reshape(self.shape)


# A batch whose large values may not be gathered yet.
LazyBatch = Mapping[str, np.ndarray | LazyArray]


def gather_array(values: np.ndarray | LazyArray) -> np.ndarray:
    return values.gather() if isinstance(values, LazyArray) else values


def gather_batch(batch: LazyBatch) -> Batch:
    return {name: gather_array(x) for name, x in batch.items()}


def concatenate(arrays: list[np.ndarray | LazyArray], axis: int) -> np.ndarray | LazyArray:
    """Joins arrays along a leading axis; gathers them first unless all are lazy."""
    lazy = [x for x in arrays if isinstance(x, LazyArray)]
    if len(lazy) < len(arrays):
        return np.concatenate([gather_array(x) for x in arrays], axis)
    addresses = np.concatenate([x.addresses for x in lazy], axis)
    return dataclasses.replace(lazy[0], addresses=addresses, owners=[x.owners for x in lazy])
