"""Errors of a build in TFDS' command: those that a user can fix in one line, bugs as they are."""

import re

import pytest
import tensorflow as tf

from coyo11m_tfds.process import tfds_command


def _end(error: BaseException) -> None:
    with tfds_command.ends_in_one_line():
        raise error


@pytest.mark.parametrize(
    ('error', 'line'),
    [
        (ValueError('x is bad'), 'error: x is bad'),
        (RuntimeError('a worker died'), 'error: a worker died'),
        (tf.errors.NotFoundError(None, None, 'no object'), 'error: no object'),
        (
            tf.errors.InvalidArgumentError(None, None, 'a requester pays bucket'),
            'error: a requester pays bucket Set GCS_ADDITIONAL_REQUEST_HEADER=.*',
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_error_that_a_user_can_fix_is_one_line(error, line, capsys):
    with pytest.raises(SystemExit, match=r'^1$'):
        _end(error)
    assert re.fullmatch(f'{line}\n', capsys.readouterr().err)


@pytest.mark.parametrize('kind', [NotImplementedError, RecursionError, KeyError])
def test_a_bug_keeps_its_traceback(kind, capsys):
    with pytest.raises(kind):
        _end(kind('x'))
    assert capsys.readouterr().err == ''


def test_a_finished_command_goes_on():
    with tfds_command.ends_in_one_line():
        pass
    with pytest.raises(SystemExit, match=r'^0$'):
        _end(SystemExit(0))
