"""TensorFlow's choices about samples are NumPy's."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds.reading import choices
from coyo11m_tfds.reading import order as order_lib


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_tensorflow_makes_the_same_choices_as_numpy(seed, epoch, keys, probability):
    keys = np.array(keys)
    in_tf = tf.constant(epoch, tf.int64), tf.constant(keys)
    crops = choices.sample_crops(seed, *in_tf)
    np.testing.assert_array_equal(crops, order_lib.sample_crops(seed, epoch, keys))
    drops = choices.sample_drops(seed, *in_tf, probability)
    np.testing.assert_array_equal(drops, order_lib.sample_drops(seed, epoch, keys, probability))
