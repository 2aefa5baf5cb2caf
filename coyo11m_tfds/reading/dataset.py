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

from coyo11m_tfds import columns, schema, texts
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
        num_tokens: of a text with its padding, or 0 for embeddings.
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
    except Exception as error:  # parsers raise anything for a wrong byte, on the way or stored
        source_files.check_bucket(url)
        if not _stored_facts(url):
            raise
        raise retry.Corrupted(f'{url}: its metadata came damaged ({error})') from error
    if came != _stored_facts(url):
        raise retry.Corrupted(f'{url}: its metadata came different from what is stored')
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


def dataset_stats(data: Data, text: texts.Spec = '') -> DatasetStats:
    """Reads the statistics of a data set from its metadata, with those of the texts asked for.

    Of several texts they are those of the mixture; `texts.parse` says how `text` names them, and
    `texts.choose` what is a ValueError.

    One without statistics, such as a mocked one, gets mean 0 and standard deviation 1, and a
    warning in the log.
    """
    builder = open_dataset(data)
    metadata = dict(builder.info.metadata or {})
    if schema.META_LATENT_MEAN not in metadata:
        logging.warning('%s has no latent statistics: taking mean 0, std 1', builder.name)
    own = texts.of_records(metadata, text_dim(builder), num_tokens(builder))
    chosen = texts.choose(builder.data_dir, text, own, _columns(builder))
    first, (mean, std) = chosen.texts[0], chosen.mean_and_std()
    is_embedding = chosen.feature == schema.TEXT_EMBEDDING

    def of_latents(name: str, default: float) -> np.ndarray:
        return np.asarray(metadata.get(name, [default] * schema.LATENT_SHAPE[0]), np.float32)

    return DatasetStats(
        latent_mean=of_latents(schema.META_LATENT_MEAN, 0),
        latent_std=of_latents(schema.META_LATENT_STD, 1),
        latent_dtype=latent_dtype(builder).name,
        text_mean=mean.astype(np.float32) if is_embedding else None,
        text_std=std.astype(np.float32) if is_embedding else None,
        text_encoder=first.encoder,
        text_revision=first.revision,
        text_max_tokens=chosen.max_tokens,
        text_dim=chosen.size if is_embedding else 0,
        source_fingerprint=metadata.get(schema.META_SOURCE_FINGERPRINT),
        num_tokens=chosen.size if chosen.feature == schema.TOKENS else 0,
        vocabulary=first.vocabulary,
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
    """Names of the text embeddings and tokens that `add_column` has added."""
    return texts.column_names(_columns(builder))


def _feature(builder: tfds.core.DatasetBuilder, name: str) -> tfds.features.FeatureConnector | None:
    features = builder.info.features
    return features[name] if name in features else None  # noqa: SIM401, it has no `get`


def _columns(builder: tfds.core.DatasetBuilder) -> dict[str, columns.Column | columns.AddedColumn]:
    """Features that lie elsewhere than in the records."""
    templates = [split.filename_template for split in builder.info.splits.values()]
    build = schema.build_of(templates[0].template) if templates else ''
    return columns.read(os.fspath(builder.data_dir), build)


def check_features(builder: tfds.core.DatasetBuilder, features: Sequence[str]) -> None:
    """Raises a ValueError for a feature that the data set lacks, or TensorFlow cannot read."""
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
