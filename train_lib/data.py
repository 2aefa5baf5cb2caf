"""The data set as a run sees it: batches on the devices, statistics, and what identifies it.

    data = TrainingData(config, mesh)
    batches = data.train_batches(start_step=1000)
    batch = next(batches)

That batch is what the 1001st step takes, however often the run was interrupted.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import ml_collections
import numpy as np
import tensorflow as tf
from absl import logging
from jax.sharding import Mesh

import input_pipeline
from coyo11m_tfds import dataset, schema
from train_lib import flow, sharding

Batches = Iterator[dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class PreviewSamples:
    """Records that are drawn again and again while the model learns.

    Attributes:
        captions: n strings.
        latents: the data's own answer, raw `(n, 4, H, W)`.
        text_embedding: float16 `(n, D)`, whole on every device.
    """

    captions: Sequence[str]
    latents: np.ndarray
    text_embedding: jax.Array


class TrainingData:
    """This process's share of a data set, as the configuration asks for it.

    Attributes:
        stats: to standardize latents and text vectors.
        latent_shape: `(height, width, channels)` of one sample.
        identity: plain values that say which data come in which order; see `checkpoint.py`.
    """

    def __init__(self, config: ml_collections.ConfigDict, mesh: Mesh):
        """Opens the data set; reads its metadata and no records.

        Raises:
            ValueError: there is no data set, it lacks text vectors or a validation split, or the
                batch size, the lanes and the chunks do not fit it, each other or the devices.
        """
        if not config.data.dir:
            raise ValueError(
                'data.dir is empty: set --config.data.dir to the folder of a built data set, '
                '.../coyo11m_tfds/CONFIG/1.0.0'
            )
        if config.batch_size % mesh.size:
            raise ValueError(
                f'batch_size={config.batch_size} cannot be split over {mesh.size} devices: '
                f'set it to a multiple of {mesh.size}'
            )
        self._mesh = mesh
        self._config = config
        self._builder = dataset.open_dataset(config.data.dir)
        order = input_pipeline.train_order(self._builder, **self._order())
        if order is not None:
            logging.info('An epoch has about %d steps.', order.epoch(0).steps)
        self._check_validation()
        self._share = {
            'process_index': jax.process_index(),
            'process_count': jax.process_count(),
        }
        stats = dataset.dataset_stats(self._builder)
        if not stats.text_dim:
            raise ValueError(
                f'{config.data.dir} holds no text vectors: build it with the config field '
                'text_vectors, as in --config=\'{"name": "hash", "text_vectors": "SIDE.parquet"}\''
            )
        self.stats = flow.Stats(
            stats.latent_mean, stats.latent_std, stats.text_mean, stats.text_std
        )
        channels, height, width = schema.LATENT_SHAPE
        self.latent_shape = height, width, channels
        self.identity = {
            'data': input_pipeline.position_settings(self._builder, **self._order())
            | {'caption_dropout': config.data.caption_dropout},
            'text_encoder': {'name': stats.text_encoder, 'width': stats.text_dim},
            'model': {'name': config.model.name},
        }

    def train_batches(self, start_step: int) -> Batches:
        """Batches without end, the first being that of the step after `start_step`."""
        batches = input_pipeline.train_dataset(
            self._builder,
            start_step=start_step,
            caption_dropout=self._config.data.caption_dropout,
            parallel_reads=self._config.data.parallel_reads,
            prefetch=self._config.data.prefetch,
            **self._order(),
            **self._share,
        )
        return self._to_device(batches)

    def eval_batches(self) -> Batches:
        """Every record of the validation split once, with a `mask`."""
        batches = input_pipeline.eval_dataset(
            self._builder,
            batch_size=self._config.batch_size,
            chunk=self._config.data.chunk,
            parallel_reads=self._config.data.parallel_reads,
            prefetch=self._config.data.prefetch,
            **self._share,
        )
        return self._to_device(batches)

    @functools.cached_property
    def preview_samples(self) -> PreviewSamples:
        """The first records of `preview.split`, the same on every process."""
        batches = input_pipeline.eval_dataset(
            self._builder,
            batch_size=self._config.preview.count,
            split=self._config.preview.split,
            features=(schema.LATENTS, schema.TEXT_EMBEDDING, schema.CAPTION),
        )
        batch = next(_without_autotuning(batches).as_numpy_iterator())
        real = batch[input_pipeline.MASK]
        return PreviewSamples(
            captions=[caption.decode() for caption in batch[schema.CAPTION][real]],
            latents=batch[schema.LATENTS][real],
            text_embedding=jax.device_put(
                batch[schema.TEXT_EMBEDDING][real], sharding.replicated(self._mesh)
            ),
        )

    def _check_validation(self) -> None:
        splits = self._builder.info.splits
        wanted = self._config.eval_every or self._config.preview_every
        # Mocked data have records in every split and name none.
        if not wanted or not splits:
            return
        if schema.VALIDATION not in splits or not splits[schema.VALIDATION].num_examples:
            raise ValueError(
                f'{self._config.data.dir}: the validation split is empty: build it with a larger '
                'validation_fraction, or set eval_every=0 and preview_every=0'
            )

    def _order(self) -> dict[str, int]:
        """What the order of the training samples depends on."""
        config = self._config
        return {
            'batch_size': config.batch_size,
            'seed': config.seed,
            'chunk': config.data.chunk,
            'lanes': config.data.lanes,
            'window': config.data.window,
        }

    def _to_device(self, batches: tf.data.Dataset) -> Batches:
        return input_pipeline.to_device(_without_autotuning(batches), sharding.batch(self._mesh))


def _without_autotuning(batches: tf.data.Dataset) -> tf.data.Dataset:
    """All that could be tuned is in the configuration.

    With autotuning, dropping an iterator waits for the tuner to wake up, up to 60 s, and no other
    Python thread runs meanwhile.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.with_options(options)
