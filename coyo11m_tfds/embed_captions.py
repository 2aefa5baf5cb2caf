"""Captions to text vectors: a sidecar Parquet file that the data set's builder joins by key.

    python -m coyo11m_tfds.embed_captions --source SOURCE --encoder hash --out SIDE.parquet
    tfds build coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT \\
        --config='{"name": "hash", "text_vectors": "SIDE.parquet"}'

    from coyo11m_tfds import embed_captions
    report = embed_captions.embed('SOURCE', 'hf:google/gemma-3-270m', 'SIDE.parquet')

The sidecar has the columns `key` (int64, ascending, each once) and `text_embedding`
(FixedSizeList<float16>[D]); its schema metadata says by what and from which captions they were made
(see `embedding_store.SidecarHeader`), so that the builder refuses vectors of others. With
`--tokens_only` it has `tokens` (FixedSizeList<int32>[T], padded with -1) in the place of vectors.
Captions that are null, blank or longer than `schema.MAX_CAPTION_BYTES` get no row. The file appears
when it is complete, or not at all. SOURCE may be local, on gs:// or on hf://.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.process import ending
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import caption_store, keyed_parquet
from coyo11m_tfds.storage import held_folder, source_files
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.text import text_encoders, tokenizers

# Captions that are encoded at a time: enough for an encoder to sort by length, few enough for the
# arrays of the hash encoder to stay in a cache. Vectors do not depend on it.
DEFAULT_BATCH_SIZE = 1024
ROW_GROUP_SIZE = 65536  # 84 MB of vectors of 640 float16 numbers


@dataclasses.dataclass(frozen=True)
class Report:
    """What `embed` did.

    Attributes:
        num_captions: vectors written.
        num_skipped: rows without a caption (null, blank or too long).
        num_repeated: rows left out because an earlier row has their key.
        num_truncated: captions cut to the encoder's greatest length.
        encoder: its name.
        dim: numbers a vector.
        seconds: time for encoding and writing, without loading the model and sorting captions.
    """

    num_captions: int
    num_skipped: int
    num_repeated: int
    num_truncated: int
    encoder: str
    dim: int
    seconds: float

    def __str__(self) -> str:
        return (
            f'{self.num_captions} captions encoded by {self.encoder}, {self.dim} numbers each '
            f'({self.num_captions / self.seconds:.0f} captions/s); '
            f'{self.num_skipped} null, blank or too long ones and {self.num_repeated} of repeated '
            f'keys skipped, {self.num_truncated} truncated'
        )


def embed(
    source_dir: str | os.PathLike[str],
    encoder: str | text_encoders.Encoder | tokenizers.Tokenizer,
    out: str | os.PathLike[str],
    caption_column: str = schema.DEFAULT_CAPTION_COLUMN,
    batch_size: int = DEFAULT_BATCH_SIZE,
    drop_repeats: bool = False,
) -> Report:
    """Encodes every caption of a source and writes the sidecar, replacing one that is there.

    Captions are first brought into the order of keys on disk, in a hidden scratch folder beside
    `out` that takes as much room as their text, so that memory stays flat but for 100 bytes a row.
    The `hash` encoder gives the same file byte for byte whatever the batch size; others give the
    same up to rounding.

    Args:
        source_dir: folder with `schema.CAPTIONS_FILE`: local, `gs://` or `hf://`.
        encoder: a specification for `text_encoders.make_encoder`, an encoder or a tokenizer.
        out: local path of the sidecar; its folder is made where there is none.
        caption_column: the Parquet column to encode.
        batch_size: captions that are given to the encoder at a time.
        drop_repeats: whether, of rows that repeat a key, the first wins; else they are an error.

    Raises:
        ValueError: the source has no captions file or that lacks a column, a key is null or comes
            twice, there is no caption at all, the encoder cannot be had, or a number that it makes
            is not finite in float16.
        PermissionError: credentials for the source are missing or refused.
        OSError: the source cannot be reached, or the disk is full.
    """
    file = find_captions(source_dir, caption_column)
    if source_files.is_remote(out):
        raise ValueError(f'{out} is remote; expected a local path, which can be copied there.')
    out = Path(out)
    if out.is_dir():
        raise ValueError(f'{out} is a folder; expected the path of a file to write.')
    if isinstance(encoder, str):
        encoder = text_encoders.make_encoder(encoder)

    out.parent.mkdir(parents=True, exist_ok=True)
    with held_folder.make(out.parent, f'.{out.name}.') as scratch:
        store = caption_store.prepare_store(
            lambda: Scratch(scratch, file.size).hold_showing(file),
            name=file.path,
            version=file.version,
            column=caption_column,
            cache_dir=scratch,
            drop_repeats=drop_repeats,
        )
        keys, rows, num_skipped = find_captioned(file.path, store)
        start = time.perf_counter()
        groups = encode_groups(rows, store, encoder, batch_size)
        unfinished = Path(scratch) / 'sidecar.parquet'
        write_sidecar(unfinished, keys, groups, encoder, caption_column, store.digest)
        seconds = time.perf_counter() - start
        os.replace(unfinished, out)
    return Report(
        num_captions=len(keys),
        num_skipped=num_skipped,
        num_repeated=store.num_repeated,
        num_truncated=encoder.truncated,
        encoder=encoder.name,
        dim=_numbers(encoder)[1],
        seconds=seconds,
    )


def find_captions(
    source_dir: str | os.PathLike[str], caption_column: str
) -> source_files.SourceFile:
    """Finds the captions file. If it is local, its columns are looked at already.

    Raises:
        ValueError: the source has no such file, or the file lacks a column.
        PermissionError: credentials for the source are missing or refused.
        OSError: the source cannot be reached.
    """
    file = source_files.describe(f'{os.fspath(source_dir).rstrip("/")}/{schema.CAPTIONS_FILE}')
    if not file.is_remote:
        keyed_parquet.open_with_column(file.path, caption_column).close()
    return file


def find_captioned(
    path: str, store: caption_store.CaptionStore
) -> tuple[np.ndarray, np.ndarray, int]:
    """Finds the rows of the captions file that have a caption.

    Returns:
        `(keys, rows, num_skipped)`: keys int64 `(n,)`, ascending; the row of each, int64 `(n,)`;
        and how many rows have a caption that is null, blank or too long.

    Raises:
        ValueError: no row has a caption.
    """
    keys = store.keys
    rows = store.find(keys)
    captioned = store.lengths(rows) > 0
    if not captioned.any():
        raise ValueError(
            f'{path}: all {len(keys)} captions are null, blank or too long; nothing to encode.'
        )
    return keys[captioned], rows[captioned], int(np.count_nonzero(~captioned))


def encode_groups(
    rows: np.ndarray,
    store: caption_store.CaptionStore,
    encoder: text_encoders.Encoder,
    batch_size: int,
) -> Iterator[np.ndarray]:
    """Yields the vectors of `rows`, float16 `(k, dim)`, of one row group of the sidecar at a time.

    Raises:
        ValueError: a number is not finite in float16.
    """
    with Progress('Embedding', len(rows), 'captions') as progress:
        for start in range(0, len(rows), ROW_GROUP_SIZE):
            group = rows[start : start + ROW_GROUP_SIZE]
            name, dim = _numbers(encoder)
            vectors = np.empty((len(group), dim), schema.TEXT_DTYPES[name])
            for first in range(0, len(group), batch_size):
                batch = slice(first, first + batch_size)
                texts = [text.decode() for text in store.texts(group[batch])]
                if name == schema.TOKENS:
                    vectors[batch] = encoder.tokenize(texts)
                    progress.add(len(texts))
                else:
                    vectors[batch] = encode_finite(texts, encoder, progress.add)
            yield vectors


def _numbers(encoder: text_encoders.Encoder | tokenizers.Tokenizer) -> tuple[str, int]:
    """The feature that is made, and how many numbers of it a caption has."""
    if hasattr(encoder, 'tokenize'):
        return schema.TOKENS, encoder.max_tokens
    return schema.TEXT_EMBEDDING, encoder.dim


def encode_finite(
    texts: Sequence[str], encoder: text_encoders.Encoder, on_captions: Callable[[int], None]
) -> np.ndarray:
    """Returns float16 `(len(texts), dim)`; raises ValueError where a number is not finite in it."""
    with np.errstate(over='ignore'):
        vectors = encoder.encode(texts, on_captions).astype(np.float16)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ValueError(
            f'{encoder.name} makes numbers that float16 cannot hold of the caption '
            f'{texts[bad[0]][:100]!r}; use another encoder or leave the caption out.'
        )
    return vectors


def write_sidecar(
    path: Path,
    keys: np.ndarray,
    groups: Iterable[np.ndarray],
    encoder: text_encoders.Encoder,
    caption_column: str,
    captions_digest: str,
) -> None:
    """Writes `keys` int64 `(n,)` and their vectors, float16 `(ROW_GROUP_SIZE, dim)` at a time."""
    name, dim = _numbers(encoder)
    if name == schema.TOKENS:
        size = {schema.META_TEXT_VOCABULARY: str(encoder.vocabulary)}
    else:
        size = {schema.META_TEXT_DIM: str(dim)}
    number = pa.from_numpy_dtype(schema.TEXT_DTYPES[name])
    columns = pa.schema(
        [
            pa.field(schema.PARQUET_KEY, pa.int64(), nullable=False),
            pa.field(name, pa.list_(number, dim), nullable=False),
        ],
        metadata={
            schema.META_TEXT_ENCODER: encoder.name,
            schema.META_TEXT_REVISION: encoder.revision,
            schema.META_TEXT_MAX_TOKENS: str(encoder.max_tokens),
            **size,
            schema.META_CAPTION_COLUMN: caption_column,
            schema.META_CAPTIONS_DIGEST: captions_digest,
        },
    )
    options = {
        'compression': 'zstd',
        'use_dictionary': False,  # of numbers that seldom repeat it only costs
        'write_page_checksum': True,
    }
    with naming(path), pq.ParquetWriter(path, columns, **options) as writer:
        for start, vectors in zip(range(0, len(keys), ROW_GROUP_SIZE), groups, strict=True):
            group = pa.array(keys[start : start + ROW_GROUP_SIZE])
            values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), dim)
            table = pa.Table.from_arrays([group, values], schema=columns)
            writer.write_table(table, row_group_size=ROW_GROUP_SIZE)


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m coyo11m_tfds.embed_captions',
        description='Encodes captions as text vectors, in a sidecar that the builder joins by key.',
    )
    add = parser.add_argument
    column, length = schema.DEFAULT_CAPTION_COLUMN, text_encoders.DEFAULT_MAX_TOKENS
    add('--source', required=True, help=f'folder with {schema.CAPTIONS_FILE}, also gs:// or hf://')
    add('--out', required=True, help='Parquet file to write')
    add(
        '--encoder',
        default='hash',
        help='hash (the default), hf:NAME or jax:NAME; NAME is of the hub or a folder',
    )
    add('--caption_column', default=column, help='column to encode (%(default)s)')
    add('--drop_repeats', action='store_true', help='first row of a key wins; else an error')
    add(
        '--max_tokens',
        type=int,
        default=length,
        help='cut longer captions (%(default)s); not for hash',
    )
    add('--tokens_only', action='store_true', help='write token ids; with --encoder words')
    add('--batch_tokens', type=int, help='tokens in a forward pass; less takes less memory')
    return parser.parse_args()


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    flags = parse_flags()
    logging.set_verbosity(logging.INFO)
    with ending.in_one_line(f'{flags.out} is as it was, the same command starts anew'):
        find_captions(flags.source, flags.caption_column)  # before a model is loaded in vain
        if flags.tokens_only:
            encoder = tokenizers.make_tokenizer(flags.encoder, flags.max_tokens)
        else:
            encoder = text_encoders.make_encoder(
                flags.encoder, flags.max_tokens, flags.batch_tokens
            )
        report = embed(
            flags.source,
            encoder,
            flags.out,
            flags.caption_column,
            drop_repeats=flags.drop_repeats,
        )
        print(f'{report}: {flags.out}')


if __name__ == '__main__':
    main()
