"""Data sets without a chunk index, such as mocked ones: TFDS reads, an ordinary shuffle mixes.

    batches = ordinary.train_batches(builder, 'train', parser, 256, 0, 1)

The log says what cannot be promised for them.
"""

import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from coyo11m_tfds.reading.padding import fill_up
from coyo11m_tfds.reading.parser import Parser

# An ordinary shuffle keeps this many decoded records, 24.6 KB each.
_SHUFFLE_BUFFER = 4096


def train_batches(
    builder: tfds.core.DatasetBuilder,
    split: str,
    parser: Parser,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> tf.data.Dataset:
    """This process's part of shuffled batches, without end.

    Raises:
        ValueError: there is no record for this process.
    """
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
        .map(lambda i, batch: parser.choose(batch, i // size), num_parallel_calls=tf.data.AUTOTUNE)
    )


def eval_batches(
    builder: tfds.core.DatasetBuilder,
    split: str,
    parser: Parser,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> tf.data.Dataset:
    """This process's part of every record once, `mask` telling padding from records."""
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
        lambda batch: parser.choose(batch, tf.constant(0, tf.int64)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return fill_up(batches, batch_size).map(
        lambda batch: {name: x[own] for name, x in batch.items()}
    )
