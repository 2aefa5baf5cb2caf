"""What every program of this package does before and around everything else.

    with process.errors_in_one_line():
        workdirs.check_writable(workdir)
    process.prepare()

Not part of the library modules, so that importing them changes nothing. Importing this one does not
import TensorFlow, which reads its environment once.
"""

import contextlib
import logging as standard_logging
import sys
from collections.abc import Iterator

from absl import logging


def prepare() -> None:
    """Keeps TensorFlow off the accelerator and the log readable."""
    import tensorflow as tf

    # TensorFlow only reads records: the accelerator's memory is for JAX.
    tf.config.set_visible_devices([], 'GPU')
    logging.get_absl_handler().addFilter(_is_worth_reading)


@contextlib.contextmanager
def errors_in_one_line(
    kinds: tuple[type[Exception], ...] = (ValueError, OSError),
) -> Iterator[None]:
    """Ends the process with `ERROR: ...` and status 1 for errors that say what the user can mend.

    As these kinds do where settings are checked and files are opened. The traceback is in the log
    with `--verbosity=1`.
    """
    try:
        yield
    except kinds as error:
        logging.debug('Where the error comes from:', exc_info=True)
        sys.exit(f'ERROR: {error}')


def _is_worth_reading(record: standard_logging.LogRecord) -> bool:
    """Orbax tells some forty lines about each checkpoint; its warnings are enough."""
    return record.levelno > standard_logging.INFO or 'orbax' not in record.pathname
