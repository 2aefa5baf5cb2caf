"""The data set as TFDS sees it: configs, features, splits.

    tfds build coyo11m_tfds --manual_dir=SOURCE --data_dir=OUT

    config = Coyo11mConfig(name='words', source='SOURCE', text_embeddings='WORDS')
    Builder(data_dir='OUT', config=config).download_and_prepare()

`tfds.builder_from_directory` reads a built data set without this module and without torch.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from etils import epath
from tensorflow_datasets.core import dataset_builder

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert import data_folder
from coyo11m_tfds.convert.build_settings import (
    CAPTION_FLAGS,
    BuildSettings,
    check_names,
    check_source,
)
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.dataset.columns import IN_PLACE
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.process import job, machine, programs, progress, tfds_command
from coyo11m_tfds.process.errors import FieldRule

if TYPE_CHECKING:
    from coyo11m_tfds.convert import driver

# How to give `tfds build` a config that is not predefined.
CONFIG_EXAMPLE = """--config='{"name": "qwen", "text_embeddings": "qwen"}\'"""

# That of TFDS, into which the ID of the build is put.
_TEMPLATE = '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}'

# Fields on which the records do not depend, so that a derived name leaves them out.
_NOT_IN_NAME = (
    *('source', 'num_workers', 'scratch_dir', 'max_bad_fraction', 'check_crc'),
    *schema.META_RIGHTS,
)

# It becomes the name of a folder, so one that is made of fields ends after 100 characters.
_NAME_RULE = FieldRule(
    "letters, digits, '_', '-' and '.'",
    lambda x: isinstance(x, str) and re.fullmatch('[A-Za-z0-9_][A-Za-z0-9_.-]*', x) is not None,
)
_TEXT_DOCS = {
    schema.TEXT_EMBEDDING: 'Embedding of the caption, as the encoder gave it (not standardized).',
    schema.TOKENS: 'Token ids of the caption, padded with -1.',
}

# Fields of `DownloadConfig` that have no effect here, and what has.
_UNSUPPORTED = {
    'num_shards': 'set shard_bytes in the config',
    'min_shard_size': 'set shard_bytes in the config',
    'max_shard_size': 'set shard_bytes in the config',
    'ignore_duplicates': 'remove duplicate keys from the source',
}

# Folders of data sets that a program of TFDS has removed.
_to_be_replaced: set[str] = set()


@dataclasses.dataclass(eq=False)
class Coyo11mConfig(BuildSettings, tfds.core.BuilderConfig):
    """`BuildSettings` and the name of the config, which is also the name of its folder.

    coyo11m_tfds/README.md describes the fields. Without a name, the fields that differ from their
    defaults make one: 'caption_column-alt'.
    """

    name: str = ''

    def __new__(cls, *args, **fields):
        # TFDS passes --config='{...}' on unchecked, and `__init__` would raise a TypeError.
        check_names(fields, [field.name for field in dataclasses.fields(cls)], 'config')
        return super().__new__(cls)

    def __post_init__(self):
        self.name = self.name or self._name_of_fields()
        _NAME_RULE.check('name', self.name)
        super().__post_init__()

    def changed_fields(self) -> dict[str, Any]:
        """Returns the fields of `BuildSettings` that differ from their defaults, by name."""
        # Not those of TFDS's own class, such as the description.
        values = {}
        for field in dataclasses.fields(BuildSettings):
            value = getattr(self, field.name)
            if value != field.default:
                values[field.name] = value
        return values

    def _name_of_fields(self) -> str:
        """Returns a name that is made of the fields that were changed; 'latents' of none."""
        changed = self.changed_fields()
        named = {name: changed[name] for name in changed if name not in _NOT_IN_NAME}
        words = []
        # TFDS refuses another config of the name of the default one, so a name is made of fields
        # without effect on the records, too, if there are no others.
        for name, value in (named or changed).items():
            last_part = os.path.basename(str(value).rstrip('/'))
            words.append(f'{name}-{last_part}')
        return re.sub('[^A-Za-z0-9_.-]+', '-', '-'.join(words))[:100] or 'latents'


