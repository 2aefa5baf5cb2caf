"""The bytes of records against those that TensorFlow writes and reads."""

import io
import itertools

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as st

from coyo11m_tfds.dataset import records
from tests import built

FEATURES = st.dictionaries(
    st.text(max_size=20),
    st.binary(max_size=300) | st.integers(-(2**63), 2**63 - 1),
    min_size=1,
    max_size=5,
)


@given(FEATURES)
def test_a_record_has_the_bytes_that_tensorflow_gives_it(features):
    names = sorted(features)
    assume(not any(b.startswith(a) for a, b in itertools.pairwise(names)))
    example = tf.train.Example()
    for name, value in features.items():
        if isinstance(value, bytes):
            example.features.feature[name].bytes_list.value.append(value)
        else:
            example.features.feature[name].int64_list.value.append(value)
    file = io.BytesIO()
    with records.RecordWriter(file) as writer:
        writer.write(
            {
                name: [value] if isinstance(value, bytes) else np.array([value], np.int64)
                for name, value in features.items()
            }
        )
    assert file.getvalue()[12:-4] == example.SerializeToString(deterministic=True)


@pytest.mark.parametrize('count', [0, 1, 32, 33, 100])
def test_tensorflow_reads_what_is_written_and_the_account_is_right(tmp_path, count):
    # Some are longer than what is written at once.
    texts = [bytes([i]) * (i * 7 if i % 40 else 1_200_000) for i in range(count)]
    rows = np.arange(2 * count, dtype=np.uint8).reshape(count, 2)
    path = tmp_path / 'x.tfrecord'
    with path.open('wb') as file, records.RecordWriter(file) as writer:
        for part in (slice(0, 40), slice(40, None)):
            writer.write({'text': texts[part], 'row': rows[part]})
    # TensorFlow checks both checksums of every record.
    read = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    examples = [tf.train.Example.FromString(record).features.feature for record in read]
    assert [example['text'].bytes_list.value[0] for example in examples] == texts
    assert [example['row'].bytes_list.value[0] for example in examples] == [
        row.tobytes() for row in rows
    ]
    assert writer.num_records == count
    assert writer.num_bytes == path.stat().st_size
    assert writer.crc32c == google_crc32c.value(path.read_bytes())
    starts = [sum(16 + len(record) for record in read[:i]) for i in range(0, count, 32)]
    assert writer.chunk_offsets == starts


def test_columns_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError), records.RecordWriter(io.BytesIO()) as writer:
        writer.write({'text': [b'a', b'b'], 'key': np.array([1])})


def written(count: int) -> tuple[bytes, records.RecordWriter]:
    file = io.BytesIO()
    with records.RecordWriter(file) as writer:
        writer.write({'text': [bytes([i]) * (i * 7 % 500) for i in range(count)]})
    return file.getvalue(), writer


def scan(data: bytes, block: int) -> records.RecordScan:
    scanned = records.RecordScan()
    for start in range(0, len(data), block):
        scanned.add(data[start : start + block])
    scanned.end()
    return scanned


@pytest.mark.parametrize('block', [1, 13, 1000, 10**6])
@pytest.mark.parametrize('count', [0, 1, 33, 200])
def test_a_scan_gives_the_account_of_the_writer(count, block):
    data, writer = written(count)
    scanned = scan(data, block)
    assert scanned.problem == ''
    assert (scanned.num_records, scanned.crc32c) == (writer.num_records, writer.crc32c)


@pytest.mark.parametrize('block', [1, 1000, 10**6])
def test_a_scan_finds_the_first_record_that_is_damaged(block):
    data, _ = written(100)
    starts = np.cumsum([0, *(16 + len(record) for record in built.split_records(data))])
    for at, problem in [
        (starts[40], 'record 40 has a damaged length'),
        (starts[40] + 7, 'record 40 has a damaged length'),
        (starts[40] + 9, 'record 40 has a damaged length'),
        (starts[40] + 12, 'record 40 has a wrong checksum'),
        (starts[41] - 1, 'record 40 has a wrong checksum'),
    ]:
        damaged = bytearray(data)
        damaged[at] ^= 128
        scanned = scan(bytes(damaged), block)
        assert scanned.problem == problem
        assert scanned.crc32c == google_crc32c.value(bytes(damaged))
    for end in (starts[41] - 1, starts[40] + 5):
        assert scan(data[:end], block).problem == 'record 40 is not whole'
    assert scan(data[: starts[40]], block).num_records == 40


def test_a_scan_keeps_no_more_than_a_record_may_have():
    """A length that is whole but absurd does not have the rest of the file kept."""
    length = (10**12).to_bytes(8, 'little')
    masked = records.mask_crc32c(google_crc32c.value(length))
    scanned = scan(length + masked.to_bytes(4, 'little') + bytes(1000), 100)
    assert scanned.problem == 'record 0 has a damaged length'
