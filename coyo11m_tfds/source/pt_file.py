"""One `.pt` file: its checksums, its keys, and its latents by row.

Only tensors and plain containers are unpickled, so a hostile file cannot run code.
"""

import itertools
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import torch
from isal import isal_zlib as zlib

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import pt_archive
from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.foreign.file_names import find_first
from coyo11m_tfds.process.errors import Faults, describe_type
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import copied_files
from coyo11m_tfds.source.latent_file import (
    ColumnNames,
    LatentFile,
    RowLayout,
    read_twice,
    write_sparse_file,
)
from coyo11m_tfds.storage import file_state, retry
from coyo11m_tfds.storage.stored_file import StoredFile

_EMBEDDING_DTYPES = ('float16', 'bfloat16', 'float32')
_TEXTS = str, bytes, list, tuple
_KEYS = schema.PT_KEYS, 'key', 'ids', 'id', 'image_ids', 'image_id'

# Stays in a core's cache between reading and summing up: 1 GB from the page cache takes 0.05 s.
_BLOCK_BYTES = 256 << 10

# All small members together are at most this many times `max_small_bytes`.
_MAX_SMALL = 4
_PADDED_HEADER = 4 << 10
# Reading more than is needed costs less than another request.
_GAP = 64 << 10

# torch 2.14 lists the sparse tensors that all threads load in one place, and whoever ends first
# checks them: without the lock the error of one file would name another.
_torch_loads = threading.Lock()


class RowsDisagreeError(ValueError):
    """The tensors of a file, whose `keys` and `digest` this holds, have unequal numbers of rows."""

    def __init__(self, message: str, keys: np.ndarray, digest: str):
        super().__init__(message)
        self.keys = keys
        self.digest = digest


