"""The parts of a sidecar: a pure function of captions, encoder and number of parts.

    captions = Captions(joined, part_captions=32768)
    finished = parts.finished('gs://bucket/gemma', captions.count)
    for number, keys, values in parts.make(captions, [0, 3], encoder, on_batch):
        parts.write_file(path, entries, schema.PART_EMBEDDING, keys, values)  # float16 (n, dim)

A part is a range of keys. Equal captions of a part are encoded once, and a part is tokenized while
the model works on the previous part. The batches of a part depend only on its captions, so its
bytes do not depend on the process or on other parts.

A part appears in its folder only when it is complete, and its metadata hold everything that decides
its contents. So parts need neither locks nor a clean-up: any process makes a missing part, and two
processes that make the same part write the same bytes.
"""

import concurrent.futures
import contextlib
import itertools
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.source import keyed_parquet, sidecar
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.storage import locks, source_files
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.scratch import user_cache
from coyo11m_tfds.storage.source_files import SourceFile
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.encoder import Encoder, OnBatch, Tokenizer

# Enough for batches of like length on several devices, few enough to lose little when a part is
# interrupted: an hour of Gemma-3-270M on a core. 42 MB of 640 numbers each.
PART_CAPTIONS = 32768

_CHECKED_AT_ONCE = 16


