"""Where the source lies: a folder of `.pt` files and one Parquet file of captions.

    source = sources.find('/data/coyo11m')
    source.latent_files   # ('/data/coyo11m/latents-3crop/000000-000009.pt', ...)
    source.captions_file  # '/data/coyo11m/coyo11m-meta.parquet'

The files are memory-mapped, so they must lie on a local (or locally mounted) disk.
"""

import dataclasses
import os
import pathlib

from coyo11m_tfds import schema


@dataclasses.dataclass(frozen=True)
class Source:
    """Paths of the source's files; `latent_files` in the order of the data set."""

    latent_files: tuple[str, ...]
    captions_file: str


def find(root: str | os.PathLike[str]) -> Source:
    """Finds the files of a source and checks that none is missing.

    Raises:
        ValueError: the folder is remote, is missing, or lacks the `.pt` files or the captions.
    """
    folder = pathlib.Path(local_path(root))
    if not folder.is_dir():
        raise ValueError(f'{folder} is not a folder; expected the folder of the source data.')
    return Source(latent_files=_latent_files(folder), captions_file=_captions_file(folder))


def local_path(path: str | os.PathLike[str]) -> str:
    """Returns `path` as a string.

    Raises:
        ValueError: it is a URL such as `gs://...` or `hf://...`.
    """
    text = os.fspath(path)
    if '://' in text:
        raise ValueError(
            f'{text} is remote, but source files are memory-mapped and must be local. Mirror it '
            'first, e.g. with `gcloud storage cp -r` or `hf download`, and name the local copy.'
        )
    return text


def _latent_files(folder: pathlib.Path) -> tuple[str, ...]:
    latents = folder / schema.LATENTS_FOLDER
    # A leading dot marks what tools leave behind, like macOS's '._000000-000009.pt'.
    files = sorted(str(p) for p in latents.glob('*.pt') if not p.name.startswith('.'))
    if not files:
        raise ValueError(
            f'No .pt files in {latents}; expected files like 000000-000009.pt there. '
            f'Is {folder} the folder that contains {schema.LATENTS_FOLDER}/?'
        )
    return tuple(files)


def _captions_file(folder: pathlib.Path) -> str:
    captions = folder / schema.CAPTIONS_FILE
    if not captions.is_file():
        others = ', '.join(sorted(p.name for p in folder.glob('*.parquet'))) or 'none'
        raise ValueError(
            f'{captions} is missing; expected the Parquet file of captions under this name '
            f'(Parquet files in the folder: {others}).'
        )
    return str(captions)