class _DataPath(type(epath.Path())):  # type: ignore[misc]  # of this system's paths
    """The folder of a data set, whose removal is put off until a new data set is complete.

    `tfds build --overwrite` removes it before it looks at the source, and an unreadable source
    would cost the old data set. Paths that are made from this one are ordinary.
    """

    is_of_data_set = False

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes a folder; that of a data set is only noted in `_to_be_replaced`."""
        if self.is_of_data_set:
            _to_be_replaced.add(os.fspath(self))
        else:
            super().rmtree(missing_ok)


class _DatasetInfo(tfds.core.DatasetInfo):
    """The info of a data set; what TFDS' command prints at the end is how to open the data set."""

    def __init__(self, builder: 'Builder', **fields):
        super().__init__(builder=builder, **fields)
        self._own_builder = builder

    def __repr__(self) -> str:
        if programs.runs_build():
            return self._own_builder.how_to_open()
        return super().__repr__()


class Builder(dataset_builder.FileReaderBuilder):
    """Builds the data set from files of latents, and captions or labels (docs/sources.md)."""

    VERSION = tfds.core.Version(schema.VERSION)
    RELEASE_NOTES = {schema.VERSION: 'Initial release.'}  # noqa: RUF012
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"""
    The folder must hold files of latents with captions or labels (docs/sources.md), such as
    {schema.LATENTS_FOLDER}/*.pt and {schema.CAPTIONS_FILE} in a copy of
    https://huggingface.co/datasets/KBlueLeaf/coyo11m-256px-ccrop-latent made with
    `hf download --repo-type=dataset KBlueLeaf/coyo11m-256px-ccrop-latent --local-dir=FOLDER`.
    """
    # One config only: a plain `tfds build` builds all that are listed here.
    BUILDER_CONFIGS = [  # noqa: RUF012
        Coyo11mConfig(name='latents', description='Latents and captions.')
    ]

    # The folder that a build or its caller has named last; '' before.
    _source = ''

    def __init__(self, *args, **options):
        # TFDS's command makes the builder, and would show a traceback of what it refuses.
        with _ends_commands_in_one_line():
            super().__init__(*args, **options)

    @property
    def data_path(self) -> epath.Path:
        """Folder of the data set. Its removal makes the next build replace the data set."""
        path = _DataPath(super().data_path)
        path.is_of_data_set = True
        return path

    def _info(self) -> tfds.core.DatasetInfo:
        return _DatasetInfo(
            builder=self,
            description=(
                'Raw latents of a VAE, one or several crops of each image, with a caption and, in '
                'configs that ask for it, an embedding of the caption.'
            ),
            features=self._initial_features(),
            citation=self.builder_config.citation or self.get_metadata().citation,
            license=self.builder_config.license or None,
            homepage='https://huggingface.co/datasets/KBlueLeaf/coyo11m-256px-ccrop-latent',
            metadata=tfds.core.MetadataDict(),
        )

    def _initial_features(self) -> tfds.features.FeaturesDict:
        """Returns the features of the data set on disk or, before the build, the usual ones."""
        if (self.data_path / schema.INFO_FILE).exists():
            self._check_small_files()
            return tfds.features.FeatureConnector.from_config(self.data_path)
        # Only the source tells the true width.
        dim = schema.DEFAULT_TEXT_DIM if self.builder_config.text_embeddings else None
        return make_features('float16', schema.LATENTS_SHAPE, dim, self.builder_config.latents)

    def _build_data_dir(self, given_data_dir: str | None) -> tuple[str, str]:
        if given_data_dir:
            # TFDS makes one slash of several: it would build into another folder of a bucket.
            storage.check_single_slashes(given_data_dir)
            # Of a URL of the hub it would make a local folder.
            storage.open_writable_folder(given_data_dir)
            # Its command knows the home folder, but not its builders.
            given_data_dir = storage.expand_home(given_data_dir)
        return super()._build_data_dir(given_data_dir)

    def _check_small_files(self) -> None:
        """Raises an error that names the file if one of the data set on disk cannot be read."""
        folder = os.fspath(self.data_path)
        try:
            stored_dataset.check_small_files(folder)
        except (DamagedError, FileNotFoundError) as error:
            # Also with --overwrite, of which TFDS has not told its builder yet.
            raise ValueError(
                f'{error} Before you build it again, remove {folder}/{schema.INFO_FILE}.'
            ) from error

    def download_and_prepare(
        self,
        *,
        download_dir: epath.PathLike | None = None,
        download_config: tfds.download.DownloadConfig | None = None,
        file_format: str | tfds.core.FileFormat | None = None,
        **options,
    ) -> None:
        """Builds the data set if it does not exist; see `tfds.core.DatasetBuilder`.

        A later call resumes an interrupted build. With `overwrite`, the old data set stays until
        the new one is complete. An existing data set must have the same settings and, if a source
        is named, the same source.

        Raises:
            ValueError: The source, the config or an option is bad, or the existing data set was
                built with other settings or from another source.
            OSError: A file cannot be read or written; finished shards are kept.
            RuntimeError: A worker died, or the first process of the job failed.
        """
        config = download_config or tfds.download.DownloadConfig()
        with _ends_commands_in_one_line():
            self._load_or_build(download_dir, config, file_format, options)

    def _load_or_build(
        self,
        download_dir: epath.PathLike | None,
        config: tfds.download.DownloadConfig,
        file_format: str | tfds.core.FileFormat | None,
        options: dict[str, Any],
    ) -> None:
        """Loads the data set if it exists and need not be replaced; builds it otherwise."""
        mode = config.download_mode
        overwrite = mode.overwrite_dataset or os.fspath(self.data_path) in _to_be_replaced
        is_built = (self.data_path / schema.INFO_FILE).exists() and not overwrite
        if is_built:
            # A build that was killed at its very end has left files.
            data_folder.tidy(os.fspath(self.data_path))
        # `tfds.testing.mock_data` puts a function that does nothing in the place of TFDS' own.
        original = dataset_builder.DatasetBuilder.download_and_prepare
        is_mocked = original.__module__ != dataset_builder.__name__
        is_update = mode == tfds.GenerateMode.UPDATE_DATASET_INFO
        is_left_to_tfds = is_mocked or is_update
        if not is_built and not is_left_to_tfds:
            self._check_options(config, file_format, options)
            self._source = self._find_source(download_dir, config)
            self._build(self._source, config, overwrite)
            return
        # It exists: the settings of this call are compared with those that it was built with.
        if not is_left_to_tfds:
            self._source = str(self.builder_config.source or config.manual_dir or '')
            self._load_existing(config.max_examples_per_split, self._source)
        super().download_and_prepare(
            download_dir=download_dir, download_config=config, file_format=file_format, **options
        )

    def how_to_open(self) -> str:
        """Returns lines of Python and of the shell that read the data set and train on it."""
        has_text = not schema.TEXT_DTYPES.keys().isdisjoint(self.info.features)
        # The model of `default` is too large for a CPU.
        config = 'default' if has_text and machine.accelerators() else 'small'
        lines = [f'tfds.builder_from_directory({os.fspath(self.data_path)!r})']
        if not has_text:
            lines.append(f'To train on captions, first build again: {self._build_with_text()}')
            lines.append('Without captions:')
        data = shlex.quote(f'--config.data.dir={os.fspath(self.data_path)}')
        lines.append(f'python -m train_lib.main --config={config} --workdir=W {data}')
        return '\n'.join(lines)

    def _build_with_text(self) -> str:
        """Returns the command that builds from the same source with the words of captions."""
        words = ['python', '-m', 'coyo11m_tfds.build']
        if self._source:
            words.append(f'--manual_dir={self._source}')
        # The data set is in `NAME/CONFIG/VERSION` of it.
        words.append(f'--data_dir={os.fspath(self.data_path.parents[2])}')
        for name, value in self.builder_config.changed_fields().items():
            if name in CAPTION_FLAGS:
                words.append(f'--{name}={value}')
        words.append('--encoder=words')
        return shlex.join(words)

    def _download_and_prepare(self, dl_manager, download_config=None) -> None:
        raise NotImplementedError  # abstract in TFDS; `download_and_prepare` does not call it

    def _find_source(
        self, download_dir: epath.PathLike | None, download_config: tfds.download.DownloadConfig
    ) -> str:
        """Returns the folder of the source; ValueError if nobody has named one."""
        source = self.builder_config.source or download_config.manual_dir
        if source:
            return str(source)
        # TFDS' manager knows the default, and makes folders.
        try:
            return str(self._make_download_manager(download_dir, download_config).manual_dir)
        except AssertionError:
            raise ValueError(
                '--manual_dir is missing: name the folder of the source, such as one with '
                f'{schema.LATENTS_FOLDER}/*.pt and {schema.CAPTIONS_FILE}; it may be local, on '
                'gs:// or on hf://.'
            ) from None

    def _create_builder_config(
        self, builder_config: str | tfds.core.BuilderConfig | None, version: str | None
    ) -> tfds.core.BuilderConfig | None:
        """Returns the config of a name, or the given one; ValueError for an unknown name."""
        name = ''
        if isinstance(builder_config, str):
            name, _, _ = builder_config.partition(':')
        names = [config.name for config in self.BUILDER_CONFIGS]
        if name and name not in names:
            raise ValueError(
                f"config '{name}' is not predefined; predefined: {', '.join(names)}. To read a "
                'data set with this config, name its folder (tfds.builder_from_directory, '
                f'--config.data.dir). To define the config, give its fields: {CONFIG_EXAMPLE}'
            )
        return super()._create_builder_config(builder_config, version)

    @progress.show_progress()
    def _build(
        self, source: str, download_config: tfds.download.DownloadConfig, overwrite: bool
    ) -> None:
        """Builds the data set, or waits until the first process of the job has built it."""
        # Here, because a built data set is read where torch is not installed.
        from coyo11m_tfds.convert import driver

        limit = download_config.max_examples_per_split
        final = os.fspath(self.data_path)
        # False where another process of the job has built it.
        is_built_here = driver.build(
            final,
            source,
            self.builder_config,
            self._write_info,
            limit=limit,
            overwrite=overwrite,
            beam_options=download_config.beam_options,
            beam_runner=download_config.beam_runner,
        )
        _to_be_replaced.discard(final)
        if is_built_here:
            self._save_default_config()
        else:
            self._load_existing(limit, source)

    def _load_existing(self, limit: int | None, source: str) -> None:
        """Loads the data set on disk; raises ValueError if it has other settings or sources."""
        # Another process may have built it since this one made its info.
        self.info._features = self._initial_features()
        self.info.read_from_directory(self.data_path)
        # It is loaded lazily: `items` does so, `get` does not.
        metadata = dict(self.info.metadata.items())
        self.builder_config.check_recorded(self.data_path, metadata, limit)
        # Only the first process of a job must reach the source.
        if source and not job.process_index():
            recorded = metadata.get(schema.META_SOURCE)
            check_source(self.data_path, recorded, source, self.builder_config.captions)
        self._save_default_config()

    def _save_default_config(self) -> None:
        """Records for programs without this class which config is the default."""
        if job.process_index():
            return
        folder = self.data_path.parent.parent
        name = self.get_default_builder_config().name
        try:
            if not dataset_builder.load_default_config_name(folder):
                dataset_builder._save_default_config_name(folder, default_config_name=name)
        # Readers may lack write access, and TensorFlow's errors are no OSErrors.
        except Exception as error:
            logging.warning('%s: no default config is written: %s', folder, error)

    def _check_options(
        self,
        download_config: tfds.download.DownloadConfig,
        file_format: str | tfds.core.FileFormat | None,
        options: dict[str, Any],
    ) -> None:
        """Raises a ValueError for an option of TFDS that has no effect here."""
        if options:
            raise ValueError(f'{", ".join(options)}: not supported; set the umask of the process.')
        defaults = tfds.download.DownloadConfig()
        for name, advice in _UNSUPPORTED.items():
            value = getattr(download_config, name)
            if value != getattr(defaults, name):
                raise ValueError(f'{name}={value} is not supported; {advice}.')
        limit = download_config.max_examples_per_split
        if limit is not None and limit < 1:
            raise ValueError(f'max_examples_per_split={limit}: expected at least 1.')
        kind = tfds.core.FileFormat(file_format or self.info.file_format)
        if kind != tfds.core.FileFormat.TFRECORD:
            raise ValueError(
                f'file_format={kind.value} is not supported; leave it out, because only TFRecord '
                'files have a chunk index.'
            )
        if multiprocessing.current_process().daemon:
            raise ValueError('leave out --num_processes; set num_workers in the config.')

    def _write_info(self, dataset: 'driver.BuiltDataset') -> None:
        """Adds to the info what only the source determines, and writes TFDS' files."""
        text = dataset.plan.text
        # TFDS has no setter for features, and the source alone tells dtype and width.
        latent_dtype, latents_shape = dataset.plan.latents
        self.info._features = make_features(
            latent_dtype,
            latents_shape,
            text.dim if text else None,
            self.builder_config.latents,
            text.feature if text else schema.TEXT_EMBEDDING,
        )
        # Files of different builds must not have one name, so that of a shard gets the ID.
        template = schema.of_build(_TEMPLATE, dataset.plan.build)
        splits = []
        for split, shards in dataset.splits.items():
            info = tfds.core.SplitInfo(
                name=split,
                shard_lengths=[shard.num_records for shard in shards],
                num_bytes=sum(shard.num_bytes for shard in shards),
                filename_template=self._get_filename_template(split).replace(template=template),
            )
            splits.append(info)
        self.info.set_splits(tfds.core.SplitDict(splits))
        self.info.metadata.clear()
        self.info.metadata.update(dataset.metadata)
        self.info.write_to_directory(dataset.folder)
        # A copy of the license, which no reader opens; a later build would not replace it.
        epath.Path(dataset.folder, 'LICENSE').unlink(missing_ok=True)


