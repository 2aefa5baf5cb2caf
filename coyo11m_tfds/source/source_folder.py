"""Finds the files of a source: latents in a folder and, in most sources, captions in Parquet.

All files of latents have one format, and lie in `latents-3crop/` or, without this folder, in the
folder itself. Files that `mirror` copied or `encode_images` wrote must still have the recorded size
and, on gs://, the recorded checksum.
"""

import contextlib
import dataclasses
import json
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.process.errors import FieldError
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import copied_files, npy_folders
from coyo11m_tfds.source.encoding_file import Encoding, how_to_encode
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.base import ReadableFolder
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.stored_file import StoredFile, common_path

# Where a folder has several, the first: next to LightningDiT's latents lies latents_stats.pt.
_SUFFIXES = '.safetensors', '.mds', '.tar', '.pt'
# Only where a folder has none of these, because it often holds captions.
_PARQUET = '.parquet'
_COMPRESSED = '.tar.gz', '.tgz', '.tar.bz2', '.tar.xz', '.tar.zst'
_INDEX = 'index.json'
_INDEXES = _INDEX, npy_folders.INDEX_OF_FOLDERS, schema.ENCODING_FILE
_LISTED = (*_SUFFIXES, _PARQUET, *_COMPRESSED, *_INDEXES)


@dataclasses.dataclass(frozen=True)
class SourceFolder:
    """The files of a source."""

    root: str  # the folder; with its commit on the hub
    latent_files: tuple[StoredFile, ...]  # all of one format, in the order of the data set
    caption_files: tuple[StoredFile, ...]  # none if captions or labels lie next to the latents
    # All files, by their paths relative to `root`; see `find_captions` for those elsewhere.
    by_name: Mapping[str, StoredFile]
    no_captions: str  # message for the case that there are none next to the latents either
    encoding: Mapping[str, Any]  # what `encode_images` says of the latents; {} for other sources

    @property
    def captions_path(self) -> str:
        """Path of the Parquet file or of its folder, or of the first file that holds captions."""
        return common_path(self.caption_files or self.latent_files[:1])

    def with_captions(self, captions: str) -> 'SourceFolder':
        """Returns the source with the captions that a config names; '' changes nothing."""
        if not captions:
            return self
        files = find_captions(self.root, captions)
        captions_paths = {file.path for file in files.values()}
        latent_files = []
        for file in self.latent_files:
            if file.path not in captions_paths:
                latent_files.append(file)
        # The records of `mirror` are about the files in its folder.
        in_folder = {}
        for name, file in files.items():
            if file.path == f'{self.root}/{name}':
                in_folder[name] = file
        mirrored = copied_files.recorded_states(storage.open_folder(self.root))
        files |= _add_states(in_folder, mirrored)
        others = {}
        for name, file in self.by_name.items():
            # The chosen captions replace those that the source would have had.
            if file not in self.caption_files:
                others[name] = file
        return dataclasses.replace(
            self,
            # Captions may also be a column of the latents' own Parquet files.
            latent_files=tuple(latent_files or self.latent_files),
            caption_files=tuple(files.values()),
            by_name=others | files,
        )


