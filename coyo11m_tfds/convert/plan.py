"""Decides the contents of every shard before anything is written.

Planning opens and checks every file of the source, joins captions and text embeddings by key, and
chooses the split of each key. So it finds faults before hours of writing. For 12 million rows it
takes about 80 s of CPU (without reading the heads), and 1.5 GB of memory besides the program's.

Each file belongs to one group of shards, and is fetched once.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import (
    EMBEDDINGS_IN_PT,
    BuildSettings,
    check_build_memory,
    choose_validation_fraction,
    record_source,
)
from coyo11m_tfds.convert.tasks import JoinedInputs, ShardSegment, ShardTask
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.process.errors import Faults
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.report.statistics import DropCounts
from coyo11m_tfds.source import (
    captions,
    formats,
    keyed_values,
    sidecar,
    source_folder,
)
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.source.sidecar import SidecarHeader
from coyo11m_tfds.source.source_latents import SourceLatents, SourceOptions, TextTables
from coyo11m_tfds.storage import json_digest, locks, model_fields
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile, common_path

_ENCODING_RULES = {
    schema.META_LATENT_SCALE: model_fields.pair_of(
        model_fields.number(1e-6, 1e6), model_fields.number(-1e6, 1e6)
    )
}
_NO_ROW = -2  # bytes of the caption of a key that the Parquet file lacks

_RECORD_OVERHEAD = 128  # bytes of a record besides latents, caption and text

# A file counts for at least this share of its size: the files of one shard are on the disk at the
# same time, however few of their rows are kept.
_LEAST_SHARE_OF_FILE = 1 / 4


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
    contents: '_RowContents'  # inputs of the tasks, held open so that no other build removes them


@dataclasses.dataclass(frozen=True)
class SourceContents:
    """The files of a source, and what their heads and schemas say."""

    folder: source_folder.SourceFolder
    captions: captions.CaptionFiles
    sidecar_files: list[StoredFile]
    latents: SourceLatents

    @property
    def caption_column(self) -> str:
        return self.latents.texts.caption_column or self.captions.caption_column


@dataclasses.dataclass(frozen=True)
class _RowContents:
    """Captions and texts of the rows of latents, by place: split by split, without duplicates."""

    places: np.ndarray  # of each row of latents, int64 `(n,)`; -1 of one that repeats a key
    captions: KeyedValues
    texts: KeyedValues | None  # of a sidecar or of labels
    text: SidecarHeader | None

    @property
    def digests(self) -> list[str]:
        in_pt = EMBEDDINGS_IN_PT if self.text else ''
        return [self.captions.facts['digest'], self.texts.facts['digest'] if self.texts else in_pt]

    def sizes_by_row(self, values: KeyedValues) -> np.ndarray:
        """Sizes of joined values for each row of latents; `_NO_ROW` of a row without a value."""
        sizes = np.full(len(self.places) + 1, _NO_ROW, values.sizes.dtype)  # the last: of place -1
        sizes[values.places] = values.sizes
        return sizes[self.places]


def make_plan(
    source: source_folder.SourceFolder,
    settings: BuildSettings,
    scratch: Scratch,
    cache_dir: str,
    limit: int | None = None,
) -> BuildPlan:
    """Plans the shards of a data set, with the first `limit` records of each split."""
    check_build_memory(0, settings.num_workers)
    # Of this build alone: another one of the same source must not remove what is read here.
    with locks.temporary_folder(cache_dir, 'heads-') as heads:
        source_contents = examine_source(source, settings, heads)
        source, latents = source_contents.folder, source_contents.latents
        check_build_memory(latents.num_rows, settings.num_workers)
        contents = _join_contents(source_contents, settings, scratch, cache_dir)
    if not settings.check_crc:
        logging.warning('check_crc is false: contents of .pt files are not compared with CRC-32s.')
    if not formats.has_checksums(latents.files[0]):
        logging.warning(
            f'{latents.files[0].path}: this format has no checksums of latents, so damage to it '
            'goes unnoticed. Copy the source with coyo11m_tfds.mirror while it is intact.'
        )
    rows, files = format_count(latents.num_rows, 'row'), format_count(len(latents.files), 'file')
    logging.info('%s in %s', rows, files)
    caption_bytes = contents.sizes_by_row(contents.captions)
    reasons = _drop_reasons(latents, caption_bytes, contents)
    dropped = _count_planned_drops(settings, source.captions_path, latents, contents, reasons)
    is_kept = ~np.logical_or.reduce(list(reasons.values()))
    moments = _find_moments(source, settings, latents)
    vae = settings.vae or source.encoding.get(schema.META_VAE, '')
    model_fields.check(source.encoding, _ENCODING_RULES, f'{source.root}/{schema.ENCODING_FILE}')
    scale = latent_rgb.find_scale(vae, source.encoding.get(schema.META_LATENT_SCALE))
    tasks = _plan_tasks(settings, latents, moments, scale, contents, is_kept, caption_bytes, limit)
    if not any(task.split == schema.TRAIN for task in tasks):
        raise ValueError(f'{source.root}: no record is left for the train split.')
    if limit is None:
        _warn_of_few_validation_records(settings, tasks)
    # Names and contents, but no folder: the same files elsewhere give the same data set.
    versions = zip(latents.files, latents.versions, strict=True)
    fingerprint = json_digest.sha256(
        [*(f'{file.name} {version}' for file, version in versions), *contents.digests]
    )
    # A sidecar is known by its header: its path may change.
    header = None
    if contents.text and contents.texts:
        # The revision names the list of words, which is not repeated here.
        header = dataclasses.replace(contents.text, words='').to_json()
    recorded = settings.record(limit, header or settings.text_embeddings)
    digests = [fingerprint, recorded, *(task.fingerprint for task in tasks)]
    of_source = [vae] * (vae != settings.vae) + [moments] * (moments != settings.moments)
    build = json_digest.sha256(digests + of_source)[:8]
    return BuildPlan(
        tasks=tuple(
            dataclasses.replace(task, filename=schema.of_build(task.filename, build))
            for task in tasks
        ),
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


def examine_source(
    source: source_folder.SourceFolder,
    settings: BuildSettings,
    folder: str,
    files: Sequence[StoredFile] | None = None,
) -> SourceContents:
    """Checks the schemas of captions and the heads of latents; raises one error for all faults."""
    faults, sidecar_files = Faults(), list[StoredFile]()
    with faults.collect():
        sidecar_files = _find_texts(settings)
    with faults.collect():
        source = source.with_captions(settings.captions)
        tables = captions.CaptionFiles.choose(
            source.caption_files, settings.key_column, settings.caption_column
        )
        # Captions in files of latents may have another column than the settings name.
        if tables.files and sidecar_files and sidecar_files[0].local_path:
            header = SidecarHeader(**sidecar.describe_values(sidecar_files[0].path)['header'])
            _check_sidecar(settings, header, tables.caption_column, source.captions_path, None)
    with faults.collect():
        options = SourceOptions(
            latents=schema.parse_latents_from(settings.latents_from, settings.key_column),
            captions=None if settings.captions or source.caption_files else settings.caption_column,
            no_captions=source.no_captions,
            labels=settings.text_embeddings == schema.LABELS,
            drop_bad=settings.drop_bad,
            check_crc=settings.check_crc,
        )
        latents = SourceLatents.read(files or source.latent_files, folder, options)
    faults.check()
    return SourceContents(source, tables, sidecar_files, latents)


def _find_texts(settings: BuildSettings) -> list[StoredFile]:
    """Finds the files of a sidecar."""
    place = settings.text_embeddings
    if place in ('', schema.LABELS, EMBEDDINGS_IN_PT):
        return []
    try:
        return sidecar.find_sidecar_files(place)
    except ValueError as error:
        raise ValueError(
            f'text_embeddings: {error} Expected a folder that coyo11m_tfds.embed_captions made, '
            "'pt', 'labels' or ''."
        ) from None


def _join_contents(
    source_contents: SourceContents, settings: BuildSettings, scratch: Scratch, cache_dir: str
) -> _RowContents:
    """Joins captions and texts to the rows of latents, or opens what an earlier build joined."""
    # Places follow the order of the shards: rows split by split. So the captions of a shard are
    # neighbours in the joined file, and a worker reads them in one piece.
    source, latents = source_contents.folder, source_contents.latents
    held_out = unit_hash(latents.keys) < settings.validation_fraction
    rows = np.concatenate([np.flatnonzero(x & ~latents.duplicate) for x in (~held_out, held_out)])
    places = np.full(len(latents.keys), -1)
    places[rows] = np.arange(len(rows))
    keys = latents.keys[rows]
    keys_digest = _array_sha256(keys)

    def keep(origin: list[Any], join: Callable[[str], None]) -> KeyedValues:
        return keyed_values.open_or_make(cache_dir, [*origin, keys_digest], join)

    tables, sidecar_files = source_contents.captions, source_contents.sidecar_files
    column = source_contents.caption_column
    # Captions and labels in the files of latents have no version but that of these files.
    origin = json_digest.sha256([*latents.versions, *(file.path for file in latents.files)])
    if tables.files:
        joined_captions = keep(
            ['captions', *tables.origin], lambda folder: tables.join(folder, scratch, keys)
        )
        _check_captions(joined_captions, tables.files, settings)
    else:
        joined_captions = keep(
            ['captions of files', origin, column],
            lambda folder: captions.join_texts(
                {source.captions_path: latents.texts.captions}, TextTables.COLUMN, folder, keys
            ),
        )
    text, texts = None, None
    if settings.text_embeddings == EMBEDDINGS_IN_PT:
        # These are read with the latents, so that nothing has to be joined.
        text = SidecarHeader(latents.common_embedding_dim(), EMBEDDINGS_IN_PT, '', 0, '', '')
    elif sidecar_files:
        # Parts may be hundreds, and the log would show each download.
        hold = functools.partial(scratch.hold, shows=len(sidecar_files) == 1)
        texts = keep(
            ['sidecar', *([file.path, file.version] for file in sidecar_files)],
            lambda folder: sidecar.join_values(sidecar_files, folder, keys, hold=hold),
        )
        text = SidecarHeader(**texts.facts['header'])
        digest = joined_captions.facts['digest']
        _check_sidecar(settings, text, column, source.captions_path, digest)
        logging.info('The text embeddings of %s are ready', settings.text_embeddings)
    elif latents.texts.labels:
        # A class without a sidecar is a text of one token.
        labels = [storage.describe_file(latents.texts.labels)]
        texts = keep(
            ['labels of files', origin],
            lambda folder: sidecar.join_values(labels, folder, keys, hold=scratch.hold),
        )
        text = SidecarHeader(**texts.facts['header'])
    # At the end: what this build needs is open now, and only the values of other builds go.
    keyed_values.remove_unused(cache_dir)
    return _RowContents(places, joined_captions, texts, text)


def _check_captions(
    joined_captions: KeyedValues, files: Sequence[StoredFile], settings: BuildSettings
) -> None:
    """Raises a ValueError for repeated keys unless they are dropped; warns without checksums."""
    place = common_path(files)
    if not settings.drop_bad:
        captions.check_unique_captions(joined_captions, place)
    has_checksums = all(file.recorded or file.checksum for file in files)
    if not (joined_captions.facts['has_checksums'] or has_checksums):
        logging.warning(
            f'{place}: its pages have no checksums, so damage to it may go unnoticed. Write it '
            'with write_page_checksum=True, or copy it with coyo11m_tfds.mirror while it is intact.'
        )
    logging.info('The captions of %s are ready', place)


def _check_sidecar(
    settings: BuildSettings,
    header: SidecarHeader,
    column: str,
    captions_path: str,
    digest: str | None,
) -> None:
    """Raises a ValueError if a sidecar is of other captions; None stands for an unknown digest."""
    if header.caption_column != column:
        raise ValueError(
            f'{settings.text_embeddings}: its embeddings are those of column '
            f"'{header.caption_column}', but caption_column is '{column}'. Change caption_column, "
            'or name embeddings of that column.'
        )
    if digest is not None and header.captions_digest != digest:
        raise ValueError(
            f'{settings.text_embeddings}: its embeddings come from other captions than '
            f"those in column '{column}' of {captions_path}. Make them again with "
            'coyo11m_tfds.embed_captions, or name the source that they were made from.'
        )


def _drop_reasons(
    latents: SourceLatents, caption_bytes: np.ndarray, contents: _RowContents
) -> dict[str, np.ndarray]:
    """Bool `(n,)` for each reason to drop a row; at most one of them is true."""
    # No caption is looked up for a row that repeats a key, which would also count as `NO_ROW`.
    reasons = {
        schema.DUPLICATE_KEY: latents.duplicate,
        schema.NO_ROW: ~latents.duplicate & (caption_bytes == _NO_ROW),
        schema.NO_CAPTION: caption_bytes == 0,
        schema.CAPTION_TOO_LONG: caption_bytes == captions.TOO_LONG,
        schema.CAPTION_UNREADABLE: caption_bytes == captions.UNREADABLE,
    }
    if contents.texts:
        no_text = contents.sizes_by_row(contents.texts) == _NO_ROW
        reasons[schema.NO_TEXT_EMBEDDING] = no_text & ~np.logical_or.reduce(list(reasons.values()))
    return reasons


def _count_planned_drops(
    settings: BuildSettings,
    captions_path: str,
    latents: SourceLatents,
    contents: _RowContents,
    reasons: dict[str, np.ndarray],
) -> DropCounts:
    """Counts dropped rows; raises a ValueError for too many, or for one with `bad_data='stop'`."""
    dropped = DropCounts(latents.num_rows, settings.max_bad_fraction)
    for reason, mask in reasons.items():
        rows = np.flatnonzero(mask)
        is_repeated = reason == schema.DUPLICATE_KEY and len(rows)
        files = latents.files_of_key(rows[0]) if is_repeated else []
        keys = latents.keys[rows[: DropCounts.MAX_EXAMPLES]]
        dropped.add(reason, len(rows), keys, ' and '.join(files))
    # Such files are left out as a whole, and their rows have no place among the others.
    if latents.disagreeing_files:
        file, keys = latents.disagreeing_files[0], latents.disagreeing
        dropped.add(schema.ROWS_DISAGREE, len(keys), keys, file)
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
            raise ValueError(
                f'{captions_path}: the caption of key {dropped.examples[reason][0]} {problem}. '
                'Repair it, or set bad_data to "drop".'
            )


def unit_hash(keys: np.ndarray) -> np.ndarray:
    """Maps int64 keys to float64 in [0, 1) evenly: the upper 53 bits of their splitmix64."""
    return (splitmix64(keys.astype(np.uint64)) >> np.uint64(11)) * 2.0**-53


def _plan_tasks(
    settings: BuildSettings,
    latents: SourceLatents,
    moments: str,
    latent_scale: latent_rgb.Scale | None,
    contents: _RowContents,
    is_kept: np.ndarray,
    caption_bytes: np.ndarray,
    limit: int | None,
) -> tuple[ShardTask, ...]:
    text, latents_nbytes = contents.text, schema.latents_nbytes(latents.dtype, latents.shape)
    text_nbytes = text.dim * np.dtype(schema.TEXT_DTYPES[text.feature]).itemsize if text else 0
    # Cut by the sizes of whole records also in place, so that both kinds have the same shards.
    sizes = caption_bytes + (latents_nbytes + text_nbytes + _RECORD_OVERHEAD)
    in_place_nbytes = latents_nbytes if settings.in_place else 0
    is_validation = unit_hash(latents.keys) < settings.validation_fraction
    masks = {schema.TRAIN: is_kept & ~is_validation, schema.VALIDATION: is_kept & is_validation}
    rows_by_split = {split: np.flatnonzero(mask)[:limit] for split, mask in masks.items()}
    # Of both splits together, so that shards of train and validation share the fetched files.
    file_bytes = _file_bytes(latents, list(rows_by_split.values()), sizes)
    groups = group_files(file_bytes, settings.shard_bytes)
    versions = dict(zip(latents.files, latents.versions, strict=True))
    common_digest = json_digest.sha256(
        [
            schema.RECORD_FORMAT,
            latents.dtype,
            settings.drop_bad,
            *contents.digests,
            *(['in_place'] if settings.in_place else []),
        ]
    )
    tasks = []
    for split, rows in rows_by_split.items():
        shards = list(_cut_shards(rows, sizes[rows], latents.starts, groups, settings.shard_bytes))
        for index, (group, shard_rows) in enumerate(shards):
            name = schema.shard_filename(split, index, len(shards))
            segments, inputs = _make_segments(shard_rows, latents, contents)
            # All that decides the bytes of this shard, so that a resumed build of other files
            # or settings writes it again, and keeps those shards that stay the same.
            digests = []
            for segment in segments:
                digests += [versions[segment.file], _array_sha256(inputs.rows[segment.records])]
            if settings.in_place:
                for file in (segment.file for segment in segments):
                    digests += [storage.make_absolute(file.path), file.version]
            task = ShardTask(
                split=split,
                index=index,
                filename=name,
                group=group,
                segments=segments,
                inputs=inputs,
                text=text,
                drop_bad=settings.drop_bad,
                check_crc=settings.check_crc,
                num_bytes=int(sizes[shard_rows].sum()) - in_place_nbytes * len(shard_rows),
                in_place=settings.in_place,
                channels=latents.shape[1] // (2 if moments else 1),
                moments=moments,
                latent_scale=latent_scale,
                latents_from=schema.parse_latents_from(settings.latents_from, settings.key_column),
                fingerprint=json_digest.sha256([common_digest, name, *digests]),
            )
            tasks.append(task)
    return tuple(sorted(tasks, key=lambda task: (task.group, task.split, task.index)))


def _warn_of_few_validation_records(settings: BuildSettings, tasks: Sequence[ShardTask]) -> None:
    num_records = collections.Counter[str]()
    for task in tasks:
        num_records[task.split] += task.segments[-1].records.stop
    usual_fraction = choose_validation_fraction(num_records.total())
    if 0 < settings.validation_fraction < usual_fraction:
        logging.warning(
            '%d of %d records are for validation, too few to judge a model by. Set '
            'validation_fraction, e.g. to %s.',
            num_records[schema.VALIDATION],
            num_records.total(),
            usual_fraction,
        )


def _find_moments(
    source: source_folder.SourceFolder, settings: BuildSettings, latents: SourceLatents
) -> str:
    """Returns one of `schema.MOMENTS`, or '' for latents that are no moments."""
    encoded = schema.DEVIATION if source.encoding.get(schema.META_MOMENTS) else ''
    moments, channels = settings.moments or latents.moments or encoded, latents.shape[1]
    if moments and channels % 2:
        raise ValueError(
            f'{latents.files[0].path}: its latents have {channels} channels; expected an even '
            f'number of moments={moments!r}, of which half are means.'
        )
    return moments


def _file_bytes(
    latents: SourceLatents, rows_of_splits: list[np.ndarray], sizes: np.ndarray
) -> np.ndarray:
    """The bytes that each file counts for when files are grouped, int64 `(files,)`."""
    kept_sizes = np.zeros(len(sizes), np.int64)
    for rows in rows_of_splits:
        kept_sizes[rows] = sizes[rows]
    record_bytes = np.diff(np.concatenate([[0], np.cumsum(kept_sizes)])[latents.starts])
    min_bytes = [int(_LEAST_SHARE_OF_FILE * file.size) for file in latents.files]
    return np.where(record_bytes > 0, np.maximum(record_bytes, min_bytes), 0)


def group_files(file_bytes: np.ndarray, shard_bytes: int) -> list[range]:
    """Groups consecutive files: one of more than `shard_bytes` alone, or several small files."""
    groups: list[range] = []
    for is_large, run in itertools.groupby(
        range(len(file_bytes)), lambda file: file_bytes[file] > shard_bytes
    ):
        files = list(run)
        firsts, total = files[:1], 0
        for file in files:
            num_bytes = int(file_bytes[file])
            is_full = total + num_bytes > shard_bytes and 2 * total >= shard_bytes
            if file > firsts[-1] and (is_large or is_full):
                firsts.append(file)
                total = 0
            total += num_bytes
        # The rest may be too little for a shard of its own.
        if not is_large and len(firsts) > 1 and 2 * total < shard_bytes:
            del firsts[-1]
        groups += itertools.starmap(range, itertools.pairwise([*firsts, files[-1] + 1]))
    return groups


def _cut_shards(
    rows: np.ndarray,
    row_bytes: np.ndarray,
    file_starts: np.ndarray,
    groups: list[range],
    shard_bytes: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts the rows of one split, numbered over all files; yields group and rows of each shard."""
    # The rows of several files are one shard, those of one file the fewest that are not too large.
    # `rows` are some of all rows, ascending: where the rows of each file begin among them.
    borders = np.searchsorted(rows, file_starts)
    for number, files in enumerate(groups):
        start, end = int(borders[files.start]), int(borders[files.stop])
        if start == end:
            continue
        num_bytes = int(row_bytes[start:end].sum())
        num_shards = 1 if len(files) > 1 else min(-(-num_bytes // shard_bytes), end - start)
        for shard_rows in np.array_split(rows[start:end], num_shards):
            yield number, shard_rows


def _make_segments(
    rows: np.ndarray, latents: SourceLatents, contents: _RowContents
) -> tuple[tuple[ShardSegment, ...], JoinedInputs]:
    """Divides rows that are numbered over all files by file."""
    files = np.searchsorted(latents.starts, rows, side='right') - 1
    inputs = JoinedInputs(
        rows=(rows - latents.starts[files]).astype(np.int32),
        keys=latents.keys[rows],
        places=contents.places[rows],
        captions=contents.captions.folder,
        texts=contents.texts.folder if contents.texts else '',
    )
    starts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(rows)]
    segments = [
        ShardSegment(
            file=latents.files[files[start]],
            digest=latents.digests[files[start]],
            records=slice(start, end),
        )
        for start, end in itertools.pairwise(starts)
    ]
    return tuple(segments), inputs


def _array_sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array).hexdigest()
