"""Everything that the `.pt` files of a source hold together, except the latents.

    latents = SourceLatents.read(source.latent_files, head_dir='/scratch', drop_bad=True)
    latents.keys      # int64 (rows of all files,)
    latents.starts    # int64 (files + 1,): row i of file f is row starts[f] + i of `keys`
    latents.duplicate # bool (rows of all files,): an earlier row has the same key

Reading it checks every file, before anything is written. Of remote files only the heads are read,
a few at a time.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Sequence

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import keyed_parquet, remote_heads
from coyo11m_tfds.source.pt_file import LatentShard, RowsDisagreeError
from coyo11m_tfds.storage.source_files import SourceFile

# A head takes a few requests, and waiting for their answers is most of the time.
_HEADS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class _Head:
    """What is known of one file; without keys, but with the error, if its tensors disagree."""

    keys: np.ndarray
    dtype: str
    embedding_dim: int | None
    digest: str
    disagreement: RowsDisagreeError | None = None


@dataclasses.dataclass(frozen=True)
class SourceLatents:
    """Keys and kinds of all `.pt` files.

    Attributes:
        files: the files.
        keys: of all rows, in the files' order, int64.
        starts: row of `keys` at which each file starts, and the number of rows, int64.
        dtype: of the latents, one of `schema.LATENT_DTYPES`.
        embedding_dims: for each file the width of `embeddings`, None where it has none.
        digests: for each file the digest of its content.
        duplicate: rows whose key was in an earlier row, bool, shape of `keys`.
        disagreeing: keys of files that are left out because their tensors have unequal numbers
            of rows, so that nothing tells which row belongs to which key; int64.
        disagreeing_files: paths of these files.
        check_crc: whether contents have been, and are to be, compared with their CRC-32.
    """

    files: tuple[SourceFile, ...]
    keys: np.ndarray
    starts: np.ndarray
    dtype: str
    embedding_dims: tuple[int | None, ...]
    digests: tuple[str, ...]
    duplicate: np.ndarray
    disagreeing: np.ndarray
    disagreeing_files: tuple[str, ...]
    check_crc: bool

    @classmethod
    def read(
        cls,
        files: Sequence[SourceFile],
        head_dir: str | os.PathLike[str],
        *,
        drop_bad: bool,
        check_crc: bool = True,
    ) -> 'SourceLatents':
        """Opens and checks every file.

        Args:
            files: the files.
            head_dir: existing, empty folder for the heads of remote files, some MB each.
            drop_bad: mark duplicate keys and leave out files whose tensors disagree, instead of
                raising.
            check_crc: compare all but the large storages with their CRC-32.

        Raises:
            ValueError: a file is bad, the files disagree, or none has a row; or `drop_bad` is false
                and a key is a duplicate.
            OSError: a remote file cannot be read.
        """
        with (
            Progress('Checking the source', len(files), 'files') as progress,
            concurrent.futures.ThreadPoolExecutor(_HEADS_AT_ONCE) as threads,
        ):
            heads = []
            for head in threads.map(
                lambda file: _read_head(file, head_dir, drop_bad, check_crc), files
            ):
                heads.append(head)
                progress.add(1)
        good = [head for head in heads if not head.disagreement]
        bad = [(f, h.disagreement) for f, h in zip(files, heads, strict=True) if h.disagreement]
        if not good:
            raise bad[0][1]
        for _, error in bad:
            logging.warning('left out: %s', error)
        _check_dtypes(files, heads)
        keys = np.concatenate([head.keys for head in heads])
        if not len(keys):
            raise ValueError(f'{files[0].path}: has no rows, nor has another file of this source.')
        duplicate = np.ones(len(keys), bool)
        duplicate[keyed_parquet.order_by_key(keys)[0]] = False
        latents = cls(
            files=tuple(files),
            keys=keys,
            starts=np.cumsum([0, *(len(head.keys) for head in heads)]),
            dtype=good[0].dtype,
            embedding_dims=tuple(head.embedding_dim for head in heads),
            digests=tuple(head.digest for head in heads),
            duplicate=duplicate,
            disagreeing=np.concatenate([np.empty(0, np.int64), *(error.keys for _, error in bad)]),
            disagreeing_files=tuple(file.path for file, _ in bad),
            check_crc=check_crc,
        )
        if not drop_bad:
            latents._check_unique()
        return latents

    @property
    def num_rows(self) -> int:
        """Rows of all files, including files that are left out."""
        return len(self.keys) + len(self.disagreeing)

    @property
    def versions(self) -> tuple[str, ...]:
        """For each file what changes with its content; its digest alone may not without CRC-32s."""
        if self.check_crc:
            return self.digests
        return tuple(f'{d} {f.version}' for f, d in zip(self.files, self.digests, strict=True))

    def files_of_key(self, row: int) -> list[str]:
        """Paths of the files that hold the key of this row, up to the row's own file."""
        rows = np.flatnonzero(self.keys[: row + 1] == self.keys[row])
        return [self.files[file].path for file in sorted({self._file_of(r) for r in rows.tolist()})]

    def common_embedding_dim(self) -> int:
        """The width of `embeddings` in all files.

        Raises:
            ValueError: a file has none, or another width than the first.
        """
        in_use = [
            (file.path, dim)
            for file, dim, rows in zip(
                self.files, self.embedding_dims, np.diff(self.starts), strict=True
            )
            if rows
        ]
        first_path, first = in_use[0]
        for path, dim in in_use:
            if dim is None:
                raise ValueError(
                    f"{path}: lacks '{schema.PT_EMBEDDINGS}', which text_embeddings='pt' asks for. "
                    'Name a file made by coyo11m_tfds.embed_captions instead.'
                )
            if dim != first:
                raise ValueError(
                    f'{path}: {schema.PT_EMBEDDINGS} has {dim} numbers a row, but {first_path} '
                    f'has {first}; expected one width in all files.'
                )
        assert first is not None
        return first

    def _check_unique(self) -> None:
        duplicates = np.flatnonzero(self.duplicate)
        if duplicates.size:
            second = duplicates[0]
            first = np.flatnonzero(self.keys == self.keys[second])[0]
            raise ValueError(
                f'{self._place(second)} has key {self.keys[second]}, but so has '
                f'{self._place(first)}; expected every key once ({duplicates.size} rows repeat '
                'a key). Remove the duplicate rows or files, or set bad_data to "drop".'
            )

    def _place(self, row: int) -> str:
        file = self._file_of(row)
        return f'{self.files[file].path}: row {row - self.starts[file]}'

    def _file_of(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side='right')) - 1


def _read_head(
    file: SourceFile, head_dir: str | os.PathLike[str], drop_bad: bool, check_crc: bool
) -> _Head:
    path = remote_heads.fetch_head(file, head_dir, check_crc=check_crc)
    try:
        # Not kept open: all files together are 300 GB of mapped memory.
        shard = LatentShard(path, name=file.path)
        return _Head(shard.keys, shard.dtype, shard.embedding_dim, shard.digest)
    except RowsDisagreeError as error:
        if not drop_bad:
            raise
        return _Head(np.empty(0, np.int64), '', None, error.digest, error)


def _check_dtypes(files: Sequence[SourceFile], heads: Sequence[_Head]) -> None:
    used = [
        (file.path, head.dtype)
        for file, head in zip(files, heads, strict=True)
        if not head.disagreement
    ]
    first_path, first = used[0]
    for path, dtype in used:
        if dtype != first:
            raise ValueError(
                f'{path}: latents are {dtype}, but those of {first_path} are {first}; '
                'expected one dtype in all files. Convert one of them.'
            )
