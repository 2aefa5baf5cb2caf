"""Copies a source to another place: parallel, verified, resumable.

    python -m coyo11m_tfds.mirror \\
        hf://datasets/KBlueLeaf/coyo11m-256px-ccrop-latent gs://BUCKET/coyo11m

The files of a source keep their names. A second call copies the files that are missing or have
changed since. From the hub to a bucket, a file passes through a scratch folder; between buckets,
the storage copies by itself. The destination also gets a folder `.mirror/` with checksums. The next
call reads them to find finished copies. A build reads them to find damage in files without
checksums: safetensors, MDS, tars, and Parquet files that pandas writes by default
(`DataFrame.to_parquet(path, write_page_checksum=True)` writes checksums of pages).

Speed for 1 GB in four files on 2 cores, with fake servers of hub and storage on the same machine
and the start of the program included: 650 MB/s from the hub to the disk, 320 MB/s from the hub to a
bucket, and 870 MB/s from disk to disk (`cp` and `sync`: 1,170). A check of finished copies runs at
3,500 MB/s.
"""

import concurrent.futures
import dataclasses
import multiprocessing.pool
import os
import threading
from collections.abc import Mapping

from coyo11m_tfds import schema, storage
from coyo11m_tfds.process import command_line, errors
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_bytes, format_count
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.source.copied_files import CopiedFiles, check_recorded_state
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.scratch import Scratch, user_cache
from coyo11m_tfds.storage.stored_file import StoredFile

_PARALLEL = 4  # files


@dataclasses.dataclass(frozen=True)
class MirrorSummary:
    """The files at the destination; `num_copied` of them were copied by this call."""

    num_files: int
    num_bytes: int
    num_copied: int
    destination: str

    def __str__(self) -> str:
        are = 'is' if self.num_files == 1 else 'are'
        were = 'was' if self.num_copied == 1 else 'were'
        return (
            f'{format_count(self.num_files, "file")}, {format_bytes(self.num_bytes)}, {are} '
            f'verified at {self.destination}; {self.num_copied} of them {were} copied now.'
        )


def mirror(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    captions: str = '',
    parallel: int = _PARALLEL,
    scratch_dir: str | os.PathLike[str] = '',
) -> MirrorSummary:
    """Copies the files that are missing at the destination.

    Args:
        source: Local folder, `gs://bucket/folder` or `hf://datasets/owner/name[@revision]`.
        destination: Local folder or `gs://bucket/folder`.
        captions: As in the config of a build; captions from elsewhere are copied into a folder of
            the same name, or under the name of the file.
        parallel: Number of files that are copied at a time.
        scratch_dir: Local folder for temporary copies between the hub and a bucket; '' for a folder
            in the user's cache.

    Raises:
        ValueError: A wrong argument, no such source, captions with the name of another file, or a
            file that differs from its checksum.
        OSError: A storage is out of reach, full, or in use by another process.
    """
    # Arguments come before the source, whose listing may take minutes.
    target = storage.open_writable_folder(destination)
    errors.at_least(1).check('parallel', parallel)
    scratch = Scratch(scratch_dir or user_cache(schema.NAME, 'mirror'))
    folder = source_folder.find_source(source).with_captions(captions)
    files = folder.by_name
    _check_all_named(folder, captions)
    num_bytes = sum(file.size for file in files.values())
    # A second command for the same folder is refused: it would wait for hours, to copy nothing.
    with locks.hold(target.folder, wait=False):
        copied = CopiedFiles(target)
        missing_files = copied.missing(files)
        missing_bytes = sum(file.size for file in missing_files.values())
        # Now, and not after hours of copying.
        target.check_space(missing_bytes)
        goals = {'files': len(files)}
        with Progress(f'Copying to {target.folder}', num_bytes, 'B', goals) as progress:
            # What is there already says nothing about the speed.
            num_finished = len(files) - len(missing_files)
            progress.skip(num_bytes - missing_bytes, files=num_finished)
            _copy_all(missing_files, target, copied, scratch, progress, parallel)
        # What killed runs before this one have left.
        target.sweep()
    return MirrorSummary(len(files), num_bytes, len(missing_files), target.folder)


def _check_all_named(source: source_folder.SourceFolder, captions: str) -> None:
    """Raises a ValueError for captions from elsewhere with the name of a file of latents."""
    paths = {file.path for file in source.by_name.values()}
    for file in source.latent_files:
        if file.path not in paths:
            problem = f'the copy would take the place of {file.path}: rename one of the two.'
            raise errors.FieldError('captions', captions, problem)


def _copy_all(
    files: Mapping[str, StoredFile],
    target: WritableFolder,
    copied: CopiedFiles,
    scratch: Scratch,
    progress: Progress,
    parallel: int,
) -> None:
    """Copies files, several at a time, and records each; the first error ends all copies."""
    stop = threading.Event()

    def copy(name: str) -> None:
        """Copies one file, in a thread; raises a CancelledError after an error of another one."""
        file = files[name]
        remaining = file.size

        def count_bytes(num_bytes: int) -> None:
            """Counts bytes that were copied, and ends the copy if it is not wanted any more."""
            nonlocal remaining
            if stop.is_set():
                raise concurrent.futures.CancelledError
            # Bytes that are received again after a retry are not progress.
            num_new_bytes = min(num_bytes, remaining)
            progress.add(num_new_bytes)
            remaining -= num_new_bytes

        # Also before the first byte: a file that waits for its turn is not begun any more.
        count_bytes(0)
        state = target.copy(file, name, scratch, count_bytes)
        # The source is a copy itself, and its file has changed since.
        if file.recorded and state != file.recorded:
            target.remove([name])
            check_recorded_state(state, file.recorded, file.path)
        # After the copy, so that a killed run leaves no record of what it has not copied.
        copied.save(name, file, state)
        # A copy within a storage sends no bytes through here.
        progress.add(remaining, files=1)

    # The largest first: begun last, it would be copied alone at the end.
    by_size = sorted(files, key=lambda name: files[name].size, reverse=True)
    try:
        # Unlike those of concurrent.futures, these threads do not keep a program from ending while
        # one of them waits for a silent server.
        with multiprocessing.pool.ThreadPool(parallel) as pool:
            for _ in pool.imap_unordered(copy, by_size):
                pass
    finally:
        # Threads that still copy find it at their next bytes.
        stop.set()


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.mirror', __doc__)
    add = parser.add_argument
    add('source', help='local folder, gs://bucket/folder or hf://datasets/owner/name[@revision]')
    add('destination', help='local folder or gs://bucket/folder')
    add('--captions', default='', help='captions to copy, as in the config of a build')
    add('--parallel', type=int, default=_PARALLEL, help='files to copy at a time (%(default)s)')
    text = "local folder for temporary files (by default in the user's cache)"
    add('--scratch', default='', dest='scratch_dir', metavar='SCRATCH', help=text)
    flags = parser.parse_args()
    command_line.show_log()
    with command_line.ends_in_one_line('what was copied stays, the same command copies the rest'):
        command_line.print_lines(mirror(**vars(flags)))


if __name__ == '__main__':
    main()
