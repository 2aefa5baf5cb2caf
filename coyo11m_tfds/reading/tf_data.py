"""Batches as a `tf.data.Dataset`: read as without TensorFlow, so the same bit for bit.

TFDS reads data sets without a chunk index, such as mock data, with an ordinary shuffle.
"""

import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.reading import damage, evaluation, order, process_settings, training
from coyo11m_tfds.reading.batches import CROP, DROP_TEXT, MASK, NOISE_SEED, ArraySpec, Batches
from coyo11m_tfds.reading.engines import open_splits
from coyo11m_tfds.reading.features import BatchFeatures
from coyo11m_tfds.reading.mixture import Cursor
from coyo11m_tfds.reading.options import TF_DATA, ReadOptions

TensorBatch = dict[str, tf.Tensor]

_SHUFFLE_BUFFER = 4096  # decoded records of 24.6 KB that an ordinary shuffle keeps

# Nothing here has branches on tensors, and to look for some takes a second.
_no_autograph = tf.autograph.experimental.do_not_convert

process_settings.end_iterators_at_exit()


def make_train_dataset(plan: training.ReadPlan) -> tf.data.Dataset:
    """Implements `input_pipeline.train_dataset`; leaves out no batches for a stride."""
    options = plan.options
    if plan.splits is None:
        return _prefetch(_shuffled_batches(plan), options)
    latents = {x.stored.latents for x in plan.sources} if schema.LATENTS in options.features else ()
    if len({dtype for dtype, _ in latents}) > 1:
        raise ValueError('a tf.data.Dataset has latents of one dtype: read with train_batches')
    reader = training.TrainReader(plan)
    spec: dict[str, Any] = reader.spec(options.local_batch_size)
    # Each batch of a mixture has latents of one shape, but the next one may have another.
    if len({shape[1:] for _, shape in latents}) > 1:
        (size, *row), dtype = spec[schema.LATENTS]
        spec[schema.LATENTS] = (size, *[None] * len(row)), dtype
    return _read_dataset(reader, spec, options, plan.cursor._replace(stride=1))


def make_eval_dataset(options: ReadOptions) -> tf.data.Dataset:
    """Implements `input_pipeline.eval_dataset`, in the order of the shards."""
    splits = open_splits(options)
    if splits is None:
        return _prefetch(_padded_batches(options), options)
    reader = evaluation.EvalReader(options, splits[0])
    dataset = _read_dataset(reader, reader.spec(options.local_batch_size), options)
    return dataset.apply(tf.data.experimental.assert_cardinality(reader.num_batches))


def read_train_dataset(plan: training.ReadPlan) -> Batches:
    """Returns the batches of `make_train_dataset` as NumPy arrays."""
    options = plan.options

    @functools.lru_cache(maxsize=1)
    def make_dataset(cursor: Cursor) -> tf.data.Dataset:
        return make_train_dataset(plan._replace(cursor=cursor))

    def read(cursor: Cursor) -> Iterator[dict[str, np.ndarray]]:
        return itertools.islice(make_dataset(cursor).as_numpy_iterator(), 0, None, options.stride)

    return Batches(
        read,
        plan.cursor,
        _array_specs(make_dataset(plan.cursor)),
        plan.steps_per_epoch,
        options.process,
        options.batches_ahead,
        options.describe(plan.engine),
    )


def read_eval_dataset(options: ReadOptions) -> Batches:
    """Returns the batches of `make_eval_dataset` as NumPy arrays."""
    dataset = make_eval_dataset(options)
    return evaluation.resumable_eval(
        options,
        _array_specs(dataset),
        int(dataset.cardinality()),
        lambda start: dataset.skip(start).as_numpy_iterator(),
        TF_DATA,
    )


def _array_specs(dataset: tf.data.Dataset) -> dict[str, ArraySpec]:
    specs = dataset.element_spec.items()
    return {n: ArraySpec(tuple(x.shape), np.dtype(x.dtype.as_numpy_dtype)) for n, x in specs}


def _read_dataset(
    reader: training.TrainReader | evaluation.EvalReader,
    spec: Mapping[str, Any],
    options: ReadOptions,
    *start: Cursor,
) -> tf.data.Dataset:
    """The batches that a reader, with an index of the chunks, reads from `start` on."""
    # TensorFlow keeps the functions of generators for ever. So these keep no reader, with its
    # mapped files: it lives as long as the data set.
    proxy = weakref.proxy(reader)
    signature = {
        name: tf.TensorSpec(shape, tf.string if dtype.hasobject else dtype)
        for name, (shape, dtype) in spec.items()
    }
    dataset = tf.data.Dataset.from_generator(lambda: proxy.read(*start), output_signature=signature)
    dataset = _prefetch(dataset, options)
    dataset._reader = reader
    return dataset


def _prefetch(dataset: tf.data.Dataset, options: ReadOptions) -> tf.data.Dataset:
    dataset_options = tf.data.Options()
    dataset_options.deterministic = True
    # The tuner of tf.data chooses numbers of parallel calls; `prefetch` does without. To drop an
    # iterator would wait for the tuner, up to 60 s, and no other Python thread runs meanwhile.
    dataset_options.autotune.enabled = False
    prefetch = tf.data.AUTOTUNE if options.prefetch < 0 else options.prefetch
    return dataset.prefetch(prefetch).with_options(dataset_options)


