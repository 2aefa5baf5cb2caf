"""When steps have been finished, and how long the devices lacked data.

    clock = StepClock(read_counts, batches_ready)
    with clock.waiting_for_data():
        batch = next(batches)
    state, update = train_step(state, batch)
    clock.step_started(update)      # waits where the host is too far ahead
    clock.lap(batch_size)           # scalars since the last lap

A thread waits for each step and notes when it was finished, so that the host need not: it is at
most `AHEAD` steps ahead of the devices, which always have something to do. Steps that have only
been dispatched count nowhere. Neither TensorFlow nor torch is imported here.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

# Steps that may be waiting or under way on the devices: a stop request waits for as many. One more
# than one, so that a hiccup of the host does not leave the devices idle.
AHEAD = 2

_Moment = concurrent.futures.Future[float]  # `time.monotonic`, once it is known


class ReadCounts(Protocol):
    """Sums since they were first counted, as `input_pipeline.ReadCounter.read` returns them."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def chunks_in_flight(self) -> int: ...
    @property
    def bad_records(self) -> int: ...


class _Mark(NamedTuple):
    """A moment: the end of a step, or the begin of a stretch of them."""

    at: _Moment
    ends_step: bool


class StepClock:
    """Measures the rates of steps and of reading, and how long the devices lacked data.

    The devices lack data from the end of a step until the host has the next batch. While they
    compute, waiting for a batch costs nothing and does not count.

    Attributes:
        first_batch: time (`time.monotonic`) at which the batch of the first step came.
    """

    def __init__(
        self,
        read_counts: Callable[[], ReadCounts] | None = None,
        batches_ready: Callable[[], int] | None = None,
    ):
        """Starts.

        Args:
            read_counts: returns what has been read for training, if anything counts it.
            batches_ready: returns how many batches could be taken without waiting, likewise.
        """
        self._read_counts = read_counts
        self._batches_ready = batches_ready
        self._watcher = concurrent.futures.ThreadPoolExecutor(1, 'step-clock')
        self._in_flight: collections.deque[_Moment] = collections.deque()
        self._last: _Moment | None = None
        self.first_batch: float | None = None
        self._restart(_moment(time.monotonic()))

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """The host waits for a batch here."""
        asked = time.monotonic()
        if self._batches_ready is not None:
            self._ready.append(self._batches_ready())
        yield
        if self._last is not None:
            self._waits.append((asked, self._last, time.monotonic()))
        elif self.first_batch is None:
            self.first_batch = time.monotonic()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Time in this block (an evaluation, say) counts neither as training nor as waiting.

        Reading goes on, for the steps that follow, and is counted. Waits for the steps before.
        """
        if self._last is not None:
            self._last.result()
        try:
            yield
        finally:
            self._marks.append(_Mark(_moment(time.monotonic()), ends_step=False))

    def step_started(self, result: Any) -> None:
        """Counts a step, whose arrays `result` are still being computed.

        Waits for the first step of all and does not count it, because it includes the compiler;
        and for the step that was started `AHEAD` steps before this one.
        """
        is_first = self._last is None
        self._last = finished = self._watcher.submit(_finished_at, result)
        if is_first:
            finished.result()
            self._restart(finished)
            return
        self._marks.append(_Mark(finished, ends_step=True))
        self._in_flight.append(finished)
        if len(self._in_flight) > AHEAD:
            self._in_flight.popleft().result()

    def lap(self, batch_size: int) -> dict[str, float]:
        """Rates, times and shares since the last lap; empty where no step was counted.

        Waits for the steps that have been started. All processes call it after the same step.
        """
        seconds = [
            after.at.result() - before.at.result()
            for before, after in itertools.pairwise(self._marks)
            if after.ends_step
        ]
        if not seconds:
            return {}
        total = sum(seconds)
        waited = sum(
            max(0.0, came - max(asked, idle.result())) for asked, idle, came in self._waits
        )
        # The one thing that hosts tell each other, once a lap.
        with jax.transfer_guard('allow'):
            shares = multihost_utils.process_allgather(np.float32(waited / total))
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
        if self._read_counts is not None:
            num_bytes = self._read_counts().num_bytes - self._num_bytes
            scalars['input/read_mb_per_second'] = num_bytes / 1e6 / total
        # The end of the last step, or of what was aside since.
        self._restart(self._marks[-1].at)
        return scalars

    def _restart(self, moment: _Moment) -> None:
        self._marks = [_Mark(moment, ends_step=False)]
        self._waits: list[tuple[float, _Moment, float]] = []
        self._ready: list[int] = []
        if self._read_counts is not None:
            self._num_bytes = self._read_counts().num_bytes


def _finished_at(result: Any) -> float:
    """When the arrays have been computed, or now if they were before."""
    jax.block_until_ready(result)
    return time.monotonic()


def _moment(at: float) -> _Moment:
    moment = _Moment()
    moment.set_result(at)
    return moment
