"""Text vectors of a sidecar file as a matrix on disk that is looked up by key.

    header, store = vectors.prepare_store(      # of a file made by coyo11m_tfds.embed_captions
        lambda: contextlib.nullcontext(path), name=path, version='1', cache_dir=folder
    )
    rows = store.find(keys)                     # -1: the key has no vector
    store.read(rows)                            # float16 (n, header.dim)

    vectors.VectorStore(store.folder, header.dim)       # how another process opens it

A sidecar is one Parquet file with the columns `key` and `text_embedding` (a fixed-size list of
float16) and, in its schema's metadata, what `SidecarHeader` has.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
from typing import Any

import numpy as np
import pyarrow as pa
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.source import keyed_parquet, keyed_store
from coyo11m_tfds.source.caption_store import LocalFile
from coyo11m_tfds.storage.destination import naming

# Of the schema's metadata.
_ENTRIES = (
    schema.META_TEXT_ENCODER,
    schema.META_TEXT_REVISION,
    schema.META_TEXT_MAX_TOKENS,
    schema.META_TEXT_DIM,
    schema.META_CAPTION_COLUMN,
    schema.META_CAPTIONS_DIGEST,
)

# Of a number while it is read: the number itself and its levels in the Parquet file, twice.
_NUMBER_BYTES = 12

_PLACES, _MATRIX = 'places', 'matrix'


@dataclasses.dataclass(frozen=True)
class SidecarHeader:
    """What a sidecar says about itself.

    Attributes:
        dim: numbers a vector.
        encoder: name of what made them.
        revision: of the encoder.
        max_tokens: captions were cut to so many tokens; 0 for no limit.
        caption_column: that they were made from.
        captions_digest: `CaptionStore.digest` of the captions that they were made from.
    """

    dim: int
    encoder: str
    revision: str
    max_tokens: int
    caption_column: str
    captions_digest: str


def read_header(path: str, name: str = '') -> SidecarHeader:
    """Reads and checks what a sidecar says about itself; `name` stands for it in messages.

    Raises:
        ValueError: a column or an entry of the metadata is missing or of an unexpected type.
    """
    name = name or path
    with (
        keyed_parquet.naming_damage(name),
        keyed_parquet.open_with_column(path, schema.TEXT_EMBEDDING, name) as file,
    ):
        arrow_schema = file.schema_arrow
        metadata = {k.decode(): v.decode() for k, v in (arrow_schema.metadata or {}).items()}
    kind = arrow_schema.field(schema.TEXT_EMBEDDING).type
    is_vector = pa.types.is_fixed_size_list(kind) and pa.types.is_float16(kind.value_type)
    if not is_vector or not 1 <= kind.list_size <= schema.MAX_TEXT_DIM:
        raise ValueError(
            f"{name}: column '{schema.TEXT_EMBEDDING}' is {kind}, expected a fixed-size list of "
            f'float16, at most {schema.MAX_TEXT_DIM:,}, as coyo11m_tfds.embed_captions writes it.'
        )
    for entry in _ENTRIES:
        if not metadata.get(entry):
            raise ValueError(
                f"{name}: its schema's metadata lacks '{entry}'; make the file again with "
                'coyo11m_tfds.embed_captions.'
            )
    max_tokens = metadata[schema.META_TEXT_MAX_TOKENS]
    if not max_tokens.isdecimal():
        raise ValueError(
            f'{name}: its metadata has {schema.META_TEXT_MAX_TOKENS} {max_tokens!r}, expected a '
            'number. Make it again.'
        )
    if metadata[schema.META_TEXT_DIM] != str(kind.list_size):
        raise ValueError(
            f'{name}: its vectors have {kind.list_size} numbers, but its metadata says '
            f'{metadata[schema.META_TEXT_DIM]}. Make it again.'
        )
    return SidecarHeader(
        dim=kind.list_size,
        encoder=metadata[schema.META_TEXT_ENCODER],
        revision=metadata[schema.META_TEXT_REVISION],
        max_tokens=int(max_tokens),
        caption_column=metadata[schema.META_CAPTION_COLUMN],
        captions_digest=metadata[schema.META_CAPTIONS_DIGEST],
    )


class VectorStore(keyed_store.KeyedStore):
    """A store that `prepare_store` made; see `KeyedStore` for its attributes."""

    def __init__(self, folder: str | os.PathLike[str], dim: int):
        """Opens a store of vectors of `dim` numbers.

        Raises:
            keyed_store.UnusableStoreError: see `KeyedStore`.
        """
        super().__init__(folder)
        self._dim = dim
        self._places = self.map_int64(_PLACES)
        self._matrix = self.open_file(_MATRIX)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors, float16 `(n, dim)`; `rows` must not be -1."""
        vectors = np.empty((len(rows), self._dim), np.float16)
        # 1.4 us for each of 640 numbers. To touch it in mapped memory the first time takes 3.4 us,
        # and what is mapped with it, 64 KB, counts as the process's own memory from then on.
        for vector, offset in zip(
            vectors, (self._places[rows] * vectors.strides[0]).tolist(), strict=True
        ):
            os.preadv(self._matrix, [vector], offset)
        return vectors


