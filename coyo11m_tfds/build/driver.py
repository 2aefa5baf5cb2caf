"""One build from beginning to end: one at a time in a place, shared by a job, resumable.

    with driver.build('OUT/coyo11m_tfds/latents/1.0.0', 'gs://bucket/coyo11m', settings) as built:
        if built:                           # None if the data set was there
            write_info(built, built.folder)     # TFDS' own files

Until it ends, everything is in a folder beside the final one, `1.0.0.building`: finished shards
with their records, from which a later call resumes. When it is complete, it becomes the final
folder; see `build_folder`.
"""

import contextlib
import dataclasses
import os
import platform
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coyo11m_tfds import manifest, schema
from coyo11m_tfds.build import in_place, local_runner, run_plan, shared_tasks
from coyo11m_tfds.build.build_folder import BuildFolder
from coyo11m_tfds.build.finished_shards import FinishedShards
from coyo11m_tfds.build.plan import Plan, make_plan
from coyo11m_tfds.build.settings import BuildSettings
from coyo11m_tfds.build.tasks import ShardResult, ShardTask
from coyo11m_tfds.process import job
from coyo11m_tfds.report import summary
from coyo11m_tfds.source import location
from coyo11m_tfds.storage import build_lock, file_state, held_folder, json_digest, scratch
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.scratch import Scratch

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners import PipelineRunner


@dataclasses.dataclass(frozen=True)
class Beam:
    """Has Apache Beam write.

    Attributes:
        options: of the pipeline.
        runner: of the pipeline, where the options name none.
    """

    options: 'PipelineOptions | None' = None
    runner: 'str | PipelineRunner | None' = None


@dataclasses.dataclass(frozen=True)
class Built:
    """The outcome of a build.

    Attributes:
        plan: the plan it followed.
        splits: for each split the results of its shards, by index.
        metadata: of `dataset_info`.
        folder: local, for what lies beside the shards.
    """

    plan: Plan
    splits: dict[str, list[ShardResult]]
    metadata: dict
    folder: str


@contextlib.contextmanager
def build(
    final: str,
    source: str,
    settings: BuildSettings,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    beam: Beam | None = None,
) -> Iterator[Built | None]:
    """Makes sure that the data set is complete in `final` when the block has ended.

    In a job of several processes the first plans and joins, and one on each machine writes; see
    `shared_tasks`. A second build that is started while one is running waits for it.

    Args:
        final: folder of the data set, `.../NAME/CONFIG/VERSION`, local or `gs://`.
        source: folder of the source, instead of that of the settings.
        settings: what to make, and how.
        limit: keep only so many records of each split.
        overwrite: replace an existing data set as soon as the new one is complete.
        beam: write with Apache Beam, not with processes of this machine.

    Yields:
        What this call has made; the block adds TFDS' own files to its folder. None if there was
        nothing to make: the data set was there, another process built it, or an earlier build only
        had to be moved into its place.

    Raises:
        ValueError: the source or an option is bad.
        OSError: a file cannot be read or written.
        TimeoutError: another process has not finished in time.
        RuntimeError: a worker died, the first process of the job failed, or another builder has
            taken the place over.
    """
    index, num_processes = job.share()
    if index:
        _help_first_process(final, settings, overwrite)
        yield None
        return
    with build_lock.hold(final, settings.wait_seconds) as lock:
        folder = BuildFolder(final, lock.check)
        with folder.telling_failure():
            finished = folder.finish()
            if folder.is_complete() and not overwrite:
                folder.tidy()
                yield None
                return
            start = time.monotonic()
            local = _scratch_folder(final, settings)
            found = location.find(source)
            if settings.in_place:
                in_place.check_within_reach(found.latent_files[0], final)
            plan = make_plan(found, settings, _open_scratch(local, settings), local, limit)
            digest = json_digest.sha256([task.fingerprint for task in plan.tasks])
            if digest == finished:  # the interrupted build was this one
                yield None
                return
            folder.begin()
            engine = _make_engine(folder, local, settings, beam)
            finished_shards = FinishedShards(folder.work, lock.check, are_shared=num_processes > 1)
            results = run_plan.write_shards(plan, finished_shards, engine)
            dropped = run_plan.count_dropped(plan, results)
            metadata = run_plan.make_metadata(plan, results, dropped, settings.caption_column)
            facts = run_plan.make_facts(_name(final), results, dropped, metadata)
            with held_folder.make(folder.work.staging(local), 'info-') as made:
                run_plan.write_chunk_indexes(results, made)
                run_plan.write_columns(results, made)
                yield Built(plan, run_plan.by_split(results), metadata, made)
                summary.write(facts, made)
                files = _store_metadata(plan, results, made, folder.work)
            folder.commit(files, digest)
            print(summary.summarize(facts, final, seconds=time.monotonic() - start))


