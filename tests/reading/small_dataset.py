"""Small data sets for tests of reading, written in a moment; every value tells its record.

keys = small_dataset.write(tmp_path / 'd' / '1.0.0', {'train': (70, 0, 33)})
keys['train']   # int64 (103,), in the order of the shards
"""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import DTypeLike

from coyo11m_tfds import chunk_index, records, schema
from coyo11m_tfds.keyed_random import splitmix64

TEXT_DIM = 2

# The numbers of records go into float16, which holds whole numbers up to here.
MAX_RECORDS = 2048


def write(path: pathlib.Path, splits: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Writes a data set with a chunk index, as `prepare` lays it out.

    Record r of a split holds `latents[crop, 0, 0, :2] == (crop, r)`, zeros elsewhere, the text
    vector `(r, 1)` and the caption `record r`.

    Args:
        path: folder that is made; TFDS wants it to end in a version.
        splits: lengths of the shards of each split; some may be 0.

    Returns:
        The keys of each split, int64, in the order of the shards.
    """
    path.mkdir(parents=True)
    keys = {split: _write_split(path, split, lengths) for split, lengths in splits.items()}
    write_metadata(path, splits)
    return keys


def write_metadata(
    path: pathlib.Path,
    splits: Mapping[str, Sequence[int]],
    dtype: DTypeLike = np.float16,
    text_dim: int = TEXT_DIM,
) -> None:
    """Makes a folder of shards a data set of TFDS; arguments as of `write`."""
    features = tfds.features.FeaturesDict(
        {
            schema.KEY: np.int64,
            schema.LATENTS: tfds.features.Tensor(
                shape=schema.LATENTS_SHAPE, dtype=dtype, encoding='bytes'
            ),
            schema.CAPTION: tfds.features.Text(),
            schema.TEXT_EMBEDDING: tfds.features.Tensor(
                shape=(text_dim,), dtype=np.float16, encoding='bytes'
            ),
        }
    )
    infos = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=list(lengths),
            num_bytes=1,
            filename_template=template(path, split),
        )
        for split, lengths in splits.items()
    ]
    tfds.folder_dataset.write_metadata(
        data_dir=path, features=features, split_infos=infos, check_data=False
    )


def template(path: pathlib.Path, split: str) -> tfds.core.ShardedFileTemplate:
    """How the files of a split are named."""
    return tfds.core.ShardedFileTemplate(
        data_dir=path, dataset_name=schema.NAME, split=split, filetype_suffix='tfrecord'
    )


def _write_split(path: pathlib.Path, split: str, lengths: Sequence[int]) -> np.ndarray:
    count = sum(lengths)
    assert count <= MAX_RECORDS
    # The first records of every data set have the same keys, which differ from split to split.
    keys = splitmix64(np.arange(count) + (len(split) << 32)).view(np.int64)
    offsets, sizes = [], []
    for shard, rows in enumerate(np.split(np.arange(count), np.cumsum(lengths)[:-1])):
        name = template(path, split).sharded_filepath(shard_index=shard, num_shards=len(lengths))
        with open(name, 'wb') as file, records.RecordWriter(file) as writer:
            writer.write(_columns(keys[rows], rows))
        offsets.append(np.array(writer.chunk_offsets))
        sizes.append(writer.num_bytes)
    chunk_index.save(path, split, lengths, offsets, sizes)
    return keys


def _columns(keys: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray | list[bytes]]:
    latents = np.zeros((len(rows), *schema.LATENTS_SHAPE), np.float16)
    latents[:, :, 0, 0, 0] = np.arange(schema.NUM_CROPS)
    latents[:, :, 0, 0, 1] = rows[:, None]
    text = np.stack([rows, np.ones_like(rows)], axis=1).astype(np.float16)
    return {
        schema.KEY: keys,
        schema.LATENTS: _as_bytes(latents),
        schema.CAPTION: [f'record {row}'.encode() for row in rows],
        schema.TEXT_EMBEDDING: _as_bytes(text),
    }


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """uint8 `(n, bytes of a row)`."""
    return array.reshape(len(array), int(np.prod(array.shape[1:]))).view(np.uint8)
