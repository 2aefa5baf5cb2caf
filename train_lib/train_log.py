"""What a run tells while it trains: averages over a window of steps, and where the time went.

    log = train_log.TrainLog(writer, every=100, batch_size=256, empty=TrainMetrics.empty())
    for step in range(1, num_steps + 1):
        with log.clock.waiting_for_data():
            batch = next(batches)
        state, update = train_step(state, batch)
        log.add(step, update)
    log.settle(step)

Every report holds the metrics of the steps (`metrics.TrainMetrics`); `loss` and `grad_norm` are
left out where every step of the window was skipped, `skipped_steps` counts those of the whole run.
And of this host:

    examples_per_second   samples of all hosts, evaluations and the like left out of the time
    data_wait_share       share of that time in which the device had nothing to do for lack of data
    read_mb_per_second    10^6 bytes of records that this host read for training, in that time
    chunks_in_flight      runs of records being read at the moment of the report
    bad_records           records that this host could not read and left out since it started
    host_memory_gb        10^9 bytes of memory that this process holds at the moment (Linux)

The first three need a counted step: they are left out of a report of the very first step alone,
which includes the compiler. What comes from reading is left out where nothing counts it.

The host does not wait for a step that has just been started: the metrics of a window are fetched
when the step after it has been given to the device, so the device always has something to do.
Neither TensorFlow nor torch is imported here.
"""

import concurrent.futures
import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
from clu import metric_writers

from train_lib import metrics

# Linux alone has it: sizes of this process in pages, the second of them what is resident.
_OWN_MEMORY = pathlib.Path('/proc/self/statm')


class ReadCounts(Protocol):
    """Sums since they were first counted, as `input_pipeline.ReadCounter.read` returns them."""

    num_bytes: int
    chunks_in_flight: int
    bad_records: int


