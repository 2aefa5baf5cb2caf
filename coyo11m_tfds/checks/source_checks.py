"""The contents of a source, and the build of it: a dry run that writes no shard.

    source = location.find('hf://datasets/owner/name')
    source_checks.check_files(source)                    # heads of some .pt files, at most 8
    dry = source_checks.estimate(source, BuildSettings(), write_rate=400e6)
    dry.num_records, dry.num_shards, dry.num_bytes, dry.seconds

Where the captions are few enough to be read in seconds the plan is the one of the build, to the
row. Elsewhere rows and sizes are those of some heads and of the Parquet file's footer, scaled up.
"""

import dataclasses
import datetime
import io
import tempfile
import time
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.checks import finding
from coyo11m_tfds.checks.finding import Finding
from coyo11m_tfds.convert import local_runner, shard_cuts
from coyo11m_tfds.convert.plan import make_plan
from coyo11m_tfds.convert.settings import BuildSettings
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.source import keyed_parquet
from coyo11m_tfds.source.location import Source
from coyo11m_tfds.source.source_latents import SourceLatents
from coyo11m_tfds.storage import remote
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.source_files import SourceFile

_HEADS = 8  # .pt files whose heads stand for all

# Captions of at most this size are read through, in a second or two; 11 million of 400 bytes
# take 13 s.
_EXACT_BYTES = {False: 500_000_000, True: 30_000_000}  # by whether they are remote

_RECORD_BYTES = schema.NUM_CROPS * schema.LATENT_NBYTES + 128  # without caption and text embedding

_MUCH = 0.1  # share of the rows; hardly anybody means to leave out one in ten

