"""Builds that leave the latents in the source's files and record their places."""

import itertools
import os
from collections.abc import Mapping, Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.dataset.columns import InPlaceColumn, InPlaceFile
from coyo11m_tfds.source.latent_file import LatentFile
from coyo11m_tfds.storage import source_files


def describe(file: source_files.StoredFile, opened: LatentFile) -> InPlaceFile:
    """Describes a file of latents; raises a ValueError if they are not rows in place."""
    layout = opened.layout
    if layout is None:
        raise ValueError(
            f'{file.path}: its {schema.PT_LATENTS} are not contiguous and cannot be read in place. '
            "Save them again with .contiguous(), or set latents='records'."
        )
    version = file.version if file.is_remote else ''
    return InPlaceFile(path_of(file), version, opened.digest, layout.starts, layout.stride)


def path_of(file: source_files.StoredFile) -> str:
    """Returns the absolute path or the URL of a file of the source."""
    return file.path if file.is_remote else os.path.abspath(file.path)


def check_within_reach(file: source_files.StoredFile, final: str) -> None:
    """Raises a ValueError if readers of a data set in `final` could not read a file of its source.

    The file must be on gs://, or local if the data set is local.
    """
    is_remote = source_files.is_remote(final)
    if not file.path.startswith('gs://') and (file.is_remote or is_remote):
        where = 'on gs://, as the data set is' if is_remote else 'local or on gs://'
        raise ValueError(
            f"{file.path}: latents='in_place' reads this file in training, so it must be {where}. "
            "Mirror the source first (python -m coyo11m_tfds.mirror), or set latents='records'."
        )


def write(
    folder: str,
    splits: Mapping[str, Sequence[Sequence[tuple[InPlaceFile, np.ndarray]]]],
    dtype: str,
    shape: tuple[int, ...],
    build: str,
) -> None:
    """Describes the latents of a data set as a column, in a local folder.

    `splits` holds the `ShardResult.sources` of each split's shards, in order, and `shape` is that
    of a row, `(crops, C, H, W)`.
    """
    runs = {split: list(itertools.chain.from_iterable(of)) for split, of in splits.items()}
    used = {file for of_split in runs.values() for file, rows in of_split if len(rows)}
    files = sorted(used, key=lambda file: file.path)
    number = {file: n for n, file in enumerate(files)}
    crc32c = {}
    for split, of_split in runs.items():
        places = np.concatenate(
            [
                np.empty((0, 3), '<u4'),
                *(np.insert(rows, 0, number[file], axis=1) for file, rows in of_split if len(rows)),
            ]
        )
        crc32c[split] = columns.array_crc32c(places)
        np.save(
            os.path.join(folder, columns.column_file_name(schema.LATENTS, split, build)), places
        )
    column = InPlaceColumn(schema.LATENTS, dtype, shape, tuple(files), build, crc32c)
    columns.write_columns(folder, {schema.LATENTS: column}, build)