class PtFile(LatentFile):
    """A validated `.pt` file. Without keys, but with captions, keys are hashes of name and row.

    The head of a remote file has the zip's directory and every member of at most 1 MB or 1% of the
    file: 1.1 MB in three requests for a file of 2.9 GB.
    """

    kind = 'a .pt file'
    has_heads = True
    has_checksums = True

    @classmethod
    def check_contents(
        cls,
        path: str | os.PathLike[str],
        name: str = '',
        *,
        check_crc: bool = True,
        recorded: file_state.FileState | None = None,
        on_bytes: Callable[[int], None] = file_state.ignore_bytes,
    ) -> None:
        """See `LatentFile`; torch compares no CRC-32s of files that it maps."""
        name = name or os.fspath(path)
        if not check_crc:
            super().check_contents(path, name, recorded=recorded, on_bytes=on_bytes)
            return
        buffer = np.empty(_BLOCK_BYTES, np.uint8)
        checksum = google_crc32c.Checksum()
        with open(path, 'rb', buffering=0) as file:
            archive = pt_archive.read_archive(file.fileno(), name)
            # macOS has no such advice.
            if hasattr(os, 'posix_fadvise'):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            # All bytes in turn, for both checksums in one pass: members, and what is between them.
            position = 0
            for end, member in archive.sections():
                crc32 = 0
                while position < end:
                    count = file.readinto(buffer[: end - position])
                    if not count:
                        raise ValueError(f'{name}: has become shorter. Copy or download it again.')
                    crc32 = zlib.crc32(buffer[:count], crc32)
                    if recorded:
                        checksum.update(buffer[:count])
                    on_bytes(count)
                    position += count
                if member:
                    archive.check(member, crc32)
        if recorded:
            state = file_state.FileState(archive.size, int.from_bytes(checksum.digest(), 'big'))
            copied_files.check_recorded_state(state, recorded, name)

    @classmethod
    def _check_head(cls, file: StoredFile, check_crc: bool) -> None:
        """Compares the small members of a local file with their checksums."""
        if check_crc:
            check_small_members(file.path)

    @classmethod
    def _make_head(cls, file: StoredFile, path: str, check_crc: bool) -> None:
        """Writes a sparse copy of a remote file with its directory and small members."""
        retry.call(lambda: _write_head(file, path, check_crc), f'reading the head of {file.path}')

    def _open(self) -> None:
        """Checks what the file claims of its tensors, then maps them."""
        archive = pt_archive.open_archive(self._local_path, self.path)
        _check_byte_order(archive, self._local_path)
        self.digest = archive.digest
        sizes = [member.size for member in archive.members]
        self._sizes = dict(zip(archive.starts, sizes, strict=True))
        # Tensors without data: their claims are checked before anything is allocated.
        self._content = _load_tensors(self._local_path, self.path, map_location='meta')
        self._choose_keys()
        latents = self._latents_from.name or schema.PT_LATENTS
        names = [latents]
        if self.key_column:
            names.append(self.key_column)
        if all(_has_no_rows(self._content.get(name)) for name in names):
            self._set_empty()
            return
        self._check_tensors(latents)
        tensors = _load_tensors(self._local_path, self.path, map_location='cpu', mmap=True)
        self._latents = tensors[latents].detach()
        # Before the shapes, which the number of keys decides.
        self._set_keys(tensors)
        if self._latents.ndim == 4:
            self._check_shape(latents, ('C', 'H', 'W'))
            # One crop a row.
            self._latents = self._latents.unsqueeze(1)
        else:
            self._check_shape(latents, ('crops', 'C', 'H', 'W'))
        shape = tuple(self._latents.shape[1:])
        self._set_kind(latents, _dtype_name(self._latents), shape)
        self.layout = self._find_layout(self._content[latents])
        self._embeddings = tensors.get(schema.PT_EMBEDDINGS)
        if self._embeddings is not None:
            self._check_shape(schema.PT_EMBEDDINGS, ('D',))
            self.embedding_dim = self._embeddings.shape[1]

    def _set_keys(self, tensors: dict[str, Any]) -> None:
        """Reads the keys, or makes one for each row of the latents."""
        if self.key_column:
            self.keys = tensors[self.key_column].detach().numpy().astype(np.int64)
            return
        count = 0
        # A tensor without numbers may claim any number of rows.
        if self._latents.numel():
            count = self._latents.shape[:1].numel()
        self._make_keys(count)

    def _choose_keys(self) -> None:
        """Chooses the tensor of keys; without one, the names of captions in the file decide."""
        self._find_keys(schema.PT_KEYS, self._content)
        if self.key_column or schema.PT_CAPTIONS in self._content:
            return
        self.key_column = find_first(_KEYS, self._content)
        # Without captions in the file, only keys lead to them.
        if not self.key_column and not self.column_names().texts:
            self.key_column = schema.PT_KEYS

    def _check_tensors(self, latents: str) -> None:
        """Checks keys, latents and embeddings one by one; raises a ValueError about all of them."""
        # Collected, so that one look at the file is enough to repair it.
        faults = Faults()
        if self.key_column:
            with faults.collect():
                self._check_stored(self.key_column, ('int64', 'int32'))
        with faults.collect():
            self._check_stored(latents, tuple(schema.LATENT_DTYPES))
        if schema.PT_EMBEDDINGS in self._content:
            with faults.collect():
                self._check_stored(schema.PT_EMBEDDINGS, _EMBEDDING_DTYPES)
        faults.check()
        if self.key_column:
            shape = tuple(self._content[self.key_column].shape)
            if len(shape) > 1:
                raise ValueError(
                    f'{self.path}: {self.key_column} has shape {shape}, expected (N,).'
                )

    def _find_layout(self, stored: torch.Tensor) -> RowLayout | None:
        """Returns where the rows of the latents lie, by their tensor without data."""
        # Rows of a transposed or sliced tensor are no runs of bytes.
        if not len(self.keys) or not self._latents.is_contiguous():
            return None
        # The tensor may be a part of what its storage holds.
        offset = int(stored.storage_offset()) * stored.element_size()
        start = _storage_start(stored) + offset
        return RowLayout((start,), self.row_nbytes)

    def column_names(self) -> ColumnNames:
        """Returns the names of lists of texts, and what all else in the file is."""
        # Of keys and latents, too, which nobody will ask for as texts.
        texts = []
        empty = []
        others = dict[str, str]()
        for name, values in self._content.items():
            if not isinstance(values, list | tuple):
                others[name] = describe_type(values)
            elif any(isinstance(value, _TEXTS) for value in values):
                texts.append(name)
            elif all(value is None for value in values):
                empty.append(name)
            else:
                others[name] = f'{describe_type(values)} without texts'
        return ColumnNames(texts=tuple(texts), empty=tuple(empty), others=others)

    def text_column(self, name: str) -> pa.Array:
        """Reads a list of texts, large binary `(N,)`; null for a row without one.

        Raises a ValueError for a list of another length, and for an entry that is no text.
        """
        values = self._content[name]
        if len(values) != len(self.keys):
            raise ValueError(
                f'{self.path}: {name} has {format_count(len(values), "entry", "entries")}, '
                f'expected {len(self.keys):,}, one for each row.'
            )
        texts = []
        for row, value in enumerate(values):
            text = foreign_text.find_text(value)
            # An empty list is a row without a text, a number is a mistake.
            if text is None and value is not None and not isinstance(value, _TEXTS):
                raise ValueError(
                    f'{self.path}: {name} of row {row} is {describe_type(value)}, expected a '
                    'text, bytes of UTF-8 or a list of texts.'
                )
            texts.append(None if text is None else foreign_text.encode(text))
        return pa.array(texts, pa.large_binary())

    def _read(self, rows: np.ndarray, raw: torch.Tensor) -> None:
        """Reads rows into a tensor; by torch, which maps the file, if they lie otherwise."""
        if self.layout is None:
            torch.index_select(self._latents, 0, torch.from_numpy(rows), out=raw)
        else:
            super()._read(rows, raw)

    def embeddings(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads the text embeddings of some rows as float32 `(len(rows), embedding_dim)`."""
        assert self._embeddings is not None  # as `embedding_dim` tells
        numbers = torch.as_tensor(np.asarray(rows, np.int64))
        selected = self._embeddings.detach()[numbers]
        # NumPy has no bfloat16.
        return selected.to(torch.float32).numpy()

    def _check_stored(self, name: str, dtypes: tuple[str, ...]) -> None:
        """Checks that a tensor has one of the dtypes, and lies within one member of the archive."""
        if name not in self._content:
            names = sorted(map(str, self._content))
            remedy = 'Set latents_from to their name.'
            if name == self.key_column:
                remedy = 'Set key_column to their name, or save it again with keys or captions.'
            raise ValueError(f"{self.path}: lacks '{name}'; it has {names}. {remedy}")
        problem = self._find_fault(name, self._content[name], dtypes)
        if problem:
            raise ValueError(f'{self.path}: {problem}')

    def _find_fault(self, name: str, tensor: Any, dtypes: tuple[str, ...]) -> str:
        """Returns why the bytes of a tensor cannot be read as its numbers; '' if they can."""
        if not isinstance(tensor, torch.Tensor):
            return f'{name} is {describe_type(tensor)}, expected a tensor. Save it again as one.'
        if tensor.layout != torch.strided or _dtype_name(tensor) not in dtypes:
            return (
                f'{name} is {_describe_kind(tensor)}, expected a dense tensor of '
                f'{" or ".join(dtypes)}. Save it again as such.'
            )
        # Its bytes are those of the negated numbers.
        if tensor.is_neg():
            return f'{name} has its negative bit set. Save it again as .resolve_neg().'
        size = self._sizes.get(_storage_start(tensor))
        if size is None:
            return f'{name} does not begin a member of the archive. Save it again by torch.save.'
        num_elements = _elements_spanned(tensor)
        shape = tuple(tensor.shape)
        if num_elements is None:
            return (
                f'{name} of shape {shape} has strides {tensor.stride()}, so that '
                'rows share memory; expected every element stored. Save it again as .contiguous().'
            )
        # Else torch would read what lies behind the member.
        required = (tensor.storage_offset() + num_elements) * tensor.element_size()
        if required > size:
            return (
                f'{name} of shape {shape} takes {required:,} bytes, but {size:,} are '
                'stored. Copy, download or save it again.'
            )
        return ''

    def _check_shape(self, name: str, row_shape: tuple[str, ...]) -> None:
        """Raises a ValueError unless a tensor has a row of this shape for each key.

        A wrong number of rows is a `RowsDisagreeError`: such a file may be left out.
        """
        num_keys = len(self.keys)
        shape = tuple(self._content[name].shape)
        has_axes = len(shape) == 1 + len(row_shape)
        row_fits = has_axes and min(shape[1:]) > 0
        if row_fits and shape[0] == num_keys:
            return
        expected = ', '.join((str(num_keys), *row_shape))
        message = (
            f'{self.path}: {name} has shape {shape}, expected ({expected}) '
            f'to go with its {format_count(num_keys, "key")}.'
        )
        if row_fits:
            raise RowsDisagreeError(message, self.keys, self.digest)
        raise ValueError(message)


def _has_no_rows(value: object) -> bool:
    """Whether a value is a tensor or a list of no rows."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 and value.shape[0] == 0
    return isinstance(value, list | tuple) and not value


def _check_byte_order(archive: pt_archive.Archive, path: str) -> None:
    """Raises a ValueError for numbers of another byte order: torch crashes over such a file."""
    for member, start in zip(archive.members, archive.starts, strict=True):
        # Behind the name of the archive.
        _, _, name = member.name.partition('/')
        # torch looks names up without regard to case.
        if name.lower() != 'byteorder':
            continue
        with open(path, 'rb') as file:
            file.seek(start)
            order = file.read(min(member.size, 16)).decode('latin-1')
        if order != sys.byteorder:
            raise ValueError(
                f'{archive.name}: has its numbers in byte order {order!r}, expected '
                f'{sys.byteorder!r}. Save it again on a machine of that byte order.'
            )


def _load_tensors(path: str, name: str, **options) -> dict[str, Any]:
    """Returns the dict in a file, by `torch.load` without code; ValueError for anything else."""
    try:
        # With `weights_only`, as any other pickle could run code.
        with _torch_loads:
            content = torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        match = re.search(r'GLOBAL (\S+)', str(error))
        problem = f'asks for {match[1]}' if match else 'is damaged or asks for other things'
        raise ValueError(
            f'{name}: refused, its pickle {problem} where only tensors are expected, and could run '
            'code. None of it was run. If you trust it, save it again as a plain dict of tensors.'
        ) from None
    except UnicodeEncodeError:
        raise ValueError(
            f'{name}: its path is not UTF-8, and torch opens no such file. Rename it or its folder.'
        ) from None
    # Such as quantized or nested tensors, which torch makes only together with their numbers, and
    # sparse ones, which torch 2.14 checks by their numbers.
    except NotImplementedError:
        raise ValueError(
            f'{name}: holds a tensor of a kind that torch loads only as a whole, such as sparse, '
            'quantized or nested. Save it again as a plain dict of dense tensors.'
        ) from None
    # Of many types, according to where in the file torch stumbles.
    except Exception as error:
        # Some have no text.
        lines = str(error).splitlines() or [type(error).__name__]
        first_line = lines[0]
        raise ValueError(
            f'{name}: cannot be read as a .pt file, probably damaged ({first_line}). '
            'Save or download it again.'
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f'{name}: holds {describe_type(content)}, expected a dict with '
            f"'{schema.PT_KEYS}' and '{schema.PT_LATENTS}'."
        )
    return content


def _storage_start(tensor: torch.Tensor) -> int:
    """Returns the offset in the file of a tensor's storage; -1 if unknown."""
    # torch has no public name for it.
    return getattr(tensor.untyped_storage(), '_checkpoint_offset', -1)


def _elements_spanned(tensor: torch.Tensor) -> int | None:
    """Returns the elements from the first to the last of a tensor; None if some share memory."""
    if not tensor.numel():
        return 0
    span = 1
    # From the smallest stride on, each has to reach beyond the elements so far.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # An expanded axis has the stride 0: all its rows are one.
        if size > 1 and stride < span:
            return None
        span += stride * (size - 1)
    return span


def _describe_kind(tensor: torch.Tensor) -> str:
    """Describes the dtype of a tensor and, unless it is dense, its layout: 'sparse_coo float16'."""
    dtype = _dtype_name(tensor)
    if tensor.layout == torch.strided:
        return dtype
    return f'{str(tensor.layout).removeprefix("torch.")} {dtype}'


def _dtype_name(tensor: torch.Tensor) -> str:
    """Returns the name of a dtype as NumPy has it: float16."""
    return str(tensor.dtype).removeprefix('torch.')


def check_small_members(path: str | os.PathLike[str], name: str = '') -> None:
    """Like `pt_archive.open_archive`, but also compares all small members, such as the keys."""
    with open(path, 'rb', buffering=0) as file:
        descriptor = file.fileno()
        archive = pt_archive.read_archive(descriptor, name or os.fspath(path))
        max_bytes = pt_archive.max_small_bytes(archive.size)
        for member, start in zip(archive.members, archive.starts, strict=True):
            # In a head, the larger ones are holes.
            if member.size <= max_bytes:
                content = os.pread(descriptor, member.size, start)
                archive.check(member, zlib.crc32(content))


def _write_head(file: StoredFile, path: str, check_crc: bool) -> None:
    """Writes the head of a remote file and compares its members with their CRC-32."""
    tail = b''

    def read_tail(nbytes: int) -> bytes:
        """Reads the last bytes of the file, and keeps them for the head."""
        nonlocal tail
        tail = read_twice(file, file.size - nbytes, nbytes)
        return tail

    members = pt_archive.read_directory(read_tail, file.size, file.path)
    # The directory has no checksum, and so is read twice; it has those of the members.
    start = file.size - len(tail)
    ranges = _head_ranges(file, members, start)
    contents = ((begin, file.read_range(begin, end - begin)) for begin, end in ranges)
    write_sparse_file(path, file.size, itertools.chain(contents, [(start, tail)]))
    try:
        if check_crc:
            check_small_members(path, file.path)
        else:
            pt_archive.open_archive(path, file.path)
    except ValueError as error:
        # What was received only once may have been damaged by the transfer.
        raise retry.Corrupted(str(error).rstrip('.')) from error


def _head_ranges(
    file: StoredFile, members: Sequence[pt_archive.ArchiveMember], stop: int
) -> list[tuple[int, int]]:
    """Returns the ranges of small members before `stop`, and of the others' local headers."""
    max_small = pt_archive.max_small_bytes(file.size)
    total = 0
    # Empty at first, so that there is always a last range to compare with.
    ranges = [(0, 0)]
    for member in members:
        # Of a large member only the local header, which is compared with the directory.
        nbytes = _PADDED_HEADER
        if member.size <= max_small:
            nbytes += member.size
        begin = member.begin
        end = min(member.end, begin + nbytes)
        total += end - begin
        # Members are in ascending order, so only the last range can be a neighbour.
        last_begin, last_end = ranges[-1]
        if begin > last_end + _GAP:
            ranges.append((begin, end))
        else:
            ranges[-1] = last_begin, end
    if total > _MAX_SMALL * max_small:
        raise ValueError(
            f'{file.path}: its small members take {total:,} bytes, expected no more than '
            f"{_MAX_SMALL * max_small:,} for '.pt' files of keys and latents."
        )
    # From there on, the file has been read.
    return [(begin, min(end, stop)) for begin, end in ranges if begin < stop]
