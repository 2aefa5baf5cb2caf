"""One build from beginning to end: one at a time in a place, resumable.

    with driver.build('OUT/coyo11m_tfds/latents/1.0.0', 'gs://bucket/coyo11m', settings) as built:
        if built:                           # None if the data set was there
            write_info(built, built.folder)     # TFDS' own files

A build is named by the digest of its plan. Its shards go straight into the folder of the data set,
under names with that ID, and their records into a sub-folder, from which a later call resumes. They
become the data set when its description is written; see `data_folder`.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coyo11m_tfds import schema
from coyo11m_tfds.convert import in_place, local_runner, run_plan
from coyo11m_tfds.convert.data_folder import DataFolder
from coyo11m_tfds.convert.finished_shards import FinishedShards
from coyo11m_tfds.convert.plan import Plan, make_plan
from coyo11m_tfds.convert.settings import BuildSettings
from coyo11m_tfds.convert.tasks import ShardResult, ShardTask
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.process import job
from coyo11m_tfds.source import location
from coyo11m_tfds.storage import file_state, locks, scratch, source_files
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

    In a job of several processes the first builds and the others wait for it. A second build that
    is started while one is running waits for it, too.

    Args:
        final: folder of the data set, `.../NAME/CONFIG/VERSION`, local or `gs://`.
        source: folder of the source, instead of that of the settings.
        settings: what to make, and how.
        limit: keep only so many records of each split.
        overwrite: replace an existing data set as soon as the new one is complete. One of the same
            plan is written anew.
        beam: write with Apache Beam, not with processes of this machine.

    Yields:
        What this call has made; the block adds TFDS' own files to its folder. None if there was
        nothing to make: the data set was there, or another process built it.

    Raises:
        ValueError: the source or an option is bad.
        OSError: a file cannot be read or written.
        FileExistsError: another build was completed there meanwhile.
        TimeoutError: another process has not finished in time.
        RuntimeError: a worker died, or the first process of the job failed.
    """
    folder = DataFolder(final)
    if job.process_index():
        _check_may_wait(final, overwrite)
        locks.wait_for(final, folder.has_data_set, settings.wait_seconds)
        yield None
        return
    local = scratch.choose_folder(schema.NAME, f'{final}/../../..', settings.scratch_dir)
    with (
        _leaving_no_empty_folders(final, f'{local}/source'),
        locks.hold(final, settings.wait_seconds) as lock,
    ):
        found = folder.find_build()
        if found is not None and not overwrite:
            folder.tidy(found)
            yield None
            return
        start = time.monotonic()
        folder.files.sweep()
        os.makedirs(local, exist_ok=True)
        plan = _make_plan(final, source, settings, local, limit)
        finished = FinishedShards(folder.files, plan.build)
        finished.begin(plan.settings)
        results = run_plan.write_shards(plan, finished, _make_engine(local, settings, beam))
        dropped = run_plan.count_dropped(plan, results)
        metadata = run_plan.make_metadata(plan, results, dropped, settings.caption_column)
        report = run_plan.make_report(_name(final), results, dropped, metadata)
        with locks.temporary_folder(folder.files.staging(local), 'info-') as made:
            run_plan.write_chunk_indexes(results, made, plan.build)
            run_plan.write_columns(results, made, plan.build)
            yield Built(plan, run_plan.by_split(results), metadata, made)
            report.write(made)
            _publish(folder, plan, results, made, overwrite)
        if lock.is_ours():  # else another build may be under way, and what it has written stays
            folder.remove_others(plan.build)
    print(report.summary(final, seconds=time.monotonic() - start))


def _make_plan(
    final: str, source: str, settings: BuildSettings, local: str, limit: int | None
) -> Plan:
    found = location.find(source)
    if settings.in_place:
        in_place.check_within_reach(found.latent_files[0], final)
    return make_plan(found, settings, _open_scratch(local, settings), local, limit)


@contextlib.contextmanager
def _leaving_no_empty_folders(*places: str) -> Iterator[None]:
    """Removes at its end local folders, and those above them, that are new and empty then."""
    paths = [pathlib.Path(p).absolute() for p in places if not source_files.is_remote(p)]
    new = {folder for path in paths for folder in (path, *path.parents) if not folder.exists()}
    try:
        yield
    finally:
        for folder in sorted(new, reverse=True):  # sub-folders first
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _check_may_wait(final: str, overwrite: bool) -> None:
    if overwrite:
        raise ValueError(
            f'{final}: process {job.process_index()} of the job was told to overwrite it, while '
            'others may read it. Overwrite it with one process, then start the job.'
        )


def _publish(
    folder: DataFolder, plan: Plan, results: Sequence[ShardResult], made: str, overwrite: bool
) -> None:
    """Stores what lies beside the shards, then makes all of it the data set."""
    names = {(task.split, task.index): task.filename for task in plan.tasks}
    files = {names[r.split, r.index]: FileState(r.num_bytes, r.crc32c) for r in results}

    def store(name: str) -> None:
        files[name] = file_state.of_file(os.path.join(made, name))
        folder.files.put(os.path.join(made, name), name, files[name].crc32c)

    without_id = {}
    for name in sorted(os.listdir(made)):
        if schema.build_of(name) == plan.build:
            store(name)
        else:
            without_id[name] = os.path.join(made, name)
            files[name] = file_state.of_file(without_id[name])
    manifest.write(made, files, plan.build)
    store(schema.of_build(schema.CHECKSUMS_FILE, plan.build))
    folder.publish(plan.build, files, without_id, overwrite)


def _make_engine(local: str, settings: BuildSettings, beam: Beam | None) -> run_plan.Engine:
    """The engine; `local` is the scratch folder of this machine."""
    if beam:
        from coyo11m_tfds.convert import beam_runner

        of_worker = beam_runner.ScratchSettings(settings.scratch_dir, settings.scratch_bytes)
        return lambda tasks, finished: beam_runner.write_shards(
            tasks, finished, of_worker, beam.options, beam.runner
        )

    def write_shards(tasks: Sequence[ShardTask], finished: FinishedShards) -> run_plan.Outcomes:
        files = _open_scratch(local, settings)
        with locks.temporary_folder(finished.folder.staging(local), 'staging-') as staging:
            yield from local_runner.write_shards(
                tasks, finished, files, staging, settings.num_workers
            )

    return write_shards


def _open_scratch(local: str, settings: BuildSettings) -> Scratch:
    return Scratch(os.path.join(local, 'source'), settings.scratch_bytes)


def _name(final: str) -> str:
    """NAME/CONFIG/VERSION."""
    return '/'.join(final.rstrip('/').split('/')[-3:])
