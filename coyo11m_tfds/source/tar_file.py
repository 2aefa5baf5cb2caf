"""One tar of `.npy` latents with `.json` or `.txt` next to them, in WebDataset's layout."""

import collections
import functools
import os
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.dataset.keyed_random import name_hash
from coyo11m_tfds.foreign import file_names, foreign_text, tar_members
from coyo11m_tfds.source.encoding_file import how_to_encode
from coyo11m_tfds.source.latent_file import ColumnNames, LatentFile, RowLayout, find_labels
from coyo11m_tfds.source.npy_folders import MOMENTS_PREFIX

# Where arrays in `.npy` files begin: so a place within 64 GB is a number of 32 bits.
_ALIGNED = 16
# Of a `.json` or `.txt`.
_MAX_TEXT = 1 << 20
_CLASS = 'cls'  # WebDataset's suffix for the number of a class
_TEXT, _JSON = 'txt', 'json'
_USUAL_SUFFIXES = _TEXT, _JSON, _CLASS, 'npy'

# In place of the fields of a `.json` that cannot be read.
_DAMAGED: Mapping[str, Any] = types.MappingProxyType({})

_Member = tuple[int, int]  # offset and size of the contents


class TarFile(LatentFile):
    """A validated tar. Keys are `key` of the `.json` members, or hashes of the names."""

    kind = 'a tar'

    def _open(self) -> None:
        self._samples: dict[str, dict[str, _Member]] = {}
        self._parsed: tuple[str, Mapping[str, Any]] = '', {}  # the `.json` of one sample
        for member, offset, size in tar_members.list_members(
            self.path, self._size, self._read_bytes
        ):
            if file_names.is_hidden(member):
                continue
            folder, base = os.path.split(member)
            # Members whose names are equal up to the first dot form one sample.
            sample, _, suffix = base.partition('.')
            if suffix.lower() in _USUAL_SUFFIXES:
                suffix = suffix.lower()
            members = self._samples.setdefault(os.path.join(folder, sample), {})
            if suffix in members:
                raise ValueError(f'{self.path}: has {member!r} twice. Remove one of them.')
            members[suffix] = offset, size
        if not self._samples:
            self._set_empty()
            return
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
        # The first sample with fields stands for all.
        fields = next(filter(None, map(self._json, self._samples)), {})
        self._find_keys(schema.KEY, [x for x, value in fields.items() if schema.is_key(value)])
        if self.key_column:
            keys = [self._key(x) for x in self._samples]
        else:
            keys = [self._hash(x) for x in self._samples]
        self.keys = np.array(keys, np.int64)

    def column_names(self) -> ColumnNames:
        kinds = collections.defaultdict[str, set[type]](set)
        for sample, members in self._samples.items():
            for name in (_TEXT, _CLASS):
                if name in members:
                    kinds[name].add(type(self._value(sample, name)))
            for name, value in self._json(sample).items():
                kinds[name].add(type(value))
        texts, numbers, integers, empty = [], [], [], []
        for name, kinds_of_field in kinds.items():
            kinds_of_values = kinds_of_field - {type(None)}
            if not kinds_of_values:
                empty.append(name)
            if kinds_of_values & {str, list}:
                texts.append(name)
            if kinds_of_values & {int, float}:
                numbers.append(name)
            if kinds_of_values == {int}:
                integers.append(name)
        return ColumnNames(tuple(texts), tuple(numbers), find_labels(integers), tuple(empty))

    def text_column(self, name: str) -> pa.Array:
        texts = [self._text(sample, name) for sample in self._samples]
        return pa.array(texts, pa.large_binary())

    def number_column(self, name: str) -> pa.Array:
        values = [self._value(sample, name) for sample in self._samples]
        values = [x if type(x) in (int, float) else None for x in values]
        is_float = any(type(x) is float for x in values)
        try:
            return pa.array(values, pa.float32() if is_float else pa.int64())
        except (pa.ArrowInvalid, OverflowError) as error:
            raise ValueError(
                f'{self.path}: {name} of a sample is no number of 64 bits ({error}). Write the tar '
                'again.'
            ) from None

    def _find_latents(self) -> str:
        """Returns the suffix of the members that are latents."""
        suffixes = sorted(
            {x for members in self._samples.values() for x in members if f'.{x}'.endswith('.npy')}
        )
        if name := self._latents_from.name:
            suffixes = [x for x in suffixes if x in (name, f'{name}.npy')]
        if not suffixes and not self._latents_from.name:
            others = sorted({x for members in self._samples.values() for x in members})
            raise ValueError(
                f'{self.path}: its samples have no .npy files, only {others[:10]}, expected '
                f'latents. {how_to_encode(os.path.dirname(self.path))}.'
            )
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

    def _text(self, sample: str, name: str) -> bytes | None:
        """The text of a sample; one that cannot be read if its JSON, which may hold it, cannot."""
        if self._json(sample) is _DAMAGED:
            return foreign_text.UNREADABLE
        text = foreign_text.find_text(self._value(sample, name))
        # Of one that is too long no more is kept than shows it.
        return None if text is None else foreign_text.encode(text)[: schema.MAX_CAPTION_BYTES + 1]

    def _value(self, sample: str, name: str) -> Any:
        if name not in (_TEXT, _CLASS) or name not in self._samples[sample]:
            return self._json(sample).get(name)
        text = foreign_text.decode_caption(self._contents(sample, name))
        is_class = name == _CLASS and text.strip().isdecimal() and len(text) < 19
        return int(text) if is_class else text

    def _key(self, sample: str) -> int:
        fields, name = self._json(sample), self.key_column
        # The row is a bad one, under any key.
        if fields is _DAMAGED:
            return self._hash(sample)
        key = fields.get(name)
        if not schema.is_key(key):
            raise ValueError(f'{self.path}: {name} of {sample!r} is {key!r}, expected a number.')
        return int(str(key))

    def _hash(self, sample: str) -> int:
        return name_hash(f'{self._label}/{sample}') >> 1

    def _json(self, sample: str) -> Mapping[str, Any]:
        """The fields of a sample; `_DAMAGED` without any if they cannot be read."""
        if _JSON not in self._samples[sample]:
            return {}
        if self._parsed[0] != sample:
            try:
                fields = foreign_text.parse_json(self._contents(sample, _JSON))
            except (ValueError, RecursionError):
                fields = _DAMAGED
            self._parsed = sample, fields if isinstance(fields, Mapping) else {}
        return self._parsed[1]

    def _contents(self, sample: str, suffix: str) -> bytes:
        """A `.json` or `.txt`; of a longer one than anybody writes so much that it is no JSON."""
        start, size = self._samples[sample][suffix]
        return self._read_bytes(start, min(size, _MAX_TEXT))


@functools.lru_cache(maxsize=64)
def _npy_header(head: bytes, size: int) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in the header of a `.npy` file; those of most samples are equal."""
    dtype, shape, _ = manifest.parse_npy_header(head, size)
    if dtype.hasobject or dtype.str[0] == '>' or dtype.fields:
        raise ValueError(f'its dtype is {dtype}, expected little-endian numbers')
    return 'V2' if dtype.str == '|V2' else dtype.name, shape
