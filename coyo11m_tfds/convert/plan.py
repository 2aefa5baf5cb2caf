"""Decides the contents of every shard before anything is written.

Planning opens and checks every file of the source, joins captions and text embeddings by key, and
chooses the split of each key. So it finds faults before hours of writing. For 12 million rows it
takes about 80 s of CPU (without reading the heads), and 1.5 GB of memory besides the program's.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.convert.build_settings import (
    BuildSettings,
    check_build_memory,
    choose_validation_fraction,
    record_source,
)
from coyo11m_tfds.convert.joined_contents import NO_ROW, JoinedContents, join_contents
from coyo11m_tfds.convert.shard_cuts import RecordPlan, plan_tasks
from coyo11m_tfds.convert.source_contents import examine_source
from coyo11m_tfds.convert.tasks import ShardTask
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.report.statistics import DropCounts
from coyo11m_tfds.source import captions, formats, source_folder
from coyo11m_tfds.source.sidecar import SidecarHeader
from coyo11m_tfds.source.source_latents import SourceLatents
from coyo11m_tfds.storage import json_digest, locks
from coyo11m_tfds.storage.scratch import Scratch


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """The shards to write, and the reasons for rows that are left out."""

    tasks: tuple[ShardTask, ...]  # those that read the same files form a group and are neighbours
    num_bytes: int  # expected size of the shards, exact within 1%
    latents: tuple[str, tuple[int, ...]]  # dtype and shape (crops, C, H, W) of a row
    caption_column: str
    text: SidecarHeader | None  # in the records
    dropped: DropCounts
    source: dict[str, Any]  # result of `record_source`
    source_fingerprint: str  # hex digest of everything that the build reads
    settings: dict[str, Any]  # result of `BuildSettings.record`
    vae: str  # name of the VAE, of the settings or of the source; '' if unknown
    build: str  # ID of the build, a digest of all inputs and settings; file names contain it
    contents: JoinedContents  # inputs of the tasks, held open so that no other build removes them


def make_plan(
    source: source_folder.SourceFolder,
    settings: BuildSettings,
    scratch: Scratch,
    cache_dir: str,
    limit: int | None = None,
) -> BuildPlan:
    """Plans the shards of a data set, with the first `limit` records of each split.

    Args:
        source: The folder of the source.
        settings: Settings of the build.
        scratch: Holds files of a remote source while they are read.
        cache_dir: Local folder for joined captions and texts.
        limit: Records of each split; None for all.

    Raises:
        ValueError: For faults of the source, and if more rows are bad than the settings allow.
    """
    check_build_memory(0, settings.num_workers)
    # Of this build alone: another one of the same source must not remove what is read here.
    with locks.temporary_folder(cache_dir, 'heads-') as heads:
        source_contents = examine_source(source, settings, heads)
        # With the captions that the settings name.
        source = source_contents.folder
        latents = source_contents.latents
        # Again, now that the rows are known.
        check_build_memory(latents.num_rows, settings.num_workers)
        contents = join_contents(source_contents, settings, scratch, cache_dir)
    _warn_of_missing_checksums(settings, latents)
    rows = format_count(latents.num_rows, 'row')
    files = format_count(len(latents.files), 'file')
    logging.info('%s in %s', rows, files)

    caption_bytes = contents.sizes_by_row(contents.captions)
    reasons = _find_drops(latents, caption_bytes, contents)
    dropped = _count_drops(settings, source.captions_path, latents, contents, reasons)
    vae = settings.vae or source.encoding.get(schema.META_VAE, '')
    records = RecordPlan(
        settings=settings,
        latents=latents,
        contents=contents,
        is_kept=~np.logical_or.reduce(list(reasons.values())),
        caption_bytes=caption_bytes,
        moments=_find_moments(source, settings, latents),
        latent_scale=latent_rgb.find_scale(vae, source.encoding.get(schema.META_LATENT_SCALE)),
        limit=limit,
    )
    tasks = plan_tasks(records)
    splits = {task.split for task in tasks}
    if schema.TRAIN not in splits:
        raise ValueError(f'{source.root}: no record is left for the train split.')
    # With a limit, the numbers of records say nothing about the fraction.
    if limit is None:
        _warn_of_few_validation_records(settings, tasks)

    fingerprint = _make_source_fingerprint(latents, contents)
    recorded = _record_settings(settings, contents, limit)
    origin: list[Any] = [fingerprint, recorded]
    origin += [task.fingerprint for task in tasks]
    # What the source alone decides is part of the ID; the recorded settings have the rest.
    if vae != settings.vae:
        origin.append(vae)
    if records.moments != settings.moments:
        origin.append(records.moments)
    build = json_digest.sha256(origin)[:8]
    return BuildPlan(
        tasks=tuple(_name_by_build(task, build) for task in tasks),
        num_bytes=sum(task.num_bytes for task in tasks),
        latents=(latents.dtype, latents.shape),
        caption_column=source_contents.caption_column,
        text=contents.text,
        dropped=dropped,
        source=record_source(source),
        source_fingerprint=fingerprint,
        settings=recorded,
        vae=vae,
        build=build,
        contents=contents,
    )


def _warn_of_missing_checksums(settings: BuildSettings, latents: SourceLatents) -> None:
    """Logs why damage to the latents may go unnoticed, if it may."""
    if not settings.check_crc:
        logging.warning('check_crc is false: contents of .pt files are not compared with CRC-32s.')
    if not formats.has_checksums(latents.files[0]):
        logging.warning(
            f'{latents.files[0].path}: this format has no checksums of latents, so damage to it '
            'goes unnoticed. Copy the source with coyo11m_tfds.mirror while it is intact.'
        )


def _find_drops(
    latents: SourceLatents, caption_bytes: np.ndarray, contents: JoinedContents
) -> dict[str, np.ndarray]:
    """Returns, for each reason to drop a row, which rows have it, bool `(n,)`.

    A row has at most one reason.
    """
    # No caption is looked up for a row that repeats a key, which would also count as `NO_ROW`.
    reasons = {
        schema.DUPLICATE_KEY: latents.duplicate,
        schema.NO_ROW: ~latents.duplicate & (caption_bytes == NO_ROW),
        schema.NO_CAPTION: caption_bytes == 0,
        schema.CAPTION_TOO_LONG: caption_bytes == captions.TOO_LONG,
        schema.CAPTION_UNREADABLE: caption_bytes == captions.UNREADABLE,
    }
    if contents.texts:
        has_no_text = contents.sizes_by_row(contents.texts) == NO_ROW
        has_other_reason = np.logical_or.reduce(list(reasons.values()))
        reasons[schema.NO_TEXT_EMBEDDING] = has_no_text & ~has_other_reason
    return reasons


def _count_drops(
    settings: BuildSettings,
    captions_path: str,
    latents: SourceLatents,
    contents: JoinedContents,
    reasons: dict[str, np.ndarray],
) -> DropCounts:
    """Counts dropped rows; raises a ValueError for too many, or for one with `bad_data='stop'`."""
    dropped = DropCounts(latents.num_rows, settings.max_bad_fraction)
    for reason, mask in reasons.items():
        rows = np.flatnonzero(mask)
        files = []
        # The two rows of a key may lie in different files, so that a message names both.
        if reason == schema.DUPLICATE_KEY and len(rows):
            files = latents.files_of_key(rows[0])
        first_rows = rows[: DropCounts.MAX_EXAMPLES]
        dropped.add(reason, len(rows), latents.keys[first_rows], ' and '.join(files))
    # Such files are left out as a whole, and their rows have no place among the others.
    if latents.disagreeing_files:
        first_file = latents.disagreeing_files[0]
        keys = latents.disagreeing
        dropped.add(schema.ROWS_DISAGREE, len(keys), keys, first_file)
    # Captions that lie with latents have the rows of those, which are counted above.
    if not latents.texts.captions:
        facts = contents.captions.facts
        examples = np.array(facts['duplicate_keys'], np.int64)
        dropped.add(schema.DUPLICATE_CAPTION, facts['duplicates'], examples)
        dropped.check_bad_captions(captions_path, facts['num_rows'])
    if not settings.drop_bad:
        _check_captions_are_good(dropped, captions_path)
    dropped.check_bad(captions_path)
    dropped.check_all(captions_path)
    return dropped


def _check_captions_are_good(dropped: DropCounts, captions_path: str) -> None:
    """Raises a ValueError that names the first caption that is too long or cannot be read."""
    problems = {
        schema.CAPTION_TOO_LONG: f'has more than {schema.MAX_CAPTION_BYTES:,} bytes',
        schema.CAPTION_UNREADABLE: 'is no UTF-8',
    }
    for reason, problem in problems.items():
        if dropped.counts[reason]:
            first_key = dropped.examples[reason][0]
            raise ValueError(
                f'{captions_path}: the caption of key {first_key} {problem}. '
                'Repair it, or set bad_data to "drop".'
            )


def _find_moments(
    source: source_folder.SourceFolder, settings: BuildSettings, latents: SourceLatents
) -> str:
    """Returns one of `schema.MOMENTS`, or '' for latents that are no moments."""
    moments = settings.moments or latents.moments
    # What `encode_images` writes as moments are means and standard deviations.
    if not moments and source.encoding.get(schema.META_MOMENTS):
        moments = schema.DEVIATION
    channels = latents.shape[1]
    if moments and channels % 2:
        raise ValueError(
            f'{latents.files[0].path}: its latents have {channels} channels; expected an even '
            f'number of moments={moments!r}, of which half are means.'
        )
    return moments


def _warn_of_few_validation_records(settings: BuildSettings, tasks: Sequence[ShardTask]) -> None:
    """Logs that a validation split is too small, with a fraction that would do."""
    num_records = collections.Counter[str]()
    for task in tasks:
        # The last segment of a task ends with its last record.
        num_records[task.split] += task.segments[-1].records.stop
    usual_fraction = choose_validation_fraction(num_records.total())
    # A fraction of 0 is no mistake: somebody wants no validation split.
    if 0 < settings.validation_fraction < usual_fraction:
        logging.warning(
            '%d of %d records are for validation, too few to judge a model by. Set '
            'validation_fraction, e.g. to %s.',
            num_records[schema.VALIDATION],
            num_records.total(),
            usual_fraction,
        )


def _make_source_fingerprint(latents: SourceLatents, contents: JoinedContents) -> str:
    """Returns a digest of everything that the build reads.

    It has names and contents, but no folder: the same files elsewhere give the same data set.
    """
    origin = []
    for file, version in zip(latents.files, latents.versions, strict=True):
        origin.append(f'{file.name} {version}')
    origin += contents.digests
    return json_digest.sha256(origin)


def _record_settings(
    settings: BuildSettings, contents: JoinedContents, limit: int | None
) -> dict[str, Any]:
    """Returns the settings as the data set records them."""
    # A sidecar is known by its header: its path may change.
    if contents.text and contents.texts:
        # The revision names the list of words, which is not repeated here.
        header = dataclasses.replace(contents.text, words='')
        return settings.record(limit, header.to_json())
    return settings.record(limit, settings.text_embeddings)


def _name_by_build(task: ShardTask, build: str) -> ShardTask:
    """Returns the task of a shard whose name has the ID of the build."""
    return dataclasses.replace(task, filename=schema.of_build(task.filename, build))
