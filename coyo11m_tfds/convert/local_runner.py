"""Writes shards with a pool of workers on this machine, which are threads or processes.

Other threads fetch remote source files in advance and store the finished shards, so the pool never
waits.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import threading
import uuid
from collections.abc import Iterator, Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.convert.build_settings import fitting_workers
from coyo11m_tfds.convert.data_folder import FinishedShards
from coyo11m_tfds.convert.shard_writer import init_worker, write_shard
from coyo11m_tfds.convert.tasks import ShardResult, ShardTask, group_tasks, make_column_file
from coyo11m_tfds.process import machine, workers
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source import formats
from coyo11m_tfds.source.latent_file import use_one_thread
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile

Outcome = tuple[ShardTask, ShardResult]

# A worker takes this for each byte, while threads can run beside it, and for each record, while it
# has the interpreter.
_SECONDS_PER_BYTE = 1e-9
_SECONDS_PER_RECORD = 5e-6

# Two threads with large records write 1.4 times as much as one, and need no start.
_MAX_THREADS = 2

# A process takes about 1.5 s to start, three quarters of it for torch: the half of less work than
# this takes no longer.
_SECONDS_WORTH_A_PROCESS = 3

# Groups whose files are fetched or written at a time: one download does not saturate a fast link.
_GROUPS_AT_ONCE = 4

# Heads of small files that are fetched at a time in each group: they mostly wait.
_HEADS_AT_ONCE = 4

# Shards that are being stored at a time: flushing to a disk and uploading mostly wait.
_STORED_AT_ONCE = 8


def write_with_workers(
    tasks: Sequence[ShardTask],
    finished: FinishedShards,
    progress: Progress | None,
    scratch: Scratch,
    local: str,
    num_workers: int = 0,
) -> Iterator[Outcome]:
    """Writes shards, group by group, and their records; yields each result when it is stored.

    Args:
        tasks: The shards to write; those of one group are neighbours.
        finished: Keeps the shards and their records.
        progress: Counts bytes, shards and records; None for no display.
        scratch: Holds files of a remote source while they are read.
        local: Local folder for shards until they are stored.
        num_workers: Threads or processes; 0 for as many as cores, memory and work allow.
    """
    if not tasks:
        return
    num_bytes = sum(task.num_bytes for task in tasks)
    # The last segment of a task ends with its last record.
    num_rows = sum(task.segments[-1].records.stop for task in tasks)
    num_workers = choose_workers(num_workers, num_bytes, num_rows)
    num_workers = min(num_workers, len(tasks))
    pool: contextlib.AbstractContextManager[concurrent.futures.Executor]
    if num_workers <= _count_useful_threads(num_bytes, num_rows):
        pool = ThreadPool(num_workers, 'write', use_one_thread)
    else:
        pool = workers.open_pool(num_workers, init_worker)
    staging_dir = finished.folder.staging(local)
    with locks.temporary_folder(staging_dir, 'staging-') as staging, pool as executor:
        run = _LocalRun(executor, finished, progress, scratch, staging, num_workers)
        yield from run.write(tasks)


def choose_workers(num_workers: int, num_bytes: int, num_rows: int = 0) -> int:
    """Returns the number of workers: as requested or, for 0, as cores, memory and work allow.

    The work is that of writing `num_rows` records with `num_bytes` bytes together.
    """
    if count := workers.requested_workers(num_workers):
        return count
    seconds = num_bytes * _SECONDS_PER_BYTE + num_rows * _SECONDS_PER_RECORD
    useful_processes = 1 + int(seconds / _SECONDS_WORTH_A_PROCESS)
    useful_threads = _count_useful_threads(num_bytes, num_rows)
    useful_workers = max(useful_processes, useful_threads)
    return min(machine.usable_cpus(), useful_workers, fitting_workers(num_rows))


def _count_useful_threads(num_bytes: int, num_rows: int) -> int:
    """Returns how many threads write faster than one does."""
    # Threads with small records would mostly wait for the interpreter.
    if num_bytes * _SECONDS_PER_BYTE < num_rows * _SECONDS_PER_RECORD:
        return 1
    return _MAX_THREADS


@dataclasses.dataclass
class _LocalRun:
    """Threads around a pool: one a group in work, one a shard to store; an error ends all."""

    pool: concurrent.futures.Executor
    finished: FinishedShards
    progress: Progress | None
    scratch: Scratch
    staging: str
    num_workers: int

    def __post_init__(self):
        # Bounds the shards in `staging`: for each worker one that it writes and one that waits.
        self._shards_in_work = threading.Semaphore(2 * self.num_workers + _STORED_AT_ONCE)
        self._stored: queue.SimpleQueue = queue.SimpleQueue()
        self._stop = threading.Event()

    def write(self, tasks: Sequence[ShardTask]) -> Iterator[Outcome]:
        """Yields each task with its result when its shard is stored; ends all threads."""
        groups = group_tasks(tasks)
        storers = ThreadPool(_STORED_AT_ONCE, 'store')
        readers = ThreadPool(_GROUPS_AT_ONCE, 'group')
        with storers, readers:
            try:
                for group in groups:
                    # Its errors come by the queue of results, as those of the storers do.
                    readers.submit(self._write_group, group, storers)
                # One result for each task, or the first error of a thread.
                for _ in tasks:
                    outcome = self._stored.get()
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield outcome
            finally:
                self._stop.set()
                readers.shutdown(wait=False, cancel_futures=True)
                # Of uploads, for which the threads of groups wait.
                storers.end_pauses()
                # Waits for shards that are being written, because the caller removes `staging`.
                self.pool.shutdown(wait=True, cancel_futures=True)

    def _write_group(
        self, tasks: Sequence[ShardTask], storers: concurrent.futures.Executor
    ) -> None:
        """Writes the shards of one group; holds its files until the last is written."""
        try:
            with self._hold_files(tasks) as paths:
                futures = []
                for task in tasks:
                    # A reader may wait for room in `staging`, the workers should not.
                    self._shards_in_work.acquire()
                    # Only now, because after an error the room is that of shards given up.
                    if self._stop.is_set():
                        return
                    local = os.path.join(self.staging, uuid.uuid4().hex)
                    segment_paths = [paths[segment.file] for segment in task.segments]
                    future = self.pool.submit(write_shard, task, segment_paths, local)
                    futures.append(storers.submit(self._store, task, future, local))
                # Not `concurrent.futures.wait`, which would wait for ever for what a second Ctrl-C
                # has cancelled.
                for stored in futures:
                    stored.exception()
        except BaseException as error:
            self._fail(error)

    @contextlib.contextmanager
    def _hold_files(self, tasks: Sequence[ShardTask]) -> Iterator[dict[StoredFile, str]]:
        """Yields local paths of all files that these tasks read, after a check of their contents.

        Of files of which only heads are read, these are the paths of the heads.
        """
        if tasks[0].reads_heads:
            with self.scratch.make_folder() as folder:
                yield self._fetch_heads(tasks, folder)
            return
        # Each file once, in the order in which the shards need them.
        files = dict[StoredFile, None]()
        for task in tasks:
            for segment in task.segments:
                files[segment.file] = None
        with self.scratch.hold_all(list(files), on_bytes=self._count_fetched) as paths:
            # Before the first shard: a damaged file must not get into records.
            for file, path in zip(files, paths, strict=True):
                formats.format_of(file).check_contents(
                    path,
                    file.path,
                    check_crc=tasks[0].check_crc,
                    recorded=file.recorded,
                    on_bytes=self._check_not_stopped,
                )
            yield dict(zip(files, paths, strict=True))

    def _fetch_heads(self, tasks: Sequence[ShardTask], folder: str) -> dict[StoredFile, str]:
        """Fetches the heads of files, with the crops that tasks read, into an empty folder."""
        sampled_rows = dict[StoredFile, list[np.ndarray]]()
        for task in tasks:
            for segment in task.segments:
                assert segment.sampled_rows is not None  # as of all segments of such tasks
                sampled_rows.setdefault(segment.file, []).append(segment.sampled_rows)

        def fetch_head_and_crops(file: StoredFile) -> str:
            """Returns the path of a head with the middle crops that its statistics need."""
            # Before each file, because the fetch of a head cannot be ended.
            self._check_not_stopped(0)
            head = formats.format_of(file).fetch_head(file, folder, check_crc=tasks[0].check_crc)
            opened = formats.open_file(file, head, tasks[0].latents_from)
            # Made here for its errors alone: it refuses files whose rows cannot be read in place.
            make_column_file(file, opened)
            rows = np.concatenate(sampled_rows[file])
            opened.fetch_crops(file, rows, schema.middle_crop(opened.shape[0]))
            return head

        with ThreadPool(_HEADS_AT_ONCE, 'head') as threads:
            heads = threads.map(fetch_head_and_crops, sampled_rows)
            return dict(zip(sampled_rows, heads, strict=True))

    def _store(self, task: ShardTask, future: concurrent.futures.Future, local: str) -> None:
        """Stores a shard when it is written, and passes its result on; runs in a storing thread."""
        try:
            result = future.result()
            # After an error the run should end soon, and uploads take long.
            if not self._stop.is_set():
                self.finished.save(task, local, result)
                # Only now: what is written but not stored is lost if the build ends.
                if self.progress:
                    self.progress.add(
                        result.num_bytes,
                        shards=1,
                        records=result.num_records,
                        dropped=result.statistics.non_finite,
                    )
                self._stored.put((task, result))
        except BaseException as error:
            self._fail(error)
        finally:
            # Also after an error, which may have come before the file.
            with contextlib.suppress(FileNotFoundError):
                os.remove(local)
            self._shards_in_work.release()

    def _count_fetched(self, num_bytes: int) -> None:
        """Counts bytes of a download, or ends it if it is no longer needed."""
        self._check_not_stopped(num_bytes)
        if self.progress:
            self.progress.add(0, **{'bytes fetched': num_bytes})

    def _check_not_stopped(self, num_bytes: int) -> None:
        """Ends a download or a check whose result is no longer needed."""
        del num_bytes
        if self._stop.is_set():
            raise concurrent.futures.CancelledError

    def _fail(self, error: BaseException) -> None:
        """Passes an error on, and keeps further work from starting."""
        self._stop.set()
        self._stored.put(error)
