"""Choices about one sample, in TensorFlow: the twins of `order.sample_crops` and `sample_drops`.

    crops = choices.sample_crops(seed, epoch, keys)    # int64, 0, 1 or 2
    drops = choices.sample_drops(seed, epoch, keys, probability=0.1)

They depend on the seed, the epoch and the sample's key alone, so a sample gets the same wherever in
a batch it is, on any number of hosts.
"""

import tensorflow as tf

from coyo11m_tfds import keyed_random, schema
from coyo11m_tfds.reading.order import CROP, DROP


def sample_crops(seed: int, epoch: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """The crop that an epoch takes of each key; epoch int64, a scalar or one per key."""
    hashed = _hash(seed, CROP, epoch, keys)
    shifted = tf.bitwise.right_shift(hashed, tf.constant(33, tf.uint64))
    return tf.cast(shifted, tf.int64) % schema.NUM_CROPS


def sample_drops(seed: int, epoch: tf.Tensor, keys: tf.Tensor, probability: float) -> tf.Tensor:
    """True if an epoch drops the caption of each key; epoch int64, a scalar or one per key."""
    hashed = _hash(seed, DROP, epoch, keys)
    shifted = tf.bitwise.right_shift(hashed, tf.constant(11, tf.uint64))
    return tf.cast(shifted, tf.int64) < int(probability * 2**53)


def _hash(seed: int, purpose: int, epoch: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """`keyed_random.derive(seed, purpose, epoch, keys)`."""
    key = tf.constant(int(keyed_random.derive(seed, purpose)), tf.uint64)
    for number in (epoch, keys):
        key = _splitmix64(tf.bitwise.bitwise_xor(key, tf.bitcast(number, tf.uint64)))
    return key


def _splitmix64(x: tf.Tensor) -> tf.Tensor:
    """`keyed_random.splitmix64` of a uint64 tensor."""
    z = x + tf.constant(keyed_random.GOLDEN, tf.uint64)
    for shift, multiplier in zip(keyed_random.SHIFTS, keyed_random.MULTIPLIERS, strict=False):
        z = _xor_shift(z, shift) * tf.constant(multiplier, tf.uint64)
    return _xor_shift(z, keyed_random.SHIFTS[2])


def _xor_shift(z: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, tf.constant(shift, z.dtype)))
