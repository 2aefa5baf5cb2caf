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

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf
import tensorflow_datasets as tfds

from coyo11m_tfds import dataset, json_digest, schema
from coyo11m_tfds.order import Order, consecutive_reads, nearest_shares
from coyo11m_tfds.reading import at_exit, memory, ordinary, padding
from coyo11m_tfds.reading import lanes as lanes_lib
from coyo11m_tfds.reading.bad_records import DEFAULT_MAX_FRACTION, SKIP, STOP
from coyo11m_tfds.reading.chunks import ChunkReader
from coyo11m_tfds.reading.counter import ReadCounter, ReadCounts
from coyo11m_tfds.reading.on_device import key_words, to_device
from coyo11m_tfds.reading.parser import DROP_TEXT, EVAL_CROP, MASK, Parser

__all__ = [
    'DROP_TEXT',
    'MASK',
    'ReadCounter',
    'ReadCounts',
    'check_memory',
    'eval_dataset',
    'key_words',
    'position_fingerprint',
    'position_settings',
    'threads_for',
    'to_device',
    'train_dataset',
    'train_order',
]

at_exit.register()

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


# --- Batches on the host -----------------------------------------------------------------------


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
    on_bad_records: str = STOP,
    max_bad_fraction: float = DEFAULT_MAX_FRACTION,
    counter: ReadCounter | None = None,
    parallel_reads: int = 4,
    prefetch: int = tf.data.AUTOTUNE,
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
        on_bad_records: 'stop': a record that is damaged is an error that names its file and
            number. 'skip': it is left out, counted and warned of; in its place are zeros, which
            `mask` tells from records, so that everything else comes when it would have come. A
            file that is missing, refused or out of reach is an error either way.
        max_bad_fraction: with 'skip', share of the split's records, each counted once, that may be
            bad; more of them, and more than 64, are an error.
        counter: is told of every chunk that is read.
        parallel_reads: chunks being read at a time in each lane.
        prefetch: batches kept ready.
        private_threads: threads for this data set alone; 0 uses those that all share, but for a
            data set on gs:// as many as chunks may be waited for.

    Returns:
        Batches `dict(key=int64 (b,), latents=float16|bfloat16 (b,4,32,32),
        text_embedding=float16 (b,D), caption=string (b,))`, of these the features asked for;
        `drop_text=bool (b,)` with caption_dropout > 0 and text vectors; `mask=bool (b,)` with
        on_bad_records='skip'. An iterator over them raises `tf.errors.OpError` where a file or
        a record cannot be read, or too many records are bad.

    Raises:
        ValueError: for settings that do not fit together, naming some that do, or a feature that
            the data set does not have.
    """
    if not 0 <= caption_dropout <= 1:
        raise ValueError(f'caption_dropout={caption_dropout} is not in [0, 1]')
    builder = dataset.open_dataset(data)
    parser = _make_parser(
        builder,
        features,
        seed=seed,
        caption_dropout=caption_dropout,
        with_mask=on_bad_records == SKIP,
    )
    opened = dataset.open_split(builder, split)
    _check_share(batch_size, process_index, process_count, lanes if opened else None)
    if opened is None:
        batches = ordinary.train_batches(
            builder, split, parser, batch_size, process_index, process_count
        )
        return _finish(batches.skip(start_step), prefetch, private_threads)
    order = Order(opened.index.shard_lengths, seed, batch_size, chunk, lanes, window)
    own = _own_lanes(order, process_index, process_count)
    reader = ChunkReader(opened, parser, on_bad_records, counter, max_bad_fraction)
    lane_reader = lanes_lib.LaneReader(order, reader, parallel_reads)
    batches = lane_reader.read(own, order.locate(start_step))
    threads = private_threads or threads_for(opened, len(own) * parallel_reads)
    return _finish(batches, prefetch, threads)


def eval_dataset(
    data: dataset.Data,
    *,
    batch_size: int,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING),
    process_index: int = 0,
    process_count: int = 1,
    split: str = schema.VALIDATION,
    chunk: int = 64,
    on_bad_records: str = STOP,
    max_bad_fraction: float = DEFAULT_MAX_FRACTION,
    counter: ReadCounter | None = None,
    parallel_reads: int = 16,
    prefetch: int = tf.data.AUTOTUNE,
    private_threads: int = 0,
) -> tf.data.Dataset:
    """This process's part of every record of a split, once, in the order of the shards.

    The crop is always the middle one. All processes get the same number of batches, which is
    `dataset.cardinality()`, all of them full: `mask` (bool `(b,)`) is False for rows of zeros that
    fill up. Process p gets the p-th of equal runs of consecutive records.

    Args and Returns: as of `train_dataset`, plus `mask`; `parallel_reads` is for all together.

    Raises:
        ValueError: if the split is empty, or as of `train_dataset`.
    """
    _check_share(batch_size, process_index, process_count)
    builder = dataset.open_dataset(data)
    parser = _make_parser(builder, features, fixed_crop=EVAL_CROP, with_mask=True)
    opened = dataset.open_split(builder, split)
    if opened is None:
        batches = ordinary.eval_batches(
            builder, split, parser, batch_size, process_index, process_count
        )
        return _finish(batches, prefetch, private_threads)
    local = batch_size // process_count
    size = int(opened.index.shard_lengths.sum())
    if not size:
        raise ValueError(f'{builder.data_dir}: split {split!r} is empty')
    num_batches = -(-size // batch_size)
    begin = min(size, process_index * num_batches * local)
    end = min(size, begin + num_batches * local)
    reads = consecutive_reads(opened.index.shard_lengths, begin, end, chunk)
    reader = ChunkReader(opened, parser, on_bad_records, counter, max_bad_fraction)
    rows = tf.data.Dataset.from_tensor_slices(reader.locate(reads))
    records = lanes_lib.read_chunks(rows, reader, parallel_reads)
    batches = padding.take_full(padding.fill_up(records.rebatch(local), local), num_batches)
    return _finish(batches, prefetch, private_threads or threads_for(opened, parallel_reads))


def check_memory(
    data: dataset.Data,
    *,
    batch_size: int,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING),
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    caption_dropout: float = 0.0,
    process_count: int = 1,
    split: str = schema.TRAIN,
    on_bad_records: str = STOP,
    parallel_reads: int = 4,
    prefetch: int = tf.data.AUTOTUNE,
    ram_budget_gb: float = 0.0,
    processes_on_host: int = 1,
) -> None:
    """Checks that `train_dataset` with these arguments fits into the memory of this host.

    See `coyo11m_tfds.reading.memory` for what is counted. A data set without a chunk index is read
    without windows and always fits.

    Args:
        data and all others: as of `train_dataset`.
        ram_budget_gb: 10^9 bytes that reading may take on this host; 0 for half of the memory that
            this machine or container has.
        processes_on_host: how many processes of the run share this host.

    Raises:
        ValueError: it takes more; the message says how much, and what would fit.
    """
    builder = dataset.open_dataset(data)
    opened = dataset.open_split(builder, split)
    if opened is None:
        return
    parser = _make_parser(
        builder, features, caption_dropout=caption_dropout, with_mask=on_bad_records == SKIP
    )
    order = Order(opened.index.shard_lengths, 0, batch_size, chunk, lanes, window)
    need = memory.Need(
        batch_size=batch_size // process_count,
        chunk=chunk,
        lanes=-(-lanes // process_count),
        window=order.window,
        parallel_reads=parallel_reads,
        prefetch=prefetch,
        parsed_nbytes=parser.record_nbytes,
        raw_nbytes=opened.record_nbytes,
    )
    memory.check(need, budget_gb=ram_budget_gb, processes_on_host=processes_on_host)


def _make_parser(builder: tfds.core.DatasetBuilder, features: Sequence[str], **choices) -> Parser:
    dataset.check_features(builder, (schema.KEY, *features))
    return Parser(
        tuple(features), dataset.latent_dtype(builder), dataset.text_dim(builder), **choices
    )


def _check_share(
    batch_size: int, process_index: int, process_count: int, lanes: int | None = None
) -> None:
    """Raises unless processes get equal parts of a batch, and of its lanes if it has any."""
    if not 0 <= process_index < process_count:
        raise ValueError(f'process_index={process_index} is not in [0, {process_count})')
    if batch_size > 0 and not batch_size % process_count and not (lanes or 0) % process_count:
        return
    working, working_lanes = nearest_shares(batch_size, lanes or 1, process_count)
    asked, advice = f'batch_size={batch_size}', f'batch_size={working}'
    if lanes is not None:
        asked, advice = f'{asked} with lanes={lanes}', f'{advice} with lanes={working_lanes}'
    raise ValueError(
        f'{asked} cannot be shared by {process_count} processes equally; {advice} works'
    )


def _own_lanes(order: Order, process_index: int, process_count: int) -> range:
    each = order.lanes // process_count
    return range(process_index * each, (process_index + 1) * each)


def threads_for(opened: dataset.IndexedSplit, reads_in_flight: int) -> int:
    """Threads that a data set needs for itself; 0 if those that all share will do.

    A read holds a thread while it waits. The shared pool has one thread a core, which is right for
    local files and far too few for the latency of gs://.
    """
    if not opened.is_remote or reads_in_flight < 1:
        return 0
    return reads_in_flight + (os.cpu_count() or 1)


def _finish(batches: tf.data.Dataset, prefetch: int, private_threads: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # The buffer of `prefetch` tunes itself without the tuner of tf.data, which is there to choose
    # numbers of parallel calls. With that one, dropping an iterator waits for it to wake up, up to
    # 60 s, and no other Python thread runs meanwhile.
    options.autotune.enabled = False
    if private_threads:
        options.threading.private_threadpool_size = private_threads
    return batches.prefetch(prefetch).with_options(options)
