"""Carries out a plan: writes the shards that are missing, then index and metadata.

    plan = make_plan(...)
    results = write_shards(plan, FinishedShards(folder, plan.build), engine)
    dropped = count_dropped(plan, results)
    write_chunk_indexes(results, local_folder, plan.build)
    metadata = make_metadata(plan, results, dropped, caption_column)

The files depend neither on the number of processes nor on interruptions: a shard is a function of
its task, and results are joined in the order of the shards. One core writes 30,000 records (740 MB)
a second, with statistics and checksums, if the disk can.
"""

import copy
import os
import pathlib
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.convert import in_place
from coyo11m_tfds.convert.finished_shards import FinishedShards
from coyo11m_tfds.convert.plan import Plan
from coyo11m_tfds.convert.tasks import ShardResult, ShardTask
from coyo11m_tfds.dataset import chunk_index
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.report import statistics
from coyo11m_tfds.report.page import Report
from coyo11m_tfds.report.statistics import Dropped
from coyo11m_tfds.storage.destination import Destination

# Writes tasks and their records, and yields each when it is stored: of `local_runner` or
# `beam_runner`.
Outcomes = Generator[tuple[ShardTask, ShardResult], None, None]
Engine = Callable[[Sequence[ShardTask], FinishedShards], Outcomes]


def write_shards(plan: Plan, finished: FinishedShards, engine: Engine) -> list[ShardResult]:
    """Writes the shards of a plan that are not finished yet.

    Args:
        plan: what to write.
        finished: where shards and records go; they stay there if it is interrupted.
        engine: writes them.

    Returns:
        The results of all shards in the order train, validation, and by shard index.

    Raises:
        ValueError: too much of the source is bad, or nothing is left of it; or see
            `shard_writer.write_shard`.
        OSError: a file cannot be fetched, written or stored; there is not enough space on the disk.
        RuntimeError: a process died.
    """
    results = finished.load(plan.tasks)
    found = {(result.split, result.index) for result in results}
    missing = [task for task in plan.tasks if (task.split, task.index) not in found]
    _check_space(finished.folder, sum(task.num_bytes for task in missing))
    dropped = count_dropped(plan, results)
    with Progress('Writing shards', plan.num_bytes, 'B', {'shards': len(plan.tasks)}) as progress:
        progress.skip(
            sum(result.num_bytes for result in results),
            shards=len(results),
            dropped=dropped.num_latents,
        )
        for task, result in engine(missing, finished):
            _add_non_finite(dropped, result)
            dropped.check_bad(task.source)
            results.append(result)
            progress.add(
                result.num_bytes,
                shards=1,
                records=result.num_records,
                dropped=result.statistics.non_finite,
            )
    assert len(results) == len(plan.tasks)  # else the data set would lack shards
    if not any(result.num_records for result in results if result.split == schema.TRAIN):
        raise ValueError(
            f'{plan.tasks[0].source}: no record is left for the train split, because no row of '
            'the source is finite.'
        )
    return sorted(results, key=lambda result: (result.split, result.index))


def count_dropped(plan: Plan, results: Iterable[ShardResult]) -> Dropped:
    """The rows left out while planning, and while writing these shards."""
    dropped = copy.deepcopy(plan.dropped)
    for result in results:
        _add_non_finite(dropped, result)
    return dropped


def write_chunk_indexes(
    results: Sequence[ShardResult], folder: str | os.PathLike[str], build: str
) -> None:
    """Writes the chunk index of every split that has shards."""
    for split, of_split in by_split(results).items():
        chunk_index.save(
            folder,
            split,
            shard_lengths=[result.num_records for result in of_split],
            offsets=[result.chunk_offsets for result in of_split],
            shard_sizes=[result.num_bytes for result in of_split],
            build=build,
        )


def write_columns(
    results: Sequence[ShardResult], folder: str | os.PathLike[str], build: str
) -> None:
    """Writes where the latents are, if they are not in the records."""
    splits = {
        split: [result.sources for result in of_split if result.sources]
        for split, of_split in by_split(results).items()
    }
    if splits[schema.TRAIN]:
        in_place.write(folder, splits, build)


def make_metadata(
    plan: Plan, results: Sequence[ShardResult], dropped: Dropped, caption_column: str
) -> dict:
    """Returns the metadata of `dataset_info`, with the keys `schema.META_*`; statistics are those
    of the train split."""
    train = _join_statistics(by_split(results)[schema.TRAIN])
    mean, std = statistics.mean_and_std(train.latent_moments)
    metadata: dict[str, Any] = {
        schema.META_LATENT_MEAN: mean,
        schema.META_LATENT_STD: std,
        schema.META_LATENT_DTYPE: plan.latent_dtype,
        schema.META_CAPTION_COLUMN: caption_column,
        schema.META_DROPPED: dropped.counts,
        schema.META_SOURCE_FINGERPRINT: plan.source_fingerprint,
        schema.META_BUILD: plan.build,
    }
    if plan.text_embeddings and plan.text_embeddings.vocabulary:
        metadata |= {
            schema.META_TEXT_ENCODER: plan.text_embeddings.encoder,
            schema.META_TEXT_VOCABULARY: plan.text_embeddings.vocabulary,
        }
        if len(train.known_tokens):
            metadata[schema.META_TEXT_KNOWN] = np.packbits(train.known_tokens).tobytes().hex()
    elif plan.text_embeddings:
        mean, std = statistics.mean_and_std(train.text_moments)
        metadata |= {
            schema.META_TEXT_MEAN: mean,
            schema.META_TEXT_STD: std,
            schema.META_TEXT_ENCODER: plan.text_embeddings.encoder,
            schema.META_TEXT_DIM: plan.text_embeddings.dim,
        }
    return metadata


def make_report(
    name: str, results: Sequence[ShardResult], dropped: Dropped, metadata: dict
) -> Report:
    """Returns the report of a build.

    Args:
        name: data set, config and version.
        results: results of all shards.
        dropped: what was left out.
        metadata: metadata of `dataset_info`.
    """
    splits = by_split(results)
    return Report(
        name,
        shards={
            split: [(result.num_records, result.num_bytes) for result in of_split]
            for split, of_split in splits.items()
        },
        statistics={split: _join_statistics(of_split) for split, of_split in splits.items()},
        dropped=dropped,
        metadata=metadata,
        in_place=any(result.sources for result in results),
    )


def by_split(results: Sequence[ShardResult]) -> dict[str, list[ShardResult]]:
    """Groups results by split, keeping their order."""
    splits: dict[str, list[ShardResult]] = {}
    for result in results:
        splits.setdefault(result.split, []).append(result)
    return splits


def _join_statistics(results: Sequence[ShardResult]) -> statistics.ShardStatistics:
    return statistics.join([result.statistics for result in results])


def _add_non_finite(dropped: Dropped, result: ShardResult) -> None:
    found = result.statistics
    dropped.add(schema.NON_FINITE, found.non_finite, found.non_finite_keys)


def _check_space(destination: Destination, num_bytes: int) -> None:
    if destination.is_remote:  # a bucket has no size limit
        return
    folder = pathlib.Path(destination.folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise OSError(
            f'{existing}: has {readable(free)} free, but the data set takes another '
            f'{readable(num_bytes)}. Free some space or choose another --data_dir.'
        )
