"""What every program of this package does before anything else.

    process.prepare()

Not part of the library modules, so that importing them changes nothing.
"""

import logging as standard_logging
import socket
import zlib

import numpy as np
import tensorflow as tf
from absl import logging
from jax.experimental import multihost_utils


def prepare() -> None:
    """Keeps TensorFlow off the accelerator and the log readable."""
    # TensorFlow only reads records: the accelerator's memory is for JAX.
    tf.config.set_visible_devices([], 'GPU')
    logging.get_absl_handler().addFilter(_is_worth_reading)


def processes_on_host() -> int:
    """How many processes of the run share this host's memory: those with the same host name.

    Containers have names of their own, as they have memory of their own. All processes call it
    together.
    """
    own = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int((multihost_utils.process_allgather(own) == own).sum())


def _is_worth_reading(record: standard_logging.LogRecord) -> bool:
    """Orbax tells some forty lines about each checkpoint; its warnings are enough."""
    return record.levelno > standard_logging.INFO or 'orbax' not in record.pathname
