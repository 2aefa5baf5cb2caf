"""Pools of threads that end soon when nobody waits for their results any more."""

import concurrent.futures
import concurrent.futures.thread
import threading
import time
import types
from collections.abc import Callable

# How often a pause looks whether it should end.
_LOOK_SECONDS = 0.1

_threads = threading.local()


class ThreadPool(concurrent.futures.ThreadPoolExecutor):
    """Threads of which an error in the block of `with` cancels all that has not begun.

    What has begun ends at its next `pause`, so that neither errors nor Ctrl-C wait for a storage
    that is out of reach.
    """

    def __init__(
        self, max_workers: int, name: str = '', initializer: Callable[[], None] | None = None
    ):
        """Takes the number of threads, their name, and what each calls before any work."""
        outer = _find_stop()
        # Not the pool itself, which threads would keep alive when nobody else does.
        self._stop = _Stop(outer)
        super().__init__(max_workers, name, _begin, (self._stop, initializer))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool | None:
        """Waits for the threads, which an error has end soon."""
        if error is not None:
            self.end_pauses()
            self.shutdown(wait=False, cancel_futures=True)
        return super().__exit__(kind, error, traceback)

    def end_pauses(self) -> None:
        """Ends the pauses of these threads, and of those in pools that they open."""
        self._stop.is_requested = True


def pause(seconds: float) -> None:
    """Waits, in a thread of a `ThreadPool` or any other.

    Raises a `concurrent.futures.CancelledError` as soon as nobody waits for this thread any more.
    """
    if _find_stop() is None:
        time.sleep(seconds)
        return
    end = time.monotonic() + seconds
    left = seconds
    while left > 0:
        time.sleep(min(left, _LOOK_SECONDS))
        end_if_stopped()
        left = end - time.monotonic()


def end_if_stopped() -> None:
    """Raises a `concurrent.futures.CancelledError` if nobody waits for this thread any more.

    Its pool is stopped then, or the program ends.
    """
    stop = _find_stop()
    if stop is not None and stop.is_due():
        raise concurrent.futures.CancelledError('Nobody waits for this result any more.')


class _Stop:
    """Whether the threads of a pool should end, as those of the pool around it should."""

    def __init__(self, outer: '_Stop | None'):
        self._outer = outer
        self.is_requested = False

    def is_due(self) -> bool:
        """Returns whether nobody needs the results of these threads any more."""
        # At its end the interpreter sets this before it waits for the threads of all pools. There
        # is no public name for it, but this one in Python 3.11 to 3.13.
        is_last = getattr(concurrent.futures.thread, '_shutdown', False)
        if self.is_requested or is_last:
            return True
        return self._outer is not None and self._outer.is_due()


def _find_stop() -> _Stop | None:
    """Returns what ends this thread; None outside of pools."""
    return getattr(_threads, 'stop', None)


def _begin(stop: _Stop, initializer: Callable[[], None] | None) -> None:
    """Begins a thread of a pool."""
    _threads.stop = stop
    if initializer:
        initializer()
