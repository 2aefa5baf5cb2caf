"""Cuts the kept rows of a source into shards, and describes the task of each.

Files are grouped first. A group is one large file, which makes shards of its own, or several small
files, which make one. So each file belongs to one group, and is fetched once.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.convert.joined_contents import JoinedContents, array_sha256, find_validation
from coyo11m_tfds.convert.tasks import JoinedInputs, ShardSegment, ShardTask
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.source.source_latents import SourceLatents
from coyo11m_tfds.storage import json_digest

# Of a source of which only heads are read, so many rows of the train split are read too, or one for
# each file: the mean of a channel is then known to about 1% of its standard deviation.
_SAMPLED_ROWS = 2048

_RECORD_OVERHEAD = 128  # bytes of a record besides latents, caption and text

# A file counts for at least this share of its size: the files of one shard are on the disk at the
# same time, however few of their rows are kept.
_LEAST_SHARE_OF_FILE = 1 / 4


@dataclasses.dataclass(frozen=True)
class RecordPlan:
    """What becomes the records of a data set, and in which form."""

    settings: BuildSettings
    latents: SourceLatents
    contents: JoinedContents
    is_kept: np.ndarray  # of each row of latents, bool `(n,)`
    caption_bytes: np.ndarray  # sizes of the captions of the rows, int `(n,)`
    moments: str  # one of `schema.MOMENTS`; '' for latents
    latent_scale: latent_rgb.Scale | None  # see `latent_rgb.find_scale`
    limit: int | None  # records of each split; None for all

    @property
    def latents_nbytes(self) -> int:
        """Bytes of the latents of a row."""
        return schema.latents_nbytes(self.latents.dtype, self.latents.shape)

    def measure_records(self) -> np.ndarray:
        """Returns the size of the whole record of each row in bytes, int64 `(n,)`, within 1%."""
        text_nbytes = 0
        if text := self.contents.text:
            text_nbytes = text.dim * np.dtype(schema.TEXT_DTYPES[text.feature]).itemsize
        return self.caption_bytes + (self.latents_nbytes + text_nbytes + _RECORD_OVERHEAD)

    def find_rows(self) -> dict[str, np.ndarray]:
        """Returns the kept rows of each split, int64, ascending."""
        is_validation = find_validation(self.latents.keys, self.settings)
        train = np.flatnonzero(self.is_kept & ~is_validation)
        validation = np.flatnonzero(self.is_kept & is_validation)
        return {
            schema.TRAIN: train[: self.limit],
            schema.VALIDATION: validation[: self.limit],
        }


def plan_tasks(plan: RecordPlan) -> tuple[ShardTask, ...]:
    """Returns the tasks of all shards; those of one group are neighbours.

    Shards are cut by the sizes of whole records also in place, so that both kinds have the same.
    """
    latents, shard_bytes = plan.latents, plan.settings.shard_bytes
    record_bytes = plan.measure_records()
    rows_by_split = plan.find_rows()
    sample: np.ndarray | None = None
    if plan.settings.reads_heads:
        num_files = int(np.count_nonzero(np.diff(latents.starts)))
        sample = sample_rows(rows_by_split[schema.TRAIN], num_files)
    # Of both splits together, so that shards of train and validation share the fetched files.
    file_bytes = _weigh_files(latents, rows_by_split.values(), record_bytes)
    groups = group_files(file_bytes, shard_bytes)
    make_task = _TaskMaker(plan, record_bytes, sample)
    tasks = []
    for split, rows in rows_by_split.items():
        shards = list(_cut_shards(rows, record_bytes[rows], latents.starts, groups, shard_bytes))
        for index, (group, shard_rows) in enumerate(shards):
            name = schema.shard_filename(split, index, len(shards))
            tasks.append(make_task(split, index, name, group, shard_rows))
    tasks.sort(key=lambda task: (task.group, task.split, task.index))
    return tuple(tasks)


def sample_rows(rows: np.ndarray, num_files: int) -> np.ndarray:
    """Returns some thousand of the rows, spread evenly over all; int64, ascending.

    There is one or more for each of so many files of equal length.
    """
    count = min(max(_SAMPLED_ROWS, num_files), len(rows))
    return rows[np.arange(count) * len(rows) // max(1, count)]


class _TaskMaker:
    """Makes the tasks of a plan."""

    def __init__(self, plan: RecordPlan, record_bytes: np.ndarray, sample: np.ndarray | None):
        """Takes the bytes of each row's record and, as `sample`, the rows whose latents are read.

        These are int64 and ascending; None stands for all.
        """
        self._plan = plan
        self._sample = sample
        self._record_bytes = record_bytes
        self._versions = dict(zip(plan.latents.files, plan.latents.versions, strict=True))
        # What all shards have in common, of what decides their bytes: a part of the fingerprint of
        # each, by which a later build knows what is finished.
        common = [schema.RECORD_FORMAT, plan.latents.dtype, plan.settings.drop_bad]
        common += plan.contents.digests
        if plan.settings.in_place:
            common.append('in_place')
        if plan.settings.reads_heads:
            common.append('heads')
        self._common_digest = json_digest.sha256(common)

    def __call__(
        self, split: str, index: int, name: str, group: int, rows: np.ndarray
    ) -> ShardTask:
        """Returns the task of a shard with these rows, numbered over all files and ascending."""
        plan, settings, latents = self._plan, self._plan.settings, self._plan.latents
        segments, inputs = _make_segments(rows, latents, plan.contents, self._sample)
        num_bytes = int(self._record_bytes[rows].sum())
        if settings.in_place:
            num_bytes -= plan.latents_nbytes * len(rows)
        return ShardTask(
            split=split,
            index=index,
            filename=name,
            group=group,
            segments=segments,
            inputs=inputs,
            text=plan.contents.text,
            drop_bad=settings.drop_bad,
            check_crc=settings.check_crc,
            num_bytes=num_bytes,
            in_place=settings.in_place,
            channels=latents.shape[1] // 2 if plan.moments else latents.shape[1],
            moments=plan.moments,
            latent_scale=plan.latent_scale,
            latents_from=schema.parse_latents_from(settings.latents_from, settings.key_column),
            fingerprint=self._make_fingerprint(name, segments, inputs),
        )

    def _make_fingerprint(
        self, name: str, segments: Sequence[ShardSegment], inputs: JoinedInputs
    ) -> str:
        """Returns a digest of all that decides the bytes of a shard.

        So a resumed build of other files or settings writes the shard again, and keeps those that
        stay the same.
        """
        digests = []
        for segment in segments:
            digests.append(self._versions[segment.file])
            digests.append(array_sha256(inputs.rows[segment.records]))
        if self._plan.settings.in_place:
            for segment in segments:
                digests.append(storage.make_absolute(segment.file.path))
                digests.append(segment.file.version)
        return json_digest.sha256([self._common_digest, name, *digests])


def _weigh_files(
    latents: SourceLatents, rows_of_splits: Iterable[np.ndarray], record_bytes: np.ndarray
) -> np.ndarray:
    """Returns the bytes that each file counts for when files are grouped, int64 `(files,)`."""
    kept_bytes = np.zeros(len(record_bytes), np.int64)
    for rows in rows_of_splits:
        kept_bytes[rows] = record_bytes[rows]
    bytes_before = np.concatenate([[0], np.cumsum(kept_bytes)])
    bytes_of_file = np.diff(bytes_before[latents.starts])
    min_bytes = [int(_LEAST_SHARE_OF_FILE * file.size) for file in latents.files]
    # A file of which no row is kept is not fetched.
    return np.where(bytes_of_file > 0, np.maximum(bytes_of_file, min_bytes), 0)


def group_files(file_bytes: np.ndarray, shard_bytes: int) -> list[range]:
    """Groups consecutive files: one of more than `shard_bytes` alone, or several small files.

    Args:
        file_bytes: The bytes that each file counts for, int64 `(files,)`.
        shard_bytes: The bytes of a shard.
    """
    groups: list[range] = []
    is_large = file_bytes > shard_bytes
    for large, run in itertools.groupby(range(len(file_bytes)), is_large.__getitem__):
        files = list(run)
        firsts = files if large else _divide_small_files(files, file_bytes, shard_bytes)
        ends = [*firsts[1:], files[-1] + 1]
        groups += map(range, firsts, ends)
    return groups


def _divide_small_files(
    files: Sequence[int], file_bytes: np.ndarray, shard_bytes: int
) -> list[int]:
    """Returns the first file of each group of consecutive small files."""
    firsts, total = [files[0]], 0
    for file in files:
        num_bytes = int(file_bytes[file])
        # Half of a shard is enough for a group of its own, if the next file would be too much.
        if total + num_bytes > shard_bytes and 2 * total >= shard_bytes:
            firsts.append(file)
            total = 0
        total += num_bytes
    # The rest may be too little for a shard of its own.
    if len(firsts) > 1 and 2 * total < shard_bytes:
        del firsts[-1]
    return firsts


def _cut_shards(
    rows: np.ndarray,
    row_bytes: np.ndarray,
    file_starts: np.ndarray,
    groups: list[range],
    shard_bytes: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts the rows of one split, numbered over all files; yields group and rows of each shard.

    The rows of several files are one shard, those of one file the fewest that are not too large.
    """
    # `rows` are some of all rows, ascending: where the rows of each file begin among them.
    borders = np.searchsorted(rows, file_starts)
    for number, files in enumerate(groups):
        start, end = int(borders[files.start]), int(borders[files.stop])
        if start == end:
            continue
        num_shards = 1
        if len(files) == 1:
            num_bytes = int(row_bytes[start:end].sum())
            num_shards = min(-(-num_bytes // shard_bytes), end - start)
        for shard_rows in np.array_split(rows[start:end], num_shards):
            yield number, shard_rows


def _make_segments(
    rows: np.ndarray,
    latents: SourceLatents,
    contents: JoinedContents,
    sample: np.ndarray | None,
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
    segments = []
    for start, end in itertools.pairwise(starts):
        file = files[start]
        records = slice(start, end)
        sampled_rows = None
        if sample is not None:
            sampled_rows = inputs.rows[records][np.isin(rows[records], sample)].astype(np.int64)
        segments.append(
            ShardSegment(latents.files[file], latents.digests[file], records, sampled_rows)
        )
    return tuple(segments), inputs
