"""Batches as a `tf.data.Dataset`: this host's lanes interleaved, batched and prefetched.

    dataset = tf_data.train(Training(data=path, batch_size=256, ...))
    dataset = tf_data.evaluate(Reading(data=path, batch_size=256, ...))

What reads a lane is what reads it without TensorFlow, so the batches are the same, bit for bit. A
sample of local rows, key and crop, takes 20 us of a core, 3 of them to read it (2 busy cores).
Data sets without a chunk index, such as mocked ones, are read by TFDS and mixed by an ordinary
shuffle; the log says what cannot be promised for them. `input_pipeline` imports this when it reads
through TensorFlow, and not before.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.reading import at_exit, engines, order, rows, shares
from coyo11m_tfds.reading.bad_records import SKIP
from coyo11m_tfds.reading.batches import ArraySpec, Batches
from coyo11m_tfds.reading.engines import Evaluation, Opened
from coyo11m_tfds.reading.names import DROP_TEXT, EVAL_CROP, MASK
from coyo11m_tfds.reading.row_reader import RowChoices
from coyo11m_tfds.reading.settings import Reading, Training

Batch = dict[str, tf.Tensor]

# An ordinary shuffle keeps this many decoded records, 24.6 KB each.
_SHUFFLE_BUFFER = 4096

at_exit.register()


def train(asked: Training) -> tf.data.Dataset:
    """`input_pipeline.train_dataset`."""
    opened = engines.open_split(asked.stored, asked.split, asked.engine)
    return _train_lanes(asked, opened) if opened else _train_ordinary(asked)


def evaluate(asked: Reading) -> tf.data.Dataset:
    """`input_pipeline.eval_dataset`."""
    opened = engines.open_split(asked.stored, asked.split, asked.engine)
    return _eval_indexed(asked, opened) if opened else _eval_ordinary(asked)


def train_batches(asked: Training, is_indexed: bool) -> Batches:
    """What `train` gives, as NumPy's arrays."""
    if not is_indexed:  # lanes mean nothing
        start = asked.start_step * asked.batch_size + asked.start_sample * asked.lanes
        asked = dataclasses.replace(asked, lanes=1, start_step=0, start_sample=start)

    @functools.lru_cache(maxsize=1)
    def make(start: int) -> tf.data.Dataset:
        return train(
            dataclasses.replace(asked, data=asked.stored, start_step=0, start_sample=start)
        )

    def read(start: int) -> Iterator[rows.Batch]:
        return itertools.islice(make(start).as_numpy_iterator(), 0, None, asked.stride)

    return engines.train_batches(asked, _spec(make(asked.start)), read)


def eval_batches(asked: Reading) -> Batches:
    """What `evaluate` gives, as NumPy's arrays."""
    batches = evaluate(asked)
    found = Evaluation(
        _spec(batches),
        int(batches.cardinality()),
        lambda start: batches.skip(start).as_numpy_iterator(),
    )
    return engines.eval_batches(asked, found)


def _train_lanes(asked: Training, opened: Opened) -> tf.data.Dataset:
    lanes = engines.train_lanes(opened, asked)

    def samples(lane: tf.Tensor) -> tf.data.Dataset:
        read = tf.data.Dataset.from_generator(
            lambda number: lanes.read(int(number)),
            args=(lane,),
            output_signature=_signature(lanes.spec, None),
        )
        return read.rebatch(lanes.each, drop_remainder=True)

    parts = tf.data.Dataset.range(lanes.own.start, lanes.own.stop).interleave(
        samples,
        cycle_length=len(lanes.own),
        block_length=1,
        num_parallel_calls=len(lanes.own),
        deterministic=True,
    )
    joined = parts.batch(len(lanes.own), drop_remainder=True).map(_join)
    return _prefetched(joined, asked.prefetch)


def _eval_indexed(asked: Reading, opened: Opened) -> tf.data.Dataset:
    """Reads in the order of the shards, without interleaving."""
    found = engines.evaluation(opened, asked)
    batches = tf.data.Dataset.from_generator(
        lambda: found.read(0), output_signature=_signature(found.spec, asked.local_size)
    )
    count = tf.data.experimental.assert_cardinality(found.num_batches)
    return _prefetched(batches.apply(count), asked.prefetch)


def _signature(spec: Mapping[str, ArraySpec], size: int | None) -> dict[str, tf.TensorSpec]:
    return {
        name: tf.TensorSpec([size, *shape[1:]], tf.string if dtype.hasobject else dtype)
        for name, (shape, dtype) in spec.items()
    }


def _spec(batches: tf.data.Dataset) -> dict[str, ArraySpec]:
    return {
        name: ArraySpec(tuple(x.shape), np.dtype(x.dtype.as_numpy_dtype))
        for name, x in batches.element_spec.items()
    }


def _join(batch: Batch) -> Batch:
    """Puts the parts `(lanes, each, ...)` of a batch one after the other."""
    return {
        name: tf.reshape(x, [x.shape[0] * x.shape[1], *x.shape[2:]]) for name, x in batch.items()
    }


