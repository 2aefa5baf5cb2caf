"""A built data set, opened: what its metadata says and where its records are.

    builder = dataset.open_dataset('OUT/coyo11m_tfds/latents/1.0.0')
    stats = dataset.dataset_stats(builder)
    split = dataset.open_split(builder, 'train')   # None where there is no chunk index

What `prepare` has written, `input_pipeline` and `train_lib` read here.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds import columns, schema
from coyo11m_tfds.reading import indexed_split, stored_dataset
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.storage import remote, retry, source_files

Data: TypeAlias = str | os.PathLike | tfds.core.DatasetBuilder

_METADATA_FILES = (schema.INFO_FILE, schema.FEATURES_FILE, schema.METADATA_FILE)

FEATURES = stored_dataset.FEATURES


@dataclasses.dataclass(frozen=True)
class DatasetStats:
    """The statistics in the metadata of a data set that a model needs.

    Attributes:
        latent_mean, latent_std: float32 `(4,)`, over the train split in raw units.
        latent_dtype: 'float16' or 'bfloat16'.
        text_mean, text_std: float32 `(text_dim,)`, or None without text embeddings.
        text_encoder: name of what made the text embeddings, or None.
        text_revision: of that: a commit, a digest of its files or a number; None if unknown.
        text_max_tokens: captions were cut to so many tokens; 0 for no limit or if unknown.
        text_dim: width of the text embeddings, or 0 without them.
        num_tokens: of a text in the records, or 0 without them.
        vocabulary: ids of these are less than this; 0 without them.
        source_fingerprint: hex digest of the source files, or None.
    """

    latent_mean: np.ndarray
    latent_std: np.ndarray
    latent_dtype: str
    text_mean: np.ndarray | None
    text_std: np.ndarray | None
    text_encoder: str | None
    text_revision: str | None
    text_max_tokens: int
    text_dim: int
    source_fingerprint: str | None
    num_tokens: int = 0
    vocabulary: int = 0


def open_dataset(data: Data) -> tfds.core.DatasetBuilder:
    """The builder of a data set, given itself or the folder that holds `dataset_info.json`.

    What TFDS reads on gs:// is compared with copies whose CRC-32C is that of the objects.

    Raises:
        ValueError, OSError: the folder is missing or not readable, or holds no data set.
    """
    if isinstance(data, tfds.core.DatasetBuilder):
        return data
    folder = os.fspath(data).rstrip('/')
    if folder.startswith('gs://'):
        return retry.call(lambda: _open_verified(folder), f'opening {folder}')
    return tfds.builder_from_directory(folder)


def _open_verified(url: str) -> tfds.core.DatasetBuilder:
    """Opens a data set on gs://; raises `retry.Corrupted` if a byte came wrong."""
    try:
        builder = tfds.builder_from_directory(url)
        came = _facts(builder)
    except tf.errors.OpError:
        raise
    except Exception as error:  # whatever parsers make of a wrong byte, also of a stored one
        source_files.check_bucket(url)
        if not _stored_facts(url):
            raise
        raise retry.Corrupted(f'{url}: its metadata came damaged ({error})') from error
    if came != _stored_facts(url):
        raise retry.Corrupted(f'{url}: its metadata came otherwise than it is stored')
    return builder


def _stored_facts(url: str) -> list | None:
    """The facts in verified copies of a data set's metadata; None if they are none."""
    with tempfile.TemporaryDirectory() as folder:
        for name in _METADATA_FILES:
            with contextlib.suppress(ValueError):  # it does not exist
                file = source_files.describe(f'{url}/{name}')
                remote.fetch(file, os.path.join(folder, name))
        try:
            return _facts(tfds.builder_from_directory(folder))
        except Exception:  # as above
            return None


def _facts(builder: tfds.core.DatasetBuilder) -> list:
    """All that was read from the files of metadata, in a form that can be compared."""
    info = builder.info
    return [info.as_proto, info.features.to_json(), json.dumps(dict(info.metadata or {}))]