def _ends_commands_in_one_line() -> contextlib.AbstractContextManager[None]:
    """Returns the context of what a command runs; programs of others get the error itself."""
    # A pool waits without end for a worker that ends itself.
    is_in_pool = multiprocessing.current_process().daemon
    if programs.runs_build() and not is_in_pool:
        return tfds_command.ends_in_one_line()
    return contextlib.nullcontext()


def make_features(
    latent_dtype: str,
    latents_shape: Sequence[int],
    text_dim: int | None,
    latents: str,
    text: str = schema.TEXT_EMBEDDING,
) -> tfds.features.FeaturesDict:
    """Returns the features of a record.

    Args:
        latent_dtype: One of `schema.LATENT_DTYPES`.
        latents_shape: `(crops, C, H, W)`.
        text_dim: Width of the text embeddings, or number of tokens; None without text.
        latents: Field of the config: 'in_place' for records without latents.
        text: One of `schema.TEXT_DTYPES`.
    """
    features = {
        schema.KEY: tfds.features.Scalar(
            np.int64, doc='Identifies the image; the key of the source.'
        ),
        schema.CAPTION: tfds.features.Text(doc='What the image shows.'),
    }
    # Latents in place are no feature, as TFDS could not read them: only the text says so.
    doc = None
    if latents == IN_PLACE:
        doc = f'Latents lie {schema.IN_PLACE_DOC}.'
    else:
        crops = {1: 'one crop', 3: 'three crops'}.get(latents_shape[0], f'{latents_shape[0]} crops')
        features[schema.LATENTS] = tfds.features.Tensor(
            shape=tuple(latents_shape),
            dtype=np.dtype(getattr(ml_dtypes, latent_dtype, latent_dtype)),
            encoding=tfds.features.Encoding.BYTES,
            doc=f'Latents of {crops}, not multiplied by the scaling factor of the VAE.',
        )
    if text_dim is not None:
        features[text] = tfds.features.Tensor(
            shape=(text_dim,),
            dtype=np.dtype(schema.TEXT_DTYPES[text]),
            encoding=tfds.features.Encoding.BYTES,
            doc=_TEXT_DOCS[text],
        )
    return tfds.features.FeaturesDict(features, doc=doc)
