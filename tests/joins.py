"""Captions and values of sidecars, joined to keys, for the tests of the source."""

import contextlib
import pathlib
from collections.abc import Iterable

import numpy as np

from coyo11m_tfds.source import captions, sidecar
from coyo11m_tfds.source.keyed_values import KeyedValues


def of_captions(
    path: pathlib.Path, folder: pathlib.Path, wanted: Iterable[int] | None = None, name: str = ''
) -> KeyedValues:
    """Joins the captions of a Parquet file, of some keys or of all."""
    keys = None if wanted is None else np.array(list(wanted), np.int64)
    captions.join_texts({name or str(path): str(path)}, 'caption_llava', str(folder), keys)
    return KeyedValues(str(folder))


def of_values(
    place: pathlib.Path, folder: pathlib.Path, wanted: Iterable[int], column: str = ''
) -> KeyedValues:
    """Joins the values of a sidecar, or of a column of Parquet files."""
    sidecar.join_values(
        sidecar.find_sidecar_files(place),
        str(folder),
        np.array(list(wanted), np.int64),
        hold=lambda file: contextlib.nullcontext(file.path),
        column=column,
    )
    return KeyedValues(str(folder))