def find_captions(root: str | os.PathLike[str], captions: str = '') -> dict[str, StoredFile]:
    """Finds the Parquet files with the captions of the source in the folder `root`, by name.

    `captions` is a file or a folder of files, relative to `root`, absolute or a URL; without it,
    the file is `schema.CAPTIONS_FILE`, and the result empty without this file. Names are relative
    to `root` or, for files elsewhere, begin with the last part of `captions`.
    """
    root = storage.expand_home(root).rstrip('/')
    place = storage.expand_home(captions or schema.CAPTIONS_FILE)
    # Not a URL: relative to the folder, unless it begins with a slash.
    if storage.local_path(place):
        place = os.path.join(root, os.path.normpath(place)).removesuffix('/.')
    name = ''  # of the folder itself
    if place != root:
        name = place.removeprefix(f'{root}/')
    # Elsewhere, the whole path would be no name within the source.
    if name == place or name.startswith('../'):
        name = os.path.basename(place.rstrip('/'))
    # A ValueError says that it is no file.
    with contextlib.suppress(ValueError):
        return {name: storage.describe_file(place)}
    if not captions:
        return {}
    files = storage.list_folder(place, missing_ok=True)
    tables = _list_tables(files)
    if not tables:
        in_root = _list_tables(storage.list_folder(root))
        problem = f'{place} is neither a file nor a folder with Parquet files'
        expected = f'a path within {root}, which has {in_root}, an absolute path or a URL'
        raise FieldError('captions', captions, f'{problem}; expected {expected}.')
    # The folder of the source itself has no name.
    return {f'{name}/{table}'.lstrip('/'): files[table] for table in tables}


def _list_tables(files: Iterable[str]) -> list[str]:
    """Returns the names of the Parquet files right in a folder, in order, of all names in it."""
    tables = []
    for name in sorted(files):
        if name.endswith(_PARQUET) and '/' not in name:
            tables.append(name)
    return tables


def find_source(root: str | os.PathLike[str]) -> SourceFolder:
    """Finds the files of a source and checks that all are there; reads only small indexes.

    The source is a local folder, `gs://bucket/folder`, or
    `hf://datasets/owner/name[@revision][/folder]`. Raises a ValueError for a folder without
    latents, for a damaged index, and for files that are missing or have changed.
    """
    try:
        # Pinned, so that all files of the hub are of one commit.
        source_storage = storage.open_folder(root).pin()
        listing = source_storage.list_visible(schema.LATENTS_FOLDER, _LISTED)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f'{root} is not a folder; expected the folder of the source data.'
        ) from None
    folder = source_storage.folder
    encoding = _read_encoding(listing.get(schema.ENCODING_FILE))
    encoded = encoding.files or {}
    names, index_names = _find_latents(source_storage, encoded, listing)
    # Keys of rows without keys are hashes of this label, so that they stay when the folder moves.
    files = {name: dataclasses.replace(listing[name], label=name) for name in names}
    other_names = [schema.CAPTIONS_FILE]
    other_names += index_names
    for name in other_names:
        if name in listing:
            files[name] = listing[name]
    # `mirror` may have written there.
    mirrored = copied_files.recorded_states(source_storage)
    files = _add_states(files, mirrored, encoded)
    _check_index(files.get(_INDEX))
    # Not before: it has no receipt, and the program that wrote it is not `mirror`.
    if schema.ENCODING_FILE in listing:
        files[schema.ENCODING_FILE] = listing[schema.ENCODING_FILE]
    caption_files: tuple[StoredFile, ...] = ()
    if schema.CAPTIONS_FILE in files:
        caption_files = (files[schema.CAPTIONS_FILE],)
    tables = ', '.join(_list_tables(listing)) or 'none'
    return SourceFolder(
        root=folder,
        latent_files=tuple(files[name] for name in names),
        caption_files=caption_files,
        by_name=files,
        no_captions=f'{folder}/{schema.CAPTIONS_FILE} is missing; set captions to a Parquet file '
        f'or a folder of them (Parquet files in the folder: {tables}), or '
        'put captions or labels next to the latents',
        encoding=encoding.settings,
    )


def _check_index(index: StoredFile | None) -> None:
    """Raises a ValueError for an index that is not the one that `mirror` copied."""
    # It is small, and decides which files are read, so it is compared now and whole.
    if index and index.recorded and index.local_path:
        state = file_state.compute_state(index.path)
        copied_files.check_recorded_state(state, index.recorded, index.path)


