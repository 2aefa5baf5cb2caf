"""Settings of a process that are made once, before TensorFlow starts.

    process_settings.apply()
    import tensorflow as tf

TensorFlow reads its variables while it is imported, so this module does without it. What the
environment says already is left as it is.
"""

import ctypes
import os

from absl import logging

# TensorFlow only reads records here. Its notes about the machine are of no use: neither that it
# has oneDNN (which it says whatever the level of the log) nor which instructions it could use.
_QUIET = {'TF_ENABLE_ONEDNN_OPTS': '0', 'TF_CPP_MIN_LOG_LEVEL': '1'}

# Parameters of mallopt, from malloc.h of glibc; 32 MiB is the most that it takes as second value.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_FROM_BYTES = 1 << 30, 32 << 20


def apply() -> None:
    """Prepares this process for reading."""
    keep_freed_memory()
    quiet_tensorflow()


def quiet_tensorflow() -> None:
    """Has TensorFlow log warnings and errors only; to be called before it is imported."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """Has glibc keep the memory of a batch for the next one instead of giving it back.

    Getting it anew from the system takes 3 page faults a record, a sixth of all processor time of
    reading. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is None or any(name.startswith('MALLOC_') for name in os.environ):
        return
    kept = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mapped = mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    if not (kept and mapped):
        logging.warning('mallopt refused its arguments: reading is slower than it could be.')
