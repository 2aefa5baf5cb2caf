"""Decides the contents of every shard before anything is written.

Planning opens and checks every file of the source, joins captions and text embeddings by key, and
chooses the split of each key. So it finds faults before hours of writing. For 12 million rows it
takes about 80 s of CPU (without reading the heads), and 1.5 GB of memory besides the program's.

Each file belongs to one group of shards, and is fetched once.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.convert import in_place, memory, source_record
from coyo11m_tfds.convert.build_settings import EMBEDDINGS_IN_PT, BuildSettings
from coyo11m_tfds.convert.tasks import JoinedInputs, ShardPart, ShardTask
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.report.statistics import DropCounts
from coyo11m_tfds.source import (
    captions,
    copied_files,
    formats,
    keyed_values,
    sidecar,
    source_folder,
)
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.source.sidecar import Header
from coyo11m_tfds.source.source_latents import NoCaptionsError, SourceLatents, SourceOptions
from coyo11m_tfds.storage import file_state, json_digest, locks, source_files
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.source_files import StoredFile

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
    text: Header | None  # in the records
    dropped: DropCounts
    source: dict[str, Any]  # result of `source_record.record`
    source_fingerprint: str  # hex digest of everything that the build reads
    settings: dict[str, Any]  # result of `BuildSettings.record`
    build: str  # ID of the build, a digest of all inputs and settings; file names contain it
    joined: '_Joined'  # inputs of the tasks, held open so that no other build removes them


@dataclasses.dataclass(frozen=True)
class _Joined:
    """The contents of records except latents, by place: all rows split by split, no duplicates."""

    places: np.ndarray  # of each row of latents, int64 `(n,)`; -1 of one that repeats a key
    captions: KeyedValues
    sidecar: KeyedValues | None
    text: Header | None

    @property
    def digests(self) -> list[str]:
        in_pt = EMBEDDINGS_IN_PT if self.text else ''
        text = self.sidecar.facts['digest'] if self.sidecar else in_pt
        return [self.captions.facts['digest'], text]

    def values(self, found: KeyedValues) -> np.ndarray:
        """Sizes of joined values for each row; `_NO_ROW` where nothing was joined."""
        sizes = np.full(len(self.places) + 1, _NO_ROW, found.sizes.dtype)  # the last: of place -1
        sizes[found.places] = found.sizes
        return sizes[self.places]


def make_plan(
    source: source_folder.SourceFolder,
    settings: BuildSettings,
    scratch: Scratch,
    cache_dir: str,
    limit: int | None = None,
) -> BuildPlan:
    """Plans the shards of a data set, with the first `limit` records of each split.

    The captions and embeddings that the tasks read stay in the existing folder `cache_dir` for the
    next build of the same source. Raises a ValueError if the source has a fault or memory would run
    out, and an OSError if a file cannot be read or written.
    """
    memory.check(0, settings.num_workers)
    sidecar_files = _find_sidecar(settings, source.captions_file is not None)
    # Of this build alone: another one of the same source must not remove what is read here.
    with locks.temporary_folder(cache_dir, 'heads-') as heads:
        latents = read_latents(source, settings, heads)
        memory.check(latents.num_rows, settings.num_workers)
        joined = _join(source, settings, latents, sidecar_files, scratch, cache_dir)
    if not settings.check_crc:
        logging.warning('check_crc is false: contents of .pt files are not compared with CRC-32s.')
    if not formats.has_checksums(latents.files[0]):
        logging.warning(
            f'{latents.files[0].path}: this format has no checksums of latents, so damage to it '
            'goes unnoticed. Copy the source with coyo11m_tfds.mirror while it is intact.'
        )
    logging.info('%d rows in %d files', latents.num_rows, len(latents.files))
    caption_bytes = joined.values(joined.captions)
    reasons = _drop_reasons(latents, caption_bytes, joined)
    dropped = _count_dropped(settings, source.captions_path, latents, joined, reasons)
    kept = ~np.logical_or.reduce(list(reasons.values()))
    tasks = _plan_tasks(settings, latents, joined, kept, caption_bytes, limit)
    if not any(task.split == schema.TRAIN for task in tasks):
        raise ValueError(f'{source.root}: no record is left for the train split.')
    fingerprint = json_digest.sha256(
        [
            *(f'{f.name} {v}' for f, v in zip(latents.files, latents.versions, strict=True)),
            *joined.digests,
        ]
    )
    text = joined.text.to_json() if joined.text and joined.sidecar else settings.text_embeddings
    recorded = settings.record(limit, text)
    column = latents.texts.caption_column or settings.caption_column
    build = json_digest.sha256([fingerprint, recorded, *(task.fingerprint for task in tasks)])[:8]
    return BuildPlan(
        tasks=tuple(
            dataclasses.replace(task, filename=schema.of_build(task.filename, build))
            for task in tasks
        ),
        num_bytes=sum(task.num_bytes for task in tasks),
        latents=(latents.dtype, latents.shape),
        caption_column=column,
        text=joined.text,
        dropped=dropped,
        source=source_record.record(source),
        source_fingerprint=fingerprint,
        settings=recorded,
        build=build,
        joined=joined,
    )


def read_latents(
    source: source_folder.SourceFolder,
    settings: BuildSettings,
    folder: str,
    files: Sequence[StoredFile] | None = None,
) -> SourceLatents:
    """Reads and checks the heads of some or all files of a source; raises `make_plan`'s errors."""
    asked = SourceOptions(
        latents=schema.parse_latents_from(settings.latents_from),
        captions=None if source.captions_file else settings.caption_column,
        labels=settings.text_embeddings == schema.LABELS,
        drop_bad=settings.drop_bad,
        check_crc=settings.check_crc,
    )
    try:
        return SourceLatents.read(files or source.latent_files, folder, asked)
    except NoCaptionsError as error:
        raise ValueError(f'{source.no_captions}: {error}') from None


