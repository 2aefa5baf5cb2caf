"""Batches as a `tf.data.Dataset`: this host's lanes interleaved, batched and prefetched.

Each lane is read as without TensorFlow, so the batches are the same, bit for bit. By rows, a sample
of key and crop takes 20 us of a core, 3 us of them for reading (2 busy cores). TFDS reads data sets
without a chunk index, such as mocked ones, with an ordinary shuffle.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.reading import damage, evaluation, order, process_settings, training
from coyo11m_tfds.reading.batches import CROP, DROP_TEXT, MASK, ArraySpec, Batches
from coyo11m_tfds.reading.engines import Opened
from coyo11m_tfds.reading.mixture import Cursor
from coyo11m_tfds.reading.options import ReadOptions, TrainOptions
from coyo11m_tfds.reading.row_reader import RowChoices

Batch = dict[str, tf.Tensor]

_SHUFFLE_BUFFER = 4096  # decoded records of 24.6 KB that an ordinary shuffle keeps
_LANE_ROWS = 256  # gathered together, at least, so that NumPy's calls cost little

# Nothing here has branches on tensors, and to look for some takes a second.
_as_it_is = tf.autograph.experimental.do_not_convert

process_settings.end_iterators_at_exit()


def train(options: TrainOptions, opened: Sequence[Opened] | None) -> tf.data.Dataset:
    """Implements `input_pipeline.train_dataset`."""
    if opened is None:
        return _prefetched(_train_ordinary(options.alone(options.source)), options)
    reader = training.TrainReader(options, opened)
    # `train_batches` leaves out what a stride does not want.
    cursor = reader.plan.cursor._replace(stride=1)
    each, is_plain = cursor.shares.each, len(set(cursor.shares.stages[0].shapes)) == 1
    # All batch sizes read the same sequence, so a lane may take samples of several batches at once.
    together = -(-_LANE_ROWS // each) if is_plain else 0
    signature = _signature(reader.spec(each), None, is_plain)
    has_latents = schema.LATENTS in options.features
    if has_latents and len({x.stored.latents[0] for x in options.sources}) > 1:
        raise ValueError('a tf.data.Dataset has latents of one dtype: read with train_batches')

    proxy = weakref.proxy(reader)

    def read(lane: int) -> Iterator[dict[str, np.ndarray]]:
        return proxy.read(range(lane, lane + 1), cursor, together)

    def samples(lane: tf.Tensor) -> tf.data.Dataset:
        found = tf.data.Dataset.from_generator(read, args=(lane,), output_signature=signature)
        return found.rebatch(each, drop_remainder=True) if is_plain else found

    def join(batch: Batch) -> Batch:
        shapes = {name: tf.concat([[-1], tf.shape(x)[2:]], 0) for name, x in batch.items()}
        return {name: tf.reshape(x, shapes[name]) for name, x in batch.items()}

    def join_plain(batch: Batch) -> Batch:
        return {name: tf.reshape(x, [-1, *x.shape[2:]]) for name, x in batch.items()}

    lanes = order.own_lanes(options.lanes, *options.process)
    parts = tf.data.Dataset.range(lanes.start, lanes.stop).interleave(
        _as_it_is(samples), cycle_length=len(lanes), num_parallel_calls=len(lanes)
    )
    joined = parts.batch(len(lanes), drop_remainder=True)
    return _prefetched(joined.map(_as_it_is(join_plain if is_plain else join)), options, reader)


def evaluate(options: ReadOptions, opened: Sequence[Opened] | None) -> tf.data.Dataset:
    """Implements `input_pipeline.eval_dataset`, in the order of the shards."""
    if opened is None:
        return _prefetched(_eval_ordinary(options), options)
    reader = evaluation.EvalReader(options, opened[0])
    signature = _signature(reader.spec(options.local_size), options.local_size)
    proxy = weakref.proxy(reader)
    found = tf.data.Dataset.from_generator(lambda: proxy.read(), output_signature=signature)
    count = tf.data.experimental.assert_cardinality(reader.num_batches)
    return _prefetched(found.apply(count), options, reader)


def train_batches(options: TrainOptions, opened: Sequence[Opened] | None) -> Batches:
    """Returns the batches of `train` as NumPy arrays."""
    options = dataclasses.replace(options, data=options.sources)  # which are not opened again

    @functools.lru_cache(maxsize=1)
    def make(cursor: Cursor) -> tf.data.Dataset:
        return train(dataclasses.replace(options, start_step=0, start=cursor.state()), opened)

    def read(cursor: Cursor) -> Iterator[dict[str, np.ndarray]]:
        return itertools.islice(make(cursor).as_numpy_iterator(), 0, None, options.stride)

    plan = training.plan(options)
    spec, ahead = _spec(make(plan.cursor)), options.batches_ahead
    return Batches(read, plan.cursor, spec, plan.steps_per_epoch, options.process, ahead)


def eval_batches(options: ReadOptions, opened: Sequence[Opened] | None) -> Batches:
    """Returns the batches of `evaluate` as NumPy arrays."""
    found = evaluate(options, opened)
    return evaluation.evaluation(
        options,
        _spec(found),
        int(found.cardinality()),
        lambda start: found.skip(start).as_numpy_iterator(),
    )


def _signature(
    spec: Mapping[str, ArraySpec], size: int | None, is_plain: bool = True
) -> dict[str, tf.TensorSpec]:
    """What a generator yields; unless `is_plain`, latents of several shapes."""

    def shape(name: str) -> list[int | None]:
        of_row = spec[name].shape[1:]
        return [size, *(of_row if is_plain or name != schema.LATENTS else [None] * len(of_row))]

    return {
        name: tf.TensorSpec(shape(name), tf.string if dtype.hasobject else dtype)
        for name, (_, dtype) in spec.items()
    }


def _spec(found: tf.data.Dataset) -> dict[str, ArraySpec]:
    spec = found.element_spec.items()
    return {n: ArraySpec(tuple(x.shape), np.dtype(x.dtype.as_numpy_dtype)) for n, x in spec}


def _prefetched(
    found: tf.data.Dataset, options: ReadOptions, reader: object = None
) -> tf.data.Dataset:
    dataset_options = tf.data.Options()
    dataset_options.deterministic = True
    # The tuner of tf.data chooses numbers of parallel calls; `prefetch` does without. To drop an
    # iterator would wait for the tuner, up to 60 s, and no other Python thread runs meanwhile.
    dataset_options.autotune.enabled = False
    prefetch = tf.data.AUTOTUNE if options.prefetch < 0 else options.prefetch
    found = found.prefetch(prefetch).with_options(dataset_options)
    # TensorFlow keeps the functions of generators for ever. So these keep no reader, with its
    # mapped files: it lives as long as the data set.
    found._reader = reader
    return found


def _train_ordinary(options: TrainOptions) -> tf.data.Dataset:
    """This process's part of shuffled batches."""
    seed = options.seed % 2**63  # TensorFlow's seeds are int64
    drops, skips = options.caption_dropout, options.on_bad_records == damage.SKIP
    choices = RowChoices(tuple(options.features), {}, options.seed, drops, with_mask=skips)
    examples = _examples(options, seed).shard(options.process_count, options.process_index)
    size = int(examples.cardinality())
    if size < 1:
        raise ValueError(
            f'{options.stored.folder}: split {options.split!r} has fewer records than processes'
        )
    shuffled = examples.shuffle(min(size, _SHUFFLE_BUFFER), seed, reshuffle_each_iteration=True)
    start = training.plan(options).cursor.position.samples[0]
    numbered = shuffled.repeat().enumerate().skip(start // options.process_count)

    def part(number: tf.Tensor, batch: Batch) -> Batch:
        return _choose(choices, batch, number // size, tf.ones_like(number, tf.bool))

    return numbered.batch(options.local_size, drop_remainder=True).map(_as_it_is(part))


def _eval_ordinary(options: ReadOptions) -> tf.data.Dataset:
    """This process's part of every record once, filled up with zeros."""
    choices = RowChoices(tuple(options.features), {}, middle_crop=True, with_mask=True)
    examples = _examples(options)
    size = int(examples.cardinality())
    zeros = {name: tf.zeros(x.shape, x.dtype) for name, x in examples.element_spec.items()}
    blank = tf.data.Dataset.from_tensors(zeros).repeat(-size % options.batch_size)
    numbered = examples.concatenate(blank).enumerate()
    begin = options.process_index * options.local_size

    def part(number: tf.Tensor, batch: Batch) -> Batch:
        chosen = _choose(choices, batch, tf.zeros_like(number), number < size)
        return {name: x[begin : begin + options.local_size] for name, x in chosen.items()}

    return numbered.batch(options.batch_size, drop_remainder=True).map(_as_it_is(part))


def _examples(options: ReadOptions, shuffle_seed: int | None = None) -> tf.data.Dataset:
    """All records as TFDS reads them; raises a ValueError if a column is requested."""
    order.check_share(options.batch_size, *options.process)
    stored = options.stored
    if any(texts.parse_text_weights(options.text)) or stored.find_columns(options.features):
        raise ValueError(
            f'{stored.folder}: text={options.text!r} or features={options.features!r} names a '
            'column, and without a chunk index it cannot be read'
        )
    stored.check_features([x for x in (schema.KEY, *options.features) if x != CROP])
    logging.warning(
        f'{stored.folder} has no chunk index for split {options.split!r}: every process reads it '
        'whole. The order depends on the number of processes, and a start at a later step first '
        'reads all samples before it.'
    )
    builder = stored.builder or tfds.builder_from_directory(stored.folder)
    config = tfds.ReadConfig(shuffle_seed=shuffle_seed, try_autocache=False)
    is_training = shuffle_seed is not None
    return builder.as_dataset(split=options.split, shuffle_files=is_training, read_config=config)


def _choose(choices: RowChoices, batch: Batch, epoch: tf.Tensor, mask: tf.Tensor) -> Batch:
    """The requested features of a batch from TFDS, which has latents `(b, crops, C, H, W)`."""
    has_crops = {schema.LATENTS, CROP} & set(choices.features)
    num_crops = batch[schema.LATENTS].shape[1] if has_crops else 1

    def of_samples(epoch: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drops = order.sample_drops(choices.seed, epoch, keys, choices.caption_dropout)
        return choices.crops(epoch, keys, num_crops), drops

    found = tf.numpy_function(of_samples, [epoch, batch[schema.KEY]], [tf.int64, tf.bool])
    crops, drops = (tf.ensure_shape(x, epoch.shape) for x in found)
    places = tf.cast(crops - schema.middle_crop(num_crops), tf.int32)
    known = batch | {CROP: places, DROP_TEXT: drops, MASK: mask}
    if schema.LATENTS in choices.features:
        known[schema.LATENTS] = tf.gather(batch[schema.LATENTS], crops, axis=1, batch_dims=1)
    return {name: known[name] for name in choices.names}
