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
_TEXT = 'txt'
_JSON = 'json'
_USUAL_SUFFIXES = _TEXT, _JSON, _CLASS, 'npy'

# In place of the fields of a `.json` that cannot be read.
_DAMAGED: Mapping[str, Any] = types.MappingProxyType({})

_Member = tuple[int, int]  # offset and size of the contents


class TarFile(LatentFile):
    """A validated tar. Keys are `key` of the `.json` members, or hashes of the names."""

    kind = 'a tar'

    def _open(self) -> None:
        """Lists the members by samples, and reads the headers of all arrays."""
        self._parsed: tuple[str, Mapping[str, Any]] = '', {}  # the `.json` of one sample
        self._samples = self._list_samples()
        if not self._samples:
            self._set_empty()
            return
        latents = self._find_latents()
        self._place_arrays(latents)
        # Such names stand for means and deviations.
        names = map(os.path.basename, self._samples)
        if all(name.startswith(MOMENTS_PREFIX) for name in names):
            self.moments = schema.DEVIATION
        self._find_keys(schema.KEY, self._names_of_keys())
        make_key = self._key if self.key_column else self._hash
        self.keys = np.array([make_key(sample) for sample in self._samples], np.int64)

    def _list_samples(self) -> dict[str, dict[str, _Member]]:
        """Returns the members of each sample, by the name of the sample and by suffix."""
        samples: dict[str, dict[str, _Member]] = {}
        all_members = tar_members.list_members(self.path, self._size, self._read_bytes)
        for member, offset, size in all_members:
            if file_names.is_hidden(member):
                continue
            folder, base = os.path.split(member)
            # Members whose names are equal up to the first dot form one sample.
            sample, _, suffix = base.partition('.')
            if suffix.lower() in _USUAL_SUFFIXES:
                suffix = suffix.lower()
            members = samples.setdefault(os.path.join(folder, sample), {})
            if suffix in members:
                raise ValueError(f'{self.path}: has {member!r} twice. Remove one of them.')
            members[suffix] = offset, size
        return samples

    def _names_of_keys(self) -> list[str]:
        """Returns the names of the JSON fields that can be keys."""
        # The first sample with fields stands for all.
        for sample in self._samples:
            fields = self._json(sample)
            if fields:
                names = []
                for name, value in fields.items():
                    if schema.parse_integer(value) is not None:
                        names.append(name)
                return names
        return []

    def _place_arrays(self, suffix: str) -> None:
        """Sets dtype, shape and layout by the headers of the arrays with a suffix."""
        # All headers, because one row of another kind would be read as other numbers.
        kinds = set[tuple[str, tuple[int, ...]]]()
        begins = []
        for sample in self._samples:
            kind, begin = self._parse_npy(sample, suffix)
            kinds.add(kind)
            begins.append(begin)
        if len(kinds) > 1:
            raise ValueError(f'{self.path}: latents are {sorted(kinds)}; expected one kind.')
        [(dtype, shape)] = kinds
        # NumPy has no bfloat16, and writes it as two bytes without a meaning.
        if dtype == 'V2' and self._latents_from.dtype:
            dtype = self._latents_from.dtype
        self._set_kind(suffix, dtype, shape)
        # Places in a data set are kept as numbers of 32 bits.
        offsets = np.array(begins, np.int64)
        numbers, remainders = np.divmod(offsets, _ALIGNED)
        if remainders.any() or numbers.max(initial=0) >= 2**32:
            raise ValueError(f'{self.path}: a {suffix} has its array at an unusual offset.')
        self.layout = RowLayout((0,), _ALIGNED, numbers)

    def column_names(self) -> ColumnNames:
        """Returns the names of members and JSON fields of any sample, by what they hold."""
        # Of all samples, because the first may lack what others have.
        kinds = collections.defaultdict[str, set[type]](set)
        for sample, members in self._samples.items():
            for name in (_TEXT, _CLASS):
                if name in members:
                    kinds[name].add(type(self._value(sample, name)))
            for name, value in self._json(sample).items():
                kinds[name].add(type(value))
        texts = []
        numbers = []
        integers = []
        empty = []
        for name, kinds_of_field in kinds.items():
            # Samples may lack the field, or have a null.
            kinds_of_values = kinds_of_field - {type(None)}
            if not kinds_of_values:
                empty.append(name)
            # A list stands for the first text in it.
            if kinds_of_values & {str, list}:
                texts.append(name)
            if kinds_of_values & {int, float}:
                numbers.append(name)
            if kinds_of_values == {int}:
                integers.append(name)
        return ColumnNames(tuple(texts), tuple(numbers), find_labels(integers), tuple(empty))

    def text_column(self, name: str) -> pa.Array:
        """Reads texts, large binary `(N,)` that need not be UTF-8; null for a row without one."""
        texts = [self._text(sample, name) for sample in self._samples]
        return pa.array(texts, pa.large_binary())

    def number_column(self, name: str) -> pa.Array:
        """Reads labels or other numbers, int64 or float32 `(N,)`; null for a row without one."""
        values: list[int | float | None] = []
        kind = pa.int64()
        for sample in self._samples:
            value = self._value(sample, name)
            # By its type: a bool is an int, too.
            is_number = type(value) in (int, float)
            values.append(value if is_number else None)
            # One is enough to make all of them floats.
            if type(value) is float:
                kind = pa.float32()
        try:
            return pa.array(values, kind)
        except (pa.ArrowInvalid, OverflowError) as error:
            raise ValueError(
                f'{self.path}: {name} of a sample is no number of 64 bits ({error}). Write the tar '
                'again.'
            ) from None

    def _find_latents(self) -> str:
        """Returns the suffix of the members that are latents."""
        distinct = set[str]()
        for members in self._samples.values():
            distinct.update(members)
        all_suffixes = sorted(distinct)
        name = self._latents_from.name
        suffixes = []
        for suffix in all_suffixes:
            # Such as `npy`, or `latent.npy` of a sample with several arrays.
            is_array = suffix == 'npy' or suffix.endswith('.npy')
            is_chosen = not name or suffix in (name, f'{name}.npy')
            if is_array and is_chosen:
                suffixes.append(suffix)
        if not suffixes and not name:
            raise ValueError(
                f'{self.path}: its samples have no .npy files, only {all_suffixes[:10]}, expected '
                f'latents. {how_to_encode(os.path.dirname(self.path))}.'
            )
        if len(suffixes) != 1:
            raise ValueError(
                f'{self.path}: its samples have .npy files {suffixes}, expected one. Choose it by '
                "latents_from, e.g. 'latent.npy'."
            )
        return suffixes[0]

    def _parse_npy(self, sample: str, suffix: str) -> tuple[tuple[str, tuple[int, ...]], int]:
        """Returns dtype and shape of an array, and where it begins in the file.

        Raises a ValueError for a sample without the array, and for a damaged one.
        """
        if suffix not in self._samples[sample]:
            raise ValueError(f'{self.path}: {sample!r} has no .{suffix}, unlike other samples.')
        start, size = self._samples[sample][suffix]
        head = self._read_bytes(start, min(size, manifest.NPY_HEADER_BYTES))
        try:
            # The header's own length, in two bytes, follows 8 bytes of magic and version.
            nbytes = 10 + int.from_bytes(head[8:10], 'little')
            # Nothing of the array itself, so that equal headers are parsed once.
            kind = _read_kind(head[:nbytes], size)
            return kind, start + nbytes
        except ValueError as error:
            raise ValueError(
                f'{self.path}: {sample}.{suffix} cannot be read ({error}). Write it again.'
            ) from None

    def _text(self, sample: str, name: str) -> bytes | None:
        """Returns the text of a sample; an unreadable one if its JSON, which may hold it, is."""
        if self._json(sample) is _DAMAGED:
            return foreign_text.UNREADABLE
        text = foreign_text.find_text(self._value(sample, name))
        if text is None:
            return None
        encoded = foreign_text.encode(text)
        # Of one that is too long no more is kept than shows it.
        return encoded[: schema.MAX_CAPTION_BYTES + 1]

    def _value(self, sample: str, name: str) -> Any:
        """Returns what a sample has under a name: a member if there is one, else a JSON field."""
        is_member = name in (_TEXT, _CLASS) and name in self._samples[sample]
        if not is_member:
            return self._json(sample).get(name)
        text = foreign_text.decode_caption(self._contents(sample, name))
        if name == _CLASS:
            number = schema.parse_integer(text.strip())
            return text if number is None else number
        return text

    def _key(self, sample: str) -> int:
        """Returns the key in the JSON of a sample; raises a ValueError if it has none."""
        fields = self._json(sample)
        # The row is a bad one, under any key.
        if fields is _DAMAGED:
            return self._hash(sample)
        value = fields.get(self.key_column)
        # WebDataset's tools write texts.
        key = schema.parse_integer(value)
        if key is None:
            raise ValueError(
                f'{self.path}: {self.key_column} of {sample!r} is {value!r}, expected a number.'
            )
        return key

    def _hash(self, sample: str) -> int:
        """Returns a key of 63 bits by the names of the tar and of the sample."""
        # A bit less than a hash has, so that no key is negative.
        return name_hash(f'{self._label}/{sample}') >> 1

    def _json(self, sample: str) -> Mapping[str, Any]:
        """Returns the fields of a sample; `_DAMAGED` without any if they cannot be read."""
        if _JSON not in self._samples[sample]:
            return {}
        # The methods above ask for one sample after the other, for several fields of each.
        parsed_sample, fields = self._parsed
        if parsed_sample == sample:
            return fields
        try:
            content = foreign_text.parse_json(self._contents(sample, _JSON))
        except (ValueError, RecursionError):
            content = _DAMAGED
        # A list or a number has no fields.
        fields = content if isinstance(content, Mapping) else {}
        self._parsed = sample, fields
        return fields

    def _contents(self, sample: str, suffix: str) -> bytes:
        """Returns a `.json` or `.txt`; of one longer than anybody writes, too little to be JSON."""
        start, size = self._samples[sample][suffix]
        return self._read_bytes(start, min(size, _MAX_TEXT))


@functools.lru_cache(maxsize=64)  # the headers of most samples are equal
def _read_kind(head: bytes, size: int) -> tuple[str, tuple[int, ...]]:
    """Returns dtype and shape in the header of a `.npy` file; ValueError for other contents."""
    dtype, shape, _ = manifest.parse_npy_header(head, size)
    is_big_endian = dtype.str.startswith('>')
    if dtype.hasobject or is_big_endian or dtype.fields:
        raise ValueError(f'its dtype is {dtype}, expected little-endian numbers')
    # Its name would be `void16`.
    if dtype.str == '|V2':
        return 'V2', shape
    return dtype.name, shape
