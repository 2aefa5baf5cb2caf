"""Prepares a process for reading before TensorFlow is imported, and ends it cleanly.

Also keeps apart from TensorFlow what cannot be in one process with it.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys

from absl import logging

# TensorFlow only reads records here. Its notes about the machine are of no use: neither that it
# has oneDNN (which it says whatever the level of the log) nor which instructions it could use.
_QUIET = {'TF_ENABLE_ONEDNN_OPTS': '0', 'TF_CPP_MIN_LOG_LEVEL': '1'}

# Parameters of mallopt, from malloc.h of glibc; 32 MiB is the most that it takes as second value.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_FROM_BYTES = 1 << 30, 32 << 20


def prepare_process() -> None:
    """Prepares this process for reading."""
    keep_freed_memory()
    quiet_tensorflow()


def quiet_tensorflow() -> None:
    """Makes TensorFlow log only warnings and errors; call this before TensorFlow is imported."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def hide_accelerators_from_tensorflow() -> None:
    """Leaves the memory of GPUs to JAX; imports TensorFlow, which takes seconds."""
    import tensorflow as tf

    # A notebook may have begun to use them.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], 'GPU')


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next batch instead of returning it to the system."""
    # New memory from the system costs 3 page faults a record, a sixth of the CPU time of reading.
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is None or any(name.startswith('MALLOC_') for name in os.environ):
        return
    kept = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mapped = mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    if not (kept and mapped):
        logging.warning('mallopt refused its arguments: reading is slower than it could be.')


def hide_triton_from_tensorflow() -> None:
    """Makes triton look as if it were not installed, if this process has imported TensorFlow.

    Call it before a model of transformers is loaded. PyTorch, which brings triton in its builds
    for CUDA, then imports it, though only `torch.compile` needs it.
    """
    # Both are linked with LLVM, and triton's calls would reach that of TensorFlow, which comes
    # first: a segmentation fault. In the other order both work.
    if 'tensorflow' in sys.modules and 'triton' not in sys.modules:
        sys.modules['triton'] = None  # type: ignore[assignment]  # as documented for `import`


@functools.cache
def end_iterators_at_exit() -> None:
    """Ends all iterators of tf.data at the end of the program, which could hang otherwise."""
    # An iterator that is alive when Python finalizes has threads that call Python functions. They
    # wait for the interpreter's lock, which is never released again, while the iterator's
    # destructor waits for them.
    atexit.register(_end_at_exit)
    show = sys.excepthook

    def end_and_show(*error) -> None:
        # Other reads log as they end: before the error, not after it. An interactive interpreter
        # shows the error and continues.
        if not (sys.flags.interactive or hasattr(sys, 'ps1')):
            _end_at_exit()
        show(*error)

    sys.excepthook = end_and_show


def _end_at_exit() -> None:
    # A program that is leaving has no use for a KeyboardInterrupt. It would end this half-way.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tensorflow.python.data.ops import iterator_ops
    from tensorflow.python.ops import gen_dataset_ops

    # By exact type: asking for more would run code of unrelated objects.
    iterators = [x for x in gc.get_objects() if type(x) is iterator_ops.OwnedIterator]
    for iterator in iterators:
        # References to an iterator's resource are in places that cannot be cleared, such as the
        # frames of an error. So the resource stays, but is emptied.
        no_items = iterator._dataset.take(0)
        gen_dataset_ops.make_iterator(no_items._variant_tensor, iterator._iterator_resource)
