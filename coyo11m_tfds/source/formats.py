"""The formats of latents: how a file is opened and checked by the end of its name.

    file = formats.open_file(source_file, local_path)   # a LatentFile
    head = formats.fetch_head(source_file, '/scratch')  # enough of a remote file to open it
    formats.check_contents(source_file, local_path)

A new format is a subclass of `LatentFile` and a line here.
"""

import hashlib
import os
from collections.abc import Callable

from coyo11m_tfds import schema
from coyo11m_tfds.schema import LatentsFrom
from coyo11m_tfds.source import copied_files, pt_check, safetensors_file
from coyo11m_tfds.source.latent_file import LatentFile
from coyo11m_tfds.source.mds_file import MdsFile
from coyo11m_tfds.source.pt_file import LatentShard
from coyo11m_tfds.source.safetensors_file import SafetensorsFile
from coyo11m_tfds.source.tar_file import TarFile
from coyo11m_tfds.storage import file_state, remote
from coyo11m_tfds.storage.file_state import ignore_bytes
from coyo11m_tfds.storage.source_files import SourceFile

_OTHERS: dict[str, type[LatentFile]] = {
    '.safetensors': SafetensorsFile,
    '.mds': MdsFile,
    '.tar': TarFile,
}


def open_file(file: SourceFile, path: str, asked: LatentsFrom = schema.ANY_LATENTS) -> LatentFile:
    """Opens a file of a source at a local path, maybe that of a copy or a head.

    Raises:
        ValueError: It is damaged, or not what its format demands.
    """
    return _OTHERS.get(_suffix(file), LatentShard)(path, file.path, asked, file.label)


def fetch_head(file: SourceFile, folder: str | os.PathLike[str], *, check_crc: bool = True) -> str:
    """Gives a local file that can be opened and has everything but, if possible, the latents.

    Of a shard of MDS and of a tar, whose samples lie one after the other, it is the whole file.

    Args:
        file: For a local one its own path is returned, after a comparison with its record.
        folder: Local folder of the caller's own.
        check_crc: See `pt_check.fetch_head`.

    Raises:
        ValueError: It is damaged.
        PermissionError: Credentials are missing or refused.
        OSError: The storage cannot be reached, or the content stays damaged.
    """
    if _suffix(file) not in _OTHERS:
        return pt_check.fetch_head(file, folder, check_crc=check_crc)
    if not file.is_remote:
        check_contents(file, file.path)
        return file.path
    # Files of different folders may have the same name.
    of_path = hashlib.sha256(file.path.encode()).hexdigest()[:16]
    path = os.path.join(folder, f'{of_path}-{file.name}')
    if _suffix(file) == '.safetensors':
        safetensors_file.fetch_head(file, path)
    else:
        remote.fetch(file, path)
    return path


def check_contents(
    file: SourceFile,
    path: str,
    *,
    check_crc: bool = True,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> None:
    """Compares a local copy with what is known of it: what `mirror` recorded, and checksums in it.

    Raises:
        ValueError: Something differs, or it is damaged.
    """
    if _suffix(file) not in _OTHERS:
        pt_check.check_contents(
            path, file.path, check_crc=check_crc, recorded=file.recorded, on_bytes=on_bytes
        )
    elif file.recorded:
        copied_files.compare(file_state.of_file(path, on_bytes), file.recorded, file.path)


def has_checksums(file: SourceFile) -> bool:
    """Whether a change of its latents is noticed: by its format, its storage or `mirror`."""
    return _suffix(file) not in _OTHERS or bool(file.recorded or file.checksum)


def _suffix(file: SourceFile) -> str:
    return os.path.splitext(file.path)[1]
