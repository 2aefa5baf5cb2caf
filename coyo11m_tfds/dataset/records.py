"""Records as bytes: `tf.train.Example`s in the framing of a TFRecord file.

TensorFlow would write the same bytes, but without the offsets and the checksum of the file, and a
worker process would start in 5 s with 900 MB instead of 1.4 s with 260 MB.
"""

import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Self

import google_crc32c
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.storage.stored_file import ChecksumScan

# Kinds of a feature's list, by the numbers of their fields in feature.proto.
_BYTES_LIST, _INT64_LIST = 1, 3

# The framing of a record in the file: its length and the checksum of that, then its own checksum.
HEADER_NBYTES, TRAILER_NBYTES = 12, 4
# More than any record has, and little enough to keep: a larger length counts as damaged.
MAX_RECORD_NBYTES = 64 << 20

_MAX_VARINT = 10  # bytes of a 64-bit integer

# Written at once, which takes half the time of writing record by record.
_BLOCK_BYTES = 1_000_000


class RecordWriter:
    """Writes records to a binary file in blocks; the end of its context writes the last block."""

    def __init__(self, file: BinaryIO):
        """Takes a file that is open at its start."""
        self._file = file
        # Reused, because getting new memory from the system takes longer than filling it.
        self._block = np.empty(_BLOCK_BYTES, np.uint8)
        self._filled = 0
        self.num_records = 0
        self.num_bytes = 0
        self.crc32c = 0  # of the file, valid after the end of the context
        self.chunk_offsets: list[int] = []  # of the records 0, 32, 64, ... (CHUNK_STRIDE)
        self.checksums = bytearray()  # those behind the records, four bytes each

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type | None, *_) -> None:
        # After an error nobody uses the file, and an error of the disk would hide the first one.
        if error_type is None:
            self._write_block()

    def write(self, columns: Mapping[str, np.ndarray | Sequence[bytes]]) -> None:
        """Appends a `tf.train.Example` for each row of columns of equal lengths, by feature.

        A column is int64 `(n,)`, or holds n values as bytes.
        """
        # These are the bytes of `Example.SerializeToString(deterministic=True)`, unless a feature's
        # name is a prefix of another one: protobuf sorts such names differently.
        fields: list[tuple[str, int]] = []
        values: list[Iterable[bytes]] = []
        for name, column in sorted(columns.items()):
            if isinstance(column, np.ndarray) and column.ndim == 1:
                fields.append((name, _INT64_LIST))
                values.append(map(_varint, column.tolist()))
            else:
                fields.append((name, _BYTES_LIST))
                values.append(column)
        # A tuple, by which `_framing` remembers what it has computed.
        field_key = tuple(fields)
        for row in zip(*values, strict=True):
            lengths = tuple(map(len, row))
            self._append(_framing(field_key, lengths), row)

    def _append(self, framing: tuple[Sequence[bytes], int], values: Sequence[bytes]) -> None:
        """Appends one record, in the format of tensorflow/core/lib/io/record_writer.h."""
        heads, size = framing
        if self._filled + size > len(self._block):
            self._write_block()
            # A record may be larger than a block.
            if size > len(self._block):
                self._block = np.empty(size, np.uint8)
        # A run begins, for which the chunk index has an offset.
        if self.num_records % schema.CHUNK_STRIDE == 0:
            self.chunk_offsets.append(self.num_bytes)
        start = offset = self._filled
        view = memoryview(self._block)
        for head, value in zip(heads, values, strict=True):
            value_at = offset + len(head)
            view[offset:value_at] = head
            offset = value_at + len(value)
            view[value_at:offset] = value
        # The checksum is computed of arrays, but not of a memoryview.
        checksum = _packed_crc(self._block[start + HEADER_NBYTES : offset])
        view[offset : offset + TRAILER_NBYTES] = checksum
        self.checksums += checksum
        self._filled = start + size
        self.num_bytes += size
        self.num_records += 1

    def _write_block(self) -> None:
        block = self._block[: self._filled]
        self._file.write(block)
        self.crc32c = google_crc32c.extend(self.crc32c, block)
        self._filled = 0


