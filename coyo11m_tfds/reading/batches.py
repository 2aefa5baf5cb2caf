"""Iterators over batches in the memory of the host, which read ahead and can resume."""

import collections
import contextlib
import dataclasses
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import numpy as np

from coyo11m_tfds.process import machine
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.sampling.mixture import Cursor

# Of whole windows: one is given out, one is filled, of the one before some batches may be in use.
_BLOCKS = 2.2
# Of chunks in flight or arrived early: the allocator keeps what threads have freed.
_RAW_CHUNKS = 1.5
# Of plans, threads, and chunks that are being gathered, in bytes: independent of the settings.
_FIXED = 200_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Estimates the memory that the engine `chunks` needs for training, before it reads.

    A lane is one of the streams that give each batch an equal share; a window is a run of records
    of a lane that are shuffled together, and so have to be in memory together.

    Six measured runs of 0.7 to 1.5 GB with other lanes, windows and chunks took 20% less to 12%
    more.
    """

    lanes: int  # of this process
    window: int  # records
    in_flight: int  # records of a lane that are being read at once
    rows_ready: int  # of the batch in use and of all batches that are ready
    row_nbytes: int  # of a record in a batch
    raw_nbytes: int  # of a record in the files

    @property
    def num_bytes(self) -> int:
        """The memory that reading takes, beyond that of a process that has read a few records."""
        # Blocks have whole windows: as many as it takes to have enough records in flight.
        windows = math.ceil(self.in_flight / self.window)
        return int(self._window_record_nbytes * self.window * windows + self._other_nbytes)

    @property
    def _window_record_nbytes(self) -> float:
        return _BLOCKS * self.lanes * self.row_nbytes

    @property
    def _other_nbytes(self) -> float:
        raw = _RAW_CHUNKS * self.lanes * self.in_flight * self.raw_nbytes
        return raw + self.rows_ready * self.row_nbytes + _FIXED

    def check(self, budget_gb: float, processes_on_host: int) -> None:
        """Implements `Batches.check_memory`; assumes equal needs of all processes of the host."""
        budget = 1e9 * budget_gb
        if not budget:
            budget = machine.usable_memory() / 2
        total = processes_on_host * self.num_bytes
        if total <= budget:
            return
        # Rounded up: who copies the number into the configuration must not be refused again.
        total_gb = math.ceil(total / 1e8) / 10
        # What the window does not change is needed anyway; windows may have the rest.
        process_budget = budget / processes_on_host
        window = math.floor((process_budget - self._other_nbytes) / self._window_record_nbytes)
        # A window of fewer records than are read at once takes no less.
        advice = f'data.ram_budget_gb to {total_gb:.1f}'
        if window >= self.in_flight:
            advice = f'data.window to {window} or {advice}'
        processes = ''
        if processes_on_host > 1:
            processes = f' in each of {processes_on_host} processes'
        raise ValueError(
            f'Reading with data.window={self.window} in {self.lanes} lanes{processes} takes '
            f'{total_gb:.1f} GB of memory on this host, more than the {budget / 1e9:.2f} GB of '
            f'data.ram_budget_gb={budget_gb} (0: half of what it has): set {advice}'
        )


T = TypeVar('T')

# The requested features of some samples. Added columns have their own names.
Batch = dict[str, np.ndarray]

CROP = 'crop'  # int32 (b,); position among the crops of its image, 0 for the middle one
# uint32 (b,); from (seed, epoch, key), for the noise that draws latents from recorded moments.
NOISE_SEED = 'noise_seed'
DROP_TEXT = 'drop_text'  # bool (b,); with caption_dropout > 0
MASK = 'mask'  # bool (b,); False for rows of zeros that stand for no record


class ArraySpec(NamedTuple):
    """Shape and dtype of an array in every batch."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Ahead(Iterator[T]):
    """Returns the items of an iterator while a thread reads up to `count` more of them.

    `next` raises an error of the iterator, again and again; after a Ctrl-C it returns the same
    item. The thread ends when this object is closed or garbage-collected.

    `next` and the thread share a deque and two numbers: how many items the thread has read, and how
    many it may read. Each `next` raises the second by one.
    """

    def __init__(self, items: Iterator[T], count: int, thread_name: str = 'ahead'):
        self._count = count
        self._thread_name = thread_name
        self._is_finalizing = sys.is_finalizing  # of an iterator that outlives all modules
        self._start(items)

    def _start(self, items: Iterator[T]) -> None:
        """Begins with the first of `items`, in a thread of their own."""
        self._items = items
        # Items that are ready, and errors in their places.
        self._ready: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        # Items that `next` has returned, that the thread has read, and that it may read.
        self._num_returned = self._num_read = self._limit = 0
        self._is_reading = self._is_closed = False
        # Holds what both threads decide together: whether the thread reads, and how far.
        self._lock = threading.Lock()
        # A signal and no mutex: `next` locks it and waits, and the thread unlocks it for an item.
        self._arrival = threading.Lock()
        self._executor = ThreadPool(1, self._thread_name)
        # The thread starts here, and not in `next`, where a Ctrl-C could lose it.
        self._executor.submit(int)
        self._process = os.getpid()

    def __next__(self) -> T:
        # A fork has no copy of the thread, so it would wait for ever.
        if os.getpid() != self._process:
            raise RuntimeError(
                f'process {os.getpid()} was forked from {self._process}, which has the thread that '
                'reads: make the iterator in the process that uses it, see docs/pytorch.md'
            )
        # A KeyboardInterrupt may be raised by any call here. So nothing changes before the last
        # two lines that does harm when it is done twice, and these call nothing.
        self._allow(self._num_returned + self._count)
        while not self._ready:
            self._arrival.acquire()
        item, error = self._ready[0]
        if error:
            self._end_thread()
            # From Python 3.12 on, a kept error would keep the frames of its reader, with all that
            # they hold, such as other iterators with their threads and mapped files.
            if isinstance(error, StopIteration):
                raise StopIteration
            raise error
        self._allow(self._num_returned + 1 + self._count)
        self._num_returned += 1
        del self._ready[0]
        return item

    def close(self) -> None:
        """Ends the iteration, and the threads that read, after the read that is under way."""
        # At the end of the program the threads have ended, and modules may be gone.
        if self._is_finalizing():
            return
        self._is_closed = True
        self._ready = collections.deque([(None, StopIteration())])
        self.end_pauses()
        # The thread drops the iterator, because only the thread knows when it is not running.
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._executor.submit(setattr, self, '_items', iter(()))
        self._end_thread()

    def end_pauses(self) -> None:
        """Ends the pauses of the thread, and of reads that it waits for; others go on."""
        self._executor.end_pauses()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f'{type(self).__name__}: an iterator that reads ahead cannot be pickled or copied, '
            'because its threads stay in this process: make one in each process, from the result '
            'of get_state if it should continue there, see docs/pytorch.md'
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _allow(self, limit: int) -> None:
        """Lets the thread read so many items in all."""
        with self._lock:
            self._limit = limit
            if not (self._is_reading or self._is_closed):
                self._executor.submit(self._read_items)
                self._is_reading = True

    def _read_items(self) -> None:
        """Reads items as long as `next` allows more; runs in the thread."""
        while self._may_read():
            try:
                self._ready.append((next(self._items), None))
            # Also a KeyboardInterrupt or StopIteration: in this thread nobody would see it.
            except BaseException as error:
                # A generator ends with its error: there is nothing more to read.
                self._is_closed = True
                self._ready.append((None, error))
            self._num_read += 1
            # `next` waits for this item. If it does not, there is no lock that could be released.
            if self._arrival.locked():
                self._arrival.release()

    def _may_read(self) -> bool:
        """Returns whether the thread reads one more item, and notes it if it ends."""
        # Under the lock, so that a higher limit is either seen here or starts a new task.
        with self._lock:
            self._is_reading = self._num_read < self._limit and not self._is_closed
            return self._is_reading

    def _end_thread(self) -> None:
        # At the end of the program the interpreter has ended the thread.
        if not self._is_finalizing():
            self._executor.shutdown(wait=False)


