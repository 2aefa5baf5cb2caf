"""One safetensors file of latents, as LightningDiT writes them.

A file holds the size of its header (8 bytes), the header (JSON), and the tensors in turn
(https://github.com/huggingface/safetensors#format). The format has no checksums.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.process.errors import damaged_file_error
from coyo11m_tfds.source.latent_file import (
    ColumnNames,
    LatentFile,
    RowLayout,
    find_labels,
    read_twice,
    write_sparse_file,
)
from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.stored_file import StoredFile

_FLOATS = {'F16': 'float16', 'BF16': 'bfloat16', 'F32': 'float32'}
_INTEGERS: dict[str, np.dtype] = {'I64': np.dtype('<i8'), 'I32': np.dtype('<i4')}
# Ends the name of the tensor with the pictures mirrored.
_FLIP = '_flip'
# As in the library.
_MAX_HEADER = 100_000_000


class _Tensor(NamedTuple):
    """What the header says of a tensor."""

    kind: str
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


class SafetensorsFile(LatentFile):
    """A validated safetensors file. Without `keys`, keys are hashes of its name and the row."""

    kind = 'a safetensors file'
    has_heads = True

    @classmethod
    def _make_head(cls, file: StoredFile, path: str, check_crc: bool) -> None:
        """Writes a sparse copy of a remote file with its header, keys and labels."""
        # All of it again after damage.
        write_head = functools.partial(_write_head, file, path)
        retry.call(write_head, f'reading the head of {file.path}')

    def _open(self) -> None:
        """Reads the header, and checks that keys and latents fit each other."""
        self._tensors = _parse_tensors(self._read_bytes, self._size, self.path)
        name = self._latents_from.name or schema.PT_LATENTS
        self._check_has(name, self._tensors)
        latents = self._tensors[name]
        # Before the kind is checked, of which an empty file may have any. A scalar has no rows to
        # be empty of; `_set_kind` refuses it.
        count = 0
        if latents.shape:
            count = latents.shape[0]
            if not count:
                self._set_empty()
                return
        # The mirrored pictures are a second crop of each image. With crops in the rows, they have
        # no place among them.
        views = [name]
        row_shape = latents.shape[1:]
        if len(row_shape) == 3:
            if name + _FLIP in self._tensors:
                views.append(name + _FLIP)
            row_shape = (len(views), *row_shape)
        self._set_kind(name, _FLOATS.get(latents.kind, latents.kind), row_shape)
        # Mirrored pictures of another shape would lie elsewhere than the layout says.
        expected = latents.kind, latents.shape
        for view in views:
            actual = self._tensors[view].kind, self._tensors[view].shape
            if actual != expected:
                raise ValueError(
                    f'{self.path}: {view} is {actual}, expected {expected} as {name} is.'
                )
        starts = tuple(self._tensors[view].begin for view in views)
        self.layout = RowLayout(starts, self.row_nbytes // len(views))
        self._find_keys(schema.PT_KEYS, self._tensors)
        if self.key_column:
            self.keys = self._integers(self.key_column, count)
        else:
            self._make_keys(count)

    def column_names(self) -> ColumnNames:
        """Returns the name of labels, of which LightningDiT writes one for each row."""
        return ColumnNames(labels=find_labels(self._tensors))

    def number_column(self, name: str) -> pa.Array:
        """Reads labels, `(N,)`."""
        return pa.array(self._integers(name, len(self.keys)))

    def _integers(self, name: str, count: int) -> np.ndarray:
        """Reads one whole number a row, int64 `(count,)`; ValueError for another shape or type."""
        kind, shape, begin, end = self._tensors[name]
        if kind not in _INTEGERS or shape not in ((count,), (count, 1)):
            raise ValueError(
                f'{self.path}: {name} is {kind} {shape}, expected {" or ".join(_INTEGERS)} '
                f'({count},) to go with its latents.'
            )
        data = self._read_bytes(begin, end - begin)
        return np.frombuffer(data, _INTEGERS[kind]).astype(np.int64)


def _write_head(file: StoredFile, path: str) -> None:
    """Writes what `SafetensorsFile` needs of a remote file to open it."""
    read = functools.partial(read_twice, file)
    tensors = _parse_tensors(read, file.size, file.path)
    # The header ends where the first tensor begins.
    header_bytes = min((tensor.begin for tensor in tensors.values()), default=file.size)
    # Both ends are part of the digest of the outline.
    end_bytes = min(columns.OUTLINE_ENDS, file.size)
    begin_bytes = max(header_bytes, end_bytes)
    ranges = [(0, begin_bytes), (file.size - end_bytes, file.size)]
    for tensor in tensors.values():
        # Keys and labels, whatever their names: one number a row.
        if tensor.kind in _INTEGERS and math.prod(tensor.shape[1:]) == 1:
            ranges.append((tensor.begin, tensor.end))
    # One at a time in memory.
    contents = ((begin, read(begin, end - begin)) for begin, end in ranges)
    write_sparse_file(path, file.size, contents)


def _parse_tensors(read: Callable[[int, int], bytes], size: int, name: str) -> dict[str, _Tensor]:
    """Returns the tensors by name, from what `read(begin, nbytes)` gives of the file.

    Raises a ValueError for a header that is damaged or does not fit the file of `size` bytes.
    """
    damaged = functools.partial(damaged_file_error, name, SafetensorsFile.kind)
    length = int.from_bytes(read(0, min(8, size)), 'little')
    max_length = min(_MAX_HEADER, size - 8)
    # The shortest JSON of an object is `{}`.
    if size < 8 or not 2 <= length <= max_length:
        raise damaged(f'its header would have {length:,} of {size:,} bytes')
    try:
        tensors = _parse_header(read(8, length))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f'its header cannot be read ({error})') from None
    for tensor, (kind, shape, begin, end) in tensors.items():
        itemsize = schema.LATENT_DTYPES.get(_FLOATS.get(kind, ''))
        if kind in _INTEGERS:
            itemsize = _INTEGERS[kind].itemsize
        # For a kind that is not read, any size will do.
        required = end - begin
        if itemsize:
            required = itemsize * math.prod(shape)
        if required != end - begin or end > size:
            actual = f'has bytes {begin:,} to {end:,} of {size:,}'
            raise damaged(f'{tensor} of {kind} {shape} takes {required:,} bytes, but {actual}')
    return tensors


def _parse_header(data: bytes) -> dict[str, _Tensor]:
    """Returns what a header, JSON, says of tensors; errors of many types for other contents."""
    header = json.loads(data, object_pairs_hook=_unique)
    header.pop('__metadata__', None)
    # Offsets count from the end of the header, which follows its size.
    start = 8 + len(data)
    tensors = {}
    for name, fields in header.items():
        begin, end = fields['data_offsets']
        shape = tuple(fields['shape'])
        are_offsets = _is_size(begin) and _is_size(end)
        if not are_offsets or not all(map(_is_size, shape)):
            raise ValueError(f'{name} of {shape} lies from {begin} to {end}')
        tensors[name] = _Tensor(str(fields['dtype']), shape, start + begin, start + end)
    return tensors


def _is_size(number: object) -> bool:
    """Whether a number can be a size or an offset."""
    # Larger ones could make products that NumPy's sizes cannot hold.
    return type(number) is int and 0 <= number < 2**48


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a JSON object, of which Python would keep the last of a name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError('a name occurs twice')
    return fields
