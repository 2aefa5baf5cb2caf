"""What a run tells while it trains: averages over a window of steps, and where the time went.

    log = train_log.TrainLog(writer, every=100, batch_size=256, empty=TrainMetrics.empty())
    for step in range(1, num_steps + 1):
        with log.clock.waiting_for_data():
            batch = next(batches)
        state, update = train_step(state, batch)
        log.add(step, update)
    log.settle()

The host does not wait for a step that has just been started: the metrics of a window are fetched
when the step after it has been given to the device, so the device always has something to do.
"""

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from clu import metric_writers

from train_lib import metrics


class StepClock:
    """Measures the rate of steps and the share of the time in which the device lacked data.

    The device lacks data from the end of the last step until the host has the next batch; while
    the device still works, waiting for a batch costs nothing and is not counted.
    """

    def __init__(self):
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
        """What happens here (an evaluation, say) counts neither as training nor as waiting."""
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
        """Rate and share since the last lap; empty where no step was counted."""
        if not self._steps:
            return {}
        now = time.monotonic() if self._paused is None else self._paused
        seconds = now - self._start - self._aside
        waited = sum(max(0.0, arrived - idle.result()) for idle, arrived in self._waits)
        scalars = {
            'examples_per_second': self._steps * batch_size / seconds,
            'data_wait_share': waited / seconds,
        }
        self._restart()
        return scalars

    def _restart(self) -> None:
        self._start = time.monotonic()
        if self._paused is not None:
            self._paused = self._start
        self._aside = 0.0
        self._steps = 0
        self._waits = []


class TrainLog:
    """Merges the metrics of steps and writes their averages at every multiple of so many steps.

    Attributes:
        clock: to be told of waiting and of what is aside; its rate and share are written too.
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
    ):
        """Starts with an empty window.

        Args:
            writer: gets the scalars.
            every: steps of a window.
            batch_size: samples of a step, over all processes.
            empty: metrics of no step, on the devices where those of the steps are.

        Raises:
            ValueError: `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f'log_every={every} must be at least 1')
        self.clock = StepClock()
        self.window = empty
        self._empty = empty
        self._writer = writer
        self._every = every
        self._batch_size = batch_size
        self._complete = None

    def add(self, step: int, update: metrics.TrainMetrics) -> None:
        """Adds a step that has just been started, and writes the window that ended before it.

        Raises:
            FloatingPointError: a metric of that window is not finite.
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
        has to be safe, and a state that is no longer finite must not be kept.

        Raises:
            FloatingPointError: a metric is not finite, in the unfinished window included.
        """
        self._write_complete()
        window = jax.device_get(self.window)
        if window.loss.count:
            _check_finite(step, window.compute())
        self._writer.flush()

    def _write_complete(self) -> None:
        if self._complete is None:
            return
        step, window = self._complete
        self._complete = None
        scalars = {name: float(x) for name, x in jax.device_get(window).compute().items()}
        _check_finite(step, scalars)
        self._writer.write_scalars(step, scalars | self.clock.lap(self._batch_size))


def _finished_at(result: Any) -> float:
    """When the arrays have been computed, or now if they were before."""
    jax.block_until_ready(result)
    return time.monotonic()


def _check_finite(step: int, scalars: dict[str, float]) -> None:
    bad = {name: float(x) for name, x in scalars.items() if not np.isfinite(x)}
    if bad:
        raise FloatingPointError(
            f'{bad} in the steps up to {step}: training has diverged. No checkpoint was written '
            'since; start again with a lower optimizer.learning_rate or a longer warm-up.'
        )
