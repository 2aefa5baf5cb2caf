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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    Args:
        final: Folder of the data set, local or a `gs://` URL.
        source: Folder of the source.
        settings: Settings of the build.
        write_info: Adds TFDS' own files before the publication.
        limit: Largest number of records in each split; None for all.
        overwrite: Whether to replace another data set in the folder.
        beam_options: Options of Apache Beam, which writes if it has options or a runner.
        beam_runner: Runner of Apache Beam.

    Raises:
        ValueError: For faults of the source, if more rows are bad than the settings allow, and for
            one of several processes of a job that should overwrite.
        FileExistsError: If another build was completed here meanwhile.
        OSError: If a storage is out of reach, or the disk is too small.
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
    # Next to all data sets: `final` is NAME/CONFIG/VERSION in a folder of them.
    local = choose_folder(schema.NAME, f'{final}/../../..', settings.scratch_dir)
    source_dir = os.path.join(local, 'source')
    with _removing_new_empty_folders(final, source_dir), locks.hold(final) as lock:
        # Looked for under the lock: another process may just have built it.
        existing = folder.find_build()
        if existing is not None and not overwrite:
            # Of a data set without an ID, nothing says which files are its own.
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
        staging_dir = folder.files.staging(local)
        with locks.temporary_folder(staging_dir, 'info-') as info_folder:
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
    new_folders = set[pathlib.Path]()
    for place in places:
        if not storage.local_path(place):
            continue
        folder = pathlib.Path(place).absolute()
        while not folder.exists():
            new_folders.add(folder)
            folder = folder.parent
    try:
        yield
    finally:
        # In this order sub-folders come first.
        for folder in sorted(new_folders, reverse=True):
            # Fails for one that is not empty.
            with contextlib.suppress(OSError):
                folder.rmdir()


def _choose_engine(
    settings: BuildSettings,
    scratch: Scratch,
    local: str,
    beam_options: 'PipelineOptions | None',
    beam_runner: 'str | PipelineRunner | None',
) -> Engine:
    """Returns what writes the shards: workers on this machine, or Apache Beam."""
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
    """Writes the unfinished shards of a plan; returns the results of all its shards, sorted.

    Raises a ValueError as soon as too many rows are bad, and if no record is left for training;
    an OSError if the shards do not fit on the disk.
    """
    results = finished.load(plan.tasks)
    written = {(result.split, result.index) for result in results}
    missing_tasks = []
    for task in plan.tasks:
        if (task.split, task.index) not in written:
            missing_tasks.append(task)
    missing_bytes = sum(task.num_bytes for task in missing_tasks)
    # Before the first shard: hours later, the other shards would have been written in vain.
    finished.folder.check_space(missing_bytes)
    dropped = _all_dropped(plan, results)
    with Progress('Writing shards', plan.num_bytes, 'B', {'shards': len(plan.tasks)}) as progress:
        written_bytes = sum(result.num_bytes for result in results)
        progress.skip(written_bytes, shards=len(results), dropped=dropped.num_latents)
        for task, result in engine(missing_tasks, finished, progress):
            _add_non_finite(dropped, result)
            # With each shard, so that a bad source stops the build early.
            dropped.check_bad(task.source)
            results.append(result)
    assert len(results) == len(plan.tasks)  # else the data set would lack shards
    num_train = 0
    for result in results:
        if result.split == schema.TRAIN:
            num_train += result.num_records
    # The plan has train records, but all of them may have been dropped while shards were written.
    if not num_train:
        raise ValueError(
            f'{plan.tasks[0].source}: no record is left for the train split: no row is finite.'
        )
    # Shards are finished in any order, and statistics of floats depend on the order of the sum.
    return sorted(results, key=lambda result: (result.split, result.index))


def _all_dropped(plan: BuildPlan, results: Sequence[ShardResult]) -> DropCounts:
    """Returns the rows left out while planning, and while writing these shards."""
    # Of a copy, because what shards drop is added more than once: here and after all are written.
    dropped = copy.deepcopy(plan.dropped)
    for result in results:
        _add_non_finite(dropped, result)
    return dropped


def _add_non_finite(dropped: DropCounts, result: ShardResult) -> None:
    """Counts the rows that were left out while a shard was written."""
    shard = result.statistics
    dropped.add(schema.NON_FINITE, shard.non_finite, shard.non_finite_keys)


def describe_dataset(plan: BuildPlan, results: Sequence[ShardResult], folder: str) -> BuiltDataset:
    """Joins the results of all shards, and writes chunk indexes and columns into a local folder.

    Returns what TFDS' own files and the report are made of. `results` are those of all shards of
    the plan, as `write_shards` sorts them.
    """
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
    merged_statistics = {}
    for split, shards in splits.items():
        merged_statistics[split] = ShardStatistics.merge([shard.statistics for shard in shards])
    dropped = _all_dropped(plan, results)
    return BuiltDataset(
        plan=plan,
        splits=splits,
        statistics=merged_statistics,
        dropped=dropped,
        metadata=_make_metadata(plan, merged_statistics[schema.TRAIN], dropped),
        folder=folder,
    )


