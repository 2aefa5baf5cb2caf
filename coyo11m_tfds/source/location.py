"""Finds the source: a folder of `.pt` files and one Parquet file of captions.

    source = location.find('/data/coyo11m')         # or gs://bucket/folder,
    source = location.find('hf://datasets/KBlueLeaf/coyo11m-256px-ccrop-latent')
    source.latent_files[0].path   # '/data/coyo11m/latents-3crop/000000-000009.pt'
    source.captions_file.size     # bytes

`find` lists names, sizes and checksums, and reads no data. A source on the hub is pinned to its
present commit, so that all files have one version; `@revision` after its name chooses another.
Files that `mirror` copied must still have the size that it recorded and, on gs://, the checksum.
"""

import dataclasses
import os

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.source import copied_files
from coyo11m_tfds.storage import source_files
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.source_files import SourceFile


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a source.

    Attributes:
        root: The folder; on the hub with the commit.
        latent_files: The `.pt` files in the order of the data set.
        captions_file: The Parquet file.
    """

    root: str
    latent_files: tuple[SourceFile, ...]
    captions_file: SourceFile


def find(root: str | os.PathLike[str]) -> Source:
    """Finds the files of a source and checks that none is missing.

    Args:
        root: Local folder, `gs://bucket/folder` or `hf://datasets/owner/name[@revision][/folder]`.

    Raises:
        ValueError: The folder is missing, or lacks the `.pt` files or the captions; or a file is
            not what `mirror` copied there.
        PermissionError: Credentials are missing or refused.
        OSError: There is no such bucket, or the storage cannot be reached.
    """
    folder = os.fspath(root)
    try:
        folder, files = source_files.list_files(folder, schema.LATENTS_FOLDER, ('.pt', '.parquet'))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f'{folder} is not a folder; expected the folder of the source data.'
        ) from None
    names = [n for n in sorted(files) if n.startswith(f'{schema.LATENTS_FOLDER}/')]
    names = [name for name in names if name.endswith('.pt')]
    if not names:
        raise ValueError(
            f'No .pt files in {folder}/{schema.LATENTS_FOLDER}; expected files like '
            f'000000-000009.pt there. Is {folder} the folder that contains '
            f'{schema.LATENTS_FOLDER}/?'
        )
    if schema.CAPTIONS_FILE not in files:
        tables = [name for name in sorted(files) if '/' not in name and name.endswith('.parquet')]
        raise ValueError(
            f'{folder}/{schema.CAPTIONS_FILE} is missing; expected the Parquet file of captions '
            f'under this name (Parquet files in the folder: {", ".join(tables) or "none"}).'
        )
    used = [files[name] for name in (*names, schema.CAPTIONS_FILE)]
    if not folder.startswith('hf://'):  # where mirror may have written
        used = _add_records(folder, used)
    return Source(folder, tuple(used[:-1]), used[-1])


def _add_records(folder: str, files: list[SourceFile]) -> list[SourceFile]:
    """Adds to files what `mirror` recorded, if it filled this folder; refuses those that differ."""
    recorded = copied_files.recorded_states(folder)
    if not recorded:
        return files
    found, others = [], []
    for file in files:
        if state := recorded.get(file.path.removeprefix(f'{folder}/')):
            crc32c = state.crc32c if file.crc32c is None else file.crc32c
            copied_files.compare(FileState(file.size, crc32c), state, file.path)
        else:
            others.append(file.path)
        found.append(dataclasses.replace(file, recorded=state))
    if others:
        more = f'; so are {len(others) - 1} more' if others[1:] else ''
        logging.warning(
            '%s: is not a file that mirror has copied, unlike others of this folder%s.',
            others[0],
            more,
        )
    return found
