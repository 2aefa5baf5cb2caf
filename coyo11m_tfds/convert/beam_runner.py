"""Writes shards with Apache Beam, on as many machines as its runner has.

Workers elsewhere cannot read the captions and text embeddings of this machine, so they are first
copied next to the records of the build, some MB a shard. Either runner can resume a build of the
other.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import threading
from collections.abc import Iterator, Sequence

import apache_beam as beam
from absl import logging
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert import local_runner
from coyo11m_tfds.convert.data_folder import FinishedShards, sub_folder
from coyo11m_tfds.convert.tasks import (
    JoinedInputs,
    PackedInputs,
    ShardResult,
    ShardTask,
    group_tasks,
)
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage.scratch import Scratch, user_cache

_UPLOADS_AT_ONCE = 8
_SECONDS_BETWEEN_LOOKS = 10

Runner = str | beam.runners.PipelineRunner | None


def write_with_beam(
    tasks: Sequence[ShardTask],
    finished: FinishedShards,
    progress: Progress,
    scratch_dir: str,
    options: PipelineOptions | None,
    runner: Runner = None,
) -> Iterator[tuple[ShardTask, ShardResult]]:
    """Writes shards and their records; yields the results when all shards are stored.

    Args:
        tasks: The shards to write; those of one group are neighbours.
        finished: Keeps the shards and their records.
        progress: Counts the shards as their records appear.
        scratch_dir: As in the settings of a build; each worker has such a folder.
        options: Options of the pipeline; None for Beam's defaults.
        runner: Runner of the pipeline; None for the one in the options.

    Raises:
        RuntimeError: If the pipeline ends without an error, and a shard is missing or damaged.
        ModuleNotFoundError: If Dask is to run the pipeline, but is not installed.
    """
    if not tasks:
        return
    final = finished.folder.folder
    packed = _pack_inputs(tasks, finished)
    shards = format_count(len(packed), 'shard')
    logging.info('Starting the pipeline with %s to write', shards)
    # One element is a whole group, because the worker that takes it fetches each file only once.
    groups = group_tasks(packed)
    if options is None:
        # Without a list of flags, Beam would take those of this program for its own.
        options = PipelineOptions([])
    runner, options = _spread_by_dask(runner, options, len(groups))
    with (
        _counting_shards(packed, finished, progress),
        beam.Pipeline(runner=runner, options=options) as pipeline,
    ):
        _ = (
            pipeline
            | 'Groups' >> beam.Create(groups, reshuffle=False)
            # Without this step, runners fuse the other two, and one worker writes all groups.
            | beam.Reshuffle()
            | 'Write' >> beam.Map(_write_group, final, finished.build, scratch_dir)
        )
    # Runners retry and lose elements in ways of their own, so only the records count.
    missing = {(task.split, task.index): task for task in tasks}
    for result in finished.load(packed):
        # Bytes and shards are counted while they are written.
        progress.add(0, records=result.num_records, dropped=result.statistics.non_finite)
        yield missing.pop((result.split, result.index)), result
    if missing:
        first_names = [task.filename for task in itertools.islice(missing.values(), 3)]
        examples = ', '.join(first_names)
        shards = format_count(len(missing), 'shard is', 'shards are')
        raise RuntimeError(
            f'{final}: the pipeline ended, but {shards} missing or damaged (e.g. {examples}). '
            'Start the same build again: it writes what is missing.'
        )


def _spread_by_dask(
    runner: Runner, options: PipelineOptions, num_groups: int
) -> tuple[Runner, PipelineOptions]:
    """Has Dask give each group to the next free worker; leaves other runners as they are."""
    name = runner or options.view_as(StandardOptions).runner
    if not isinstance(name, str):
        return runner, options
    # A runner can be named by its class, with the modules before it.
    class_name = name.lower().rpartition('.')[2]
    if class_name not in ('dask', 'daskrunner'):
        return runner, options
    if not importlib.util.find_spec('distributed'):
        install = "pip install -c constraints.txt -e '.[dask]'"
        raise ModuleNotFoundError(f'Dask is not installed: {install}')
    from apache_beam.runners.dask.dask_runner import DaskOptions

    dask = options.view_as(DaskOptions)
    # By default it gives 128 groups to one worker.
    if not (dask.npartitions or dask.partition_size):
        dask.npartitions = num_groups
    return 'apache_beam.runners.dask.dask_runner.DaskRunner', options


@contextlib.contextmanager
def _counting_shards(
    tasks: Sequence[ShardTask], finished: FinishedShards, progress: Progress
) -> Iterator[None]:
    """Counts until the block ends the shards that the workers have recorded."""
    uncounted_bytes = {task.filename: task.num_bytes for task in tasks}
    end_event = threading.Event()

    def watch() -> None:
        """Looks for new records now and then, and once more after the end."""
        has_ended = False
        while not has_ended:
            has_ended = end_event.wait(_SECONDS_BETWEEN_LOOKS)
            # A count is worth no failed build, and the next look may succeed.
            with contextlib.suppress(OSError):
                for name in uncounted_bytes.keys() & finished.recorded():
                    progress.add(uncounted_bytes.pop(name), shards=1)

    # At its end, this waits for the last look.
    with ThreadPool(1) as thread:
        thread.submit(watch)
        try:
            yield
        finally:
            end_event.set()


def _pack_inputs(tasks: Sequence[ShardTask], finished: FinishedShards) -> list[ShardTask]:
    """Copies the inputs of tasks next to the records; returns tasks that read the copies."""

    def pack(task: ShardTask) -> ShardTask:
        """Copies the inputs of one task; returns a task that reads the copy."""
        assert isinstance(task.inputs, JoinedInputs)  # what a plan has
        # In the folder of the build's working files, which are removed when it is complete.
        name = f'{sub_folder(finished.build)}/{task.filename}.npz'
        finished.folder.write(name, task.inputs.pack())
        inputs = PackedInputs(f'{finished.folder.folder}/{name}')
        return dataclasses.replace(task, inputs=inputs)

    with ThreadPool(_UPLOADS_AT_ONCE) as threads:
        return list(threads.map(pack, tasks))


def _write_group(tasks: Sequence[ShardTask], folder: str, build: str, scratch_dir: str) -> None:
    """Runs on a worker, in as many processes as the runner starts there."""
    data_folder = storage.open_writable_folder(folder)
    finished = FinishedShards(data_folder, build)
    # Of the user of this machine, which may be another one than that of the planner.
    cache = storage.expand_home(scratch_dir) or user_cache(schema.NAME)
    scratch = Scratch(os.path.join(cache, 'source'))
    local = os.path.join(cache, 'staging')
    results = local_runner.write_with_workers(tasks, finished, None, scratch, local, num_workers=1)
    # The results are in the records, so that none has to pass through the pipeline.
    for _ in results:
        pass
