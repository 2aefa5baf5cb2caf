"""Checks the captions of Parquet files and sorts them into the order of requested keys."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coyo11m_tfds import schema
from coyo11m_tfds.foreign import arrow_texts
from coyo11m_tfds.foreign.file_names import find_first
from coyo11m_tfds.process.errors import Faults, FieldError
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source import copied_files, keyed_parquet, keyed_values
from coyo11m_tfds.source.keyed_parquet import KeyedFile, RemoteColumns
from coyo11m_tfds.source.keyed_values import KeyedValues, KeyedValuesWriter, KeyPlaces
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile, file_changed

# The sizes of captions that are left out: of more than `schema.MAX_CAPTION_BYTES`, and no UTF-8.
TOO_LONG = -1
UNREADABLE = -3

_MAX_EXAMPLES = 10
# Fetched whole, and so compared with the checksum of its storage.
_SMALL_BYTES = 8 << 20
_DIGESTED_AT_ONCE = 1 << 20
_FOOTERS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class CaptionFiles:
    """Parquet files with the captions of a source; none if captions lie next to the latents."""

    files: tuple[StoredFile, ...]
    key_column: str
    caption_column: str

    @classmethod
    def choose(
        cls, files: Iterable[StoredFile], key_column: str, caption_column: str
    ) -> 'CaptionFiles':
        """Chooses the columns that a config describes; reads only schemas.

        Raises a ValueError for a file that lacks them, or has others than the first one.
        """
        files = tuple(files)
        names: Sequence[str] = [caption_column]
        # By default, any of the usual names will do.
        if caption_column == schema.DEFAULT_CAPTION_COLUMN:
            names = schema.CAPTION_COLUMNS
        with ThreadPool(_FOOTERS_AT_ONCE) as threads:
            schemas = threads.map(keyed_parquet.read_schema_and_count, files)
            for file, (arrow, num_rows) in zip(files, schemas, strict=True):
                # Without rows, a column may have any type, or be missing.
                if not num_rows:
                    continue
                with keyed_parquet.naming_damage(file.path):
                    keys = keyed_parquet.find_key_column(arrow, key_column)
                caption = find_first(names, arrow.names)
                texts = _list_text_columns(arrow)
                # Both faults at once, so that one more command is enough.
                faults = Faults()
                if not keys:
                    faults.add(_missing_keys_error(file.path, arrow, key_column))
                if caption not in texts:
                    problem = _describe_missing_texts(file.path, arrow, caption)
                    faults.add(FieldError('caption_column', caption_column, problem))
                faults.check()
                # The next files must have the columns of the first.
                key_column = keys
                names = [caption]
        return cls(files, key_column or schema.PARQUET_KEY, names[0])

    @property
    def origin(self) -> list[Any]:
        """What decides the captions, as JSON."""
        versions = []
        for file in self.files:
            # Any commit of a hub may have the file.
            path = re.sub('@[0-9a-f]{40}/', '/', file.path)
            versions.append((path, file.version))
        return [versions, self.key_column, self.caption_column]

    def join(
        self,
        folder: str,
        scratch: Scratch,
        requested_keys: np.ndarray | None = None,
        *,
        by_columns: bool = False,
    ) -> None:
        """Writes the captions into a new folder like `join_texts`.

        Of large remote files, `by_columns` fetches the two columns alone, which no checksum of the
        storage covers.
        """
        if by_columns:
            hold = self._hold_columns(scratch)
        else:
            hold = scratch.hold_all(self.files, shows=True)
        with hold as local_paths:
            paths = {}
            for file, path in zip(self.files, local_paths, strict=True):
                # The whole file will be read anyway, so it is compared with the record of `mirror`.
                if file.recorded:
                    state = file_state.compute_state(path)
                    copied_files.check_recorded_state(state, file.recorded, file.path)
                paths[file.path] = path
            # They are opened twice, for keys and for captions, which must be of one version: with
            # other rows the second time, nothing fits together.
            try:
                join_texts(paths, self.caption_column, folder, requested_keys, self.key_column)
            finally:
                self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raises a `FileChanged` for a local file that is no longer the one that was found."""
        for file in self.files:
            if not file.is_unchanged():
                raise file_changed(file, 'while it was read')

    @contextlib.contextmanager
    def _hold_columns(self, scratch: Scratch) -> Iterator[list[str]]:
        """Returns local paths of files with the two columns, valid within the `with` block."""
        large: list[StoredFile] = []
        small: list[StoredFile] = []  # or local
        for file in self.files:
            # A small one is fetched whole, which compares its checksum.
            if not file.local_path and file.size > _SMALL_BYTES:
                large.append(file)
            else:
                small.append(file)
        if not large:
            with scratch.hold_all(self.files, shows=True) as local_paths:
                yield local_paths
            return
        # All footers first: they say how many bytes there are to fetch, for the progress.
        names = self.key_column, self.caption_column
        open_columns = functools.partial(RemoteColumns, columns=names)
        with ThreadPool(_FOOTERS_AT_ONCE) as threads:
            columns = list(threads.map(open_columns, large))
        num_bytes = sum(file_columns.num_bytes for file_columns in columns)
        with (
            scratch.make_folder() as folder,
            scratch.hold_all(small, shows=True) as small_paths,
        ):
            paths = dict(zip(small, small_paths, strict=True))
            with Progress(f'Fetching {" and ".join(names)}', num_bytes, 'B') as progress:
                for number, file in enumerate(large):
                    paths[file] = os.path.join(folder, f'{number}.parquet')
                    columns[number].fetch(paths[file], progress.add)
            yield [paths[file] for file in self.files]