def _scratch_folder(final: str, settings: BuildSettings) -> str:
    """The local folder for stores and downloads, made if it is not there; see `BuildSettings`."""
    folder = scratch.choose_folder(schema.NAME, f'{final}/../../..', settings.scratch_dir)
    os.makedirs(folder, exist_ok=True)
    return folder


def _help_first_process(final: str, settings: BuildSettings, overwrite: bool) -> None:
    if overwrite:
        raise ValueError(
            f'{final}: process {job.process_index()} of the job was told to overwrite it, while '
            'others may read it. Overwrite it with one process, then start the job.'
        )
    folder = BuildFolder(final)
    if not job.is_first_of_machine():  # that one takes all cores
        watch = build_lock.Watch(final, folder.failure)
        watch.wait_for(folder.is_complete, settings.wait_seconds)
        return

    def write_shards(tasks: Sequence[ShardTask], finished: FinishedShards) -> run_plan.Outcomes:
        # Locks of a shared disk may not reach from one machine to another.
        local = _scratch_folder(final, settings)
        yield from _write_here(tasks, finished, settings, local, f'-{platform.node()}')

    shared_tasks.help_out(folder, write_shards, job.share(), settings.wait_seconds)


def _store_metadata(
    plan: Plan, results: Sequence[ShardResult], made: str, work: Destination
) -> dict[str, FileState]:
    """Stores what lies beside the shards; returns the state of all files of the data set."""
    names = {(task.split, task.index): task.filename for task in plan.tasks}
    files = {names[r.split, r.index]: FileState(r.num_bytes, r.crc32c) for r in results}

    def store(name: str) -> None:
        path = os.path.join(made, name)
        files[name] = file_state.of_file(path)
        work.put(path, f'{schema.BUILD_DATA}/{name}', files[name].crc32c)

    for name in sorted(os.listdir(made)):
        store(name)
    manifest.write(made, files)
    store(schema.CHECKSUMS_FILE)
    return files


def _make_engine(
    folder: BuildFolder, local: str, settings: BuildSettings, beam: Beam | None
) -> run_plan.Engine:
    """The engine of the process that holds the lock; `local` is its scratch folder."""
    if beam:
        from coyo11m_tfds.build import beam_runner

        of_worker = beam_runner.ScratchSettings(settings.scratch_dir, settings.scratch_bytes)
        return lambda tasks, finished: beam_runner.write_shards(
            tasks, finished, folder.work, of_worker, beam.options, beam.runner
        )

    def write_shards(tasks: Sequence[ShardTask], finished: FinishedShards) -> run_plan.Outcomes:
        if not finished.are_shared:
            yield from _write_here(tasks, finished, settings, local)
            return
        finished.forget(tasks)
        shared_tasks.offer(folder.work, tasks)
        tasks = shared_tasks.in_turn(tasks, *job.share())
        yield from _write_here(tasks, finished, settings, local)
        folder.withdraw()

    return write_shards


def _write_here(
    tasks: Sequence[ShardTask],
    finished: FinishedShards,
    settings: BuildSettings,
    local: str,
    suffix: str = '',
) -> run_plan.Outcomes:
    """Writes with processes of this machine; the suffix keeps its temporary files apart."""
    files = _open_scratch(local, settings, suffix)
    with held_folder.make(local, f'staging{suffix}-') as fallback:
        staging = finished.work.staging(fallback)
        yield from local_runner.write_shards(tasks, finished, files, staging, settings.num_workers)


def _open_scratch(local: str, settings: BuildSettings, suffix: str = '') -> Scratch:
    return Scratch(os.path.join(local, f'source{suffix}'), settings.scratch_bytes)


def _name(final: str) -> str:
    """NAME/CONFIG/VERSION."""
    return '/'.join(final.rstrip('/').split('/')[-3:])
