"""The data set as a run sees it: batches on the devices, statistics, and what identifies it.

    data = TrainingData(config, mesh)
    batches = data.train_batches(start_sample=16_000)
    batch = next(batches)

That batch is what a step takes after 16,000 samples of every lane, however often the run was
interrupted, and whatever the batch size was before.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.process.sizes import readable
from input_pipeline import OrderSettings
from train_lib import failures, flow, models, settings, sharding
from train_lib.data_facts import DataFacts

Batches = Iterator[dict[str, jax.Array]]


class ReadError(OSError):
    """A record or a file of the data set cannot be read; the message names it."""


@dataclasses.dataclass(frozen=True)
class PreviewSamples:
    """Records that are drawn again and again while the model learns.

    Attributes:
        captions: n strings.
        latents: raw `(n, 4, H, W)`.
        text: text embeddings float16 `(n, D)` or token ids int32 `(n, T)`, whole on every device.
    """

    captions: Sequence[str]
    latents: np.ndarray
    text: jax.Array


class TrainingData:
    """This process's share of a data set, as the configuration asks for it.

    Attributes:
        facts: what a model has to know of the data.
        order: of the training samples; None for a data set without a chunk index.
        samples_a_step: of every lane; without a chunk index there is one lane.
        position: plain values that tell the present order from another one; with the next sample
            of every lane they are the place of a run in its data.
        read_counts: returns what this process has read for training, an
            `input_pipeline.ReadCounts`.
        batches_ready: returns how many training batches could be taken without waiting.
        identity: plain values that no resumed run can change; see `checkpoint.Description`.
        settings: plain values that it can change on purpose.
    """

    def __init__(self, config: ml_collections.ConfigDict, mesh: Mesh):
        """Opens the data set; reads its metadata and no records.

        Raises:
            ValueError: a setting is out of its range; there is no data set, it lacks text
                embeddings or a split that is evaluated or drawn; or the batch size, the lanes and
                the chunks do not fit it, each other or the devices.
        """
        settings.check(config)
        self._mesh = mesh
        self._config = config
        self._opened = _open(config.data.dir)
        read = config.data
        settings_of_order = OrderSettings(config.seed, read.chunk, read.lanes, read.window)
        self.order = input_pipeline.train_order(self._opened, settings_of_order)
        self._check_shares(has_lanes=self.order is not None)
        if self.order is None:
            settings_of_order = dataclasses.replace(settings_of_order, lanes=1)
        self._order = settings_of_order
        self.samples_a_step = config.batch_size // self._order.lanes
        if config.eval_every:
            self._check_split(schema.VALIDATION, f'eval_every={config.eval_every}')
        if config.preview_every:
            self._check_split(config.preview.split, f'preview.split={config.preview.split!r}')
        index, count = input_pipeline.process_share(sharding.batch(mesh))
        self._share: dict[str, Any] = {'process_index': index, 'process_count': count}
        # Of training alone: what evaluations read has no part in its rate.
        self._counter = input_pipeline.ReadCounter()
        self.read_counts = self._counter.read
        self._arrived = self._taken = 0
        stats = self._opened.stats(config.data.text)
        if not (stats.text_dim or stats.num_tokens):
            added = self._opened.text_columns
            raise ValueError(
                f'{config.data.dir} holds no text embeddings in its records: '
                + (
                    f'choose added ones with --config.data.text: {", ".join(added)}'
                    if added
                    else 'build it with the config field text_embeddings, as in '
                    '--config=\'{"name": "hash", "text_embeddings": "SIDE.parquet"}\', '
                    'or add some with python -m coyo11m_tfds.add_column'
                )
            )
        self.facts = model_facts(stats)
        self._text = schema.TOKENS if self.facts.vocabulary else schema.TEXT_EMBEDDING
        self._features = schema.KEY, schema.LATENTS, self._text
        encoder = {'name': self.facts.encoder, 'revision': self.facts.encoder_revision}
        size = {'width': self.facts.text_dim}
        if self.facts.vocabulary:
            size = {'vocabulary': self.facts.vocabulary}
        self.identity = {
            'text_encoder': encoder | size,
            'model': models.identity(**config.model),
            'optimizer': {'name': config.optimizer.name},
        }
        decisive = input_pipeline.position_settings(self._opened, self._order)
        digest = input_pipeline.position_fingerprint(decisive)
        self.position = {'order': digest, 'lanes': self._order.lanes}
        self.settings = settings.changeable(config) | {settings.DATA_SET: decisive['data_set']}

    def check_memory(self) -> None:
        """Checks that what training reads fits this host; drawing and evaluating take little.

        All processes call it together.

        Raises:
            ValueError: it takes more than `data.ram_budget_gb`; see `reading.memory`.
        """
        with self._on_host(start_sample=0) as batches:
            budget_gb = self._config.data.ram_budget_gb
            batches.check_memory(budget_gb, sharding.processes_on_host())

    def train_batches(self, start_sample: int) -> Batches:
        """Batches without end, from sample `start_sample` of every lane on."""
        return self._counted(self._on_host(start_sample))

    def _on_host(self, start_sample: int) -> input_pipeline.Batches:
        return input_pipeline.train_batches(
            self._opened,
            batch_size=self._config.batch_size,
            start_sample=start_sample,
            features=self._features,
            caption_dropout=self._config.data.caption_dropout,
            counter=self._counter,
            parallel_reads=self._config.data.parallel_reads,
            **dataclasses.asdict(self._order),
            **self._share,
            **self._reading(),
        )

    def batches_ready(self) -> int:
        """Returns the number of training batches on the devices, or on the way, that are unused."""
        return self._arrived - self._taken

    def epoch(self, sample: int) -> float | None:
        """Returns the passes over the data before a sample of each lane; None without an order."""
        return None if self.order is None else sample / self.order.lane_length

    @property
    def engine(self) -> str:
        """What reads training batches: 'rows' or 'chunks'."""
        return input_pipeline.engine_of(self._opened, self._config.data.engine)

    @property
    def description(self) -> str:
        """The data set and how it is read, in one line."""
        split = self._opened.splits.get(schema.TRAIN)
        if split is None or self.order is None:
            return f'{self._opened.full_name}, read without a chunk index'
        config = self._config.data
        by_rows = self.engine == input_pipeline.ROWS
        how = 'by rows' if by_rows else f'in chunks of {config.chunk} records'
        text = f', text {config.text}' if config.text else ''
        return (
            f'{config.dir}, {split.num_records:,} records, {readable(split.num_bytes)}, '
            f'{self.order.lane_length / self.samples_a_step:,.1f} steps an epoch, read {how}{text}'
        )

    def eval_batches(self) -> Batches:
        """Every record of the validation split once, with a `mask`."""
        config = self._config
        batches = input_pipeline.eval_batches(
            self._opened,
            batch_size=config.batch_size,
            features=self._features,
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
            self._opened,
            batch_size=self._config.preview.count,
            split=self._config.preview.split,
            features=(schema.LATENTS, self._text, schema.CAPTION),
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
            text=jax.device_put(batch[self._text][real], sharding.replicated(self._mesh)),
        )

    @property
    def _own_lanes(self) -> int:
        return -(-self._config.data.lanes // jax.process_count())

    def _check_shares(self, has_lanes: bool) -> None:
        """Raises unless processes get equal numbers of lanes, and devices of records."""
        batch_size, lanes = self._config.batch_size, self._config.data.lanes
        processes, devices = jax.process_count(), self._mesh.size
        has_equal_lanes = not (batch_size % lanes or lanes % processes)
        if batch_size % devices == 0 and (has_equal_lanes or not has_lanes):
            return
        working_size, working_lanes = input_pipeline.nearest_shares(
            batch_size, lanes, processes, devices
        )
        raise ValueError(
            f'batch_size={batch_size} with data.lanes={lanes} cannot be shared equally by '
            f'{processes} processes with {devices} devices in all: batch_size={working_size} with '
            f'data.lanes={working_lanes} works. A run that resumes keeps both unless '
            '--accept_changes=batch_size,data.lanes is given; start it with a number of processes '
            'that divides its lanes and a number of devices that divides its batch.'
        )

    def _check_split(self, split: str, asked: str) -> None:
        splits = self._opened.splits
        # Mocked data have records in every split and name none; 'train[:50%]' is a part of 'train'.
        if not splits or (split.partition('[')[0] in splits and splits[split].num_records):
            return
        there = [name for name, info in splits.items() if info.num_records]
        raise ValueError(
            f'{asked}: {self._config.data.dir} has records in {there} and none in {split!r}: build '
            'it with a larger validation_fraction, or set eval_every=0 and preview_every=0'
        )

    def _reading(self) -> dict[str, Any]:
        """How it is read, whatever the order."""
        config = self._config.data
        return {
            'on_bad_records': config.on_bad_records,
            'max_bad_fraction': config.max_bad_fraction,
            'prefetch': config.prefetch,
            'engine': config.engine,
            'verify': config.verify,
            'text': config.text,
        }

    def _counted(self, batches: Iterator[dict[str, np.ndarray]]) -> Batches:
        self._arrived = self._taken = 0

        def arriving() -> Iterator[dict[str, np.ndarray]]:
            for batch in batches:
                self._arrived += 1
                yield batch

        for batch in self._to_device(arriving()):
            self._taken += 1
            yield batch

    def _to_device(self, batches: Iterator[dict[str, np.ndarray]]) -> Batches:
        ahead = self._config.data.device_prefetch
        on_host = _with_read_errors(batches)
        return input_pipeline.to_device(on_host, sharding.batch(self._mesh), ahead=ahead)


def model_facts(stats: 'input_pipeline.DatasetStats') -> DataFacts:
    """What a model has to know of a data set; token ids have no statistics."""
    mean, std = stats.text_mean, stats.text_std
    if mean is None or std is None:
        mean = std = np.zeros(0, np.float32)
    channels, height, width = schema.LATENT_SHAPE
    return DataFacts(
        (height, width, channels),
        flow.Stats(stats.latent_mean, stats.latent_std, mean, std),
        stats.text_encoder or '',
        stats.text_revision or '',
        stats.text_max_tokens,
        stats.vocabulary,
        stats.known_tokens,
    )


def _with_read_errors(
    batches: Iterator[dict[str, np.ndarray]],
) -> Iterator[dict[str, np.ndarray]]:
    """The same batches; errors of reading as `ReadError`, without TensorFlow's traces."""
    try:
        yield from batches
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ReadError(failures.summary(error).partition(': ')[2]) from error


def _open(folder: str) -> input_pipeline.StoredDataset:
    try:
        return input_pipeline.open_data(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(f'data.dir={error}') from error
