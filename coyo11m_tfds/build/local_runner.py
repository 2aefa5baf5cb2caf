"""Writes shards with a pool of processes on this machine.

    for task, result in write_shards(tasks, finished, scratch, staging, num_workers=2):
        ...

The pool writes shards to local files; threads of this process fetch remote `.pt` files ahead of it
and store what it has written. So a process that encodes waits neither for a download, nor for an
upload, nor for the disk. What a worker needs of memory is the same for any size of file.
"""

import concurrent.futures
import contextlib
import itertools
import multiprocessing.context
import os
import pathlib
import queue
import signal
import sys
import threading
import types
import uuid
from collections.abc import Iterator, Sequence

from coyo11m_tfds.build.finished_shards import FinishedShards
from coyo11m_tfds.build.shard_writer import init_worker, write_shard
from coyo11m_tfds.build.tasks import ShardResult, ShardTask
from coyo11m_tfds.process import machine
from coyo11m_tfds.source import pt_check
from coyo11m_tfds.source.pt_file import use_one_thread
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.source_files import SourceFile

WORKERS_VARIABLE = 'COYO11M_NUM_PROC'

# A process takes about 1.5 s to start; for less work than this it is not worth it.
_BYTES_WORTH_A_WORKER = 500_000_000

# Groups whose files are fetched or being written at a time: one download alone does not fill a fast
# line.
_GROUPS_AT_ONCE = 4

# Shards that are being stored at a time, beside those being written. A flush to a disk and an
# upload to a bucket are mostly waiting.
_STORED_AT_ONCE = 8


def write_shards(
    tasks: Sequence[ShardTask],
    finished: FinishedShards,
    scratch: Scratch,
    staging: str,
    num_workers: int = 0,
) -> Iterator[tuple[ShardTask, ShardResult]]:
    """Writes shards and their records, and yields each when it is stored.

    Args:
        tasks: what to write; tasks of one group follow each other.
        finished: where shards and records are stored.
        scratch: where remote files are put while they are read.
        staging: existing local folder to write shards in.
        num_workers: number of processes; 0 takes the environment variable `COYO11M_NUM_PROC`, else
            as many as there are cores and the amount of work is worth.

    Raises:
        ValueError: see `shard_writer.write_shard`; or the variable is no number.
        OSError: a file cannot be fetched, written or stored.
        RuntimeError: a process died.
    """
    if not tasks:
        return
    num_bytes = sum(task.num_bytes for task in tasks)
    workers = min(choose_workers(num_workers, num_bytes), len(tasks))
    with _pool(workers) as pool:
        run = _Run(pool, finished, scratch, staging, workers)
        yield from run.results(tasks)