class StepClock:
    """Measures the rates of steps and of reading, and how long the device lacked data.

    The device lacks data from the end of the last step until the host has the next batch; while
    the device still works, waiting for a batch costs nothing and is not counted.
    """

    def __init__(self, read_counts: Callable[[], ReadCounts] | None = None):
        """Starts; `read_counts` returns what has been read for training, if anything counts it."""
        self._read_counts = read_counts
        self._watcher = concurrent.futures.ThreadPoolExecutor(1, 'step-clock')
        self._running = None
        self._paused = None
        self._restart()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """The host waits for a batch here."""
        idle = self._watcher.submit(_finished_at, self._running)
        yield
        self._waits.append((idle, time.monotonic()))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens here (an evaluation, say) counts neither as training nor as waiting.

        Reading goes on, for the steps that follow, and is counted.
        """
        jax.block_until_ready(self._running)
        self._paused = time.monotonic()
        yield
        self._aside += time.monotonic() - self._paused
        self._paused = None

    def step_started(self, result: Any) -> None:
        """Counts a step, whose arrays `result` are still being computed.

        Waits for the first step of all and does not count it, because it includes the compiler.
        """
        if self._running is None:
            jax.block_until_ready(result)
            self._restart()
        else:
            self._steps += 1
        self._running = result

    def lap(self, batch_size: int) -> dict[str, float]:
        """Rates and share since the last lap; empty where no step was counted."""
        if not self._steps:
            return {}
        now = time.monotonic() if self._paused is None else self._paused
        seconds = now - self._start - self._aside
        waited = sum(max(0.0, arrived - idle.result()) for idle, arrived in self._waits)
        scalars = {
            'examples_per_second': self._steps * batch_size / seconds,
            'data_wait_share': waited / seconds,
        }
        if self._read_counts is not None:
            num_bytes = self._read_counts().num_bytes - self._num_bytes
            scalars['read_mb_per_second'] = num_bytes / 1e6 / seconds
        self._restart()
        return scalars

    def _restart(self) -> None:
        self._start = time.monotonic()
        if self._paused is not None:
            self._paused = self._start
        self._aside = 0.0
        self._steps = 0
        self._waits = []
        if self._read_counts is not None:
            self._num_bytes = self._read_counts().num_bytes


class TrainLog:
    """Merges the metrics of steps and writes their averages at every multiple of so many steps.

    Attributes:
        clock: to be told of waiting and of what is aside; its rates and share are written too.
        window: merged metrics of the steps since the last multiple. Part of a checkpoint, so that
            a run that was interrupted inside a window writes what it would have written.
    """

    def __init__(
        self,
        writer: metric_writers.MetricWriter,
        *,
        every: int,
        batch_size: int,
        empty: metrics.TrainMetrics,
        max_skipped_in_a_row: int,
        max_skipped: int,
        read_counts: Callable[[], ReadCounts] | None = None,
    ):
        """Starts with an empty window.

        Args:
            writer: gets the scalars.
            every: steps of a window, at least 1.
            batch_size: samples of a step, over all processes.
            empty: metrics of no step, on the devices where those of the steps are.
            max_skipped_in_a_row, max_skipped: more steps that are not finite end the run, one after
                the other or in all.
            read_counts: returns what this host has read for training, evaluations left out; None
                where nothing counts it.
        """
        self.clock = StepClock(read_counts)
        self.window = empty
        self._empty = empty
        self._limits = {
            'skipped_in_a_row': ('max_skipped_in_a_row', max_skipped_in_a_row),
            'skipped_steps': ('max_skipped', max_skipped),
        }
        self._writer = writer
        self._every = every
        self._batch_size = batch_size
        self._read_counts = read_counts
        self._complete = None

    def add(self, step: int, update: metrics.TrainMetrics) -> None:
        """Adds a step that has just been started, and writes the window that ended before it.

        Raises:
            FloatingPointError: too many steps up to the end of that window were skipped.
        """
        self._write_complete()
        self.window = metrics.merge(self.window, update)
        self.clock.step_started(update)
        if step % self._every == 0:
            self._complete = step, self.window
            self.window = self._empty

    def settle(self, step: int) -> None:
        """Waits for all steps up to `step`, writes what is complete, and flushes the writer.

        Call it before a checkpoint: what precedes a checkpoint is not trained again, so its log
        has to be safe, and a run that is to end must not overwrite its checkpoints.

        Raises:
            FloatingPointError: too many steps were skipped, in the unfinished window included.
        """
        self._write_complete()
        self._check_skipped(step, jax.device_get(self.window))
        self._writer.flush()

    def _write_complete(self) -> None:
        if self._complete is None:
            return
        step, window = self._complete
        self._complete = None
        window = jax.device_get(window)
        self._check_skipped(step, window)
        scalars = {name: float(x) for name, x in window.compute().items()}
        del scalars['skipped_in_a_row']
        # Where no step counted there is no mean.
        scalars = {name: x for name, x in scalars.items() if not math.isnan(x)}
        scalars |= self.clock.lap(self._batch_size)
        self._writer.write_scalars(step, scalars | self._host_state())

    def _check_skipped(self, step: int, window: metrics.TrainMetrics) -> None:
        for name, (field, limit) in self._limits.items():
            skipped = int(getattr(window, name).compute())
            if skipped > limit:
                in_a_row = ' in a row' if name == 'skipped_in_a_row' else ''
                raise FloatingPointError(
                    f'{skipped} steps{in_a_row} up to step {step} had a loss or a '
                    f'gradient that was not finite, more than {field}={limit}: training '
                    'has diverged. No checkpoint was written since; start again from an earlier '
                    'one with a lower optimizer.learning_rate, or afresh with a longer warm-up.'
                )

    def _host_state(self) -> dict[str, float]:
        """What is so at this moment."""
        scalars = {}
        if self._read_counts is not None:
            counts = self._read_counts()
            scalars['chunks_in_flight'] = counts.chunks_in_flight
            scalars['bad_records'] = counts.bad_records
        if _OWN_MEMORY.exists():
            pages = int(_OWN_MEMORY.read_text('ascii').split()[1])
            scalars['host_memory_gb'] = pages * os.sysconf('SC_PAGE_SIZE') / 1e9
        return scalars


def _finished_at(result: Any) -> float:
    """When the arrays have been computed, or now if they were before."""
    jax.block_until_ready(result)
    return time.monotonic()
