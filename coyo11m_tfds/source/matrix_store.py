"""Rows of numbers as a matrix on disk that is looked up by key: what stores of files share.

`embedding_store` and `row_store` fill it, each from Parquet files of its own kind.
"""

import contextlib
import math
import os
from collections.abc import Callable, Sequence

import numpy as np

from coyo11m_tfds.source import keyed_store
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.source_files import SourceFile

PLACES, MATRIX = 'places', 'matrix'  # files of a store

# Gives the path of a file, which may have to be downloaded for it.
Hold = Callable[[SourceFile], contextlib.AbstractContextManager[str]]


def own_path(file: SourceFile) -> contextlib.AbstractContextManager[str]:
    """The `Hold` of local files."""
    return contextlib.nullcontext(file.path)


def name_and_version(files: Sequence[SourceFile]) -> tuple[str, str]:
    """Those of a single file; of several the folder, and a digest of all names and versions."""
    if len(files) == 1:
        return files[0].path, files[0].version
    versions = [[file.name, file.version] for file in files]
    return os.path.dirname(files[0].path), json_digest.sha256(versions)


class MatrixStore(keyed_store.KeyedStore):
    """A store with a matrix; see `KeyedStore` for more attributes.

    Attributes:
        dtype: of the numbers.
        shape: of a row: `(n,)` for n numbers, `()` for a single one.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    def open_matrix(self, dtype: str, shape: Sequence[int]) -> None:
        """Opens the matrix, which has rows of this kind; called once, by subclasses."""
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self._places = self.map_int64(PLACES)
        self._matrix = self.open_file(MATRIX)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows, `(n, *shape)` of `dtype`; `rows` must not be -1."""
        values = np.empty((len(rows), math.prod(self.shape)), self.dtype)
        # 1.4 us for each of 640 numbers. To touch it in mapped memory the first time takes 3.4 us,
        # and what is mapped with it, 64 KB, counts as the process's own memory from then on.
        offsets = (self._places[rows] * values.strides[0]).tolist()
        for value, offset in zip(values, offsets, strict=True):
            os.preadv(self._matrix, [value], offset)
        return values.reshape(len(rows), *self.shape)
