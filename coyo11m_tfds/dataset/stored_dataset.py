"""A built data set, opened once: its metadata files, and the places of its records.

data = stored_dataset.open_data('OUT/coyo11m_tfds/latents/1.0.0')
data.latents, data.stats().latent_std   # ('float16', (3, 4, 32, 32)), float32 (4,)
split = data.split('train')             # None for a data set without a chunk index
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import chunk_index, columns, manifest, texts
from coyo11m_tfds.dataset.columns import Column, InPlaceColumn
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.records import RecordLayout
from coyo11m_tfds.dataset.splits import (
    IndexedSplit,
    StoredSplit,
    parse_splits,
    strip_alternative_formats,
)
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import json_digest

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Data: TypeAlias = Union[str, os.PathLike[str], 'tfds.core.DatasetBuilder', 'StoredDataset']

FOLDER_HELP = 'folder of a built data set, .../coyo11m_tfds/CONFIG/1.0.0'

# Tokens are listed apart: a model reads them or embeddings.
FEATURES = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING, schema.CAPTION)
READABLE = (*FEATURES, schema.TOKENS)

# What is raised by JSON of another structure.
_STRUCTURE_ERRORS = AttributeError, LookupError, TypeError, ValueError


@dataclasses.dataclass(frozen=True)
class DatasetStats:
    """The facts about a data set that a model needs; a checkpoint holds them for drawing."""

    latent_mean: np.ndarray  # float32 (C,), over the train split in raw units
    latent_std: np.ndarray
    text_mean: np.ndarray  # float32 (text_dim,), of text embeddings; (0,) for tokens
    text_std: np.ndarray
    latents_shape: tuple[int, ...] = (1, *schema.LATENT_SHAPE)  # (crops, C, H, W), the most crops
    latent_dtype: str = 'float16'  # one of `schema.LATENT_DTYPES`
    text_encoder: str = ''  # such as `jax:Qwen/Qwen3-0.6B`; '' without text or if unknown
    # Commit on the hub, `sha256:...` of files in a local folder, or a number; '' if unknown.
    text_revision: str = ''
    text_max_tokens: int = 0  # length limit of captions; 0 if there is none or it is unknown
    num_tokens: int = 0  # of a text, with padding; 0 for embeddings
    vocabulary: int = 0  # all token ids are below this number; 0 for embeddings
    text_words: str = ''  # that the encoder `words` numbers, see `word_list`
    source_fingerprint: str | None = None  # hex digest of the source files
    vae: str = ''  # name of the VAE that made the latents; '' if unknown
    latent_scale: Sequence[float] | None = None  # factor and shift of this VAE; None if unknown
    moments: str = ''  # one of `schema.MOMENTS` that batches hold; '' for latents
    license: str = ''  # of the data; '' if unknown
    citation: str = ''  # BibTeX of the data; '' if unknown

    @property
    def text_dim(self) -> int:
        """Width of the text embeddings; 0 without them."""
        return len(self.text_mean)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for JSON, from which floats return bit for bit."""
        fields = dict(vars(self))
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                fields[name] = value.tolist()
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> 'DatasetStats':
        """Returns what `to_json` had; raises a KeyError or TypeError for other fields."""
        arguments = dict(fields)
        # JSON has lists for arrays and for tuples.
        for name in ('latent_mean', 'latent_std', 'text_mean', 'text_std'):
            arguments[name] = np.asarray(fields[name], np.float32)
        arguments['latents_shape'] = tuple(fields['latents_shape'])
        return cls(**arguments)