# Written by a core in a second, statistics and checksums included, where no disk or network waits.
_BYTES_A_CORE = 700e6
_PROBE_BYTES, _PROBES = 8 << 20, 4  # read at a time to see how fast a storage is; a build reads 4


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of a build.

    Attributes:
        num_records: of all splits.
        num_shards: of all splits.
        num_bytes: of the shards.
        store_bytes: of captions as plain text that would stay in the scratch folder.
        dropped: rows left out, by reason; {} where this is not known.
        exact: whether records and shards are those of the build.
        fetched_bytes: of remote files that would pass through the scratch folder.
        seconds: that it would take.
    """

    num_records: int
    num_shards: int
    num_bytes: int
    store_bytes: int
    dropped: Mapping[str, int]
    exact: bool
    fetched_bytes: int = 0
    seconds: float = 0


def check_files(source: Source) -> list[Finding]:
    """Reads the heads of some `.pt` files, spread over all."""
    files = _spread(source.latent_files)
    with tempfile.TemporaryDirectory() as heads:
        latents = SourceLatents.read(files, heads, drop_bad=True)
    num_bytes = sum(file.size for file in source.latent_files) + source.captions_file.size
    text = (
        f'{source.root}: {len(source.latent_files)} .pt files and captions, '
        f'{readable(num_bytes)}; {len(files)} heads read, {latents.num_rows:,} rows of '
        f'{latents.dtype}'
    )
    facts = {'files': len(source.latent_files), 'num_bytes': num_bytes, 'dtype': latents.dtype}
    if latents.disagreeing_files:
        text += f'; the tensors of {latents.disagreeing_files[0]} have unequal numbers of rows'
        mend = 'write the file again; a build leaves its rows out'
        return [finding.warned('source', text, mend, **facts)]
    return [finding.passed('source', text, **facts)]


def estimate(source: Source, settings: BuildSettings, write_rate: float) -> Estimate:
    """Plans a build without writing it.

    Args:
        source: to build.
        settings: of the build.
        write_rate: bytes a second that the destination takes.

    Raises:
        ValueError: the source could not be built; see `plan.make_plan`.
        OSError: it cannot be read.
    """
    captions = source.captions_file
    if captions.size <= _EXACT_BYTES[captions.is_remote] and _heads_are_few(source):
        found = _from_plan(source, settings)
    else:
        found = _from_heads(source, settings)
    is_remote = source.latent_files[0].is_remote
    fetched = sum(file.size for file in source.latent_files) + captions.size if is_remote else 0
    workers = local_runner.choose_workers(settings.num_workers, found.num_bytes)
    waits = [found.num_bytes / (_BYTES_A_CORE * workers), found.num_bytes / write_rate]
    if fetched:
        waits.append(fetched / _fetch_rate(source.latent_files[0]))
    return dataclasses.replace(found, seconds=max(waits), fetched_bytes=fetched)


def check_build(found: Estimate) -> list[Finding]:
    """Says what the build would be."""
    about = '' if found.exact else 'about '
    text = (
        f'{about}{found.num_records:,} records in {about}{found.num_shards:,} shards of '
        f'{readable(found.num_bytes)}, in about '
        f'{datetime.timedelta(seconds=max(1, round(found.seconds)))}'
    )
    facts = dataclasses.asdict(found) | {'dropped': dict(found.dropped)}
    left_out = {reason: count for reason, count in found.dropped.items() if count}
    if left_out:
        text += '; left out: ' + ', '.join(f'{n:,} {reason}' for reason, n in left_out.items())
    share = sum(left_out.values()) / max(1, found.num_records + sum(left_out.values()))
    if share > _MUCH:
        text += f' ({share:.1%} of the rows)'
        mend = 'see whether the captions belong to these .pt files, and to caption_column'
        return [finding.warned('build', text, mend, **facts)]
    return [finding.passed('build', text, **facts)]


def _spread(files: Sequence[SourceFile]) -> list[SourceFile]:
    places = np.unique(np.linspace(0, len(files) - 1, _HEADS).round().astype(int))
    return [files[place] for place in places]


def _heads_are_few(source: Source) -> bool:
    """True if the heads of all files can be read in seconds; of local ones they can."""
    return not source.latent_files[0].is_remote or len(source.latent_files) <= _HEADS


def _from_plan(source: Source, settings: BuildSettings) -> Estimate:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(f'{folder}/source', settings.scratch_bytes)
        plan = make_plan(source, settings, scratch, folder)
        store_bytes = _store_bytes(source.captions_file, settings)
    return Estimate(
        num_records=sum(task.parts[-1].records.stop for task in plan.tasks),
        num_shards=len(plan.tasks),
        num_bytes=plan.num_bytes,
        store_bytes=store_bytes,
        dropped=plan.dropped.counts,
        exact=True,
    )


def _from_heads(source: Source, settings: BuildSettings) -> Estimate:
    files = _spread(source.latent_files)
    with tempfile.TemporaryDirectory() as heads:
        latents = SourceLatents.read(
            files, heads, drop_bad=settings.drop_bad, check_crc=settings.check_crc
        )
    rows_a_byte = latents.num_rows / sum(file.size for file in files)
    num_rows, caption_bytes = _footer(source.captions_file, settings.caption_column)
    text_bytes = 2 * schema.DEFAULT_TEXT_DIM if settings.text_embeddings else 0
    a_record = _RECORD_BYTES + caption_bytes / max(1, num_rows) + text_bytes
    rows = np.array([rows_a_byte * file.size for file in source.latent_files])
    per_file = (rows * a_record).astype(np.int64)
    num_shards = 0
    for group in shard_cuts.group_files(per_file, settings.shard_bytes):
        of_group = int(per_file[group.start : group.stop].sum())
        for share in (1 - settings.validation_fraction, settings.validation_fraction):
            num_shards += -(-int(share * of_group) // settings.shard_bytes)
    if settings.in_place:
        a_record -= schema.NUM_CROPS * schema.LATENT_NBYTES
    return Estimate(
        num_records=int(rows.sum()),
        num_shards=num_shards,
        num_bytes=int(rows.sum() * a_record),
        store_bytes=int(caption_bytes + 24 * num_rows),
        dropped={},
        exact=False,
    )


def _store_bytes(captions: SourceFile, settings: BuildSettings) -> int:
    num_rows, caption_bytes = _footer(captions, settings.caption_column)
    return caption_bytes + 24 * num_rows


def _footer(captions: SourceFile, column: str) -> tuple[int, int]:
    """Rows of the Parquet file, and about how many bytes the captions of a column take.

    Raises:
        ValueError: it is no Parquet file, or lacks the column.
    """
    with keyed_parquet.naming_damage(captions.path), _Ranges(captions) as stream:
        file = pq.ParquetFile(stream)
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(
                f"{captions.path}: lacks the column '{column}'; its columns are "
                f'{", ".join(names)}. Set caption_column.'
            )
        keyed_parquet.check_readable(file, [column], groups=1)
        chunks = keyed_parquet.column_chunks(file.metadata, column)
    return file.metadata.num_rows, sum(chunk.total_uncompressed_size for chunk in chunks)


class _Ranges(io.RawIOBase):
    """A file, local or remote, of which ranges are read on demand."""

    def __init__(self, file: SourceFile):
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._file.size)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        size = left if size < 0 else min(size, left)
        data = remote.read_range(self._file, self._at, size) if size else b''
        self._at += len(data)
        return data


def _fetch_rate(file: SourceFile) -> float:
    """Bytes a second that a build fetches: those of one request, times the requests at a time."""
    length = min(_PROBE_BYTES, file.size)
    start = time.monotonic()
    remote.read_range(file, 0, length)
    return _PROBES * length / max(1e-3, time.monotonic() - start)