def choose_workers(num_workers: int, num_bytes: int) -> int:
    """The number of processes for so many bytes of shards; see `write_shards`."""
    if num_workers:
        return num_workers
    variable = os.environ.get(WORKERS_VARIABLE)
    if variable:
        if not variable.isdecimal() or int(variable) == 0:
            raise ValueError(f'{WORKERS_VARIABLE}={variable}: expected a number from 1 up.')
        return int(variable)
    return min(machine.usable_cpus(), 1 + num_bytes // _BYTES_WORTH_A_WORKER)


class _Run:
    """One thread for each group that is in work, one for each shard that is being stored."""

    def __init__(
        self,
        pool: concurrent.futures.Executor,
        finished: FinishedShards,
        scratch: Scratch,
        staging: str,
        workers: int,
    ):
        self._pool, self._finished, self._scratch = pool, finished, scratch
        self._staging = staging
        # Bounds the shards that lie in `staging`: one for each worker to do, one to have in hand.
        self._shards_in_work = threading.Semaphore(2 * workers + _STORED_AT_ONCE)
        self._stored: queue.SimpleQueue = queue.SimpleQueue()
        self._stop = threading.Event()

    def results(self, tasks: Sequence[ShardTask]) -> Iterator[tuple[ShardTask, ShardResult]]:
        groups = [list(group) for _, group in itertools.groupby(tasks, lambda task: task.group)]
        storers = concurrent.futures.ThreadPoolExecutor(_STORED_AT_ONCE, 'store')
        readers = concurrent.futures.ThreadPoolExecutor(_GROUPS_AT_ONCE, 'group')
        with storers, readers:
            try:
                for group in groups:
                    readers.submit(self._write_group, group, storers)
                for _ in tasks:
                    outcome = self._stored.get()
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield outcome
            finally:
                self._stop.set()
                readers.shutdown(wait=False, cancel_futures=True)
                # Waits for what is being written: after this nobody writes here any more.
                self._pool.shutdown(wait=True, cancel_futures=True)

    def _write_group(
        self, tasks: Sequence[ShardTask], storers: concurrent.futures.Executor
    ) -> None:
        """Writes the shards of one group; holds its files until the last is written."""
        try:
            with self._hold_files(tasks) as paths:
                written = []
                for task in tasks:
                    self._shards_in_work.acquire()
                    if self._stop.is_set():
                        return
                    local = os.path.join(self._staging, uuid.uuid4().hex)
                    of_parts = [paths[part.file] for part in task.parts]
                    future = self._pool.submit(write_shard, task, of_parts, local)
                    written.append(storers.submit(self._store, task, future, local))
                concurrent.futures.wait(written)
        except BaseException as error:
            self._fail(error)

    @contextlib.contextmanager
    def _hold_files(self, tasks: Sequence[ShardTask]) -> Iterator[dict[SourceFile, str]]:
        """Local paths of all files that some tasks read, after a check of their contents."""
        files = list(dict.fromkeys(part.file for task in tasks for part in task.parts))
        with self._scratch.hold_all(files, on_bytes=self._check_going_on) as paths:
            for file, path in zip(files, paths, strict=True):
                pt_check.check_contents(
                    path,
                    file.path,
                    check_crc=tasks[0].check_crc,
                    recorded=file.recorded,
                    on_bytes=self._check_going_on,
                )
            yield dict(zip(files, paths, strict=True))

    def _store(self, task: ShardTask, future: concurrent.futures.Future, local: str) -> None:
        try:
            result = future.result()
            if not self._stop.is_set():
                self._finished.save(task, local, result)
                self._stored.put((task, result))
        except BaseException as error:
            self._fail(error)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(local)
            self._shards_in_work.release()

    def _check_going_on(self, num_bytes: int) -> None:
        """Ends a download or a check that nobody waits for any more."""
        del num_bytes
        if self._stop.is_set():
            raise concurrent.futures.CancelledError

    def _fail(self, error: BaseException) -> None:
        """Passes an error on and lets nothing new begin."""
        self._stop.set()
        self._stored.put(error)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[concurrent.futures.Executor]:
    """Yields what runs `write_shard`: a thread for one worker, else processes."""
    if workers == 1:
        with concurrent.futures.ThreadPoolExecutor(1, 'write', use_one_thread) as pool:
            yield pool
        return
    with concurrent.futures.ProcessPoolExecutor(workers, _CleanContext(), init_worker) as pool:
        try:
            yield pool
        except concurrent.futures.process.BrokenProcessPool:
            raise RuntimeError(
                'A worker process died, most likely because memory ran out. What is finished is '
                'kept: start the same build again, perhaps with fewer processes (num_workers in '
                f'the config, or {WORKERS_VARIABLE} in the environment).'
            ) from None


class _CleanProcess(multiprocessing.context.SpawnProcess):
    """Forking a process that runs TensorFlow's threads can hang; spawned ones begin afresh."""

    def start(self) -> None:
        # Ctrl-C is for the parent, which ends its workers: a worker would die of it in the middle
        # of an import, with a traceback.
        with _clean_start(), _interrupts_blocked():
            super().start()


class _CleanContext(multiprocessing.context.SpawnContext):
    Process = _CleanProcess


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Within it, this thread and the processes that it starts do not get SIGINT."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def _clean_start() -> Iterator[None]:
    """Within it, processes are spawned that can import this package and import nothing else.

    A spawned process imports the program's main module: that of `tfds` takes 4 s and 700 MB, that
    of a script without `if __name__ == '__main__':` starts the work again. The workers need
    neither. But they need the folder of the package, which `tfds build` finds in a checkout itself.
    """
    root = str(pathlib.Path(__file__).parents[1])
    main, path = sys.modules['__main__'], sys.path
    sys.modules['__main__'] = types.ModuleType('__main__')
    sys.path = path if root in path else [*path, root]
    try:
        yield
    finally:
        sys.modules['__main__'], sys.path = main, path
