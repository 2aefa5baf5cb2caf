"""An iterator that a thread of its own keeps ahead.

for item in Ahead(items, count=2):
    ...
"""

import collections
import concurrent.futures
import sys
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar('T')


class Ahead(Iterator[T]):
    """Gives the items of an iterator while a thread of its own reads up to `count` more of them.

    An error of the iterator is raised in the place of its item. The thread starts when the first
    item is asked for, and ends when this is closed or dropped.
    """

    def __init__(self, items: Iterator[T], count: int, thread_name: str = 'ahead'):
        self._items, self._count = items, count
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name)
        self._pending: collections.deque[concurrent.futures.Future[T | None]] = collections.deque()
        self._is_closed = False
        self._is_finalizing = sys.is_finalizing  # of an iterator that outlives all modules

    def __next__(self) -> T:
        if self._is_closed:
            raise StopIteration
        while len(self._pending) < self._count:
            self._pending.append(self._thread.submit(next, self._items, None))
        item = self._pending.popleft().result()
        if item is None:
            self.close()
            raise StopIteration
        self._pending.append(self._thread.submit(next, self._items, None))
        return item

    def close(self) -> None:
        """Ends the thread; there are no more items."""
        self._is_closed = True
        if not self._is_finalizing():  # or the interpreter has ended the thread
            self._thread.shutdown(wait=False, cancel_futures=True)