def _list_text_columns(arrow: pa.Schema) -> list[str]:
    """Returns the names of all columns that can hold captions."""
    names = []
    for field in arrow:
        if arrow_texts.holds_text(field.type):
            names.append(field.name)
    return names


def _describe_missing_texts(path: str, arrow: pa.Schema, caption: str) -> str:
    """Returns what a file has instead of captions; `caption` is of another type, '' for none."""
    kind = ''
    if caption:
        kinds = dict(zip(arrow.names, arrow.types, strict=True))
        kind = f' ({caption} is {kinds[caption]})'
    texts = _list_text_columns(arrow)
    return f'{path} has no such texts{kind}, but {texts}: set caption_column.'


def _missing_keys_error(path: str, arrow: pa.Schema, key_column: str) -> FieldError:
    """Returns the error for a file without a column of keys."""
    integers = []
    for field in arrow:
        if pa.types.is_integer(field.type):
            integers.append(field.name)
    problem = f'{path} has no such integers, but {integers}: set key_column.'
    return FieldError('key_column', key_column or schema.PARQUET_KEY, problem)


def join_texts(
    paths: Mapping[str, str],
    column: str,
    folder: str,
    requested_keys: np.ndarray | None = None,
    key_column: str = schema.PARQUET_KEY,
) -> None:
    """Writes the captions of distinct keys into a new folder of `KeyedValues`.

    `paths` are the local paths of the files, by their names in messages. Keys get the places of
    `KeyPlaces`. The size of a caption is 0 if it is null, empty or blank, and `TOO_LONG` or
    `UNREADABLE` if it is left out. The facts are `has_checksums` (of pages, in all files),
    `num_rows`, `duplicates`, up to ten `duplicate_keys`, and `digest`. Raises a ValueError for
    files without rows.
    """

    def open_files() -> Iterator[KeyedFile]:
        """Yields each file, which is closed when the next one is asked for."""
        # One at a time: there may be more files than a process can have open.
        for name, path in paths.items():
            with KeyedFile(path, column, name=name, key_column=key_column) as file:
                yield file

    # All keys first: they decide which rows are captions, and where they belong.
    keys_of_files = []
    has_checksums = True
    for file in open_files():
        keys_of_files.append(file.keys())
        has_checksums = has_checksums and file.has_checksums
    keys = np.concatenate(keys_of_files)
    if not len(keys):
        first_name, *other_names = paths
        others = ''
        if other_names:
            others = ', nor has any other file of captions'
        raise ValueError(f'{first_name}: has no rows{others}.')
    first_rows, duplicate_keys = keyed_values.order_by_key(keys)
    places, is_kept = KeyPlaces(requested_keys).find(keys)
    # Without duplicates: of the rows with one key, only the first is its caption.
    is_first = np.zeros(len(keys), bool)
    is_first[first_rows] = True
    writer = KeyedValuesWriter(folder)
    # Opened once more, because all captions together may not fit into memory.
    sizes, checksums = _write_texts(open_files(), keys, places, is_kept & is_first, writer)
    facts = {
        'has_checksums': has_checksums,
        'num_rows': len(keys),
        'duplicates': len(duplicate_keys),
        'duplicate_keys': np.unique(duplicate_keys)[:_MAX_EXAMPLES].tolist(),
        'digest': _digest(first_rows, keys, sizes, checksums),
    }
    writer.finish(facts)


def check_unique_captions(captions: KeyedValues, name: str) -> None:
    """Raises a ValueError, with the `name` of the file, if rows of the file repeat a key."""
    options = '--drop_duplicates of embed_captions, bad_data="drop" of a build'
    remedy = f', or take the first of each key: {options}'
    count = captions.facts['duplicates']
    examples = captions.facts['duplicate_keys']
    keyed_values.check_unique_keys(count, examples, name, remedy)


