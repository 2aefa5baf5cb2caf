"""Heads of remote `.pt` files: all but the latents, in a local file with holes.

    head = remote_heads.fetch_head(file, '/scratch')   # some MB of disk, whatever the file's size
    LatentShard(head, file.path).keys                  # int64 (N,), as of the whole file

So a source in the cloud can be checked before anything is downloaded: torch maps the head like any
other file and reads keys, dtypes and shapes; only the latents are zeros.
"""

import os
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from coyo11m_tfds.dataset import pt_archive
from coyo11m_tfds.source import pt_check
from coyo11m_tfds.storage import remote, retry
from coyo11m_tfds.storage.source_files import SourceFile

_MAX_SMALL = 4  # all small members together are at most this many times `small_bytes`

_PADDED_HEADER = 4 << 10
_PAGE = 4 << 10
_GAP = 64 << 10  # reading more costs less than another request


def fetch_head(file: SourceFile, folder: str | os.PathLike[str], *, check_crc: bool = True) -> str:
    """Makes a local file of the size of `file` that holds everything but its big storages.

    It contains the zip's directory, which is read twice, and every member of at most 1 MB or 1% of
    the file, which is checked against its CRC-32; the rest are holes. For a file of 2.9 GB that is
    1.1 MB in three requests.

    Args:
        file: a `.pt` file; for a local one its own path is returned, after the same checks.
        folder: local folder of the caller's own, for files of different names.
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
    head = os.path.join(folder, file.name)
    retry.call(lambda: _make(file, head, check_crc), f'reading the head of {file.path}')
    return head


def _make(file: SourceFile, path: str, check_crc: bool) -> None:
    with open(path, 'w+b') as stream:
        stream.truncate(file.size)
        copy = _SparseCopy(file, stream)
        members = pt_archive.read_directory(_copy_tail(file, copy), file.size, file.path)
        copy.add(_chosen_ranges(file, members))
    try:
        (pt_check.check_small if check_crc else pt_archive.open_archive)(path, file.path)
    except ValueError as error:
        # What was received only once may have been damaged by the transfer.
        raise retry.Corrupted(str(error).rstrip('.')) from error


def _copy_tail(file: SourceFile, copy: '_SparseCopy') -> bytes:
    """Reads the end of the file twice, as no checksum covers a zip's directory."""
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
                # From the first to the last: at most a part of the tail is read again.
                start = missing[0] * _PAGE
                stop = min((missing[-1] + 1) * _PAGE, self._file.size)
                self._stream.seek(start)
                self._stream.write(remote.read_range(self._file, start, stop - start))
                self._pages.update(missing)


def _pages(begin: int, end: int) -> range:
    return range(begin // _PAGE, -(-end // _PAGE))
