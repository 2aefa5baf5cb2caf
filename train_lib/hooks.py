"""Hooks of a run: a list of classes, and how to write another one.

    class WeightNorm(hooks.Hook):
        name = 'weight norm'

        def __init__(self, run):
            super().__init__(run, every=1000)

        def __call__(self, step, state):
            norm = float(optax.tree.norm(state.params))
            self.run.writer.write_scalars(step, {'train/weight_norm': norm})
            return f'{norm:.1f}'

and one more entry in `HOOKS`. After each step the loop calls those that are due, in the order of
the list, and logs what they return and how long they took. All processes call the same ones. What a
stop request breaks off is done when the run is resumed.
"""

import abc
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np
from absl import logging

from coyo11m_tfds.pictures import vae_decoder
from train_lib import console, evaluation, previews, signals
from train_lib.state import TrainState

if TYPE_CHECKING:
    from train_lib.train import Run

_PROFILE_AFTER = 10  # steps of this process: by then everything has been compiled


class Hook(abc.ABC):
    """Something that is done every so many steps and at the last one.

    Attributes:
        name: for the log.
        may_be_broken_off: whether a stop request may end it halfway, by an exception.
        run: what it works with.
        every: steps; 0 is never.
    """

    name: str
    may_be_broken_off = True

    def __init__(self, run: 'Run', every: int):
        self.run, self.every = run, every

    def due(self, step: int) -> bool:
        """True if it is called after this step, the same on all processes."""
        return self.every > 0 and (step % self.every == 0 or step == self.run.config.num_steps)

    @abc.abstractmethod
    def __call__(self, step: int, state: TrainState) -> str | None:
        """Does it, with the state after `step`; returns what to log, or None for nothing."""


class Evaluate(Hook):
    """Writes the loss of the validation split."""

    name = 'evaluation'

    def __init__(self, run: 'Run'):
        super().__init__(run, run.config.eval_every)

    def __call__(self, step: int, state: TrainState) -> str:
        batches = self.run.data.eval_batches()
        scalars = evaluation.evaluate(self.run.program.eval_step, state.ema_params, batches)
        self.run.writer.write_scalars(step, scalars)
        return f'loss {scalars["eval/loss"]:.4f}' if 'eval/loss' in scalars else 'no finite loss'


class Preview(Hook):
    """Writes a grid of pictures as PNG and to TensorBoard."""

    name = 'preview'

    def __init__(self, run: 'Run'):
        super().__init__(run, run.config.preview_every)
        # Before the first step, so that a VAE that is missing is told at once.
        self._paint = vae_decoder.painter(run.config.preview.vae if self.every else '')

    @functools.cached_property
    def _of_data(self) -> np.ndarray:
        return self._paint(self.run.data.preview_samples.latents)

    def __call__(self, step: int, state: TrainState) -> str:
        samples = self.run.data.preview_samples
        drawn = self.run.program.draw(state.ema_params, samples.text)
        path = self.run.workdir / previews.FOLDER / f'step_{step:06}.png'
        if jax.process_index() == 0:
            pictures = [self._of_data, self._paint(jax.device_get(drawn))]
            grid = previews.make_grid(pictures, samples.captions, title='left: data, right: model')
            self.run.writer.write_images(step, {'previews': grid[None]})
            previews.write_png(path, grid)
        return f'{len(samples.captions)} pictures in {path}'


class Profile(Hook):
    """Writes a profile of `profile_steps` steps for TensorBoard, once."""

    name = 'profile'

    def __init__(self, run: 'Run'):
        super().__init__(run, run.config.profile_steps)
        last = run.config.num_steps
        # Of a short run the last steps, but never the first, which includes the compiler.
        self._begin = max(run.start + 1, min(run.start + _PROFILE_AFTER, last - self.every))
        self._end = min(self._begin + self.every, last)

    def due(self, step: int) -> bool:
        return self._begin < self._end and step in (self._begin, self._end)

    def __call__(self, step: int, state: TrainState) -> str | None:
        if step == self._begin:
            jax.profiler.start_trace(str(self.run.workdir))
            return None
        jax.profiler.stop_trace()
        return f'of {self._end - self._begin} steps'


class Checkpoint(Hook):
    """Starts to save the state, after what was logged up to it is safe."""

    name = 'checkpoint'
    may_be_broken_off = False

    def __init__(self, run: 'Run'):
        super().__init__(run, run.config.checkpoint_every)

    def __call__(self, step: int, state: TrainState) -> str:
        if not self.run.save(step, state):
            return 'put off, as the last step was skipped'
        return 'copied, and written in the background'


# A checkpoint comes last, so that nothing due at its step is missing after a run is killed.
HOOKS: tuple[Callable[['Run'], Hook], ...] = (Evaluate, Preview, Profile, Checkpoint)


def call_due(
    hooks: list[Hook], run: 'Run', step: int, state: TrainState, stop: signals.StopRequest
) -> bool:
    """Calls the hooks that are due after a step; False where a stop request broke one off."""
    due = [hook for hook in hooks if hook.due(step)]
    if due:
        run.log.write_complete()  # it need not wait for what takes long
    for hook in due:
        with run.log.clock.aside():
            started = time.monotonic()
            try:
                told = _call(hook, step, state, stop)
            except signals.BrokenOff:
                logging.info('%s at step %d was broken off.', hook.name, step)
                return False
        if told is not None:
            seconds = time.monotonic() - started
            console.say('%s at step %d: %s (%.1f s)', hook.name, step, told, seconds)
    return True


def _call(hook: Hook, step: int, state: TrainState, stop: signals.StopRequest) -> str | None:
    if not hook.may_be_broken_off:
        return hook(step, state)
    with stop.repeatable():
        return hook(step, state)
