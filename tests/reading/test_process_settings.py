"""What is set before TensorFlow starts."""

import os

import pytest

from coyo11m_tfds.reading import process_settings
from tests import children


def test_tensorflow_says_nothing_of_the_machine_when_it_starts():
    program = """
    from coyo11m_tfds.reading import process_settings
    process_settings.quiet_tensorflow()
    import tensorflow as tf
    tf.data.Dataset.range(3).map(lambda x: x + 1).reduce(tf.cast(0, tf.int64), lambda x, y: x + y)
    """
    with children.python(program) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (0, '')
    assert 'oneDNN' not in err and 'CPU instructions' not in err


def test_what_the_environment_says_of_the_log_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '0')
    monkeypatch.setenv('TF_ENABLE_ONEDNN_OPTS', '1')
    process_settings.quiet_tensorflow()
    assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '0'
    assert os.environ['TF_ENABLE_ONEDNN_OPTS'] == '1'
