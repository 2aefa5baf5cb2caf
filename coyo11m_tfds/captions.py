"""Captions of a Parquet file as a store on disk that is looked up by key.

    store = captions.prepare_store(
        lambda: contextlib.nullcontext(path), name=path, version='1', column='caption_llava',
        cache_dir=folder, drop_repeats=False,
    )
    rows = store.find(keys)     # -1: the key has no row
    store.lengths(rows)         # bytes of each caption; 0: null, empty or blank
    store.texts(rows)           # list of UTF-8 bytes, exactly as in the source

    captions.CaptionStore(store.folder)     # how another process opens it

Building streams one column through memory. For 11.4 million captions of 200 to 600 bytes (4.6 GB)
it takes 13 s and 0.9 GB at most, on 2 cores with `benchmarks/captions.py`; the store is opened in
1 ms and answers a million random keys with their texts in 0.8 s. It takes as much disk as the text
plus 24 bytes a caption. All processes share it through the page cache.
"""

import concurrent.futures
import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from absl import logging

from coyo11m_tfds import keyed_parquet, keyed_store
from coyo11m_tfds.storage.destination import naming

# Gives the path of a Parquet file, which may have to be downloaded for it.
LocalFile = Callable[[], contextlib.AbstractContextManager[str]]

_STARTS, _LENGTHS, _TEXT = 'starts', 'lengths', 'text'

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
        """Returns the captions' lengths in bytes, 0 for no caption; `rows` must not be -1."""
        return self._lengths[rows]

    def texts(self, rows: np.ndarray) -> list[bytes]:
        """Returns the captions as UTF-8; `rows` must not be -1."""
        starts, lengths = self._starts[rows], self._lengths[rows]
        # To read a caption takes 1.2 us. To map the text takes 4 us for each part of it that is
        # touched first, which counts as the process's memory meanwhile, and 0.6 us for each
        # caption: that pays only for so many that most parts are touched.
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
    drop_repeats: bool,
) -> CaptionStore:
    """Opens the store of one caption column that is in `cache_dir`, or builds it there.

    Args:
        local_file: gives the path of the Parquet file; called only if that has to be read.
        name: path or URL of the file, for messages and to know its older stores.
        version: of the file; another one has the store built again.
        column: to read.
        cache_dir: local folder; made where there is none. See `keyed_store.prepare`.
        drop_repeats: whether, of rows that repeat a key, the first wins; else they are an error.

    Raises:
        ValueError: see `keyed_parquet`; or the column does not hold text, a text is not UTF-8, or
            a key comes twice.
        OSError: the store cannot be written.
    """

    def build(folder: str) -> dict[str, Any]:
        with local_file() as path:
            logging.info("Building a store of column '%s' of %s.", column, name)
            return build_store(path, column, folder, name)

    made_from = keyed_store.MadeFrom('captions', name, column, version)
    # Held open until the store has been opened as what it is, so that nobody removes it.
    prepared = keyed_store.prepare(cache_dir, made_from, build)
    if not drop_repeats:
        prepared.check_unique(name)
    return CaptionStore(prepared.folder)


def build_store(path: str, column: str, folder: str, name: str) -> dict[str, Any]:
    """Writes the files of a store into an existing folder; `prepare_store` is what calls this.

    Returns:
        What `KeyedStore.facts` shall be. Its digest depends on keys and captions in the order of
        the rows, and on nothing else.

    Raises:
        As `prepare_store`, but for keys that come twice.
    """
    with keyed_parquet.open_with_column(path, column, name) as file:
        kind = file.schema_arrow.field(column).type
    if not _is_text(kind):
        raise ValueError(f"{name}: column '{column}' is {kind}, expected text.")
    all_keys, all_lengths = [], []
    text_digest = hashlib.sha256()
    text_path = os.path.join(folder, _TEXT)
    with (
        naming(text_path),
        open(text_path, 'wb') as text,
        concurrent.futures.ThreadPoolExecutor(1) as other_thread,
    ):
        for keys, values in keyed_parquet.batches(path, column, name):
            lengths, data = _flatten(values, keys, name)
            # Either takes longer than to read the file.
            hashed = other_thread.submit(text_digest.update, data)
            text.write(data)
            hashed.result()
            all_keys.append(keys)
            all_lengths.append(lengths)
    keys, lengths = np.concatenate(all_keys), np.concatenate(all_lengths)
    digest = hashlib.sha256(text_digest.digest())
    digest.update(keys)
    digest.update(lengths)
    rows, facts = keyed_store.write_keys(folder, keys, digest.hexdigest())
    keyed_store.write(folder, _STARTS, (np.cumsum(lengths) - lengths)[rows])
    keyed_store.write(folder, _LENGTHS, lengths[rows])
    return facts


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _flatten(values: pa.Array, keys: np.ndarray, name: str) -> tuple[np.ndarray, memoryview]:
    """Returns the length of each caption, int64 `(n,)`, and their text, one after the other.

    What is null or blank counts as empty. Raises ValueError for text that is not UTF-8.
    """
    text = values.cast(pa.large_string())
    try:
        text.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f'{name}: the text of key {_first_not_utf8(text, keys)} is not UTF-8 ({error}). '
            'Remove the row or mend it.'
        ) from None
    is_caption = pc.fill_null(pc.invert(pc.utf8_is_space(text)), False)
    captions = text.filter(is_caption)
    _, offsets_buffer, data_buffer = captions.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, len(captions) + 1, captions.offset * 8)
    lengths = np.zeros(len(text), np.int64)
    lengths[is_caption.to_numpy(zero_copy_only=False)] = np.diff(offsets)
    return lengths, memoryview(data_buffer or b'')[offsets[0] : offsets[-1]]


def _first_not_utf8(text: pa.Array, keys: np.ndarray) -> int | None:
    """Returns the key of the first value that cannot be decoded."""
    for key, value in zip(keys.tolist(), text.cast(pa.large_binary()).to_pylist(), strict=True):
        try:
            (value or b'').decode()
        except UnicodeDecodeError:
            return key
    return None
