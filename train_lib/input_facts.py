"""Measures what `limits.py` judges: the storage, the batches, the devices, and both together.

facts = input_facts.measure_facts(config, num_hosts=1, step_ms=None, seconds=5)
for line in limits.verdicts(facts):
    print(line)
"""

import inspect
import itertools
import os
import pathlib
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ml_collections
import tensorflow_datasets as tfds

import input_pipeline
from coyo11m_tfds import schema
from train_lib import limits, program, sharding
from train_lib.data import model_facts

Batch = Mapping[str, Any]

_PROBES = 8  # reads that are timed, at random places
_WARM_STEPS = 2
# The input is steady when its buffers are full and late imports are done.
_WARM_BATCHES = 8
_WARM_SECONDS = 1.0


def measure_facts(
    config: ml_collections.ConfigDict, num_hosts: int, step_ms: float | None, seconds: float
) -> limits.Facts:
    """Times everything.

    Args:
        config: see `configs/default.py`.
        num_hosts: that share the batch; the part of the first one is read.
        step_ms: milliseconds of a step; None to time one here.
        seconds: to read for and to step for, each alone and together.

    Raises:
        ValueError: the data set has no chunk index or, without `step_ms`, no text embeddings; or
            the settings do not fit it or each other.
    """
    builder = input_pipeline.open_dataset(config.data.dir)
    available = _available_memory()
    features = _features(config, builder)
    storage = _time_storage(config, builder, features)

    def read() -> Iterator[Batch]:
        return _batches(config, builder, features, num_hosts)

    batch, reading = _time_reading(read, seconds)
    device = _time_device(config, builder, read(), batch, step_ms, seconds)
    return limits.Facts(
        engine=input_pipeline.engine_of(builder, config.data.engine),
        batch_size=config.batch_size,
        lanes=config.data.lanes,
        num_hosts=num_hosts,
        chunk=config.data.chunk,
        window=config.data.window,
        parallel_reads=config.data.parallel_reads,
        num_cores=_num_cores(),
        available_bytes=available,
        **storage,
        **reading,
        **device,
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _available_memory() -> int:
    """Bytes that programs may still take on this machine."""
    lines = pathlib.Path('/proc/meminfo').read_text().splitlines()
    [line] = [line for line in lines if line.startswith('MemAvailable:')]
    return 1024 * int(line.split()[1])


def _features(
    config: ml_collections.ConfigDict, builder: tfds.core.DatasetBuilder
) -> tuple[str, ...]:
    """What training reads, as far as the data set has it."""
    stats = input_pipeline.dataset_stats(builder, config.data.text)
    texts = {schema.TEXT_EMBEDDING: stats.text_dim, schema.TOKENS: stats.num_tokens}
    return schema.KEY, schema.LATENTS, *filter(texts.get, texts)


def _time_storage(
    config: ml_collections.ConfigDict,
    builder: tfds.core.DatasetBuilder,
    features: tuple[str, ...],
) -> dict[str, Any]:
    """Reads at random places of the train split."""
    measured = input_pipeline.probe_storage(
        builder, config.data.chunk, features=features, text=config.data.text
    )
    if measured is None:
        raise ValueError(f'{builder.data_dir}: has no chunk index; build the data set again.')
    built_with = dict(builder.info.metadata or {}).get(schema.META_SETTINGS, {})
    return {**measured._asdict(), 'built_shard_bytes': built_with.get('shard_bytes')}


def _batches(
    config: ml_collections.ConfigDict,
    builder: tfds.core.DatasetBuilder,
    features: tuple[str, ...],
    num_hosts: int,
) -> Iterator[Batch]:
    """The batches that one host trains on."""
    data = config.data
    read = (input_pipeline.train_batches, input_pipeline.train_dataset)
    known = {name for function in read for name in inspect.signature(function).parameters}
    return input_pipeline.train_batches(
        builder,
        batch_size=config.batch_size,
        seed=config.seed,
        features=features,
        process_index=0,
        process_count=num_hosts,
        **{name: value for name, value in data.items() if name in known},
    )


def _time_reading(
    read: Callable[[], Iterator[Batch]], seconds: float
) -> tuple[Batch, dict[str, Any]]:
    """Reads alone; returns one batch, too."""
    begin = time.monotonic()
    batches = read()
    batch = next(batches)
    first = time.monotonic() - begin
    for number in itertools.count():
        if number >= _WARM_BATCHES and time.monotonic() - begin >= _WARM_SECONDS:
            break
        next(batches)
    begin, cpu, count = time.monotonic(), time.process_time(), 0
    while (elapsed := time.monotonic() - begin) < seconds or not count:
        next(batches)
        count += 1
    cpu = time.process_time() - cpu
    return batch, {
        'sample_bytes': sum(x.nbytes for x in batch.values()) / len(batch[schema.KEY]),
        'first_batch_seconds': first,
        'batch_seconds': elapsed / count,
        'cpu_share': cpu / elapsed / _num_cores(),
        'resident_bytes': 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _time_device(
    config: ml_collections.ConfigDict,
    builder: tfds.core.DatasetBuilder,
    batches: Iterator[Batch],
    batch: Batch,
    step_ms: float | None,
    seconds: float,
) -> dict[str, Any]:
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
    arriving.close()  # type: ignore[attr-defined]  # a generator
    return times


def _make_step(
    config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh, builder: tfds.core.DatasetBuilder
) -> Callable[[Batch], Any]:
    """The training step of the configuration, from weights as at the start."""
    stats = input_pipeline.dataset_stats(builder, config.data.text)
    if not (stats.text_dim or stats.num_tokens):
        raise ValueError(
            f'{builder.data_dir}: holds no text embeddings, so that no step can be made for it; '
            'say how long one takes with --step_ms.'
        )
    compiled = program.for_data(config, mesh, model_facts(stats))
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