def _write_latents_column(
    plan: BuildPlan, splits: dict[str, list[ShardResult]], folder: str
) -> None:
    """Describes latents that stay in the files of the source as a column, in a local folder."""
    # Files of which no row is left are not named: readers would have to reach them.
    used_files = set[InPlaceFile]()
    for shard in itertools.chain.from_iterable(splits.values()):
        for file, rows in shard.sources:
            if len(rows):
                used_files.add(file)
    files = sorted(used_files, key=lambda file: file.path)
    number_of_file = {file: number for number, file in enumerate(files)}
    crc32c = {}
    for split, shards in splits.items():
        places = _list_places(shards, number_of_file)
        crc32c[split] = columns.array_crc32c(places)
        name = columns.column_file_name(schema.LATENTS, split, plan.build)
        np.save(os.path.join(folder, name), places)
    # Of a file of which only the head was read, no row has been compared with a checksum.
    unchecked: tuple[int, ...] = ()
    if plan.tasks[0].reads_heads:
        unchecked = tuple(range(len(files)))
    column = InPlaceColumn(
        schema.LATENTS, *plan.latents, tuple(files), plan.build, crc32c, unchecked
    )
    columns.write_columns(folder, {schema.LATENTS: column}, plan.build)


def _list_places(
    shards: Sequence[ShardResult], number_of_file: Mapping[InPlaceFile, int]
) -> np.ndarray:
    """Returns where the latents of each record of some shards lie, uint32 `(n, 3)`.

    A row has the number of the file, the row in it, and the CRC-32C of the latents, or 0 if they
    were not read.
    """
    places = [np.empty((0, 3), '<u4')]
    for shard in shards:
        for file, rows in shard.sources:
            if len(rows):
                places.append(np.insert(rows, 0, number_of_file[file], axis=1))
    return np.concatenate(places)


def _make_metadata(plan: BuildPlan, train: ShardStatistics, dropped: DropCounts) -> dict:
    """Returns the metadata of `dataset_info`, with statistics of the train split."""
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
    for name in schema.META_RIGHTS:
        if name in plan.settings:
            metadata[name] = plan.settings[name]
    metadata[schema.META_SETTINGS] = plan.settings
    return metadata


def _make_report(final: str, dataset: BuiltDataset) -> BuildReport:
    """Returns the report of a data set, which is called as its last three folders are."""
    last_folders = final.rstrip('/').split('/')[-3:]  # NAME, CONFIG and VERSION
    sizes = {}
    for split, shards in dataset.splits.items():
        sizes[split] = [(shard.num_records, shard.num_bytes) for shard in shards]
    return BuildReport(
        '/'.join(last_folders),
        shards=sizes,
        statistics=dataset.statistics,
        dropped=dataset.dropped,
        metadata=dataset.metadata,
        in_place=dataset.plan.tasks[0].in_place,
    )


def _publish(folder: DataFolder, dataset: BuiltDataset, overwrite: bool) -> None:
    """Stores the files next to the shards, then makes all of them the data set."""
    build = dataset.plan.build
    info_folder = dataset.folder
    states = _list_shards(dataset)
    local_paths = {}
    for name in os.listdir(info_folder):
        local_paths[name] = os.path.join(info_folder, name)
        states[name] = file_state.compute_state(local_paths[name])
    manifest.write_checksums(info_folder, states, build)
    # The checksums name all files but their own; it is stored after those that it names.
    checksums = schema.of_build(schema.CHECKSUMS_FILE, build)
    local_paths[checksums] = os.path.join(info_folder, checksums)
    states[checksums] = file_state.compute_state(local_paths[checksums])
    # Files with the ID of the build disturb no other data set; those without replace its own.
    replacing = {}
    for name, path in local_paths.items():
        if schema.build_of(name) == build:
            folder.files.store(path, name, states[name].crc32c)
        else:
            replacing[name] = path
    folder.publish(build, states, replacing, overwrite)


def _list_shards(dataset: BuiltDataset) -> dict[str, file_state.FileState]:
    """Returns the states of the shards' files by their names."""
    # The tasks know the names, the results what became of them.
    names = {(task.split, task.index): task.filename for task in dataset.plan.tasks}
    states = {}
    for shards in dataset.splits.values():
        for shard in shards:
            name = names[shard.split, shard.index]
            states[name] = file_state.FileState(shard.num_bytes, shard.crc32c)
    return states
