"""Text vectors of a sidecar file as a memory-mapped matrix that is looked up by key.

    header = vectors.build_store('hash.parquet', folder)   # made by coyo11m_tfds.embed_captions
    store = vectors.VectorStore(folder, header.dim)
    rows = store.find(keys)                                # -1: the key has no vector
    store.read(rows)                                       # float16 (n, dim)

A sidecar is one Parquet file with the columns `key` and `text_embedding` (a fixed-size list of
float16) and, in its schema's metadata, the encoder's name, the width, and the caption column.
"""

import dataclasses
import hashlib
import os
import pathlib

import numpy as np
import pyarrow as pa

from coyo11m_tfds import keyed_parquet, schema

_KEYS, _ORDER, _MATRIX = 'keys.npy', 'order.npy', 'matrix.bin'


@dataclasses.dataclass(frozen=True)
class SidecarHeader:
    """What a sidecar says about itself: `dim` numbers a vector, made by `encoder`."""

    dim: int
    encoder: str
    caption_column: str


def read_header(path: str) -> SidecarHeader:
    """Reads and checks what a sidecar says about itself.

    Raises:
        ValueError: a column or an entry of the metadata is missing or of an unexpected type.
    """
    with keyed_parquet.open_with_column(path, schema.TEXT_EMBEDDING) as file:
        arrow_schema = file.schema_arrow
    kind = arrow_schema.field(schema.TEXT_EMBEDDING).type
    is_vector = pa.types.is_fixed_size_list(kind) and pa.types.is_float16(kind.value_type)
    if not is_vector or kind.list_size < 1:
        raise ValueError(
            f"{path}: column '{schema.TEXT_EMBEDDING}' is {kind}, expected a fixed-size list of "
            'float16 as coyo11m_tfds.embed_captions writes it.'
        )
    metadata = {k.decode(): v.decode() for k, v in (arrow_schema.metadata or {}).items()}
    for name in (schema.META_TEXT_ENCODER, schema.META_TEXT_DIM, schema.META_CAPTION_COLUMN):
        if not metadata.get(name):
            raise ValueError(
                f"{path}: its schema's metadata lacks '{name}'; make the file with "
                'coyo11m_tfds.embed_captions.'
            )
    if metadata[schema.META_TEXT_DIM] != str(kind.list_size):
        raise ValueError(
            f'{path}: its vectors have {kind.list_size} numbers, but its metadata says '
            f'{metadata[schema.META_TEXT_DIM]}. Make it again.'
        )
    return SidecarHeader(
        dim=kind.list_size,
        encoder=metadata[schema.META_TEXT_ENCODER],
        caption_column=metadata[schema.META_CAPTION_COLUMN],
    )


def build_store(path: str, folder: str | os.PathLike[str]) -> str:
    """Writes the store of a sidecar into an existing folder.

    Returns:
        A hex digest of the keys and vectors.

    Raises:
        ValueError: see `read_header` and `keyed_parquet`; or a vector is null or not finite.
    """
    folder = pathlib.Path(folder)
    dim = read_header(path).dim
    keys = []
    digest = hashlib.sha256()
    with open(folder / _MATRIX, 'wb') as matrix:
        for batch_keys, values in keyed_parquet.batches(path, schema.TEXT_EMBEDDING):
            vectors = _to_numpy(values, dim, batch_keys, path)
            matrix.write(vectors)
            keys.append(batch_keys)
            digest.update(batch_keys)
            digest.update(vectors)
    all_keys = np.concatenate(keys)
    order = keyed_parquet.order_by_key(all_keys, path)
    np.save(folder / _KEYS, all_keys[order])
    np.save(folder / _ORDER, order)
    return digest.hexdigest()


class VectorStore:
    """The store in a folder that `build_store` filled with vectors of `dim` numbers."""

    def __init__(self, folder: str | os.PathLike[str], dim: int):
        folder = pathlib.Path(folder)
        self._keys = np.lib.format.open_memmap(folder / _KEYS, mode='r')
        self._order = np.lib.format.open_memmap(folder / _ORDER, mode='r')
        self._matrix = np.memmap(folder / _MATRIX, np.float16, mode='r').reshape(-1, dim)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the row of each key, int64 `(n,)`, -1 where the sidecar has none."""
        return keyed_parquet.find(self._keys, self._order, keys)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors, float16 `(n, dim)`; `rows` must not be -1."""
        return self._matrix[rows]


def _to_numpy(values: pa.Array, dim: int, keys: np.ndarray, path: str) -> np.ndarray:
    if values.null_count:
        raise ValueError(f"{path}: column '{schema.TEXT_EMBEDDING}' has nulls.")
    vectors = values.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
    bad = ~np.isfinite(vectors).all(axis=1)
    if bad.any():
        raise ValueError(
            f'{path}: the vector of key {keys[bad.argmax()]} is not finite. Embed it again.'
        )
    return vectors
