"""Small data sets for tests of reading, written in a moment; every value tells its record.

keys = small_dataset.write(tmp_path / 'd' / '1.0.0', {'train': (70, 0, 33)})
keys['train']   # int64 (103,), in the order of the shards
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
import torch
from numpy.typing import DTypeLike

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import chunk_index, column_file, columns, records
from coyo11m_tfds.dataset.columns import AddedColumn, InPlaceColumn, InPlaceFile
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.source.pt_file import PtFile

TEXT_DIM = 2

# The numbers of records go into float16, which holds whole numbers up to here.
MAX_RECORDS = 2048


def write(
    path: pathlib.Path,
    splits: Mapping[str, Sequence[int]],
    *,
    source: pathlib.Path | None = None,
    dtype: DTypeLike = np.float16,
) -> dict[str, np.ndarray]:
    """Writes a data set with a chunk index, as a build lays it out.

    Record r of a split holds `latents[crop, 0, 0, :2] == (crop, r)`, zeros elsewhere, the text
    vector `(r, 1)` and the caption `record r`. The folder's name is a version, for TFDS. With
    `source` the latents lie in `.pt` files of that folder. Returns the keys of each split.
    """
    path.mkdir(parents=True)
    keys = {
        split: _write_split(path, split, lengths, dtype, in_place=source is not None)
        for split, lengths in splits.items()
    }
    write_metadata(path, splits, dtype, in_place=source is not None)
    if source:
        source.mkdir(parents=True)
        files: list[InPlaceFile] = []
        crc32c = {}
        for split, lengths in splits.items():
            places, of_split = _write_sources(source, split, sum(lengths), len(files))
            np.save(path / columns.column_file_name(schema.LATENTS, split), places)
            crc32c[split] = columns.array_crc32c(places)
            files += of_split
        column = InPlaceColumn(
            schema.LATENTS, 'float16', schema.LATENTS_SHAPE, tuple(files), '', crc32c
        )
        columns.write_columns(path, {schema.LATENTS: column})
    return keys


def _write_sources(
    source: pathlib.Path, split: str, count: int, first: int
) -> tuple[np.ndarray, list[InPlaceFile]]:
    """Writes the latents of records, with gaps, into two files; returns where they are."""
    all_records = np.arange(count)
    # Gaps of one row, which reading over costs less than a request, and of nine, which it does not.
    row_of_record = all_records + all_records // 7 + 9 * (all_records // 50)
    places = []
    files = []
    for number, of_file in enumerate(np.array_split(all_records, 2)):
        rows = row_of_record[of_file]
        # The first record of a file is in its first row.
        if len(rows):
            rows = rows - rows[0]
        num_rows = rows.max(initial=0) + 1
        # What is in a gap must not be read.
        latents = np.full((num_rows, *schema.LATENTS_SHAPE), np.nan, np.float16)
        latents[rows] = _latents(of_file)
        path = source / f'{split}-{number}.pt'
        content = {
            schema.PT_KEYS: torch.arange(num_rows),
            schema.PT_LATENTS: torch.from_numpy(latents),
        }
        torch.save(content, path)
        opened = PtFile(path)
        files.append(InPlaceFile(str(path), '', opened.digest, *opened.layout[:2]))
        crcs = column_file.row_checksums(latents[rows])
        file_numbers = np.full(len(rows), first + number)
        places.append(np.stack([file_numbers, rows, crcs], axis=1))
    return np.concatenate(places).astype('<u4'), files


def add_column(
    path: pathlib.Path, name: str, values: Mapping[str, np.ndarray], **fields: Any
) -> AddedColumn:
    """Adds a column of values `(n, ...)` of each split, as the program does, and its fields."""
    files = {}
    crc32c = {}
    for split, of_split in values.items():
        files[split] = columns.column_file_name(name, split)
        shape = of_split.shape[1:]
        dtype = of_split.dtype
        with open(path / files[split], 'wb') as file:
            writer = column_file.ColumnWriter(file, dtype, shape, len(of_split))
            writer.write(of_split)
            crc32c[split] = writer.finish()
    column = AddedColumn(name, dtype.name, shape, files, crc32c, **fields)
    columns.write_columns(path, {**columns.read_columns(path), name: column})
    return column


def redirect(path: pathlib.Path, source: str) -> None:
    """Has latents in place lie in the files of a folder, local or remote, as they are there now."""
    described = columns.read_columns(path)
    files = []
    for file in described[schema.LATENTS].files:
        moved = f'{source}/{os.path.basename(file.path)}'
        # A local file has none.
        version = ''
        if not storage.local_path(moved):
            version = storage.describe_file(moved).version
        files.append(dataclasses.replace(file, path=moved, version=version))
    latents = dataclasses.replace(described[schema.LATENTS], files=tuple(files))
    columns.write_columns(path, described | {schema.LATENTS: latents})


def write_metadata(
    path: pathlib.Path,
    splits: Mapping[str, Sequence[int]],
    dtype: DTypeLike = np.float16,
    text_dim: int = TEXT_DIM,
    in_place: bool = False,
) -> None:
    """Makes a folder of shards a data set of TFDS; arguments as of `write`."""
    features = {
        schema.KEY: np.int64,
        schema.LATENTS: tfds.features.Tensor(
            shape=schema.LATENTS_SHAPE, dtype=dtype, encoding='bytes'
        ),
        schema.CAPTION: tfds.features.Text(),
        schema.TEXT_EMBEDDING: tfds.features.Tensor(
            shape=(text_dim,), dtype=np.float16, encoding='bytes'
        ),
    }
    if in_place:
        del features[schema.LATENTS]
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
        data_dir=path,
        features=tfds.features.FeaturesDict(features),
        split_infos=infos,
        check_data=False,
    )


def template(path: pathlib.Path, split: str) -> tfds.core.ShardedFileTemplate:
    """How the files of a split are named."""
    return tfds.core.ShardedFileTemplate(
        data_dir=path, dataset_name=schema.NAME, split=split, filetype_suffix='tfrecord'
    )


def _write_split(
    path: pathlib.Path, split: str, lengths: Sequence[int], dtype: DTypeLike, in_place: bool
) -> np.ndarray:
    count = sum(lengths)
    assert count <= MAX_RECORDS
    # The first records of every data set have the same keys, which differ from split to split.
    keys = splitmix64(np.arange(count) + (len(split) << 32)).view(np.int64)
    entries = []
    sizes = []
    begins = np.cumsum(lengths)[:-1]  # of all shards but the first
    for shard, rows in enumerate(np.split(np.arange(count), begins)):
        name = template(path, split).sharded_filepath(shard_index=shard, num_shards=len(lengths))
        with open(name, 'wb') as file, records.RecordWriter(file) as writer:
            values = _columns(keys[rows], rows, dtype)
            if in_place:
                del values[schema.LATENTS]
            writer.write(values)
        entries.append(chunk_index.make_entries(writer.chunk_offsets, writer.checksums))
        sizes.append(writer.num_bytes)
    chunk_index.write_chunk_index(path, split, lengths, entries, sizes)
    return keys


def _columns(
    keys: np.ndarray, rows: np.ndarray, dtype: DTypeLike
) -> dict[str, np.ndarray | list[bytes]]:
    text = np.stack([rows, np.ones_like(rows)], axis=1).astype(np.float16)
    return {
        schema.KEY: keys,
        schema.LATENTS: _as_bytes(_latents(rows).astype(dtype)),
        schema.CAPTION: [f'record {row}'.encode() for row in rows],
        schema.TEXT_EMBEDDING: _as_bytes(text),
    }


def _latents(rows: np.ndarray) -> np.ndarray:
    latents = np.zeros((len(rows), *schema.LATENTS_SHAPE), np.float16)
    latents[:, :, 0, 0, 0] = np.arange(schema.NUM_CROPS)
    latents[:, :, 0, 0, 1] = rows[:, None]
    return latents


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """uint8 `(n, bytes of a row)`."""
    return array.reshape(len(array), int(np.prod(array.shape[1:]))).view(np.uint8)
