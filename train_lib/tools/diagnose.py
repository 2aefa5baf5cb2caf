"""Measures whether the devices or the input limit a run.

    python -m train_lib.tools.diagnose --config=tpu_v5e_16 --hosts=4 \\
        --config.data.dir=DATA
    python -m train_lib.tools.diagnose --config=default --step_ms=120 \\
        --config.data.dir=gs://BUCKET/DATA

The program first times batches without steps, read as in the run, then steps
without reading, on one batch that stays on the devices of this machine. It
says which of the two takes longer, unless their times overlap. A step of a
large model takes minutes on a CPU; `--step_ms` gives its time instead.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

import input_pipeline
from coyo11m_tfds.process import command_line
from train_lib import run

FLAGS = flags.FLAGS

_LAPS = 5  # whose times show how much runs vary here
# The input is steady when its buffers are full and late imports are done.
_WARM_BATCHES = 8
_WARM_SECONDS = 1.0
_WARM_STEPS = 2

_ADVICE = {
    input_pipeline.ROWS: 'One thread of a host gathers rows: a faster disk, memory that the data '
    'set fits into, faster cores or more hosts make batches come faster.',
    input_pipeline.CHUNKS: 'Chunks are fetched in parallel: raise --config.data.parallel_reads, or '
    'use more hosts.',
}


def verdict(step: list[float], batch: list[float], engine: str) -> str:
    """Returns sentences that say whether steps or batches limit a run.

    Args:
        step: Mean seconds of a step in each lap.
        batch: Mean seconds of a batch in each lap.
        engine: Engine that has read the batches.
    """
    # Only where no lap of the one is as long as any of the other: runs vary.
    if max(batch) < min(step):
        return 'The devices are the limit. A faster input gains nothing.'
    if min(batch) > max(step):
        share = 1 - statistics.median(step) / statistics.median(batch)
        advice = _ADVICE.get(engine, '')
        return f'The input is the limit: devices wait about {share:.0%} of the time. {advice}'
    return (
        'The times overlap, so either may be the limit. Measure longer with --seconds, and while '
        'nothing else runs on the machine.'
    )


def time_steps_and_batches(
    config: ml_collections.ConfigDict, hosts: int, step_ms: float | None, seconds: float
) -> tuple[list[float], list[float], str]:
    """Returns mean seconds of steps and of one host's batches in some laps, and the engine.

    Args:
        config: Configuration of the run.
        hosts: Number of hosts that share a batch.
        step_ms: Milliseconds of a step; None to measure them.
        seconds: Time for reading, and then for steps.
    """
    # After `run.prepare`, because they take seconds.
    import jax

    from train_lib import data
    from train_lib.learning import sharding
    from train_lib.learning.step import for_data

    config = _share_of_one_host(config, hosts)
    # A pod's mesh is for its devices; `fsdp` holds for this host, whose devices it splits first.
    if hosts == 1:
        mesh = sharding.make_mesh(**config.mesh)
    else:
        mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
    training = data.TrainingData(config, mesh)
    batches = training.train_batches()
    # Steps take this batch again and again, so that reading does not slow them.
    batch = _warm_up(batches)
    batch_times = _time(lambda: jax.block_until_ready(next(batches)), seconds)
    if step_ms is not None:
        return [step_ms / 1000], batch_times, training.plan.engine
    program = for_data(config, mesh, training.facts)
    state = program.init()

    def step() -> None:
        """Takes one step and waits for it."""
        nonlocal state
        state, update = program.train_step(state, batch)
        jax.block_until_ready(update)

    # The first step compiles, which a run does once.
    for _ in range(_WARM_STEPS):
        step()
    return _time(step, seconds), batch_times, training.plan.engine


def _share_of_one_host(config: ml_collections.ConfigDict, hosts: int) -> ml_collections.ConfigDict:
    """Returns the configuration of one of some hosts, as if it were alone."""
    if config.batch_size % hosts or config.data.lanes % hosts:
        raise ValueError(
            f'--hosts={hosts} does not divide --config.batch_size={config.batch_size} and '
            f'--config.data.lanes={config.data.lanes}'
        )
    # This host reads its share of the lanes, as fast as it would next to the others.
    config = config.copy_and_resolve_references()
    config.batch_size //= hosts
    config.data.lanes //= hosts
    config.distributed = False
    return config


def _warm_up(batches: Iterator[Any]) -> Any:
    """Reads until buffers are full; returns the last batch."""
    start = time.monotonic()
    for number in itertools.count():
        batch = next(batches)
        if number >= _WARM_BATCHES and time.monotonic() - start >= _WARM_SECONDS:
            break
    return batch


def _time(call: Callable[[], Any], seconds: float) -> list[float]:
    """Returns the mean seconds of a call in each lap.

    All laps together take `seconds`, or one call each.
    """
    laps = []
    for _ in range(_LAPS):
        start = time.monotonic()
        elapsed = 0.0
        count = 0
        # At least once, however long a call takes.
        while elapsed < seconds / _LAPS or not count:
            call()
            count += 1
            elapsed = time.monotonic() - start
        laps.append(elapsed / count)
    return laps


def _format_laps(laps: list[float]) -> str:
    """Returns median, least and most of some seconds, in milliseconds."""
    median = 1000 * statistics.median(laps)
    low = 1000 * min(laps)
    high = 1000 * max(laps)
    return f'{median:,.1f} ms ({low:,.1f} to {high:,.1f})'


def main() -> None:
    """Prints the times of steps and batches, and which is the limit."""
    config = FLAGS.config
    input_pipeline.prepare_process()
    run.prepare()
    step, batch, engine = time_steps_and_batches(config, FLAGS.hosts, FLAGS.step_ms, FLAGS.seconds)
    command_line.print_lines(
        f'- a step alone: {_format_laps(step)}',
        f'- a batch alone, by {engine}: {_format_laps(batch)}',
        f'- {verdict(step, batch, engine)}',
    )


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, run.CONFIG_HELP, lock_config=True)
    flags.DEFINE_integer('hosts', 1, 'Number of hosts that share a batch.', lower_bound=1)
    help_of_step = 'Time of a step in milliseconds, instead of measuring it.'
    flags.DEFINE_float('step_ms', None, help_of_step, lower_bound=0)
    flags.DEFINE_float('seconds', 5, 'Seconds to time the reading, and then steps.', lower_bound=0)
    run.start(main, required=['config'])
