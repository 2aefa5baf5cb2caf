"""Captions of a Parquet file as a store on disk that is looked up by key.

    store = caption_store.prepare_store(
        lambda: contextlib.nullcontext(path), name=path, version='1', column='caption_llava',
        cache_dir=folder, drop_duplicates=False,
    )
    rows = store.find(keys)     # -1: the key has no row
    store.lengths(rows)         # bytes of each caption; 0: null, empty or blank; -1: too long
    store.texts(rows)           # list of UTF-8 bytes, exactly as in the source

    caption_store.CaptionStore(store.folder)     # how another process opens it

Building streams one column through memory. For 11.4 million captions of 200 to 600 bytes (4.6 GB)
it takes 13 s and 0.9 GB at most, on 2 cores with `benchmarks/captions.py`; the store is opened in
1 ms and answers a million random keys with their texts in 0.8 s. It takes as much disk as the text
plus 24 bytes a caption. All processes share it through the page cache.
"""

import contextlib
import hashlib
import itertools
import mmap
import os
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.source import copied_files, keyed_parquet, keyed_store
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.file_state import FileState, naming

# Gives the path of a Parquet file, which may have to be downloaded for it.
LocalFile = Callable[[], contextlib.AbstractContextManager[str]]

_STARTS, _LENGTHS, _TEXT = 'starts', 'lengths', 'text'

TOO_LONG = -1  # stands for the length of a caption of more than `schema.MAX_CAPTION_BYTES`

# The kernel maps this much around a page that is touched first.
_MAPPED_AT_ONCE = 65536


