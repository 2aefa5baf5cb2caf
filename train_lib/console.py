"""Shows a run to a person: a bar on a terminal, elsewhere a line for each window of steps.

    with Console(start=0, num_steps=900) as console:
        console.started(step, update)      # every step
        console.report(step, scalars)      # every window

    loss 0.4123, step 350 of 900, 2.2 steps/s, 0:04:10 left, epoch 5.69, 141 samples/s, waiting 0%

On a terminal, log lines of all modules come above the bar. Process 0 alone shows a run.
"""

import contextlib
import datetime
import sys
import time
from collections.abc import Iterator, Mapping

import jax
import tqdm
from absl import logging

import train_lib
from coyo11m_tfds.process.progress import fitting, make_bar
from train_lib.metrics import TrainMetrics

_BAR_FORMAT = '{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}'


class Console:
    """Progress bar of a run; a context manager that shows the bar."""

    def __init__(self, start: int, num_steps: int):
        """Starts at step `start` of `num_steps`."""
        self._start, self._num_steps = start, num_steps
        self._opened = time.monotonic()
        self._first_finished: float | None = None
        self._bar = make_bar(
            jax.process_index() == 0,
            total=num_steps,
            initial=start,
            bar_format=_BAR_FORMAT,
        )
        self._above = contextlib.ExitStack()

    def __enter__(self) -> 'Console':
        if not self._bar.disable:
            self._above.enter_context(_lines_above_the_bar())
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()
        self._above.close()

    def started(self, step: int, update: TrainMetrics, first_batch: float) -> None:
        """A step has been started, and the first is over; `first_batch`: when its batch arrived."""
        if self._first_finished is None:
            self._first_finished = time.monotonic()
            say(
                'loss %.4f, step %d after %.0f s: %.0f s to begin, %.1f s for the first batch, '
                '%.0f s to compile and compute it',
                *(jax.device_get(update.loss).compute(), step),
                self._first_finished - train_lib.STARTED,
                self._opened - train_lib.STARTED,
                first_batch - self._opened,
                self._first_finished - first_batch,
            )
        self._bar.update()

    def report(self, step: int, scalars: Mapping[str, float]) -> None:
        """A window of steps has been finished."""
        loss, *others = self._facts(step, scalars)
        if self._bar.disable:
            say('%s', ', '.join([loss, f'step {step} of {self._num_steps}', *others]))
        else:
            self._bar.set_description_str(f'{loss} ', refresh=False)
            before = f'{loss} 100%|#| {self._num_steps}/{self._num_steps}'
            self._bar.set_postfix_str(fitting(others, before))

    def _facts(self, step: int, scalars: Mapping[str, float]) -> Iterator[str]:
        yield f'loss {scalars["train/loss"]:.4f}' if 'train/loss' in scalars else 'no finite loss'
        if 'train/steps_per_second' in scalars:
            rate = scalars['train/steps_per_second']
            yield f'{rate:.{2 if rate < 10 else 0}f} steps/s'
            # Evaluations and the like included, as they will come again.
            done = step - self._start - 1
            per_step = (time.monotonic() - (self._first_finished or self._opened)) / max(done, 1)
            left = round(per_step * (self._num_steps - step))
            yield f'{datetime.timedelta(seconds=left)} left'
        if 'train/epoch' in scalars:
            yield f'epoch {scalars["train/epoch"]:.2f}'
        if 'train/samples_per_second' in scalars:
            yield f'{scalars["train/samples_per_second"]:,.0f} samples/s'
            yield f'waiting {scalars["input/wait_share_max"]:.0%}'
        if scalars.get('train/skipped_steps'):
            yield f'{scalars["train/skipped_steps"]:.0f} skipped'


def say(text: str, *arguments) -> None:
    """Logs a line in process 0 alone, for what is the same on all."""
    if jax.process_index() == 0:
        logging.info(text, *arguments)


@contextlib.contextmanager
def _lines_above_the_bar() -> Iterator[None]:
    handler = logging.get_absl_handler().python_handler
    previous = handler.stream
    handler.stream = _AboveTheBar()
    try:
        yield
    finally:
        handler.stream = previous


class _AboveTheBar:
    """A stream that takes the bar away while it writes."""

    def write(self, text: str) -> None:
        tqdm.tqdm.write(text, file=sys.stderr, end='')

    def flush(self) -> None:
        sys.stderr.flush()