@dataclasses.dataclass(frozen=True)
class StoredDataset:
    """The metadata of a data set."""

    folder: str
    full_name: str  # name, config and version, as TFDS joins them
    splits: Mapping[str, StoredSplit]  # {} for mock data, which have every split
    features: Mapping[str, dict]  # each as `features.json` describes it
    metadata: Mapping[str, Any]  # content of `metadata.json`; {} without that file
    columns: Mapping[str, Column]  # features outside the records
    builder: Any = None  # of TFDS, that opened it
    files: manifest.SmallFiles | None = None  # None for a mocked data set
    _indexed: dict[str, IndexedSplit | None] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __repr__(self) -> str:
        splits = []
        for name, split in self.splits.items():
            splits.append(f'{name} ({format_count(split.num_records, "record")})')
        features = {}
        for name in self.features:
            dtype, shape, _ = self._tensor(name)
            features[name] = f'{name} {dtype} {shape}' if dtype else name
        # A column may replace a feature of the records.
        for name, column in self.columns.items():
            features[name] = f'{name} {column.dtype} {column.shape}'
        encoder = self.metadata.get(schema.META_TEXT_ENCODER)
        vae = self.metadata.get(schema.META_VAE)
        return (
            f'StoredDataset {self.full_name} in {self.folder}\n'
            f'  splits: {", ".join(splits)}\n'
            f'  features: {", ".join(features.values())}\n'
            f'  text encoder: {encoder or "none"}, VAE: {vae or "not recorded"}'
        )

    @property
    def can_map(self) -> bool:
        """Whether all its files, also of latents in place, can be memory-mapped."""
        # Latents in place may lie on another storage than the data set.
        for column in self.columns.values():
            if isinstance(column, InPlaceColumn) and not column.can_map:
                return False
        return bool(storage.local_path(self.folder))

    @property
    def build(self) -> str:
        """ID in the names of its build's files; '' if the names have none."""
        # One build writes all splits.
        first_split = next(iter(self.splits.values()))
        return first_split.build

    @property
    def latents(self) -> tuple[str, tuple[int, ...]]:
        """Dtype, one of `schema.LATENT_DTYPES`, and shape `(crops, C, H, W)` as recorded.

        Raises a ValueError if the records hold no latents.
        """
        column = self.columns.get(schema.LATENTS)
        if isinstance(column, InPlaceColumn):
            return column.dtype, column.shape
        dtype, shape, _ = self._tensor(schema.LATENTS)
        if not schema.are_latents(dtype, shape):
            raise ValueError(
                f'{self.folder}: feature {schema.LATENTS!r} is {dtype} {shape}, expected '
                f'(crops, C, H, W) of {" or ".join(schema.LATENT_DTYPES)}'
            )
        return dtype, shape

    @property
    def moments(self) -> str:
        """One of `schema.MOMENTS` that the records hold; '' for latents."""
        return self.metadata.get(schema.META_MOMENTS, '')

    @property
    def channels(self) -> int:
        """Number of channels of a latent; moments have twice as many, first those of the means."""
        _, (_, num_channels, _, _) = self.latents
        return num_channels // 2 if self.moments else num_channels

    @property
    def text_dim(self) -> int:
        """Width of the text embeddings in the records; 0 without them."""
        return self._text_size(schema.TEXT_EMBEDDING)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a text in the records; 0 without them."""
        return self._text_size(schema.TOKENS)

    @property
    def record_layout(self) -> RecordLayout:
        """The layout of its records; raises a ValueError if a feature is not encoded as bytes."""
        names = [schema.LATENTS]
        names += schema.TEXT_DTYPES
        for name in names:
            _, _, encoding = self._tensor(name)
            if encoding != 'bytes':
                raise ValueError(
                    f'{self.folder}: feature {name!r} is encoded as {encoding!r}, expected the '
                    'bytes of its numbers'
                )
        # Records have no latents where these lie in place.
        latents_nbytes = 0
        if schema.LATENTS not in self.columns:
            latents_nbytes = schema.latents_nbytes(*self.latents)
        return RecordLayout(latents_nbytes, self.text_dim, self.num_tokens)

    def choose_texts(self, spec: texts.TextSpec) -> texts.TextMixture:
        """Returns the texts of a specification; see `texts.resolve_texts`."""
        in_records = texts.text_in_records(self.metadata, self.text_dim, self.num_tokens)
        return texts.resolve_texts(self.folder, spec, in_records, self.columns)

    def find_columns(
        self, features: Sequence[str], text: texts.TextMixture | None = None
    ) -> dict[str, Column]:
        """Returns the columns that hold features of a batch, or texts of a mixture, by name."""
        names = list(features)
        # The text in the records has the name '', and is no column.
        if text and text.feature in features:
            names += text.names
        return {name: self.columns[name] for name in names if name in self.columns}

    def check_features(self, names: Sequence[str]) -> None:
        """Raises a ValueError that lists the features if one of these names is none."""
        available = [name for name in READABLE if name in self.features]
        available += self.columns
        missing = [name for name in names if name not in available]
        if missing:
            raise ValueError(
                f'{self.folder}: no feature {missing[0]!r}; there are {available}. Data sets with '
                'text embeddings or tokens are built with the config field text_embeddings; python '
                '-m coyo11m_tfds.add_column adds columns; text=NAME chooses one as the text.'
            )

    def split(self, name: str) -> IndexedSplit | None:
        """Returns a split with its chunk index, read at the first call; None without an index.

        Raises:
            ValueError: There is no such split.
            DamagedError: The index is damaged, or not that of the shards.
        """
        # 'train[:50%]' is a part of 'train'. Mock data have no splits, and every name.
        whole, _, _ = name.partition('[')
        if self.splits and whole not in self.splits:
            raise ValueError(f'{self.folder}: has no split {name!r}, only {list(self.splits)}')
        if name not in self._indexed:
            self._indexed[name] = self._read_index(name)
        return self._indexed[name]

    def _read_index(self, name: str) -> IndexedSplit | None:
        """Reads the chunk index of a split; None if there is none, as for mock data."""
        split = self.splits.get(name)
        if split is None or not split.file_names or not self.files:
            return None
        file_name = chunk_index.index_file_name(name, split.build)
        index = self.files.read(file_name, chunk_index.ChunkIndex.parse)
        if index is None:
            return None
        # An index of other shards would lead reads to places of other records.
        if list(split.shard_lengths) != index.shard_lengths.tolist():
            raise DamagedError(
                f'{self.folder}: {schema.INFO_FILE} has '
                f'{format_count(len(split.shard_lengths), "shard")} of '
                f'{format_count(split.num_records, "record")} for split {name!r}, its chunk index '
                f'{len(index.shard_lengths)} of {index.shard_lengths.sum()}; build it again'
            )
        return IndexedSplit(index, self.folder, split.file_names)

    def identity(self, split: str) -> str:
        """Returns the name of the split, and a digest of the name, the source and the shards.

        The state of a reader holds it, so that another data set is not continued by mistake.
        """
        name = f'{self.full_name} {split}'
        contents: list[Any] = [name, self.metadata.get(schema.META_SOURCE_FINGERPRINT)]
        # A mocked data set has no shards.
        if split in self.splits:
            contents += self.splits[split].shard_lengths
        digest = json_digest.sha256(contents)
        return f'{name} {digest[:16]}'

    def stats(self, text: texts.TextSpec = '') -> DatasetStats:
        """Returns the statistics of the latents and of a text, or of a mixture of texts."""
        metadata = self.metadata
        # A mocked data set has none.
        if schema.META_LATENT_MEAN not in metadata:
            logging.warning('%s has no latent statistics: taking mean 0, std 1', self.full_name)
        dtype, (crops, _, *size) = self.latents
        latent_mean = metadata.get(schema.META_LATENT_MEAN, [0] * self.channels)
        latent_std = metadata.get(schema.META_LATENT_STD, [1] * self.channels)
        mixture = self.choose_texts(text)
        # All texts of a mixture have the same encoder.
        first = mixture.texts[0]
        mean, std = mixture.mean_and_std()
        # Token ids have no mean that says anything.
        if mixture.feature != schema.TEXT_EMBEDDING:
            mean = std = np.zeros(0)
        return DatasetStats(
            latent_mean=np.asarray(latent_mean, np.float32),
            latent_std=np.asarray(latent_std, np.float32),
            text_mean=mean.astype(np.float32),
            text_std=std.astype(np.float32),
            latents_shape=(crops, self.channels, *size),
            latent_dtype=dtype,
            text_encoder=first.encoder or '',
            text_revision=first.revision or '',
            text_max_tokens=mixture.max_tokens,
            num_tokens=mixture.size if mixture.feature == schema.TOKENS else 0,
            vocabulary=first.vocabulary,
            text_words=first.words,
            source_fingerprint=metadata.get(schema.META_SOURCE_FINGERPRINT),
            vae=metadata.get(schema.META_VAE, ''),
            latent_scale=metadata.get(schema.META_LATENT_SCALE),
            moments=self.moments,
            license=metadata.get(schema.META_LICENSE, ''),
            citation=metadata.get(schema.META_CITATION, ''),
        )

    def _text_size(self, name: str) -> int:
        """Returns the length of the vectors of a text's feature; 0 if there is none."""
        if name not in self.features:
            return 0
        dtype, shape, _ = self._tensor(name)
        if dtype != schema.TEXT_DTYPES[name] or len(shape) != 1:
            raise ValueError(
                f'{self.folder}: feature {name!r} is {dtype} {shape}, expected the bytes of a '
                f'vector of {schema.TEXT_DTYPES[name]}'
            )
        return shape[0]

    def _tensor(self, name: str) -> tuple[str, tuple[int, ...], str]:
        """Returns dtype, shape and encoding of a tensor; '', () and 'bytes' of another feature."""
        no_tensor = {'dtype': '', 'encoding': 'bytes'}
        try:
            feature = self.features.get(name, {})
            tensor = feature.get('tensor', no_tensor)
            # protobuf leaves out the shape of a single number.
            dimensions = tensor.get('shape', {}).get('dimensions', ())
            shape = tuple(map(int, dimensions))
            return tensor['dtype'], shape, tensor.get('encoding', '')
        except _STRUCTURE_ERRORS as error:
            path = f'{self.folder}/{schema.FEATURES_FILE}'
            raise manifest.damaged_file(path, f'feature {name!r}: {error!r}') from error


