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
from absl import logging
from jax.sharding import Mesh

import input_pipeline
from coyo11m_tfds import dataset, schema
from coyo11m_tfds.order import nearest_shares
from train_lib import flow, settings, sharding

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
        read_counts: returns what this process has read for training, an
            `input_pipeline.ReadCounts`.
        identity: plain values that say which data come in which order; see `checkpoint.py`.
    """

    def __init__(self, config: ml_collections.ConfigDict, mesh: Mesh):
        """Opens the data set; reads its metadata and no records.

        Raises:
            ValueError: a setting is out of its range; there is no data set, it lacks text vectors
                or a split that is evaluated or drawn; or the batch size, the lanes and the chunks
                do not fit it, each other or the devices.
        """
        settings.check(config)
        self._mesh = mesh
        self._config = config
        self._builder = dataset.open_dataset(config.data.dir)
        order = input_pipeline.train_order(self._builder, **self._order())
        self._check_shares(has_lanes=order is not None)
        if order is not None:
            logging.info('An epoch has about %d steps.', order.epoch(0).steps)
        if config.eval_every:
            self._check_split(schema.VALIDATION, f'eval_every={config.eval_every}')
        if config.preview_every:
            self._check_split(config.preview.split, f'preview.split={config.preview.split!r}')
        self._share = {
            'process_index': jax.process_index(),
            'process_count': jax.process_count(),
        }
        # Of training alone: what evaluations read has no part in its rate.
        self._counter = input_pipeline.ReadCounter()
        self.read_counts = self._counter.read
        stats = dataset.dataset_stats(self._builder, config.data.text)
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
            'data': input_pipeline.position_settings(self._builder, **self._order()),
            'text_encoder': {'name': stats.text_encoder, 'width': stats.text_dim},
            'model': {'name': config.model.name},
        }

    def check_memory(self) -> None:
        """Checks that what training reads fits this host; drawing and evaluating take little.

        All processes call it together.

        Raises:
            ValueError: it takes more than `data.ram_budget_gb`; see `input_pipeline.check_memory`.
        """
        config = self._config.data
        order = self._order()
        del order['seed']
        input_pipeline.check_memory(
            self._builder,
            **order,
            caption_dropout=config.caption_dropout,
            process_count=jax.process_count(),
            on_bad_records=config.on_bad_records,
            parallel_reads=config.parallel_reads,
            prefetch=config.prefetch,
            ram_budget_gb=config.ram_budget_gb,
            processes_on_host=sharding.processes_on_host(),
            engine=config.engine,
        )

    def train_batches(self, start_step: int) -> Batches:
        """Batches without end, the first being that of the step after `start_step`."""
        batches = input_pipeline.train_batches(
            self._builder,
            start_step=start_step,
            caption_dropout=self._config.data.caption_dropout,
            counter=self._counter,
            parallel_reads=self._config.data.parallel_reads,
            **self._order(),
            **self._share,
            **self._reading(),
        )
        return self._to_device(batches)

    def eval_batches(self) -> Batches:
        """Every record of the validation split once, with a `mask`."""
        config = self._config
        batches = input_pipeline.eval_batches(
            self._builder,
            batch_size=config.batch_size,
            chunk=config.data.chunk,
            # As many as training has in all its lanes.
            parallel_reads=config.data.parallel_reads * self._own_lanes,
            **self._share,
            **self._reading(),
        )
        return self._to_device(batches)

    @functools.cached_property
    def preview_samples(self) -> PreviewSamples:
        """The first records of `preview.split`, the same on every process."""
        batches = input_pipeline.eval_batches(
            self._builder,
            batch_size=self._config.preview.count,
            split=self._config.preview.split,
            features=(schema.LATENTS, schema.TEXT_EMBEDDING, schema.CAPTION),
            on_bad_records=self._config.data.on_bad_records,
            max_bad_fraction=self._config.data.max_bad_fraction,
            engine=self._config.data.engine,
            verify=self._config.data.verify,
            text=self._config.data.text,
        )
        batch = next(batches)
        real = batch[input_pipeline.MASK]
        return PreviewSamples(
            captions=[caption.decode() for caption in batch[schema.CAPTION][real]],
            latents=batch[schema.LATENTS][real],
            text_embedding=jax.device_put(
                batch[schema.TEXT_EMBEDDING][real], sharding.replicated(self._mesh)
            ),
        )

    @property
    def _own_lanes(self) -> int:
        return -(-self._config.data.lanes // jax.process_count())

    def _check_shares(self, has_lanes: bool) -> None:
        """Raises unless processes get equal numbers of lanes, and devices of records."""
        batch_size, lanes = self._config.batch_size, self._config.data.lanes
        processes, devices = jax.process_count(), self._mesh.size
        if batch_size % devices == 0 and not (has_lanes and lanes % processes):
            return
        working_size, working_lanes = nearest_shares(batch_size, lanes, processes, devices)
        raise ValueError(
            f'batch_size={batch_size} with data.lanes={lanes} cannot be shared equally by '
            f'{processes} processes with {devices} devices in all: batch_size={working_size} with '
            f'data.lanes={working_lanes} works. A run that goes on has to keep both; start it with '
            'a number of processes that divides its lanes, and of devices that divides its batch.'
        )

    def _check_split(self, split: str, asked: str) -> None:
        splits = self._builder.info.splits
        # Mocked data have records in every split and name none; 'train[:50%]' is a part of 'train'.
        if not splits or (split.partition('[')[0] in splits and splits[split].num_examples):
            return
        there = [name for name, info in splits.items() if info.num_examples]
        raise ValueError(
            f'{asked}: {self._config.data.dir} has records in {there} and none in {split!r}: build '
            'it with a larger validation_fraction, or set eval_every=0 and preview_every=0'
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

    def _reading(self) -> dict[str, int | str]:
        """How it is read, whatever the order."""
        config = self._config.data
        return {
            'on_bad_records': config.on_bad_records,
            'max_bad_fraction': config.max_bad_fraction,
            'prefetch': config.prefetch,
            'private_threads': config.private_threads,
            'engine': config.engine,
            'verify': config.verify,
            'text': config.text,
        }

    def _to_device(self, batches: Iterator[dict[str, np.ndarray]]) -> Batches:
        ahead = self._config.data.device_prefetch
        return input_pipeline.to_device(batches, sharding.batch(self._mesh), ahead=ahead)
