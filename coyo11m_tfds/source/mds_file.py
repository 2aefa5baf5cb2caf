"""One uncompressed shard of MosaicML Streaming (MDS), as MicroDiT and PRX write latents.

A shard holds the number of samples, the offset of each sample (uint32), a description of the
columns (JSON), and the samples: sizes (uint32) of columns without a fixed one, then all columns
(https://docs.mosaicml.com/projects/streaming). The format has no checksums.
"""

import itertools
import json
import re
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source.latent_file import ColumnNames, LatentFile, RowLayout, find_labels

_MAX_DESCRIPTION = 1 << 20
# Of numbers, by the name of their encoding.
_INTEGERS: dict[str, np.dtype] = {
    'int': np.dtype('<i8'),
    'int8': np.dtype('<i1'),
    'int16': np.dtype('<i2'),
    'int32': np.dtype('<i4'),
    'int64': np.dtype('<i8'),
    'uint8': np.dtype('<u1'),
    'uint16': np.dtype('<u2'),
    'uint32': np.dtype('<u4'),
    'uint64': np.dtype('<u8'),
}
_NUMBERS = _INTEGERS | {
    'float16': np.dtype('<f2'),
    'float32': np.dtype('<f4'),
    'float64': np.dtype('<f8'),
}
# MicroDiT's `latents_256` are the bytes of float16 (C, 32, 32), which only their name tells.
_PIXELS_A_LATENT = 8
_USUAL_CHANNELS = 4, 16


