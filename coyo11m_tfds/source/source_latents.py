"""Keys, rows and dtype of all latent files of a source; everything except the latents.

    latents = SourceLatents.read(source.latent_files, head_dir='/scratch', drop_bad=True)
    latents.keys      # int64 (rows of all files,)
    latents.starts    # int64 (files + 1,): row i of file f is row starts[f] + i of `keys`
    latents.duplicate # bool (rows of all files,): an earlier row has the same key

`read` checks every file before anything is written. It reads only the heads of remote files, a few
at a time. Only `read_head` knows the format of the files.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Sequence

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import joined, pt_check
from coyo11m_tfds.source.pt_file import LatentShard, RowsDisagreeError
from coyo11m_tfds.storage.source_files import SourceFile

# A head takes a few requests, and waiting for their answers is most of the time.
_HEADS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Head:
    """What one file says of its rows; no keys, but the error, if its tensors disagree.

    Attributes:
        keys: Keys of the rows, int64 `(n,)`.
        dtype: Dtype of the latents, one of `schema.LATENT_DTYPES`.
        shape: Shape of a row, `(crops, C, H, W)`.
        embedding_dim: Width of `embeddings`; None where the file has none.
        digest: Digest of the content.
    """

    keys: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    embedding_dim: int | None
    digest: str
    disagreement: RowsDisagreeError | None = None


def read_head(
    file: SourceFile, head_dir: str | os.PathLike[str], *, drop_bad: bool, check_crc: bool
) -> Head:
    """Opens and checks a `.pt` file; raises as `SourceLatents.read`."""
    path = pt_check.fetch_head(file, head_dir, check_crc=check_crc)
    try:
        # Not kept open: all files together are 300 GB of mapped memory.
        shard = LatentShard(path, name=file.path)
        return Head(shard.keys, shard.dtype, shard.shape, shard.embedding_dim, shard.digest)
    except RowsDisagreeError as error:
        if not drop_bad:
            raise
        return Head(np.empty(0, np.int64), '', (), None, error.digest, error)


class SourceLatents:
    """Keys and kinds of all latent files.

    Attributes:
        files: The files.
        keys: Keys of all rows in the files' order, int64.
        starts: Row of `keys` at which each file starts, and the number of rows, int64.
        dtype: Dtype of the latents, one of `schema.LATENT_DTYPES`.
        shape: Shape of a row, `(crops, C, H, W)`.
        digests: Digest of the content of each file.
        duplicate: Rows whose key was in an earlier row, bool, shape of `keys`.
        disagreeing: Keys of files that are left out because their tensors have unequal numbers of
            rows, so that nothing tells which row belongs to which key; int64.
        disagreeing_files: Paths of these files.
        versions: What changes with the content of each file; its digest alone may not without
            CRC-32s.
    """

    def __init__(self, files: Sequence[SourceFile], heads: Sequence[Head], check_crc: bool):
        self.files = tuple(files)
        self.keys = np.concatenate([head.keys for head in heads])
        self.starts = np.cumsum([0, *(len(head.keys) for head in heads)])
        self.digests = tuple(head.digest for head in heads)
        self.versions = self.digests
        if not check_crc:
            pairs = zip(files, self.digests, strict=True)
            self.versions = tuple(f'{digest} {file.version}' for file, digest in pairs)
        self.duplicate = np.ones(len(self.keys), bool)
        self.duplicate[joined.order_by_key(self.keys)[0]] = False
        found = list(zip(files, heads, strict=True))
        bad = [(file.path, head.disagreement) for file, head in found if head.disagreement]
        self.disagreeing_files = tuple(path for path, _ in bad)
        self.disagreeing = np.concatenate([np.empty(0, np.int64), *(e.keys for _, e in bad)])
        good = [(file.path, head) for file, head in found if not head.disagreement]
        self.dtype, self.shape = good[0][1].dtype, good[0][1].shape
        for path, head in good:
            if (head.dtype, head.shape) != (self.dtype, self.shape):
                raise ValueError(
                    f'{path}: latents are {head.dtype} {head.shape}, but those of {good[0][0]} are '
                    f'{self.dtype} {self.shape}; expected one kind in all files. Convert one of '
                    'them, or make a source of each kind.'
                )
        self._embedding_dims = [(path, head.embedding_dim) for path, head in good if len(head.keys)]

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
            files: The files.
            head_dir: Existing, empty folder for the heads of remote files, some MB each.
            drop_bad: Mark duplicate keys and leave out files whose tensors disagree, instead of
                raising.
            check_crc: Compare all but the large storages with their CRC-32.

        Raises:
            ValueError: A file is bad, the files disagree, or none has a row; or `drop_bad` is false
                and a key is a duplicate.
            OSError: A remote file cannot be read.
        """

        def read_one(file: SourceFile) -> Head:
            return read_head(file, head_dir, drop_bad=drop_bad, check_crc=check_crc)

        heads = []
        with (
            Progress('Checking the source', len(files), 'files') as progress,
            concurrent.futures.ThreadPoolExecutor(_HEADS_AT_ONCE) as threads,
        ):
            for head in threads.map(read_one, files):
                heads.append(head)
                progress.add(1)
        bad = [head.disagreement for head in heads if head.disagreement]
        if len(bad) == len(heads):
            raise bad[0]
        for error in bad:
            logging.warning('left out: %s', error)
        latents = cls(files, heads, check_crc)
        if not len(latents.keys):
            raise ValueError(f'{files[0].path}: has no rows, nor has another file of this source.')
        if not drop_bad:
            latents._check_unique()
        return latents

    @property
    def num_rows(self) -> int:
        """Rows of all files, including files that are left out."""
        return len(self.keys) + len(self.disagreeing)

    def files_of_key(self, row: int) -> list[str]:
        """Paths of the files that hold the key of this row, up to the row's own file."""
        rows = np.flatnonzero(self.keys[: row + 1] == self.keys[row])
        return [self.files[file].path for file in np.unique(self._file_of(rows)).tolist()]

    def common_embedding_dim(self) -> int:
        """The width of `embeddings` in all files.

        Raises:
            ValueError: A file has none, or another width than the first.
        """
        first_path, first = self._embedding_dims[0]
        for path, dim in self._embedding_dims:
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
            key = self.keys[duplicates[0]]
            rows = np.flatnonzero(self.keys == key)[:2]
            first, second = (
                f'{self.files[file].path}: row {row - self.starts[file]}'
                for row, file in zip(rows, self._file_of(rows), strict=True)
            )
            raise ValueError(
                f'{second} has key {key}, which {first} has too; expected every key once '
                f'({duplicates.size} rows repeat a key). Remove the duplicate rows or files, or '
                'set bad_data to "drop".'
            )

    def _file_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, rows, side='right') - 1
