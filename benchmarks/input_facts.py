"""Measures what `limits.py` judges: the storage, the pipeline, the device, and both together.

process_settings.apply(data_dir, config.data.chunk)      # before this module is imported
facts = input_facts.measure_facts(config, data_dir, num_hosts=1, step_ms=None, seconds=5)
for line in limits.verdicts(facts):
    print(line)
"""

import inspect
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

import input_pipeline
from benchmarks import limits, measure
from benchmarks.streams import Batch, Stream, read_for
from coyo11m_tfds import schema
from coyo11m_tfds.chunk_index import ChunkIndex
from coyo11m_tfds.reading import chunks, dataset
from coyo11m_tfds.reading.parser import Parser
from train_lib import flow, process, program, sharding

_PROBES = 8  # reads that are timed, at random places
_WARM_STEPS = 2


def measure_facts(
    config: ml_collections.ConfigDict,
    data_dir: str,
    num_hosts: int,
    step_ms: float | None,
    seconds: float,
) -> limits.Facts:
    """Times everything.

    Args:
        config: see `configs/default.py`.
        data_dir: folder of the data set.
        num_hosts: that share the batch; the part of the first one is read.
        step_ms: milliseconds of a step; None to time one here.
        seconds: to read for and to step for, each alone and together.
    """
    process.prepare()
    builder = dataset.open_dataset(data_dir)
    available = measure.memory_info('MemAvailable')
    storage = _time_storage(builder, config.data.chunk)
    batches = _batches(config, builder, num_hosts)
    batch, pipeline = _time_pipeline(batches, seconds)
    device = _time_device(config, builder, batches, batch, step_ms, seconds)
    return limits.Facts(
        batch_size=config.batch_size,
        lanes=config.data.lanes,
        num_hosts=num_hosts,
        chunk=config.data.chunk,
        window=config.data.window,
        parallel_reads=config.data.parallel_reads,
        private_threads=config.data.get('private_threads', 0),
        num_cores=measure.num_cores(),
        available_bytes=available,
        **storage,
        **pipeline,
        **device,
    )


def _time_storage(builder: tfds.core.DatasetBuilder, chunk: int) -> dict[str, float]:
    """Reads at random places of the train split: one record, and one chunk."""
    split = dataset.open_split(builder, schema.TRAIN)
    if split is None:
        raise ValueError(f'{builder.data_dir}: has no chunk index; build the data set again.')
    keys = Parser((schema.KEY,), dataset.latent_dtype(builder), dataset.text_dim(builder))
    reader = chunks.ChunkReader(split, keys)
    read = tf.function(lambda row: reader.read(chunks.ByteReads.of_row(row)))
    random = np.random.default_rng()
    times: dict[int, list[float]] = {1: [], chunk: []}
    for count in [1, chunk] * (1 + _PROBES):
        row = _random_run(split.index, count, chunk, random)
        begin = time.monotonic()
        read(tf.constant(row, tf.int64))
        times[count].append(time.monotonic() - begin)
    shards = range(len(split.index.shard_lengths))
    sizes = [epath.Path(split.file(shard)).stat().length for shard in shards]
    return {
        'is_remote': split.is_remote,
        # The first read of each includes the making of the graph.
        'request_seconds': statistics.median(times[1][1:]),
        'chunk_seconds': statistics.median(times[chunk][1:]),
        'shard_bytes': statistics.median(sizes),
        'num_shards': len(sizes),
        'built_shard_bytes': dict(builder.info.metadata.items())
        .get(schema.META_SETTINGS, {})
        .get('shard_bytes'),
    }


