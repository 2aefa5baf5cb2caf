"""Checks the captions of a Parquet file and sorts them into the order of given keys.

`join_captions` checks all rows of the file. The facts of the result are the number of `duplicates`
(rows left out because an earlier row has their key), the first 10 of their keys, the `digest` of
keys and captions, and `has_checksums`, which says whether the pages have checksums. The order of
the rows, and keys without a caption, do not change the digest.
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
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import keyed_values
from coyo11m_tfds.source.keyed_parquet import KeyedFile

TOO_LONG = -1  # the size of a caption of more than `schema.MAX_CAPTION_BYTES`, which is left out

_MAX_EXAMPLES = 10
_DIGESTED_AT_ONCE = 1 << 20


def join_captions(
    path: str, column: str, folder: str, wanted: np.ndarray | None = None, name: str = ''
) -> None:
    """Writes the captions of some keys into a new folder, for `keyed_values.KeyedValues`.

    Of the distinct keys `wanted`, int64 `(n,)`, the i-th gets place i; without them, each key of
    the file is its own place. The size of a caption is 0 if it is null, empty or blank, and
    `TOO_LONG` if it is left out. Raises the errors of `KeyedFile` and `keyed_values.make`, and a
    ValueError if the column holds no text, or a text is not UTF-8.
    """
    with KeyedFile(path, column, name=name) as file:
        if not file.is_text:
            raise ValueError(
                f"{file.name}: column '{column}' is {file.kind}, expected text. Set caption_column."
            )
        facts: dict[str, Any] = {'has_checksums': file.has_checksums}
        keyed_values.make(folder, _batches(file, wanted, facts), facts)


def check_unique_captions(found: keyed_values.KeyedValues, name: str) -> None:
    """Raises a ValueError, with the `name` of the file, if rows of the file repeat a key."""
    facts, options = found.facts, '--drop_duplicates of embed_captions, bad_data="drop" of a build'
    remedy = f', or take the first of each key: {options}'
    keyed_values.check_unique_keys(facts['duplicates'], facts['duplicate_keys'], name, remedy)


def _batches(
    file: KeyedFile, wanted: np.ndarray | None, facts: dict[str, Any]
) -> Iterator[keyed_values.Batch]:
    keys = file.keys()
    firsts, duplicates = keyed_values.order_by_key(keys)
    facts['duplicates'] = len(duplicates)
    facts['duplicate_keys'] = np.unique(duplicates)[:_MAX_EXAMPLES].tolist()
    places, is_wanted = keyed_values.KeyPlaces(wanted).of(keys)
    is_first = np.zeros(len(keys), bool)
    is_first[firsts] = True
    is_wanted &= is_first
    sizes, checksums = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint32)
    done = 0
    with Progress(f"Reading '{file.column}' of {file.name}", len(keys), 'rows') as progress:
        for values in file.values():
            some = slice(done, done + len(values))
            texts, first_of_each, which = _distinct(values)
            texts, sizes_of_each, checksums_of_each = _measure(
                texts, keys[some][first_of_each], file.name
            )
            sizes[some], checksums[some] = sizes_of_each[which], checksums_of_each[which]
            rows = np.flatnonzero(is_wanted[some])
            found = sizes[some][rows]
            indices = pa.array(which[rows], mask=found <= 0)
            yield places[some][rows], found, pa.DictionaryArray.from_arrays(indices, texts)
            done = some.stop
            progress.add(len(values))
    digest = hashlib.sha256()
    for column, dtype in ((keys, np.int64), (sizes, np.int64), (checksums, np.uint32)):
        for some_firsts in np.array_split(firsts, 1 + len(firsts) // _DIGESTED_AT_ONCE):
            captioned = some_firsts[sizes[some_firsts] > 0]
            digest.update(column[captioned].astype(dtype))
    facts['digest'] = digest.hexdigest()


def _distinct(values: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Returns the texts in `values`, those of a dictionary once; the first row of each, int64; and
    which of them each value is, int32."""
    if not pa.types.is_dictionary(values.type):
        each = np.arange(len(values), dtype=np.int32)
        return values, each, each
    indices = pc.fill_null(values.indices, -1).to_numpy()
    used, first_rows, which = np.unique(indices, return_index=True, return_inverse=True)
    texts = values.dictionary.take(pa.array(used, mask=used < 0))
    return texts, first_rows, which.astype(np.int32)


def _measure(
    texts: pa.Array, keys: np.ndarray, name: str
) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Returns texts as large binary, their sizes and their CRC-32; those too long become null.

    Raises a ValueError, which names the key, if one is not UTF-8.
    """
    if pa.types.is_string_view(texts.type):  # Arrow cannot tell the lengths of these
        texts = texts.cast(pa.large_string())
    sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy().astype(np.int32)
    too_long = sizes > schema.MAX_CAPTION_BYTES
    texts = pc.if_else(pa.array(too_long), pa.scalar(None, texts.type), texts)
    texts = texts.cast(pa.large_string())
    raw = texts.cast(pa.large_binary())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        each = zip(keys.tolist(), raw.to_pylist(), strict=True)
        bad = next((k for k, x in each if x and x.decode(errors='ignore').encode() != x), None)
        raise ValueError(
            f'{name}: the text of key {bad} is not UTF-8 ({error}). Remove or repair the row.'
        ) from None
    is_caption = pc.fill_null(pc.invert(pc.utf8_is_space(texts)), False)
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8).tolist()
    view = memoryview(data or b'')
    checksums = [zlib.crc32(view[start:end]) for start, end in itertools.pairwise(bounds)]
    sizes = np.where(is_caption.to_numpy(zero_copy_only=False), sizes, 0)
    return raw, np.where(too_long, TOO_LONG, sizes), np.array(checksums, np.uint32)
