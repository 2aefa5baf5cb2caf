"""The data set as TFDS sees it: configs, features, splits.

    tfds build coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT
    tfds build coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT \
        --config='{"name": "gemma", "text_vectors": "gemma.parquet"}'

    config = Coyo11mConfig(name='hash', source='SOURCE', text_vectors='hash.parquet')
    Builder(data_dir='OUT', config=config).download_and_prepare()

Reading a built data set needs neither this module nor torch: `tfds.builder_from_directory`.
"""

import dataclasses
import multiprocessing
import re
import tempfile
import time

import ml_dtypes
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_builder

from coyo11m_tfds import schema

_FEATURES_FILE = 'features.json'  # TFDS' name
_CONFIG_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.-]*')
_LATENT_DTYPES = {'float16': np.float16, 'bfloat16': ml_dtypes.bfloat16}


@dataclasses.dataclass(eq=False)
class Coyo11mConfig(tfds.core.BuilderConfig):
    """What to make of the source.

    Attributes:
        name: of the config, and so of the folder of the data set.
        source: folder of the source; '' for TFDS' `manual_dir`.
        caption_column: column of the Parquet file that becomes `caption`.
        validation_fraction: share of the keys in the validation split, in [0, 1).
        shard_bytes: largest size of a shard, about.
        text_vectors: '' for none; 'pt' for `embeddings` in the `.pt` files; else the path of a
            sidecar that `coyo11m_tfds.embed_captions` made.
        num_workers: processes that write; 0 for the environment variable COYO11M_NUM_PROC, else
            all cores.
    """

    name: str = ''
    source: str = ''
    caption_column: str = schema.DEFAULT_CAPTION_COLUMN
    validation_fraction: float = 0.01
    shard_bytes: int = 128 * 1024 * 1024
    text_vectors: str = ''
    num_workers: int = 0

    def __new__(cls, *args, **fields):
        # Named here, because TFDS passes --config='{...}' on as it is.
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(
                    f"config has an unknown field '{name}'; the fields are {', '.join(known)}."
                )
        return super().__new__(cls)

    def __post_init__(self):
        is_name = isinstance(self.name, str) and _CONFIG_NAME.fullmatch(self.name)
        self._check('name', is_name, "the folder's name: letters, digits, '_', '-' and '.'")
        for name in ('source', 'caption_column', 'text_vectors'):
            self._check(name, isinstance(getattr(self, name), str), 'a string')
        for name in ('shard_bytes', 'num_workers'):
            self._check(name, isinstance(getattr(self, name), int), 'an integer')
        self._check('shard_bytes', self.shard_bytes > 0, 'at least 1')
        self._check('num_workers', self.num_workers >= 0, 'at least 0')
        is_number = isinstance(self.validation_fraction, (int, float))
        in_range = is_number and 0 <= self.validation_fraction < 1
        self._check('validation_fraction', in_range, 'a number in [0, 1)')

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f'config: {name} is {getattr(self, name)!r}, expected {expected}.')


