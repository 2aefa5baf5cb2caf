"""One tar of `.npy` latents with `.json` or `.txt` next to them, in WebDataset's layout."""

import functools
import json
import os
from typing import Any

import numpy as np
import pyarrow as pa

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.dataset.keyed_random import name_hash
from coyo11m_tfds.source import tar_members
from coyo11m_tfds.source.latent_file import LatentFile, RowLayout
from coyo11m_tfds.source.npy_folders import MOMENTS_PREFIX

# Where arrays in `.npy` files begin: so a place within 64 GB is a number of 32 bits.
_ALIGNED = 16
# Of a `.json` or `.txt`.
_MAX_TEXT = 1 << 20
_CLASS = 'cls'  # WebDataset's suffix for the number of a class
_TEXT, _JSON = 'txt', 'json'

_Member = tuple[int, int]  # offset and size of the contents


class TarFile(LatentFile):
    """A validated tar. Keys are `key` of the `.json` members, or hashes of the names."""

    kind = 'a tar'

    def _open(self) -> None:
        self._samples: dict[str, dict[str, _Member]] = {}
        self._parsed = '', dict[str, Any]()  # the `.json` of one sample
        for member, offset, size in tar_members.list_members(
            self.path, self._size, self._read_bytes
        ):
            folder, base = os.path.split(member)
            # Members whose names are equal up to the first dot form one sample.
            sample, _, suffix = base.partition('.')
            members = self._samples.setdefault(os.path.join(folder, sample), {})
            if suffix in members:
                raise ValueError(f'{self.path}: has {member!r} twice. Remove one of them.')
            members[suffix] = offset, size
        suffix = self._find_latents()
        arrays = [self._parse_npy(sample, suffix) for sample in self._samples]
        if len(kinds := {kind for kind, _ in arrays}) > 1:
            raise ValueError(f'{self.path}: latents are {sorted(kinds)}; expected one kind.')
        [(dtype, shape)] = kinds
        # NumPy has no bfloat16, and writes it as two bytes without a meaning.
        self._set_kind(suffix, dtype if dtype != 'V2' else self._latents_from.dtype or dtype, shape)
        offsets = np.array([offset for _, offset in arrays], np.int64)
        numbers, remainders = np.divmod(offsets, _ALIGNED)
        if remainders.any() or numbers.max(initial=0) >= 2**32:
            raise ValueError(f'{self.path}: a {suffix} has its array at an unusual offset.')
        self.layout = RowLayout((0,), _ALIGNED, numbers)
        if all(os.path.basename(x).startswith(MOMENTS_PREFIX) for x in self._samples):
            self.moments = schema.DEVIATION
        # The first sample stands for all: what another one lacks is null in a column.
        first_sample = next(iter(self._samples))
        fields = self._json(first_sample)
        text_fields = [x for x, value in fields.items() if isinstance(value, str)]
        self.texts = (*[_TEXT] * any(_TEXT in x for x in self._samples.values()), *text_fields)
        self.numbers = tuple(x for x, value in fields.items() if type(value) in (int, float))
        classes = {x for x in self.numbers if type(fields[x]) is int}
        classes |= self._samples[first_sample].keys() & {_CLASS}
        self._find_labels(classes)
        self._find_keys(schema.KEY, [x for x, value in fields.items() if schema.is_key(value)])
        if self.key_column:
            keys = [self._key(x) for x in self._samples]
        else:
            keys = [name_hash(f'{self._label}/{x}') >> 1 for x in self._samples]
        self.keys = np.array(keys, np.int64)

    def column(self, name: str) -> pa.Array:
        values = [self._value(sample, name) for sample in self._samples]
        kinds: tuple[type, ...] = (str,)
        if name in (self.label_column, *self.numbers):
            kinds = (int,) if name == self.label_column else (int, float)
        values = [x if type(x) in kinds else None for x in values]
        is_float = any(type(x) is float for x in values)
        numbers = pa.float32() if is_float else pa.int64()
        try:
            return pa.array(values, pa.large_string() if kinds == (str,) else numbers)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError) as error:
            raise ValueError(
                f'{self.path}: {name} of a sample cannot be read ({error}). Write the tar again.'
            ) from None

    def _find_latents(self) -> str:
        """Returns the suffix of the members that are latents."""
        suffixes = sorted(
            {x for members in self._samples.values() for x in members if f'.{x}'.endswith('.npy')}
        )
        if name := self._latents_from.name:
            suffixes = [x for x in suffixes if x in (name, f'{name}.npy')]
        if not self._samples:
            raise ValueError(f'{self.path}: has no members, expected samples of latents.')
        if len(suffixes) != 1:
            raise ValueError(
                f'{self.path}: its samples have .npy files {suffixes}, expected one. Choose it by '
                "latents_from, e.g. 'latent.npy'."
            )
        return suffixes[0]

    def _parse_npy(self, sample: str, suffix: str) -> tuple[tuple[str, tuple[int, ...]], int]:
        """Dtype and shape of an array, and where it begins in the file."""
        if suffix not in self._samples[sample]:
            raise ValueError(f'{self.path}: {sample!r} has no .{suffix}, unlike other samples.')
        start, size = self._samples[sample][suffix]
        head = self._read_bytes(start, min(size, manifest.NPY_HEADER_BYTES))
        try:
            nbytes = 10 + int.from_bytes(head[8:10], 'little')
            return _npy_header(head[:nbytes], size), start + nbytes
        except ValueError as error:
            raise ValueError(
                f'{self.path}: {sample}.{suffix} cannot be read ({error}). Write it again.'
            ) from None

    def _value(self, sample: str, name: str) -> Any:
        if name not in (_TEXT, _CLASS) or name not in self._samples[sample]:
            return self._json(sample).get(name)
        text = self.decode(self._contents(sample, name), sample)
        is_class = name == _CLASS and text.strip().isdecimal() and len(text) < 19
        return int(text) if is_class else text

    def _key(self, sample: str) -> int:
        name = self.key_column
        key = self._json(sample).get(name)
        if not schema.is_key(key):
            raise ValueError(f'{self.path}: {name} of {sample!r} is {key!r}, expected a number.')
        return int(str(key))

    def _json(self, sample: str) -> dict[str, Any]:
        if self._parsed[0] == sample or _JSON not in self._samples[sample]:
            return self._parsed[1] if self._parsed[0] == sample else {}
        try:
            fields = json.loads(self._contents(sample, _JSON))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f'{self.path}: {sample}.json is not JSON ({error}). Write the tar again.'
            ) from None
        self._parsed = sample, fields if isinstance(fields, dict) else {}
        return self._parsed[1]

    def _contents(self, sample: str, suffix: str) -> bytes:
        start, size = self._samples[sample][suffix]
        if size > _MAX_TEXT:
            raise ValueError(
                f'{self.path}: {sample}.{suffix} has {size:,} bytes, expected at most '
                f'{_MAX_TEXT:,}.'
            )
        return self._read_bytes(start, size)


@functools.lru_cache(maxsize=64)
def _npy_header(head: bytes, size: int) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in the header of a `.npy` file; those of most samples are equal."""
    dtype, shape, _ = manifest.parse_npy_header(head, size)
    if dtype.hasobject or dtype.str[0] == '>' or dtype.fields:
        raise ValueError(f'its dtype is {dtype}, expected little-endian numbers')
    return 'V2' if dtype.str == '|V2' else dtype.name, shape
