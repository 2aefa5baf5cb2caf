"""Ends all iterators of tf.data before the interpreter ends, so that a program can end at all.

    from coyo11m_tfds.reading import at_exit
    at_exit.register()   # once is enough

An iterator that is alive when Python finalizes has threads that call Python functions. They wait
for the interpreter's lock, which is never released again, while the iterator's destructor waits
for them: the program hangs, or aborts. `input_pipeline` registers this when it is imported; it
then holds for every iterator of the program. From then on a Ctrl-C ends the program at once.
"""

import atexit
import functools
import gc
import signal
import sys

from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.ops import gen_dataset_ops


@functools.cache
def register() -> None:
    """Ends living iterators when the program ends, in whatever way it does."""
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
    end_iterators()


def end_iterators() -> None:
    """Ends the pipeline behind every iterator, and waits until its threads have ended."""
    # By exact type: asking for more would run code of unrelated objects.
    living = [thing for thing in gc.get_objects() if type(thing) is iterator_ops.OwnedIterator]
    for iterator in living:
        # References to an iterator's resource are in places that cannot be cleared, such as the
        # frames of an error. So the resource stays, and what it holds is replaced by nothing.
        nothing = iterator._dataset.take(0)
        gen_dataset_ops.make_iterator(nothing._variant_tensor, iterator._iterator_resource)
