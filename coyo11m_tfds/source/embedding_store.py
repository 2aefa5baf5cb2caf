"""Embeddings of a sidecar as a matrix on disk that is looked up by key.

    files = part_files.find(place)      # made by coyo11m_tfds.embed_captions
    store = embedding_store.prepare_store(files, cache_dir=folder)
    rows = store.find(keys)                     # -1: the key has no embedding
    store.read(rows)                            # float16 (n, store.header.dim)

    embedding_store.EmbeddingStore(store.folder)     # how another process opens it

A sidecar is a Parquet file with the columns `key` and `text_embedding` (a fixed-size list of
float16) and, in its schema's metadata, what `SidecarHeader` has; or a folder of such files, whose
column is called `embedding` (see `part_files`).
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import keyed_parquet, matrix_store
from coyo11m_tfds.source.matrix_store import Hold, MatrixStore
from coyo11m_tfds.storage.source_files import SourceFile

# Of the schema's metadata.
_ENTRIES = (
    schema.META_TEXT_ENCODER,
    schema.META_TEXT_REVISION,
    schema.META_TEXT_MAX_TOKENS,
    schema.META_CAPTION_COLUMN,
    schema.META_CAPTIONS_DIGEST,
)

# Of a number while it is read: the number itself and its levels in the Parquet file, twice.
_NUMBER_BYTES = 12


@dataclasses.dataclass(frozen=True)
class SidecarHeader:
    """The header of a sidecar.

    Attributes:
        dim: numbers an embedding, or tokens a caption with their padding.
        encoder: name of what made them.
        revision: of the encoder.
        max_tokens: captions were cut to so many tokens; 0 for no limit.
        caption_column: that they were made from.
        captions_digest: `CaptionStore.digest` of the captions that they were made from.
        vocabulary: ids of tokens are less than this; 0 for a sidecar of embeddings.
    """

    dim: int
    encoder: str
    revision: str
    max_tokens: int
    caption_column: str
    captions_digest: str
    vocabulary: int = 0

    @property
    def feature(self) -> str:
        """Of a batch that the values are: `tokens` or `text_embedding`."""
        return schema.TOKENS if self.vocabulary else schema.TEXT_EMBEDDING

    @property
    def dtype(self) -> str:
        """Of the numbers."""
        return schema.TEXT_DTYPES[self.feature]

    def to_json(self) -> dict[str, Any]:
        """The fields; `vocabulary` only of tokens, so that of embeddings they are as ever."""
        fields = dataclasses.asdict(self)
        if not self.vocabulary:
            del fields['vocabulary']
        return fields


def read_header(path: str, name: str = '') -> SidecarHeader:
    """Reads and checks what a file says about itself; `name` stands for it in messages.

    Raises:
        ValueError: a column or an entry of the metadata is missing or of an unexpected type.
    """
    return _read_header(path, name or path)[0]


def _read_header(path: str, name: str) -> tuple[SidecarHeader, dict[str, str]]:
    """`read_header`, and all entries that parts of one sidecar have in common."""
    column = _column(path, name)
    with (
        keyed_parquet.naming_damage(name),
        keyed_parquet.open_with_column(path, column, name) as file,
    ):
        arrow_schema = file.schema_arrow
        metadata = {k.decode(): v.decode() for k, v in (arrow_schema.metadata or {}).items()}
    metadata.pop(schema.META_PART, None)
    kind = arrow_schema.field(column).type
    are_tokens = column == schema.TOKENS
    number, most = (
        ('int32', schema.MAX_TOKENS) if are_tokens else ('halffloat', schema.MAX_TEXT_DIM)
    )
    is_vector = pa.types.is_fixed_size_list(kind) and str(kind.value_type) == number
    if not is_vector or not 1 <= kind.list_size <= most:
        raise ValueError(
            f"{name}: column '{column}' is {kind}, expected a fixed-size list of "
            f'{schema.TEXT_DTYPES[schema.TOKENS] if are_tokens else "float16"}, at most {most:,}, '
            'as coyo11m_tfds.embed_captions writes it.'
        )
    size = schema.META_TEXT_MAX_TOKENS if are_tokens else schema.META_TEXT_DIM
    for entry in (*_ENTRIES, schema.META_TEXT_VOCABULARY if are_tokens else size):
        if not metadata.get(entry):
            raise ValueError(
                f"{name}: its schema's metadata lacks '{entry}'; make the file again with "
                'coyo11m_tfds.embed_captions.'
            )
    for entry in {schema.META_TEXT_MAX_TOKENS, schema.META_TEXT_VOCABULARY} & metadata.keys():
        if not metadata[entry].isdecimal():
            raise ValueError(
                f'{name}: its metadata has {entry} {metadata[entry]!r}, expected a number. Make it '
                'again.'
            )
    if metadata[size] != str(kind.list_size):
        raise ValueError(
            f'{name}: its embeddings have {kind.list_size} numbers, but its metadata says '
            f'{metadata[size]}. Make it again.'
        )
    header = SidecarHeader(
        dim=kind.list_size,
        encoder=metadata[schema.META_TEXT_ENCODER],
        revision=metadata[schema.META_TEXT_REVISION],
        max_tokens=int(metadata[schema.META_TEXT_MAX_TOKENS]),
        caption_column=metadata[schema.META_CAPTION_COLUMN],
        captions_digest=metadata[schema.META_CAPTIONS_DIGEST],
        vocabulary=int(metadata[schema.META_TEXT_VOCABULARY]) if are_tokens else 0,
    )
    return header, metadata


def _column(path: str, name: str) -> str:
    """The name of the column of values; embeddings in parts have another than those in one file."""
    with keyed_parquet.naming_damage(name):
        names = pq.read_schema(path).names
    others = (name for name in (schema.TOKENS, schema.PART_EMBEDDING) if name in names)
    return next(others, schema.TEXT_EMBEDDING)


class EmbeddingStore(MatrixStore):
    """A store that `prepare_store` made, of embeddings or tokens; see `MatrixStore`.

    Attributes:
        header: of the sidecar.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Opens a store; raises `keyed_store.UnusableStoreError` as `KeyedStore` does."""
        super().__init__(folder)
        self.header = SidecarHeader(**self.facts['header'])
        self.open_matrix(self.header.dtype, (self.header.dim,))


def prepare_store(
    files: Sequence[SourceFile],
    *,
    cache_dir: str | os.PathLike[str],
    hold: Hold = matrix_store.own_path,
) -> EmbeddingStore:
    """Opens the store of a sidecar that is in `cache_dir`, or builds it there.

    Args:
        files: of the sidecar, see `part_files.find`; other versions have the store built again.
        cache_dir: local folder; made where there is none. See `keyed_store.prepare`.
        hold: gives the path of a file; called only if that has to be read.

    Raises:
        ValueError: see `read_header` and `keyed_parquet`; parts differ in what made them; a key is
            a duplicate; or an embedding is null or not finite.
        OSError: the store cannot be written.
    """

    def read(facts: dict[str, Any]) -> matrix_store.Rows:
        return _read_rows(files, hold, facts)

    # Held open until the store has been opened as what it is, so that no other process removes it.
    prepared = matrix_store.prepare('embeddings', files, schema.TEXT_EMBEDDING, cache_dir, read)
    return EmbeddingStore(prepared.folder)


def _read_rows(files: Sequence[SourceFile], hold: Hold, facts: dict[str, Any]) -> matrix_store.Rows:
    first: dict[str, str] = {}
    with Progress('Reading embeddings', len(files), 'files') as progress:
        for file in files:
            with hold(file) as path, keyed_parquet.naming_damage(file.path):
                header, entries = _read_header(path, file.path)
                first = first or entries
                check_same(first, entries, file.path, f'in {files[0].path}')
                facts['header'] = header.to_json()
                for keys, values in keyed_parquet.batches(
                    path,
                    _column(path, file.path),
                    file.path,
                    row_bytes=_NUMBER_BYTES * header.dim,
                    quiet=len(files) > 1,
                ):
                    yield keys, _to_numpy(values, header, keys, file.path)
            progress.add(1)


def check_same(expected: dict[str, str], found: dict[str, str], name: str, where: str) -> None:
    """Compares the metadata of a file with what it must be.

    Raises:
        ValueError: they differ; names the file, the entry and both values, `where` the first is.
    """
    for entry in sorted(expected.keys() | found.keys()):
        if expected.get(entry) != found.get(entry):
            raise ValueError(
                f'{name}: {entry} is {found.get(entry)!r}, but {expected.get(entry)!r} {where}. '
                'Remove the file, or choose another folder.'
            )


def _to_numpy(values: pa.Array, header: SidecarHeader, keys: np.ndarray, name: str) -> np.ndarray:
    if values.null_count:
        column = schema.TOKENS if header.vocabulary else schema.TEXT_EMBEDDING
        raise ValueError(f"{name}: column '{column}' has nulls.")
    embeddings = values.flatten().to_numpy(zero_copy_only=False).reshape(-1, header.dim)
    if header.vocabulary:
        bad = ((embeddings < -1) | (embeddings >= header.vocabulary)).any(axis=1)
        if bad.any():
            raise ValueError(
                f'{name}: key {keys[bad.argmax()]} has tokens {embeddings[bad.argmax()].tolist()}, '
                f'expected ids from 0 to {header.vocabulary - 1}, padded with -1. Make it again.'
            )
        return embeddings
    bad = ~np.isfinite(embeddings).all(axis=1)
    if bad.any():
        raise ValueError(
            f'{name}: the embedding of key {keys[bad.argmax()]} is not finite. Embed it again.'
        )
    return embeddings
