"""Records as bytes: one `tf.train.Example` in the framing of a TFRecord file.

    with open('x.tfrecord', 'wb') as file:
        writer = records.RecordWriter(file)
        writer.write(records.encode_example({'key': 7, 'caption': b'A cat.'}))
    writer.chunk_offsets, writer.num_bytes, writer.crc32c

The bytes are those that TensorFlow itself would write. They are made without it so that where
records begin and the checksum of the file are known without reading it again, and so that a worker
process takes 1.4 s and 260 MB before it begins instead of 5 s and 900 MB. The speed is the same:
46,000 records of 25 KB a second on one core, 47,000 for `tf.train.Example` and `TFRecordWriter`.
"""

import struct
from collections.abc import Mapping
from typing import BinaryIO

import google_crc32c

from coyo11m_tfds import schema


def encode_example(features: Mapping[str, bytes | int]) -> bytes:
    """Serializes a `tf.train.Example` whose features hold one value each.

    Equal to `Example.SerializeToString(deterministic=True)`, as long as no name is the beginning of
    another (protobuf sorts these its own way). The field numbers are those of
    tensorflow/core/example/{example,feature}.proto, the encoding that of
    https://protobuf.dev/programming-guides/encoding.

    Args:
        features: bytes, or an integer of 64 bits.
    """
    entries = []
    for name, value in sorted(features.items()):
        if isinstance(value, bytes):
            feature = _field(1, _field(1, value))  # Feature.bytes_list, BytesList.value
        else:
            feature = _field(3, _field(1, _varint(value)))  # Feature.int64_list, Int64List.value
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))  # Features.feature
    return _field(1, b''.join(entries))  # Example.features


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited field (wire type 2)."""
    return b'%c%b%b' % (number << 3 | 2, _varint(len(payload)), payload)


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; negative numbers as their 64-bit two's complement."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = []
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class RecordWriter:
    """Writes records to a binary file and keeps account of it.

    Attributes:
        num_records: written so far.
        num_bytes: size of the file so far.
        crc32c: CRC-32C of the file so far; the checksum that Google Cloud Storage keeps too.
        chunk_offsets: byte offsets of the records 0, 32, 64, ... (`schema.CHUNK_STRIDE`).
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self.num_records = 0
        self.num_bytes = 0
        self.crc32c = 0
        self.chunk_offsets: list[int] = []

    def write(self, record: bytes) -> None:
        """Appends one record.

        The format is described in tensorflow/core/lib/io/record_writer.h: length (uint64, little
        endian), its masked CRC-32C, the record, its masked CRC-32C.
        """
        if self.num_records % schema.CHUNK_STRIDE == 0:
            self.chunk_offsets.append(self.num_bytes)
        length = struct.pack('<Q', len(record))
        framed = b''.join((length, _masked_crc(length), record, _masked_crc(record)))
        self._file.write(framed)
        self.crc32c = google_crc32c.extend(self.crc32c, framed)
        self.num_bytes += len(framed)
        self.num_records += 1


def _masked_crc(data: bytes) -> bytes:
    """Masked as tensorflow/core/lib/hash/crc32c.h does, little endian."""
    crc = google_crc32c.value(data)
    return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
