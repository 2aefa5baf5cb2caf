"""The Parquet files of a sidecar: columns, and what decides them in the schema's metadata.

entries = part_writer.entries(encoder, 'caption_llava', store.digest, tokens_only=False)
with part_writer.open_file(path, entries, schema.PART_EMBEDDING, encoder.dim) as write:
    write(keys, values)

part_writer.check(files, entries, count)    # those that an earlier run has finished
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.source import keyed_parquet, sidecar
from coyo11m_tfds.storage import remote
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.source_files import SourceFile
from coyo11m_tfds.text.text_encoders import Encoder, Tokenizer

# Of a file that is checked this much is read, and more if its footer is longer.
_TAIL_BYTES = 1 << 15
_CHECKED_AT_ONCE = 16


def entries(
    encoder: Encoder | Tokenizer, caption_column: str, captions_digest: str, tokens_only: bool
) -> dict[str, str]:
    """Returns what decides embeddings or tokens, as the files have it in their metadata."""
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


@contextlib.contextmanager
def open_file(
    path: str, metadata: Mapping[str, str], column: str, width: int
) -> Iterator[Callable[[np.ndarray, np.ndarray], None]]:
    """Writes a file; yields a function that adds a row group.

    It takes keys int64 `(n,)` and values `(n, width)`, int32 of `schema.TOKENS`, else float16.
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


def part_entry(number: int, count: int) -> dict[str, str]:
    """The entry that tells a part from the others."""
    return {schema.META_PART: f'{number} of {count}'}


def check(parts: Mapping[int, SourceFile], metadata: Mapping[str, str], count: int) -> None:
    """Makes sure that finished parts are those that this run would make.

    Raises:
        ValueError: one was made by another encoder or of other captions, or is damaged; names it.
        OSError: one cannot be read.
    """

    def check_one(number: int) -> None:
        file = parts[number]
        sidecar.check_same(
            {**metadata, **part_entry(number, count)},
            _read_metadata(file),
            file.path,
            'is what this command makes',
        )

    with concurrent.futures.ThreadPoolExecutor(_CHECKED_AT_ONCE) as threads:
        list(threads.map(check_one, parts))


def _read_metadata(file: SourceFile) -> dict[str, str]:
    """Reads the metadata of the schema from the end of a file."""
    with keyed_parquet.naming_damage(file.path):
        tail = _read_tail(file, _TAIL_BYTES)
        footer = int.from_bytes(tail[-8:-4], 'little') + 8
        if footer > len(tail):
            tail = _read_tail(file, footer)
        found = pq.read_schema(pa.BufferReader(tail)).metadata or {}
    return {key.decode(): value.decode() for key, value in found.items()}


def _read_tail(file: SourceFile, length: int) -> bytes:
    length = min(length, file.size)
    return remote.read_range(file, file.size - length, length)
