"""Heads of remote `.pt` files: all but the latents, in a local file with holes.

    head = latent_heads.fetch_head(file, '/scratch')   # some MB of disk, whatever the file's size
    LatentShard(head, file.path).keys                  # int64 (N,), as of the whole file

So a source in the cloud can be checked before anything is downloaded: torch maps the head like any
other file and reads keys, dtypes and shapes; only the latents are zeros.
"""

import hashlib
import os
import pathlib
import struct
import zipfile
from collections.abc import Iterable
from typing import BinaryIO

from coyo11m_tfds.storage import remote, retry
from coyo11m_tfds.storage.file_lock import FileLock
from coyo11m_tfds.storage.source_files import SourceFile

# What is small enough to belong to the head; keys are 1/3000 of a file.
_SMALL_BYTES = 1 << 20
_SMALL_FRACTION = 100
_MAX_SMALL = 4  # all small entries together are at most so many times this limit

# The directory of a .pt with keys, latents and embeddings takes half a KB.
_TAIL = 64 << 10
_LOCAL_HEADER = 30  # bytes before name and padding
_PADDED_HEADER = 4 << 10
_PAGE = 4 << 10
_GAP = 64 << 10  # reading more costs less than another request

_PARSE_ERRORS = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,  # a zip of a later kind
    OSError,  # no place to seek to
    OverflowError,
    ValueError,
    struct.error,
)


def fetch_head(file: SourceFile, folder: str | os.PathLike[str]) -> str:
    """Makes a local file of the size of `file` that holds everything but its big storages.

    In it are the zip's directory, which is read twice, and every entry of at most 1 MB or 1% of
    the file, which is checked against the directory's CRC-32; the rest are holes. Of a file of
    2.9 GB that is 1.1 MB in three requests, and none if the head of this version is in `folder`
    already.

    Args:
        file: a `.pt` file; of a local one the path is returned as it is.
        folder: existing local folder, kept by the caller.

    Returns:
        Path of the head.

    Raises:
        ValueError: it is no zip of stored entries, or its directory is larger than that of any
            `.pt` of a source or contradicts itself.
        PermissionError: credentials are missing or refused.
        OSError: the storage cannot be reached, the file is gone or has changed, or the content
            stays damaged.
    """
    if not file.is_remote:
        return file.path
    version = hashlib.sha256(f'{file.path} {file.version}'.encode()).hexdigest()
    head = os.path.join(folder, f'{version[:16]}-{file.name}')
    unfinished = f'{head}.part'
    with FileLock(unfinished):
        try:
            if not os.path.exists(head):  # nor made by another while this waited
                retry.call(lambda: _make(file, unfinished), f'reading the head of {file.path}')
                os.replace(unfinished, head)
        finally:
            pathlib.Path(unfinished).unlink(missing_ok=True)
    return head


def _make(file: SourceFile, path: str) -> None:
    with open(path, 'r+b') as stream:
        stream.truncate(0)
        stream.truncate(file.size)
        copy = _SparseCopy(file, stream)
        _copy_tail(file, copy)
        with _open_zip(file, copy) as archive:
            entries = archive.infolist()
            copy.add(_chosen_ranges(file, entries, archive.start_dir))
            _check_entries(file, archive, entries)
        stream.flush()
        os.fsync(stream.fileno())


def _copy_tail(file: SourceFile, copy: '_SparseCopy') -> None:
    """Nothing in a zip vouches for its directory, so that is read twice."""
    start = max(0, file.size - _TAIL)
    copy.add([(start, file.size)])
    copy.seek(start)
    first = copy.read(_TAIL)
    again = remote.read_range(file, start, len(first))
    if first != again:
        raise retry.Corrupted(f'{file.path}: the last {len(first)} bytes differ when read twice')


def _open_zip(file: SourceFile, copy: '_SparseCopy') -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(copy)
    except _PARSE_ERRORS as error:
        raise ValueError(
            f'{file.path}: is truncated or not a .pt file ({file.size:,} bytes, {error}): expected '
            'a zip archive as torch.save writes it since torch 1.6. Save or upload it again.'
        ) from None


def _chosen_ranges(
    file: SourceFile, entries: list[zipfile.ZipInfo], directory: int
) -> list[tuple[int, int]]:
    """Where the small entries are, and the local headers of the others."""
    entries = sorted(entries, key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in entries[1:]] + [directory]
    ranges = []
    for entry, end in zip(entries, ends, strict=True):
        begin = entry.header_offset
        stored = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not stored or entry.file_size != entry.compress_size:
            raise ValueError(
                f'{file.path}: {entry.filename!r} is compressed or encrypted, expected it as '
                'torch.save writes it, plain. Save it again.'
            )
        if begin < 0 or begin + _LOCAL_HEADER + entry.file_size > end:
            raise ValueError(
                f'{file.path}: damaged, {entry.filename!r} of {entry.file_size:,} bytes at '
                f'{begin:,} does not fit before {end:,}. Save or upload it again.'
            )
        wanted = entry.file_size if entry.file_size <= _small(file) else 0
        ranges.append((begin, min(end, begin + wanted + _PADDED_HEADER)))
    total = sum(end - begin for begin, end in ranges)
    if total > _MAX_SMALL * _small(file):
        raise ValueError(
            f'{file.path}: its small entries take {total:,} bytes, expected no more than '
            f"{_MAX_SMALL * _small(file):,} for '.pt' files of keys and latents."
        )
    return ranges


def _check_entries(
    file: SourceFile, archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]
) -> None:
    try:
        for entry in entries:
            with archive.open(entry) as content:  # checks the local header
                if entry.file_size <= _small(file):
                    content.read()  # checks the CRC-32
    except _PARSE_ERRORS as error:
        raise retry.Corrupted(f'{file.path}: {error}') from error


def _small(file: SourceFile) -> int:
    return max(_SMALL_BYTES, file.size // _SMALL_FRACTION)


class _SparseCopy:
    """A local file with holes, read like any other; what falls into a hole is a ValueError."""

    def __init__(self, file: SourceFile, stream: BinaryIO):
        self._file = file
        self._stream = stream
        self._pages: set[int] = set()
        self.seek, self.tell = stream.seek, stream.tell

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        begin = self.tell()
        end = self._file.size if size < 0 else min(begin + size, self._file.size)
        if not self._pages.issuperset(_pages(begin, end)):
            raise ValueError(f'no directory of a few tensors in its last {_TAIL:,} bytes')
        return self._stream.read(max(0, end - begin))

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