class MdsFile(LatentFile):
    """A validated shard. Without an integer column `key`, keys are hashes of its name and the row.

    The latents are a column of bytes, or of `ndarray` with dtype and shape.
    """

    kind = 'an uncompressed MDS shard'

    def _open(self) -> None:
        """Reads and checks the offsets, the description and the sizes of all values."""
        size = self._size
        count = int.from_bytes(self._read_bytes(0, min(4, size)), 'little')
        # After the count, the offsets of all samples, and that of the end.
        start = 4 * (count + 2)
        if size < 4 or start > size:
            raise self._damaged(
                f'it would have {format_count(count, "sample")} in {format_count(size, "byte")}'
            )
        offsets = np.frombuffer(self._read_bytes(4, 4 * (count + 1)), '<u4').astype(np.int64)
        # The description of the columns lies before the first sample.
        header_end = int(offsets[0])
        lengths = np.diff(offsets)
        has_description = start <= header_end <= start + _MAX_DESCRIPTION
        if not has_description or (lengths < 0).any() or offsets[-1] != size:
            raise self._damaged('the offsets of its samples do not fit its size')
        self._encodings, fixed = self._describe(self._read_bytes(start, header_end - start))
        if not count:
            self._set_empty()
            return
        self._sizes, self._begins = self._lay_out(offsets[:-1], lengths, fixed)
        latents = self._latents_from.name or self._only_latents()
        self._check_has(latents, self._encodings)
        sizes = self._sizes[latents]
        dtype, shape = self._kind_of(latents, int(sizes.max(initial=0)))
        self._set_kind(latents, dtype, shape)
        is_other = sizes != self.row_nbytes
        if is_other.any():
            row = int(is_other.argmax())
            raise ValueError(
                f'{self.path}: {latents} of sample {row} has {sizes[row]:,} bytes, expected '
                f'{self.row_nbytes:,} of {self.dtype} {self.shape}. Set latents_from.'
            )
        self.layout = RowLayout((0,), 1, self._begins[latents])
        self._find_keys(schema.KEY, self._names_of(_INTEGERS))
        if self.key_column:
            keys = self._read_numbers(self.key_column)
            # A column of unsigned numbers may hold more than a key.
            if (keys > np.iinfo(np.int64).max).any():
                raise ValueError(
                    f'{self.path}: {self.key_column} of sample {keys.argmax()} is {keys.max()}, '
                    'expected less than 2**63. Write the shards again with smaller keys.'
                )
            self.keys = keys.astype(np.int64)
        else:
            self._make_keys(count)

    def column_names(self) -> ColumnNames:
        """Returns the names of all columns of texts and numbers, as the shard describes them."""
        return ColumnNames(
            texts=self._names_of(['str']),
            numbers=self._names_of(_NUMBERS),
            labels=find_labels(self._names_of(_INTEGERS)),
        )

    def text_column(self, name: str) -> pa.Array:
        """Reads texts, large binary `(N,)` that need not be UTF-8; every row has one."""
        return pa.array(self._bytes_of(name), pa.large_binary())

    def number_column(self, name: str) -> pa.Array:
        """Reads labels or other numbers, `(N,)`; every row has one."""
        return pa.array(self._read_numbers(name))

    def _names_of(self, encodings: Collection[str]) -> tuple[str, ...]:
        """Returns the names of all columns of some encodings."""
        names = []
        for name, encoding in self._encodings.items():
            if encoding in encodings:
                names.append(name)
        return tuple(names)

    def _read_numbers(self, name: str) -> np.ndarray:
        """Returns the numbers of a column, `(N,)`."""
        dtype = _NUMBERS[self._encodings[name]]
        return np.frombuffer(b''.join(self._bytes_of(name)), dtype)

    def _bytes_of(self, name: str) -> list[bytes]:
        """Returns the bytes of a column in each sample."""
        begins = self._begins[name].tolist()
        sizes = self._sizes[name].tolist()
        return [self._read_bytes(begin, size) for begin, size in zip(begins, sizes, strict=True)]

    def _describe(self, text: bytes) -> tuple[dict[str, str], list[int | None]]:
        """Returns the encoding of each column by name, and its size if all values have one."""
        try:
            fields: dict[str, Any] = json.loads(text)
            names = fields['column_names']
            kinds = fields['column_encodings']
            fixed_sizes = fields['column_sizes']
            encodings = dict(zip(names, kinds, strict=True))
            # Names that occur twice would be one entry.
            fits = len(encodings) == len(fixed_sizes) == len(names)
            are_texts = all(isinstance(x, str) for x in itertools.chain(names, kinds))
            are_sizes = all(map(_is_fixed_size, fixed_sizes))
            if not fits or not are_texts or not are_sizes:
                raise ValueError(f'columns {names} of {kinds}, {fixed_sizes} bytes')
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f'its columns cannot be read ({error})') from None
        for (name, kind), size in zip(encodings.items(), fixed_sizes, strict=True):
            if kind in _NUMBERS and size != _NUMBERS[kind].itemsize:
                raise self._damaged(
                    f'{name} is {kind} of {size} bytes, expected {_NUMBERS[kind].itemsize}'
                )
        return encodings, fixed_sizes

    def _lay_out(
        self, offsets: np.ndarray, lengths: np.ndarray, fixed_sizes: list[int | None]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns size and offset of the value of each column in each sample, int64 `(N,)`."""
        # Before anything is read at these places.
        head = 4 * fixed_sizes.count(None)
        if (lengths < head).any():
            raise self._damaged('a sample has no room for its sizes')
        # A sample begins with the sizes of the values that have no fixed one.
        raw = b''.join(self._read_bytes(offset, head) for offset in offsets.tolist())
        stored_sizes = np.frombuffer(raw, '<u4').astype(np.int64)
        stored_sizes = stored_sizes.reshape(len(offsets), -1)
        # A column of these for each column of the shard without a fixed size, in its order.
        next_stored = iter(stored_sizes.T)
        sizes = dict[str, np.ndarray]()
        begins = dict[str, np.ndarray]()
        offset = offsets + head
        for name, size in zip(self._encodings, fixed_sizes, strict=True):
            if size is None:
                sizes[name] = next(next_stored)
            else:
                sizes[name] = np.full(len(offsets), size)
            begins[name] = offset
            offset = offset + sizes[name]
        if (offset != offsets + lengths).any():
            raise self._damaged('the sizes of a sample do not add up to its own')
        return sizes, begins

    def _only_latents(self) -> str:
        """Returns the only column that seems to hold latents; raises a ValueError for others."""
        names = list[str]()
        for name, kind in self._encodings.items():
            are_numbers = kind == 'bytes' or kind.startswith('ndarray')
            # MicroDiT also has latents of its captions.
            is_of_text = re.search('caption|text', name)
            if 'latent' in name and are_numbers and not is_of_text:
                names.append(name)
        if len(names) != 1:
            raise ValueError(
                f'{self.path}: has latents in the columns {names} of {sorted(self._encodings)}, '
                "expected one; choose it with latents_from, e.g. 'latents_256'."
            )
        return names[0]

    def _kind_of(self, name: str, nbytes: int) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape of the latents: as encoded, as in the config, or as usual."""
        # Such as 'ndarray:float16:4,32,32'; 'ndarray' alone keeps both in each value.
        parts = self._encodings[name].split(':')
        if parts[0] == 'ndarray' and len(parts) == 3:
            _, dtype, dimensions = parts
            # No shape, which `_set_kind` refuses.
            if not re.fullmatch(r'\d{1,9}(,\d{1,9})*', dimensions):
                return dtype, ()
            return dtype, tuple(map(int, dimensions.split(',')))
        if parts[0] != 'bytes':
            raise ValueError(
                f'{self.path}: {name} is {self._encodings[name]}, expected bytes, or ndarray with '
                "dtype and shape. Write the shards again, e.g. as 'ndarray:float16:4,32,32'."
            )
        if self._latents_from.shape:
            return self._latents_from.dtype, self._latents_from.shape
        # The name of the column comes last, as the least certain of all.
        shape = self._guess_shape(name, nbytes)
        logging.log_first_n(logging.INFO, '%s: float16 %s, by its name and size', 1, name, shape)
        return 'float16', shape

    def _guess_shape(self, name: str, nbytes: int) -> tuple[int, int, int]:
        """Returns the shape of float16 latents, (C, H, W), by the pixels in the column's name.

        Raises a ValueError if the size of a value does not confirm it.
        """
        edge = 0
        channels = 0
        pixels = re.search(r'_(\d{2,5})$', name)
        if pixels:
            edge = int(pixels[1]) // _PIXELS_A_LATENT
        if edge:
            channels = nbytes // (2 * edge**2)
        if channels not in _USUAL_CHANNELS or nbytes != 2 * channels * edge**2:
            raise ValueError(
                f'{self.path}: does not say the dtype and shape of {name} ({nbytes:,} '
                f"bytes). Set latents_from, e.g. '{name}:float16:4,32,32'."
            )
        return channels, edge, edge


def _is_fixed_size(size: object) -> bool:
    """Whether this is the size of a column in bytes, or None for values of several sizes."""
    return size is None or (type(size) is int and 0 <= size < 2**32)
