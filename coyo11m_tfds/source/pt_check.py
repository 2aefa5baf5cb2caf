"""Compares `.pt` files with the checksums in their archives before use, without torch.

A head is a local file with holes in place of the latents. torch maps a head like any other file and
reads keys, dtypes and shapes; only the latents are zeros. So a remote source can be checked before
it is downloaded. torch does not compare CRC-32s when it maps a file.
"""

import os
from collections.abc import Callable, Sequence

import google_crc32c
import numpy as np
from isal import isal_zlib as zlib

from coyo11m_tfds.dataset import pt_archive
from coyo11m_tfds.source import copied_files
from coyo11m_tfds.storage import file_state, retry
from coyo11m_tfds.storage.stored_file import StoredFile

# Stays in a core's cache between reading and summing up: 1 GB from the page cache takes 0.05 s.
_BLOCK_BYTES = 256 << 10

_MAX_SMALL = 4  # all small members together are at most this many times `small_bytes`
_PADDED_HEADER = 4 << 10
_GAP = 64 << 10  # reading more costs less than another request


def fetch_head(file: StoredFile, folder: str | os.PathLike[str], *, check_crc: bool = True) -> str:
    """Makes a local file of the size of `file` that holds all but its large storages.

    It contains the zip's directory and every member of at most 1 MB or 1% of the file. The
    directory has no checksum, so it is read twice; the members are compared with their CRC-32,
    unless `check_crc` is False. For a file of 2.9 GB this takes 1.1 MB in three requests.

    A local file gets the same checks, and its own path is returned. Raises a ValueError if the file
    is not a zip archive in torch's form, or its small members are larger than any source's, and an
    OSError if it is gone, has changed, cannot be read or stays damaged.
    """
    if not file.is_remote:
        if check_crc:
            check_small(file.path)
        return file.path
    head = os.path.join(folder, file.name)
    retry.call(lambda: _make_head(file, head, check_crc), f'reading the head of {file.path}')
    return head


def check_small(path: str | os.PathLike[str], name: str = '') -> None:
    """Like `pt_archive.open_archive`, but also compares all small members, such as the keys."""
    with open(path, 'rb', buffering=0) as file:
        archive = pt_archive.read_archive(file.fileno(), name or os.fspath(path))
        for member, start in zip(archive.members, archive.starts, strict=True):
            if member.size <= pt_archive.max_small_bytes(archive.size):
                archive.check(member, zlib.crc32(os.pread(file.fileno(), member.size, start)))


def check_contents(
    path: str | os.PathLike[str],
    name: str = '',
    *,
    check_crc: bool = True,
    recorded: file_state.FileState | None = None,
    on_bytes: Callable[[int], None] = file_state.ignore_bytes,
) -> None:
    """Reads a whole local `.pt` file once; compares all members with their CRC-32.

    `name` is that in errors, by default the path. Without `check_crc` only the size and the CRC-32C
    of the whole file are compared, if they were `recorded` when it was copied. `on_bytes` counts
    the bytes read. Raises a ValueError if a checksum differs, or the file is not a `.pt` file.
    """
    name = name or os.fspath(path)
    if not check_crc:
        if recorded:
            copied_files.check_recorded_state(
                file_state.compute_state(path, on_bytes), recorded, name
            )
        return
    buffer, whole = np.empty(_BLOCK_BYTES, np.uint8), google_crc32c.Checksum()
    with open(path, 'rb', buffering=0) as file:
        archive, at = pt_archive.read_archive(file.fileno(), name), 0
        if hasattr(os, 'posix_fadvise'):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for end, member in archive.sections():
            crc32 = 0
            while at < end:
                count = file.readinto(buffer[: end - at])
                if not count:
                    raise ValueError(f'{name}: has become shorter. Copy or download it again.')
                crc32 = zlib.crc32(buffer[:count], crc32)
                if recorded:
                    whole.update(buffer[:count])
                on_bytes(count)
                at += count
            if member:
                archive.check(member, crc32)
    if recorded:
        found = file_state.FileState(archive.size, int.from_bytes(whole.digest(), 'big'))
        copied_files.check_recorded_state(found, recorded, name)


def _make_head(file: StoredFile, path: str, check_crc: bool) -> None:
    start = max(0, file.size - pt_archive.TAIL_BYTES)
    tail, again = (file.read_range(start, file.size - start) for _ in range(2))
    if tail != again:
        raise retry.Corrupted(f'{file.path}: the last {len(tail)} bytes differ when read twice')
    members = pt_archive.read_directory(tail, file.size, file.path)
    with open(path, 'wb') as stream:
        stream.truncate(file.size)
        for begin, end in _ranges(file, members, start):
            stream.seek(begin)
            stream.write(file.read_range(begin, end - begin))
        stream.seek(start)
        stream.write(tail)
    try:
        (check_small if check_crc else pt_archive.open_archive)(path, file.path)
    except ValueError as error:
        # What was received only once may have been damaged by the transfer.
        raise retry.Corrupted(str(error).rstrip('.')) from error


def _ranges(
    file: StoredFile, members: Sequence[pt_archive.ArchiveMember], stop: int
) -> list[tuple[int, int]]:
    """Returns the ranges of small members before `stop`, and of the others' local headers."""
    small = pt_archive.max_small_bytes(file.size)
    total, merged = 0, [(0, 0)]
    for member in members:
        wanted = _PADDED_HEADER + (member.size if member.size <= small else 0)
        begin, end = member.begin, min(member.end, member.begin + wanted)
        total += end - begin
        if begin > merged[-1][1] + _GAP:
            merged.append((begin, end))
        else:
            merged[-1] = (merged[-1][0], end)
    if total > _MAX_SMALL * small:
        raise ValueError(
            f'{file.path}: its small members take {total:,} bytes, expected no more than '
            f"{_MAX_SMALL * small:,} for '.pt' files of keys and latents."
        )
    return [(begin, min(end, stop)) for begin, end in merged if begin < stop]
