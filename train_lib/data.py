"""The data set of a run: batches on the devices, statistics, and its identity.

A position says which batch comes next, after any interruptions and for any former batch size.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from absl import logging
from jax.sharding import Mesh

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.process import errors, jax_environment, preparation
from coyo11m_tfds.process.sizes import format_bytes, format_count
from train_lib.learning import models, sharding
from train_lib.lifecycle import config_rules

Batches = Iterator[dict[str, jax.Array]]

# The loss of a split with fewer records depends on which records it happens to hold.
_FEW_RECORDS = 32
_NO_TEXT = (
    'no text: the model learns to draw without captions; for captions, build the data set with '
    '--encoder=words or another encoder'
)


class PreviewSamples(NamedTuple):
    """The records whose captions all previews of a run draw."""

    captions: Sequence[str]
    latents: np.ndarray  # raw, `(n, C, H, W)`
    text: jax.Array  # embeddings, float16 `(n, D)`, or token ids, int32 `(n, T)`; D=0: no text


class TrainingData:
    """This process's share of the data sets of a run; opened by their metadata alone.

    Attributes:
        sources: The data sets, with weights and conditions.
        facts: Their statistics together.
        plan: The order of the training batches.
        read_counts: Returns what training has read since the process began, without evaluations.
        position: Position at step 0 in plain values: `step` and `samples` of each source as in a
            state of `input_pipeline`, the number of `lanes`, and the identities of the `data_sets`.
        identity: What a resumed run cannot change, see `checkpoint.Description`.
        settings: What it can change on purpose.
    """

    def __init__(self, config: ml_collections.ConfigDict, mesh: Mesh):
        """Opens the data sets of a configuration for the devices of a mesh.

        Raises:
            ValueError: A field has a wrong value, or the data sets do not fit it or each other.
            OSError: A data set does not exist, or its metadata cannot be read.
        """
        config_rules.check_config(config)
        self._config = config
        self._mesh = mesh
        self.sources = config_rules.open_sources(config)
        fields = config.data
        # By the sharding: a process reads the rows that its devices need.
        index, count = input_pipeline.process_share(sharding.batch(mesh))
        self._share: dict[str, Any] = {'process_index': index, 'process_count': count}
        # Of its own, or the reads of evaluations would be in the log of training.
        counter = input_pipeline.ReadCounter()
        self.read_counts = counter.read
        # Training batches that went to the devices, and those of them that steps have taken.
        self._num_arrived = 0
        self._num_used = 0
        self.facts = input_pipeline.mix_stats(self.sources, fields.text)
        # The feature with the texts, if there is one. Where a text is required and there is none,
        # opening the embeddings says so.
        self._text: list[str] = []
        if self.facts.vocabulary:
            self._text = [schema.TOKENS]
        elif self.facts.text_dim or fields.require_text:
            self._text = [schema.TEXT_EMBEDDING]
        features = [schema.KEY, schema.LATENTS]
        features += self._text
        num_crops = self.facts.latents_shape[0]
        # A model of one crop has no vectors for crops to look up.
        if num_crops > 1:
            features.append(input_pipeline.CROP)
        # Latents are drawn from moments in the step, in each epoch with noise of its own.
        if self.facts.moments:
            features.append(input_pipeline.NOISE_SEED)
        self.plan = input_pipeline.train_plan(
            self.sources,
            batch_size=config.batch_size,
            seed=config.seed,
            features=features,
            counter=counter,
            chunk=fields.chunk,
            lanes=fields.lanes,
            window=fields.window,
            stages=fields.stages,
            caption_dropout=fields.caption_dropout,
            parallel_reads=fields.parallel_reads,
            prefetch=fields.prefetch,
            **self._share,
            **self._shared_options,
        )
        if self.plan.engine == input_pipeline.TF_DATA:
            preparation.hide_accelerators_from_tensorflow()
        # Now, and not after the first hours.
        if config.eval_every:
            self._check_split(schema.VALIDATION, 'eval_every', config.eval_every)
        if config.preview_every:
            self._check_split(config.preview.split, 'preview.split', config.preview.split)
        self._identify(config)

    def _identify(self, config: ml_collections.ConfigDict) -> None:
        """Sets what a checkpoint keeps of the data, as a resumed run compares it."""
        encoder: dict[str, Any] = {
            'name': self.facts.text_encoder,
            'revision': self.facts.text_revision,
        }
        if self.facts.vocabulary:
            encoder['vocabulary'] = self.facts.vocabulary
        else:
            encoder['width'] = self.facts.text_dim
        self.identity = {
            'text_encoder': encoder,
            'model': models.identity_fields(**config.model),
            'optimizer': {'name': config.optimizer.name},
        }
        identities = [source.identity(schema.TRAIN) for source in self.sources]
        cursor = self.plan.cursor
        data_sets = {}
        for digest, identity in zip(cursor.digests, identities, strict=True):
            data_sets[digest] = list(identity.values())
        # A data set without an order has no lanes.
        num_lanes = config.data.lanes if self.plan.orders else 1
        self.position = cursor.state() | {'lanes': num_lanes, 'data_sets': data_sets}
        environment = {config_rules.ENVIRONMENT: jax_environment.describe()}
        self.settings = config_rules.changeable_fields(config)
        self.settings |= config_rules.flatten_fields(environment)
        # A data set that has moved is the same: folders are replaced by what they hold.
        if config.data.mix:
            mix = []
            for identity, source in zip(identities, self.sources, strict=True):
                choices = {'weight': source.weight, 'text': source.text, 'seed': source.seed}
                mix.append({**identity, **choices})
            self.settings[config_rules.MIX] = mix
        else:
            self.settings[config_rules.DATA_SET] = identities[0]['data_set']

    def position_at(self, position: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Returns the position at `step`, which must not be before `position`."""
        cursor = self.plan.cursor.at(position)
        num_steps = step - cursor.position.step
        state = cursor.after(num_steps).state()
        # Step and samples change; lanes and identities of the data stay.
        return {**position, **state}

    def check_reading(self) -> None:
        """Checks memory for reading, and records for evaluations; all processes call this together.

        Raises a MemoryError or a ValueError, or an OSError if a data set cannot be read.
        """
        if self._config.eval_every:
            # Opened and closed again: reading for evaluations takes little memory.
            for source in self.sources:
                self._eval_on_host(source).close()
        with input_pipeline.planned_batches(self.plan) as batches:
            budget_gb = self._config.data.ram_budget_gb
            batches.check_memory(budget_gb, sharding.processes_on_host())

    def train_batches(self, position: Mapping[str, Any] | None = None) -> Batches:
        """Returns batches from a position on, without end; None for the beginning."""
        self._num_arrived = 0
        self._num_used = 0

        def count_arrived() -> Iterator[input_pipeline.Batch]:
            """Yields the batches of this host, counted."""
            for batch in input_pipeline.planned_batches(self.plan, position):
                self._num_arrived += 1
                yield batch

        # The step asks for the next batch when it has taken this one.
        for batch in self._to_device(count_arrived()):
            self._num_used += 1
            yield batch

    def batches_ready(self) -> int:
        """Returns the number of unused training batches on the devices or on their way."""
        return self._num_arrived - self._num_used

    def progress(self, position: Mapping[str, Any]) -> dict[str, float]:
        """Returns scalars for the log: the passes over the data up to a position.

        Of a mixture also the passes over each source and the number of its samples.
        """
        orders = self.plan.orders
        if orders is None:
            return {}
        cursor = self.plan.cursor.at(position)
        # Of one lane, for each source; all lanes have given equally many.
        samples = cursor.position.samples
        epoch_length = sum(order.lane_length for order in orders)
        scalars = {'train/epoch': sum(samples) / epoch_length}
        if len(orders) > 1:
            for source, order, lane_samples in zip(self.sources, orders, samples, strict=True):
                scalars[f'data/{source.name}/epoch'] = lane_samples / order.lane_length
                scalars[f'data/{source.name}/samples'] = lane_samples * order.settings.lanes
        return scalars

    @property
    def description(self) -> list[str]:
        """Lines for people: the sources, their shares, and how they are read."""
        orders = self.plan.orders
        if orders is None:
            return [f'{self.sources[0].stored.full_name}, read without a chunk index']
        fields = self._config.data
        engine = self.plan.engine
        schedule = f'{self.plan.steps_per_epoch:,.1f} steps an epoch, read '
        if engine == input_pipeline.CHUNKS:
            schedule += f'in chunks of {fields.chunk} records'
        else:
            schedule += f'by {engine}'
        if fields.cache_dir:
            schedule += f', kept in {fields.cache_dir}'
        if fields.text:
            schedule += f', text {fields.text}'
        lines = []
        for source, order in zip(self.sources, orders, strict=True):
            lines.append(self._describe(source, order))
        # Of a single data set all is said in one line.
        if len(lines) > 1:
            lines += self.plan.cursor.shares.summary
            lines.append(schedule)
        else:
            lines = [f'{lines[0]}, {schedule}']
        if not self._text:
            lines.append(_NO_TEXT)
        return lines

    def _describe(self, source: input_pipeline.MixSource, order: input_pipeline.Order) -> str:
        """Returns a line about a source: its place, its records and its size."""
        split = source.stored.splits[schema.TRAIN]
        line = f'{source.stored.folder}, {format_count(split.num_records, "record")}'
        if len(self.sources) > 1:
            line = f'{source.name}: {line}'
        if source.where:
            share = order.num_records / split.num_records
            line += f', of which {order.num_records:,} ({share:.1%}) have {source.where.text}'
        return f'{line}, {format_bytes(split.num_bytes)}'

    def eval_batches(self, source: input_pipeline.MixSource) -> Batches:
        """Returns every record of a source's validation split once, with a `mask`."""
        return self._to_device(self._eval_on_host(source))

    def _eval_on_host(self, source: input_pipeline.MixSource) -> input_pipeline.Batches:
        """Returns this process's share of a source's validation split."""
        config = self._config
        features = [schema.KEY, schema.LATENTS]
        features += self._text
        lanes_per_host = math.ceil(config.data.lanes / jax.process_count())
        return input_pipeline.eval_batches(
            (source,),
            batch_size=config.batch_size,
            features=features,
            # As many as training has, which reads each lane in parallel.
            parallel_reads=config.data.parallel_reads * lanes_per_host,
            chunk=config.data.chunk,
            prefetch=config.data.prefetch,
            **self._share,
            **self._shared_options,
        )

    @functools.cached_property
    def preview_samples(self) -> PreviewSamples:
        """Reads the first records of `preview.split` in the first source; all processes agree."""
        features = [schema.LATENTS]
        features += self._text
        features.append(schema.CAPTION)
        # The whole batch in every process: pictures are few, and each process paints some of them.
        batches = input_pipeline.eval_batches(
            self.sources[:1],
            batch_size=self._config.preview.count,
            split=self._config.preview.split,
            features=features,
            **self._shared_options,
        )
        batch = next(batches)
        # A split may have fewer records than pictures are to be drawn.
        mask = batch[input_pipeline.MASK]
        text = np.zeros((len(mask), 0), np.float16)
        if self._text:
            text = batch[self._text[0]]
        captions = batch[schema.CAPTION][mask]
        # Of moments, these channels are the means.
        _, num_channels, _, _ = self.facts.latents_shape
        latents = batch[schema.LATENTS][:, :num_channels]
        return PreviewSamples(
            captions=[caption.decode() for caption in captions],
            latents=latents[mask],
            text=jax.device_put(text[mask], sharding.replicated(self._mesh)),
        )

    @property
    def _shared_options(self) -> dict[str, Any]:
        """The options that all splits are read with."""
        names = ['on_bad_records', 'max_bad_fraction', 'engine', 'verify', 'text']
        names += ['cache_dir', 'cache_gb']
        return {name: self._config.data[name] for name in names}

    def _to_device(self, batches: Iterator[input_pipeline.Batch]) -> Batches:
        """Returns batches of this host as global arrays, sent ahead of their use."""
        ahead = self._config.data.device_prefetch
        host_batches = _raise_read_errors(batches)
        return input_pipeline.to_device(host_batches, sharding.batch(self._mesh), ahead=ahead)

    def _check_split(self, split: str, field: str, value: Any) -> None:
        """Checks that each source has records of a split, which a field of the config needs."""
        for source in self.sources:
            splits = source.stored.splits
            # Mock data name no splits and have all of them; 'train[:50%]' is a slice of 'train'.
            name, _, _ = split.partition('[')
            stored_split = splits.get(name)
            num_records = stored_split.num_records if stored_split else 0
            is_known_to_be_small = splits and 0 < num_records < _FEW_RECORDS
            if is_known_to_be_small and split == schema.VALIDATION:
                logging.warning(
                    f'{field}={value!r}: split {split!r} of {source.stored.folder} has only '
                    f'{format_count(num_records, "record")}, too few to judge a model by: build '
                    'it with a larger validation_fraction'
                )
            if splits and not num_records:
                filled = [name for name, info in splits.items() if info.num_records]
                problem = (
                    f'{source.stored.folder} has records in {filled} and none in {split!r}: build '
                    'it with a larger validation_fraction, or set eval_every=0 and preview_every=0'
                )
                raise errors.FieldError(field, value, problem)


def _raise_read_errors(batches: Iterator[input_pipeline.Batch]) -> Iterator[input_pipeline.Batch]:
    """Yields the same batches; errors of reading as an `OSError`, without TensorFlow's traces."""
    try:
        yield from batches
    except Exception as error:
        # Those of TensorFlow are `tf.errors.OpError`; it is imported where it reads alone.
        is_of_tensorflow = type(error).__module__.startswith('tensorflow.')
        if not (is_of_tensorflow or isinstance(error, (OSError, ValueError))):
            raise
        # Behind the name of the class, which means nothing to whoever reads the message.
        _, _, problem = errors.summarize_error(error).partition(': ')
        raise OSError(problem) from error
