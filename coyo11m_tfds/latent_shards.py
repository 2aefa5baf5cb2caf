"""One `.pt` file: its keys, and its latents by row. The only importer of torch.

    shard = latent_shards.LatentShard('latents-3crop/000000-000009.pt')
    shard.keys                              # int64 (N,)
    raw, values = shard.latents([0, 5, 7])  # uint8 (3, 24576), float32 (3, 3, 4, 32, 32)

Opening reads the directory and the keys, not the latents. Nothing is unpickled but tensors and
plain containers, so a hostile file cannot run code.
"""

import functools
import itertools
import os
import pickle
import re
import weakref
import zipfile
from collections.abc import Sequence

import numpy as np
import torch

from coyo11m_tfds import json_digest, schema

_ZIP_MAGIC = b'PK\x03\x04'
_EMBEDDING_DTYPES = ('float16', 'bfloat16', 'float32')


class RowsDisagreeError(ValueError):
    """The tensors of one file have unequal numbers of rows.

    Attributes:
        keys: those in the file, int64 `(n,)`.
        digest: as `LatentShard.digest`.
    """

    def __init__(self, message: str, keys: np.ndarray, digest: str):
        super().__init__(message)
        self.keys, self.digest = keys, digest


class LatentShard:
    """A validated `.pt` file, open for reading.

    Args:
        path: local file.
        name: what errors call it, if that is not its path.

    Attributes:
        path: as errors call it.
        keys: int64 `(N,)`.
        dtype: of the latents, one of `schema.LATENT_DTYPES`.
        embedding_dim: width of `embeddings`, None where the file has none.
        digest: hex digest over the names, sizes and checksums of everything in the file. It tells
            versions of a file apart without reading them: torch stores a CRC-32 of each tensor.

    Raises:
        ValueError: the file is truncated, is no `.pt`, would run code when unpickled, or its
            tensors are missing or of an unexpected dtype or shape.
        RowsDisagreeError: its tensors are well, but have unequal numbers of rows.
    """

    def __init__(self, path: str | os.PathLike[str], name: str = ''):
        self.path = name or os.fspath(path)
        self._local_path = os.fspath(path)
        self.digest = _zip_digest(os.fspath(path), self.path)
        tensors = _load(os.fspath(path), self.path)
        keys = _tensor(self.path, tensors, schema.PT_KEYS, ('int64',))
        if keys.ndim != 1:
            raise ValueError(
                f'{self.path}: {schema.PT_KEYS} has shape {tuple(keys.shape)}, expected (N,).'
            )
        self.keys: np.ndarray = keys.numpy().copy()
        self._latents = _tensor(self.path, tensors, schema.PT_LATENTS, schema.LATENT_DTYPES)
        self._check_shape(schema.PT_LATENTS, self._latents, schema.LATENTS_SHAPE)
        self.dtype = _dtype_name(self._latents)
        self._raw = torch.empty((0, *schema.LATENTS_SHAPE), dtype=self._latents.dtype)
        self._values = torch.empty((0, *schema.LATENTS_SHAPE), dtype=torch.float32)
        self._embeddings: torch.Tensor | None = None
        self.embedding_dim: int | None = None
        if schema.PT_EMBEDDINGS in tensors:
            self._embeddings = _tensor(self.path, tensors, schema.PT_EMBEDDINGS, _EMBEDDING_DTYPES)
            self._check_shape(schema.PT_EMBEDDINGS, self._embeddings, ('D',))
            self.embedding_dim = self._embeddings.shape[1]

    def latents(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads some rows, into memory that the next call uses again.

        New memory would have to be cleared and mapped by the system page by page, which takes
        longer than all else that is done to a record.

        Returns:
            The stored bytes, uint8 `(len(rows), bytes of LATENTS_SHAPE)`, and the same numbers as
            float32 `(len(rows), *LATENTS_SHAPE)`; both are overwritten by the next call.
        """
        count = len(rows)
        if count > len(self._raw):
            self._raw = self._raw.new_empty((count, *schema.LATENTS_SHAPE))
            self._values = self._values.new_empty((count, *schema.LATENTS_SHAPE))
        raw, values = self._raw[:count], self._values[:count]
        raw_bytes = raw.view(torch.uint8).flatten(1).numpy()
        rows = np.asarray(rows, np.int64)
        if self._latents_start is None:
            torch.index_select(self._latents, 0, torch.from_numpy(rows), out=raw)
        else:
            self._read_rows(rows, raw_bytes)
        values.copy_(raw)  # torch converts 16-bit floats about 4 times as fast as numpy does
        return raw_bytes, values.numpy()

    def _read_rows(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Reads rows of the latents into uint8 `(len(rows), bytes of a row)`.

        They are not taken from the mapped file: for each row that is touched the system may map
        2 MB, so that the few records of a validation shard make a process as large as the file; and
        where the disk cannot be read, touching ends the process and reading is an error.
        """
        begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist()
        for begin, end in itertools.pairwise([*begins, len(rows)]):
            part = memoryview(out[begin:end]).cast('B')
            at = self._latents_start + int(rows[begin]) * out.shape[1]
            while part:
                count = os.preadv(self._file, [part], at)
                if not count:
                    raise ValueError(
                        f'{self.path}: ends before its {schema.PT_LATENTS} do; it has become '
                        'shorter since it was opened. Copy or download it again.'
                    )
                part, at = part[count:], at + count

    @functools.cached_property
    def _file(self) -> int:
        file = os.open(self._local_path, os.O_RDONLY)
        weakref.finalize(self, os.close, file)
        return file

    @functools.cached_property
    def _latents_start(self) -> int | None:
        """Where the latents begin in the file; None if they do not lie there row after row."""
        if not len(self.keys) or not self._latents.is_contiguous():
            return None
        # Only a tensor without data knows where in the file its data would be. That torch tells it
        # is not promised, so it is compared with what torch itself reads.
        bare = torch.load(self._local_path, map_location='meta', weights_only=True)
        latents = bare[schema.PT_LATENTS]
        start = getattr(latents.untyped_storage(), '_checkpoint_offset', None)
        if start is None:
            return None
        start += latents.storage_offset() * latents.element_size()
        first_row = self._latents[0].view(torch.uint8).numpy().tobytes()
        return start if os.pread(self._file, len(first_row), start) == first_row else None

    def embeddings(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads the text vectors of some rows as float32 `(len(rows), embedding_dim)`.

        Raises:
            ValueError: the file has no `embeddings`.
        """
        if self._embeddings is None:
            raise ValueError(f"{self.path}: lacks '{schema.PT_EMBEDDINGS}'.")
        chosen = self._embeddings[torch.as_tensor(np.asarray(rows, np.int64))]
        return chosen.to(torch.float32).numpy()

    def _check_shape(self, name: str, tensor: torch.Tensor, row_shape: tuple) -> None:
        shape = tuple(tensor.shape)
        row_fits = len(shape) == 1 + len(row_shape) and all(
            have == want if isinstance(want, int) else have > 0
            for have, want in zip(shape[1:], row_shape, strict=True)
        )
        if row_fits and shape[0] == len(self.keys):
            return
        wanted = ', '.join(map(str, (len(self.keys), *row_shape)))
        message = (
            f'{self.path}: {name} has shape {shape}, expected ({wanted}) '
            f'to go with its {len(self.keys)} keys.'
        )
        if row_fits:
            raise RowsDisagreeError(message, self.keys, self.digest)
        raise ValueError(message)


def use_one_thread() -> None:
    """Keeps torch from starting threads of its own where there is a process per core."""
    torch.set_num_threads(1)


def _zip_digest(path: str, name: str) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            # The first folder of every name is the name under which the file was first saved.
            entries = [
                (info.filename.partition('/')[2], info.file_size, info.CRC)
                for info in archive.infolist()
            ]
    except (zipfile.BadZipFile, EOFError):
        with open(path, 'rb') as file:
            starts_well = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        size = os.path.getsize(path)
        problem = (
            f'is truncated ({size:,} bytes): it starts as a .pt file, but its end is missing. '
            'Copy or download it again.'
            if starts_well
            else f'is not a .pt file ({size:,} bytes): expected a zip archive as torch.save '
            'writes it since torch 1.6. Save or download it again.'
        )
        raise ValueError(f'{name}: {problem}') from None
    return json_digest.sha256(sorted(entries))


def _load(path: str, name: str) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r'GLOBAL (\S+)', str(error))
        what = f'asks for {asked[1]}' if asked else 'is damaged or asks for other things'
        raise ValueError(
            f'{name}: refused, its pickle {what} where only tensors are expected, and could run '
            'code. None of it was run. If you trust it, save it again as a plain dict of tensors.'
        ) from None
    except Exception as error:  # many types, according to where in the file torch stumbles
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f'{name}: cannot be read as a .pt file, probably damaged ({first_line}). '
            'Save or download it again.'
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f'{name}: holds a {type(content).__name__}, expected a dict with '
            f"'{schema.PT_KEYS}' and '{schema.PT_LATENTS}'."
        )
    return content


def _tensor(path: str, tensors: dict, name: str, dtypes: tuple[str, ...]) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"{path}: lacks '{name}'; it has {sorted(map(str, tensors))}.")
    tensor = tensors[name]
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f'{path}: {name} is a {type(tensor).__name__}, expected a tensor.')
    if tensor.layout != torch.strided or _dtype_name(tensor) not in dtypes:
        raise ValueError(
            f'{path}: {name} is {tensor.layout} {tensor.dtype}, expected a dense tensor of '
            f'{" or ".join(dtypes)}.'
        )
    return tensor.detach()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix('torch.')
