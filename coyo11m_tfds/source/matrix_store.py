"""Rows of numbers as a matrix on disk that is looked up by key: what stores of two kinds share.

`embedding_store` and `row_store` fill it from Parquet files, each from its own kind.
"""

import concurrent.futures
import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds.source import keyed_store
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.file_state import naming
from coyo11m_tfds.storage.source_files import SourceFile

_PLACES, _MATRIX = 'places', 'matrix'  # files of a store

# Gives the path of a file, which may have to be downloaded for it.
Hold = Callable[[SourceFile], contextlib.AbstractContextManager[str]]

# Keys, int64 `(n,)`, and a row of numbers for each, `(n, width)`, some at a time.
Rows = Iterator[tuple[np.ndarray, np.ndarray]]


def own_path(file: SourceFile) -> contextlib.AbstractContextManager[str]:
    """The `Hold` of local files."""
    return contextlib.nullcontext(file.path)


class MatrixStore(keyed_store.KeyedStore):
    """A store with a matrix; see `KeyedStore` for more attributes.

    Attributes:
        dtype: of the numbers.
        shape: of a row: `(n,)` for n numbers, `()` for a single one.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    def open_matrix(self, dtype: str, shape: Sequence[int]) -> None:
        """Opens the matrix, whose rows have this dtype and shape; called once, by subclasses."""
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self._places = self.map_int64(_PLACES)
        self._matrix = self.open_file(_MATRIX)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows, `(n, *shape)` of `dtype`; `rows` must not be -1."""
        values = np.empty((len(rows), math.prod(self.shape)), self.dtype)
        # 1.4 us for each of 640 numbers. Touching it in mapped memory the first time takes 3.4 us,
        # and what is mapped with it, 64 KB, counts as the process's own memory from then on.
        offsets = (self._places[rows] * values.strides[0]).tolist()
        for value, offset in zip(values, offsets, strict=True):
            os.preadv(self._matrix, [value], offset)
        return values.reshape(len(rows), *self.shape)


def prepare(
    kind: str,
    files: Sequence[SourceFile],
    column: str,
    cache_dir: str | os.PathLike[str],
    read: Callable[[dict[str, Any]], Rows],
) -> keyed_store.KeyedStore:
    """Opens the store of some files that is in `cache_dir`, or builds it there.

    Args:
        kind: of the store, see `keyed_store.MadeFrom`.
        files: whose rows it has, in their order; other versions have the store built again.
        column: of the files.
        cache_dir: local folder; made where there is none. See `keyed_store.prepare`.
        read: reads the rows of all files, and puts into the dict what `facts` shall have besides.

    Raises:
        ValueError: two rows have the same key.
        OSError: the store cannot be written.
        Exception: whatever `read` raises.
    """
    name, version = files[0].path, files[0].version
    if len(files) > 1:
        name = os.path.dirname(name)
        version = json_digest.sha256([[file.name, file.version] for file in files])

    def build(folder: str) -> dict[str, Any]:
        logging.info("Building a store of column '%s' of %s.", column, name)
        facts: dict[str, Any] = {}
        return _write(folder, read(facts)) | facts

    prepared = keyed_store.prepare(
        cache_dir, keyed_store.MadeFrom(kind, name, column, version), build
    )
    if prepared.num_duplicates:
        raise ValueError(
            f'{name}: {prepared.num_duplicates} rows repeat the key of another, e.g. key '
            f'{prepared.duplicate_keys[0]}; expected one row a key. Remove the others.'
        )
    return prepared


def _write(folder: str, rows: Rows) -> dict[str, Any]:
    """Writes the files of a store into an existing folder.

    Returns:
        Facts; the digest depends on keys and numbers in the order of the rows.
    """
    all_keys, matrix_digest = [], hashlib.sha256()
    path = os.path.join(folder, _MATRIX)
    with (
        naming(path),
        open(path, 'wb') as matrix,
        concurrent.futures.ThreadPoolExecutor(1) as other_thread,
    ):
        for keys_of_some, numbers in rows:
            # Either takes longer than to read the file.
            hashed = other_thread.submit(matrix_digest.update, numbers)
            matrix.write(numbers)
            hashed.result()
            all_keys.append(keys_of_some)
    keys = np.concatenate(all_keys)
    digest = hashlib.sha256(matrix_digest.digest())
    digest.update(keys)
    places, facts = keyed_store.write_keys(folder, keys)
    keyed_store.write(folder, _PLACES, places)
    return facts | {'digest': digest.hexdigest()}
