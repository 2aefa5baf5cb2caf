"""What every program of this package does before anything else.

    process.prepare()

Not part of the library modules, so that importing them changes nothing.
"""

import logging as standard_logging

import tensorflow as tf
from absl import logging


def prepare() -> None:
    """Keeps TensorFlow off the accelerator and the log readable."""
    # TensorFlow only reads records: the accelerator's memory is for JAX.
    tf.config.set_visible_devices([], 'GPU')
    logging.get_absl_handler().addFilter(_is_worth_reading)


def _is_worth_reading(record: standard_logging.LogRecord) -> bool:
    """Orbax tells some forty lines about each checkpoint; its warnings are enough."""
    return record.levelno > standard_logging.INFO or 'orbax' not in record.pathname
