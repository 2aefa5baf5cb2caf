"""Records to batches: a planned order, then tf.data, then sharded jax.Arrays.

    path = 'OUT/coyo11m_tfds/latents/1.0.0'
    batches = input_pipeline.train_dataset(path, batch_size=256, seed=0, features=('latents',))
    for batch in input_pipeline.to_device(batches, sharding):
        state = step(state, batch)

Training samples come in the order of `coyo11m_tfds.order`, a pure function of `(seed, step)` and
the data set. Process p of P owns the lanes `[p*L/P, (p+1)*L/P)`, so every P that divides L, the
number of lanes, sees the same global batches. A run that resumes at step s, on that or another
number of processes, goes on with exactly what it would have seen: it starts to read there. It needs
to know the step and that data set and settings are the same (`position_settings`), nothing more.

Records are read in chunks and parsed a chunk at a time; `key`, `latents`, `text_embedding` and
`caption` keep the dtype and the layout of the source. Scaling is the model's business.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds import chunk_index, dataset, json_digest, keyed_random, schema
from coyo11m_tfds.keyed_random import derive
from coyo11m_tfds.order import CROP, DROP, Order, Reads, consecutive_reads, divisors

DROP_TEXT = 'drop_text'  # bool (b,); in training batches with caption_dropout > 0
MASK = 'mask'  # bool (b,); in evaluation batches, False for padding

# Evaluation sees the middle one of the three crops, which is the one centred on the image.
EVAL_CROP = 1

_AUTOTUNE = tf.data.AUTOTUNE

# --- Choices about one sample ------------------------------------------------------------------


def _tf_splitmix64(x: tf.Tensor) -> tf.Tensor:
    """`splitmix64` of a uint64 tensor."""

    def xor_shift(z: tf.Tensor, shift: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, tf.constant(shift, z.dtype)))

    z = x + tf.constant(keyed_random.GOLDEN, tf.uint64)
    for shift, multiplier in zip(keyed_random.SHIFTS, keyed_random.MULTIPLIERS, strict=False):
        z = xor_shift(z, shift) * tf.constant(multiplier, tf.uint64)
    return xor_shift(z, keyed_random.SHIFTS[2])


def _tf_sample_hash(seed: int, purpose: int, epoch: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """`derive(seed, purpose, epoch, keys)` for int64 tensors; epoch a scalar or one per key."""
    key = tf.constant(int(derive(seed, purpose)), tf.uint64)
    for number in (epoch, keys):
        key = _tf_splitmix64(tf.bitwise.bitwise_xor(key, tf.bitcast(number, tf.uint64)))
    return key


def _tf_sample_crops(seed: int, epoch: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    hashed = _tf_sample_hash(seed, CROP, epoch, keys)
    shifted = tf.bitwise.right_shift(hashed, tf.constant(33, tf.uint64))
    return tf.cast(shifted, tf.int64) % schema.NUM_CROPS


def _tf_sample_drops(seed: int, epoch: tf.Tensor, keys: tf.Tensor, probability: float) -> tf.Tensor:
    hashed = _tf_sample_hash(seed, DROP, epoch, keys)
    shifted = tf.bitwise.right_shift(hashed, tf.constant(11, tf.uint64))
    return tf.cast(shifted, tf.int64) < int(probability * 2**53)


# --- The place in the data ---------------------------------------------------------------------


def train_order(
    data: dataset.Data,
    *,
    batch_size: int,
    seed: int,
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    split: str = schema.TRAIN,
) -> Order | None:
    """The order in which `train_dataset` reads; None for a data set without a chunk index.

        order.locate(step)     # (epoch, step in the epoch), for the log
        order.epoch(0).steps   # batches in the first epoch

    Raises:
        ValueError: for settings that do not fit the data set, naming some that do.
    """
    opened = dataset.open_split(dataset.open_dataset(data), split)
    if opened is None:
        return None
    return Order(opened.index.shard_lengths, seed, batch_size, chunk, lanes, window)


def position_settings(
    data: dataset.Data,
    *,
    batch_size: int,
    seed: int,
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    split: str = schema.TRAIN,
) -> dict[str, str | int]:
    """All that a step number needs beside it to mean one place in the data.

    A checkpoint keeps this; a run that goes on compares it entry by entry, so that it can say
    which one differs. The entry `data_set` is the name, config, version and split, and a digest of
    these, the source's fingerprint and the lengths of the shards.
    """
    info = dataset.open_dataset(data).info
    name = f'{info.full_name} {split}'
    shards = info.splits[split].shard_lengths if split in info.splits else []
    source = (info.metadata or {}).get(schema.META_SOURCE_FINGERPRINT)
    return {
        'data_set': f'{name} {json_digest.sha256([name, source, *shards])[:16]}',
        'seed': seed,
        'batch_size': batch_size,
        'chunk': chunk,
        'lanes': lanes,
        'window': window,
    }


def position_fingerprint(settings: Mapping[str, str | int]) -> str:
    """One hex digest of `position_settings(...)`."""
    return json_digest.sha256(dict(settings))


# --- Reading and parsing -----------------------------------------------------------------------


class _ByteReads(NamedTuple):
    """A `Reads` with places in bytes, as int64 tensors: what the reading of one run needs."""

    epoch: tf.Tensor
    shard: tf.Tensor
    offset: tf.Tensor
    nbytes: tf.Tensor
    skip: tf.Tensor
    count: tf.Tensor
    pad: tf.Tensor


def _byte_reads(index: chunk_index.ChunkIndex, reads: Reads) -> np.ndarray:
    """Where in their files the reads are; int64 `(n, len(_ByteReads._fields))`."""
    stride = schema.CHUNK_STRIDE
    whole = -(-(reads.skip + reads.count) // stride) * stride
    records = np.minimum(whole, index.shard_lengths[reads.shard] - reads.first)
    offset, nbytes = index.byte_range(reads.shard, reads.first, records)
    return np.stack(
        [reads.epoch, reads.shard, offset, nbytes, reads.skip, reads.count, reads.pad], axis=1
    )


def _read_records(files: tf.Tensor, read: _ByteReads) -> tf.Tensor:
    """Reads one run; serialized records `(count,)`.

    The buffer is as large as the run, so that it is one request to the file system.
    """
    file = files[read.shard]
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[file],
        compression_type='',
        buffer_size=read.nbytes,
        byte_offsets=[read.offset],
    )
    records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
    batch = records.skip(read.skip).take(read.count).batch(read.count).get_single_element()
    found = tf.shape(batch, tf.int64)[0]
    message = 'has fewer records than its chunk index says; build the data set again'
    check = tf.debugging.Assert(found == read.count, [file, message, found, read.count])
    with tf.control_dependencies([check]):
        return tf.identity(batch)


@dataclasses.dataclass(frozen=True)
class _Parser:
    """Turns serialized records into a batch; a run of records is parsed at once.

    Reading runs of 64 records takes 10 us of a core a record, parsing them here 5 us more;
    parsing the three crops and choosing after that would copy three times as much.
    """

    features: tuple[str, ...]
    latent_dtype: tf.DType
    text_dim: int
    seed: int = 0
    caption_dropout: float = 0.0
    fixed_crop: int | None = None

    def parse(self, serialized: tf.Tensor, epoch: tf.Tensor) -> dict[str, tf.Tensor]:
        example = tf.io.parse_example(serialized, self._spec())
        keys = example[schema.KEY]
        batch = {name: example[name] for name in self.features}
        if schema.LATENTS in batch:
            one_crop = tf.strings.substr(
                example[schema.LATENTS],
                tf.cast(self.crops(epoch, keys), tf.int32) * schema.LATENT_NBYTES,
                tf.fill(tf.shape(keys), schema.LATENT_NBYTES),
            )
            flat = tf.io.decode_raw(one_crop, self.latent_dtype)
            batch[schema.LATENTS] = tf.reshape(flat, [-1, *schema.LATENT_SHAPE])
        if schema.TEXT_EMBEDDING in batch:
            text = tf.io.decode_raw(example[schema.TEXT_EMBEDDING], tf.float16)
            batch[schema.TEXT_EMBEDDING] = tf.ensure_shape(text, [None, self.text_dim])
        return self.with_drops(batch, epoch, keys)

    def choose(self, example: dict[str, tf.Tensor], epoch: tf.Tensor) -> dict[str, tf.Tensor]:
        """The same from a batch that TFDS has decoded, with latents `(b, 3, 4, 32, 32)`."""
        keys = example[schema.KEY]
        batch = {name: example[name] for name in self.features}
        if schema.LATENTS in batch:
            crops = self.crops(epoch, keys)
            batch[schema.LATENTS] = tf.gather(batch[schema.LATENTS], crops, axis=1, batch_dims=1)
        return self.with_drops(batch, epoch, keys)

    def crops(self, epoch: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        if self.fixed_crop is not None:
            return tf.fill(tf.shape(keys), tf.constant(self.fixed_crop, tf.int64))
        return _tf_sample_crops(self.seed, epoch, keys)

    def with_drops(
        self, batch: dict[str, tf.Tensor], epoch: tf.Tensor, keys: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        if self.caption_dropout and schema.TEXT_EMBEDDING in batch:
            batch[DROP_TEXT] = _tf_sample_drops(self.seed, epoch, keys, self.caption_dropout)
        return batch

    def _spec(self) -> dict[str, tf.io.FixedLenFeature]:
        names = {schema.KEY, *self.features}
        spec = {name: tf.io.FixedLenFeature([], tf.string) for name in sorted(names)}
        return {**spec, schema.KEY: tf.io.FixedLenFeature([], tf.int64)}


def _make_parser(builder: tfds.core.DatasetBuilder, features: Sequence[str], **choices) -> _Parser:
    dataset.check_features(builder, (schema.KEY, *features))
    return _Parser(
        tuple(features), dataset.latent_dtype(builder), dataset.text_dim(builder), **choices
    )


def _read_batches(
    rows: tf.data.Dataset, files: list[str], parser: _Parser, parallel_reads: int
) -> tf.data.Dataset:
    """Turns rows of `_byte_reads` into parsed batches, one for each row, in their order."""
    names = tf.constant(files)

    @tf.autograph.experimental.do_not_convert
    def read(row: tf.Tensor) -> dict[str, tf.Tensor]:
        # Not `tf.unstack`: TensorFlow 2.21 crashes while it optimizes `skip(n)` or `take(n)` if n
        # is another than the first output of its operation.
        what = _ByteReads(*(row[i] for i in range(len(_ByteReads._fields))))
        batch = parser.parse(_read_records(names, what), what.epoch)
        return tf.cond(what.pad > 0, lambda: _pad_rows(batch, what.pad), lambda: batch)

    return rows.map(read, num_parallel_calls=parallel_reads, deterministic=True)


def _pad_rows(batch: dict[str, tf.Tensor], pad: tf.Tensor) -> dict[str, tf.Tensor]:
    """Puts `pad` rows of zeros (or empty strings) after a batch."""

    def padded(x: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([[tf.cast(pad, tf.int32)], tf.shape(x)[1:]], axis=0)
        return tf.concat([x, tf.zeros(shape, x.dtype)], axis=0)

    return {name: padded(x) for name, x in batch.items()}


@tf.autograph.experimental.do_not_convert
def _lane_batches(
    order: Order,
    split: dataset.IndexedSplit,
    parser: _Parser,
    lane: tf.Tensor,
    position: tuple[int, int],
    parallel_reads: int,
) -> tf.data.Dataset:
    """One lane without end: batches of `lane_batch` records, from (epoch, step) `position` on."""

    def plans(plan_of_epoch) -> Iterator:
        epoch, step = position
        while True:
            yield from plan_of_epoch(order.epoch(epoch), step)
            epoch, step = epoch + 1, 0

    def reads(lane: np.ndarray) -> Iterator[np.ndarray]:
        for block in plans(lambda plan, step: plan.lane_reads(int(lane), step)):
            yield _byte_reads(split.index, block)

    def windows(lane: np.ndarray) -> Iterator[np.ndarray]:
        return plans(lambda plan, step: plan.lane_windows(int(lane), step))

    def rows_of(generator, width: int) -> tf.data.Dataset:
        spec = tf.TensorSpec([None, width], tf.int64)
        return tf.data.Dataset.from_generator(
            generator, output_signature=spec, args=(lane,)
        ).unbatch()

    def pick(batch: dict[str, tf.Tensor], window: tf.Tensor) -> dict[str, tf.Tensor]:
        given = tf.boolean_mask(window, window >= 0)
        return {name: tf.gather(x, given) for name, x in batch.items()}

    chunks = _read_batches(
        rows_of(reads, len(_ByteReads._fields)), split.files, parser, parallel_reads
    )
    picked = tf.data.Dataset.zip(chunks.rebatch(order.window), rows_of(windows, order.window))
    # One window ahead: the next is read while this one is given out.
    return picked.map(pick).prefetch(1).rebatch(order.lane_batch, drop_remainder=True)


# --- Batches on the host -----------------------------------------------------------------------

# Samples/s of `key` and `latents`, batches of 256, page cache, on 2 cores that had other work
# besides (best of 4 in one run; ratios say more than figures):
#                                                     as it is    MALLOC_TRIM_THRESHOLD_=1000000000
#   train_dataset, 16 lanes                             71,000     82,000
#   bare TFRecord reading, nothing parsed              117,000    103,000
#   as_dataset(shuffle_files).shuffle(1024).batch       21,500     17,000
# That environment variable makes glibc keep freed memory; without it a record costs 3 page faults,
# 7 us of a core. The first batch, 16 windows, took 0.8 s. Resident memory: 1.3 GB.


def train_dataset(
    data: dataset.Data,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING),
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    caption_dropout: float = 0.0,
    process_index: int = 0,
    process_count: int = 1,
    split: str = schema.TRAIN,
    parallel_reads: int = _AUTOTUNE,
    prefetch: int = _AUTOTUNE,
    private_threads: int = 0,
) -> tf.data.Dataset:
    """This process's part of the training batches from `start_step` on, without end.

    Args:
        data: the folder of a data set, or its builder.
        batch_size: records in a global batch; this process gets `b = batch_size / process_count`.
        seed: decides the order and every choice about a sample.
        start_step: the first batch is what the one after `start_step` batches would have been.
        features: some of `coyo11m_tfds.dataset.FEATURES`.
        chunk: records read together, a multiple of `schema.CHUNK_STRIDE`.
        lanes: streams that every batch takes an equal part of; a multiple of process_count.
        window: records shuffled together within a lane.
        caption_dropout: share of samples marked in `drop_text`, if text vectors are asked for.
        process_index, process_count: which part of each global batch this process gets.
        split: 'train', or another one that is in the data set.
        parallel_reads: chunks being read at a time in each lane.
        prefetch: batches kept ready.
        private_threads: threads for this data set alone; 0 uses those that all share.

    Returns:
        Batches `dict(key=int64 (b,), latents=float16|bfloat16 (b,4,32,32),
        text_embedding=float16 (b,D), caption=string (b,))`, of these the features asked for, and
        `drop_text=bool (b,)` with caption_dropout > 0 and text vectors.

    Raises:
        ValueError: for settings that do not fit together, naming some that do, or a feature that
            the data set does not have.
    """
    _check_share(batch_size, process_index, process_count)
    if not 0 <= caption_dropout <= 1:
        raise ValueError(f'caption_dropout={caption_dropout} is not in [0, 1]')
    builder = dataset.open_dataset(data)
    parser = _make_parser(builder, features, seed=seed, caption_dropout=caption_dropout)
    opened = dataset.open_split(builder, split)
    if opened is None:
        batches = _ordinary_train(builder, split, parser, batch_size, process_index, process_count)
        batches = batches.skip(start_step)
    else:
        order = Order(opened.index.shard_lengths, seed, batch_size, chunk, lanes, window)
        own = _own_lanes(order, process_index, process_count)
        position = order.locate(start_step)
        batches = tf.data.Dataset.range(own.start, own.stop).interleave(
            lambda lane: _lane_batches(order, opened, parser, lane, position, parallel_reads),
            cycle_length=len(own),
            block_length=1,
        )
        batches = batches.batch(len(own), drop_remainder=True).map(_join_lanes)
    return _finish(batches, prefetch, private_threads)


def _join_lanes(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Puts the parts `(lanes, lane_batch, ...)` of a batch one after the other."""
    return {
        name: tf.reshape(x, [x.shape[0] * x.shape[1], *x.shape[2:]]) for name, x in batch.items()
    }


