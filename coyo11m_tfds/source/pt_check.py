"""Compares what a `.pt` file holds with the CRC-32s that its archive records.

    pt_check.check_small('000000-000009.pt')      # of the keys, not of the latents
    pt_check.check_contents('000000-000009.pt')   # of everything

torch records a CRC-32 of every member and verifies none of them when it maps a file.
"""

import os
from collections.abc import Callable

import google_crc32c
import numpy as np
from isal import isal_zlib as zlib

from coyo11m_tfds.dataset import pt_archive
from coyo11m_tfds.source import copied_files
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes

# Stays in a core's cache between reading and summing up: 1 GB from the page cache takes 0.05 s.
_BLOCK_BYTES = 256 << 10


def check_small(path: str | os.PathLike[str], name: str = '') -> None:
    """As `pt_archive.open_archive`; also compares all small members, such as the keys."""
    with open(path, 'rb', buffering=0) as file:
        archive = pt_archive.read(file.fileno(), name or os.fspath(path))
        for member, start in zip(archive.members, archive.starts, strict=True):
            if member.size <= pt_archive.small_bytes(archive.size):
                archive.check(member, zlib.crc32(os.pread(file.fileno(), member.size, start)))


def check_contents(
    path: str | os.PathLike[str],
    name: str = '',
    *,
    check_crc: bool = True,
    recorded: FileState | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> None:
    """Reads a `.pt` file through once and compares all members with their CRC-32.

    Args:
        path: local file.
        name: what errors call it, if that is not its path.
        check_crc: False for a file that was saved without valid checksums.
        recorded: size and CRC-32C that the whole file had when it was copied, if they are known.
        on_bytes: is told how many bytes have been read.

    Raises:
        ValueError: something differs, or it is no `.pt` file.
    """
    name = name or os.fspath(path)
    if not check_crc:
        if recorded:
            copied_files.compare(file_state.of_file(path, on_bytes), recorded, name)
        return
    buffer, whole = np.empty(_BLOCK_BYTES, np.uint8), google_crc32c.Checksum()
    with open(path, 'rb', buffering=0) as file:
        archive, at = pt_archive.read(file.fileno(), name), 0
        if hasattr(os, 'posix_fadvise'):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for end, member in archive.parts():
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
        found = FileState(archive.size, int.from_bytes(whole.digest(), 'big'))
        copied_files.compare(found, recorded, name)