def _find_latents(
    source: ReadableFolder, encoded: Mapping[str, FileState], listing: dict[str, StoredFile]
) -> tuple[list[str], list[str]]:
    """Returns the names of the files of latents, and of the index that lists them, if there is one.

    Adds to the listing what an index names elsewhere. Raises a ValueError if there are no latents.
    """
    index_of_folders = listing.pop(npy_folders.INDEX_OF_FOLDERS, None)
    if encoded:
        return _names_in_encoding(source, encoded, listing), []
    # An index is about the files next to it, but `latents-3crop/` comes first.
    has_folder = any(name.startswith(f'{schema.LATENTS_FOLDER}/') for name in listing)
    if _INDEX in listing and not has_folder:
        return _names_in_index(source, listing[_INDEX], listing), [_INDEX]
    names = _latent_names(listing, _SUFFIXES)
    if names:
        return names, []
    if index_of_folders:
        folders = npy_folders.find_npy_folders(source, index_of_folders)
        listing |= folders
        listing[npy_folders.INDEX_OF_FOLDERS] = index_of_folders
        if folders:
            return list(folders), [npy_folders.INDEX_OF_FOLDERS]
    # Last, because such files may be those of captions. An index of folders that has named no
    # latents stays a file of the source.
    names = _latent_names(listing, [_PARQUET])
    if names:
        return names, [npy_folders.INDEX_OF_FOLDERS]
    compressed_tars = [name for name in sorted(listing) if name.endswith(_COMPRESSED)]
    hint = ''
    if compressed_tars:
        hint = f' {compressed_tars[0]} is compressed, and only plain tars are read.'
    suffixes = ', '.join((*_SUFFIXES, _PARQUET))
    raise ValueError(
        f'No {suffixes} files in {source.folder}/{schema.LATENTS_FOLDER} '
        f'or {source.folder}; expected files of latents like 000000-000009.pt there.{hint} '
        f'{how_to_encode(source.folder)}.'
    )


def _read_encoding(file: StoredFile | None) -> Encoding:
    """Reads what `encode_images` says of the latents, which must be complete; empty without it."""
    if not file:
        return Encoding({})
    try:
        encoding = Encoding.parse(file.read())
    except ValueError as error:
        raise ValueError(
            f'{file.path}: is damaged ({error}). If it was copied, copy it again; otherwise give '
            'the command of encode_images again, which keeps what is encoded.'
        ) from None
    if encoding.files is None:
        raise ValueError(
            f'{file.path}: not all images are encoded. Give the command of encode_images again, '
            'and if several processes shared the work, in all of them.'
        )
    return encoding


def _names_in_encoding(
    folder: ReadableFolder, encoded: Mapping[str, FileState], listing: Mapping[str, StoredFile]
) -> list[str]:
    """Returns the names of the tars of an encoding, in order.

    Raises a ValueError if one is missing, or there are files of latents that it does not name.
    """
    # With buckets, each folder of a shape is a source, because rows of a source are alike.
    sub_folders = _list_sub_folders(encoded)
    if sub_folders:
        raise ValueError(f'{folder.folder}: its folders are sources, such as {sub_folders[0]}.')
    encoding_path = folder.path_of(schema.ENCODING_FILE)
    missing = sorted(encoded.keys() - listing.keys())
    if missing:
        raise ValueError(
            f'{folder.folder}/{missing[0]}: is missing, but {encoding_path} names it. If the '
            'folder was copied, copy this file too; otherwise give the command of encode_images '
            'again.'
        )
    # Tars of another run would be read as latents of the same VAE.
    others = []
    for name in listing:
        if name.endswith(_SUFFIXES) and name not in encoded:
            others.append(name)
    if others:
        raise ValueError(
            f'{folder.path_of(min(others))}: is not of the encoding, which {encoding_path} '
            'describes. Move it to another folder.'
        )
    return sorted(encoded)


def _list_sub_folders(names: Iterable[str]) -> list[str]:
    """Returns the folders that files lie in, in order, without that of names without a folder."""
    folders = {os.path.dirname(name) for name in names}
    return sorted(folders - {''})


