"""Where the source lies: a folder of `.pt` files and one Parquet file of captions.

    source = sources.find('/data/coyo11m')          # or gs://bucket/folder,
    source = sources.find('hf://datasets/KBlueLeaf/coyo11m-256px-ccrop-latent')
    source.latent_files[0].path   # '/data/coyo11m/latents-3crop/000000-000009.pt'
    source.captions_file.size     # bytes

Finding lists names, sizes and checksums and reads no file. What is on the hub is pinned to the
commit that is found, so that all files are of one version; `@revision` after the name chooses it.
"""

import dataclasses
import os

from coyo11m_tfds import schema
from coyo11m_tfds.storage import source_files
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
        ValueError: the folder is missing, or lacks the `.pt` files or the captions.
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
    latent_files = [
        files[name]
        for name in sorted(files)
        if os.path.dirname(name) == schema.LATENTS_FOLDER and name.endswith('.pt')
    ]
    if not latent_files:
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
    return Source(folder, tuple(latent_files), files[schema.CAPTIONS_FILE])
