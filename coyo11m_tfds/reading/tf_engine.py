"""`train_dataset` and `eval_dataset`: pipelines of tf.data, with a chunk index or without.

    parser = tf_engine.make_parser(builder, ('key', 'latents'), seed=0)
    batches = tf_engine.train_chunks(split, parser, order, range(16), 1000, reading)

`input_pipeline` imports this when it reads through TensorFlow, and not before.
"""

import dataclasses
import os
from collections.abc import Sequence

import tensorflow as tf
import tensorflow_datasets as tfds

from coyo11m_tfds import schema
from coyo11m_tfds.reading import at_exit, dataset, lanes, ordinary, padding
from coyo11m_tfds.reading.chunks import ChunkReader
from coyo11m_tfds.reading.counter import ReadCounter
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.order import Order, consecutive_reads
from coyo11m_tfds.reading.parser import Parser

at_exit.register()


@dataclasses.dataclass(frozen=True)
class Reading:
    """Settings that do not change the order; see `input_pipeline.train_dataset`."""

    on_bad_records: str
    max_bad_fraction: float
    counter: ReadCounter | None
    parallel_reads: int
    prefetch: int
    private_threads: int


def make_parser(builder: tfds.core.DatasetBuilder, features: Sequence[str], **choices) -> Parser:
    """The parser of a data set.

    Raises:
        ValueError: the data set does not have a feature.
    """
    dataset.check_features(builder, (schema.KEY, *features))
    if schema.LATENTS in features and schema.LATENTS not in builder.info.features:
        raise ValueError(
            f'{builder.data_dir}: its latents lie in the files of its source, which only '
            '`train_batches` and `eval_batches` can read'
        )
    return Parser(
        tuple(features),
        dataset.latent_dtype(builder),
        dataset.text_dim(builder),
        num_tokens=dataset.num_tokens(builder),
        **choices,
    )


def train_chunks(
    split: IndexedSplit, parser: Parser, order: Order, own: range, start_step: int, reading: Reading
) -> tf.data.Dataset:
    """Some lanes' part of every batch from a step on, without end."""
    lane_reader = lanes.LaneReader(
        order, _chunk_reader(split, parser, reading), reading.parallel_reads
    )
    batches = lane_reader.read(own, order.locate(start_step))
    return _finish(batches, split, len(own) * reading.parallel_reads, reading)


def train_ordinary(
    builder: tfds.core.DatasetBuilder,
    split: str,
    parser: Parser,
    batch_size: int,
    process: tuple[int, int],
    start_step: int,
    reading: Reading,
) -> tf.data.Dataset:
    """This process's (index, count) part of shuffled batches of a data set without an index."""
    batches = ordinary.train_batches(builder, split, parser, batch_size, *process)
    return _finish(batches.skip(start_step), None, 0, reading)


def eval_chunks(
    split: IndexedSplit,
    parser: Parser,
    records: range,
    chunk: int,
    batch_size: int,
    num_batches: int,
    reading: Reading,
) -> tf.data.Dataset:
    """Records, counted over all shards, in so many full batches; rows of zeros fill them up."""
    reads = consecutive_reads(split.index.shard_lengths, records.start, records.stop, chunk)
    reader = _chunk_reader(split, parser, reading)
    rows = tf.data.Dataset.from_tensor_slices(reader.locate(reads))
    found = lanes.read_chunks(rows, reader, reading.parallel_reads)
    filled = padding.fill_up(found.rebatch(batch_size), batch_size)
    return _finish(padding.take_full(filled, num_batches), split, reading.parallel_reads, reading)


def eval_ordinary(
    builder: tfds.core.DatasetBuilder,
    split: str,
    parser: Parser,
    batch_size: int,
    process: tuple[int, int],
    reading: Reading,
) -> tf.data.Dataset:
    """This process's (index, count) part of every record of a data set without an index."""
    batches = ordinary.eval_batches(builder, split, parser, batch_size, *process)
    return _finish(batches, None, 0, reading)


def _chunk_reader(split: IndexedSplit, parser: Parser, reading: Reading) -> ChunkReader:
    return ChunkReader(
        split, parser, reading.on_bad_records, reading.counter, reading.max_bad_fraction
    )


def _threads_for(split: IndexedSplit | None, reads_in_flight: int) -> int:
    """How many threads a data set needs for itself; 0 if the shared ones will do.

    A read holds a thread while it waits. The shared pool has one thread a core, which is right for
    local files and far too few for the latency of gs://.
    """
    if split is None or not split.is_remote or reads_in_flight < 1:
        return 0
    return reads_in_flight + (os.cpu_count() or 1)


def _finish(
    batches: tf.data.Dataset, split: IndexedSplit | None, reads_in_flight: int, reading: Reading
) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # The buffer of `prefetch` tunes itself without the tuner of tf.data, which is there to choose
    # numbers of parallel calls. With that one, dropping an iterator waits for it to wake up, up to
    # 60 s, and no other Python thread runs meanwhile.
    options.autotune.enabled = False
    threads = reading.private_threads or _threads_for(split, reads_in_flight)
    if threads:
        options.threading.private_threadpool_size = threads
    return batches.prefetch(reading.prefetch).with_options(options)
