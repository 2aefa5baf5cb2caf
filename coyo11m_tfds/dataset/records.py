"""Records as bytes: `tf.train.Example`s in the framing of a TFRecord file.

    with open('x.tfrecord', 'wb') as file, records.RecordWriter(file) as writer:
        writer.write({'key': np.array([7, 8]), 'caption': [b'A cat.', b'A dog.']})
    writer.chunk_offsets, writer.num_bytes, writer.crc32c

    list(records.split(data))     # the other way round, where something is wrong with a file

    scan = records.RecordScan()   # the same account of a file that is there
    scan.add(block)
    scan.num_records, scan.chunk_offsets, scan.num_bytes, scan.crc32c

The bytes are those that TensorFlow itself would write. They are made without it so that where
records begin and the checksum of the file are known without reading it again, and so that a worker
process takes 1.4 s and 260 MB before it begins instead of 5 s and 900 MB. It is also faster: a
record of 25 KB takes 4 us on one of 2 cores, checksums included, before the system writes it.
"""

import functools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import BinaryIO, Self

import google_crc32c
import numpy as np

from coyo11m_tfds import schema

_BYTES_LIST, _INT64_LIST = 1, 3

_LENGTH_AND_CHECKSUM = 12  # in front of a record; behind it is another checksum
_CHECKSUM = 4

# More than any record has, and little enough to keep: a length beyond it is not believed.
_LARGEST_RECORD = 64 << 20

# Written at once. The system takes so much in half the time of a record at a time.
_BLOCK_BYTES = 1_000_000