def prepare_store(
    local_file: LocalFile, *, name: str, version: str, cache_dir: str | os.PathLike[str]
) -> tuple[SidecarHeader, VectorStore]:
    """Opens the store of a sidecar that is in `cache_dir`, or builds it there.

    Args:
        local_file: gives the path of the sidecar; called only if that has to be read.
        name: path or URL of the sidecar, for messages and to know its older stores.
        version: of the sidecar; another one has the store built again.
        cache_dir: local folder; made where there is none. See `keyed_store.prepare`.

    Raises:
        ValueError: see `read_header` and `keyed_parquet`; a key comes twice; or a vector is null or
            not finite.
        OSError: the store cannot be written.
    """

    def build(folder: str) -> dict[str, Any]:
        with local_file() as path:
            logging.info('Building a store of the vectors of %s.', name)
            return build_store(path, folder, name)

    made_from = keyed_store.MadeFrom('vectors', name, schema.TEXT_EMBEDDING, version)
    # Held open until the store has been opened as what it is, so that nobody removes it.
    prepared = keyed_store.prepare(cache_dir, made_from, build)
    prepared.check_unique(name)
    header = SidecarHeader(**prepared.facts['header'])
    return header, VectorStore(prepared.folder, header.dim)


def build_store(path: str, folder: str, name: str) -> dict[str, Any]:
    """Writes the files of a store into an existing folder; `prepare_store` is what calls this.

    Returns:
        What `KeyedStore.facts` shall be, with the sidecar's header. Its digest depends on keys and
        vectors in the order of the rows.

    Raises:
        As `prepare_store`, but for keys that come twice.
    """
    header = read_header(path, name)
    all_keys = []
    matrix_digest = hashlib.sha256()
    matrix_path = os.path.join(folder, _MATRIX)
    with (
        keyed_parquet.naming_damage(name),
        naming(matrix_path),
        open(matrix_path, 'wb') as matrix,
        concurrent.futures.ThreadPoolExecutor(1) as other_thread,
    ):
        for keys, values in keyed_parquet.batches(
            path, schema.TEXT_EMBEDDING, name, row_bytes=_NUMBER_BYTES * header.dim
        ):
            vectors = _to_numpy(values, header.dim, keys, name)
            # Either takes longer than to read the file.
            hashed = other_thread.submit(matrix_digest.update, vectors)
            matrix.write(vectors)
            hashed.result()
            all_keys.append(keys)
    keys = np.concatenate(all_keys)
    digest = hashlib.sha256(matrix_digest.digest())
    digest.update(keys)
    places, facts = keyed_store.write_keys(folder, keys)
    keyed_store.write(folder, _PLACES, places)
    return facts | {'digest': digest.hexdigest(), 'header': dataclasses.asdict(header)}


def _to_numpy(values: pa.Array, dim: int, keys: np.ndarray, name: str) -> np.ndarray:
    if values.null_count:
        raise ValueError(f"{name}: column '{schema.TEXT_EMBEDDING}' has nulls.")
    vectors = values.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
    bad = ~np.isfinite(vectors).all(axis=1)
    if bad.any():
        raise ValueError(
            f'{name}: the vector of key {keys[bad.argmax()]} is not finite. Embed it again.'
        )
    return vectors
