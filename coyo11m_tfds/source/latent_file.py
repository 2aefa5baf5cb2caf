"""One file of latents of any format: its check, its rows by number, and where the rows lie."""

import functools
import hashlib
import itertools
import os
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.dataset.keyed_random import name_hash, splitmix64
from coyo11m_tfds.foreign.file_names import find_first
from coyo11m_tfds.process.errors import damaged_file_error
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source import copied_files
from coyo11m_tfds.storage import file_state, retry
from coyo11m_tfds.storage.stored_file import StoredFile

# Names of whole numbers that are classes, each below the number of classes.
LABELS = 'labels', 'label', 'class', 'cls'

_CROPS_AT_ONCE = 8  # requests, which mostly wait


class RowLayout(NamedTuple):
    """Where the rows of a file lie: piece p of row i at `starts[p] + numbers[i] * stride`."""

    starts: tuple[int, ...]  # in bytes; a row has several pieces if its crops lie apart
    stride: int
    numbers: np.ndarray | None = None  # of each row, int64 (N,); None if row i has number i


class ColumnNames(NamedTuple):
    """Names of what lies next to the latents of a file, one value a row."""

    texts: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    labels: str = ''  # whole numbers of classes, one of `LABELS`
    empty: tuple[str, ...] = ()  # without a value in any row
    others: Mapping[str, str] = types.MappingProxyType({})  # with what they hold, in words


