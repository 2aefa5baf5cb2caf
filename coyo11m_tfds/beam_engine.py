"""Writes shards with Apache Beam, on as many machines as its runner has.

    for task, result in write_shards(tasks, finished, scratch_settings, options):
        ...

One small collection: an element is the description of one shard, a kilobyte. What a shard takes
from captions and text vectors is put beside the data first, some MB each, because workers on other
machines do not see the stores of this one. Each worker writes shards and their records in the same
place as `shard_pool` does, so that a build may go on with another engine.
"""

import concurrent.futures
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence

import apache_beam as beam
from absl import logging
from apache_beam.options.pipeline_options import PipelineOptions

from coyo11m_tfds import shard_inputs
from coyo11m_tfds.finished import FinishedShards
from coyo11m_tfds.shard_writer import ShardResult, ShardTask, write_shard
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import Scratch

_INPUTS = 'inputs'
_UPLOADS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class ScratchSettings:
    """Where each worker keeps remote `.pt` files: a folder of its machine, and bytes in it.

    An empty folder stands for one under the worker's directory of temporary files.
    """

    folder: str
    max_bytes: int

    def open(self) -> Scratch:
        """The folder, made if it is not there."""
        folder = self.folder or os.path.join(tempfile.gettempdir(), 'coyo11m_tfds')
        os.makedirs(folder, exist_ok=True)
        return Scratch(folder, self.max_bytes)


def write_shards(
    tasks: Sequence[ShardTask],
    finished: FinishedShards,
    work: Destination,
    scratch: ScratchSettings,
    options: PipelineOptions | None,
    runner: str | beam.runners.PipelineRunner | None = None,
) -> Iterator[tuple[ShardTask, ShardResult]]:
    """Writes shards and their records, and yields them when all are stored.

    Args:
        tasks: what to write.
        finished: where shards and records are stored.
        work: the same folder; all workers must reach it under this path.
        scratch: for each worker.
        options: of the pipeline.
        runner: of the pipeline, if the options do not name one.

    Raises:
        RuntimeError: a worker failed; what is finished is kept.
    """
    if not tasks:
        return
    with concurrent.futures.ThreadPoolExecutor(_UPLOADS_AT_ONCE) as threads:
        packed = list(threads.map(lambda task: _pack(task, work), tasks))
    logging.info('Starting the pipeline with %d shards to write', len(packed))
    with beam.Pipeline(runner=runner, options=options) as pipeline:
        _ = (
            pipeline
            | 'Shards' >> beam.Create(packed, reshuffle=False)
            | beam.Reshuffle()
            | 'Write' >> beam.Map(_write, work.folder, scratch)
        )
    by_place = {(task.split, task.index): task for task in tasks}
    for result in finished.load(packed):
        yield by_place.pop((result.split, result.index)), result
    if by_place:
        names = ', '.join(task.filename for task in list(by_place.values())[:3])
        raise RuntimeError(
            f'{work.folder}: the pipeline ended, but {len(by_place)} shards are missing or damaged '
            f'(e.g. {names}). Start the same build again, it writes what is missing.'
        )


def _pack(task: ShardTask, work: Destination) -> ShardTask:
    """Puts what the task reads from stores beside the data, and refers to it there."""
    name = f'{_INPUTS}/{task.filename}.npz'
    work.put_bytes(name, shard_inputs.pack(task.inputs))
    return dataclasses.replace(task, inputs=shard_inputs.PackedInputs(f'{work.folder}/{name}'))


def _write(task: ShardTask, work_folder: str, settings: ScratchSettings) -> None:
    """Runs on a worker."""
    work, scratch = Destination(work_folder), settings.open()
    staging = work.staging(fallback=tempfile.gettempdir())
    # Kept for the other shards of the file that come to this machine.
    with (
        scratch.hold(task.latents, keep=True) as path,
        tempfile.TemporaryDirectory(dir=staging) as folder,
    ):
        local = os.path.join(folder, task.filename)
        FinishedShards(work).save(task, local, write_shard(task, path, local))