def _random_run(
    index: ChunkIndex, count: int, chunk: int, random: np.random.Generator
) -> list[int]:
    """The `ByteReads` of `count` records at the start of a random chunk."""
    shard = int(random.integers(len(index.shard_lengths)))
    length = int(index.shard_lengths[shard])
    first = schema.CHUNK_STRIDE * int(
        random.integers(max(length - chunk, 0) // schema.CHUNK_STRIDE + 1)
    )
    of_chunk = min(chunk, length)
    offset, nbytes = index.byte_range(*np.array([[shard], [first], [of_chunk]]))
    count = min(count, of_chunk)
    return [0, shard, first, int(offset[0]), int(nbytes[0]) * count // of_chunk, 0, count, 0]


def _batches(
    config: ml_collections.ConfigDict, builder: tfds.core.DatasetBuilder, num_hosts: int
) -> tf.data.Dataset:
    """What one host trains on, with the features that the data set has."""
    known = inspect.signature(input_pipeline.train_dataset).parameters
    text = (schema.TEXT_EMBEDDING,) if dataset.text_dim(builder) else ()
    return input_pipeline.train_dataset(
        builder,
        batch_size=config.batch_size,
        seed=config.seed,
        features=(schema.KEY, schema.LATENTS, *text),
        process_index=0,
        process_count=num_hosts,
        **{name: value for name, value in config.data.items() if name in known},
    )


def _time_pipeline(batches: tf.data.Dataset, seconds: float) -> tuple[Batch, dict[str, float]]:
    """Reads alone; returns one batch, too."""
    begin = time.monotonic()
    iterator = batches.as_numpy_iterator()
    batch = next(iterator)
    first = time.monotonic() - begin
    rate = read_for(Stream(lambda: iterator, lambda taken: b''), seconds)
    return batch, {
        'sample_bytes': sum(x.nbytes for x in batch.values()) / len(batch[schema.KEY]),
        'first_batch_seconds': first,
        'batch_seconds': rate.seconds / rate.batches,
        'cpu_share': rate.cpu_seconds / rate.seconds / measure.num_cores(),
        'resident_bytes': measure.memory_of(os.getpid()).peak_rss,
    }


def _time_device(
    config: ml_collections.ConfigDict,
    builder: tfds.core.DatasetBuilder,
    batches: tf.data.Dataset,
    batch: Batch,
    step_ms: float | None,
    seconds: float,
) -> dict[str, float]:
    """Steps on one batch that stays on the devices, and on those of the pipeline."""

    mesh = sharding.make_mesh(**config.mesh)
    if step_ms is None:
        step = _make_step(config, mesh, builder)
    else:
        step = lambda batch: time.sleep(step_ms / 1000)  # noqa: E731, the device works elsewhere
    placed = sharding.batch(mesh)
    on_device = next(input_pipeline.to_device([batch], placed))
    arriving = input_pipeline.to_device(batches, placed)
    times = {
        'step_seconds': _time_steps(step, itertools.repeat(on_device), seconds),
        'together_seconds': _time_steps(step, arriving, seconds),
    }
    arriving.close()
    return times


def _make_step(
    config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh, builder: tfds.core.DatasetBuilder
) -> Callable[[Batch], Any]:
    """The training step of the configuration, from weights as at the start."""

    stats = dataset.dataset_stats(builder)
    if not stats.text_dim:
        raise ValueError(
            f'{builder.data_dir}: holds no text vectors, so that no step can be made for it; say '
            'how long one takes with --step_ms.'
        )
    channels, height, width = schema.LATENT_SHAPE
    compiled = program.make_program(
        config,
        mesh,
        flow.Stats(stats.latent_mean, stats.latent_std, stats.text_mean, stats.text_std),
        latent_shape=(height, width, channels),
    )
    state = compiled.init()

    def step(batch: Batch) -> Any:
        nonlocal state
        state, update = compiled.train_step(state, batch)
        return update

    return step


def _time_steps(step: Callable[[Batch], Any], batches: Iterator[Batch], seconds: float) -> float:
    """Mean seconds of a step; the host is one step ahead of the device, as in training."""
    for batch in itertools.islice(batches, _WARM_STEPS):
        jax.block_until_ready(step(batch))
    begin, count, running = time.monotonic(), 0, None
    while time.monotonic() - begin < seconds:
        started = step(next(batches))
        jax.block_until_ready(running)
        running, count = started, count + 1
    jax.block_until_ready(running)
    return (time.monotonic() - begin) / count
