"""Copies a source to another place: in parallel, verified and resumable.

    python -m coyo11m_tfds.mirror \\
        hf://datasets/KBlueLeaf/coyo11m-256px-ccrop-latent gs://BUCKET/coyo11m

    from coyo11m_tfds import mirror
    mirror.mirror('gs://bucket/coyo11m', '/data/coyo11m')

The `.pt` files and the Parquet file of captions keep their names. A second call copies the files
that are missing or have changed since. From the hub to a bucket, a file passes through a scratch
folder of limited size; between buckets, the storage copies by itself. The destination also gets a
folder `.mirror/` with checksums. The next call reads them to find finished copies. A build reads
them to find damage in a Parquet file whose pages have no checksums. pandas writes such files;
`DataFrame.to_parquet(path, write_page_checksum=True)` writes a file whose pages have checksums.

On 2 cores, with fake servers of hub and storage on the same machine, 1 GB in four files takes the
hub to the disk at 650 MB/s, to a bucket at 320 MB/s, and from disk to disk at 870 MB/s (`cp` and
`sync`: 1,170), start of the program included. Finished copies are checked at 3,500 MB/s.
"""

import argparse
import dataclasses
import fnmatch
import multiprocessing.pool
import os
import pathlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping

from coyo11m_tfds import schema
from coyo11m_tfds.process import command_line, ending
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.source import location
from coyo11m_tfds.source.copied_files import CopiedFiles
from coyo11m_tfds.storage import build_lock, file_copier, retry, source_files
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.names import stays_inside
from coyo11m_tfds.storage.scratch import Scratch, user_cache
from coyo11m_tfds.storage.source_files import SourceFile

DEFAULT_PARALLEL = 4
DEFAULT_SCRATCH_GB = 50.0

# Long enough for the lease of a mirror that was killed on another machine to expire.
_WAIT_SECONDS = 300

# After an error, for the other copies to notice it and end.
_GRACE_SECONDS = 5

_GCS = 'gs://'


@dataclasses.dataclass(frozen=True)
class Summary:
    """The files that are at the destination now.

    Attributes:
        num_files: that the source has.
        num_bytes: of these.
        num_copied: files among them that were copied by this call, not by an earlier one.
        destination: where they are.
    """

    num_files: int
    num_bytes: int
    num_copied: int
    destination: str

    def __str__(self) -> str:
        return (
            f'{self.num_files} files, {readable(self.num_bytes)}, are verified at '
            f'{self.destination}; {self.num_copied} of them were copied now.'
        )


def mirror(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    parallel: int = DEFAULT_PARALLEL,
    scratch_dir: str | os.PathLike[str] = '',
    scratch_bytes: int = int(DEFAULT_SCRATCH_GB * 1e9),
    include: Collection[str] = (),
) -> Summary:
    """Copies what is missing at the destination.

    Args:
        source: local folder, `gs://bucket/folder` or `hf://datasets/owner/name[@revision]`.
        destination: local folder or `gs://bucket/folder`.
        parallel: files that are copied at a time.
        scratch_dir: local folder for files on their way from the hub to a bucket; '' for one in
            the user's cache.
        scratch_bytes: most that they may take there.
        include: patterns, such as `*.md`, of further files by their path within the source.

    Raises:
        ValueError: the source lacks files, or an argument is bad.
        PermissionError: credentials are missing or refused.
        OSError: a file cannot be read or written. Finished copies stay, and the next call resumes.
        TimeoutError: another mirror to this destination is running.
    """
    target = Destination(destination)
    if parallel < 1:
        raise ValueError(f'parallel is {parallel}, expected at least 1.')
    files = find_files(source, include)
    scratch = _open_scratch(target, files, os.fspath(scratch_dir), scratch_bytes)
    num_bytes = sum(file.size for file in files.values())
    with build_lock.hold(target.folder, _WAIT_SECONDS):
        copied = CopiedFiles(target)
        missing = copied.missing(files)
        _check_space(target, missing)
        goals = {'files': len(files)}
        with Progress(f'Copying to {target.folder}', num_bytes, 'B', goals) as progress:
            left = sum(file.size for file in missing.values())
            progress.skip(num_bytes - left, files=len(files) - len(missing))

            def copy(name: str, file: SourceFile, stopped: threading.Event) -> None:
                share = _Share(progress, file.size, stopped)
                share.add(0)  # it may have been stopped before it began
                state = file_copier.copy(file, target, name, scratch, share.add)
                copied.save(name, file, state)
                share.finish()

            _copy_all(missing, copy, parallel)
        target.sweep()
    return Summary(len(files), num_bytes, len(missing), target.folder)


def find_files(
    source: str | os.PathLike[str], include: Collection[str] = ()
) -> dict[str, SourceFile]:
    """Returns the files of a source by their path relative to it; see `mirror`.

    Raises:
        ValueError: the source lacks files, or one has a name that leads out of its folder.
        PermissionError, OSError: as `location.find`.
    """
    found = location.find(source)
    files = {f'{schema.LATENTS_FOLDER}/{file.name}': file for file in found.latent_files}
    files[schema.CAPTIONS_FILE] = found.captions_file
    wanted = [
        name
        for name in (_all_names(found.root) if include else ())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
    ]
    for name in [*files, *wanted]:
        if not stays_inside(name):
            raise ValueError(
                f'{found.root}: the name {name!r} leads out of the folder that it would be copied '
                "to. Names must be relative, without empty parts, '.', '..' and backslashes: "
                'rename it, or leave it out with another --include.'
            )
    others = [name for name in wanted if name not in files]
    return files | {name: source_files.describe(f'{found.root}/{name}') for name in others}


