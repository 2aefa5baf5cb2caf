"""The formats of latents, by the end of a file's name."""

import os

from coyo11m_tfds import schema
from coyo11m_tfds.source.latent_file import LatentFile
from coyo11m_tfds.source.mds_file import MdsFile
from coyo11m_tfds.source.parquet_file import ParquetFile
from coyo11m_tfds.source.pt_file import PtFile
from coyo11m_tfds.source.safetensors_file import SafetensorsFile
from coyo11m_tfds.source.tar_file import TarFile
from coyo11m_tfds.storage.stored_file import StoredFile

_FORMATS: dict[str, type[LatentFile]] = {
    '.pt': PtFile,
    '.safetensors': SafetensorsFile,
    '.mds': MdsFile,
    '.tar': TarFile,
    '.parquet': ParquetFile,
    '': TarFile,  # of an `NpyFolder`
}


def format_of(file: StoredFile) -> type[LatentFile]:
    """Returns the class of a file of latents."""
    # Whatever another name holds, the error of a `.pt` file says what was expected.
    return _FORMATS.get(os.path.splitext(file.path)[1], PtFile)


def open_file(
    file: StoredFile, path: str, latents_from: schema.LatentsFrom = schema.ANY_LATENTS
) -> LatentFile:
    """Opens a file of a source from a local path: of the file, a copy or a head."""
    return format_of(file)(path, file.path, latents_from, file.label)


def has_checksums(file: StoredFile) -> bool:
    """Whether the format, the storage or `mirror` has checksums of the file's latents."""
    return format_of(file).has_checksums or bool(file.recorded or file.checksum)
