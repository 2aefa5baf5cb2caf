"""The log of a run: averages over a window of steps, and where the time went.

    log = train_log.TrainLog(writer, every=100, batch_size=256, empty=TrainMetrics.empty())
    for step in range(1, num_steps + 1):
        with log.clock.waiting_for_data():
            batch = next(batches)
        state, update = train_step(state, batch)
        log.add(step, update)
    log.settle(step)

A report holds the metrics of the steps (`metrics.TrainMetrics`) as `train/...`, the rates and times
of `step_clock.StepClock.lap`, and the state of this host; docs/training.md explains each scalar.
`loss` and `grad_norm` are left out where every step of the window was skipped, rates and times of
the very first step, which includes the compiler.

The host does not wait for a step that has just been started: the metrics of a window are fetched
when the step after it has been given to the device, so the device always has something to do.
Neither TensorFlow nor torch is imported here.
"""

import math
import os
import pathlib
from collections.abc import Callable, Mapping

import jax
from clu import metric_writers

from train_lib import metrics
from train_lib.console import Console
from train_lib.step_clock import ReadCounts, StepClock

# Linux alone has it: sizes of this process in pages, the second of them what is resident.
_OWN_MEMORY = pathlib.Path('/proc/self/statm')


class TrainLog:
    """Merges the metrics of steps and writes their averages at every multiple of so many steps.

    Attributes:
        clock: measures waiting and what is done aside; its rates are part of a report.
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
        batches_ready: Callable[[], int] | None = None,
        derived: Callable[[int, Mapping[str, float]], Mapping[str, float]] | None = None,
        console: Console | None = None,
        way_back: Callable[[int], str] = lambda step: 'Start afresh',
    ):
        """Starts with an empty window.

        Args:
            writer: writer that gets the scalars.
            every: steps of a window, at least 1.
            batch_size: samples of a step, over all processes.
            empty: metrics of zero steps, on the devices of the steps' metrics.
            max_skipped_in_a_row, max_skipped: limits for steps that are not finite, one after the
                other and in all; more end the run.
            read_counts: function that returns what this host has read for training, without
                evaluations; None if nothing counts it.
            batches_ready: function that returns the number of batches that are ready; or None.
            derived: function from a step and the scalars of its report to further scalars.
            console: console that shows the reports.
            way_back: function that returns advice for going back to before a bad step.
        """
        self.clock = StepClock(read_counts, batches_ready)
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
        self._derived = derived
        self._console = console
        self._way_back = way_back
        self._complete: tuple[int, metrics.TrainMetrics] | None = None

    def add(self, step: int, update: metrics.TrainMetrics) -> None:
        """Adds a step that has just been started, and writes the window that ended before it.

        Raises:
            FloatingPointError: too many steps up to the end of that window were skipped.
        """
        self.write_complete()
        self.window = metrics.merge(self.window, update)
        self.clock.step_started(update)
        if self._console is not None and self.clock.first_batch is not None:
            self._console.started(step, update, self.clock.first_batch)
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
        self.write_complete()
        self._check_skipped(step, jax.device_get(self.window))
        self._writer.flush()

    def write_complete(self) -> None:
        """Waits for the steps of a window that is complete, and writes it; raises as `add`."""
        if self._complete is None:
            return
        step, window = self._complete
        self._complete = None
        window = jax.device_get(window)
        self._check_skipped(step, window)
        means = window.compute()
        del means['skipped_in_a_row']
        # Where no step counted there is no mean.
        scalars = {f'train/{name}': float(x) for name, x in means.items() if not math.isnan(x)}
        scalars |= self.clock.lap(self._batch_size)
        scalars |= self._host_state()
        if self._derived is not None:
            scalars |= self._derived(step, scalars)
        self._writer.write_scalars(step, scalars)
        if self._console is not None:
            self._console.report(step, scalars)

    def _check_skipped(self, step: int, window: metrics.TrainMetrics) -> None:
        for name, (field, limit) in self._limits.items():
            skipped = int(getattr(window, name).compute())
            if skipped > limit:
                in_a_row = ' in a row' if name == 'skipped_in_a_row' else ''
                good = step - int(window.skipped_in_a_row.compute())
                raise FloatingPointError(
                    f'{skipped} steps{in_a_row} up to step {step} had a loss or a '
                    f'gradient that was not finite, more than {field}={limit}: training has '
                    f'diverged. {self._way_back(good)}, with a lower optimizer.learning_rate and '
                    '--accept_changes=optimizer.learning_rate, or a longer warm-up.'
                )

    def _host_state(self) -> dict[str, float]:
        """Scalars of this moment."""
        scalars: dict[str, float] = {}
        if self._read_counts is not None:
            counts = self._read_counts()
            scalars['input/chunks_in_flight'] = counts.chunks_in_flight
            scalars['input/bad_records'] = counts.bad_records
        if _OWN_MEMORY.exists():
            pages = int(_OWN_MEMORY.read_text('ascii').split()[1])
            scalars['host/memory_gb'] = pages * os.sysconf('SC_PAGE_SIZE') / 1e9
        return scalars
