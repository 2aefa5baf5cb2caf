"""A built data set, opened without TensorFlow: what its metadata files say.

data = stored_dataset.read('OUT/coyo11m_tfds/latents/1.0.0')
data.latent_dtype, data.text_dim              # 'float16', 640
split = data.open_split('train')              # None where there is no chunk index
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from coyo11m_tfds import columns, schema, texts
from coyo11m_tfds.columns import AddedColumn, Column
from coyo11m_tfds.reading import indexed_split, stored_splits
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.record_layout import RecordLayout
from coyo11m_tfds.reading.stored_splits import StoredSplit
from coyo11m_tfds.storage import source_files, stored_files

FOLDER_HELP = (
    'folder of a built data set, .../coyo11m_tfds/CONFIG/1.0.0, or the --data_dir of `tfds build` '
    'where it holds one data set only'
)

FEATURES = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING, schema.CAPTION)
READABLE = (*FEATURES, schema.TOKENS)


@dataclasses.dataclass(frozen=True)
class StoredDataset:
    """The metadata of a data set.

    Attributes:
        folder: that it lies in.
        full_name: name, config and version, as TFDS joins them.
        splits: by name.
        features: its features by name, each as `features.json` describes it.
        metadata: what `metadata.json` says; {} where there is none.
        columns: features that lie elsewhere than in the records, by name.
    """

    folder: str
    full_name: str
    splits: Mapping[str, StoredSplit]
    features: Mapping[str, dict]
    metadata: Mapping[str, Any]
    columns: Mapping[str, Column | AddedColumn]

    @property
    def build(self) -> str:
        """The ID in the names of the files of its build; '' where they have none."""
        return next(iter(self.splits.values())).build

    @property
    def latent_dtype(self) -> str:
        """'float16' or 'bfloat16'.

        Raises:
            ValueError: the data set has no latents, or they have another shape, dtype or encoding.
        """
        column = self.columns.get(schema.LATENTS)
        if isinstance(column, Column):
            return column.dtype
        dtype, shape = self._tensor(schema.LATENTS)
        if shape != schema.LATENTS_SHAPE or dtype not in schema.LATENT_DTYPES:
            raise ValueError(
                f'{self.folder}: feature {schema.LATENTS!r} is {dtype} {shape}, expected the bytes '
                f'of {schema.LATENTS_SHAPE} of {" or ".join(schema.LATENT_DTYPES)}'
            )
        return dtype

    @property
    def text_dim(self) -> int:
        """The width of the text embeddings, 0 for a data set without them."""
        return self._text_size(schema.TEXT_EMBEDDING)

    @property
    def num_tokens(self) -> int:
        """Tokens of a text in the records, 0 for a data set without them."""
        return self._text_size(schema.TOKENS)

    @property
    def record_layout(self) -> RecordLayout:
        """Where values lie in its records."""
        return RecordLayout(
            self.text_dim,
            num_tokens=self.num_tokens,
            with_latents=schema.LATENTS not in self.columns,
        )

    def choose_texts(self, spec: texts.Spec) -> texts.Chosen:
        """The texts that are asked for; raises a ValueError as `texts.choose` does."""
        own = texts.of_records(self.metadata, self.text_dim, self.num_tokens)
        return texts.choose(self.folder, spec, own, self.columns)

    def find_columns(
        self, features: Sequence[str], text: texts.Chosen
    ) -> dict[str, Column | AddedColumn]:
        """The columns that some features of a batch are read from, by name."""
        names = [*features, *(text.names if text.feature in features else [])]
        return {name: self.columns[name] for name in names if name in self.columns}

    def check_features(self, names: Sequence[str]) -> None:
        """Raises a ValueError for a feature that the data set does not have."""
        there = [name for name in READABLE if name in self.features]
        check_features(self.folder, [*there, *self.columns], names)

    def open_split(self, split: str) -> IndexedSplit | None:
        """Finds what the planned order needs; None where there is no chunk index.

        Raises:
            ValueError: there is no such split; its index is damaged, or of other shards.
            OSError: the index cannot be read.
        """
        if split.partition('[')[0] not in self.splits:
            raise ValueError(f'{self.folder}: no split {split!r}; there are {list(self.splits)}')
        if split not in self.splits or not self.splits[split].file_names:
            return None
        found = self.splits[split]
        first = os.path.join(self.folder, found.file_names[0])
        return indexed_split.load(self.folder, split, found.shard_lengths, first)

    def _text_size(self, name: str) -> int:
        if name not in self.features:
            return 0
        dtype, shape = self._tensor(name)
        if dtype != schema.TEXT_DTYPES[name] or len(shape) != 1:
            raise ValueError(
                f'{self.folder}: feature {name!r} is {dtype} {shape}, expected the bytes of a '
                f'vector of {schema.TEXT_DTYPES[name]}'
            )
        return shape[0]

    def _tensor(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype and the shape of a feature that is stored as bytes; otherwise '' and ()."""
        tensor = self.features.get(name, {}).get('tensor', {})
        if tensor.get('encoding') != 'bytes':
            return '', ()
        return tensor['dtype'], tuple(map(int, tensor['shape'].get('dimensions', ())))


