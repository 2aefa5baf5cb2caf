"""The log of a run: an introduction, averages over windows of steps, and times.

docs/training.md explains each scalar.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import ml_collections
import numpy as np
from absl import logging
from clu import parameter_overview
from jax.experimental import multihost_utils

import train_lib
from coyo11m_tfds.process.sizes import format_bytes, format_count
from input_pipeline import ReadCounts
from train_lib.learning import metrics
from train_lib.learning.step import Program
from train_lib.lifecycle import chips
from train_lib.lifecycle.writers import BackgroundWriter

if TYPE_CHECKING:
    from etils import epath

# Linux alone has it: sizes of this process in pages, of which the second is the resident one.
_PROCESS_MEMORY = pathlib.Path('/proc/self/statm')


def log_on_process_0(text: str, *arguments) -> None:
    """Logs a line in process 0 only, for facts that are equal on all processes."""
    if jax.process_index() == 0:
        logging.info(text, *arguments)


def introduce(
    config: ml_collections.ConfigDict,
    program: Program,
    *,
    data_lines: Sequence[str],
    num_tokens: int,
    first_step: int,
    workdir: 'epath.Path',
) -> None:
    """Logs the machine, data, model and length of a run.

    Args:
        config: Configuration of the run.
        program: Its compiled functions, with the model and the encoder of texts.
        data_lines: Description of the data.
        num_tokens: Tokens of the longest text; 0 for embeddings.
        first_step: Number of the step that comes first.
        workdir: Folder of the run.
    """
    # A sharding knows its mesh, whatever it does with the array.
    placement: Any = program.abstract_state.step.sharding  # a NamedSharding
    mesh = ' x '.join(f'{axis} {size}' for axis, size in placement.mesh.shape.items())
    log_on_process_0(
        f'machine: {jax.device_count()} x {jax.devices()[0].device_kind}, processes: '
        f'{jax.process_count()}, cores of this host: {os.cpu_count()}, mesh {mesh}'
    )
    for line in data_lines:
        log_on_process_0(f'data: {line}')
    encoder = program.encoder
    if encoder is not None:
        flops = encoder.network.config.flops(num_tokens) / 1e9
        log_on_process_0(
            f'encoder: {encoder.name}, {_count_millions(encoder.params)}, frozen, {flops:.3g} '
            f'GFLOP a sample, {encoder.network.dtype}'
        )
    log_on_process_0(
        f'model: {config.model.name}, {_count_millions(program.abstract_state.params)}, '
        f'{program.flops(num_tokens) / 1e9:.3g} GFLOP to train on a sample, {config.model.dtype}'
    )
    steps = f'{first_step} to {config.num_steps}'
    log_on_process_0(f'steps {steps}, into {workdir}; compiling ...')


def _count_millions(params: Any) -> str:
    """Returns the number of parameters: 32.8 million parameters."""
    return f'{parameter_overview.count_parameters(params) / 1e6:.4g} million parameters'


@dataclasses.dataclass
class TrainLog:
    """Merges the metrics of steps, and writes their averages every `log_every` steps.

    Attributes:
        summary: Description of the last window that was written, for people.
    """

    config: ml_collections.ConfigDict
    writer: BackgroundWriter
    clock: 'StepClock'
    steps_before: int  # of the run, which were trained before this process began
    flops: float  # to train on a sample; 0 if unknown
    describe_progress: Callable[[int], dict[str, float]]  # scalars about the data up to a step
    empty: metrics.TrainMetrics  # of no step, on the devices of the steps' metrics
    # Merged metrics of the steps since the last report. A checkpoint holds them, so that a run that
    # is interrupted within a window later writes the same report.
    window: metrics.TrainMetrics
    advise_restart: Callable[[int], str]  # for a resume from before a bad step

    def __post_init__(self):
        self.summary = ''  # of the last window that was written
        self._opened = time.monotonic()
        self._first_finished: float | None = None
        self._complete_window: tuple[int, metrics.TrainMetrics] | None = None

    def add(self, step: int, update: metrics.TrainMetrics) -> None:
        """Adds a step that has just started, and writes the window that ended before it."""
        # Only now, after the next step has been dispatched: so the device always has work.
        self.write_complete()
        self.window = metrics.merge(self.window, update)
        self.clock.step_started(update)
        if self._first_finished is None:
            self._log_first_step(step, update)
        if step % self.config.log_every == 0:
            self._complete_window = step, self.window
            self.window = self.empty

    def settle(self, step: int) -> None:
        """Before a checkpoint, waits for all steps, writes a complete window, and flushes."""
        # Steps before a checkpoint are not trained again, so their log must be safe; and a run that
        # is about to fail must not replace its checkpoints.
        self.write_complete()
        self._check_skipped(step, jax.device_get(self.window))
        self.writer.flush()

    def write_complete(self) -> None:
        """Waits for the steps of a complete window, and writes it."""
        if self._complete_window is None:
            return
        step, window = self._complete_window
        self._complete_window = None
        window = jax.device_get(window)
        self._check_skipped(step, window)
        means = window.compute()
        # This one is for `_check_skipped` alone.
        del means['skipped_in_a_row']
        scalars = {}
        for name, mean in means.items():
            # Where no step counted there is no mean.
            if not math.isnan(mean):
                scalars[f'train/{name}'] = float(mean)
        scalars |= self.clock.lap(self.config.batch_size)
        scalars |= self._current_scalars(step, scalars.get('train/samples_per_second'))
        self.writer.write_scalars(step, scalars)
        self.summary = ', '.join(self._summarize(step, scalars))
        log_on_process_0('%s', self.summary)

    def _check_skipped(self, step: int, window: metrics.TrainMetrics) -> None:
        """Raises a FloatingPointError if more steps were skipped than the configuration allows."""
        # The most in the window, and all since the beginning of the run.
        in_a_row = int(window.skipped_in_a_row.compute())
        total = int(window.skipped_steps.compute())
        if in_a_row > self.config.max_skipped_in_a_row:
            count = f'{format_count(in_a_row, "step")} in a row'
            limit = f'max_skipped_in_a_row={self.config.max_skipped_in_a_row}'
        elif total > self.config.max_skipped:
            count = format_count(total, 'step')
            limit = f'max_skipped={self.config.max_skipped}'
        else:
            return
        raise FloatingPointError(
            f'{count} up to step {step} had a loss or a gradient that was not finite, more than '
            f'{limit}: training has diverged. {self.advise_restart(step - in_a_row)}.'
        )

    def _current_scalars(self, step: int, rate: float | None) -> dict[str, float]:
        """Returns scalars of this moment, and those that follow from the samples a second."""
        scalars = self.describe_progress(step)
        if rate and self.flops:
            flops = self.flops * rate / jax.device_count()
            scalars['device/tflops_per_chip'] = flops / 1e12
            # Only of chips whose peak is published.
            chip = chips.CHIPS.get(jax.devices()[0].device_kind)
            if chip is not None:
                scalars['device/model_flop_utilization'] = flops / chip.flops
        counts = self.clock.read_counts()
        scalars['input/chunks_in_flight'] = counts.chunks_in_flight
        scalars['input/bad_records'] = counts.bad_records
        # A leak of the host ends a run after days, and shows here after hours.
        if _PROCESS_MEMORY.exists():
            _, resident_pages, *_ = _PROCESS_MEMORY.read_text('ascii').split()
            pages = int(resident_pages)
            scalars['host/memory_gb'] = pages * os.sysconf('SC_PAGE_SIZE') / 1e9
        return scalars

    def _log_first_step(self, step: int, update: metrics.TrainMetrics) -> None:
        """Logs how long the first step took, for which `StepClock.step_started` has waited."""
        self._first_finished = time.monotonic()
        first_batch = self.clock.first_batch or self._opened
        log_on_process_0(
            'loss %.4f, step %d after %.0f s: %.0f s to begin, %.1f s for the first batch, '
            '%.0f s to compile and compute it',
            jax.device_get(update.loss).compute(),
            step,
            self._first_finished - train_lib.STARTED,
            self._opened - train_lib.STARTED,
            first_batch - self._opened,
            self._first_finished - first_batch,
        )

    def _summarize(self, step: int, scalars: Mapping[str, float]) -> Iterator[str]:
        """Yields what describes a window: loss 0.4123, step 350 of 900, 2.2 steps/s, ..."""
        if 'train/loss' in scalars:
            yield f'loss {scalars["train/loss"]:.4f}'
        else:
            yield 'no finite loss'
        yield f'step {step} of {self.config.num_steps}'
        if 'train/steps_per_second' in scalars:
            rate = scalars['train/steps_per_second']
            decimals = 2 if rate < 10 else 0
            yield f'{rate:.{decimals}f} steps/s'
            # Evaluations and the like included, as they will come again.
            seconds = time.monotonic() - (self._first_finished or self._opened)
            # Without the first one, whose compilation does not come again.
            steps_done = max(step - self.steps_before - 1, 1)
            steps_left = self.config.num_steps - step
            remaining = round(seconds / steps_done * steps_left)
            yield f'{datetime.timedelta(seconds=remaining)} left'
        if 'train/epoch' in scalars:
            yield f'epoch {scalars["train/epoch"]:.2f}'
        if 'train/samples_per_second' in scalars:
            yield f'{scalars["train/samples_per_second"]:,.0f} samples/s'
            yield f'waiting {scalars["input/wait_share_max"]:.0%}'
        if scalars.get('input/requests'):
            requests = format_count(int(scalars['input/requests']), 'request')
            yield f'{requests} of {scalars["input/request_seconds"]:.2f} s'
        if scalars.get('input/retries'):
            yield format_count(int(scalars['input/retries']), 'retry', 'retries')
        if 'input/cache_hits' in scalars:
            hits = format_count(int(scalars['input/cache_hits']), 'hit')
            misses = format_count(int(scalars['input/cache_misses']), 'miss', 'misses')
            size = format_bytes(1e6 * scalars['input/cache_mb'])
            yield f'cache {hits} ({size}), {misses}'
        if scalars.get('train/skipped_steps'):
            yield f'{scalars["train/skipped_steps"]:.0f} skipped'


# Steps that may be waiting or under way on the devices: a stop request waits for as many. One more
# than one, so that a hiccup of the host does not leave the devices idle.
AHEAD = 2

_Moment = concurrent.futures.Future[float]  # `time.monotonic`, once it is known


class StepClock:
    """Measures the rates of finished steps and of reading, and how long the devices lacked data."""

    def __init__(self, batches_ready: Callable[[], int], read_counts: Callable[[], ReadCounts]):
        """Starts to measure.

        Args:
            batches_ready: Returns how many batches have arrived for the steps to come.
            read_counts: Returns what training has read since the process began.
        """
        self._batches_ready = batches_ready
        self.read_counts = read_counts
        # A thread waits for each step and records its end, so that the host can run up to `AHEAD`
        # steps ahead of the devices.
        self._watcher = concurrent.futures.ThreadPoolExecutor(1, 'step-clock')
        self._in_flight: collections.deque[_Moment] = collections.deque()
        self._last: _Moment | None = None
        self.first_batch: float | None = None  # when it arrived
        self._restart(self._watcher.submit(time.monotonic))

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Marks a block in which the host waits for a batch, also in profiles."""
        began = time.monotonic()
        # Counted before the wait: it takes the one that it waits for.
        self._ready.append(self._batches_ready())
        with jax.profiler.TraceAnnotation('waiting for input'):
            yield
        if self._last is not None:
            self._waits.append((began, self._last, time.monotonic()))
        elif self.first_batch is None:
            self.first_batch = time.monotonic()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes a block, such as an evaluation, from the times; waits for the steps before."""
        if self._last is not None:
            self._last.result()
        try:
            yield
        finally:
            end = self._watcher.submit(time.monotonic)
            # Recorded now: later, it would shorten the next step.
            end.result()
            self._marks.append((end, False))

    def step_started(self, result: Any) -> None:
        """Counts a step that is being computed; waits for the one `AHEAD` steps before it."""
        # The first step includes the compilation, which would spoil all rates.
        is_first = self._last is None
        self._last = step_end = self._watcher.submit(_wait_for_end, result)
        if is_first:
            step_end.result()
            self._restart(step_end)
            return
        self._marks.append((step_end, True))
        self._in_flight.append(step_end)
        if len(self._in_flight) > AHEAD:
            self._in_flight.popleft().result()

    def lap(self, batch_size: int) -> dict[str, float]:
        """Waits for all started steps; returns rates, times and shares since the last lap.

        All processes must call this together. Without a finished step it returns nothing.
        """
        seconds = self._measure_steps()
        # Equal on all processes, so all return here or none.
        if not seconds:
            return {}
        total = sum(seconds)
        wait_seconds = self._measure_waits()
        # The only exchange between hosts, once a lap: all must call this after the same step.
        with jax.transfer_guard('allow'):
            shares = multihost_utils.process_allgather(np.float32(wait_seconds / total))
        scalars = {
            'train/steps_per_second': len(seconds) / total,
            'train/samples_per_second': len(seconds) * batch_size / total,
            'device/step_seconds_median': statistics.median(seconds),
            'device/step_seconds_p95': float(np.percentile(seconds, 95)),
            'input/wait_share_min': float(np.min(shares)),
            'input/wait_share_max': float(np.max(shares)),
        }
        if self._ready:
            scalars['input/batches_ready'] = statistics.fmean(self._ready)
        scalars |= self._measure_reading(total)
        # The next lap begins at the end of the last step, or of what was aside since.
        self._restart(self._marks[-1][0])
        return scalars

    def _measure_steps(self) -> list[float]:
        """Waits for all started steps; returns the seconds of each one since the last lap."""
        seconds = []
        for (begin, _), (end, ends_step) in itertools.pairwise(self._marks):
            # What was aside ends at a mark of its own, and the next step begins there.
            if ends_step:
                seconds.append(end.result() - begin.result())
        return seconds

    def _measure_waits(self) -> float:
        """Returns the seconds in which the devices lacked data since the last lap."""
        total = 0.0
        for began, last_step, arrived in self._waits:
            # The devices lack data from the end of a step until the host has the next batch; a wait
            # for a batch while they compute does not count.
            idle_since = max(began, last_step.result())
            total += max(0.0, arrived - idle_since)
        return total

    def _measure_reading(self, seconds: float) -> dict[str, float]:
        """Returns what this host has read since the last lap, which took so many seconds."""
        now = self.read_counts()
        before = self._counts
        num_bytes = now.num_bytes - before.num_bytes
        scalars = {'input/read_mb_per_second': num_bytes / 1e6 / seconds}
        # Of local data there is nothing more to say.
        if now.num_requests or now.cache_hits:
            requests = now.num_requests - before.num_requests
            request_seconds = now.request_seconds - before.request_seconds
            scalars['input/requests'] = requests
            scalars['input/request_seconds'] = request_seconds / max(1, requests)
            scalars['input/retries'] = now.num_retries - before.num_retries
        if now.cache_hits or now.cache_misses:
            scalars['input/cache_hits'] = now.cache_hits - before.cache_hits
            scalars['input/cache_misses'] = now.cache_misses - before.cache_misses
            scalars['input/cache_mb'] = (now.cache_bytes - before.cache_bytes) / 1e6
        return scalars

    def _restart(self, moment: _Moment) -> None:
        """Begins a lap at a moment."""
        # Moments, and whether a step ends there.
        self._marks: list[tuple[_Moment, bool]] = [(moment, False)]
        # Of each wait for a batch: its begin, the end of the last step before it, and its end.
        self._waits: list[tuple[float, _Moment, float]] = []
        # How many batches were ready at each of them.
        self._ready: list[int] = []
        self._counts = self.read_counts()


def _wait_for_end(result: Any) -> float:
    """Returns the moment at which a result of the devices is complete."""
    jax.block_until_ready(result)
    return time.monotonic()
