"""An iterator that a thread of its own keeps ahead.

for item in Ahead(items, count=2):
    ...
"""

import collections
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

T = TypeVar('T')


class Ahead(Iterator[T]):
    """Gives the items of an iterator while a thread of its own reads up to `count` more of them.

    An error of the iterator is raised in the place of its item, and again by each `next` after it.
    A Ctrl-C during `next` loses nothing: the next call gives the item. Reading begins when the
    first item is asked for; the thread ends when this is closed or dropped.
    """

    def __init__(self, items: Iterator[T], count: int, thread_name: str = 'ahead'):
        self._items, self._count, self._thread_name = items, count, thread_name
        # Items, and errors in their places.
        self._ready: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        self._given = self._made = self._allowed = 0
        self._is_filling = self._is_closed = False
        self._lock, self._came = threading.Lock(), threading.Lock()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name)
        self._thread.submit(int)  # starts it here, where nobody holds anything that can be lost
        self._is_finalizing = sys.is_finalizing  # of an iterator that outlives all modules

    def __next__(self) -> T:
        # A KeyboardInterrupt may be raised by any call here. So nothing changes before the last
        # two lines that does harm when it is done twice, and these call nothing.
        self._allow(self._given + self._count)
        while not self._ready:
            self._came.acquire()
        item, error = self._ready[0]
        if error:
            self._end_thread()
            raise error
        self._allow(self._given + 1 + self._count)
        self._given += 1
        del self._ready[0]
        return item

    def close(self) -> None:
        """Ends the thread; there are no more items."""
        self._is_closed = True
        self._ready = collections.deque([(None, StopIteration())])
        self._end_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _restart(self, read: Callable[[], Iterator[T]]) -> None:
        """Gives the items of `read` from now on, called when what is under way has ended."""
        self.close()
        self._thread.shutdown()
        Ahead.__init__(self, read(), self._count, self._thread_name)

    def _allow(self, number: int) -> None:
        """Lets the thread make so many items in all."""
        with self._lock:
            self._allowed = number
            if not (self._is_filling or self._is_closed):
                self._thread.submit(self._fill)
                self._is_filling = True

    def _fill(self) -> None:
        while self._goes_on():
            try:
                self._ready.append((next(self._items), None))
            except BaseException as error:
                self._is_closed = True
                self._ready.append((None, error))
            self._made += 1
            if self._came.locked():
                self._came.release()

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_filling = self._made < self._allowed and not self._is_closed
            return self._is_filling

    def _end_thread(self) -> None:
        if not self._is_finalizing():  # or the interpreter has ended the thread
            self._thread.shutdown(wait=False, cancel_futures=True)
