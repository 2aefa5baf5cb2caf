"""Writes shards with Apache Beam, on as many machines as its runner has.

    for task, result in write_shards(tasks, finished, scratch_settings, options):
        ...

The only collection is small: an element describes all shards of one group of files, in some
kilobytes, so that each file is fetched by one worker, once. The captions and text embeddings of a
shard, some MB, are first copied beside the records of the build, because workers on other machines
do not see the stores of this one. A worker writes the shards of its group as `local_runner` does on
one machine, and to the same place, so that a build may be resumed with another engine.
"""

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Generator, Sequence

import apache_beam as beam
from absl import logging
from apache_beam.options.pipeline_options import PipelineOptions

from coyo11m_tfds import schema
from coyo11m_tfds.convert import local_runner, shard_inputs
from coyo11m_tfds.convert.data_folder import sub_folder
from coyo11m_tfds.convert.finished_shards import FinishedShards
from coyo11m_tfds.convert.tasks import ShardResult, ShardTask
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import Scratch, user_temp

_UPLOADS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class ScratchSettings:
    """Where each worker keeps remote `.pt` files: a folder on its machine, and how many bytes.

    An empty folder stands for the user's own one in the directory of temporary files.
    """

    folder: str
    max_bytes: int

    def open(self) -> tuple[Scratch, str]:
        """Returns the scratch folder, and the path of a folder for shards beside it.

        Raises:
            PermissionError: the user's own folder belongs to another user.
        """
        folder = os.path.expanduser(self.folder) or user_temp(schema.NAME)
        scratch = Scratch(os.path.join(folder, 'source'), self.max_bytes)
        return scratch, os.path.join(folder, 'staging')


def write_shards(
    tasks: Sequence[ShardTask],
    finished: FinishedShards,
    scratch: ScratchSettings,
    options: PipelineOptions | None,
    runner: str | beam.runners.PipelineRunner | None = None,
) -> Generator[tuple[ShardTask, ShardResult], None, None]:
    """Writes shards and their records, and yields them when all are stored.

    Args:
        tasks: what to write; tasks of one group follow each other.
        finished: where shards and records are stored; all workers must reach it by this path.
        scratch: for each worker.
        options: of the pipeline.
        runner: of the pipeline, if the options do not name one.

    Raises:
        RuntimeError: a worker failed; what is finished is kept.
    """
    if not tasks:
        return
    packed = _pack(tasks, finished)
    logging.info('Starting the pipeline with %d shards to write', len(packed))
    groups = [list(group) for _, group in itertools.groupby(packed, lambda task: task.group)]
    with beam.Pipeline(runner=runner, options=options) as pipeline:
        _ = (
            pipeline
            | 'Groups' >> beam.Create(groups, reshuffle=False)
            | beam.Reshuffle()
            | 'Write' >> beam.Map(_write_group, finished.folder.folder, finished.build, scratch)
        )
    place = finished.folder.folder
    by_place = {(task.split, task.index): task for task in tasks}
    for result in finished.load(packed):
        yield by_place.pop((result.split, result.index)), result
    if by_place:
        names = ', '.join(task.filename for task in list(by_place.values())[:3])
        raise RuntimeError(
            f'{place}: the pipeline ended, but {len(by_place)} shards are missing or damaged '
            f'(e.g. {names}). Start the same build again, it writes what is missing.'
        )


def _pack(tasks: Sequence[ShardTask], finished: FinishedShards) -> list[ShardTask]:
    """Copies what tasks of a plan read from stores; returns tasks that read the copies.

    Raises:
        OSError: it cannot be stored.
    """

    def pack_one(task: ShardTask) -> ShardTask:
        assert isinstance(task.inputs, shard_inputs.JoinedInputs)  # what a plan has
        name = f'{sub_folder(finished.build)}/{task.filename}.npz'
        finished.folder.put_bytes(name, shard_inputs.pack(task.inputs))
        inputs = shard_inputs.PackedInputs(f'{finished.folder.folder}/{name}')
        return dataclasses.replace(task, inputs=inputs)

    with concurrent.futures.ThreadPoolExecutor(_UPLOADS_AT_ONCE) as threads:
        return list(threads.map(pack_one, tasks))


def _write_group(
    tasks: Sequence[ShardTask], folder: str, build: str, settings: ScratchSettings
) -> None:
    """Runs on a worker, in as many processes as the runner starts there."""
    destination = Destination(folder)
    scratch, beside = settings.open()
    with locks.temporary_folder(destination.staging(fallback=beside), 'worker-') as staging:
        finished = FinishedShards(destination, build)
        shards = local_runner.write_shards(tasks, finished, scratch, staging, num_workers=1)
        for _ in shards:
            pass
