"""The training loop: start or resume, step, log, evaluate, draw, save.

    from configs import demo
    state = train.train_and_evaluate(demo.get_config(), workdir='W')

A run can be killed at any moment. The same command then resumes it from the last checkpoint with
the same results as an uninterrupted run. `Hook` shows how to add work of your own.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from clu import parameter_overview
from etils import epath
from jax.experimental import multihost_utils

import input_pipeline
from coyo11m_tfds.process.sizes import format_count
from train_lib.data import Batches
from train_lib.learning import metrics
from train_lib.learning.state import TrainState
from train_lib.lifecycle import (
    checkpoint,
    compiled_programs,
    device_memory,
    hosts,
    signals,
    workdirs,
    writers,
)
from train_lib.lifecycle.log import StepClock, TrainLog, introduce, log_on_process_0
from train_lib.lifecycle.writers import BackgroundWriter
from train_lib.results import previews
from train_lib.run_setup import Setup, set_up

# Of a velocity of 0: the mean squares of latents and of noise, which are 1 each.
_LOSS_OF_NOTHING = 2
_PROFILE_AFTER = 10  # steps of this process: by then everything has been compiled


def train_and_evaluate(
    config: ml_collections.ConfigDict,
    workdir: epath.PathLike,
    accept_changes: Collection[str] = (),
    hooks: 'Sequence[Hook] | None' = None,
) -> TrainState:
    """Returns the last state of `train(set_up(...))`; see these for arguments and errors."""
    state, _ = train(set_up(config, workdir, accept_changes), hooks)
    return state


def train(
    setup: Setup, hooks: 'Sequence[Hook] | None' = None, verbose: bool = False
) -> tuple[TrainState, bool]:
    """Trains up to `config.num_steps`, from the last checkpoint in the workdir if there is one.

    Args:
        setup: The checked run.
        hooks: Work besides steps, in the order of its calls; `DEFAULT_HOOKS` by default.
        verbose: Whether to log all parameters, and everything that TensorBoard gets.

    Returns:
        The last state, and whether the run is complete; it is not if a signal ended it.

    Raises:
        FloatingPointError: Training has diverged.
        MemoryError: A device has not enough memory.
        OSError: A record, a file of the data set or a checkpoint cannot be read; a checkpoint, a
            log or a picture cannot be written; or another run holds the workdir.
    """
    config = setup.config
    program = setup.program
    beginning = setup.beginning
    lock: contextlib.AbstractContextManager = contextlib.nullcontext()
    # The other processes wait for the first one in the manager, until it has failed.
    if jax.process_index() == 0:
        lock = workdirs.lock_workdir(setup.workdir)
    with (
        signals.StopRequest() as stop,
        lock,
        checkpoint.open_manager(
            setup.workdir, config.keep_checkpoints, config.keep_every
        ) as manager,
        # Inside of the manager, which would wait for the other processes.
        hosts.share_failures(),
        device_memory.explain_out_of_memory(config),
        ThreadPoolExecutor(1, 'first-state') as background,
    ):
        # Nothing kept other runs out while this one was checked.
        last_step = manager.latest_step() or 0
        if last_step != beginning.step:
            raise OSError(
                f'{setup.workdir}: another run has just trained there; start this one again.'
            )
        if beginning.step < config.num_steps:
            _introduce(setup)
        empty = program.no_metrics()
        restored = checkpoint.restore_last(manager, program.abstract_state, empty)
        first_state: Future[TrainState] = Future()
        if restored is not None:
            state, window, interrupted = restored
            # The hooks of the last step may be due still, where a signal has broken one off.
            if beginning.step == config.num_steps and not interrupted:
                steps = f'all {config.num_steps} steps are in {setup.workdir}'
                log_on_process_0('Finished already: %s.', steps)
                return state, True
            first_state.set_result(state)
        else:
            # Compiled and run there while this thread compiles the step, for which the shapes of
            # the weights are enough.
            first_state = background.submit(beginning.state, program)
            window = empty
            interrupted = False
        if verbose:
            parameters = program.abstract_state.params
            parameter_overview.log_parameter_overview(parameters, include_stats='sharding')
        with (
            writers.name_writer_errors(setup.workdir),
            contextlib.closing(writers.make_writer(config, setup.workdir, verbose)) as writer,
        ):
            log = _make_log(setup, writer, empty, window, manager)
            beginning.show_config(writer)
            run = Run(
                **vars(setup),
                hooks=DEFAULT_HOOKS if hooks is None else hooks,
                writer=writer,
                manager=manager,
                log=log,
            )
            return _train_steps(run, first_state, stop, interrupted)


def _introduce(setup: Setup) -> None:
    """Logs the machine, data, model and length of a run."""
    introduce(
        setup.config,
        setup.program,
        data_lines=setup.data.description,
        num_tokens=setup.data.facts.text_max_tokens,
        first_step=setup.beginning.step + 1,
        workdir=setup.workdir,
    )


def _make_log(
    setup: Setup,
    writer: BackgroundWriter,
    empty: metrics.TrainMetrics,
    window: metrics.TrainMetrics,
    manager: ocp.CheckpointManager,
) -> TrainLog:
    """Returns the log of a run, whose unfinished window is `window`."""
    data = setup.data
    # The log knows neither data nor checkpoints: it gets the functions that it calls.
    return TrainLog(
        config=setup.config,
        writer=writer,
        clock=StepClock(data.batches_ready, data.read_counts),
        steps_before=setup.beginning.step,
        flops=setup.program.flops(data.facts.text_max_tokens),
        describe_progress=lambda step: data.progress(setup.position_at(step)),
        empty=empty,
        window=window,
        advise_restart=functools.partial(checkpoint.advise_restart, manager),
    )


@dataclasses.dataclass(frozen=True)
class Run(Setup):
    """The objects that the loop and its hooks work with."""

    hooks: 'Sequence[Hook]'
    writer: BackgroundWriter
    manager: ocp.CheckpointManager
    log: TrainLog

    def save(self, step: int, state: TrainState, interrupted: bool = False) -> bool:
        """Starts a checkpoint of a step, after the log up to this step is safe.

        Args:
            step: Number of steps.
            state: State after them.
            interrupted: Whether hooks that are due after this step were not called.

        Returns:
            Whether it has been started; not after a skipped step, when the weights may be broken.

        Raises:
            FloatingPointError: More steps were skipped than the configuration allows.
            OSError: The checkpoint, or the one before, cannot be written.
        """
        # A checkpoint replaces older ones, so a run that has diverged must fail before it.
        self.log.settle(step)
        if int(state.skipped_in_a_row):
            return False
        description = dataclasses.replace(
            self.beginning.description, position=self.position_at(step)
        )
        checkpoint.save_step(
            self.manager, step, state, self.log.window, description, interrupted=interrupted
        )
        return True

    def paint_together(self, latents: np.ndarray) -> np.ndarray:
        """Returns the pictures of latents that all processes have; each paints its share.

        Shares are equal: where there are too few latents, some are painted more than once.

        Args:
            latents: Raw latents `(n, C, H, W)`.

        Returns:
            Pictures, uint8 `(n, height, width, 3)`.
        """
        count = len(latents)
        share = math.ceil(count / jax.process_count())
        rows = share * jax.process_index() + np.arange(share)
        # Rows beyond the last start again at the first: an exchange needs equal shapes.
        own_latents = latents[rows % count]
        own_pictures = self.paint(own_latents)
        pictures = multihost_utils.process_allgather(own_pictures, tiled=True)
        return pictures[:count]

    @functools.cached_property
    def preview_of_data(self) -> np.ndarray:
        """The pictures of the data that previews show next to those of the model."""
        # Painted once and kept: all previews show the same ones.
        return self.paint_together(self.data.preview_samples.latents)


def _train_steps(
    run: Run, first_state: Future[TrainState], stop: signals.StopRequest, interrupted: bool
) -> tuple[TrainState, bool]:
    """Trains from the run's first step on; ends with a checkpoint.

    `first_state` is the state before that step. `interrupted` says whether hooks of the step before
    were not called. Returns the last state, and whether the run is complete.
    """
    start = run.beginning.step
    step = start
    # Whether all hooks due at this step have been called and no stop has been requested. Those that
    # an interrupted run has left out come first.
    is_complete = not interrupted or _call_hooks(run, step, first_state.result(), stop)
    batches = run.data.train_batches(run.position_at(step))
    if is_complete and step < run.config.num_steps:
        batches = _compile_step(run, batches, first_state)
    state = first_state.result()
    profile = _make_profiler(run, step)
    while is_complete and step < run.config.num_steps:
        step += 1
        with run.log.clock.waiting_for_data():
            batch = next(batches)
        # Whatever moves to or from the device here would do so at every step.
        with jax.transfer_guard('disallow'):
            state, update = run.program.train_step(state, batch)
            run.log.add(step, update)
        profile(step)
        is_complete = not stop.reached(step) and _call_hooks(run, step, state, stop)
    is_saved = run.save(step, state, interrupted=not is_complete)
    # Before anything is torn down: after SIGTERM, only seconds may be left.
    checkpoint.wait_until_saved(run.manager)
    if interrupted and is_complete and step == start:
        # That checkpoint exists, and says that its hooks were not called.
        checkpoint.mark_complete(run.manager, step)
    if not is_saved:
        _report_unsaved(run, step, int(state.skipped_in_a_row), is_complete)
    _report_bad_records(run.data.read_counts().bad_records)
    return state, is_complete


def _compile_step(run: Run, batches: Batches, first_state: Future[TrainState]) -> Batches:
    """Compiles the step for the shapes of the first batch; returns all batches, with this one.

    Raises a MemoryError if the step takes more memory than a device has left.
    """
    # The compiler needs the shapes of a batch, and only reading tells them.
    with run.log.clock.waiting_for_data():
        first_batch = next(batches)
    program = run.program
    lowered = device_memory.lower_step(program.train_step, program.abstract_state, first_batch)
    # The import of TensorFlow holds the interpreter, which is idle while XLA compiles.
    run.writer.start()
    compiled_programs.compile_step(lowered)
    # The check measures what is free, so the state must be on the devices by now.
    first_state.result()
    device_memory.check_device_memory(run.config, lowered)
    return itertools.chain([first_batch], batches)


def _make_profiler(run: Run, step: int) -> Callable[[int], Any]:
    """Returns what is called after each step and, if the run wants one, profiles a few of them."""
    if not run.config.profile_steps:
        return lambda step: None
    # Here, because it imports TensorFlow.
    from clu import periodic_actions

    return periodic_actions.Profile(
        logdir=run.workdir,
        num_profile_steps=run.config.profile_steps,
        profile_duration_ms=1,
        first_profile=step + _PROFILE_AFTER,
        every_secs=None,
    )


def _report_unsaved(run: Run, step: int, num_skipped: int, is_complete: bool) -> None:
    """Warns that the last step is not saved; raises a FloatingPointError if the run is complete.

    Where a signal ended the run, it goes on from the checkpoint before.
    """
    problem = f'Step {step} is not saved: the last {num_skipped} steps were not finite.'
    if is_complete:
        advice = checkpoint.advise_restart(run.manager, step - num_skipped)
        raise FloatingPointError(f'{problem} {advice}.')
    logging.warning(problem)


def _report_bad_records(count: int) -> None:
    """Warns that records of training could not be read, if there were any on this host."""
    if not count:
        return
    records = format_count(count, 'record')
    were = 'was' if count == 1 else 'were'
    logging.warning('%s could not be read and %s left out here.', records, were)


# --- Work besides steps -------------------------------------------------------------------------


def _evaluate_splits(run: Run, step: int, state: TrainState) -> str:
    """Writes the mean loss of all validation splits, and of each, at fixed noise and times."""
    log_on_process_0('evaluation at step %d ...', step)
    by_source: dict[str, metrics.EvalMetrics] = {}
    for source in run.data.sources:
        by_source[source.name] = _evaluate_source(run, source, state)
    # Over the records of all sources, not the mean of their means.
    together = functools.reduce(metrics.merge, by_source.values())
    scalars = {f'eval/{name}': mean for name, mean in _compute_means(together).items()}
    # Of a single source, this would be the same number again.
    if len(by_source) > 1:
        for name, source_metrics in by_source.items():
            scalars[f'eval/loss/{name}'] = _compute_means(source_metrics)['loss']
    written = {}
    for name, mean in scalars.items():
        # A curve must not get NaN for a quarter of time in which no sample fell.
        if not math.isnan(mean):
            written[name] = mean
    run.writer.write_scalars(step, written)
    return _describe_evaluation(scalars)


def _evaluate_source(
    run: Run, source: input_pipeline.MixSource, state: TrainState
) -> metrics.EvalMetrics:
    """Returns the metrics of all validation records of a source."""
    # Lazily: merged one by one, so that the metrics of many batches never lie on the devices.
    updates = (
        run.program.eval_step(state.ema_params, batch) for batch in run.data.eval_batches(source)
    )
    return functools.reduce(metrics.merge, updates)


def _compute_means(evaluated: metrics.EvalMetrics) -> dict[str, float]:
    """Returns the means of metrics, by name; NaN where nothing counts."""
    on_host = jax.device_get(evaluated)
    return {name: float(mean) for name, mean in on_host.compute().items()}


def _describe_evaluation(scalars: Mapping[str, float]) -> str:
    """Returns the loss of an evaluation, and those of the quarters of time, for the log."""
    loss = scalars['eval/loss']
    if math.isnan(loss):
        return 'no finite loss'
    # Steps prefer some times, and errors of the velocity grow towards the data: the quarters tell
    # why this loss may be many times that of the steps.
    quarters = []
    shown = []
    for number in range(metrics.NUM_TIME_BINS):
        quarter = scalars[f'eval/loss_t{number}']
        quarters.append(quarter)
        shown.append('none' if math.isnan(quarter) else f'{quarter:.4g}')
    text = f'loss {loss:.4f} at uniform times; quarters of time, from data to noise: '
    text += ', '.join(shown)
    if quarters[0] > _LOSS_OF_NOTHING:
        text += f' (a velocity of 0 has {_LOSS_OF_NOTHING}: times next to the data are not learned)'
    return text


def _write_previews(run: Run, step: int, state: TrainState) -> str:
    """Writes a grid of pictures as PNG and to TensorBoard."""
    samples = run.data.preview_samples
    # Numbered from 0 on at every step: equal noise makes the pictures of two steps comparable.
    latents = jax.device_get(run.program.draw(state.ema_params, samples.text, 0))
    columns = [run.preview_of_data, run.paint_together(latents)]
    path = previews.path_of_step(run.workdir, step)
    # All processes have the same pictures, and one of them writes.
    if jax.process_index() == 0:
        grid = previews.make_grid(columns, samples.captions, title='left: data, right: model')
        run.writer.write_images(step, {'previews': grid[None]})
        previews.write_png(path, grid)
    return f'{format_count(len(samples.captions), "picture")} in {path}'


def _save_checkpoint(run: Run, step: int, state: TrainState) -> str:
    """Starts a checkpoint."""
    if not run.save(step, state):
        return 'put off, as the last step was skipped'
    return 'copied, and written in the background'


class Hook(NamedTuple):
    """Work that all processes do after some steps.

        def weight_norm(run, step, state):
            norm = float(optax.tree.norm(state.params))
            run.writer.write_scalars(step, {'train/weight_norm': norm})
            return f'{norm:.1f}'

        hook = train.Hook('weight norm', train.every(lambda config: 1000), weight_norm)
        train.train(setup, hooks=(hook, *train.DEFAULT_HOOKS))

    Attributes:
        name: Name in the log, before the text that `call` returns.
        is_due: Whether the hook is due after a step of a run.
        call: Does the work with the state after the step; returns a text for the log, or None.
        repeatable: Whether a stop request may interrupt it; the resumed run then repeats it.
    """

    name: str
    is_due: Callable[[Run, int], bool]
    call: Callable[[Run, int, TrainState], str | None]
    repeatable: bool = True


def every(steps: Callable[[ml_collections.ConfigDict], int]) -> Callable[[Run, int], bool]:
    """Returns an `is_due` for every `steps(config)` steps, and for the last; 0 means never."""

    def is_due(run: Run, step: int) -> bool:
        """Whether a hook is due after a step."""
        count = steps(run.config)
        if count <= 0:
            return False
        return step % count == 0 or step == run.config.num_steps

    return is_due


# A checkpoint comes last, so that nothing due at its step is missing after a run is killed.
DEFAULT_HOOKS = (
    Hook('evaluation', every(lambda config: config.eval_every), _evaluate_splits),
    Hook('preview', every(lambda config: config.preview_every), _write_previews),
    Hook(
        'checkpoint',
        every(lambda config: config.checkpoint_every),
        _save_checkpoint,
        repeatable=False,
    ),
)


def _call_hooks(run: Run, step: int, state: TrainState, stop: signals.StopRequest) -> bool:
    """Calls the hooks that are due after a step; returns False if a stop request broke one off."""
    due_hooks = [hook for hook in run.hooks if hook.is_due(run, step)]
    if due_hooks:
        # A complete window need not wait for hooks, which may take long.
        run.log.write_complete()
    for hook in due_hooks:
        may_interrupt = stop.repeatable() if hook.repeatable else contextlib.nullcontext()
        try:
            with run.log.clock.aside(), may_interrupt:
                begin = time.monotonic()
                outcome = hook.call(run, step, state)
        except signals.BrokenOff:
            logging.info('%s at step %d was interrupted.', hook.name, step)
            return False
        if outcome is not None:
            seconds = time.monotonic() - begin
            log_on_process_0('%s at step %d: %s (%.1f s)', hook.name, step, outcome, seconds)
    return True
