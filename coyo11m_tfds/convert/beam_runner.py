"""Writes shards with Apache Beam, on as many machines as its runner has.

Each element of the collection describes all shards of one group of files, in some kilobytes.
Workers on other machines cannot read the captions and text embeddings of this machine, so this
module first copies them beside the records of the build, some MB a shard. A worker writes shards as
`local_runner` does, to the same place, so either runner can resume a build of the other.
"""

import concurrent.futures
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

from coyo11m_tfds import schema
from coyo11m_tfds.convert import local_runner
from coyo11m_tfds.convert.data_folder import FinishedShards, sub_folder
from coyo11m_tfds.convert.tasks import JoinedInputs, PackedInputs, ShardResult, ShardTask
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import Scratch, user_cache

_UPLOADS_AT_ONCE = 8
_SECONDS_BETWEEN_LINES = 10

Runner = str | beam.runners.PipelineRunner | None


def write_shards(
    tasks: Sequence[ShardTask],
    finished: FinishedShards,
    scratch_dir: str,
    options: PipelineOptions | None,
    runner: Runner = None,
) -> Iterator[tuple[ShardTask, ShardResult]]:
    """Writes shards and their records; yields the results when all shards are stored.

    All workers must reach `finished` by its path. `scratch_dir` is a local folder of each worker,
    for remote source files and for shards on their way to a bucket; '' for the user's cache.
    `runner` takes the place of the one in `options`.
    """
    if not tasks:
        return
    place = finished.folder.folder
    packed = _pack(tasks, finished)
    logging.info('Starting the pipeline with %d shards to write', len(packed))
    groups = [list(group) for _, group in itertools.groupby(packed, lambda task: task.group)]
    runner, options = _spread_by_dask(runner, options or PipelineOptions([]), len(groups))
    with _progress(packed, finished), beam.Pipeline(runner=runner, options=options) as pipeline:
        _ = (
            pipeline
            | 'Groups' >> beam.Create(groups, reshuffle=False)
            | beam.Reshuffle()
            | 'Write' >> beam.Map(_write_group, place, finished.build, scratch_dir)
        )
    by_place = {(task.split, task.index): task for task in tasks}
    for result in finished.load(packed):
        yield by_place.pop((result.split, result.index)), result
    if by_place:
        names = ', '.join(task.filename for task in list(by_place.values())[:3])
        raise RuntimeError(
            f'{place}: the pipeline ended, but {len(by_place)} shards are missing or damaged '
            f'(e.g. {names}). Start the same build again, it writes what is missing.'
        )


def _spread_by_dask(
    runner: Runner, options: PipelineOptions, num_groups: int
) -> tuple[Runner, PipelineOptions]:
    """Has Dask give each group to the next free worker; leaves other runners as they are."""
    name = runner or options.view_as(StandardOptions).runner
    if not isinstance(name, str) or name.lower().rpartition('.')[2] not in ('dask', 'daskrunner'):
        return runner, options
    if not importlib.util.find_spec('distributed'):
        install = "pip install -c constraints.txt -e '.[dask]'"
        raise ModuleNotFoundError(f'Dask is not installed: {install}')
    from apache_beam.runners.dask.dask_runner import DaskOptions

    dask = options.view_as(DaskOptions)
    if not (dask.npartitions or dask.partition_size):  # its default: 128 groups for one worker
        dask.npartitions = num_groups
    return 'apache_beam.runners.dask.dask_runner.DaskRunner', options


@contextlib.contextmanager
def _progress(tasks: Sequence[ShardTask], finished: FinishedShards) -> Iterator[None]:
    """Shows until the block ends how many shards the workers have recorded."""
    names, over = {task.filename for task in tasks}, threading.Event()

    def watch() -> None:
        is_over, before = False, -1
        while not is_over:
            is_over = over.wait(_SECONDS_BETWEEN_LINES)
            with contextlib.suppress(OSError):  # the next look may succeed
                count = len(names & finished.recorded())
                if count != before or is_over:
                    logging.info('The workers have written %d of %d shards', count, len(names))
                before = count

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(watch)
        try:
            yield
        finally:
            over.set()


def _pack(tasks: Sequence[ShardTask], finished: FinishedShards) -> list[ShardTask]:
    """Copies the inputs of tasks beside the records; returns tasks that read the copies."""

    def pack_one(task: ShardTask) -> ShardTask:
        assert isinstance(task.inputs, JoinedInputs)  # what a plan has
        name = f'{sub_folder(finished.build)}/{task.filename}.npz'
        finished.folder.write(name, task.inputs.pack())
        return dataclasses.replace(task, inputs=PackedInputs(f'{finished.folder.folder}/{name}'))

    with concurrent.futures.ThreadPoolExecutor(_UPLOADS_AT_ONCE) as threads:
        return list(threads.map(pack_one, tasks))


def _write_group(tasks: Sequence[ShardTask], folder: str, build: str, scratch_dir: str) -> None:
    """Runs on a worker, in as many processes as the runner starts there."""
    finished = FinishedShards(Destination(folder), build)
    own = os.path.expanduser(scratch_dir) or user_cache(schema.NAME)
    scratch = Scratch(os.path.join(own, 'source'))
    beside = finished.folder.staging(fallback=os.path.join(own, 'staging'))
    with locks.temporary_folder(beside, 'worker-') as staging:
        for _ in local_runner.write_shards(tasks, finished, scratch, staging, num_workers=1):
            pass
