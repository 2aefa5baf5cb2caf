"""Where values lie in a record as this project writes it, and how to read any other record.

    layout = RecordLayout(text_dim=640)
    found = layout.find(memory, begin, end)       # of many records at once
    found.keys, found.latents, found.text, found.regular
    record_layout.parse(serialized)['latents']    # of one, whatever its layout

Features are sorted by name (caption, key, latents, text embedding, tokens), and all but the caption
have a known size, so that places are counted from the end of a record. What stands in front of each
value, its name and lengths, is compared with what has to be there.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import records
from coyo11m_tfds.reading.mapped_files import Memory

_MAX_VARINT = 10  # bytes of a 64-bit integer
_BYTES_LIST, _INT64_LIST = 1, 3  # fields of a `tf.train.Feature`


class Found(NamedTuple):
    """Where values of some records lie.

    Attributes:
        regular: bool `(n,)`, whether this is the layout; what is said of others means nothing.
        keys: int64 `(n,)`.
        captions_end: addresses at which the captions end, int64 `(n,)`.
        latents, text, tokens: addresses at which the values begin, int64 `(n,)`.
    """

    regular: np.ndarray
    keys: np.ndarray
    captions_end: np.ndarray
    latents: np.ndarray
    text: np.ndarray
    tokens: np.ndarray


class RecordLayout:
    """The end of the records of one data set.

    Attributes:
        from_end: how far from a record's end the value of each large feature begins.
        heads: what is in front of a value, by how far from the record's end that begins.
    """

    def __init__(self, text_dim: int, *, num_tokens: int = 0, with_latents: bool = True):
        """Takes what the records hold: 0 numbers or tokens where there are none."""
        sizes = {schema.LATENTS: schema.NUM_CROPS * schema.LATENT_NBYTES} if with_latents else {}
        if text_dim:
            sizes[schema.TEXT_EMBEDDING] = 2 * text_dim
        if num_tokens:
            sizes[schema.TOKENS] = 4 * num_tokens
        self.from_end: dict[str, int] = {}
        self.heads: dict[int, bytes] = {}
        at = 0
        for name, size in reversed(sizes.items()):
            at += size
            self.from_end[name] = at
            head = records.value_head(name, size)
            at += len(head)
            self.heads[at] = head
        self._key_end = at
        lengths = range(1, _MAX_VARINT + 1)
        key_heads = [records.value_head(schema.KEY, n, is_int=True) for n in lengths]
        self._key_heads = np.array([list(head) for head in key_heads], np.uint8)
        self._window = self._key_heads.shape[1] + _MAX_VARINT

    def find(self, memory: Memory, begin: np.ndarray, end: np.ndarray) -> Found:
        """Finds the values of serialized records that lie in memory; addresses of their bytes."""
        regular = end - begin >= self._key_end + self._window
        safe = np.where(regular, end, memory.zeros + self._key_end + self._window)
        for from_end, head in self.heads.items():
            found = memory.gather(safe - from_end, len(head)).view(np.uint8)
            regular &= (found.reshape(-1, len(head)) == np.frombuffer(head, np.uint8)).all(axis=1)
        key_end = safe - self._key_end
        window = memory.gather(key_end - self._window, self._window).view(np.uint8)
        keys, length, is_key = self._decode_keys(window.reshape(-1, self._window))
        return Found(
            regular & is_key,
            keys,
            key_end - length - self._key_heads.shape[1],
            safe - self.from_end.get(schema.LATENTS, 0),
            safe - self.from_end.get(schema.TEXT_EMBEDDING, 0),
            safe - self.from_end.get(schema.TOKENS, 0),
        )

    def _decode_keys(self, window: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys, the lengths of their varints, and whether they are keys, from bytes before a place.

        A varint's bytes have their high bit set but for the last, and its length is in front of it.
        """
        backwards = window[:, : -_MAX_VARINT - 1 : -1]
        length = 1 + (backwards[:, 1:] < 0x80).argmax(axis=1)
        length[(backwards[:, 1:] >= 0x80).all(axis=1)] = _MAX_VARINT
        keys = np.zeros(len(window), np.uint64)
        for place in range(_MAX_VARINT):
            in_it = place < length
            bits = (backwards[:, place] & np.uint8(0x7F)).astype(np.uint64)
            # From the highest bits to the lowest, as they come backwards.
            keys = np.where(in_it, keys << np.uint64(7) | bits, keys)
        head_at = self._window - length - self._key_heads.shape[1]
        columns = head_at[:, None] + np.arange(self._key_heads.shape[1])
        heads = np.take_along_axis(window, columns, axis=1)
        is_key = (heads == self._key_heads[length - 1]).all(axis=1) & (backwards[:, 0] < 0x80)
        return keys.view(np.int64), length, is_key


@functools.lru_cache(65536)
def caption_head(before_key: int, whole: int) -> bytes | None:
    """The first bytes of a regular record, up to its caption; None if there is no such record.

    Args:
        before_key: bytes from its begin to its key: what is asked for, and the caption.
        whole: bytes of the record.
    """
    sizes = range(max(0, whole - 1 - _MAX_VARINT), whole)
    heads = (records.example_head(n) for n in sizes)
    example = next(
        (head for n, head in zip(sizes, heads, strict=True) if len(head) + n == whole), b''
    )
    for size in range(before_key - len(example), -1, -1):
        head = example + records.value_head(schema.CAPTION, size)
        if len(head) + size == before_key:
            return head
        if len(head) + size < before_key:
            break
    return None


def parse(record: bytes) -> dict[str, Any]:
    """The single values, bytes or integers, of a serialized `tf.train.Example`, in any layout.

    Raises:
        ValueError: it is none.
    """
    values = {}
    for features in _messages(record, 1):
        for entry in _messages(features, 1):
            name, value = _entry(entry)
            if value is not None:
                values[name] = value
    return values


def _entry(data: bytes) -> tuple[str, bytes | int | None]:
    """The name and the value of a feature; None if it holds no single bytes or integer."""
    name, value = '', None
    for content in _messages(data, 1):
        name = content.decode()
    for content in _messages(data, 2):
        for kind in (_BYTES_LIST, _INT64_LIST):
            for values in _messages(content, kind):
                value = _single(kind, [item for _, item in _fields(values)])
    return name, value


def _single(kind: int, found: list[bytes | int]) -> bytes | int | None:
    if len(found) != 1:
        return None
    value = found[0]
    if kind == _BYTES_LIST:
        return value
    if isinstance(value, bytes):
        packed = value
        value, end = _varint(packed, 0)
        if end != len(packed):
            return None
    return value - (value >> 63 << 64)


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    """The contents of the fields of a message that have this number."""
    for found, content in _fields(data):
        if found == number:
            if isinstance(content, int):
                raise ValueError(f'field {number} is an integer')
            yield content


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a message: number and content."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 2:
            size, begin = _varint(data, at)
            at = begin + size
            if at > len(data):
                raise ValueError('a field reaches beyond its message')
            yield tag >> 3, data[begin:at]
        elif tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        else:
            raise ValueError(f'a field of wire type {tag & 7}')


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer of up to 64 bits, and where it ends."""
    value = 0
    for place in range(_MAX_VARINT):
        if at + place >= len(data):
            break
        value |= (data[at + place] & 0x7F) << 7 * place
        if data[at + place] < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError('an integer is not whole')