def _find_sidecar(settings: BuildSettings, has_parquet: bool) -> list[StoredFile]:
    """Finds the files of a sidecar, and checks a local one before the source is read."""
    place = settings.text_embeddings
    if place in ('', schema.LABELS, EMBEDDINGS_IN_PT):
        return []
    try:
        files = sidecar.find_sidecar(place)
    except ValueError as error:
        raise ValueError(
            f'text_embeddings: {error} Expected a folder that coyo11m_tfds.embed_captions made, '
            "'pt', 'labels' or ''."
        ) from None
    if not files[0].is_remote and has_parquet:
        header = Header(**sidecar.describe_values(files[0].path)['header'])
        _check_column(settings, header, settings.caption_column)
    return files


def _check_column(settings: BuildSettings, header: Header, column: str) -> None:
    if header.caption_column != column:
        raise ValueError(
            f'{settings.text_embeddings}: its embeddings are those of column '
            f"'{header.caption_column}', but caption_column is '{column}'. Change caption_column, "
            'or name embeddings of that column.'
        )


def _join(
    source: source_folder.SourceFolder,
    settings: BuildSettings,
    latents: SourceLatents,
    sidecar_files: list[StoredFile],
    scratch: Scratch,
    cache_dir: str,
) -> _Joined:
    """Joins captions and text embeddings to the rows, and opens what is joined already."""
    held_out = unit_hash(latents.keys) < settings.validation_fraction
    rows = np.concatenate([np.flatnonzero(x & ~latents.duplicate) for x in (~held_out, held_out)])
    places = np.full(len(latents.keys), -1)
    places[rows] = np.arange(len(rows))
    wanted = latents.keys[rows]
    keys_digest = _sha256(wanted)

    def kept(origin: list[Any], join: Callable[[str], None]) -> KeyedValues:
        return keyed_values.open_or_make(cache_dir, [*origin, keys_digest], join)

    texts = latents.texts
    column = texts.caption_column or settings.caption_column
    in_files = json_digest.sha256([*latents.versions, *(file.path for file in latents.files)])
    if source.captions_file:
        found = _join_captions(source.captions_file, settings, wanted, scratch, kept)
    else:
        found = kept(
            ['captions of files', in_files, column],
            lambda to: captions.join_captions(
                texts.captions, column, to, wanted, source.captions_path
            ),
        )
    text = values = None
    if settings.text_embeddings == EMBEDDINGS_IN_PT:
        text = Header(latents.common_embedding_dim(), EMBEDDINGS_IN_PT, '', 0, '', '')
    elif texts.labels and not sidecar_files:
        of_labels = [source_files.describe(texts.labels)]
        values = kept(
            ['labels of files', in_files],
            lambda to: sidecar.join_values(of_labels, to, wanted, hold=scratch.hold),
        )
        text = Header(**values.facts['header'])
    elif sidecar_files:
        hold = scratch.hold_showing if len(sidecar_files) == 1 else scratch.hold
        values = kept(
            ['sidecar', *([file.path, file.version] for file in sidecar_files)],
            lambda to: sidecar.join_values(sidecar_files, to, wanted, hold=hold),
        )
        text = Header(**values.facts['header'])
        _check_column(settings, text, column)
        if text.captions_digest != found.facts['digest']:
            raise ValueError(
                f'{settings.text_embeddings}: its embeddings come from other captions than '
                f"those in column '{column}' of {source.captions_path}. Make them again with "
                'coyo11m_tfds.embed_captions, or name the source that they were made from.'
            )
        logging.info('The text embeddings of %s are ready', settings.text_embeddings)
    keyed_values.remove_unused(cache_dir)
    return _Joined(places, found, values, text)