def _prefetched(batches: tf.data.Dataset, prefetch: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # The buffer of `prefetch` tunes itself without the tuner of tf.data, which is there to choose
    # numbers of parallel calls. With that one, dropping an iterator waits for it to wake up, up to
    # 60 s, and no other Python thread runs meanwhile.
    options.autotune.enabled = False
    return batches.prefetch(tf.data.AUTOTUNE if prefetch < 0 else prefetch).with_options(options)


# --- Without a chunk index ---------------------------------------------------------------------


def _train_ordinary(asked: Training) -> tf.data.Dataset:
    """This process's part of shuffled batches."""
    builder = _builder(asked)
    logging.warning(
        '%s has no chunk index for split %r. It is read and shuffled the ordinary way: the order '
        'depends on the number of processes, all of them read all records, and starting at a step '
        'reads everything before it.',
        builder.data_dir,
        asked.split,
    )
    choices = _choices(
        asked,
        seed=asked.seed,
        caption_dropout=asked.caption_dropout,
        with_mask=asked.on_bad_records == SKIP,
    )
    seed = asked.seed % 2**63  # TensorFlow's seeds are int64
    config = tfds.ReadConfig(shuffle_seed=seed, try_autocache=False)
    examples = builder.as_dataset(split=asked.split, shuffle_files=True, read_config=config)
    examples = examples.shard(asked.process_count, asked.process_index)
    size = int(examples.cardinality())
    if size < 1:
        raise ValueError(
            f'{builder.data_dir}: split {asked.split!r} has no record for process '
            f'{asked.process_index} of {asked.process_count}'
        )
    buffer = min(size, _SHUFFLE_BUFFER)
    shuffled = examples.shuffle(buffer, seed=seed, reshuffle_each_iteration=True).repeat()
    start = asked.start_step * asked.batch_size + asked.start_sample * asked.lanes
    batches = (
        shuffled.enumerate()
        .skip(start // asked.process_count)
        .batch(asked.local_size, drop_remainder=True)
        .map(lambda i, batch: _choose(choices, batch, i // size))
    )
    return _prefetched(batches, asked.prefetch)


def _eval_ordinary(asked: Reading) -> tf.data.Dataset:
    """This process's part of every record once."""
    builder = _builder(asked)
    logging.warning(
        '%s has no chunk index for split %r: all processes read all records.',
        builder.data_dir,
        asked.split,
    )
    choices = _choices(asked, fixed_crop=EVAL_CROP, with_mask=True)
    begin = asked.process_index * asked.local_size
    own = slice(begin, begin + asked.local_size)
    config = tfds.ReadConfig(try_autocache=False)
    examples = builder.as_dataset(split=asked.split, shuffle_files=False, read_config=config)

    def part(batch: Batch) -> Batch:
        chosen = _choose(choices, batch, tf.zeros_like(batch[schema.KEY]))
        return {name: _filled_up(x, asked.batch_size)[own] for name, x in chosen.items()}

    return _prefetched(examples.batch(asked.batch_size).map(part), asked.prefetch)


def _builder(asked: Reading) -> tfds.core.DatasetBuilder:
    """Raises a ValueError if a column is asked for, or processes get unequal parts."""
    shares.check_share(asked.batch_size, *asked.process)
    if any(texts.parse(asked.text)) or asked.stored.find_columns(asked.features):
        raise ValueError(
            f'{asked.stored.folder}: text={asked.text!r} or features={asked.features!r} names a '
            'column, and without a chunk index it cannot be read'
        )
    return asked.stored.builder or tfds.builder_from_directory(asked.stored.folder)


def _choices(asked: Reading, **choices: Any) -> RowChoices:
    stored = asked.stored
    stored.check_features((schema.KEY, *asked.features))
    return RowChoices(tuple(asked.features), stored.latent_dtype, stored.text_dim, **choices)


def _choose(choices: RowChoices, batch: Batch, epoch: tf.Tensor) -> Batch:
    """What was asked for of a batch that TFDS has decoded, with latents `(b, 3, 4, 32, 32)`."""

    def of_samples(epoch: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drops = order.sample_drops(choices.seed, epoch, keys, choices.caption_dropout)
        return choices.crops(epoch, keys), drops

    keys = batch[schema.KEY]
    found = tf.numpy_function(of_samples, [epoch, keys], [tf.int64, tf.bool])
    crops, drops = (tf.ensure_shape(x, keys.shape) for x in found)
    chosen = {name: batch[name] for name in choices.features}
    if schema.LATENTS in chosen:
        chosen[schema.LATENTS] = tf.gather(chosen[schema.LATENTS], crops, axis=1, batch_dims=1)
    if choices.caption_dropout and schema.TEXT_DTYPES.keys() & chosen.keys():
        chosen[DROP_TEXT] = drops
    if choices.with_mask:
        chosen[MASK] = tf.ones_like(keys, tf.bool)
    return chosen


def _filled_up(x: tf.Tensor, size: int) -> tf.Tensor:
    """Puts rows of zeros, or empty strings, after those of an array."""
    shape = tf.concat([[size - tf.shape(x)[0]], tf.shape(x)[1:]], axis=0)
    return tf.ensure_shape(tf.concat([x, tf.zeros(shape, x.dtype)], axis=0), [size, *x.shape[1:]])
