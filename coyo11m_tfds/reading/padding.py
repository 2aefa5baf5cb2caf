"""Rows of zeros that fill batches up.

batches = padding.fill_up(batches, 256)      # all of 256 rows, `mask` says which are real
"""

import tensorflow as tf

from coyo11m_tfds.reading.parser import MASK, Batch


def pad_rows(batch: Batch, pad: tf.Tensor) -> Batch:
    """Puts `pad` rows of zeros (or empty strings) after a batch."""

    def padded(x: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([[tf.cast(pad, tf.int32)], tf.shape(x)[1:]], axis=0)
        return tf.concat([x, tf.zeros(shape, x.dtype)], axis=0)

    return {name: padded(x) for name, x in batch.items()}


def fill_up(batches: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Pads batches with a `mask` to `size` rows each."""

    def fill(batch: Batch) -> Batch:
        padded = pad_rows(batch, size - tf.shape(batch[MASK])[0])
        return {name: tf.ensure_shape(x, [size, *x.shape[1:]]) for name, x in padded.items()}

    return batches.map(fill, num_parallel_calls=tf.data.AUTOTUNE)


def take_full(batches: tf.data.Dataset, num_batches: int) -> tf.data.Dataset:
    """Takes so many batches of constant shape; where there are fewer, batches of zeros follow."""
    zeros = {name: tf.zeros(x.shape, x.dtype) for name, x in batches.element_spec.items()}
    return batches.concatenate(tf.data.Dataset.from_tensors(zeros).repeat()).take(num_batches)
