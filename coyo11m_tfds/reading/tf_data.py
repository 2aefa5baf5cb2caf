"""Batches as a `tf.data.Dataset`: this host's lanes interleaved, batched and prefetched.

    batches = tf_data.train(engines.train_lanes(opened, 'once', '', asked), prefetch=-1)
    batches = tf_data.evaluate(engines.evaluate(opened, 'once', '', asked), prefetch=-1)

What reads a lane is what reads it without TensorFlow, so the batches are the same, bit for bit.
Data sets without a chunk index, such as mocked ones, are read by TFDS and mixed by an ordinary
shuffle; the log says what cannot be promised for them. `input_pipeline` imports this when it reads
through TensorFlow, and not before.
"""

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.reading import at_exit, dataset, order, rows
from coyo11m_tfds.reading.bad_records import SKIP
from coyo11m_tfds.reading.engines import Evaluation, Lanes
from coyo11m_tfds.reading.names import DROP_TEXT, EVAL_CROP, MASK
from coyo11m_tfds.reading.row_reader import RowChoices

Batch = dict[str, tf.Tensor]

# An ordinary shuffle keeps this many decoded records, 24.6 KB each.
_SHUFFLE_BUFFER = 4096

at_exit.register()


def train(lanes: Lanes, prefetch: int) -> tf.data.Dataset:
    """This process's part of every batch, without end."""

    def samples(lane: tf.Tensor) -> tf.data.Dataset:
        read = tf.data.Dataset.from_generator(
            lambda number: lanes.read(int(number)),
            args=(lane,),
            output_signature=_signature(lanes.blank),
        )
        return read.rebatch(lanes.share.each, drop_remainder=True)

    own = lanes.share.lanes
    parts = tf.data.Dataset.range(own.start, own.stop).interleave(
        samples,
        cycle_length=len(own),
        block_length=1,
        num_parallel_calls=len(own),
        deterministic=True,
    )
    return _prefetched(parts.batch(len(own), drop_remainder=True).map(_join), prefetch)


def evaluate(evaluation: Evaluation, prefetch: int) -> tf.data.Dataset:
    """This process's part of every record, in the order of the shards: nothing is interleaved."""
    signature = _signature(evaluation.blank, evaluation.size)
    batches = tf.data.Dataset.from_generator(evaluation.read, output_signature=signature)
    counted = batches.apply(tf.data.experimental.assert_cardinality(evaluation.num_batches))
    return _prefetched(counted, prefetch)


def _signature(blank: rows.Batch, size: int | None = None) -> dict[str, tf.TensorSpec]:
    return {
        name: tf.TensorSpec([size, *x.shape[1:]], tf.string if x.dtype == object else x.dtype)
        for name, x in blank.items()
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


def train_ordinary(
    builder: tfds.core.DatasetBuilder, asked: types.SimpleNamespace
) -> tf.data.Dataset:
    """This process's part of shuffled batches; `asked` has the arguments of `train_dataset`.

    Raises:
        ValueError: there is no record for this process, or a feature is missing.
    """
    logging.warning(
        '%s has no chunk index for split %r. It is read and shuffled the ordinary way: the order '
        'depends on the number of processes, all of them read all records, and starting at a step '
        'reads everything before it.',
        builder.data_dir,
        asked.split,
    )
    choices = _choices(
        builder,
        asked.features,
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
        .batch(asked.batch_size // asked.process_count, drop_remainder=True)
        .map(lambda i, batch: _choose(choices, batch, i // size))
    )
    return _prefetched(batches, asked.prefetch)


def evaluate_ordinary(
    builder: tfds.core.DatasetBuilder, asked: types.SimpleNamespace
) -> tf.data.Dataset:
    """This process's part of every record once; `asked` has the arguments of `eval_dataset`."""
    logging.warning(
        '%s has no chunk index for split %r: all processes read all records.',
        builder.data_dir,
        asked.split,
    )
    choices = _choices(builder, asked.features, fixed_crop=EVAL_CROP, with_mask=True)
    local = asked.batch_size // asked.process_count
    own = slice(asked.process_index * local, (asked.process_index + 1) * local)
    config = tfds.ReadConfig(try_autocache=False)
    examples = builder.as_dataset(split=asked.split, shuffle_files=False, read_config=config)

    def part(batch: Batch) -> Batch:
        chosen = _choose(choices, batch, tf.zeros_like(batch[schema.KEY]))
        return {name: _filled_up(x, asked.batch_size)[own] for name, x in chosen.items()}

    return _prefetched(examples.batch(asked.batch_size).map(part), asked.prefetch)


def _choices(
    builder: tfds.core.DatasetBuilder, features: Sequence[str], **choices: Any
) -> RowChoices:
    dataset.check_features(builder, (schema.KEY, *features))
    dtype = dataset.latent_dtype(builder).name
    return RowChoices(tuple(features), dtype, dataset.text_dim(builder), **choices)


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