def _join_captions(
    file: StoredFile,
    settings: BuildSettings,
    wanted: np.ndarray,
    scratch: Scratch,
    kept: Callable[[list[Any], Callable[[str], None]], KeyedValues],
) -> KeyedValues:
    def make(folder: str) -> None:
        with scratch.hold_showing(file) as path:
            if file.recorded:
                copied_files.check_recorded_state(
                    file_state.compute_state(path), file.recorded, file.path
                )
            captions.join_captions(path, settings.caption_column, folder, wanted, file.path)

    # Any commit of a hub may have the file.
    origin = ['captions', re.sub('@[0-9a-f]{40}/', '/', file.path), file.version]
    found = kept([*origin, settings.caption_column], make)
    if not settings.drop_bad:
        captions.check_unique_captions(found, file.path)
    if not (found.facts['has_checksums'] or file.recorded or file.checksum):
        logging.warning(
            f'{file.path}: its pages have no checksums, so damage to it may go unnoticed. Write it '
            'with write_page_checksum=True, or copy it with coyo11m_tfds.mirror while it is intact.'
        )
    logging.info('The captions of %s are ready', file.path)
    return found


def _drop_reasons(
    latents: SourceLatents, caption_bytes: np.ndarray, joined: _Joined
) -> dict[str, np.ndarray]:
    """Bool `(n,)` for each reason to drop a row; at most one of them is true."""
    reasons = {
        schema.DUPLICATE_KEY: latents.duplicate,
        schema.NO_ROW: ~latents.duplicate & (caption_bytes == _NO_ROW),
        schema.NO_CAPTION: caption_bytes == 0,
        schema.CAPTION_TOO_LONG: caption_bytes == captions.TOO_LONG,
    }
    if joined.sidecar:
        missing = joined.values(joined.sidecar) == _NO_ROW
        reasons[schema.NO_TEXT_EMBEDDING] = missing & ~np.logical_or.reduce(list(reasons.values()))
    return reasons


