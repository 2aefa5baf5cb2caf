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
from coyo11m_tfds.reading.mixture import Place
from coyo11m_tfds.reading.row_reader import RowChoices
from coyo11m_tfds.reading.settings import Reading, Training

Batch = dict[str, tf.Tensor]

_SHUFFLE_BUFFER = 4096  # decoded records of 24.6 KB that an ordinary shuffle keeps
_LANE_ROWS = 256  # gathered together, at least, so that NumPy's calls cost little

# Nothing here has branches on tensors, and to look for some takes a second.
_as_it_is = tf.autograph.experimental.do_not_convert

process_settings.end_iterators_at_exit()


def train(asked: Training, opened: Sequence[Opened] | None) -> tf.data.Dataset:
    """Implements `input_pipeline.train_dataset`."""
    if opened is None:
        return _prefetched(_train_ordinary(asked.alone(asked.source)), asked)
    reader = training.TrainReader(asked, opened)
    # `train_batches` leaves out what a stride does not want.
    place = reader.plan.place._replace(stride=1)
    each, is_plain = place.rule.each, len(set(place.rule.stages[0].shapes)) == 1
    # All batch sizes read the same sequence, so a lane may take samples of several batches at once.
    together = -(-_LANE_ROWS // each) if is_plain else 0
    signature = _signature(reader.spec(each), None, is_plain)
    has_latents = schema.LATENTS in asked.features
    if has_latents and len({x.stored.latents[0] for x in asked.sources}) > 1:
        raise ValueError('a tf.data.Dataset has latents of one dtype: read with train_batches')

    proxy = weakref.proxy(reader)

    def read(lane: int) -> Iterator[dict[str, np.ndarray]]:
        return proxy.read(range(lane, lane + 1), place, together)

    def samples(lane: tf.Tensor) -> tf.data.Dataset:
        found = tf.data.Dataset.from_generator(read, args=(lane,), output_signature=signature)
        return found.rebatch(each, drop_remainder=True) if is_plain else found

    def join(batch: Batch) -> Batch:
        shapes = {name: tf.concat([[-1], tf.shape(x)[2:]], 0) for name, x in batch.items()}
        return {name: tf.reshape(x, shapes[name]) for name, x in batch.items()}

    def join_plain(batch: Batch) -> Batch:
        return {name: tf.reshape(x, [-1, *x.shape[2:]]) for name, x in batch.items()}

    lanes = order.own_lanes(asked.lanes, *asked.process)
    parts = tf.data.Dataset.range(lanes.start, lanes.stop).interleave(
        _as_it_is(samples), cycle_length=len(lanes), num_parallel_calls=len(lanes)
    )
    joined = parts.batch(len(lanes), drop_remainder=True)
    return _prefetched(joined.map(_as_it_is(join_plain if is_plain else join)), asked, reader)


def evaluate(asked: Reading, opened: Sequence[Opened] | None) -> tf.data.Dataset:
    """Implements `input_pipeline.eval_dataset`, in the order of the shards."""
    if opened is None:
        return _prefetched(_eval_ordinary(asked), asked)
    reader = evaluation.EvalReader(asked, opened[0])
    signature = _signature(reader.spec(asked.local_size), asked.local_size)
    proxy = weakref.proxy(reader)
    found = tf.data.Dataset.from_generator(lambda: proxy.read(), output_signature=signature)
    count = tf.data.experimental.assert_cardinality(reader.num_batches)
    return _prefetched(found.apply(count), asked, reader)


def train_batches(asked: Training, opened: Sequence[Opened] | None) -> Batches:
    """Returns the batches of `train` as NumPy arrays."""
    asked = dataclasses.replace(asked, data=asked.sources)  # which are not opened again

    @functools.lru_cache(maxsize=1)
    def make(place: Place) -> tf.data.Dataset:
        return train(dataclasses.replace(asked, start_step=0, start=place.state()), opened)

    def read(place: Place) -> Iterator[dict[str, np.ndarray]]:
        return itertools.islice(make(place).as_numpy_iterator(), 0, None, asked.stride)

    plan = training.plan(asked)
    spec, ahead = _spec(make(plan.place)), asked.batches_ahead
    return Batches(read, plan.place, spec, plan.steps_per_epoch, asked.process, ahead)


def eval_batches(asked: Reading, opened: Sequence[Opened] | None) -> Batches:
    """Returns the batches of `evaluate` as NumPy arrays."""
    found = evaluate(asked, opened)
    return evaluation.evaluation(
        asked,
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


def _prefetched(found: tf.data.Dataset, asked: Reading, reader: object = None) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # The tuner of tf.data chooses numbers of parallel calls; `prefetch` does without. To drop an
    # iterator would wait for the tuner, up to 60 s, and no other Python thread runs meanwhile.
    options.autotune.enabled = False
    prefetch = tf.data.AUTOTUNE if asked.prefetch < 0 else asked.prefetch
    found = found.prefetch(prefetch).with_options(options)
    # TensorFlow keeps the functions of generators for ever. So these keep no reader, with its
    # mapped files: it lives as long as the data set.
    found._reader = reader
    return found


def _train_ordinary(asked: Training) -> tf.data.Dataset:
    """This process's part of shuffled batches."""
    seed = asked.seed % 2**63  # TensorFlow's seeds are int64
    drops, skips = asked.caption_dropout, asked.on_bad_records == damage.SKIP
    choices = RowChoices(tuple(asked.features), {}, asked.seed, drops, with_mask=skips)
    examples = _examples(asked, seed).shard(asked.process_count, asked.process_index)
    size = int(examples.cardinality())
    if size < 1:
        raise ValueError(
            f'{asked.stored.folder}: split {asked.split!r} has fewer records than processes'
        )
    shuffled = examples.shuffle(min(size, _SHUFFLE_BUFFER), seed, reshuffle_each_iteration=True)
    start = training.plan(asked).place.position.samples[0]
    numbered = shuffled.repeat().enumerate().skip(start // asked.process_count)

    def part(number: tf.Tensor, batch: Batch) -> Batch:
        return _choose(choices, batch, number // size, tf.ones_like(number, tf.bool))

    return numbered.batch(asked.local_size, drop_remainder=True).map(_as_it_is(part))


def _eval_ordinary(asked: Reading) -> tf.data.Dataset:
    """This process's part of every record once, filled up with zeros."""
    choices = RowChoices(tuple(asked.features), {}, middle_crop=True, with_mask=True)
    examples = _examples(asked)
    size = int(examples.cardinality())
    zeros = {name: tf.zeros(x.shape, x.dtype) for name, x in examples.element_spec.items()}
    blank = tf.data.Dataset.from_tensors(zeros).repeat(-size % asked.batch_size)
    numbered = examples.concatenate(blank).enumerate()
    begin = asked.process_index * asked.local_size

    def part(number: tf.Tensor, batch: Batch) -> Batch:
        chosen = _choose(choices, batch, tf.zeros_like(number), number < size)
        return {name: x[begin : begin + asked.local_size] for name, x in chosen.items()}

    return numbered.batch(asked.batch_size, drop_remainder=True).map(_as_it_is(part))


def _examples(asked: Reading, shuffle_seed: int | None = None) -> tf.data.Dataset:
    """All records as TFDS reads them; raises a ValueError if a column is asked for."""
    order.check_share(asked.batch_size, *asked.process)
    stored = asked.stored
    if any(texts.parse_text_weights(asked.text)) or stored.find_columns(asked.features):
        raise ValueError(
            f'{stored.folder}: text={asked.text!r} or features={asked.features!r} names a '
            'column, and without a chunk index it cannot be read'
        )
    stored.check_features([x for x in (schema.KEY, *asked.features) if x != CROP])
    logging.warning(
        f'{stored.folder} has no chunk index for split {asked.split!r}: every process reads it '
        'whole. The order depends on the number of processes, and a start at a later step first '
        'reads all samples before it.'
    )
    builder = stored.builder or tfds.builder_from_directory(stored.folder)
    config = tfds.ReadConfig(shuffle_seed=shuffle_seed, try_autocache=False)
    is_training = shuffle_seed is not None
    return builder.as_dataset(split=asked.split, shuffle_files=is_training, read_config=config)


def _choose(choices: RowChoices, batch: Batch, epoch: tf.Tensor, mask: tf.Tensor) -> Batch:
    """What was asked for of a batch that TFDS has decoded, with latents `(b, crops, C, H, W)`."""
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
