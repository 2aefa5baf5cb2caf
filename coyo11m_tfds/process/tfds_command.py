"""How a command of TFDS that builds talks: less in the log, and errors in one line."""

import contextlib
import logging
import re
from collections.abc import Iterator

import absl.logging

from coyo11m_tfds.process import command_line

# What TFDS and Beam log in every build.
_NOISE = re.compile(
    'Variant folder .* has no dataset_info.json|Using custom data configuration'
    '|Dataset generation completed|apitools not found'
)

# Errors that a user can fix.
USER_ERRORS = ValueError, OSError, RuntimeError

_OUTLOOK = 'what is finished is kept, the same command resumes the build'


def log_less() -> None:
    """Leaves out of the log what says nothing about a build."""
    for logger in (absl.logging.get_absl_logger(), logging.getLogger()):
        logger.addFilter(lambda record: not _NOISE.match(record.getMessage()))
    # It logs statistics when it ends.
    logging.getLogger('torch').setLevel(logging.WARNING)


@contextlib.contextmanager
def ends_in_one_line() -> Iterator[None]:
    """Ends the process with one line after an error that a user can fix, or an interrupt.

    See `command_line.ends_in_one_line`; what TensorFlow says of a bucket is such an error, too.
    """
    import tensorflow as tf

    with command_line.ends_in_one_line(_OUTLOOK, USER_ERRORS):
        try:
            yield
        except tf.errors.OpError as error:
            message = str(error)
            if 'requester pays' in message:
                header = 'GCS_ADDITIONAL_REQUEST_HEADER=X-Goog-User-Project:PROJECT'
                message += f' Set {header}, with the project of yours that pays.'
            raise OSError(message) from error