def read(folder: str | os.PathLike[str]) -> StoredDataset | None:
    """Reads the metadata in a folder, local or on gs://; None if there is no data set.

    Raises:
        ValueError: a file is damaged.
        OSError: a file cannot be read.
    """
    path = os.fspath(folder).rstrip('/')
    data = _read(f'{path}/{schema.INFO_FILE}')
    if data is None:
        return None
    try:
        splits = {split.name: split for split in stored_splits.parse(data)}
    except ValueError as error:
        raise ValueError(f'{path}/{schema.INFO_FILE}: is damaged ({error}).') from error
    info = json.loads(data)
    names = [info.get('name'), info.get('configName'), info.get('version')]
    features = _read_json(f'{path}/{schema.FEATURES_FILE}').get('featuresDict', {}).get('features')
    if not isinstance(features, dict):
        raise ValueError(f'{path}/{schema.FEATURES_FILE}: is damaged (it names no features).')
    metadata = _read_json(f'{path}/{schema.METADATA_FILE}', {})
    full_name = '/'.join(filter(None, names))
    build = next(iter(splits.values())).build
    return StoredDataset(path, full_name, splits, features, metadata, columns.read(path, build))


def choose(folder: str | os.PathLike[str]) -> str:
    """The data set that is meant by a folder, local or `gs://`: itself, or the only one below it.

    Raises:
        ValueError: there are several below, or it is empty text or a URL of another kind.
        OSError: the storage cannot be reached.
    """
    folder = os.fspath(folder)
    if not folder:
        raise ValueError('the folder is empty text, expected that of a data set.')
    found = stored_files.folders_with(folder, schema.INFO_FILE) or [folder.rstrip('/')]
    if len(found) > 1:
        raise ValueError(
            f'{folder}: there are {len(found)} data sets, name one: {", ".join(found)}'
        )
    return found[0]


def _read(path: str) -> bytes | None:
    """The content of a small file; None if there is none."""
    try:
        file = source_files.describe(path)
    except ValueError:
        return None
    return bytes(stored_files.read(file, stored_files.Content).data)


def _read_json(path: str, default: dict | None = None) -> dict:
    data = _read(path)
    if data is None and default is not None:
        return default
    if data is None:
        raise FileNotFoundError(f'{path}: is missing; restore it or build the data set again.')
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ValueError(f'{path}: is damaged ({error}).') from error
    if not isinstance(content, dict):
        raise ValueError(f'{path}: is damaged (it holds no object).')
    return content


def check_features(
    data_dir: str | os.PathLike[str], there: Collection[str], asked: Sequence[str]
) -> None:
    """Raises a ValueError for a feature that is asked for and not there."""
    missing = [name for name in asked if name not in there]
    if missing:
        raise ValueError(
            f'{data_dir}: no feature {missing[0]!r}; there are {list(there)}. Data sets with text '
            'embeddings or tokens are built with the config field text_embeddings; python -m '
            'coyo11m_tfds.add_column adds columns.'
        )
