"""The formats of latents: how a file is opened and checked by the end of its name.

A new format is a subclass of `LatentFile` and a line here.
"""

import hashlib
import os
from collections.abc import Callable

from coyo11m_tfds import schema
from coyo11m_tfds.source import copied_files, pt_check, safetensors_file
from coyo11m_tfds.source.latent_file import LatentFile
from coyo11m_tfds.source.mds_file import MdsFile
from coyo11m_tfds.source.pt_file import PtFile
from coyo11m_tfds.source.tar_file import TarFile
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.stored_file import StoredFile

_OTHERS: dict[str, type[LatentFile]] = {
    '.safetensors': safetensors_file.SafetensorsFile,
    '.mds': MdsFile,
    '.tar': TarFile,
}


def open_file(
    file: StoredFile, path: str, asked: schema.LatentsFrom = schema.ANY_LATENTS
) -> LatentFile:
    """Opens a file of a source from a local path: of the file, a copy or a head.

    Raises a ValueError if the file is damaged, or violates its format.
    """
    return _OTHERS.get(_suffix(file), PtFile)(path, file.path, asked, file.label)


def fetch_head(file: StoredFile, folder: str | os.PathLike[str], *, check_crc: bool = True) -> str:
    """Returns a local file to open in place of a file; if possible, without the latents.

    For MDS and tar files, whose samples lie one after the other, it is the whole file. A local file
    is compared with its record, and its own path returned. Nobody else may use `folder`.
    `check_crc` and the errors are those of `pt_check.fetch_head`.
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
        file.fetch(path)
    return path


def check_contents(
    file: StoredFile,
    path: str,
    *,
    check_crc: bool = True,
    on_bytes: Callable[[int], None] = file_state.ignore_bytes,
) -> None:
    """Compares a local copy with the record of `mirror` and with the checksums in the file.

    Raises a ValueError if one differs, or the file is damaged.
    """
    if _suffix(file) not in _OTHERS:
        pt_check.check_contents(
            path, file.path, check_crc=check_crc, recorded=file.recorded, on_bytes=on_bytes
        )
    elif file.recorded:
        copied_files.check_recorded_state(
            file_state.compute_state(path, on_bytes), file.recorded, file.path
        )


def has_checksums(file: StoredFile) -> bool:
    """Whether the format, the storage or `mirror` has checksums of the file's latents."""
    return _suffix(file) not in _OTHERS or bool(file.recorded or file.checksum)


def _suffix(file: StoredFile) -> str:
    return os.path.splitext(file.path)[1]
