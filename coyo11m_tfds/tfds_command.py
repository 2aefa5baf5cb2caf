"""Prepares the `tfds` command: it ends in one line, and logs less.

    tfds build coyo11m_tfds -i coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT

TFDS imports the package of a data set and catches nothing, so this hooks into the process. Only the
package does that, and only in the `tfds` command and in `python -m coyo11m_tfds.build`, which runs
it: in a script of yours nothing changes.
"""

import functools
import json
import logging
import re
import sys
from collections.abc import Callable

import absl.logging
import tensorflow_datasets as tfds

from coyo11m_tfds.coyo11m_tfds_dataset_builder import CONFIG_EXAMPLE
from coyo11m_tfds.process import ending

# What TFDS and Beam say of every build.
_NOISE = re.compile(
    'Variant folder .* has no dataset_info.json|Using custom data configuration'
    '|Dataset generation completed|apitools not found'
)

_MENDABLE = (ValueError, OSError, RuntimeError, ModuleNotFoundError)
# Subclasses of these whose messages mean nothing to users.
_BUGS = (NotImplementedError, RecursionError)

_OUTLOOK = 'what is finished is kept, the same command resumes the build'


def prepare() -> None:
    """Prepares the process. The data set is registered: `tfds` finds it by its name."""
    for logger in (absl.logging.get_absl_logger(), logging.getLogger()):
        logger.addFilter(_is_worth_reading)
    logging.getLogger('torch').setLevel(logging.WARNING)  # it logs statistics when it ends
    tfds.core.DatasetInfo.__repr__ = _how_to_open  # printed at the end of a build
    sys.excepthook = functools.partial(_show, sys.excepthook)
    ending.interrupt_once()


def _show(show: Callable, kind: type, error: BaseException, traceback) -> None:
    is_message = isinstance(error, (KeyboardInterrupt, *_MENDABLE)) and not isinstance(error, _BUGS)
    if ending.wants_traceback() or not is_message:
        show(kind, error, traceback)
        return
    if isinstance(error, json.JSONDecodeError) and any(error.doc in word for word in sys.argv):
        error = ValueError(f'{error.doc} is not JSON: {error}. Expected {CONFIG_EXAMPLE}')
    ending.say(error, _OUTLOOK)


def _how_to_open(info: tfds.core.DatasetInfo) -> str:
    return (
        f"tfds.builder_from_directory('{info.data_dir}')\n"
        f'python -m train_lib.main --config=default --workdir=W --config.data.dir={info.data_dir}'
    )


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return not _NOISE.match(record.getMessage())
