"""Errors in one line: the field and its value, what happened, and what to do."""

import pickle

import pytest
import tensorflow as tf

import input_pipeline
from coyo11m_tfds.process import errors


@pytest.mark.parametrize('kind', [errors.FieldError, errors.MissingFolderError])
def test_an_error_of_a_field_carries_its_name_also_through_a_pipe(kind):
    error = pickle.loads(pickle.dumps(kind('data.dir', '/none', 'there is no such folder')))
    expected = "data.dir='/none': there is no such folder"
    assert (type(error), error.field, str(error)) == (kind, 'data.dir', expected)
    assert errors.describe_error(error) == expected


@pytest.mark.parametrize('kind', [ValueError, input_pipeline.DamagedError])
def test_the_summary_of_an_error_is_a_line_that_says_what_happened(kind):
    def fail(_):
        raise kind('file.tfrecord: record 7 cannot be read')

    def read(x):
        return tf.numpy_function(fail, [x], tf.int64)

    with pytest.raises(tf.errors.OpError) as error:
        list(tf.data.Dataset.range(4).map(read, num_parallel_calls=2))
    expected = f'{kind.__name__}: file.tfrecord: record 7 cannot be read'
    assert errors.summarize_error(error.value) == expected
    assert errors.summarize_error(kind('file.tfrecord: record 7 cannot be read')) == expected
    assert errors.summarize_error(RuntimeError()) == 'RuntimeError: '
