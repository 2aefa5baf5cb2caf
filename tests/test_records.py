"""The bytes of records against those that TensorFlow writes and reads."""

import itertools
import pathlib

import google_crc32c
import pytest
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as st

from coyo11m_tfds import records

FEATURES = st.dictionaries(
    st.text(max_size=20), st.binary(max_size=300) | st.integers(-(2**63), 2**63 - 1), max_size=5
)


@given(FEATURES)
def test_an_example_has_the_bytes_that_tensorflow_gives_it(features: dict[str, bytes | int]):
    names = sorted(features)
    assume(not any(b.startswith(a) for a, b in itertools.pairwise(names)))
    example = tf.train.Example()
    for name, value in features.items():
        if isinstance(value, bytes):
            example.features.feature[name].bytes_list.value.append(value)
        else:
            example.features.feature[name].int64_list.value.append(value)
    expected = example.SerializeToString(deterministic=True)
    if not features:  # we write an empty `features`, TensorFlow none
        expected = b'\x0a\x00'

    assert records.encode_example(features) == expected


@pytest.mark.parametrize('count', [0, 1, 32, 33, 100])
def test_tensorflow_reads_what_is_written_and_the_account_is_right(
    tmp_path: pathlib.Path, count: int
):
    wanted = [bytes([i]) * (i * 7) for i in range(count)]
    path = tmp_path / 'x.tfrecord'
    with path.open('wb') as file:
        writer = records.RecordWriter(file)
        for record in wanted:
            writer.write(record)

    # TensorFlow checks both checksums of every record.
    assert list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator()) == wanted
    assert writer.num_records == count
    assert writer.num_bytes == path.stat().st_size
    assert writer.crc32c == google_crc32c.value(path.read_bytes())
    starts = [sum(16 + len(record) for record in wanted[:i]) for i in range(0, count, 32)]
    assert writer.chunk_offsets == starts
