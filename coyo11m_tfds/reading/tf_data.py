"""Batches as a `tf.data.Dataset`: this host's lanes interleaved, batched and prefetched.

A lane is one of the streams of samples that give each batch an equal share. Each is read as without
TensorFlow, so the batches are the same, bit for bit. TFDS reads data sets without a chunk index,
such as mock data, with an ordinary shuffle.
"""

import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.process import preparation
from coyo11m_tfds.reading import damage, engines, training
from coyo11m_tfds.reading.batches import CROP, DROP_TEXT, MASK, NOISE_SEED, ArraySpec, Batches
from coyo11m_tfds.reading.opened_splits import open_splits
from coyo11m_tfds.reading.options import TF_DATA, ReadOptions
from coyo11m_tfds.reading.row_reader import BatchFeatures
from coyo11m_tfds.sampling import order
from coyo11m_tfds.sampling.mixture import Cursor

TensorBatch = dict[str, tf.Tensor]

_SHUFFLE_BUFFER = 4096  # decoded records of 24.6 KB that an ordinary shuffle keeps
_LANE_ROWS = 256  # fewest rows to gather together, so that the cost of NumPy's calls is small

# Nothing here has branches on tensors, and to look for some takes a second.
_no_autograph = tf.autograph.experimental.do_not_convert

preparation.end_iterators_at_exit()


