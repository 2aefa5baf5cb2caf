"""Where values lie in a record, and that records laid out otherwise are read all the same."""

import numpy as np
import pytest
import tensorflow as tf

from coyo11m_tfds import schema
from coyo11m_tfds.reading.layout import Layout
from coyo11m_tfds.reading.parser import Parser

TEXT_DIM = 5
EPOCH = tf.constant(3, tf.int64)


def make_values(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        schema.KEY: random.integers(-(2**63), 2**63 - 1, count),
        schema.LATENTS: random.normal(size=(count, *schema.LATENTS_SHAPE)).astype(np.float16),
        schema.TEXT_EMBEDDING: random.normal(size=(count, TEXT_DIM)).astype(np.float16),
    }


def serialize(values: dict[str, np.ndarray], row: int, text_dim: int, **more: bytes) -> bytes:
    example = tf.train.Example()
    feature = example.features.feature
    feature[schema.KEY].int64_list.value.append(int(values[schema.KEY][row]))
    feature[schema.LATENTS].bytes_list.value.append(values[schema.LATENTS][row].tobytes())
    feature[schema.CAPTION].bytes_list.value.append(b'x' * (7 * row % 300))
    if text_dim:
        text = values[schema.TEXT_EMBEDDING][row].tobytes()
        feature[schema.TEXT_EMBEDDING].bytes_list.value.append(text)
    for name, value in more.items():
        feature[name].bytes_list.value.append(value)
    return example.SerializeToString(deterministic=True)


def parse(records: list[bytes], text_dim: int, **choices) -> dict[str, tf.Tensor]:
    features = [schema.KEY, schema.LATENTS] + ([schema.TEXT_EMBEDDING] if text_dim else [])
    parser = Parser(tuple(features), tf.float16, text_dim, **choices)
    serialized = tf.constant(records)
    if parser.is_regular(serialized):
        return parser.parse_regular(serialized, EPOCH)
    return parser.parse(serialized, tf.fill([len(records)], True), EPOCH)


@pytest.mark.parametrize('text_dim', [0, TEXT_DIM])
@pytest.mark.parametrize('more, fits', [({}, True), ({'zoo': b'lion'}, False)])
def test_records_are_parsed_whatever_else_is_in_them(text_dim, more, fits):
    values = make_values(40)
    records = [serialize(values, row, text_dim, **more) for row in range(40)]
    assert bool(Layout(text_dim).fits(tf.constant(records))) == fits
    for crop in range(schema.NUM_CROPS):
        batch = parse(records, text_dim, fixed_crop=crop)
        np.testing.assert_array_equal(batch[schema.KEY], values[schema.KEY])
        np.testing.assert_array_equal(batch[schema.LATENTS], values[schema.LATENTS][:, crop])
        if text_dim:
            np.testing.assert_array_equal(
                batch[schema.TEXT_EMBEDDING], values[schema.TEXT_EMBEDDING]
            )


def test_one_record_that_is_otherwise_changes_nothing():
    values = make_values(40)
    records = [serialize(values, row, TEXT_DIM) for row in range(40)]
    records[17] = serialize(values, 17, TEXT_DIM, zoo=b'lion')
    batch = parse(records, TEXT_DIM, fixed_crop=2)
    np.testing.assert_array_equal(batch[schema.LATENTS], values[schema.LATENTS][:, 2])


@pytest.mark.parametrize('record', [b'', b'x', bytes(30_000)])
def test_what_is_no_record_does_not_fit(record):
    assert not Layout(TEXT_DIM).fits(tf.constant([record]))


@pytest.mark.parametrize('text_dim', [0, TEXT_DIM])
def test_a_blank_record_is_parsed_to_zeros(text_dim):
    features = (schema.KEY, schema.LATENTS, schema.CAPTION)
    parser = Parser(features, tf.float16, text_dim)
    blank = tf.constant([parser.blank()])
    assert Layout(text_dim).fits(blank)
    batch = parser.parse(blank, tf.constant([False]), EPOCH)
    assert batch[schema.KEY] == 0 and batch[schema.CAPTION] == b''
    assert not batch[schema.LATENTS].numpy().any()