class RecordWriter:
    """Writes records to a binary file and keeps account of it.

    A block of records is written at a time; the last one, and with it the account is that of the
    file, when the writer's context ends without an error.

    Attributes:
        num_records: written so far.
        num_bytes: size of the file so far.
        crc32c: CRC-32C of the file; the checksum that Google Cloud Storage keeps too.
        chunk_offsets: byte offsets of the records 0, 32, 64, ... (`schema.CHUNK_STRIDE`).
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        # Filled again and again: to get new memory from the system takes longer than to fill it.
        self._block = np.empty(_BLOCK_BYTES, np.uint8)
        self._filled = 0
        self.num_records = 0
        self.num_bytes = 0
        self.crc32c = 0
        self.chunk_offsets: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._write_block()

    def write(self, columns: Mapping[str, np.ndarray | Sequence[bytes]]) -> None:
        """Appends a record for each row of the columns, which are of equal length.

        A record is a `tf.train.Example` whose features hold one value each. It is equal to
        `Example.SerializeToString(deterministic=True)`, as long as no name is the beginning of
        another (protobuf sorts these its own way).

        Args:
            columns: for each feature int64 `(n,)`, or bytes: a list of them or uint8 `(n, size)`.
        """
        fields: list[tuple[str, int]] = []
        values: list[Iterable[bytes]] = []
        for name, column in sorted(columns.items()):
            if isinstance(column, np.ndarray) and column.ndim == 1:
                fields.append((name, _INT64_LIST))
                values.append(map(_varint, column.tolist()))
            else:
                fields.append((name, _BYTES_LIST))
                values.append(column)
        key = tuple(fields)
        for row in zip(*values, strict=True):
            self._append(_framing(key, tuple(map(len, row))), row)

    def _append(self, framing: tuple[Sequence[bytes], int], values: Sequence[bytes]) -> None:
        """Appends one record: length, its checksum, each value with what comes before it, checksum.

        The format is described in tensorflow/core/lib/io/record_writer.h.
        """
        heads, size = framing
        if self._filled + size > len(self._block):
            self._write_block()
            if size > len(self._block):
                self._block = np.empty(size, np.uint8)
        if self.num_records % schema.CHUNK_STRIDE == 0:
            self.chunk_offsets.append(self.num_bytes)
        start = at = self._filled
        view = memoryview(self._block)
        for head, value in zip(heads, values, strict=True):
            middle, end = at + len(head), at + len(head) + len(value)
            view[at:middle], view[middle:end] = head, value
            at = end
        # The checksum is computed of arrays, but not of a memoryview.
        view[at : at + _CHECKSUM] = _masked_crc(self._block[start + _LENGTH_AND_CHECKSUM : at])
        self._filled = start + size
        self.num_bytes += size
        self.num_records += 1

    def _write_block(self) -> None:
        block = self._block[: self._filled]
        self._file.write(block)
        self.crc32c = google_crc32c.extend(self.crc32c, block)
        self._filled = 0


def split(data: bytes) -> Iterator[bytes | None]:
    """Takes consecutive records of a file apart and checks them.

    Yields:
        Each record; None for one whose checksum is wrong. It ends where a length is damaged or
        a record is not whole, because the start of the next one is unknown.
    """
    at = 0
    while at + _LENGTH_AND_CHECKSUM <= len(data):
        packed, checksum = data[at : at + 8], data[at + 8 : at + _LENGTH_AND_CHECKSUM]
        begin = at + _LENGTH_AND_CHECKSUM
        end = begin + struct.unpack('<Q', packed)[0]
        at = end + _CHECKSUM
        if checksum != _masked_crc(packed) or at > len(data):
            return
        record = data[begin:end]
        yield record if data[end:at] == _masked_crc(record) else None


class RecordScan:
    """Takes a file in, block by block, and keeps account of it as `RecordWriter` does.

    Attributes:
        num_records, num_bytes, crc32c, chunk_offsets: of what was added so far; records count as
            long as there is no problem.
        problem: what is wrong with the first record that is not as it should be; '' if none is.
    """

    def __init__(self):
        self.num_records = 0
        self.num_bytes = 0
        self.crc32c = 0
        self.chunk_offsets: list[int] = []
        self.problem = ''
        self._rest = b''  # of a record that is not whole yet

    def add(self, block: bytes) -> None:
        """Takes in what comes next in the file."""
        self.crc32c = google_crc32c.extend(self.crc32c, block)
        begin = self.num_bytes - len(self._rest)
        self.num_bytes += len(block)
        if self.problem:
            return
        data, at = self._rest + block, 0
        while (size := self._whole_record(data, at)) and not self.problem:
            if self.num_records % schema.CHUNK_STRIDE == 0:
                self.chunk_offsets.append(begin + at)
            self.num_records += 1
            at += size
        self._rest = b'' if self.problem else data[at:]

    def end(self) -> None:
        """Says that the file ends here."""
        if self._rest:
            self._set_problem('is not whole')

    def _whole_record(self, data: bytes, at: int) -> int:
        """Checks the record at a place; its bytes in the file, 0 if they are not all there."""
        begin = at + _LENGTH_AND_CHECKSUM
        if begin > len(data):
            return 0
        packed = data[at : at + 8]
        end = begin + struct.unpack('<Q', packed)[0]
        if data[at + 8 : begin] != _masked_crc(packed) or end - begin > _LARGEST_RECORD:
            self._set_problem('has a damaged length')
        elif end + _CHECKSUM <= len(data):
            if data[end : end + _CHECKSUM] != _masked_crc(data[begin:end]):
                self._set_problem('has a wrong checksum')
            return end + _CHECKSUM - at
        return 0

    def _set_problem(self, what: str) -> None:
        self.problem = f'record {self.num_records} {what}'


# Only lengths vary from record to record, and captions have some hundred.
@functools.lru_cache(4096)
def _framing(
    fields: tuple[tuple[str, int], ...], lengths: tuple[int, ...]
) -> tuple[Sequence[bytes], int]:
    """The bytes before each value of a record, and those of the whole record in the file.

    The field numbers are those of tensorflow/core/example/{example,feature}.proto, the encoding is
    that of https://protobuf.dev/programming-guides/encoding.

    Args:
        fields: name and kind of each feature, in the order of the record.
        lengths: bytes of each value; of an integer, those of its varint.
    """
    heads = [
        value_head(name, length, is_int=kind == _INT64_LIST)
        for (name, kind), length in zip(fields, lengths, strict=True)
    ]
    payload = sum(map(len, heads)) + sum(lengths)
    example = example_head(payload)
    record_bytes = len(example) + payload
    packed = struct.pack('<Q', record_bytes)
    heads[0] = packed + _masked_crc(packed) + example + heads[0]
    return heads, _LENGTH_AND_CHECKSUM + record_bytes + _CHECKSUM


def example_head(payload: int) -> bytes:
    """The bytes in front of all features of a record, which take `payload` bytes together."""
    return _tag(1, payload)  # Example.features


def value_head(name: str, length: int, *, is_int: bool = False) -> bytes:
    """The bytes in front of a value of `length` bytes (an integer's varint): name and lengths."""
    head = _tag(1, length)  # BytesList.value or (packed) Int64List.value
    kind = _INT64_LIST if is_int else _BYTES_LIST
    head = _tag(kind, len(head) + length) + head  # a Feature's list
    head = _tag(2, len(head) + length) + head  # value of an entry
    head = _tag(1, len(name.encode())) + name.encode() + head  # its key
    return _tag(1, len(head) + length) + head  # Features.feature


def _tag(number: int, length: int) -> bytes:
    """The beginning of a length-delimited field (wire type 2)."""
    return bytes([number << 3 | 2]) + _varint(length)


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; negative numbers as their 64-bit two's complement."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = []
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _masked_crc(data: bytes | np.ndarray) -> bytes:
    """Masked as tensorflow/core/lib/hash/crc32c.h does, little endian."""
    crc = google_crc32c.value(data)
    return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
