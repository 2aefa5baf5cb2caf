"""The parts of a sidecar: a pure function of captions, encoder and number of parts.

    captions = Captions(joined, part_captions=32768)
    finished = parts.finished('gs://bucket/gemma', captions.count)
    for number, keys, values in parts.make(captions, [0, 3], encoder, on_batch):
        with parts.open_file(path, entries, schema.PART_EMBEDDING, encoder.dim) as write:
            write(keys, values)                         # float16 (n, dim)

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.source import keyed_parquet, sidecar
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.storage import locks, remote, source_files
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.scratch import user_cache
from coyo11m_tfds.storage.source_files import SourceFile
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.encoder import Encoder, OnBatch, Tokenizer

# Enough for batches of like length on several devices, few enough to lose little when a part is
# interrupted: an hour of Gemma-3-270M on a core. 42 MB of 640 numbers each.
PART_CAPTIONS = 32768

_FILE = '.parquet'

# This much of a file is read to check it, and more if its footer is longer.
_TAIL_BYTES = 1 << 15
_CHECKED_AT_ONCE = 16


class Captions:
    """The captions of a source in the order of their keys, cut into parts.

    Attributes:
        digest: Digest of all captions.
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
        captions: Captions to encode.
        numbers: Numbers of the parts.
        encoder: Encoder of the captions or, with `tokens_only`, their tokenizer.
        on_batch: Called after each batch; its exceptions end the work.
        tokens_only: Whether to make token ids in place of embeddings.

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
                num_tokens = sum(map(len, tokens))
                on_batch(len(values), num_tokens, num_tokens)
            else:
                values = _encode(texts, tokens, cast(Encoder, encoder), on_batch)
            on_batch(len(places) - len(values), 0, 0)
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


def is_file(out: str) -> bool:
    """Whether `out` names one file."""
    return out.endswith(_FILE)


def check_out(out: str, share: tuple[int, int]) -> None:
    """Refuses an output that cannot be written, before anything is read.

    Args:
        out: Folder or file of the sidecar.
        share: Number of this host, and number of hosts.

    Raises:
        ValueError: `out` cannot be written, or not by several hosts.
    """
    what = ''
    if not 0 <= share[0] < share[1]:
        raise ValueError(f'part {share[0]}/{share[1]}: expected I/N with I from 0 to N - 1.')
    if not is_file(out):
        if os.path.isfile(out):
            what = f'is a file; expected a folder, or a name ending in {_FILE}.'
        else:
            Destination(out)
    elif source_files.is_remote(out):
        what = 'is remote; expected a local path, which can be copied there, or a folder.'
    elif os.path.isdir(out):
        what = 'is a folder; expected the path of a file to write.'
    elif share[1] > 1:
        what = (
            f'is one file, which one process makes, and this is one of {share[1]}. Name a folder.'
        )
    if what:
        raise ValueError(f'{out} {what}')


@contextlib.contextmanager
def scratch_folder(out: str, chosen: str | os.PathLike[str]) -> Iterator[str]:
    """Makes a folder for this run, in or beside a local `out` so that parts are only renamed."""
    if is_file(out):
        parent, prefix = Path(out).parent, f'.{Path(out).name}.'
    elif source_files.is_remote(out):
        parent, prefix = Path(chosen or user_cache(schema.NAME)), 'embed-'
    else:
        # What another host of a shared disk has must stay, even if locks do not reach so far.
        parent, prefix = Path(chosen or out), f'.{platform.node()}-'
        Path(out).mkdir(parents=True, exist_ok=True)
    parent.mkdir(parents=True, exist_ok=True)
    with locks.temporary_folder(parent, prefix) as folder:
        yield folder


def finished(out: str, count: int) -> dict[int, SourceFile]:
    """Returns the parts in a folder by number; {} for a single file, which will be replaced.

    Raises:
        ValueError: The names of parts have another count than `count`.
        OSError: The storage cannot be reached.
    """
    if is_file(out):
        return {}
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


@contextlib.contextmanager
def open_file(
    path: str, metadata: Mapping[str, str], column: str, width: int
) -> Iterator[Callable[[np.ndarray, np.ndarray], None]]:
    """Writes a file; yields a function that adds a row group.

    The function takes keys int64 `(n,)` and values `(n, width)`: int32 for `schema.TOKENS`,
    otherwise float16.
    """
    kind = pa.int32() if column == schema.TOKENS else pa.float16()
    columns = pa.schema(
        [
            pa.field(schema.PARQUET_KEY, pa.int64(), nullable=False),
            pa.field(column, pa.list_(kind, width), nullable=False),
        ],
        metadata=dict(metadata),
    )
    options = {
        'compression': 'zstd',
        'use_dictionary': False,  # of numbers that seldom repeat it only costs
        'write_page_checksum': True,
    }
    with naming(path), pq.ParquetWriter(path, columns, **options) as writer:

        def write(keys: np.ndarray, values: np.ndarray) -> None:
            lists = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), width)
            table = pa.Table.from_arrays([pa.array(keys), lists], schema=columns)
            writer.write_table(table, row_group_size=len(keys))

        yield write


def check(parts: Mapping[int, SourceFile], metadata: Mapping[str, str], count: int) -> None:
    """Checks that this run would make the same finished parts.

    Raises:
        ValueError: A part has another encoder or other captions, or is damaged; the message names
            it.
        OSError: A part cannot be read.
    """

    def check_one(number: int) -> None:
        expected, file = {**metadata, **part_entry(number, count)}, parts[number]
        sidecar.check_same(expected, _read_metadata(file), file.path, 'is what this command makes')

    with concurrent.futures.ThreadPoolExecutor(_CHECKED_AT_ONCE) as threads:
        list(threads.map(check_one, parts))


def _read_metadata(file: SourceFile) -> dict[str, str]:
    """Reads the metadata of the schema from the end of a file."""

    def read_tail(length: int) -> bytes:
        length = min(length, file.size)
        return remote.read_range(file, file.size - length, length)

    with keyed_parquet.naming_damage(file.path):
        tail = read_tail(_TAIL_BYTES)
        footer = int.from_bytes(tail[-8:-4], 'little') + 8
        if footer > len(tail):
            tail = read_tail(footer)
        found = pq.read_schema(pa.BufferReader(tail)).metadata or {}
    return {key.decode(): value.decode() for key, value in found.items()}
