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
        nbytes = self.latents_nbytes + _RECORD_OVERHEAD
        if text := self.contents.text:
            dtype = np.dtype(schema.TEXT_DTYPES[text.feature])
            nbytes += text.dim * dtype.itemsize
        return self.caption_bytes + nbytes

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
    latents = plan.latents
    shard_bytes = plan.settings.shard_bytes
    record_bytes = plan.measure_records()
    rows_by_split = plan.find_rows()
    sample: np.ndarray | None = None
    if plan.settings.reads_heads:
        rows_by_file = np.diff(latents.starts)
        num_files = int(np.count_nonzero(rows_by_file))
        sample = sample_rows(rows_by_split[schema.TRAIN], num_files)
    # Of both splits together, so that shards of train and validation share the fetched files.
    file_bytes = _weigh_files(latents, rows_by_split.values(), record_bytes)
    groups = group_files(file_bytes, shard_bytes)
    make_task = _TaskMaker(plan, record_bytes, sample)
    tasks = []
    for split, rows in rows_by_split.items():
        shards = list(_cut_shards(rows, record_bytes[rows], latents.starts, groups, shard_bytes))
        for index, (group, shard_rows) in enumerate(shards):
            # All shards of the split are cut before, because each name has their number.
            name = schema.shard_filename(split, index, len(shards))
            tasks.append(make_task(split, index, name, group, shard_rows))
    # Above, those of one split were neighbours.
    tasks.sort(key=lambda task: (task.group, task.split, task.index))
    return tuple(tasks)


def sample_rows(rows: np.ndarray, num_files: int) -> np.ndarray:
    """Returns some thousand of the rows, spread evenly over all; int64, ascending.

    There is one or more for each of so many files of equal length.
    """
    count = min(max(_SAMPLED_ROWS, num_files), len(rows))
    places = np.arange(count) * len(rows) // max(1, count)
    return rows[places]


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
        plan = self._plan
        settings = plan.settings
        segments, inputs = _make_segments(rows, plan.latents, plan.contents, self._sample)
        num_bytes = int(self._record_bytes[rows].sum())
        if settings.in_place:
            num_bytes -= plan.latents_nbytes * len(rows)
        channels = plan.latents.shape[1]
        # Half of them are the standard deviations of the others.
        if plan.moments:
            channels //= 2
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
            channels=channels,
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
        origin = [self._common_digest, name]
        for segment in segments:
            origin.append(self._versions[segment.file])
            origin.append(array_sha256(inputs.rows[segment.records]))
        # Here the results of the shards name the files.
        if self._plan.settings.in_place:
            for segment in segments:
                origin.append(storage.make_absolute(segment.file.path))
                origin.append(segment.file.version)
        return json_digest.sha256(origin)


def _weigh_files(
    latents: SourceLatents, rows_of_splits: Iterable[np.ndarray], record_bytes: np.ndarray
) -> np.ndarray:
    """Returns the bytes that each file counts for when files are grouped, int64 `(files,)`."""
    kept_bytes = np.zeros(len(record_bytes), np.int64)
    for rows in rows_of_splits:
        kept_bytes[rows] = record_bytes[rows]
    bytes_before_row = np.concatenate([[0], np.cumsum(kept_bytes)])
    bytes_of_file = np.diff(bytes_before_row[latents.starts])
    least_bytes = [int(_LEAST_SHARE_OF_FILE * file.size) for file in latents.files]
    weights = np.maximum(bytes_of_file, least_bytes)
    # A file of which no row is kept is not fetched.
    weights[bytes_of_file == 0] = 0
    return weights


def group_files(file_bytes: np.ndarray, shard_bytes: int) -> list[range]:
    """Groups consecutive files: one of more than `shard_bytes` alone, or several small files.

    Returns the numbers of the files of each group; together these are all files, in order.

    Args:
        file_bytes: The bytes that each file counts for, int64 `(files,)`.
        shard_bytes: The bytes of a shard.
    """
    firsts: list[int] = []
    is_large = file_bytes > shard_bytes
    for are_large, run in itertools.groupby(range(len(file_bytes)), is_large.__getitem__):
        files = list(run)
        if are_large:
            firsts += files
        else:
            firsts += _divide_small_files(files, file_bytes, shard_bytes)
    # Each group ends where the next begins, and the last with the last file.
    ends = firsts[1:]
    ends.append(len(file_bytes))
    return list(map(range, firsts, ends))


def _divide_small_files(
    files: Sequence[int], file_bytes: np.ndarray, shard_bytes: int
) -> list[int]:
    """Returns the first file of each group of consecutive small files."""
    firsts = [files[0]]
    total = 0
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
        start = int(borders[files.start])
        end = int(borders[files.stop])
        # A group may have rows in one split alone.
        if start == end:
            continue
        num_shards = 1
        if len(files) == 1:
            num_bytes = int(row_bytes[start:end].sum())
            num_shards = -(-num_bytes // shard_bytes)  # rounded up
            # A record of more than `shard_bytes` is a shard of its own.
            num_shards = min(num_shards, end - start)
        for shard_rows in np.array_split(rows[start:end], num_shards):
            yield number, shard_rows


def _make_segments(
    rows: np.ndarray,
    latents: SourceLatents,
    contents: JoinedContents,
    sample: np.ndarray | None,
) -> tuple[tuple[ShardSegment, ...], JoinedInputs]:
    """Divides rows, which are numbered over all files, by file; returns segments and inputs.

    `sample` are the rows whose latents are read, int64, ascending; None stands for all.
    """
    files = np.searchsorted(latents.starts, rows, side='right') - 1
    rows_in_files = rows - latents.starts[files]
    inputs = JoinedInputs(
        rows=rows_in_files.astype(np.int32),
        keys=latents.keys[rows],
        places=contents.places[rows],
        captions=contents.captions.folder,
        texts=contents.texts.folder if contents.texts else '',
    )
    segments = []
    start = 0
    # The rows are ascending, so that those of a file are neighbours.
    for file, count in zip(*np.unique(files, return_counts=True), strict=True):
        records = slice(start, start + int(count))
        sampled_rows = None
        if sample is not None:
            is_sampled = np.isin(rows[records], sample)
            sampled_rows = rows_in_files[records][is_sampled]
        segments.append(
            ShardSegment(latents.files[file], latents.digests[file], records, sampled_rows)
        )
        start = records.stop
    return tuple(segments), inputs
