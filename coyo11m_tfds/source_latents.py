"""What all `.pt` files of a source hold together, but for the latents themselves.

    latents = SourceLatents.read(['000000-000009.pt', '000010-000019.pt'])
    latents.keys      # int64 (rows of all files,)
    latents.starts    # int64 (files + 1,): row i of file f is row starts[f] + i of `keys`

Reading it checks every file, before anything is written.
"""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.latent_shards import LatentShard


@dataclasses.dataclass(frozen=True)
class SourceLatents:
    """Keys and kinds of all `.pt` files.

    Attributes:
        paths: the files.
        keys: of all rows, in the files' order, int64; no key comes twice.
        starts: row of `keys` at which each file starts, and the number of rows, int64.
        dtype: of the latents, one of `schema.LATENT_DTYPES`.
        embedding_dims: for each file the width of `embeddings`, None where it has none.
        digests: for each file its name and the digest of its content.
    """

    paths: tuple[str, ...]
    keys: np.ndarray
    starts: np.ndarray
    dtype: str
    embedding_dims: tuple[int | None, ...]
    digests: tuple[str, ...]

    @classmethod
    def read(cls, paths: Sequence[str]) -> 'SourceLatents':
        """Opens and checks every file.

        Raises:
            ValueError: a file is bad, the files disagree, or a key comes twice.
        """
        keys, dtypes, embedding_dims, digests = [], [], [], []
        for path in paths:
            shard = LatentShard(path)  # let go at once: all together are 300 GB of mapped memory
            keys.append(shard.keys)
            dtypes.append(shard.dtype)
            embedding_dims.append(shard.embedding_dim)
            digests.append(f'{os.path.basename(path)} {shard.digest}')
            if shard.dtype != dtypes[0]:
                raise ValueError(
                    f'{path}: latents are {shard.dtype}, but those of {paths[0]} are {dtypes[0]}; '
                    'expected one dtype in all files. Convert one of them.'
                )
        latents = cls(
            paths=tuple(paths),
            keys=np.concatenate(keys),
            starts=np.cumsum([0, *map(len, keys)]),
            dtype=dtypes[0],
            embedding_dims=tuple(embedding_dims),
            digests=tuple(digests),
        )
        latents._check_unique()
        return latents

    def common_embedding_dim(self) -> int:
        """The width of `embeddings` in all files.

        Raises:
            ValueError: a file has none, or another width than the first.
        """
        first = self.embedding_dims[0]
        for path, dim in zip(self.paths, self.embedding_dims, strict=True):
            if dim is None:
                raise ValueError(
                    f"{path}: lacks '{schema.PT_EMBEDDINGS}', which text_vectors='pt' asks for. "
                    'Name a file made by coyo11m_tfds.embed_captions instead.'
                )
            if dim != first:
                raise ValueError(
                    f'{path}: {schema.PT_EMBEDDINGS} has {dim} numbers a row, but {self.paths[0]} '
                    f'has {first}; expected one width in all files.'
                )
        return first

    def _check_unique(self) -> None:
        order = np.argsort(self.keys, kind='stable')
        sorted_keys = self.keys[order]
        repeats = np.flatnonzero(sorted_keys[1:] == sorted_keys[:-1])
        if repeats.size:
            first, second = order[repeats[0]], order[repeats[0] + 1]
            raise ValueError(
                f'{self._place(second)} has key {self.keys[second]}, but so has '
                f'{self._place(first)}; expected every key once ({repeats.size} rows repeat a '
                'key). Remove the repeated rows or files.'
            )

    def _place(self, row: int) -> str:
        file = int(np.searchsorted(self.starts, row, side='right')) - 1
        return f'{self.paths[file]}: row {row - self.starts[file]}'
