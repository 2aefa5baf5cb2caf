"""Pools of processes that inherit nothing from their parent, and end with their parent."""

import collections
import concurrent.futures
import contextlib
import multiprocessing.context
import os
import pathlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from coyo11m_tfds.process import stop_signals
from coyo11m_tfds.process.threads import ThreadPool

VARIABLE = 'COYO11M_NUM_PROC'

Item = TypeVar('Item')
Result = TypeVar('Result')


def requested_workers(num_workers: int) -> int:
    """Returns `num_workers`; for 0, the value of COYO11M_NUM_PROC, or 0 without this variable."""
    variable = os.environ.get(VARIABLE)
    if num_workers or not variable:
        return num_workers
    if not variable.isdecimal() or int(variable) == 0:
        raise ValueError(f'{VARIABLE}={variable}: expected a number from 1 up.')
    return int(variable)


@contextlib.contextmanager
def open_pool(
    num_workers: int, init: Callable[[], None] | None = None
) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Yields a pool of processes, each of which calls `init` before any work.

    Raises a RuntimeError with advice if a worker dies.
    """
    # Python's process that removes what pools leave behind. The queues of a pool would start it.
    with _blocking_stop_signals():
        resource_tracker.ensure_running()
    with _Pool(num_workers, CONTEXT, _begin, (init,)) as processes:
        try:
            yield processes
        except concurrent.futures.process.BrokenProcessPool:
            raise RuntimeError(
                'A worker process died, most likely for lack of memory. Finished work is '
                'kept: run the same command again, perhaps with fewer processes (num_workers, or '
                f'{VARIABLE} in the environment).'
            ) from None


class _Pool(concurrent.futures.ProcessPoolExecutor):
    """A pool that sees each of its workers die.

    Python's own wakes the thread that watches the workers before it starts a further one for new
    work. If the thread is faster, it does not watch that worker until something else happens, and a
    worker that dies at once leaves its caller waiting for as long as the others work.
    """

    def submit(self, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        """See `concurrent.futures.Executor`."""
        future = super().submit(*args, **kwargs)
        # It has no public name, but the same one in Python 3.11 to 3.13.
        with self._shutdown_lock:
            wakeup = self._executor_manager_thread_wakeup
            if wakeup is not None:
                wakeup.wakeup()
        return future


def map_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_threads: int,
    ahead: int,
    bytes_ahead: Callable[[Item], int] = lambda item: 0,
    max_bytes_ahead: int = 0,
) -> Generator[tuple[Item, Result], None, None]:
    """Calls a function in threads and yields items and results in order.

    At most `ahead` items are under way, and of those of which `bytes_ahead` tells a size together
    at most `max_bytes_ahead`, or a single one.
    """
    futures = collections.deque[tuple[Item, concurrent.futures.Future[Result]]]()
    num_bytes = 0
    with ThreadPool(num_threads) as threads:
        for item in items:
            num_bytes += bytes_ahead(item)
            # Before this one is begun: its bytes are counted among those under way.
            while futures and (len(futures) == ahead or num_bytes > max_bytes_ahead):
                first_item, future = futures.popleft()
                num_bytes -= bytes_ahead(first_item)
                yield first_item, future.result()
            futures.append((item, threads.submit(function, item)))
        while futures:
            first_item, future = futures.popleft()
            yield first_item, future.result()


def _begin(init: Callable[[], None] | None) -> None:
    """Begins a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if init:
        init()


def _end_with_parent() -> None:
    """Ends this process with its parent: one that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _blocking_stop_signals() -> Iterator[None]:
    """Has processes that are started in the block never notice the signals that ask to stop.

    A terminal and a scheduler send a signal to all processes, but it is for the parent, which ends
    the others: a worker would leave its work undone, or print a traceback.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _CleanProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that can import this package, and imports nothing else."""

    def start(self) -> None:
        """Starts the process."""
        # A forked one may hang, because TensorFlow runs threads. A spawned one imports the main
        # module of the program: that of `tfds` takes 4 s and 700 MB, that of a script may start the
        # work again. The workers need only the folder of the package, which `tfds build` finds in a
        # checkout itself.
        main = sys.modules['__main__']
        sys.modules['__main__'] = types.ModuleType('__main__')
        path = sys.path
        root = str(pathlib.Path(__file__).parents[2])
        if root not in path:
            sys.path = [*path, root]
        try:
            with _blocking_stop_signals():
                super().start()
        finally:
            sys.modules['__main__'] = main
            sys.path = path

    def terminate(self) -> None:
        """Kills the process."""
        # A pool whose other workers have died ends the rest of them so. They block SIGTERM.
        self.kill()


class _CleanContext(multiprocessing.context.SpawnContext):
    Process = _CleanProcess


CONTEXT = _CleanContext()
