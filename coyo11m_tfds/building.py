"""One build from beginning to end: in one process of many, alone in its place, never starting over.

    options = BuildOptions(source='gs://bucket/coyo11m', settings=PlanSettings())
    build('OUT/coyo11m_tfds/latents/1.0.0', options, shard_filename, write_info)

While it goes on, everything is in a folder beside the final one, `1.0.0.building`: finished shards
with their records, which a later call resumes from. When all is there, it becomes the final folder;
see `build_folder`.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from coyo11m_tfds import job, json_digest, manifest, prepare, report, schema, shard_pool, sources
from coyo11m_tfds.build_folder import BuildFolder
from coyo11m_tfds.finished import FinishedShards
from coyo11m_tfds.plan import Plan, PlanSettings, make_plan
from coyo11m_tfds.shard_writer import ShardResult, ShardTask
from coyo11m_tfds.storage import build_lock, held_folder, source_files
from coyo11m_tfds.storage.destination import Destination, FileState, file_state
from coyo11m_tfds.storage.scratch import Scratch, user_cache

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners import PipelineRunner


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """How to build.

    Attributes:
        source: folder of the source: local, `gs://` or `hf://`.
        settings: what the records and shards shall be.
        num_workers: processes that write; 0 for `COYO11M_NUM_PROC`, else all cores.
        scratch_dir: local folder for stores and for files on their way; '' for one beside a local
            data set, else in the user's cache.
        scratch_bytes: most bytes of remote source files that lie there at a time.
        wait_seconds: how long to wait for another process that builds the same.
        overwrite: replace the data set that is there, when the new one is complete.
        use_beam: write with Apache Beam.
        beam_options: of the pipeline.
        beam_runner: of the pipeline, where the options name none.
    """

    source: str
    settings: PlanSettings
    num_workers: int = 0
    scratch_dir: str = ''
    scratch_bytes: int = 32 * 10**9
    wait_seconds: float = 24 * 3600
    overwrite: bool = False
    use_beam: bool = False
    beam_options: 'PipelineOptions | None' = None
    beam_runner: 'str | PipelineRunner | None' = None


@dataclasses.dataclass(frozen=True)
class Built:
    """What the shards have become; those of each split by index."""

    plan: Plan
    splits: dict[str, list[ShardResult]]
    metadata: dict


def build(
    final: str,
    options: BuildOptions,
    shard_filename: Callable[[str, int, int], str],
    write_info: Callable[[Built, str], None],
) -> bool:
    """Sees to it that the data set is complete in `final`.

    In a job of several processes the first builds, and the others wait. So does a second build that
    is started while one is going on.

    Args:
        final: folder of the data set, `.../NAME/CONFIG/VERSION`, local or `gs://`.
        options: how to build.
        shard_filename: (split, index, number of shards) -> name of the file.
        write_info: writes TFDS' own files into the local folder that it is given.

    Returns:
        Whether this call built it. It did not if the data set was there, if another process built
        it, or if an earlier build only had to be moved into its place.

    Raises:
        ValueError: the source or an option is bad.
        OSError: a file cannot be read or written.
        TimeoutError: another process has not finished in time.
        RuntimeError: a worker died, the first process of the job failed, or another builder has
            taken the place over.
    """
    if options.settings.in_place and source_files.is_remote(final):
        raise ValueError(
            f"{final}: with latents='in_place' the data set is local, as its source is. Choose a "
            "local --data_dir, or set latents='records'."
        )
    if job.process_index():
        _wait_for_first_process(final, options)
        return False
    with build_lock.hold(final, options.wait_seconds) as lock:
        folder = BuildFolder(final, lock.check)
        with folder.telling_failure():
            finished = folder.finish()
            if folder.is_complete() and not options.overwrite:
                folder.tidy()
                return False
            start = time.monotonic()
            local = scratch_folder(final, options.scratch_dir)
            scratch = Scratch(os.path.join(local, 'source'), options.scratch_bytes)
            source = sources.find(options.source)
            plan = make_plan(source, options.settings, scratch, local, shard_filename)
            digest = json_digest.sha256([task.fingerprint for task in plan.tasks])
            if digest == finished:  # the interrupted build was this one
                return False
            folder.begin()
            engine = _locked(_make_engine(folder.work, local, scratch, options), lock)
            results = prepare.write_shards(plan, folder.work, engine)
            column = options.settings.caption_column
            facts, files = _write_metadata(
                _name(final), folder.work, plan, results, column, local, write_info
            )
            folder.commit(files, digest)
            print(report.summary(facts, seconds=time.monotonic() - start))
            return True


def scratch_folder(final: str, chosen: str = '') -> str:
    """The local folder for stores and downloads, made if it is not there; see `BuildOptions`."""
    if not chosen and not source_files.is_remote(final):
        chosen = str(pathlib.Path(final).parents[2] / f'.{schema.NAME}')
    folder = os.path.expanduser(chosen) or user_cache(schema.NAME)
    os.makedirs(folder, exist_ok=True)
    return folder


def _wait_for_first_process(final: str, options: BuildOptions) -> None:
    if options.overwrite:
        raise ValueError(
            f'{final}: process {job.process_index()} of the job was told to overwrite it, while '
            'others may read it. Overwrite it with one process, then start the job.'
        )
    folder = BuildFolder(final)
    build_lock.wait_for(folder.is_complete, final, options.wait_seconds, folder.failure)


def _write_metadata(
    name: str,
    work: Destination,
    plan: Plan,
    results: Sequence[ShardResult],
    caption_column: str,
    local: str,
    write_info: Callable[[Built, str], None],
) -> tuple[report.BuildFacts, dict[str, FileState]]:
    """Stores what lies beside the shards.

    Returns:
        What there is to report, and the state of all files of the data set by name.
    """
    names = {(task.split, task.index): task.filename for task in plan.tasks}
    files = {names[r.split, r.index]: FileState(r.num_bytes, r.crc32c) for r in results}
    dropped = prepare.count_dropped(plan, results)
    metadata = prepare.make_metadata(plan, results, dropped, caption_column)
    facts = prepare.make_facts(name, results, dropped, metadata)
    with held_folder.make(work.staging(local), 'info-') as made:
        prepare.write_chunk_indexes(results, made)
        prepare.write_columns(results, made)
        write_info(Built(plan, prepare.by_split(results), metadata), made)
        report.write(facts, made)
        files |= {name: file_state(os.path.join(made, name)) for name in os.listdir(made)}
        manifest.write(made, files)
        for file_name in sorted(os.listdir(made)):
            path = os.path.join(made, file_name)
            files[file_name] = file_state(path)
            work.put(path, f'{schema.BUILD_DATA}/{file_name}', files[file_name].crc32c)
    return facts, files


def _make_engine(
    work: Destination, folder: str, scratch: Scratch, options: BuildOptions
) -> prepare.Engine:
    if options.use_beam:
        from coyo11m_tfds import beam_engine  # Beam takes 2 s to import

        settings = beam_engine.ScratchSettings(options.scratch_dir, options.scratch_bytes)
        return lambda tasks, finished: beam_engine.write_shards(
            tasks, finished, work, settings, options.beam_options, options.beam_runner
        )

    def write_shards(
        tasks: Sequence[ShardTask], finished: FinishedShards
    ) -> Iterator[tuple[ShardTask, ShardResult]]:
        with held_folder.make(folder, 'staging-') as fallback:
            staging = work.staging(fallback)
            yield from shard_pool.write_shards(
                tasks, finished, scratch, staging, options.num_workers
            )

    return write_shards


def _locked(engine: prepare.Engine, lock: build_lock.Lock) -> prepare.Engine:
    """The engine, stopped when another process has taken the lock over."""

    def write_shards(
        tasks: Sequence[ShardTask], finished: FinishedShards
    ) -> Iterator[tuple[ShardTask, ShardResult]]:
        with contextlib.closing(engine(tasks, finished)) as outcomes:
            for outcome in outcomes:
                lock.check()
                yield outcome

    return write_shards


def _name(final: str) -> str:
    """NAME/CONFIG/VERSION."""
    return '/'.join(final.rstrip('/').split('/')[-3:])