def open_data(data: Data) -> StoredDataset:
    """Opens the data set in a folder, local, on gs:// or on hf://, or of a TFDS builder.

    A data set on the hub is read at one commit from here on; `folder` names it.
    Returns a `StoredDataset` unchanged, so that callers can reuse its metadata. Raises a
    `DamagedError` or an OSError, such as a FileNotFoundError where there is no data set, and a
    ValueError for a place of no storage.
    """
    if isinstance(data, StoredDataset):
        return data
    builder: Any = None
    if isinstance(data, str | os.PathLike):
        opened = storage.open_folder(data)
        folder = opened.folder
        # Whoever pushes to its branch adds another version, and takes no file away from this one.
        # A folder that is not there gets its own error below, with advice.
        with contextlib.suppress(FileNotFoundError):
            folder = opened.pin().folder
    else:
        builder = data
        folder = os.fspath(builder.data_dir).rstrip('/')
    info_content = manifest.read_small_file(f'{folder}/{schema.INFO_FILE}')
    if info_content is not None:
        return _open_data_folder(folder, info_content, builder)
    if builder is None:
        advice = 'there is no such folder; build the data set with `tfds build coyo11m_tfds`'
        if storage.open_folder(folder).exists():
            advice = 'expected the folder of a built data set, .../coyo11m_tfds/CONFIG/1.0.0'
        raise FileNotFoundError(f'{folder}: {advice}')
    # A builder without files is one that `tfds.testing.mock_data` mocks.
    info = builder.info
    features = info.features.to_json()['content']['features']
    return StoredDataset(folder, info.full_name, {}, features, info.metadata or {}, {}, builder)