def _count_dropped(
    settings: BuildSettings,
    captions_path: str,
    latents: SourceLatents,
    joined: _Joined,
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
    if latents.disagreeing_files:
        file, keys = latents.disagreeing_files[0], latents.disagreeing
        dropped.add(schema.ROWS_DISAGREE, len(keys), keys, file)
    if not latents.texts.captions:  # rows of captions next to latents are counted as those
        facts = joined.captions.facts
        examples = np.array(facts['duplicate_keys'], np.int64)
        dropped.add(schema.DUPLICATE_CAPTION, facts['duplicates'], examples)
    if dropped.counts[schema.CAPTION_TOO_LONG] and not settings.drop_bad:
        raise ValueError(
            f'{captions_path}: the caption of key {dropped.examples[schema.CAPTION_TOO_LONG][0]} '
            f'has more than {schema.MAX_CAPTION_BYTES:,} bytes. Cut it, or set bad_data to "drop".'
        )
    dropped.check_bad(captions_path)
    dropped.check_all(captions_path)
    return dropped


def unit_hash(keys: np.ndarray) -> np.ndarray:
    """Maps int64 keys to float64 in [0, 1) evenly: the upper 53 bits of their splitmix64."""
    return (splitmix64(keys.astype(np.uint64)) >> np.uint64(11)) * 2.0**-53


def _plan_tasks(
    settings: BuildSettings,
    latents: SourceLatents,
    joined: _Joined,
    kept: np.ndarray,
    caption_bytes: np.ndarray,
    limit: int | None,
) -> tuple[ShardTask, ...]:
    text, latents_nbytes = joined.text, schema.latents_nbytes(latents.dtype, latents.shape)
    text_nbytes = text.dim * np.dtype(schema.TEXT_DTYPES[text.feature]).itemsize if text else 0
    sizes = caption_bytes + (latents_nbytes + text_nbytes + _RECORD_OVERHEAD)
    validation = unit_hash(latents.keys) < settings.validation_fraction
    masks = {schema.TRAIN: kept & ~validation, schema.VALIDATION: kept & validation}
    rows_by_split = {split: np.flatnonzero(mask)[:limit] for split, mask in masks.items()}
    file_bytes = _file_bytes(latents, list(rows_by_split.values()), sizes)
    groups = group_files(file_bytes, settings.shard_bytes)
    versions = dict(zip(latents.files, latents.versions, strict=True))
    where = ['in_place'] if settings.in_place else []
    common = json_digest.sha256(
        [schema.RECORD_FORMAT, latents.dtype, settings.drop_bad, *joined.digests, *where]
    )
    left_out = latents_nbytes if settings.in_place else 0
    tasks = []
    for split, rows in rows_by_split.items():
        cuts = list(_cut(rows, sizes[rows], latents.starts, groups, settings.shard_bytes))
        for index, (group, of_shard) in enumerate(cuts):
            name = schema.shard_filename(split, index, len(cuts))
            parts, inputs = _make_parts(of_shard, latents, joined)
            digests = [(versions[p.file], _sha256(inputs.rows[p.records])) for p in parts]
            if settings.in_place:
                digests += [(in_place.path_of(part.file), part.file.version) for part in parts]
            task = ShardTask(
                split=split,
                index=index,
                filename=name,
                group=group,
                parts=parts,
                inputs=inputs,
                text=text,
                drop_bad=settings.drop_bad,
                check_crc=settings.check_crc,
                num_bytes=int(sizes[of_shard].sum()) - left_out * len(of_shard),
                in_place=settings.in_place,
                channels=latents.shape[1],
                latents_from=schema.parse_latents_from(settings.latents_from),
                fingerprint=json_digest.sha256([common, name, *itertools.chain(*digests)]),
            )
            tasks.append(task)
    return tuple(sorted(tasks, key=lambda task: (task.group, task.split, task.index)))


def _file_bytes(
    latents: SourceLatents, rows_of_splits: list[np.ndarray], sizes: np.ndarray
) -> np.ndarray:
    """The bytes that each file counts for when files are grouped, int64 `(files,)`."""
    kept = np.zeros(len(sizes), np.int64)
    for rows in rows_of_splits:
        kept[rows] = sizes[rows]
    of_records = np.diff(np.concatenate([[0], np.cumsum(kept)])[latents.starts])
    least = [int(_LEAST_SHARE_OF_FILE * file.size) for file in latents.files]
    return np.where(of_records > 0, np.maximum(of_records, least), 0)


def group_files(file_bytes: np.ndarray, shard_bytes: int) -> list[range]:
    """Groups consecutive files: one large file alone, or several small files.

    A file is large if its entry in `file_bytes`, int64 `(files,)`, exceeds `shard_bytes`. A group
    of small files has half to twice `shard_bytes`, unless too few small files are neighbours.
    """
    groups: list[range] = []
    for is_large, run in itertools.groupby(
        range(len(file_bytes)), lambda file: file_bytes[file] > shard_bytes
    ):
        files = list(run)
        if is_large:
            groups += [range(file, file + 1) for file in files]
        else:
            groups += _group_small(range(files[0], files[-1] + 1), file_bytes, shard_bytes)
    return groups


def _group_small(files: range, file_bytes: np.ndarray, shard_bytes: int) -> list[range]:
    firsts, total = [files.start], 0
    for file in files:
        num_bytes = int(file_bytes[file])
        if total + num_bytes > shard_bytes and 2 * total >= shard_bytes:
            firsts.append(file)
            total = 0
        total += num_bytes
    if len(firsts) > 1 and 2 * total < shard_bytes:
        del firsts[-1]  # the rest is too little for a shard of its own
    return [range(first, end) for first, end in itertools.pairwise([*firsts, files.stop])]


def _cut(
    rows: np.ndarray,
    row_bytes: np.ndarray,
    file_starts: np.ndarray,
    groups: list[range],
    shard_bytes: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts the rows of one split into shards; yields the number of the group, and the rows.

    The rows of a group of several files are one shard; those of one file are the fewest shards of
    at most about `shard_bytes`, nearly equal. Rows are numbered over all files.
    """
    borders = np.searchsorted(rows, file_starts)
    for number, files in enumerate(groups):
        start, end = int(borders[files.start]), int(borders[files.stop])
        if start == end:
            continue
        num_bytes = int(row_bytes[start:end].sum())
        num_shards = 1 if len(files) > 1 else min(-(-num_bytes // shard_bytes), end - start)
        for part in np.array_split(rows[start:end], num_shards):
            yield number, part


def _make_parts(
    rows: np.ndarray, latents: SourceLatents, joined: _Joined
) -> tuple[tuple[ShardPart, ...], JoinedInputs]:
    """Divides rows that are numbered over all files by file."""
    files = np.searchsorted(latents.starts, rows, side='right') - 1
    in_file = (rows - latents.starts[files]).astype(np.int32)
    inputs = JoinedInputs(
        rows=in_file,
        keys=latents.keys[rows],
        places=joined.places[rows],
        captions=joined.captions.folder,
        sidecar=joined.sidecar.folder if joined.sidecar else '',
    )
    starts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(rows)]
    parts = [
        ShardPart(
            file=latents.files[files[start]],
            digest=latents.digests[files[start]],
            records=slice(start, end),
        )
        for start, end in itertools.pairwise(starts)
    ]
    return tuple(parts), inputs


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array).hexdigest()
