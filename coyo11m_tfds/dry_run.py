"""The plan of a build that is not made, or an estimate: what it reads, drops and writes.

dry_run = plan_or_estimate('SOURCE', BuildSettings())
dry_run.num_records, dry_run.num_bytes
"""

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from coyo11m_tfds.convert.build_settings import BuildSettings, check_build_memory
from coyo11m_tfds.process.sizes import format_bytes, format_count
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.source.source_folder import SourceFolder
from coyo11m_tfds.storage import scratch
from coyo11m_tfds.storage.stored_file import StoredFile

# A source of more files, or with more captions, is not planned: the heads of some files stand for
# all. Captions of this size are read in seconds.
_HEADS = 8
_EXACT_BYTES = {False: 500_000_000, True: 30_000_000}  # by whether they are remote
_FETCHED_AT_ONCE = 4  # large files that a build holds at a time


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The plan, or an estimate, of a build."""

    source: str = ''  # number and size of its files
    num_records: int = 0
    num_bytes: int = 0  # of all shards
    num_shards: int = 0  # of all splits; 0 for an estimate
    scratch_bytes: int = 0  # of the captions, and of remote files that are held at a time
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)  # rows by reason


def plan_or_estimate(place: str, settings: BuildSettings) -> DryRun:
    """Returns the plan of a build, or an estimate where captions are not read in seconds.

    Raises a ValueError or an OSError for a source that cannot be built, and a ModuleNotFoundError
    without the packages of the extra `convert`.
    """
    # Both import packages of that extra, which the other checks of `doctor` do without.
    from coyo11m_tfds.convert.plan import make_plan
    from coyo11m_tfds.convert.source_contents import examine_source

    source = source_folder.find_source(place)
    files = source.latent_files
    # Of files from all over the source. Heads and schemas alone are checked for an estimate.
    files_per_head = -(-len(files) // _HEADS)
    heads = files[::files_per_head]
    with tempfile.TemporaryDirectory() as folder:
        source_contents = examine_source(source, settings, folder, heads)
        source = source_contents.folder
        dry_run = DryRun(
            source=_describe_source(source),
            scratch_bytes=_estimate_scratch_bytes(source, settings),
        )
        if _is_planned_soon(source, files):
            plan = make_plan(source, settings, scratch.Scratch(f'{folder}/source'), folder)
            # A task makes a shard, of which the last segment ends with the last record.
            num_records = sum(task.segments[-1].records.stop for task in plan.tasks)
            return dataclasses.replace(
                dry_run,
                num_records=num_records,
                num_bytes=plan.num_bytes,
                num_shards=len(plan.tasks),
                dropped=plan.dropped.counts,
            )
        num_rows_in_heads = source_contents.latents.num_rows
    # The other files have as many rows a byte as those whose heads were read.
    num_rows = num_rows_in_heads * _count_bytes(files) // _count_bytes(heads)
    check_build_memory(num_rows, settings.num_workers)
    num_bytes = _count_bytes(source.caption_files)
    if not settings.in_place:
        num_bytes += _count_bytes(files)
    return dataclasses.replace(dry_run, num_records=num_rows, num_bytes=num_bytes)


def _is_planned_soon(source: SourceFolder, files: Sequence[StoredFile]) -> bool:
    """Returns whether a plan of a source takes seconds; `files` are those of its latents."""
    # A build reads the captions to the end, or whole files where captions lie with the latents.
    num_bytes = _count_bytes(source.caption_files) or _count_bytes(files)
    is_remote = not files[0].local_path
    if num_bytes > _EXACT_BYTES[is_remote]:
        return False
    # A plan also needs the head of every file, each of which takes a request.
    return not is_remote or len(files) <= _HEADS


def _describe_source(source: SourceFolder) -> str:
    """Returns '8 .pt files and captions, 20.1 GB'."""
    files = source.latent_files
    # A source has files of one format.
    kind = os.path.splitext(files[0].path)[1]
    text = format_count(len(files), f'{kind} file')
    if _count_bytes(source.caption_files):
        text += ' and captions'
    num_bytes = _count_bytes(source.by_name.values())
    return f'{text}, {format_bytes(num_bytes)}'


def _count_bytes(files: Iterable[StoredFile]) -> int:
    """Returns the size of all files together."""
    return sum(file.size for file in files)


def _estimate_scratch_bytes(source: SourceFolder, settings: BuildSettings) -> int:
    """Returns how much a build holds at a time of captions and of remote files."""
    num_bytes = _count_bytes(source.caption_files)
    # Local files are read where they are. Of remote ones, the largest may be held at one time,
    # unless their heads and some rows are enough, which take some MB.
    is_local = bool(source.latent_files[0].local_path)
    if not is_local and not settings.reads_heads:
        by_size = sorted(source.by_name.values(), key=lambda file: file.size)
        num_bytes += _count_bytes(by_size[-_FETCHED_AT_ONCE:])
    return num_bytes
