"""One file of latents of any format, open for reading by row.

    file.keys, file.dtype, file.shape       # int64 (N,), 'float16', (3, 4, 32, 32)
    raw, values = file.latents([0, 5, 7])   # uint8 (3, 24576), float32 (3, 3, 4, 32, 32)
    file.places                             # where rows lie, for those who read them in place

A format has a subclass, which finds all this without reading latents. Only the package `source`
imports torch, and only for the conversion of numbers here and for `.pt` files.
"""

import functools
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from coyo11m_tfds import schema


class Places(NamedTuple):
    """Where the rows of a file lie: piece p of row i at `starts[p] + numbers[i] * stride`.

    Attributes:
        starts: Offsets of the pieces of a row in bytes; a row has several where its crops lie
            apart.
        stride: Bytes from one number to the next.
        numbers: Number of each row, int64 `(N,)`; None where row i has number i.
    """

    starts: tuple[int, ...]
    stride: int
    numbers: np.ndarray | None = None


class LatentFile:
    """A validated local file; what a format has to find out of it.

    Attributes:
        path: The file as errors call it.
        keys: Keys, int64 `(N,)`.
        dtype: Dtype of the latents, one of `schema.LATENT_DTYPES`.
        shape: Shape of a row, `(crops, C, H, W)`.
        digest: Digest of the file's outline, see `dataset.outline`.
        places: Where its rows lie; None where they do not lie in one order of numbers.
        embedding_dim: Width of its text embeddings, None where it has none.
    """

    path: str
    keys: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    digest: str
    places: Places | None
    embedding_dim: int | None = None

    def __init__(self, path: str | os.PathLike[str], name: str = ''):
        """Takes the path of a local file, and what errors call it."""
        self.path, self._local_path = name or os.fspath(path), os.fspath(path)
        self._raw: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with all crops."""
        return schema.latents_nbytes(self.dtype, self.shape)

    def latents(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads some rows.

        Returns:
            The stored bytes, uint8 `(len(rows), bytes of a row)`, and the same numbers as float32
            `(len(rows), *shape)`; both are overwritten by the next call.

        Raises:
            ValueError: The file has become shorter.
            OSError: It cannot be read.
        """
        count = len(rows)
        # The system would clear and map new memory page by page, which takes longer than all else
        # that is done to a record.
        if self._raw is None or self._values is None or count > len(self._raw):
            self._raw = torch.empty((count, *self.shape), dtype=getattr(torch, self.dtype))
            self._values = torch.empty((count, *self.shape), dtype=torch.float32)
        raw, values = self._raw[:count], self._values[:count]
        self._read(np.asarray(rows, np.int64), raw)
        values.copy_(raw)  # torch converts 16-bit floats about 4 times as fast as numpy does
        return _bytes_of(raw), values.numpy()

    def row_numbers(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of rows, int64 `(n,)`, as of `places`."""
        assert self.places is not None
        return rows if self.places.numbers is None else self.places.numbers[rows]

    def embeddings(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads the text embeddings of some rows as float32 `(len(rows), embedding_dim)`.

        Raises:
            ValueError: The file has none.
        """
        raise ValueError(f"{self.path}: lacks '{schema.PT_EMBEDDINGS}'.")

    def _read(self, rows: np.ndarray, raw: torch.Tensor) -> None:
        """Reads rows into a tensor `(len(rows), *shape)`."""
        assert self.places is not None
        starts, stride, _ = self.places
        out = _bytes_of(raw)
        nbytes = out.shape[1] // len(starts)
        for piece, start in enumerate(starts):
            of_piece = slice(piece * nbytes, (piece + 1) * nbytes)
            at = start + self.row_numbers(rows) * stride
            begins = np.flatnonzero(np.diff(at, prepend=-1 - nbytes) != nbytes).tolist()
            for begin, end in itertools.pairwise([*begins, len(rows)]):
                if len(starts) == 1:
                    self._read_into(memoryview(out[begin:end]).cast('B'), int(at[begin]))
                    continue
                some = np.empty((end - begin, nbytes), np.uint8)
                self._read_into(memoryview(some).cast('B'), int(at[begin]))
                out[begin:end, of_piece] = some

    def _read_into(self, part: memoryview, at: int) -> None:
        # Not from the mapped file: the system may map 2 MB for each row that is touched, so that
        # the few records of a validation shard make a process as large as the file; and where the
        # disk cannot be read, touching ends the process and reading is an error.
        while part:
            count = os.preadv(self._file, [part], at)
            if not count:
                raise ValueError(
                    f'{self.path}: ends before its {schema.PT_LATENTS} do; it has become shorter '
                    'since it was opened. Copy or download it again.'
                )
            part, at = part[count:], at + count

    @functools.cached_property
    def _file(self) -> int:
        file = os.open(self._local_path, os.O_RDONLY)
        weakref.finalize(self, os.close, file)
        return file


def _bytes_of(raw: torch.Tensor) -> np.ndarray:
    return raw.view(torch.uint8).flatten(1).numpy()


def use_one_thread() -> None:
    """Keeps torch from starting threads, because there is one process for each core."""
    torch.set_num_threads(1)