def make_train_dataset(plan: training.ReadPlan) -> tf.data.Dataset:
    """Implements `input_pipeline.train_dataset`; leaves out no batches for a stride."""
    options = plan.options
    if plan.splits is None:
        return _prefetch(_shuffled_batches(plan), options)
    reader = training.TrainReader(plan)
    cursor = plan.cursor._replace(stride=1)
    per_lane = cursor.shares.per_lane
    # Each stage has the same sources, and so the same shapes.
    has_one_shape = len(set(cursor.shares.stages[0].shapes)) == 1
    # All batch sizes read the same sequence, so a lane may take samples of several batches at once.
    # With several shapes, the next batch may have another one.
    steps_per_item = 0
    if has_one_shape:
        steps_per_item = -(-_LANE_ROWS // per_lane)
    signature = _signature(reader.spec(per_lane), None, has_one_shape)
    dtypes = {source.stored.latents[0] for source in plan.sources}
    if schema.LATENTS in options.feature_names and len(dtypes) > 1:
        raise ValueError('a tf.data.Dataset has latents of one dtype: read with train_batches')

    # TensorFlow keeps generator functions for ever; they must not keep the reader.
    proxy = weakref.proxy(reader)

    def read_lane(lane: int) -> Iterator[dict[str, np.ndarray]]:
        return proxy.read(range(lane, lane + 1), cursor, steps_per_item)

    def lane_dataset(lane: tf.Tensor) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(
            read_lane, args=(lane,), output_signature=signature
        )
        # From the samples of several steps to those of one.
        if has_one_shape:
            dataset = dataset.rebatch(per_lane, drop_remainder=True)
        return dataset

    def join_lanes(batch: TensorBatch) -> TensorBatch:
        """Returns a batch whose lanes and their samples are one axis."""
        joined = {}
        for name, x in batch.items():
            # Of several shapes, each is known only when its batch is there.
            shape = [-1, *x.shape[2:]]
            if not has_one_shape:
                shape = tf.concat([[-1], tf.shape(x)[2:]], 0)
            joined[name] = tf.reshape(x, shape)
        return joined

    lanes = options.own_lanes
    # One generator a lane, so that the lanes are read in parallel threads.
    samples = tf.data.Dataset.range(lanes.start, lanes.stop).interleave(
        _no_autograph(lane_dataset), cycle_length=len(lanes), num_parallel_calls=len(lanes)
    )
    # `interleave` takes one item of each lane in turn, so these are the shares of one batch.
    by_lane = samples.batch(len(lanes), drop_remainder=True)
    return _prefetch(by_lane.map(_no_autograph(join_lanes)), options, reader)


def make_eval_dataset(options: ReadOptions) -> tf.data.Dataset:
    """Implements `input_pipeline.eval_dataset`, in the order of the shards."""
    splits = open_splits(options)
    if splits is None:
        return _prefetch(_padded_batches(options), options)
    reader = engines.EvalReader(options, splits[0])
    size = options.local_batch_size
    # As above: TensorFlow keeps the function, which must not keep the reader.
    proxy = weakref.proxy(reader)
    dataset = tf.data.Dataset.from_generator(
        lambda: proxy.read(), output_signature=_signature(reader.spec(size), size)
    )
    # A generator has no length that TensorFlow knows.
    count = tf.data.experimental.assert_cardinality(reader.num_batches)
    return _prefetch(dataset.apply(count), options, reader)


def read_train_dataset(plan: training.ReadPlan) -> Batches:
    """Returns the batches of `make_train_dataset` as NumPy arrays."""
    options = plan.options

    # Its specification is needed now, and the data set again for the first batches.
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
    return engines.resumable_eval(
        options,
        _array_specs(dataset),
        int(dataset.cardinality()),
        lambda start: dataset.skip(start).as_numpy_iterator(),
        TF_DATA,
    )


def _signature(
    spec: Mapping[str, ArraySpec], size: int | None, has_one_shape: bool = True
) -> dict[str, tf.TensorSpec]:
    """Returns the specifications of a generator's batches; latents may have several shapes."""
    signature = {}
    for name, (shape, dtype) in spec.items():
        row_shape: tuple[int | None, ...] = shape[1:]
        if name == schema.LATENTS and not has_one_shape:
            row_shape = (None,) * len(row_shape)
        # Captions are bytes objects in NumPy's arrays.
        tensor_dtype = tf.string if dtype.hasobject else dtype
        signature[name] = tf.TensorSpec((size, *row_shape), tensor_dtype)
    return signature


def _array_specs(dataset: tf.data.Dataset) -> dict[str, ArraySpec]:
    """Returns shape and dtype of the arrays in the batches of a data set."""
    specs = {}
    for name, x in dataset.element_spec.items():
        dtype = np.dtype(x.dtype.as_numpy_dtype)
        specs[name] = ArraySpec(tuple(x.shape), dtype)
    return specs


def _prefetch(
    dataset: tf.data.Dataset, options: ReadOptions, reader: object = None
) -> tf.data.Dataset:
    """Returns the data set with batches that are read ahead; it keeps its reader alive."""
    dataset_options = tf.data.Options()
    # Parallel lanes may be read in any order, but come in theirs.
    dataset_options.deterministic = True
    # The tuner of tf.data chooses numbers of parallel calls; `prefetch` does without. To drop an
    # iterator would wait for the tuner, up to 60 s, and no other Python thread runs meanwhile.
    dataset_options.autotune.enabled = False
    prefetch = tf.data.AUTOTUNE if options.prefetch < 0 else options.prefetch
    dataset = dataset.prefetch(prefetch).with_options(dataset_options)
    # TensorFlow keeps the functions of generators for ever. So these keep no reader, with its
    # mapped files: it lives as long as the data set.
    dataset._reader = reader
    return dataset


def _shuffled_batches(plan: training.ReadPlan) -> tf.data.Dataset:
    """Returns this process's share of batches in an ordinary shuffled order, without end."""
    # A mixture without chunk indexes was refused when it was opened.
    (source,) = plan.sources
    options = plan.options.for_source(source)
    seed = options.seed % 2**63  # TensorFlow's seeds are int64
    features = BatchFeatures(
        options.feature_names,
        {},
        seed=options.seed,
        caption_dropout=options.caption_dropout,
        with_mask=options.on_bad_records == damage.SKIP,
    )
    # Every process-th record, before the shuffle: a process must not keep those of others.
    examples = _examples(options, seed).shard(options.process_count, options.process_index)
    num_examples = int(examples.cardinality())
    if num_examples < 1:
        raise ValueError(
            f'{options.stored.folder}: split {options.split!r} has fewer records than processes'
        )
    # A buffer larger than the data would take memory and shuffle no better.
    buffer = min(num_examples, _SHUFFLE_BUFFER)
    shuffled = examples.shuffle(buffer, seed, reshuffle_each_iteration=True)
    # Samples are numbered over all epochs, because their epoch decides their crops.
    numbered = shuffled.repeat().enumerate()
    start = plan.cursor.position.samples[0]
    numbered = numbered.skip(start // options.process_count)

    def choose(number: tf.Tensor, batch: TensorBatch) -> TensorBatch:
        mask = tf.ones_like(number, tf.bool)
        epoch = number // num_examples
        return _choose_samples(features, batch, epoch, mask)

    batches = numbered.batch(options.local_batch_size, drop_remainder=True)
    return batches.map(_no_autograph(choose))


def _padded_batches(options: ReadOptions) -> tf.data.Dataset:
    """Returns this process's share of all records once, as TFDS reads them without a chunk index.

    Zeros fill the last batch.
    """
    features = BatchFeatures(options.feature_names, {}, crop=0, with_mask=True)
    examples = _examples(options)
    num_examples = int(examples.cardinality())
    # The zeros come before batches are made, so that all processes get equally many.
    zeros = {}
    for name, x in examples.element_spec.items():
        zeros[name] = tf.zeros(x.shape, x.dtype)
    num_missing = -num_examples % options.batch_size
    padding = tf.data.Dataset.from_tensors(zeros).repeat(num_missing)
    numbered = examples.concatenate(padding).enumerate()
    begin = options.process_index * options.local_batch_size
    own_rows = slice(begin, begin + options.local_batch_size)

    def choose(number: tf.Tensor, batch: TensorBatch) -> TensorBatch:
        mask = number < num_examples
        # Evaluation reads one epoch.
        samples = _choose_samples(features, batch, tf.zeros_like(number), mask)
        return {name: x[own_rows] for name, x in samples.items()}

    batches = numbered.batch(options.batch_size, drop_remainder=True)
    return batches.map(_no_autograph(choose))


def _examples(options: ReadOptions, shuffle_seed: int | None = None) -> tf.data.Dataset:
    """Returns all records as TFDS reads them; raises a ValueError if a column is requested."""
    stored = options.stored
    # The text without a name is the one in the records.
    names_column = any(texts.parse_text_weights(options.text))
    if names_column or stored.find_columns(options.feature_names):
        raise ValueError(
            f'{stored.folder}: text={options.text!r} or features={options.feature_names!r} names a '
            'column, and without a chunk index it cannot be read'
        )
    # The key is always needed, for the choices that depend on it.
    names = dict.fromkeys([schema.KEY, *options.feature_names])
    stored.check_features([name for name in names if name not in (CROP, NOISE_SEED)])
    logging.warning(
        f'{stored.folder} has no chunk index for split {options.split!r}: every process reads it '
        'whole. The order depends on the number of processes, and a start at a later step first '
        'reads all samples before it.'
    )
    # A mocked builder has no files that another one could be made of.
    builder = stored.builder or tfds.builder_from_directory(stored.folder)
    # TFDS would keep a small data set in memory, in each process.
    config = tfds.ReadConfig(shuffle_seed=shuffle_seed, try_autocache=False)
    is_training = shuffle_seed is not None
    return builder.as_dataset(split=options.split, shuffle_files=is_training, read_config=config)


def _choose_samples(
    features: BatchFeatures, batch: TensorBatch, epoch: tf.Tensor, mask: tf.Tensor
) -> TensorBatch:
    """Returns the arrays of a batch from TFDS, which has latents `(b, crops, C, H, W)`.

    Each sample has the crop that the other engines would choose in its `epoch`, and its text is
    dropped where theirs would be.
    """
    # A batch without crops may also have no latents.
    num_crops = 1
    if schema.LATENTS in features.features or CROP in features.features:
        num_crops = batch[schema.LATENTS].shape[1]

    def choose(epoch: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        return (
            features.choose_crops(epoch, keys, num_crops),
            features.choose_drops(epoch, keys),
            order.sample_noise_seeds(features.seed, epoch, keys),
        )

    # The hashes are NumPy's, so that the choices equal those of the other engines.
    choices = tf.numpy_function(choose, [epoch, batch[schema.KEY]], [tf.int64, tf.bool, tf.uint32])
    # TensorFlow does not know the shapes that a function of NumPy returns.
    crops, drops, seeds = (tf.ensure_shape(x, epoch.shape) for x in choices)
    crop_positions = tf.cast(crops - schema.middle_crop(num_crops), tf.int32)
    # All that a batch may have; of these, it has what its features name.
    samples = batch | {CROP: crop_positions, DROP_TEXT: drops, NOISE_SEED: seeds, MASK: mask}
    if schema.LATENTS in features.features:
        all_crops = batch[schema.LATENTS]
        samples[schema.LATENTS] = tf.gather(all_crops, crops, axis=1, batch_dims=1)
    return {name: samples[name] for name in features.array_names}