def _shuffled_batches(plan: training.ReadPlan) -> tf.data.Dataset:
    """This process's share of shuffled batches."""
    (source,) = plan.sources
    options = plan.options.for_source(source)
    seed = options.seed % 2**63  # TensorFlow's seeds are int64
    features = BatchFeatures(
        tuple(options.features),
        {},
        seed=options.seed,
        caption_dropout=options.caption_dropout,
        with_mask=options.on_bad_records == damage.SKIP,
    )
    examples = _examples(options, seed).shard(options.process_count, options.process_index)
    num_examples = int(examples.cardinality())
    if num_examples < 1:
        raise ValueError(
            f'{options.stored.folder}: split {options.split!r} has fewer records than processes'
        )
    # A buffer larger than the data would take memory and shuffle no better.
    buffer = min(num_examples, _SHUFFLE_BUFFER)
    shuffled = examples.shuffle(buffer, seed, reshuffle_each_iteration=True)
    start = plan.cursor.position.samples[0]
    numbered = shuffled.repeat().enumerate().skip(start // options.process_count)

    def choose(number: tf.Tensor, batch: TensorBatch) -> TensorBatch:
        mask = tf.ones_like(number, tf.bool)
        return _choose_samples(features, batch, number // num_examples, mask)

    return numbered.batch(options.local_batch_size, drop_remainder=True).map(_no_autograph(choose))


def _padded_batches(options: ReadOptions) -> tf.data.Dataset:
    """This process's share of every record once, with zeros to fill the last batch."""
    features = BatchFeatures(tuple(options.features), {}, crop=0, with_mask=True)
    examples = _examples(options)
    num_examples = int(examples.cardinality())
    zeros = {name: tf.zeros(x.shape, x.dtype) for name, x in examples.element_spec.items()}
    padding = tf.data.Dataset.from_tensors(zeros).repeat(-num_examples % options.batch_size)
    numbered = examples.concatenate(padding).enumerate()
    begin = options.process_index * options.local_batch_size
    own_rows = slice(begin, begin + options.local_batch_size)

    def choose(number: tf.Tensor, batch: TensorBatch) -> TensorBatch:
        mask = number < num_examples
        samples = _choose_samples(features, batch, tf.zeros_like(number), mask)
        return {name: x[own_rows] for name, x in samples.items()}

    return numbered.batch(options.batch_size, drop_remainder=True).map(_no_autograph(choose))


def _examples(options: ReadOptions, shuffle_seed: int | None = None) -> tf.data.Dataset:
    """All records as TFDS reads them; raises a ValueError if a column is requested."""
    stored = options.stored
    if any(texts.parse_text_weights(options.text)) or stored.find_columns(options.features):
        raise ValueError(
            f'{stored.folder}: text={options.text!r} or features={options.features!r} names a '
            'column, and without a chunk index it cannot be read'
        )
    stored.check_features(
        [x for x in (schema.KEY, *options.features) if x not in (CROP, NOISE_SEED)]
    )
    logging.warning(
        f'{stored.folder} has no chunk index for split {options.split!r}: every process reads it '
        'whole. The order depends on the number of processes, and a start at a later step first '
        'reads all samples before it.'
    )
    builder = stored.builder or tfds.builder_from_directory(stored.folder)
    config = tfds.ReadConfig(shuffle_seed=shuffle_seed, try_autocache=False)
    is_training = shuffle_seed is not None
    return builder.as_dataset(split=options.split, shuffle_files=is_training, read_config=config)


def _choose_samples(
    features: BatchFeatures, batch: TensorBatch, epoch: tf.Tensor, mask: tf.Tensor
) -> TensorBatch:
    """The requested features of a batch from TFDS, which has latents `(b, crops, C, H, W)`."""
    has_crops = {schema.LATENTS, CROP} & set(features.features)
    num_crops = batch[schema.LATENTS].shape[1] if has_crops else 1

    def choose(epoch: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        return (
            features.choose_crops(epoch, keys, num_crops),
            features.choose_drops(epoch, keys),
            order.sample_noise_seeds(features.seed, epoch, keys),
        )

    # The hashes are NumPy's, so that the choices equal those of the other engines.
    choices = tf.numpy_function(choose, [epoch, batch[schema.KEY]], [tf.int64, tf.bool, tf.uint32])
    crops, drops, seeds = (tf.ensure_shape(x, epoch.shape) for x in choices)
    crop_positions = tf.cast(crops - schema.middle_crop(num_crops), tf.int32)
    samples = batch | {CROP: crop_positions, DROP_TEXT: drops, NOISE_SEED: seeds, MASK: mask}
    if schema.LATENTS in features.features:
        samples[schema.LATENTS] = tf.gather(batch[schema.LATENTS], crops, axis=1, batch_dims=1)
    return {name: samples[name] for name in features.array_names}
