"""Heads of remote `.pt` files: all but the latents, in a local file with holes.

    head = latent_heads.fetch_head(file, '/scratch')   # some MB of disk, whatever the file's size
    LatentShard(head, file.path).keys                  # int64 (N,), as of the whole file

So a source in the cloud can be checked before anything is downloaded: torch maps the head like any
other file and reads keys, dtypes and shapes; only the latents are zeros.
"""

import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from coyo11m_tfds import pt_archive
from coyo11m_tfds.source import pt_check
from coyo11m_tfds.storage import remote, retry
from coyo11m_tfds.storage.file_lock import FileLock
from coyo11m_tfds.storage.source_files import SourceFile

_MAX_SMALL = 4  # all small members together are at most so many times `small_bytes`

_PADDED_HEADER = 4 << 10
_PAGE = 4 << 10
_GAP = 64 << 10  # reading more costs less than another request


def fetch_head(file: SourceFile, folder: str | os.PathLike[str], *, check_crc: bool = True) -> str:
    """Makes a local file of the size of `file` that holds everything but its big storages.

    In it are the zip's directory, which is read twice, and every member of at most 1 MB or 1% of
    the file, which is checked against its CRC-32; the rest are holes. Of a file of 2.9 GB that is
    1.1 MB in three requests, and none if the head of this version is in `folder` already.

    Args:
        file: a `.pt` file; of a local one the path is returned, after the same checks.
        folder: existing local folder, kept by the caller.
        check_crc: False for a file that was saved without valid checksums.

    Returns:
        Path of the head.

    Raises:
        ValueError: it is no zip as torch writes it, or its directory is larger than that of any
            `.pt` of a source or contradicts itself; or a local file is damaged.
        PermissionError: credentials are missing or refused.
        OSError: the storage cannot be reached, the file is gone or has changed, or the content
            stays damaged.
    """
    if not file.is_remote:
        if check_crc:
            pt_check.check_small(file.path)
        return file.path
    version = hashlib.sha256(f'{file.path} {file.version}'.encode()).hexdigest()
    head = os.path.join(folder, f'{version[:16]}-{file.name}')
    unfinished = f'{head}.part'
    with FileLock(unfinished):
        try:
            if not os.path.exists(head):  # nor made by another while this waited
                retry.call(
                    lambda: _make(file, unfinished, check_crc), f'reading the head of {file.path}'
                )
                os.replace(unfinished, head)
        finally:
            pathlib.Path(unfinished).unlink(missing_ok=True)
    return head


def _make(file: SourceFile, path: str, check_crc: bool) -> None:
    with open(path, 'r+b') as stream:
        stream.truncate(0)
        stream.truncate(file.size)
        copy = _SparseCopy(file, stream)
        members = pt_archive.read_directory(_copy_tail(file, copy), file.size, file.path)
        copy.add(_chosen_ranges(file, members))
        stream.flush()
        os.fsync(stream.fileno())
    try:
        (pt_check.check_small if check_crc else pt_archive.open_archive)(path, file.path)
    except ValueError as error:
        # Of what was received only once, the transfer may be at fault.
        raise retry.Corrupted(str(error).rstrip('.')) from error


def _copy_tail(file: SourceFile, copy: '_SparseCopy') -> bytes:
    """Nothing in a zip vouches for its directory, so that is read twice."""
    start = max(0, file.size - pt_archive.TAIL_BYTES)
    copy.add([(start, file.size)])
    first = copy.read(start, file.size)
    again = remote.read_range(file, start, len(first))
    if first != again:
        raise retry.Corrupted(f'{file.path}: the last {len(first)} bytes differ when read twice')
    return first


def _chosen_ranges(file: SourceFile, members: Sequence[pt_archive.Member]) -> list[tuple[int, int]]:
    """Where the small members are, and the local headers of the others."""
    small = pt_archive.small_bytes(file.size)
    ranges = []
    for member in members:
        wanted = member.size if member.size <= small else 0
        ranges.append((member.begin, min(member.end, member.begin + wanted + _PADDED_HEADER)))
    total = sum(end - begin for begin, end in ranges)
    if total > _MAX_SMALL * small:
        raise ValueError(
            f'{file.path}: its small members take {total:,} bytes, expected no more than '
            f"{_MAX_SMALL * small:,} for '.pt' files of keys and latents."
        )
    return ranges


class _SparseCopy:
    """A local file with holes, filled a page at a time."""

    def __init__(self, file: SourceFile, stream: BinaryIO):
        self._file = file
        self._stream = stream
        self._pages: set[int] = set()

    def read(self, begin: int, end: int) -> bytes:
        self._stream.seek(begin)
        return self._stream.read(end - begin)

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fills these ranges, given in ascending order."""
        merged: list[list[int]] = []
        for begin, end in ranges:
            if merged and begin <= merged[-1][1] + _GAP:
                merged[-1][1] = end
            else:
                merged.append([begin, end])
        for begin, end in merged:
            missing = [page for page in _pages(begin, end) if page not in self._pages]
            if missing:
                # From the first to the last: at most a part of the tail comes again.
                start = missing[0] * _PAGE
                stop = min((missing[-1] + 1) * _PAGE, self._file.size)
                self._stream.seek(start)
                self._stream.write(remote.read_range(self._file, start, stop - start))
                self._pages.update(missing)


def _pages(begin: int, end: int) -> range:
    return range(begin // _PAGE, -(-end // _PAGE))
