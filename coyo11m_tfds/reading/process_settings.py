"""Settings of a process that TensorFlow reads once, when it starts.

    process_settings.apply('gs://bucket/coyo11m_tfds/latents/1.0.0', chunk=64)
    import tensorflow as tf

TensorFlow reads its variables for gs:// while it is imported, so this module does without it. What
the environment says already is left as it is.
"""

import ctypes
import os

from absl import logging

from coyo11m_tfds import chunk_index, schema
from coyo11m_tfds.reading import stored_splits
from coyo11m_tfds.storage import remote, source_files

READ_AHEAD = 'GCS_READAHEAD_BUFFER_SIZE_BYTES'

# TensorFlow only reads records here. Its notes about the machine are of no use: neither that it
# has oneDNN (which it says whatever the level of the log) nor which instructions it could use.
_QUIET = {'TF_ENABLE_ONEDNN_OPTS': '0', 'TF_CPP_MIN_LOG_LEVEL': '1'}

# Enough of an index for 30 million records: their largest chunk is that of all, or nearly.
_INDEX_BYTES = 8_000_000

# Parameters of mallopt, from malloc.h of glibc; 32 MiB is the most that it takes as second value.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_FROM_BYTES = 1 << 30, 32 << 20


def apply(data_dir: str | os.PathLike[str], chunk: int) -> None:
    """Prepares this process for reading chunks of a data set.

    Args:
        data_dir: folder of a data set.
        chunk: records read together.

    Raises:
        OSError: gs:// cannot be reached, or does not let this user in (`PermissionError`).
    """
    keep_freed_memory()
    quiet_tensorflow()
    data_dir = os.fspath(data_dir)
    if data_dir.startswith('gs://') and not os.environ.get(READ_AHEAD):
        largest = _largest_chunk(data_dir, chunk)
        if largest:
            # TensorFlow finds its place by reading the byte before it.
            os.environ[READ_AHEAD] = str(largest + 1)


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


def _largest_chunk(data_dir: str, chunk: int) -> int:
    """Bytes of the largest chunk of the train split; 0 for a data set without a chunk index."""
    build = stored_splits.find_build(data_dir)
    path = os.path.join(data_dir, chunk_index.file_name(schema.TRAIN, build))
    try:
        file = source_files.describe(path)
    except ValueError:  # no such file
        return 0
    head = remote.read_range(file, 0, min(file.size, _INDEX_BYTES))
    return chunk_index.largest_chunk(head, chunk)