class RecordScan(ChecksumScan):
    """Checks the records of a file, which it takes block by block."""

    def __init__(self):
        self.num_records = 0  # before the first damaged one
        self.problem = ''  # of the first damaged record; '' if there is none
        self._rest = b''  # of a record that is not whole yet

    def add(self, block: bytes) -> None:
        """Checks the records that end in the next block of the file."""
        super().add(block)
        # After a damaged length, nobody knows where the next record begins.
        if self.problem:
            return
        # Blocks end anywhere: what is left of a record waits for the next block.
        data = self._rest + block
        offset = 0
        while size := self._check_record(data, offset):
            self.num_records += 1
            offset += size
        self._rest = b'' if self.problem else data[offset:]

    def end(self) -> None:
        """Checks that the file ends after a whole record; call it after the last block."""
        if self._rest:
            self._set_problem('is not whole')

    def _check_record(self, data: bytes, offset: int) -> int:
        """Returns the bytes of the record at an offset, with its framing; 0 if some are missing.

        Also of a damaged record it returns 0, and sets `problem`.
        """
        begin = offset + HEADER_NBYTES
        if begin > len(data):
            return 0
        packed_length = data[offset : offset + 8]
        (length,) = struct.unpack('<Q', packed_length)
        is_length_damaged = data[offset + 8 : begin] != _packed_crc(packed_length)
        # No record is so long, and to wait for its end would take any memory.
        if is_length_damaged or length > MAX_RECORD_NBYTES:
            self._set_problem('has a damaged length')
            return 0
        end = begin + length
        if end + TRAILER_NBYTES > len(data):
            return 0
        if data[end : end + TRAILER_NBYTES] != _packed_crc(data[begin:end]):
            self._set_problem('has a wrong checksum')
            return 0
        return end + TRAILER_NBYTES - offset

    def _set_problem(self, problem: str) -> None:
        self.problem = f'record {self.num_records} {problem}'


class ValuePlaces(NamedTuple):
    """Places in memory of the values of some records, int64 `(n,)`."""

    regular: np.ndarray  # bool; if a record has another layout, its other fields are undefined
    keys: np.ndarray  # themselves
    captions_end: np.ndarray
    places: dict[str, np.ndarray]  # of each large feature