def _open_data_folder(folder: str, info: bytes, builder: Any) -> StoredDataset:
    """Reads the small files of a data set; `info` is the content of `schema.INFO_FILE`."""
    try:
        splits = {split.name: split for split in parse_splits(info)}
        fields = json.loads(info)
        names = [fields.get(name) for name in ('name', 'configName', 'version')]
        # A data set without configs has no name of one.
        full_name = '/'.join(filter(None, names))
        # The names of all other files have the ID of the build.
        build = next(iter(splits.values())).build
        files = manifest.SmallFiles(folder, build)
        # Already read, because only it tells the build whose record has its checksum.
        files.check(schema.INFO_FILE, strip_alternative_formats(info))
    except _STRUCTURE_ERRORS as error:
        raise manifest.damaged_file(f'{folder}/{schema.INFO_FILE}', error) from error
    features = files.read(schema.FEATURES_FILE, _parse_features)
    if features is None:
        raise _missing_file(f'{folder}/{schema.FEATURES_FILE}')
    metadata = files.read(schema.METADATA_FILE, _parse_object) or {}
    # These two have the same names in every build: `--overwrite` replaces one after the other.
    if metadata.get(schema.META_BUILD, build) != build:
        raise OSError(
            f'{folder}: {schema.METADATA_FILE} and {schema.INFO_FILE} are of two builds, because '
            'the data set is being replaced. Open it again in a moment, or build it again.'
        )
    all_columns = columns.read_columns(folder, build)
    return StoredDataset(folder, full_name, splits, features, metadata, all_columns, builder, files)


def check_small_files(folder: str) -> None:
    """Checks the files from which TFDS opens a data set, because its own errors do not name them.

    Raises a `DamagedError` or an OSError for one that cannot be read. Does not compare checksums.
    """
    for name, parse in (
        (schema.INFO_FILE, parse_splits),
        (schema.FEATURES_FILE, _parse_features),
        (schema.METADATA_FILE, _parse_object),
    ):
        content = manifest.read_parsed(f'{folder}/{name}', parse)
        # A data set of another program may have no metadata.
        if content is None and name != schema.METADATA_FILE:
            raise _missing_file(f'{folder}/{name}')


def _missing_file(path: str) -> FileNotFoundError:
    return FileNotFoundError(f'{path}: is missing. Restore it or build the data set again.')


def _parse_features(data: bytes) -> dict:
    """Returns the features in `schema.FEATURES_FILE` by name, as it describes them."""
    top = _parse_object(data).get('featuresDict')
    features = top.get('features') if isinstance(top, dict) else None
    if not isinstance(features, dict):
        raise ValueError('it names no features')
    return features


def _parse_object(data: bytes) -> dict:
    """Returns a JSON object; raises a ValueError for anything else."""
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError('expected a JSON object')
    return content
