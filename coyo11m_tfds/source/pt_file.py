"""One `.pt` file: its keys, and its latents by row. Only this module of the package imports torch.

    shard = pt_file.LatentShard('latents-3crop/000000-000009.pt')
    shard.keys                              # int64 (N,)
    raw, values = shard.latents([0, 5, 7])  # uint8 (3, 24576), float32 (3, 3, 4, 32, 32)

Opening reads the directory and the keys, not the latents. Only tensors and plain containers are
unpickled, so a hostile file cannot run code.
"""

import functools
import itertools
import os
import pickle
import re
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import pt_archive

_EMBEDDING_DTYPES = ('float16', 'bfloat16', 'float32')


class RowsDisagreeError(ValueError):
    """The tensors of one file have unequal numbers of rows; has its `keys` and its `digest`."""

    def __init__(self, message: str, keys: np.ndarray, digest: str):
        super().__init__(message)
        self.keys, self.digest = keys, digest


class LatentShard:
    """A validated `.pt` file, open for reading.

    Attributes:
        path: The file as errors call it.
        keys: Keys, int64 `(N,)`.
        dtype: Dtype of the latents, one of `schema.LATENT_DTYPES`.
        embedding_dim: Width of `embeddings`, None where the file has none.
        digest: Digest of the names, sizes and checksums of all members, see `pt_archive.Archive`.
    """

    def __init__(self, path: str | os.PathLike[str], name: str = ''):
        """Opens a local file; errors call it `name`, or by its path.

        Raises:
            ValueError: The file is truncated, is not a `.pt`, would run code when unpickled, or its
                tensors are missing, of an unexpected dtype or shape, or not stored element by
                element.
            RowsDisagreeError: Its tensors are valid, but have unequal numbers of rows.
        """
        self.path, self._local_path = name or os.fspath(path), os.fspath(path)
        archive = pt_archive.open_archive(path, self.path)
        _check_byte_order(archive, self._local_path)
        self.digest = archive.digest
        sizes = [member.size for member in archive.members]
        self._sizes = dict(zip(archive.starts, sizes, strict=True))
        # Tensors without data: what they claim to be is checked before anything is allocated.
        self._bare = _load(self._local_path, self.path, map_location='meta')
        self._check_stored(schema.PT_KEYS, ('int64',))
        keys = self._bare[schema.PT_KEYS]
        if keys.ndim != 1:
            raise ValueError(
                f'{self.path}: {schema.PT_KEYS} has shape {tuple(keys.shape)}, expected (N,).'
            )
        self._check_stored(schema.PT_LATENTS, schema.LATENT_DTYPES)
        if schema.PT_EMBEDDINGS in self._bare:
            self._check_stored(schema.PT_EMBEDDINGS, _EMBEDDING_DTYPES)
        tensors = _load(self._local_path, self.path, map_location='cpu', mmap=True)
        self.keys: np.ndarray = tensors[schema.PT_KEYS].detach().numpy().copy()
        self._latents = tensors[schema.PT_LATENTS].detach()
        self._check_shape(schema.PT_LATENTS, schema.LATENTS_SHAPE)
        self.dtype = _dtype_name(self._latents)
        self._raw = torch.empty((0, *schema.LATENTS_SHAPE), dtype=self._latents.dtype)
        self._values = torch.empty((0, *schema.LATENTS_SHAPE), dtype=torch.float32)
        self._embeddings = tensors.get(schema.PT_EMBEDDINGS)
        self.embedding_dim: int | None = None
        if self._embeddings is not None:
            self._check_shape(schema.PT_EMBEDDINGS, ('D',))
            self.embedding_dim = self._embeddings.shape[1]

    def latents(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads some rows.

        Returns:
            The stored bytes, uint8 `(len(rows), bytes of LATENTS_SHAPE)`, and the same numbers as
            float32 `(len(rows), *LATENTS_SHAPE)`; both are overwritten by the next call.
        """
        count = len(rows)
        # The system would clear and map new memory page by page, which takes longer than all else
        # that is done to a record.
        if count > len(self._raw):
            self._raw = self._raw.new_empty((count, *schema.LATENTS_SHAPE))
            self._values = self._values.new_empty((count, *schema.LATENTS_SHAPE))
        raw, values = self._raw[:count], self._values[:count]
        raw_bytes = raw.view(torch.uint8).flatten(1).numpy()
        rows = np.asarray(rows, np.int64)
        if self.latents_start is None:
            torch.index_select(self._latents, 0, torch.from_numpy(rows), out=raw)
        else:
            self._read_rows(rows, raw_bytes)
        values.copy_(raw)  # torch converts 16-bit floats about 4 times as fast as numpy does
        return raw_bytes, values.numpy()

    def _read_rows(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Reads rows of the latents into uint8 `(len(rows), bytes of a row)`."""
        # Not from the mapped file: the system may map 2 MB for each row that is touched, so that
        # the few records of a validation shard make a process as large as the file; and where the
        # disk cannot be read, touching ends the process and reading is an error.
        begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist()
        for begin, end in itertools.pairwise([*begins, len(rows)]):
            part = memoryview(out[begin:end]).cast('B')
            at = self.latents_start + int(rows[begin]) * out.shape[1]
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
    def latents_start(self) -> int | None:
        """Where the latents begin in the file; None if they do not lie there row after row."""
        if not len(self.keys) or not self._latents.is_contiguous():
            return None
        latents = self._bare[schema.PT_LATENTS]
        return _storage_start(latents) + int(latents.storage_offset()) * latents.element_size()

    def embeddings(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads the text embeddings of some rows as float32 `(len(rows), embedding_dim)`.

        Raises:
            ValueError: The file has no `embeddings`.
        """
        if self._embeddings is None:
            raise ValueError(f"{self.path}: lacks '{schema.PT_EMBEDDINGS}'.")
        chosen = self._embeddings.detach()[torch.as_tensor(np.asarray(rows, np.int64))]
        return chosen.to(torch.float32).numpy()

    def _check_stored(self, name: str, dtypes: tuple[str, ...]) -> None:
        """Checks that a tensor is one of these dtypes, and within one member of the archive."""
        tensor = self._bare.get(name)
        if name not in self._bare:
            what = f"lacks '{name}'; it has {sorted(map(str, self._bare))}."
        elif not isinstance(tensor, torch.Tensor):
            what = f'{name} is a {type(tensor).__name__}, expected a tensor.'
        elif tensor.layout != torch.strided or _dtype_name(tensor) not in dtypes:
            what = (
                f'{name} is {tensor.layout} {tensor.dtype}, expected a dense tensor of '
                f'{" or ".join(dtypes)}.'
            )
        elif tensor.is_neg():
            what = (
                f'{name} has its negative bit set, so that other numbers are stored than it has. '
                'Save it again as .resolve_neg().'
            )
        elif (size := self._sizes.get(_storage_start(tensor))) is None:
            what = (
                f'{name} is not stored as torch.save stores a tensor, at the beginning of a member '
                'of the archive. Save it again.'
            )
        elif (elements := _elements_spanned(tensor)) is None:
            what = (
                f'{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, so that '
                'rows share memory; expected every element stored. Save it again as .contiguous().'
            )
        elif (needed := (tensor.storage_offset() + elements) * tensor.element_size()) > size:
            what = (
                f'{name} of shape {tuple(tensor.shape)} takes {needed:,} bytes, but {size:,} are '
                'stored. Copy, download or save it again.'
            )
        else:
            return
        raise ValueError(f'{self.path}: {what}')

    def _check_shape(self, name: str, row_shape: tuple) -> None:
        shape = tuple(self._bare[name].shape)
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
    """Keeps torch from starting threads, because there is one process for each core."""
    torch.set_num_threads(1)


def _check_byte_order(archive: pt_archive.Archive, path: str) -> None:
    """Raises a ValueError for numbers of another byte order: torch crashes over such a file."""
    for member, start in zip(archive.members, archive.starts, strict=True):
        # torch looks names up without regard to case.
        if member.name.partition('/')[2].lower() != 'byteorder':
            continue
        with open(path, 'rb') as file:
            file.seek(start)
            found = file.read(min(member.size, 16)).decode('latin-1')
        if found != sys.byteorder:
            raise ValueError(
                f'{archive.name}: has its numbers in byte order {found!r}, expected '
                f'{sys.byteorder!r}. Save it again on a machine of that byte order.'
            )


def _load(path: str, name: str, **options) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, weights_only=True, **options)
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


def _storage_start(tensor: torch.Tensor) -> int:
    """Where in the file the storage of a tensor without data begins; -1 if that is unknown."""
    return getattr(tensor.untyped_storage(), '_checkpoint_offset', -1)


def _elements_spanned(tensor: torch.Tensor) -> int | None:
    """Elements from the first to the last of a tensor; None if some share memory."""
    if not tensor.numel():
        return 0
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return None
        span += stride * (size - 1)
    return span


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix('torch.')