class Builder(dataset_builder.FileReaderBuilder):
    """Builds the data set from `.pt` files and a Parquet file of captions."""

    VERSION = tfds.core.Version(schema.VERSION)
    RELEASE_NOTES = {schema.VERSION: 'Initial release.'}  # noqa: RUF012
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"""
    The folder must hold {schema.LATENTS_FOLDER}/*.pt and {schema.CAPTIONS_FILE}, e.g. a copy of
    https://huggingface.co/datasets/KBlueLeaf/coyo11m-256px-ccrop-latent made with
    `hf download --repo-type=dataset KBlueLeaf/coyo11m-256px-ccrop-latent --local-dir=FOLDER`.
    """
    # One config only: a plain `tfds build` builds all that are listed here.
    BUILDER_CONFIGS = [  # noqa: RUF012
        Coyo11mConfig(name='latents', description='Latents and captions.')
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                'Raw latents of a VAE of the SDXL family, three crops of each image, with a '
                'caption and, in configs that ask for it, a vector of the caption.'
            ),
            features=self._initial_features(),
            citation=self.get_metadata().citation,
            homepage='https://huggingface.co/datasets/KBlueLeaf/coyo11m-256px-ccrop-latent',
            metadata=tfds.core.MetadataDict(),
        )

    def _initial_features(self) -> tfds.features.FeaturesDict:
        """Those of the data set on disk; before it is built, what its source usually has."""
        if (self.data_path / _FEATURES_FILE).exists():
            return tfds.features.FeatureConnector.from_config(self.data_path)
        with_text = self.builder_config.text_vectors
        return make_features('float16', schema.DEFAULT_TEXT_DIM if with_text else None)

    def _download_and_prepare(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig | None = None,
    ) -> None:
        # Here, so that reading the data set works where torch is not installed.
        from coyo11m_tfds import plan as planning
        from coyo11m_tfds import prepare, report, sources

        download_config = download_config or tfds.download.DownloadConfig()
        self._reject_what_is_not_supported(download_config)
        config = self.builder_config
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f'{schema.NAME}-') as scratch_dir:
            plan = planning.make_plan(
                sources.find(config.source or dl_manager.manual_dir),
                caption_column=config.caption_column,
                text_vectors=config.text_vectors,
                validation_fraction=config.validation_fraction,
                shard_bytes=config.shard_bytes,
                scratch_dir=scratch_dir,
                shard_path=self._shard_path,
                max_examples_per_split=download_config.max_examples_per_split,
            )
            results = prepare.write_shards(plan, config.num_workers)
        prepare.write_chunk_indexes(results, self.data_dir)
        self._set_info(
            make_features(plan.latent_dtype, plan.text_vectors and plan.text_vectors.dim),
            self._make_splits(prepare.by_split(results)),
            prepare.make_metadata(plan, results, config.caption_column),
        )
        print(report.summary(plan, results, seconds=time.monotonic() - start))

    def _reject_what_is_not_supported(self, options: tfds.download.DownloadConfig) -> None:
        defaults = tfds.download.DownloadConfig()
        for name, instead in {
            'num_shards': 'set shard_bytes in the config',
            'min_shard_size': 'set shard_bytes in the config',
            'max_shard_size': 'set shard_bytes in the config',
            'ignore_duplicates': 'remove repeated keys from the source',
        }.items():
            value = getattr(options, name)
            if value != getattr(defaults, name):
                raise ValueError(f'{name}={value} is not supported; {instead}.')
        limit = options.max_examples_per_split
        if limit is not None and limit < 1:
            raise ValueError(f'max_examples_per_split={limit}: expected at least 1.')
        if self.info.file_format != tfds.core.FileFormat.TFRECORD:
            raise ValueError(
                f'file_format={self.info.file_format.value} is not supported; leave it out, '
                'the chunk index is one of TFRecord files.'
            )
        if multiprocessing.current_process().daemon:
            raise ValueError('leave out --num_processes; set num_workers in the config.')

    def _shard_path(self, split: str, index: int, num_shards: int) -> str:
        template = self._get_filename_template(split)
        return str(template.sharded_filepath(shard_index=index, num_shards=num_shards))

    def _make_splits(self, results_by_split: dict[str, list]) -> tfds.core.SplitDict:
        return tfds.core.SplitDict(
            [
                tfds.core.SplitInfo(
                    name=split,
                    shard_lengths=[result.num_records for result in results],
                    num_bytes=sum(result.num_bytes for result in results),
                    filename_template=self._get_filename_template(split),
                )
                for split, results in results_by_split.items()
            ]
        )

    def _set_info(
        self, features: tfds.features.FeaturesDict, splits: tfds.core.SplitDict, metadata: dict
    ) -> None:
        # TFDS has no setter for features, but only the source tells their dtype and width.
        self.info._features = features
        self.info.set_splits(splits)
        self.info.metadata.clear()
        self.info.metadata.update(metadata)


def make_features(latent_dtype: str, text_dim: int | None) -> tfds.features.FeaturesDict:
    """Returns the features of a record; without `text_embedding` if `text_dim` is None."""
    features = {
        schema.KEY: tfds.features.Scalar(
            np.int64, doc='Identifies the image; the key of the source.'
        ),
        schema.LATENTS: tfds.features.Tensor(
            shape=schema.LATENTS_SHAPE,
            dtype=_LATENT_DTYPES[latent_dtype],
            encoding=tfds.features.Encoding.BYTES,
            doc=tfds.features.Documentation(
                desc='Latents of three crops, not multiplied by the scaling factor of the VAE.'
            ),
        ),
        schema.CAPTION: tfds.features.Text(doc='What the image shows.'),
    }
    if text_dim is not None:
        features[schema.TEXT_EMBEDDING] = tfds.features.Tensor(
            shape=(text_dim,),
            dtype=np.float16,
            encoding=tfds.features.Encoding.BYTES,
            doc='Vector of the caption, as the encoder gave it (not standardized).',
        )
    return tfds.features.FeaturesDict(features)