def _all_names(root: str) -> list[str]:
    """Paths of all files of a source, relative to it, without hidden ones."""
    if not source_files.is_remote(root):
        paths = [path for path in pathlib.Path(root).rglob('*') if path.is_file()]
        names = [path.relative_to(root).as_posix() for path in paths]
    elif root.startswith(_GCS):
        found = retry.call(lambda: source_files.gcs().find(root), f'listing {root}')
        names = [path.removeprefix(root.removeprefix(_GCS) + '/') for path in found]
    else:
        names = _names_on_hub(root)
    return sorted(name for name in names if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    parts = [part for part in name.split('/') if part not in ('.', '..')]
    # Some tools make an object whose name ends in a slash for every folder.
    return not name or name.endswith('/') or any(part.startswith('.') for part in parts)


def _names_on_hub(root: str) -> list[str]:
    import huggingface_hub

    uri = source_files.hub_uri(root)
    api = huggingface_hub.HfApi(endpoint=source_files.hub_endpoint())
    # Of the hub client's ways to list a repository the only one with a time-out.
    info = retry.call(
        lambda: api.dataset_info(uri.id, revision=uri.revision, timeout=retry.stall_seconds()),
        f'listing {root}',
    )
    paths = [sibling.rfilename for sibling in info.siblings or ()]
    prefix = f'{uri.path_in_repo}/' if uri.path_in_repo else ''
    return [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]


def _open_scratch(
    target: Destination, files: Mapping[str, SourceFile], folder: str, num_bytes: int
) -> Scratch | None:
    """The scratch folder, checked to be large enough; None if no file needs it."""
    passing = [file for file in files.values() if file_copier.needs_scratch(file, target)]
    if not passing:
        return None
    largest = max(passing, key=lambda file: file.size)
    if largest.size > num_bytes:
        raise ValueError(
            f'{largest.path} has {readable(largest.size)}, but the scratch folder may hold '
            f'{readable(num_bytes)}; allow it more (--scratch_gb).'
        )
    return Scratch(folder or user_cache(schema.NAME, 'mirror'), num_bytes)


def _check_space(target: Destination, missing: Mapping[str, SourceFile]) -> None:
    if target.is_remote or not missing:
        return
    staging = target.staging('')
    free = shutil.disk_usage(staging).free
    come = sum(path.stat().st_size for path in pathlib.Path(staging).iterdir())
    needed = sum(file.size for file in missing.values()) - come
    if free < needed:
        raise OSError(
            f'{target.folder} has {readable(free)} free, but {readable(needed)} are yet to come. '
            'Free some space or choose another destination.'
        )


def _copy_all(
    missing: Mapping[str, SourceFile],
    copy: Callable[[str, SourceFile, threading.Event], None],
    parallel: int,
) -> None:
    """Copies files; after the first error the others end with the next bytes they get."""
    # The largest first: begun last, it would be waited for alone.
    by_size = sorted(missing.items(), key=lambda item: item[1].size, reverse=True)
    stopped = threading.Event()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    # Unlike those of concurrent.futures, these threads do not keep a program from ending while
    # one of them waits for a silent server.
    with multiprocessing.pool.ThreadPool(parallel) as pool:
        results = [
            pool.apply_async(
                copy, (*item, stopped), callback=outcomes.put, error_callback=outcomes.put
            )
            for item in by_size
        ]
        try:
            for _ in results:
                error = outcomes.get()
                if error is not None:
                    raise error
        except BaseException:
            stopped.set()
            deadline = time.monotonic() + _GRACE_SECONDS
            for result in results:
                result.wait(max(0, deadline - time.monotonic()))
            raise


class _Stopped(Exception):
    """Ends the copying of a file because that of another failed."""


class _Share:
    """The progress of one file, which never exceeds its size, however often bytes are sent."""

    def __init__(self, progress: Progress, size: int, stopped: threading.Event):
        self._progress, self._size, self._stopped = progress, size, stopped
        self._heard = self._told = 0

    def add(self, num_bytes: int) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._heard += num_bytes
        self._tell(min(self._heard, self._size))

    def finish(self) -> None:
        self._tell(self._size, files=1)

    def _tell(self, done: int, **counts: int) -> None:
        self._progress.add(done - self._told, **counts)
        self._told = done


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line.Parser('coyo11m_tfds.mirror', __doc__)
    add = parser.add_argument
    add('source', help='local folder, gs://bucket/folder or hf://datasets/owner/name[@revision]')
    add('destination', help='local folder or gs://bucket/folder')
    add('--parallel', type=int, default=DEFAULT_PARALLEL, help='files at a time (%(default)s)')
    add('--scratch', default='', help="local folder for temporary files (in the user's cache)")
    add(
        '--scratch_gb',
        type=command_line.positive,
        default=DEFAULT_SCRATCH_GB,
        help='size limit of that folder (%(default)g)',
    )
    add('--include', action='append', default=[], metavar='GLOB', help='more files, e.g. *.md')
    return parser.parse_args()


def main() -> None:
    """Runs the command line; an error ends it with one message and status 1."""
    flags = parse_flags()
    command_line.show_log()
    ends = ending.in_one_line(
        'what was copied stays, the same command copies the rest',
        (OSError, ValueError),
    )
    with ends:
        summary = mirror(
            flags.source,
            flags.destination,
            parallel=flags.parallel,
            scratch_dir=flags.scratch,
            scratch_bytes=int(flags.scratch_gb * 1e9),
            include=flags.include,
        )
        print(summary)


if __name__ == '__main__':
    main()