class Resumable(Ahead[T]):
    """An iterator over a sequence of batches that can start at any position."""

    def __init__(
        self, read: Callable[[Cursor], Iterator[T]], cursor: Cursor, ahead: int, thread_name: str
    ):
        self._read = read
        self._first = cursor
        super().__init__(read(cursor), ahead, thread_name)

    @property
    def cursor(self) -> Cursor:
        """The position of the next batch, with the sequence that it is a position of."""
        return self._first.after(self._num_returned)

    @property
    def step(self) -> int:
        """Number of batches between the beginning of the data and the next batch."""
        return self.cursor.position.step

    def get_state(self) -> dict[str, Any]:
        """Returns the next batch's position: its step, and the samples of each source by digest."""
        return self.cursor.state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `get_state` was called; ValueError for a state of another order."""
        self.seek(self._first.at(state))

    def seek(self, cursor: Cursor) -> None:
        """Continues at another position of the sequence, after the reads that are under way."""
        self.close()
        # The old thread must not read from files at the same time as the new one.
        self._executor.shutdown()
        self._first = cursor
        self._start(self._read(cursor))


class Batches(Resumable[Batch]):
    """One process's share of batches in the memory of the host.

    A context manager closes it: `with train_batches(...) as batches`.

    Attributes:
        spec: Shape and dtype of each array in a batch, by name.
        steps_per_epoch: Mean number of batches in an epoch; NaN if the size of the split is
            unknown.
        process_index: Number of this process.
        process_count: Number of processes.
        origin: What is read, and how, for people.
    """

    def __init__(
        self,
        read: Callable[[Cursor], Iterator[Batch]],
        cursor: Cursor,
        spec: Mapping[str, ArraySpec],
        steps_per_epoch: float,
        process: tuple[int, int],
        ahead: int,
        origin: str,
        memory_need: MemoryNeed | None = None,
    ):
        super().__init__(read, cursor, ahead, 'batches')
        self._memory_need = memory_need
        self.spec = spec
        self.steps_per_epoch = steps_per_epoch
        self.process_index, self.process_count = process
        self.origin = origin

    def __repr__(self) -> str:
        features = [f'{name} {x.dtype} {x.shape}' for name, x in self.spec.items()]
        return (
            f'Batches of {self.origin}\n'
            f'  at step {self.step}, {self.steps_per_epoch:,.1f} steps an epoch, process '
            f'{self.process_index} of {self.process_count}\n'
            f'  {", ".join(features)}'
        )

    def check_memory(self, ram_budget_gb: float = 0.0, processes_on_host: int = 1) -> None:
        """Raises a ValueError, which names settings that fit, if reading takes too much memory.

        The processes of the run on this host may take `ram_budget_gb` GB (10^9 bytes) together, by
        default half of its memory. The engine `rows` and evaluation always fit.
        """
        if self._memory_need:
            self._memory_need.check(ram_budget_gb, processes_on_host)