class CaptionStore(keyed_store.KeyedStore):
    """A store that `prepare_store` made; see `KeyedStore` for more attributes.

    Attributes:
        keys: of all rows, with and without a caption, int64 `(n,)`, ascending.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Opens a store; raises `keyed_store.UnusableStoreError` as `KeyedStore` does."""
        super().__init__(folder)
        self._starts = self.map_int64(_STARTS)
        self._lengths = self.map_int64(_LENGTHS)
        self._text = self.open_file(_TEXT)
        self._text_bytes = os.fstat(self._text).st_size

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Returns the captions' lengths in bytes; `rows` must not be -1.

        The length is 0 for no caption and `TOO_LONG` for one that is too long to be kept.
        """
        return self._lengths[rows]

    def texts(self, rows: np.ndarray) -> list[bytes]:
        """Returns the captions as UTF-8; `rows` must not be -1."""
        starts, lengths = self._starts[rows], np.maximum(self._lengths[rows], 0)
        # Reading a caption takes 1.2 us. Mapping the text takes 4 us for each part of it that is
        # touched first, which counts as the process's memory meanwhile, and 0.6 us for each
        # caption: that pays only for so many captions that most parts are touched.
        if self._text_bytes > _MAPPED_AT_ONCE * len(rows):
            pairs = zip(lengths.tolist(), starts.tolist(), strict=True)
            return [os.pread(self._text, length, start) for length, start in pairs]
        if not self._text_bytes:  # cannot be mapped
            return [b''] * len(rows)
        with mmap.mmap(self._text, 0, access=mmap.ACCESS_READ) as text:
            bounds = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
            return [text[start:end] for start, end in bounds]


def prepare_store(
    local_file: LocalFile,
    *,
    name: str,
    version: str,
    column: str,
    cache_dir: str | os.PathLike[str],
    drop_duplicates: bool,
    recorded: FileState | None = None,
) -> CaptionStore:
    """Opens the store of one caption column that is in `cache_dir`, or builds it there.

    Args:
        local_file: gives the path of the Parquet file; called only if that has to be read.
        name: path or URL of the file, for messages and to find its older stores.
        version: of the file; for another one the store is built again.
        column: to read.
        cache_dir: local folder; made where there is none. See `keyed_store.prepare`.
        drop_duplicates: whether, of rows that repeat a key, the first wins; else they are an error.
        recorded: size and CRC-32C that the file had when it was copied, if they are known.

    Raises:
        ValueError: see `keyed_parquet`; or the column does not hold text, a text is not UTF-8,
            a key is a duplicate, or the file is not what was recorded.
        OSError: the store cannot be written.
    """

    def build(folder: str) -> dict[str, Any]:
        with local_file() as path:
            logging.info("Building a store of column '%s' of %s.", column, name)
            if recorded:
                copied_files.compare(file_state.of_file(path), recorded, name)
            return build_store(path, column, folder, name)

    made_from = keyed_store.MadeFrom('captions', name, column, version)
    # Held open until the store has been opened as what it is, so that no other process removes it.
    prepared = keyed_store.prepare(cache_dir, made_from, build)
    if not drop_duplicates:
        prepared.check_unique(name)
    return CaptionStore(prepared.folder)


def build_store(path: str, column: str, folder: str, name: str) -> dict[str, Any]:
    """Writes the files of a store into an existing folder, for `prepare_store`.

    Returns:
        The `KeyedStore.facts`. The digest depends on the keys that have a caption and on these
        captions, and on nothing else: neither on the order of the rows nor on other rows.

    Raises:
        As `prepare_store`, but for duplicate keys.
    """
    with keyed_parquet.naming_damage(name):
        keys, lengths, checksums = _read_texts(path, column, os.path.join(folder, _TEXT), name)
    sizes = np.maximum(lengths, 0)
    rows, facts = keyed_store.write_keys(folder, keys)
    keyed_store.write(folder, _STARTS, (np.cumsum(sizes) - sizes)[rows])
    keyed_store.write(folder, _LENGTHS, lengths[rows])
    captioned = rows[lengths[rows] > 0]
    digest = hashlib.sha256()
    for column_of_digest in (keys, lengths, checksums):
        digest.update(column_of_digest[captioned])
    return facts | {'digest': digest.hexdigest()}


def _read_texts(
    path: str, column: str, text_path: str, name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Writes the captions of all rows to a file.

    Returns:
        Of each row the key, int64; the length as `CaptionStore.lengths` gives it, int64; and the
        CRC-32 of its caption, uint32.
    """
    with keyed_parquet.open_with_column(path, column, name) as file:
        kind = file.schema_arrow.field(column).type
        if not _is_text(kind):
            raise ValueError(f"{name}: column '{column}' is {kind}, expected text.")
        keyed_parquet.check_mean_bytes(file, column, schema.MAX_CAPTION_BYTES, name)
    all_keys, all_lengths, all_checksums = [], [], []
    with naming(text_path), open(text_path, 'wb') as text:
        for keys, values in keyed_parquet.batches(path, column, name, as_dictionary=True):
            texts, first_rows, places = _distinct(values)
            lengths, checksums = _measure(texts, keys[first_rows], name)
            _write_texts(text, texts, places, lengths)
            all_keys.append(keys)
            all_lengths.append(lengths[places])
            all_checksums.append(checksums[places])
    return np.concatenate(all_keys), np.concatenate(all_lengths), np.concatenate(all_checksums)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _distinct(values: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Returns the distinct texts in `values`; the first row of each; which one each value is."""
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    indices = pc.fill_null(values.indices, -1).to_numpy()
    used, first_rows, places = np.unique(indices, return_index=True, return_inverse=True)
    return values.dictionary.take(pa.array(used, mask=used < 0)), first_rows, places


def _measure(texts: pa.Array, keys: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns lengths as `CaptionStore.lengths` and CRC-32 of captions; `keys` has one of each.

    Raises ValueError for text that is not UTF-8.
    """
    sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy().astype(np.int64)
    too_long = sizes > schema.MAX_CAPTION_BYTES
    texts = pc.if_else(pa.array(too_long), pa.scalar(None, texts.type), texts)
    texts = texts.cast(pa.large_string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f'{name}: the text of key {_first_not_utf8(texts, keys)} is not UTF-8 ({error}). '
            'Remove the row or mend it.'
        ) from None
    is_caption = pc.fill_null(pc.invert(pc.utf8_is_space(texts)), False)
    is_caption = is_caption.to_numpy(zero_copy_only=False)
    offsets, data = _buffers(texts)
    bounds = itertools.pairwise(offsets.tolist())
    checksums = np.array([zlib.crc32(data[start:end]) for start, end in bounds], np.uint32)
    return np.where(too_long, TOO_LONG, np.where(is_caption, sizes, 0)), checksums


def _write_texts(file: BinaryIO, texts: pa.Array, places: np.ndarray, lengths: np.ndarray) -> None:
    """Writes the captions among the rows, in their order, some MB at a time."""
    rows = places[lengths[places] > 0]
    parts = np.cumsum(lengths[rows]) // keyed_parquet.BYTES_AT_ONCE
    for part in np.split(rows, np.flatnonzero(np.diff(parts)) + 1):
        offsets, data = _buffers(texts.take(pa.array(part)).cast(pa.large_string()))
        file.write(data[offsets[0] : offsets[-1]])


def _buffers(texts: pa.LargeStringArray) -> tuple[np.ndarray, memoryview]:
    """Returns where each text begins and the last ends, int64 `(n + 1,)`, and what that refers to.

    Of null the length is 0.
    """
    _, offsets, data = texts.buffers()
    offsets = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8)
    return offsets, memoryview(data or b'')


def _first_not_utf8(texts: pa.Array, keys: np.ndarray) -> int | None:
    """Returns the key of the first text that cannot be decoded."""
    for key, value in zip(keys.tolist(), texts.cast(pa.large_binary()).to_pylist(), strict=True):
        try:
            (value or b'').decode()
        except UnicodeDecodeError:
            return key
    return None