class RecordLayout:
    """The layout of one data set's records.

    Features are sorted by name, and all but the caption have a known size: readers compute the
    place of each value from the end of its record, and check the bytes in front of it.
    """

    def __init__(self, latents_nbytes: int, text_dim: int = 0, num_tokens: int = 0):
        """Takes the bytes of latents, the width of embeddings and the number of tokens; 0: none."""
        sizes = {}
        if latents_nbytes:
            sizes[schema.LATENTS] = latents_nbytes
        if text_dim:
            sizes[schema.TEXT_EMBEDDING] = 2 * text_dim
        if num_tokens:
            sizes[schema.TOKENS] = 4 * num_tokens
        # By feature and by head, bytes from its beginning to the end of the record: only from there
        # are the places known, because the caption in front has any size.
        self._value_from_end: dict[str, int] = {}
        self._head_from_end: dict[int, bytes] = {}
        # From the last feature to the first; each value stands behind its head.
        from_end = 0
        for name, size in reversed(sizes.items()):
            from_end += size
            self._value_from_end[name] = from_end
            head = _value_head(name, size)
            from_end += len(head)
            self._head_from_end[from_end] = head
        self._key_from_end = from_end
        # What stands before keys of 1, 2, ... bytes, uint8 `(_MAX_VARINT, h)`.
        key_heads = []
        for key_nbytes in range(1, _MAX_VARINT + 1):
            key_head = _value_head(schema.KEY, key_nbytes, is_int=True)
            key_heads.append(list(key_head))
        self._key_heads = np.array(key_heads, np.uint8)
        # Bytes that end with a key, in which the key and its head lie.
        self._window = self._key_heads.shape[1] + _MAX_VARINT

    def find(
        self, gather: Callable[[np.ndarray, int], np.ndarray], begin: np.ndarray, end: np.ndarray
    ) -> ValuePlaces:
        """Returns where the values of serialized records lie, given their places `[begin, end)`.

        `gather(places, nbytes)` copies bytes from each place, with zeros before `begin`; it is not
        called for bytes behind `end`.
        """
        regular = end - begin >= self._key_from_end + self._window
        # Every head where it has to be: then nothing has to be parsed.
        for from_end, head in self._head_from_end.items():
            heads = gather(end - from_end, len(head)).view(np.uint8)
            expected = np.frombuffer(head, np.uint8)
            are_equal = heads.reshape(-1, len(head)) == expected
            regular &= are_equal.all(axis=1)
        key_end = end - self._key_from_end
        window = gather(key_end - self._window, self._window).view(np.uint8)
        keys, length, is_key = self._decode_keys(window.reshape(-1, self._window))
        # Before the key stands its head, and before this the caption.
        captions_end = key_end - length - self._key_heads.shape[1]
        places = {name: end - from_end for name, from_end in self._value_from_end.items()}
        return ValuePlaces(regular & is_key, keys, captions_end, places)

    def _decode_keys(self, window: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the varints at the ends of rows of bytes: keys, lengths, whether they are keys.

        `window` has for each record the last bytes of the key's feature, uint8 `(n, self._window)`.
        """
        # In a varint, all bytes but the last have their high bit set. Before it stands a byte with
        # its length, which has not: there the varint begins.
        backwards = window[:, : -_MAX_VARINT - 1 : -1]
        has_high_bit = backwards >= 0x80
        length = 1 + (~has_high_bit[:, 1:]).argmax(axis=1)
        length[has_high_bit[:, 1:].all(axis=1)] = _MAX_VARINT
        keys = np.zeros(len(window), np.uint64)
        # From the highest bits to the lowest, as they come backwards.
        for index in range(_MAX_VARINT):
            bits = (backwards[:, index] & np.uint8(0x7F)).astype(np.uint64)
            keys = np.where(index < length, keys << np.uint64(7) | bits, keys)
        # What looks like a varint is one only behind the head of a key of this length.
        head_nbytes = self._key_heads.shape[1]
        head_at = self._window - length - head_nbytes
        columns = head_at[:, None] + np.arange(head_nbytes)
        heads = np.take_along_axis(window, columns, axis=1)
        has_head = (heads == self._key_heads[length - 1]).all(axis=1)
        ends_varint = ~has_high_bit[:, 0]
        return keys.view(np.int64), length, has_head & ends_varint


@functools.lru_cache(65536)
def caption_head(before_key: int, num_bytes: int) -> bytes | None:
    """Returns the bytes before a record's caption; None if no record has such sizes.

    `num_bytes` is the size of the record, and `before_key` the number of its bytes before the key,
    which follows the caption.
    """
    # From the outside in: the size of the record gives that of its features, and this the first
    # bytes; what then remains before the key is the caption with its head.
    payload = _size_behind(lambda size: _tag(1, size), num_bytes)
    if payload is None:
        return None
    example = _tag(1, payload)  # Example.features
    caption_nbytes = before_key - len(example)
    size = _size_behind(lambda size: _value_head(schema.CAPTION, size), caption_nbytes)
    if size is None:
        return None
    return example + _value_head(schema.CAPTION, size)


def _size_behind(head: Callable[[int], bytes], total: int) -> int | None:
    """Returns the size of a value that takes `total` bytes with its head; None if there is none."""
    # From above: a head has few bytes, so the first sizes that are tried are the nearest.
    for size in range(total, -1, -1):
        total_of_size = len(head(size)) + size
        if total_of_size == total:
            return size
        # Smaller values take even less.
        if total_of_size < total:
            return None
    return None


# Only lengths vary from record to record, and captions have some hundred.
@functools.lru_cache(4096)
def _framing(
    fields: tuple[tuple[str, int], ...], lengths: tuple[int, ...]
) -> tuple[Sequence[bytes], int]:
    """Returns the bytes before each value of a record, and the size of the record in the file."""
    # Field numbers of tensorflow/core/example/{example,feature}.proto, in the encoding of
    # https://protobuf.dev/programming-guides/encoding.
    heads = []
    for (name, kind), length in zip(fields, lengths, strict=True):
        heads.append(_value_head(name, length, is_int=kind == _INT64_LIST))
    payload = sum(map(len, heads)) + sum(lengths)
    example = _tag(1, payload)  # Example.features
    record_bytes = len(example) + payload
    packed_length = struct.pack('<Q', record_bytes)
    header = packed_length + _packed_crc(packed_length)
    # Before the first head stand the header of the file's record and the beginning of the example.
    heads[0] = header + example + heads[0]
    return heads, HEADER_NBYTES + record_bytes + TRAILER_NBYTES


def _value_head(name: str, length: int, *, is_int: bool = False) -> bytes:
    """Returns the bytes before a value of `length` bytes (an integer's varint): name, lengths."""
    # From the inside out, as each length counts the bytes behind it.
    head = _tag(1, length)  # BytesList.value or (packed) Int64List.value
    kind = _INT64_LIST if is_int else _BYTES_LIST
    head = _tag(kind, len(head) + length) + head  # a Feature's list
    head = _tag(2, len(head) + length) + head  # value of an entry
    key = name.encode()
    head = _tag(1, len(key)) + key + head  # its key
    return _tag(1, len(head) + length) + head  # Features.feature


def _tag(number: int, length: int) -> bytes:
    """Returns the beginning of a length-delimited field (wire type 2)."""
    return bytes([number << 3 | 2]) + _varint(length)


def _varint(value: int) -> bytes:
    """Returns a number in bytes of seven bits, lowest first; negative ones as two's complements."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = []
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def mask_crc32c(crc: Any) -> Any:
    """Returns a masked CRC-32C, int or uint32; see tensorflow/core/lib/hash/crc32c.h."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _packed_crc(data: bytes | np.ndarray) -> bytes:
    """Returns the masked CRC-32C as four bytes, little endian."""
    crc = google_crc32c.value(data)
    return struct.pack('<I', mask_crc32c(crc))
