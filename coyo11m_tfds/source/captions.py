"""Captions of a Parquet file, checked, in the order of the keys that are wanted.

    captions.join(path, 'caption_llava', folder, keys, name='gs://bucket/meta.parquet')
    found = joined.Joined(folder)
    found.places        # int64: which of the keys have a row
    found.sizes         # bytes of their captions; 0: null, empty or blank; TOO_LONG
    found.read(found.places[:9])    # list of UTF-8 bytes, exactly as in the source

All rows are checked, wanted or not. The facts are the number of `duplicates`, rows left out because
an earlier row has their key, the first 10 of their keys, and the `digest` of keys and captions,
which depends neither on the order of the rows nor on keys without a caption; and whether pages
`has_checksums`.
"""

import hashlib
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coyo11m_tfds import schema
from coyo11m_tfds.source import joined, keyed_parquet
from coyo11m_tfds.source.keyed_parquet import KeyedFile

TOO_LONG = -1  # the size of a caption of more than `schema.MAX_CAPTION_BYTES`, which is left out

_MAX_EXAMPLES = 10
_DIGESTED_AT_ONCE = 1 << 20


def join(
    path: str, column: str, folder: str, wanted: np.ndarray | None = None, name: str = ''
) -> None:
    """Writes the captions of some keys into a new folder, for `joined.Joined`.

    Args:
        path: of the Parquet file.
        column: of text.
        folder: see `joined.make`.
        wanted: keys, each once, int64 `(n,)`; place i is that of `wanted[i]`. None for all keys of
            the file; their places are the keys themselves.
        name: stands for the file in messages.

    Raises:
        ValueError: see `KeyedFile`; the column holds no text, or a text is not UTF-8.
        OSError: the folder cannot be written.
    """
    with KeyedFile(path, column, name=name) as file:
        if not file.is_text:
            raise ValueError(f"{file.name}: column '{column}' is {file.kind}, expected text.")
        mean = file.num_bytes // file.num_rows
        if mean > schema.MAX_CAPTION_BYTES:
            raise ValueError(
                f"{file.name}: column '{column}' has {mean:,} bytes a row, expected at most "
                f'{schema.MAX_CAPTION_BYTES:,} as of captions. Choose another column, or leave out '
                'what is too long.'
            )
        facts: dict[str, Any] = {'has_checksums': file.has_checksums}
        joined.make(folder, _rows(file, wanted, facts), facts)


def check_unique(found: joined.Joined, name: str) -> None:
    """Raises ValueError, with the `name` of the file, if rows of it repeat a key."""
    if found.facts['duplicates']:
        raise ValueError(
            f'{name}: {found.facts["duplicates"]} rows repeat the key of another, e.g. key '
            f'{found.facts["duplicate_keys"][0]}; expected one row a key. Remove the duplicates, '
            'or take the first of each key: --drop_duplicates of embed_captions, bad_data="drop" '
            'of a build.'
        )


def _rows(
    file: KeyedFile, wanted: np.ndarray | None, facts: dict[str, Any]
) -> Iterator[pa.RecordBatch]:
    keys = file.keys()
    firsts, duplicates = keyed_parquet.order_by_key(keys)
    facts['duplicates'] = len(duplicates)
    facts['duplicate_keys'] = np.unique(duplicates)[:_MAX_EXAMPLES].tolist()
    places, is_wanted = keyed_parquet.Places(wanted).of(keys)
    is_first = np.zeros(len(keys), bool)
    is_first[firsts] = True
    is_wanted &= is_first
    sizes, checksums = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint32)
    done = 0
    for values in file.values():
        some = slice(done, done + len(values))
        texts, first_of_each, which = _distinct(values)
        sizes_of_each, checksums_of_each = _measure(texts, keys[some][first_of_each], file.name)
        sizes[some], checksums[some] = sizes_of_each[which], checksums_of_each[which]
        rows = np.flatnonzero(is_wanted[some])
        yield from _batches(places[some][rows], sizes[some][rows], texts, which[rows])
        done = some.stop
    digest = hashlib.sha256()
    for column, dtype in ((keys, np.int64), (sizes, np.int64), (checksums, np.uint32)):
        for some_firsts in np.array_split(firsts, 1 + len(firsts) // _DIGESTED_AT_ONCE):
            captioned = some_firsts[sizes[some_firsts] > 0]
            digest.update(column[captioned].astype(dtype))
    facts['digest'] = digest.hexdigest()


def _batches(
    places: np.ndarray, sizes: np.ndarray, texts: pa.Array, which: np.ndarray
) -> Iterator[pa.RecordBatch]:
    """Batches of rows, some MB each; the value is null where there is no caption."""
    parts = np.cumsum(np.maximum(sizes, 0), dtype=np.int64) // keyed_parquet.BYTES_AT_ONCE
    for part in np.split(np.arange(len(parts)), np.flatnonzero(np.diff(parts)) + 1):
        indices = pa.array(which[part], mask=sizes[part] <= 0)
        values = texts.take(indices).cast(pa.large_binary())
        columns = [pa.array(places[part]), pa.array(sizes[part]), values]
        yield pa.RecordBatch.from_arrays(columns, schema=joined.SCHEMA)


def _distinct(values: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Returns the texts in `values`, those of a dictionary once; the first row of each; which one
    each value is."""
    if pa.types.is_string_view(values.type):  # of which Arrow cannot tell the lengths
        values = values.cast(pa.large_string())
    if not pa.types.is_dictionary(values.type):
        each = np.arange(len(values))
        return values, each, each
    indices = pc.fill_null(values.indices, -1).to_numpy()
    used, first_rows, which = np.unique(indices, return_index=True, return_inverse=True)
    return values.dictionary.take(pa.array(used, mask=used < 0)), first_rows, which


def _measure(texts: pa.Array, keys: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sizes and CRC-32 of texts; `keys` has one of each; ValueError if not UTF-8."""
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
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8).tolist()
    view = memoryview(data or b'')
    checksums = [zlib.crc32(view[start:end]) for start, end in itertools.pairwise(bounds)]
    sizes = np.where(too_long, TOO_LONG, np.where(is_caption, sizes, 0))
    return sizes, np.array(checksums, np.uint32)


def _first_not_utf8(texts: pa.Array, keys: np.ndarray) -> int | None:
    """Returns the key of the first text that cannot be decoded."""
    for key, value in zip(keys.tolist(), texts.cast(pa.large_binary()).to_pylist(), strict=True):
        try:
            (value or b'').decode()
        except UnicodeDecodeError:
            return key
    return None
