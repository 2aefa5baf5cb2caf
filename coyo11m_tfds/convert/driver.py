"""Runs one build from start to end. A build can resume; one runs at a time in a folder.

Any number of processes and interruptions gives the same files, because a shard is a function of its
task. On a fast disk, one core writes 30,000 records (740 MB) a second, with statistics and
checksums.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.convert.data_folder import DataFolder, FinishedShards, sub_folder
from coyo11m_tfds.convert.local_runner import write_with_workers
from coyo11m_tfds.convert.plan import BuildPlan, make_plan
from coyo11m_tfds.convert.tasks import ShardResult, ShardTask, check_within_reach
from coyo11m_tfds.dataset import chunk_index, columns, manifest
from coyo11m_tfds.dataset.columns import InPlaceColumn, InPlaceFile
from coyo11m_tfds.process import command_line, job
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.report import statistics
from coyo11m_tfds.report.page import BuildReport
from coyo11m_tfds.report.statistics import DropCounts, ShardStatistics
from coyo11m_tfds.source import formats, source_folder
from coyo11m_tfds.storage import file_state, locks
from coyo11m_tfds.storage.scratch import Scratch, choose_folder
from coyo11m_tfds.storage.stored_file import StoredFile

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners import PipelineRunner

# Writes tasks and their records, counts them, and yields each when it is stored.
Engine = Callable[
    [Sequence[ShardTask], FinishedShards, Progress], Iterator[tuple[ShardTask, ShardResult]]
]


@dataclasses.dataclass(frozen=True)
class BuiltDataset:
    """All shards of a data set, and a local folder with the files that go next to them."""

    plan: BuildPlan
    splits: dict[str, list[ShardResult]]  # by index of the shards
    statistics: dict[str, ShardStatistics]
    dropped: DropCounts
    metadata: dict
    folder: str


def build(
    final: str,
    source: str,
    settings: BuildSettings,
    write_info: Callable[[BuiltDataset], None],
    *,
    limit: int | None = None,
    overwrite: bool = False,
    beam_options: 'PipelineOptions | None' = None,
    beam_runner: 'str | PipelineRunner | None' = None,
) -> bool:
    """Makes the data set in `final` complete; returns whether this process has built it.

    `write_info` adds TFDS' own files before the publication. `limit` is the largest number of
    records in each split. Apache Beam writes if it has options or a runner.
    """
    folder = DataFolder(final)
    # The processes of a job share the folder, so that one of them has to build.
    if index := job.process_index():
        if overwrite:
            raise ValueError(
                f'{final}: process {index} of the job cannot overwrite it, because others may '
                'read it. Overwrite it with one process, then start the job.'
            )
        locks.wait_for(final, lambda: folder.find_build() is not None)
        return False
    local = choose_folder(schema.NAME, f'{final}/../../..', settings.scratch_dir)
    source_dir = os.path.join(local, 'source')
    with _removing_new_empty_folders(final, source_dir), locks.hold(final) as lock:
        # Looked for under the lock: another process may just have built it.
        existing = folder.find_build()
        if existing is not None and not overwrite:
            if existing:
                folder.remove_others(existing, resumable_too=False)
            return False
        start = time.monotonic()
        # Before planning measures and fills the disk, the leftovers of killed builds go.
        folder.files.sweep(sub_folder(''))
        os.makedirs(local, exist_ok=True)
        scratch = Scratch(source_dir)
        files = source_folder.find_source(source)
        if settings.in_place:
            check_within_reach(files.latent_files[0], final)
        if settings.reads_heads:
            _check_has_head(files.latent_files[0])
        plan = make_plan(files, settings, scratch, local, limit)
        finished = FinishedShards(folder.files, plan.build)
        # Before the first shard, so that after a kill its files can be attributed to this build.
        finished.begin(plan.settings)
        engine = _choose_engine(settings, scratch, local, beam_options, beam_runner)
        results = write_shards(plan, finished, engine)
        with locks.temporary_folder(folder.files.staging(local), 'info-') as info_folder:
            dataset = describe_dataset(plan, results, info_folder)
            write_info(dataset)
            # The report is a file of the data set, so that its checksum is recorded, too.
            report = _make_report(final, dataset)
            report.write(info_folder)
            _publish(folder, dataset, overwrite)
        # Without the lock another build may be under way, and what it has written stays.
        if lock.is_ours():
            folder.remove_others(plan.build)
    summary = report.summary(final, seconds=time.monotonic() - start)
    command_line.print_lines(*summary.split('\n'))
    return True


def _check_has_head(file: StoredFile) -> None:
    """Raises a ValueError for a file whose latents cannot be left unread."""
    problem = ''
    if file.local_path:
        # Nothing would notice damage to a local file; every other storage keeps checksums.
        problem = 'its storage keeps no checksum of the whole file, which rows are trusted to'
    elif not formats.format_of(file).has_heads:
        problem = 'its samples lie one after the other, so that their keys are all over the file'
    if problem:
        raise ValueError(
            f"{file.path}: read_latents='heads' leaves latents unread, but {problem}. Leave "
            'read_latents out.'
        )


@contextlib.contextmanager
def _removing_new_empty_folders(*places: str) -> Iterator[None]:
    """Removes at its end the local folders, and folders above them, that are new and empty."""
    paths = [pathlib.Path(p).absolute() for p in places if storage.local_path(p)]
    new = {folder for path in paths for folder in (path, *path.parents) if not folder.exists()}
    try:
        yield
    finally:
        # In this order sub-folders come first.
        for folder in sorted(new, reverse=True):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _choose_engine(
    settings: BuildSettings,
    scratch: Scratch,
    local: str,
    beam_options: 'PipelineOptions | None',
    beam_runner: 'str | PipelineRunner | None',
) -> Engine:
    if not (beam_options or beam_runner):
        return functools.partial(
            write_with_workers, scratch=scratch, local=local, num_workers=settings.num_workers
        )
    # Here, because Beam takes seconds to import.
    from coyo11m_tfds.convert.beam_runner import write_with_beam

    return functools.partial(
        write_with_beam, scratch_dir=settings.scratch_dir, options=beam_options, runner=beam_runner
    )


def write_shards(plan: BuildPlan, finished: FinishedShards, engine: Engine) -> list[ShardResult]:
    """Writes the unfinished shards of a plan; returns the results of all its shards, sorted."""
    results = finished.load(plan.tasks)
    shards = {(result.split, result.index) for result in results}
    missing = [task for task in plan.tasks if (task.split, task.index) not in shards]
    # Before the first shard: hours later, the other shards would have been written in vain.
    finished.folder.check_space(sum(task.num_bytes for task in missing))
    dropped = _all_dropped(plan, results)
    with Progress('Writing shards', plan.num_bytes, 'B', {'shards': len(plan.tasks)}) as progress:
        progress.skip(
            sum(result.num_bytes for result in results),
            shards=len(results),
            dropped=dropped.num_latents,
        )
        for task, result in engine(missing, finished, progress):
            _add_non_finite(dropped, result)
            # With each shard, so that a bad source stops the build early.
            dropped.check_bad(task.source)
            results.append(result)
    assert len(results) == len(plan.tasks)  # else the data set would lack shards
    if not any(result.num_records for result in results if result.split == schema.TRAIN):
        raise ValueError(
            f'{plan.tasks[0].source}: no record is left for the train split: no row is finite.'
        )
    # Shards are finished in any order, and statistics of floats depend on the order of the sum.
    return sorted(results, key=lambda result: (result.split, result.index))


def _all_dropped(plan: BuildPlan, results: Sequence[ShardResult]) -> DropCounts:
    """The rows left out while planning, and while writing these shards."""
    dropped = copy.deepcopy(plan.dropped)
    for result in results:
        _add_non_finite(dropped, result)
    return dropped


def _add_non_finite(dropped: DropCounts, result: ShardResult) -> None:
    shard = result.statistics
    dropped.add(schema.NON_FINITE, shard.non_finite, shard.non_finite_keys)


def describe_dataset(plan: BuildPlan, results: Sequence[ShardResult], folder: str) -> BuiltDataset:
    """Joins the results of all shards, and writes chunk indexes and columns into a local folder."""
    splits: dict[str, list[ShardResult]] = {}
    for result in results:
        splits.setdefault(result.split, []).append(result)
    for split, shards in splits.items():
        chunk_index.write_chunk_index(
            folder,
            split,
            shard_lengths=[shard.num_records for shard in shards],
            entries=[shard.index_entries for shard in shards],
            shard_sizes=[shard.num_bytes for shard in shards],
            build=plan.build,
        )
    if plan.tasks[0].in_place:
        _write_latents_column(plan, splits, folder)
    joined = {
        split: ShardStatistics.merge([shard.statistics for shard in shards])
        for split, shards in splits.items()
    }
    dropped = _all_dropped(plan, results)
    metadata = _make_metadata(plan, joined[schema.TRAIN], dropped)
    return BuiltDataset(plan, splits, joined, dropped, metadata, folder)


def _write_latents_column(
    plan: BuildPlan, splits: dict[str, list[ShardResult]], folder: str
) -> None:
    """Describes latents that stay in the files of the source as a column, in a local folder."""
    # Files of which no row is left are not named: readers would have to reach them.
    used_files = set[InPlaceFile]()
    for shard in itertools.chain.from_iterable(splits.values()):
        used_files.update(file for file, rows in shard.sources if len(rows))
    files = sorted(used_files, key=lambda file: file.path)
    number_of_file = {file: number for number, file in enumerate(files)}
    crc32c = {}
    for split, shards in splits.items():
        # Of each record the number of the file, the row there and the CRC-32C of its latents, or 0.
        places = [np.empty((0, 3), '<u4')]
        for shard in shards:
            for file, rows in shard.sources:
                if len(rows):
                    places.append(np.insert(rows, 0, number_of_file[file], axis=1))
        array = np.concatenate(places)
        crc32c[split] = columns.array_crc32c(array)
        name = columns.column_file_name(schema.LATENTS, split, plan.build)
        np.save(os.path.join(folder, name), array)
    unchecked: tuple[int, ...] = ()
    if plan.tasks[0].reads_heads:
        unchecked = tuple(range(len(files)))
    column = InPlaceColumn(
        schema.LATENTS, *plan.latents, tuple(files), plan.build, crc32c, unchecked
    )
    columns.write_columns(folder, {schema.LATENTS: column}, plan.build)


def _make_metadata(plan: BuildPlan, train: ShardStatistics, dropped: DropCounts) -> dict:
    """The metadata of `dataset_info`, with statistics of the train split."""
    mean, std = statistics.mean_and_std(train.latent_moments)
    metadata: dict[str, Any] = {
        schema.META_LATENT_MEAN: mean,
        schema.META_LATENT_STD: std,
        schema.META_LATENT_DTYPE: plan.latents[0],
        schema.META_CAPTION_COLUMN: plan.caption_column,
        schema.META_DROPPED: dropped.counts,
        schema.META_SOURCE: plan.source,
        schema.META_SOURCE_FINGERPRINT: plan.source_fingerprint,
        schema.META_BUILD: plan.build,
    }
    if plan.tasks[0].reads_heads:
        metadata[schema.META_LATENT_ROWS] = train.num_read
    if plan.text and plan.text.vocabulary:
        metadata[schema.META_TEXT_ENCODER] = plan.text.encoder
        metadata[schema.META_TEXT_VOCABULARY] = plan.text.vocabulary
        if plan.text.words:
            metadata[schema.META_TEXT_WORDS] = plan.text.words
    elif plan.text:
        mean, std = statistics.mean_and_std(train.text_moments)
        metadata |= {
            schema.META_TEXT_MEAN: mean,
            schema.META_TEXT_STD: std,
            schema.META_TEXT_ENCODER: plan.text.encoder,
            schema.META_TEXT_DIM: plan.text.dim,
        }
    if plan.vae:
        metadata[schema.META_VAE] = plan.vae
    if scale := plan.tasks[0].latent_scale:
        metadata[schema.META_LATENT_SCALE] = list(scale)
    if moments := plan.tasks[0].moments:
        metadata[schema.META_MOMENTS] = moments
    rights = {name: plan.settings[name] for name in schema.META_RIGHTS if name in plan.settings}
    return metadata | rights | {schema.META_SETTINGS: plan.settings}


def _make_report(final: str, dataset: BuiltDataset) -> BuildReport:
    return BuildReport(
        '/'.join(final.rstrip('/').split('/')[-3:]),  # NAME/CONFIG/VERSION
        shards={
            split: [(shard.num_records, shard.num_bytes) for shard in shards]
            for split, shards in dataset.splits.items()
        },
        statistics=dataset.statistics,
        dropped=dataset.dropped,
        metadata=dataset.metadata,
        in_place=dataset.plan.tasks[0].in_place,
    )


def _publish(folder: DataFolder, dataset: BuiltDataset, overwrite: bool) -> None:
    """Stores the files next to the shards, then makes all of them the data set."""
    build, info_folder = dataset.plan.build, dataset.folder
    files = _list_shards(dataset)
    local = {name: os.path.join(info_folder, name) for name in os.listdir(info_folder)}
    for name, path in local.items():
        files[name] = file_state.compute_state(path)
    manifest.write_checksums(info_folder, files, build)
    # The checksums name all files but their own; it is stored after those that it names.
    checksums = schema.of_build(schema.CHECKSUMS_FILE, build)
    local[checksums] = os.path.join(info_folder, checksums)
    files[checksums] = file_state.compute_state(local[checksums])
    # Files with the ID of the build disturb no other data set; those without replace its own.
    replacing = dict[str, str]()
    for name, path in local.items():
        if schema.build_of(name) == build:
            folder.files.store(path, name, files[name].crc32c)
        else:
            replacing[name] = path
    folder.publish(build, files, replacing, overwrite)


def _list_shards(dataset: BuiltDataset) -> dict[str, file_state.FileState]:
    """Returns the states of the shards' files by their names."""
    results = dict[tuple[str, int], ShardResult]()
    for result in itertools.chain.from_iterable(dataset.splits.values()):
        results[result.split, result.index] = result
    files = dict[str, file_state.FileState]()
    for task in dataset.plan.tasks:
        result = results[task.split, task.index]
        files[task.filename] = file_state.FileState(result.num_bytes, result.crc32c)
    return files