def _write_texts(
    files: Iterable[KeyedFile],
    keys: np.ndarray,
    places: np.ndarray,
    is_kept: np.ndarray,
    writer: KeyedValuesWriter,
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the texts of some rows; returns sizes, int32, and CRC-32s, uint32, of all rows."""
    sizes = np.empty(len(keys), np.int32)
    checksums = np.empty(len(keys), np.uint32)
    batches = itertools.chain.from_iterable(file.values() for file in files)
    start = 0
    with Progress('Reading captions', len(keys), 'rows') as progress:
        for values in batches:
            batch = slice(start, start + len(values))
            # Once for each entry of a dictionary: there are few, and the texts may be long.
            texts, index = _distinct_texts(values)
            texts, text_sizes, text_checksums = _measure_texts(texts)
            # From entries to rows.
            sizes[batch] = text_sizes[index]
            checksums[batch] = text_checksums[index]
            # All rows have sizes and checksums, for the digest; only some are written.
            rows = np.flatnonzero(is_kept[batch])
            row_sizes = sizes[batch][rows]
            indices = pa.array(index[rows], mask=row_sizes <= 0)
            row_texts = pa.DictionaryArray.from_arrays(indices, texts)
            writer.add(places[batch][rows], row_sizes, row_texts)
            start = batch.stop
            progress.add(len(values))
    return sizes, checksums


def _digest(
    first_rows: np.ndarray, keys: np.ndarray, sizes: np.ndarray, checksums: np.ndarray
) -> str:
    """Returns the SHA-256 of all keys with a caption, then of their sizes, then of their CRC-32s.

    `first_rows` are the rows by ascending keys, of equal keys the first. The digest decides the
    shards of a build, and says of which captions embeddings are.
    """
    # In blocks, since a whole column in order would take 90 MB for 11 million rows.
    num_blocks = 1 + len(first_rows) // _DIGESTED_AT_ONCE
    digest = hashlib.sha256()
    for column, dtype in ((keys, np.int64), (sizes, np.int64), (checksums, np.uint32)):
        for rows in np.array_split(first_rows, num_blocks):
            with_caption = rows[sizes[rows] > 0]
            digest.update(column[with_caption].astype(dtype))
    return digest.hexdigest()


def _distinct_texts(values: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns the texts, those of a dictionary once, as large binary, and the index of each row."""
    if not pa.types.is_dictionary(values.type):
        return arrow_texts.read_texts(values), np.arange(len(values), dtype=np.int32)
    # Polars writes unsigned ones, which have no -1.
    indices = values.indices.cast(pa.int64())
    # A row without a text gets the index -1, and a null below.
    filled_indices = pc.fill_null(indices, -1).to_numpy()
    # Only entries that are used: the dictionary may be that of a whole row group.
    entries, index = np.unique(filled_indices, return_inverse=True)
    used_entries = pa.array(entries, mask=entries < 0)
    texts = values.dictionary.take(used_entries)
    return arrow_texts.read_texts(texts), index.astype(np.int32, copy=False)


def _measure_texts(texts: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Returns the texts, large binary `(n,)`, their sizes, int32, and their CRC-32s, uint32.

    Those that are left out become b''. The size of one that is too long or that cannot be read is
    `TOO_LONG` or `UNREADABLE`, that of a blank one 0.
    """
    # As empty texts, because the bytes of a null may still be there.
    texts = pc.fill_null(texts, b'')
    empty = pa.scalar(b'', texts.type)
    sizes = pc.binary_length(texts).to_numpy().astype(np.int32)
    too_long = sizes > schema.MAX_CAPTION_BYTES
    # Before what is unreadable is looked for, which takes time for each byte.
    texts = pc.if_else(pa.array(too_long), empty, texts)
    unreadable = arrow_texts.find_unreadable(texts)
    texts = pc.if_else(pa.array(unreadable), empty, texts)
    # A view as texts is valid from here on: what is no UTF-8 is gone.
    is_blank = pc.utf8_is_space(texts.view(pa.large_string()))
    # Arrow does not count a text of no characters as blank; its size is 0 anyway.
    sizes = np.where(is_blank.to_numpy(zero_copy_only=False), 0, sizes)
    # After the blank ones: texts that are left out have become blank, too.
    sizes = np.where(too_long, TOO_LONG, sizes)
    sizes = np.where(unreadable, UNREADABLE, sizes)
    return texts, sizes, _compute_checksums(texts)


def _compute_checksums(texts: pa.Array) -> np.ndarray:
    """Returns the CRC-32 of each text, large binary without nulls; uint32 `(n,)`."""
    # Of slices of Arrow's buffer, so that no text is copied into an object of Python.
    _, offsets, data = texts.buffers()
    # An array may be a part of its buffers, whose offsets have 8 bytes each.
    bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8).tolist()
    view = memoryview(data or b'')
    checksums = [zlib.crc32(view[start:end]) for start, end in itertools.pairwise(bounds)]
    return np.array(checksums, np.uint32)
