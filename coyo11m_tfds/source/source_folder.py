"""Finds the files of a source: latents in a folder and, in most sources, captions in Parquet.

`find_source` lists names, sizes and checksums, and reads only the index of MDS shards. All files of
latents have one format (`source.formats`), and lie in `latents-3crop/` or, without this folder, in
the folder itself. A source on the hub is pinned to its present commit, so that all files have one
version; `@revision` after its name chooses another commit. Files that `mirror` copied must still
have the recorded size and, on gs://, the recorded checksum.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping

from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.source import copied_files
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.base import Storage
from coyo11m_tfds.storage.stored_file import StoredFile

# Where a folder has several, the first: beside LightningDiT's latents lies latents_stats.pt.
_SUFFIXES = '.safetensors', '.mds', '.tar', '.pt'
_COMPRESSED = '.tar.gz', '.tgz', '.tar.bz2', '.tar.xz', '.tar.zst'
_INDEX = 'index.json'


@dataclasses.dataclass(frozen=True)
class SourceFolder:
    """The files of a source."""

    root: str  # the folder; with its commit on the hub
    latent_files: tuple[StoredFile, ...]  # all of one format, in the order of the data set
    captions_file: StoredFile | None  # None if captions or labels lie beside the latents
    by_name: Mapping[str, StoredFile]  # all files, by their paths relative to `root`
    no_captions: str  # message for the case that there are none beside the latents either

    @property
    def captions_path(self) -> str:
        """Path of the Parquet file, or of the first file that holds captions."""
        return (self.captions_file or self.latent_files[0]).path


def find_source(root: str | os.PathLike[str]) -> SourceFolder:
    """Finds the files of a source and checks that all are there.

    The source is a local folder, `gs://bucket/folder`, or
    `hf://datasets/owner/name[@revision][/folder]`. Raises a ValueError if it is missing or has no
    latents, lacks a file that its `index.json` names, or holds a file that differs from the record
    of `mirror`; and an OSError if it cannot be read.
    """
    try:
        opened = storage.open_folder(root).pin()
        files = opened.list_visible(
            schema.LATENTS_FOLDER, (*_SUFFIXES, *_COMPRESSED, '.parquet', _INDEX)
        )
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f'{root} is not a folder; expected the folder of the source data.'
        ) from None
    folder = opened.folder
    index = files.get(_INDEX)
    if index and not any(name.startswith(f'{schema.LATENTS_FOLDER}/') for name in files):
        names = _of_index(opened, index, files)
    else:
        names, index = _names(files), None
    if not names:
        tars = [name for name in sorted(files) if name.endswith(_COMPRESSED)]
        hint = f' {tars[0]} is compressed, and only plain tars are read.' if tars else ''
        raise ValueError(
            f'No {", ".join(_SUFFIXES)} files in {folder}/{schema.LATENTS_FOLDER} or {folder}; '
            f'expected files of latents like 000000-000009.pt there.{hint}'
        )
    files |= {name: dataclasses.replace(files[name], label=name) for name in names}
    others = [x for x in (schema.CAPTIONS_FILE, *[_INDEX] * bool(index)) if x in files]
    used = [files[name] for name in (*names, *others)]
    if opened.can_write:  # mirror may have written there
        used = _add_records(folder, used)
    if index and (recorded := used[-1].recorded) and index.local_path:
        copied_files.check_recorded_state(
            file_state.compute_state(index.path), recorded, index.path
        )
    by_name = dict(zip((*names, *others), used, strict=True))
    tables = [name for name in sorted(files) if '/' not in name and name.endswith('.parquet')]
    return SourceFolder(
        folder,
        tuple(used[: len(names)]),
        by_name.get(schema.CAPTIONS_FILE),
        by_name,
        f'{folder}/{schema.CAPTIONS_FILE} is missing; expected the Parquet file of captions under '
        f'this name (Parquet files in the folder: {", ".join(tables) or "none"}), or captions or '
        'labels beside the latents',
    )


def _names(files: Mapping[str, StoredFile]) -> list[str]:
    """Names of the files of latents: of one folder and one format, the first that there is."""
    for folder in (schema.LATENTS_FOLDER, ''):
        for suffix in _SUFFIXES:
            names = [
                x for x in sorted(files) if x.endswith(suffix) and os.path.dirname(x) == folder
            ]
            if names:
                return names
    return []


def _of_index(folder: Storage, index: StoredFile, files: dict[str, StoredFile]) -> list[str]:
    """Names of the shards that an `index.json` of MDS names; adds those of sub-folders to `files`.

    Raises a ValueError if the index is damaged, or a shard is missing, compressed or not whole.
    """
    try:
        shards = json.loads(index.read())['shards']
        sizes = {shard['raw_data']['basename']: shard['raw_data']['bytes'] for shard in shards}
        compressed = [
            name for name, shard in zip(sizes, shards, strict=True) if shard['compression']
        ]
        folders = sorted({os.path.dirname(name) for name in sizes} - {''})
        is_plain = all(re.fullmatch(r'[^./][^/]*', x) for x in folders)
        if not sizes or len(sizes) < len(shards) or not is_plain:
            raise ValueError(f'it has shards {list(sizes)[:3]}')
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'{index.path}: is damaged or not an index of MDS shards ({error}). Copy it again.'
        ) from None
    for sub_folder in folders:
        files |= folder.list_visible(sub_folder, _SUFFIXES)
    for name, size in sizes.items():
        if compressed and name not in files:
            raise ValueError(
                f'{folder.folder}/{name}: is compressed; write the shards again with '
                'compression=None.'
            )
        if name not in files or files[name].size != size:
            has = f'has {files[name].size:,} bytes' if name in files else 'is missing'
            raise ValueError(
                f'{folder.folder}/{name}: {has}, but {index.path} says {size} bytes. Copy it again.'
            )
    return list(sizes)


def _add_records(folder: str, files: list[StoredFile]) -> list[StoredFile]:
    """Adds to files what `mirror` recorded, if it filled this folder; refuses those that differ."""
    recorded = copied_files.recorded_states(folder)
    if not recorded:
        return files
    found, others = [], []
    for file in files:
        if state := recorded.get(file.path.removeprefix(f'{folder}/')):
            crc32c = state.crc32c if file.crc32c is None else file.crc32c
            copied_files.check_recorded_state(
                file_state.FileState(file.size, crc32c), state, file.path
            )
        else:
            others.append(file.path)
        found.append(dataclasses.replace(file, recorded=state))
    if others:
        more = f', nor {len(others) - 1} more' if others[1:] else ''
        logging.warning(f'{others[0]}: mirror did not copy this file{more}, unlike others there.')
    return found