def _check_share(batch_size: int, process_index: int, process_count: int) -> None:
    if not 0 <= process_index < process_count:
        raise ValueError(f'process_index={process_index} is not in [0, {process_count})')
    if batch_size < 1 or batch_size % process_count:
        nearest = max(1, round(batch_size / process_count)) * process_count
        raise ValueError(
            f'batch_size={batch_size} cannot be shared by {process_count} processes equally; '
            f'batch_size={nearest} works'
        )


def _own_lanes(order: Order, process_index: int, process_count: int) -> range:
    if order.lanes % process_count:
        working = [d for d in divisors(order.batch_size) if d % process_count == 0]
        nearest = min(working, key=lambda d: abs(d - order.lanes))
        raise ValueError(
            f'lanes={order.lanes} cannot be shared by {process_count} processes equally; '
            f'lanes={nearest} works'
        )
    each = order.lanes // process_count
    return range(process_index * each, (process_index + 1) * each)


def _finish(batches: tf.data.Dataset, prefetch: int, private_threads: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    if private_threads:
        options.threading.private_threadpool_size = private_threads
    return batches.prefetch(prefetch).with_options(options)


# An ordinary shuffle keeps this many decoded records, 24.6 KB each.
_SHUFFLE_BUFFER = 4096


def _ordinary_train(
    builder: tfds.core.DatasetBuilder,
    split: str,
    parser: _Parser,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> tf.data.Dataset:
    logging.warning(
        '%s has no chunk index for split %r. It is read and shuffled the ordinary way: the order '
        'depends on the number of processes, all of them read all records, and starting at a step '
        'reads everything before it.',
        builder.data_dir,
        split,
    )
    seed = parser.seed % 2**63  # TensorFlow's seeds are int64
    config = tfds.ReadConfig(shuffle_seed=seed, try_autocache=False)
    examples = builder.as_dataset(split=split, shuffle_files=True, read_config=config)
    examples = examples.shard(process_count, process_index)
    size = int(examples.cardinality())
    if size < 1:
        raise ValueError(
            f'{builder.data_dir}: split {split!r} has no record for process {process_index} of '
            f'{process_count}'
        )
    buffer = min(size, _SHUFFLE_BUFFER)
    shuffled = examples.shuffle(buffer, seed=seed, reshuffle_each_iteration=True).repeat()
    return (
        shuffled.enumerate()
        .batch(batch_size // process_count, drop_remainder=True)
        .map(lambda i, batch: parser.choose(batch, i // size), num_parallel_calls=_AUTOTUNE)
    )


def eval_dataset(
    data: dataset.Data,
    *,
    batch_size: int,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING),
    process_index: int = 0,
    process_count: int = 1,
    split: str = schema.VALIDATION,
    chunk: int = 64,
    parallel_reads: int = _AUTOTUNE,
    prefetch: int = _AUTOTUNE,
    private_threads: int = 0,
) -> tf.data.Dataset:
    """This process's part of every record of a split, once, in the order of the shards.

    The crop is always the middle one. All processes get the same number of batches, which is
    `dataset.cardinality()`, all of them full: `mask` (bool `(b,)`) is False for rows of zeros that
    fill up. Process p gets the p-th of equal runs of consecutive records.

    Args and Returns: as of `train_dataset`, plus `mask`.

    Raises:
        ValueError: if the split is empty, or as of `train_dataset`.
    """
    _check_share(batch_size, process_index, process_count)
    builder = dataset.open_dataset(data)
    parser = _make_parser(builder, features, fixed_crop=EVAL_CROP)
    opened = dataset.open_split(builder, split)
    if opened is None:
        batches = _ordinary_eval(builder, split, parser, batch_size, process_index, process_count)
        return _finish(batches, prefetch, private_threads)
    local = batch_size // process_count
    size = int(opened.index.shard_lengths.sum())
    if not size:
        raise ValueError(f'{builder.data_dir}: split {split!r} is empty')
    num_batches = -(-size // batch_size)
    begin = min(size, process_index * num_batches * local)
    end = min(size, begin + num_batches * local)
    reads = consecutive_reads(opened.index.shard_lengths, begin, end, chunk)
    rows = tf.data.Dataset.from_tensor_slices(_byte_reads(opened.index, reads))
    records = _read_batches(rows, opened.files, parser, parallel_reads)
    batches = _fill_up(records.rebatch(local), local)
    nothing = tf.data.Dataset.from_tensors(_zeros(batches.element_spec)).repeat()
    return _finish(batches.concatenate(nothing).take(num_batches), prefetch, private_threads)


def _ordinary_eval(
    builder: tfds.core.DatasetBuilder,
    split: str,
    parser: _Parser,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> tf.data.Dataset:
    logging.warning(
        '%s has no chunk index for split %r: all processes read all records.',
        builder.data_dir,
        split,
    )
    local = batch_size // process_count
    own = slice(process_index * local, (process_index + 1) * local)
    config = tfds.ReadConfig(try_autocache=False)
    examples = builder.as_dataset(split=split, shuffle_files=False, read_config=config)
    batches = examples.batch(batch_size).map(
        lambda batch: parser.choose(batch, tf.constant(0, tf.int64)), num_parallel_calls=_AUTOTUNE
    )
    return _fill_up(batches, batch_size).map(
        lambda batch: {name: x[own] for name, x in batch.items()}
    )


def _fill_up(batches: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Pads batches to `size` rows and adds the mask."""

    def fill_up(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        count = tf.shape(next(iter(batch.values())))[0]
        batch = {**batch, MASK: tf.ones([count], tf.bool)}
        padded = _pad_rows(batch, size - count)
        return {name: tf.ensure_shape(x, [size, *x.shape[1:]]) for name, x in padded.items()}

    return batches.map(fill_up, num_parallel_calls=_AUTOTUNE)


def _zeros(spec: Mapping[str, tf.TensorSpec]) -> dict[str, tf.Tensor]:
    return {name: tf.zeros(s.shape, s.dtype) for name, s in spec.items()}


# --- Batches on the device ---------------------------------------------------------------------


def key_words(keys: np.ndarray) -> np.ndarray:
    """Keys as devices without 64-bit integers can hold them.

    Args:
        keys: int64 `(b,)`.

    Returns:
        uint32 `(b, 2)`: the low and the high word.
    """
    words = np.ascontiguousarray(keys, '<i8').view('<u4').reshape(-1, 2)
    return words.astype(np.uint32, copy=False)


def to_device(
    batches: tf.data.Dataset | Iterable[Mapping[str, np.ndarray]],
    sharding: jax.sharding.Sharding,
    ahead: int = 2,
) -> Iterator[dict[str, jax.Array]]:
    """Sends batches to the devices while earlier ones are being worked on.

    Every process gives its rows of the global batch. `key` arrives as `key_words`; `caption`
    stays behind, since devices hold no strings. A thread reads and sends: with a step of 20 ms and
    batches of 256 on 2 busy cores the loop waited 0.3 to 0.8 ms for a batch, without it 2.8 to 4.2.
    Closing the iterator ends the thread.

    Args:
        batches: a data set, or host batches.
        sharding: of the leading axis; it is applied to every feature.
        ahead: batches that are on the devices, or on their way, before they are asked for.

    Yields:
        Global arrays, the leading axis `b * process_count` long.
    """
    on_host = batches.as_numpy_iterator() if isinstance(batches, tf.data.Dataset) else batches
    arriving = map(lambda batch: _send(batch, sharding), on_host)
    thread = concurrent.futures.ThreadPoolExecutor(1, 'to_device')
    pending = collections.deque(thread.submit(next, arriving, None) for _ in range(ahead))
    try:
        while (batch := pending.popleft().result()) is not None:
            pending.append(thread.submit(next, arriving, None))
            yield batch
    finally:
        for future in pending:
            future.cancel()
        thread.shutdown(wait=False)


def _send(batch: Mapping[str, np.ndarray], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    arrays = {name: x for name, x in batch.items() if name != schema.CAPTION}
    if schema.KEY in arrays:
        arrays[schema.KEY] = key_words(arrays[schema.KEY])
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in arrays.items()}
