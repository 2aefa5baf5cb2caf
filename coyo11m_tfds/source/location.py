"""Where the source lies: a folder of `.pt` files and one Parquet file of captions.

    source = location.find('/data/coyo11m')         # or gs://bucket/folder,
    source = location.find('hf://datasets/KBlueLeaf/coyo11m-256px-ccrop-latent')
    source.latent_files[0].path   # '/data/coyo11m/latents-3crop/000000-000009.pt'
    source.captions_file.size     # bytes

Finding lists names, sizes and checksums and reads no file of data. A source on the hub is pinned to
the commit that is found, so that all files have one version; `@revision` after its name chooses it.
Files that `mirror` copied must still have the size, and on gs:// the checksum, that it recorded.
"""

import dataclasses
import os
from collections.abc import Sequence

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
        root: the folder; of one on the hub with the commit.
        latent_files: in the order of the data set.
        captions_file: the Parquet file.
    """

    root: str
    latent_files: tuple[SourceFile, ...]
    captions_file: SourceFile


def find(root: str | os.PathLike[str]) -> Source:
    """Finds the files of a source and checks that none is missing.

    Args:
        root: local folder, `gs://bucket/folder` or `hf://datasets/owner/name[@revision][/folder]`.

    Raises:
        ValueError: the folder is missing, or lacks the `.pt` files or the captions; or a file is
            not what `mirror` copied there.
        PermissionError: credentials are missing or refused.
        OSError: there is no such bucket, or the storage cannot be reached.
    """
    folder = os.fspath(root)
    try:
        folder, files = source_files.list_files(folder, schema.LATENTS_FOLDER, ('.pt', '.parquet'))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f'{folder} is not a folder; expected the folder of the source data.'
        ) from None
    latents = f'{folder}/{schema.LATENTS_FOLDER}'
    latent_names = [
        name
        for name in sorted(files)
        if os.path.dirname(name) == schema.LATENTS_FOLDER and name.endswith('.pt')
    ]
    if not latent_names:
        raise ValueError(
            f'No .pt files in {latents}; expected files like 000000-000009.pt there. '
            f'Is {folder} the folder that contains {schema.LATENTS_FOLDER}/?'
        )
    if schema.CAPTIONS_FILE not in files:
        tables = [name for name in sorted(files) if '/' not in name and name.endswith('.parquet')]
        raise ValueError(
            f'{folder}/{schema.CAPTIONS_FILE} is missing; expected the Parquet file of captions '
            f'under this name (Parquet files in the folder: {", ".join(tables) or "none"}).'
        )
    used = [files[name] for name in (*latent_names, schema.CAPTIONS_FILE)]
    if not folder.startswith('hf://'):  # where mirror may have written
        used = _add_records(folder, used)
    return Source(folder, tuple(used[:-1]), used[-1])


def _add_records(folder: str, files: Sequence[SourceFile]) -> list[SourceFile]:
    """Adds to files what `mirror` recorded of them, if it filled this folder."""
    recorded = copied_files.recorded_states(folder)
    if not recorded:
        return list(files)
    states = [recorded.get(file.path.removeprefix(f'{folder}/')) for file in files]
    others = [file.path for file, state in zip(files, states, strict=True) if not state]
    if others:
        logging.warning(
            '%s: is no file that mirror has copied, unlike others of this folder%s.',
            others[0],
            f'; so are {len(others) - 1} more' if others[1:] else '',
        )
    return [
        _add_record(file, state) if state else file
        for file, state in zip(files, states, strict=True)
    ]


def _add_record(file: SourceFile, state: FileState) -> SourceFile:
    """Adds what was recorded of a file, and checks it against what the storage reports."""
    found = state.crc32c if file.crc32c is None else file.crc32c
    copied_files.compare(FileState(file.size, found), state, file.path)
    return dataclasses.replace(file, recorded=state)