def dataset_stats(data: Data, text: str = '') -> DatasetStats:
    """Reads the statistics of a data set from its metadata.

    With `text`, those of the text embeddings of this column (see `add_column`) take the place of
    those in the records; a ValueError if there is none.

    One without statistics, such as a mocked one, gets mean 0 and standard deviation 1, and a
    warning in the log.
    """
    builder = open_dataset(data)
    metadata = dict(builder.info.metadata or {})
    if schema.META_LATENT_MEAN not in metadata:
        logging.warning('%s has no latent statistics: taking mean 0, std 1', builder.name)
    dim = text_dim(builder)
    built_with = metadata.get(schema.META_SETTINGS) or {}
    sidecar = built_with.get(schema.SETTINGS_TEXT)
    sidecar = sidecar if isinstance(sidecar, dict) else {}  # else 'pt'

    def numbers(name: str, default: float, size: int) -> np.ndarray:
        return np.asarray(metadata.get(name, [default] * size), np.float32)

    stats = DatasetStats(
        latent_mean=numbers(schema.META_LATENT_MEAN, 0, schema.LATENT_SHAPE[0]),
        latent_std=numbers(schema.META_LATENT_STD, 1, schema.LATENT_SHAPE[0]),
        latent_dtype=latent_dtype(builder).name,
        text_mean=numbers(schema.META_TEXT_MEAN, 0, dim) if dim else None,
        text_std=numbers(schema.META_TEXT_STD, 1, dim) if dim else None,
        text_encoder=metadata.get(schema.META_TEXT_ENCODER),
        text_revision=sidecar.get('revision'),
        text_max_tokens=sidecar.get('max_tokens', 0),
        text_dim=dim,
        source_fingerprint=metadata.get(schema.META_SOURCE_FINGERPRINT),
        num_tokens=num_tokens(builder),
        vocabulary=metadata.get(schema.META_TEXT_VOCABULARY, 0),
    )
    if not text:
        return stats
    column = columns.find_text(builder.data_dir, _columns(builder), text)
    return dataclasses.replace(
        stats,
        text_mean=np.asarray(column.mean, np.float32),
        text_std=np.asarray(column.std, np.float32),
        text_encoder=column.encoder['encoder'],
        text_revision=column.encoder.get('revision'),
        text_max_tokens=column.encoder.get('max_tokens', 0),
        text_dim=column.shape[0],
        num_tokens=0,
        vocabulary=0,
    )


def latent_dtype(builder: tfds.core.DatasetBuilder) -> tf.DType:
    """The dtype of the latents.

    Raises:
        ValueError: the data set has no latents, or they have another shape or dtype.
    """
    feature = _feature(builder, schema.LATENTS)
    column = None if feature is not None else _columns(builder).get(schema.LATENTS)
    if isinstance(column, columns.Column):
        return tf.as_dtype(column.dtype)
    if (
        feature is None
        or feature.shape != schema.LATENTS_SHAPE
        or feature.tf_dtype.name not in schema.LATENT_DTYPES
    ):
        raise ValueError(
            f'{builder.data_dir}: feature {schema.LATENTS!r} is {feature}, expected '
            f'{schema.LATENTS_SHAPE} of {" or ".join(schema.LATENT_DTYPES)}'
        )
    return feature.tf_dtype


def text_dim(builder: tfds.core.DatasetBuilder) -> int:
    """The width of the text embeddings, 0 for a data set without them."""
    return _text_size(builder, schema.TEXT_EMBEDDING)


def num_tokens(builder: tfds.core.DatasetBuilder) -> int:
    """Tokens of a text in the records, 0 for a data set without them."""
    return _text_size(builder, schema.TOKENS)


def _text_size(builder: tfds.core.DatasetBuilder, name: str) -> int:
    feature = _feature(builder, name)
    return 0 if feature is None else feature.shape[0]


def text_columns(builder: tfds.core.DatasetBuilder) -> list[str]:
    """Names of the text embeddings that `add_column` has added."""
    return columns.text_names(_columns(builder))


def _feature(builder: tfds.core.DatasetBuilder, name: str) -> tfds.features.FeatureConnector | None:
    features = builder.info.features
    return features[name] if name in features else None  # noqa: SIM401, it has no `get`


def _columns(builder: tfds.core.DatasetBuilder) -> dict[str, columns.Column | columns.AddedColumn]:
    """Features that lie elsewhere than in the records."""
    return columns.read(os.fspath(builder.data_dir))


def check_features(builder: tfds.core.DatasetBuilder, features: Sequence[str]) -> None:
    """Raises a ValueError for a feature that the data set does not have, or TensorFlow not read."""
    there = [name for name in stored_dataset.READABLE if _feature(builder, name) is not None]
    for name, column in _columns(builder).items():
        if isinstance(column, columns.Column):
            there.append(name)
        elif name in features:
            raise ValueError(
                f'{builder.data_dir}: {name!r} is a column, which only `train_batches` and '
                '`eval_batches` can read'
            )
    stored_dataset.check_features(builder.data_dir, there, features)


def open_split(builder: tfds.core.DatasetBuilder, split: str) -> IndexedSplit | None:
    """Finds what the planned order needs; None where there is no chunk index."""
    splits = builder.info.splits
    # A mocked data set knows of no splits and has all; 'train[:50%]' is a part of 'train'.
    if splits and split.partition('[')[0] not in splits:
        raise ValueError(f'{builder.data_dir}: no split {split!r}; there are {list(splits)}')
    lengths, first = [], ''
    if split in splits:
        lengths = list(splits[split].shard_lengths)
        template = splits[split].filename_template
        first = template.sharded_filepath(shard_index=0, num_shards=len(lengths))
    return indexed_split.load(builder.data_dir, split, lengths, os.fspath(first))