class Captions:
    """The captions of a source in the order of their keys, cut into parts.

    Attributes:
        count: Number of parts.
    """

    def __init__(self, captions: Joined, part_captions: int = PART_CAPTIONS):
        """Takes the `captions.join` of all keys; each part has at most `part_captions`."""
        self.digest: str = captions.facts['digest']
        self._captions = captions
        self._keys = captions.places[captions.sizes > 0]
        self.count = -(-len(self._keys) // part_captions)

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self, number: int) -> np.ndarray:
        """Returns the keys of a part, int64 `(n,)`, ascending."""
        bounds = [len(self) * n // self.count for n in (number, number + 1)]
        return self._keys[slice(*bounds)]

    def texts(self, number: int) -> list[bytes]:
        """Returns the captions of a part as UTF-8."""
        return self._captions.read(self.keys(number))


def make(
    captions: Captions,
    numbers: Sequence[int],
    encoder: Encoder | Tokenizer,
    on_batch: OnBatch,
    tokens_only: bool = False,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Makes some parts in turn.

    Args:
        encoder: Encoder of the captions or, with `tokens_only`, their tokenizer.
        on_batch: Called after each batch; its exceptions end the work.

    Yields:
        `(number, keys, values)`: keys int64 `(n,)`, ascending; embeddings float16 `(n, dim)`, or
        token ids int32 `(n, encoder.max_tokens)`, padded with -1.

    Raises:
        ValueError: A number is not finite in float16.
    """

    def prepare(number: int) -> tuple[list[str], Sequence[Sequence[Any]], np.ndarray]:
        """The texts of a part that differ; their tokens; which of them each caption is."""
        place_of: dict[bytes, int] = {}
        places = [place_of.setdefault(text, len(place_of)) for text in captions.texts(number)]
        texts = [text.decode() for text in place_of]
        return texts, encoder.tokenize(texts), np.array(places, np.int64)

    with concurrent.futures.ThreadPoolExecutor(1, 'tokenize') as thread:
        coming = thread.submit(prepare, numbers[0]) if numbers else None
        for number, following in itertools.zip_longest(numbers, numbers[1:]):
            assert coming
            texts, tokens, places = coming.result()
            if following is not None:
                coming = thread.submit(prepare, following)
            if tokens_only:
                values = text_encoders.pad(tokens, encoder.max_tokens)
                on_batch(len(values), sum(map(len, tokens)))
            else:
                values = _encode(texts, tokens, cast(Encoder, encoder), on_batch)
            on_batch(len(places) - len(values), 0)
            yield number, captions.keys(number), values[places]


def _encode(
    texts: list[str], tokens: Sequence[Sequence[Any]], encoder: Encoder, on_batch: OnBatch
) -> np.ndarray:
    with np.errstate(over='ignore'):
        values = encoder.encode_tokens(tokens, on_batch).astype(np.float16)
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise ValueError(
            f'{encoder.name}: the embedding of the caption {texts[bad[0]][:100]!r} exceeds the '
            'range of float16; use another encoder or leave the caption out.'
        )
    return values


# --- Where they go --------------------------------------------------------------------------


def check_out(out: str, share: tuple[int, int]) -> None:
    """Raises a ValueError for a folder that cannot be written, or a wrong `(number, count)`."""
    if not 0 <= share[0] < share[1]:
        raise ValueError(f'part {share[0]}/{share[1]}: expected I/N with I from 0 to N - 1.')
    if os.path.isfile(out):
        raise ValueError(f'{out} is a file; expected a folder.')
    Destination(out)


@contextlib.contextmanager
def scratch_folder(out: str, chosen: str | os.PathLike[str]) -> Iterator[str]:
    """Makes a folder for this run, in a local `out` so that parts are only renamed."""
    if source_files.is_remote(out):
        parent, prefix = Path(chosen or user_cache(schema.NAME)), 'embed-'
    else:
        # What another host of a shared disk has must stay, even if locks do not reach so far.
        parent, prefix = Path(chosen or out), f'.{platform.node()}-'
        Path(out).mkdir(parents=True, exist_ok=True)
    parent.mkdir(parents=True, exist_ok=True)
    try:
        with locks.temporary_folder(parent, prefix) as folder:
            yield folder
    finally:
        with contextlib.suppress(OSError):  # a bucket, or a folder that is not empty
            os.rmdir(out)


def finished(out: str, count: int) -> dict[int, SourceFile]:
    """Returns the parts in a folder by number.

    Raises:
        ValueError: The names of parts have another count than `count`.
        OSError: The storage cannot be reached.
    """
    found_count, found = sidecar.find_parts(out)
    if found and found_count != count:
        raise ValueError(
            f'{next(iter(found.values())).path}: is one of {found_count} parts, but these captions '
            f'make {count} parts here. Remove it, choose another folder, or give part_captions '
            'as it was.'
        )
    return found


# --- Their files ----------------------------------------------------------------------------


def entries(
    encoder: Encoder | Tokenizer, caption_column: str, captions_digest: str, tokens_only: bool
) -> dict[str, str]:
    """Returns the metadata of files: everything that decides embeddings or tokens."""
    common = {
        schema.META_TEXT_ENCODER: encoder.name,
        schema.META_TEXT_REVISION: encoder.revision,
        schema.META_TEXT_MAX_TOKENS: str(encoder.max_tokens),
        schema.META_CAPTION_COLUMN: caption_column,
        schema.META_CAPTIONS_DIGEST: captions_digest,
    }
    if tokens_only:
        return common | {schema.META_TEXT_VOCABULARY: str(encoder.vocabulary)}
    whole = cast(Encoder, encoder)
    return common | {
        schema.META_TEXT_DIM: str(whole.dim),
        schema.META_TEXT_POOLING: whole.pooling,
        schema.META_TEXT_DTYPE: whole.dtype,
    }


def part_entry(number: int, count: int) -> dict[str, str]:
    """Returns the metadata entry that distinguishes a part from the others."""
    return {schema.META_PART: f'{number} of {count}'}


def write_file(
    path: str, metadata: Mapping[str, str], column: str, keys: np.ndarray, values: np.ndarray
) -> None:
    """Writes keys int64 `(n,)` and values `(n, width)`, int32 of `schema.TOKENS`, else float16."""
    kind = pa.list_(pa.from_numpy_dtype(values.dtype), values.shape[1])
    columns = pa.schema(
        [
            pa.field(schema.PARQUET_KEY, pa.int64(), nullable=False),
            pa.field(column, kind, nullable=False),
        ],
        metadata=dict(metadata),
    )
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    table = pa.Table.from_arrays([pa.array(keys), lists], schema=columns)
    with naming(path):
        pq.write_table(
            table,
            path,
            row_group_size=len(keys),
            compression='zstd',
            use_dictionary=False,  # of numbers that seldom repeat it only costs
            write_page_checksum=True,
        )


def check(parts: Mapping[int, SourceFile], metadata: Mapping[str, str], count: int) -> None:
    """Checks that this run would make the same finished parts.

    Raises:
        ValueError: A part has another encoder or other captions, or is damaged; the message names
            it.
        OSError: A part cannot be read.
    """

    def check_one(number: int) -> None:
        expected, file = {**metadata, **part_entry(number, count)}, parts[number]
        found = keyed_parquet.read_schema(file).metadata or {}
        found = {key.decode(): value.decode() for key, value in found.items()}
        sidecar.check_same(expected, found, file.path, 'is what this command makes')

    with concurrent.futures.ThreadPoolExecutor(_CHECKED_AT_ONCE) as threads:
        list(threads.map(check_one, parts))