class LatentFile:
    """A validated local file; the `_open` of each format sets the attributes."""

    kind: str  # name of the format in errors
    has_heads = False  # whether keys and layout can be read without the latents
    has_checksums = False  # whether the format has checksums of latents
    path: str  # name of the file in errors
    keys: np.ndarray  # of the rows, int64 (N,); without rows, dtype and shape say nothing
    key_column: str = ''  # name of the keys in the file; '' if they are computed
    dtype: str  # of the latents, one of `schema.LATENT_DTYPES`
    shape: tuple[int, ...]  # of a row, (crops, C, H, W)
    digest: str  # of the file's outline, see `columns.outline_digest`
    layout: RowLayout | None  # of the rows; None if `RowLayout` cannot describe them
    moments = ''  # one of `schema.MOMENTS` if the layout says that the channels are moments
    embedding_dim: int | None = None  # width of the text embeddings

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str = '',
        latents_from: schema.LatentsFrom = schema.ANY_LATENTS,
        label: str = '',
    ):
        """Opens a local file; missing keys are hashes of `label`, its path within its source.

        `name` stands for the path in errors, `latents_from` says which of several arrays are the
        latents. Raises a ValueError for a damaged file, and for one that has other contents.
        """
        self._local_path = os.fspath(path)
        self.path = name or self._local_path
        self._latents_from = latents_from
        self._size = os.path.getsize(path)
        self._label = label or os.path.basename(path)
        # Buffers of `latents`.
        self._raw: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._open()
        # Some formats know a better one than that of both ends of the file.
        if not hasattr(self, 'digest'):
            self.digest = columns.outline_digest(path)

    @classmethod
    def fetch_head(
        cls, file: StoredFile, folder: str | os.PathLike[str], *, check_crc: bool = True
    ) -> str:
        """Returns a local file to open in place of a file; if possible, without the latents.

        For MDS, tar and Parquet files it is the whole file. A local file is checked, and its own
        path returned. Nobody else may use `folder`. Raises a ValueError for a damaged file.
        """
        if file.local_path:
            cls._check_head(file, check_crc)
            return file.path
        # Files of different folders may have the same name, and names may be long. The suffix
        # stays, which tells the format.
        digest = hashlib.sha256(file.path.encode()).hexdigest()[:32]
        _, suffix = os.path.splitext(file.name)
        head = os.path.join(folder, f'{digest}{suffix}')
        cls._make_head(file, head, check_crc)
        return head

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
        """Compares a local file with the state that `mirror` recorded, and with its own checksums.

        Those of the format are left out without `check_crc`. `on_bytes` counts the bytes read.
        Raises a ValueError where they differ.
        """
        if recorded:
            state = file_state.compute_state(path, on_bytes)
            copied_files.check_recorded_state(state, recorded, name or os.fspath(path))

    @classmethod
    def _check_head(cls, file: StoredFile, check_crc: bool) -> None:
        """Checks what `fetch_head` returns for a local file, in this format the whole file."""
        cls.check_contents(file.path, recorded=file.recorded, check_crc=check_crc)

    @classmethod
    def _make_head(cls, file: StoredFile, path: str, check_crc: bool) -> None:
        """Writes what `fetch_head` returns for a remote file, in this format the whole file."""
        file.fetch(path)

    def _open(self) -> None:
        """Checks the file, and sets the attributes; raises a ValueError for a damaged one."""
        raise NotImplementedError

    @property
    def row_nbytes(self) -> int:
        """Size of a row in bytes, with all crops."""
        return schema.latents_nbytes(self.dtype, self.shape)

    def latents(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads some rows.

        Returns the stored bytes, uint8 `(len(rows), row_nbytes)`, and the same numbers as float32
        `(len(rows), *shape)`. The next call overwrites both arrays.
        """
        count = len(rows)
        if not count:
            return np.empty((0, 0), np.uint8), np.empty((0, *self.shape), np.float32)
        # The system would clear and map new memory page by page, which takes longer than all else
        # that is done to a record.
        if self._raw is None or self._values is None or count > len(self._raw):
            self._raw = torch.empty((count, *self.shape), dtype=getattr(torch, self.dtype))
            self._values = torch.empty((count, *self.shape), dtype=torch.float32)
        raw = self._raw[:count]
        values = self._values[:count]
        self._read(np.asarray(rows, np.int64), raw)
        # torch converts 16-bit floats about 4 times as fast as numpy does.
        values.copy_(raw)
        return bytes_of(raw), values.numpy()

    def fetch_crops(self, file: StoredFile, rows: np.ndarray, crop: int) -> None:
        """Adds one crop of each of some rows, int64 `(n,)`, of a remote file to its open head.

        Nothing compares them with a checksum.
        """
        assert self.layout is not None  # as for every file that is read in place
        num_crops = self.shape[0]
        crop_nbytes = self.row_nbytes // num_crops
        # Crops lie in a row one after the other or, with several starts, apart.
        crops_a_piece = num_crops // len(self.layout.starts)
        piece, crop_in_piece = divmod(crop, crops_a_piece)
        start = self.layout.starts[piece] + crop_in_piece * crop_nbytes
        offsets = start + self.row_numbers(rows) * self.layout.stride

        def fetch(offset: int) -> None:
            """Writes one crop to its place in the head."""
            data = file.read_range(offset, crop_nbytes)
            with open(self._local_path, 'r+b') as head:
                head.seek(offset)
                head.write(data)

        # A request for each: between two crops of a sample lie more bytes than in both.
        with ThreadPool(_CROPS_AT_ONCE) as threads:
            # The list raises the errors of the threads.
            list(threads.map(fetch, offsets.tolist()))

    def column_names(self) -> ColumnNames:
        """Returns the names of texts, numbers and labels; this may read the whole file."""
        return ColumnNames()

    def text_column(self, name: str) -> pa.Array:
        """Reads texts, large binary `(N,)` that need not be UTF-8; null for a row without one."""
        raise NotImplementedError

    def number_column(self, name: str) -> pa.Array:
        """Reads labels or other numbers, `(N,)`; null for a row without one."""
        raise NotImplementedError

    def _damaged(self, problem: str) -> ValueError:
        """Returns the error for a damaged file."""
        return damaged_file_error(self.path, self.kind, problem)

    def _check_has(self, latents: str, names: Collection[str]) -> None:
        """Raises a ValueError if the name of the latents is not among those of a file."""
        if latents not in names:
            raise ValueError(
                f"{self.path}: lacks '{latents}'; it has {sorted(names)}. Set latents_from."
            )

    def _find_keys(self, default: str, names: Collection[str]) -> None:
        """Chooses the keys among the names of a file: those of `latents_from`, or the default."""
        self.key_column = find_first([self._latents_from.key_column, default], names)

    def _set_empty(self) -> None:
        """Describes a file without rows, whose latents may seem to be of any kind."""
        self.keys = np.empty(0, np.int64)
        self.dtype = ''
        self.shape = ()
        self.layout = None

    def _make_keys(self, count: int) -> None:
        """Makes keys for rows without keys, by hashing the file's name and the row."""
        # Not numbered from 0: the rows of all files of a source must have different keys.
        first_number = np.uint64(name_hash(self._label))
        numbers = np.arange(count, dtype=np.uint64) + first_number
        # Of 63 bits, so that no key is negative.
        self.keys = (splitmix64(numbers) >> np.uint64(1)).astype(np.int64)

    def _set_kind(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Sets dtype and shape; raises a ValueError unless they are possible and as configured."""
        self.dtype = dtype
        self.shape = shape
        # Without an axis of crops, a row is one crop.
        if len(shape) == 3:
            self.shape = (1, *shape)
        if not schema.are_latents(self.dtype, self.shape):
            raise ValueError(
                f'{self.path}: {name} has rows {self.shape} of {self.dtype}, expected (C, H, W) or '
                f'(crops, C, H, W) of {" or ".join(schema.LATENT_DTYPES)}, at most '
                f'{schema.MAX_LATENTS_NBYTES:,} bytes.'
            )
        expected = self._latents_from
        # An empty one allows any; the shape of rows of one crop may be given without its axis.
        shapes = [(), self.shape]
        if self.shape[0] == 1:
            shapes.append(self.shape[1:])
        if expected.dtype not in ('', self.dtype) or expected.shape not in shapes:
            raise ValueError(
                f'{self.path}: {name} has rows {self.shape} of {self.dtype}, expected '
                f'{expected.shape} of {expected.dtype} as latents_from says.'
            )

    def row_numbers(self, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of rows in `layout`, int64 `(n,)`."""
        assert self.layout is not None
        if self.layout.numbers is None:
            return rows
        return self.layout.numbers[rows]

    def embeddings(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads the text embeddings of some rows as float32 `(len(rows), embedding_dim)`.

        Raises a ValueError for a file without them.
        """
        raise ValueError(f"{self.path}: lacks '{schema.PT_EMBEDDINGS}'.")

    def _read(self, rows: np.ndarray, raw: torch.Tensor) -> None:
        """Reads rows into a tensor `(len(rows), *shape)`."""
        assert self.layout is not None
        starts, stride, _ = self.layout
        out = bytes_of(raw)
        nbytes = out.shape[1] // len(starts)
        for piece, start in enumerate(starts):
            offsets = start + self.row_numbers(rows) * stride
            for begin, end in itertools.pairwise(_find_runs(offsets, nbytes)):
                offset = int(offsets[begin])
                # Whole rows are read straight into the tensor.
                if len(starts) == 1:
                    self._read_into(memoryview(out[begin:end]).cast('B'), offset)
                    continue
                # Pieces lie together in the file, and apart in the tensor.
                values = np.empty((end - begin, nbytes), np.uint8)
                self._read_into(memoryview(values).cast('B'), offset)
                first_byte = piece * nbytes
                out[begin:end, first_byte : first_byte + nbytes] = values

    def _read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Returns some bytes of the file."""
        data = bytearray(nbytes)
        self._read_into(memoryview(data), offset)
        return bytes(data)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills a buffer of bytes from the file; raises a ValueError where the file ends before."""
        # Not from the mapped file: the system may map 2 MB for each row that is touched, so that
        # the few records of a validation shard make a process as large as the file; and where the
        # disk cannot be read, touching ends the process and reading is an error.
        while buffer:
            count = os.preadv(self._file, [buffer], offset)
            if not count:
                raise ValueError(
                    f'{self.path}: ends before its last row; it is truncated, or has become '
                    'shorter since it was opened. Copy or download it again.'
                )
            # A read may return less than it was asked for.
            buffer = buffer[count:]
            offset += count

    @functools.cached_property
    def _file(self) -> int:
        """Descriptor of the file, which is open from the first read on."""
        file = os.open(self._local_path, os.O_RDONLY)
        weakref.finalize(self, os.close, file)
        return file


def _find_runs(offsets: np.ndarray, nbytes: int) -> list[int]:
    """Returns the bounds of runs of rows that lie one after the other, to be read at once.

    The first bound is 0 and the last the number of rows, whose `offsets` and size are given.
    """
    is_next = np.diff(offsets) == nbytes
    bounds = [0]
    later_starts = 1 + np.flatnonzero(~is_next)
    bounds += later_starts.tolist()
    bounds.append(len(offsets))
    return bounds


def find_labels(integers: Collection[str]) -> str:
    """Returns which columns of whole numbers are labels; '' without any."""
    return find_first(LABELS, integers)


def bytes_of(raw: torch.Tensor) -> np.ndarray:
    """Returns the bytes of rows `(n, *shape)`, uint8 `(n, nbytes)`, without a copy."""
    return raw.view(torch.uint8).flatten(1).numpy()


def read_twice(file: StoredFile, begin: int, nbytes: int) -> bytes:
    """Reads bytes that no checksum covers; raises an error to be retried if they differ."""
    data = file.read_range(begin, nbytes)
    second_read = file.read_range(begin, nbytes)
    if data != second_read:
        raise retry.Corrupted(f'{file.path}: {nbytes} bytes at {begin} differ when read twice')
    return data


def write_sparse_file(path: str, size: int, contents: Iterable[tuple[int, bytes]]) -> None:
    """Writes a file with holes around some contents, which come with their offsets."""
    with open(path, 'wb') as file:
        file.truncate(size)
        for offset, data in contents:
            file.seek(offset)
            file.write(data)


def use_one_thread() -> None:
    """Limits torch to one thread, because builds run one process on each core."""
    torch.set_num_threads(1)