def _latent_names(listing: Mapping[str, StoredFile], suffixes: Sequence[str]) -> list[str]:
    """Returns the names of the files of latents: of one folder and format, the first there is."""
    for folder in (schema.LATENTS_FOLDER, ''):
        in_folder = []
        for name in sorted(listing):
            if os.path.dirname(name) == folder and name != schema.CAPTIONS_FILE:
                in_folder.append(name)
        for suffix in suffixes:
            names = [name for name in in_folder if name.endswith(suffix)]
            if names:
                return names
    return []


def _names_in_index(
    folder: ReadableFolder, index: StoredFile, listing: dict[str, StoredFile]
) -> list[str]:
    """Returns the names of the shards of MDS in an `index.json`.

    Adds those of sub-folders to the listing. Raises a ValueError for a damaged index, and for a
    shard that is missing, compressed or of another size.
    """
    try:
        sizes, has_compressed = _parse_index(index.read())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'{index.path}: is damaged or not an index of MDS shards ({error}). Copy it again. '
            f'{how_to_encode(folder.folder)}.'
        ) from None
    if not sizes:
        raise ValueError(f'{index.path}: has no shards.')
    for sub_folder in _list_sub_folders(sizes):
        listing |= folder.list_visible(sub_folder, _SUFFIXES)
    for name, size in sizes.items():
        path = f'{folder.folder}/{name}'
        file = listing.get(name)
        # The library keeps the plain shards beside the compressed ones, if it is told to.
        if has_compressed and not file:
            raise ValueError(
                f'{path}: is compressed; write the shards again with compression=None.'
            )
        if not file or file.size != size:
            has = f'has {format_count(file.size, "byte")}' if file else 'is missing'
            raise ValueError(f'{path}: {has}, but {index.path} says {size} bytes. Copy it again.')
    return list(sizes)


def _parse_index(data: bytes) -> tuple[dict[str, int], bool]:
    """Returns the size of each shard by its name, and whether any is compressed.

    Raises errors of many types for other contents.
    """
    shards = json.loads(data)['shards']
    sizes = {}
    has_compressed = False
    for shard in shards:
        raw = shard['raw_data']
        sizes[raw['basename']] = raw['bytes']
        has_compressed = has_compressed or bool(shard['compression'])
    # Neither `..` nor deeper folders: an index leads nowhere else.
    folders = _list_sub_folders(sizes)
    is_plain = all(re.fullmatch(r'[^./][^/]*', folder) for folder in folders)
    # Names that occur twice are one entry.
    if len(sizes) < len(shards) or not is_plain:
        raise ValueError(f'it has shards {list(sizes)[:3]}')
    return sizes, has_compressed


def _add_states(
    files: Mapping[str, StoredFile],
    mirrored: Mapping[str, FileState],
    encoded: Mapping[str, FileState] = types.MappingProxyType({}),
) -> dict[str, StoredFile]:
    """Adds to files their states as copied or, which is earlier, as encoded, all by name.

    Raises a ValueError for a file that has another state.
    """
    states = {**mirrored, **encoded}
    for name, file in files.items():
        recorded = states.get(name)
        if recorded:
            # A listing of a local disk has no checksums: only sizes are compared here.
            copied_files.check_recorded_state(file.state, recorded, file.path)
    # Next to files that `mirror` has copied, one that it has not is probably a mistake.
    if mirrored:
        _warn_of_unrecorded([file.path for name, file in files.items() if name not in states])
    recorded_files = {}
    for name, file in files.items():
        recorded_files[name] = dataclasses.replace(file, recorded=states.get(name))
    return recorded_files


def _warn_of_unrecorded(paths: Sequence[str]) -> None:
    """Names the first of the files that `mirror` has not copied, if there are any."""
    if not paths:
        return
    others = ''
    if len(paths) > 1:
        others = f' and {len(paths) - 1} more'
    logging.warning(
        f'{paths[0]}: mirror did not copy this file{others}, unlike others in the source.'
    )
