"""The training loop: start or resume, step, log, evaluate, draw, save.

    from configs import demo
    state = train.train_and_evaluate(demo.get_config(), workdir='W')

A run can be killed at any moment. The same command then resumes it from the last checkpoint, and it
computes what it would have computed. SIGTERM and Ctrl-C make it save and return. `hooks.py` has
everything that a run does beside its steps.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Collection

import jax
import ml_collections
import orbax.checkpoint as ocp
from absl import logging
from clu import metric_writers, parameter_overview
from etils import epath

from train_lib import (
    beginnings,
    checkpoint,
    failures,
    hooks,
    introduction,
    metrics,
    settings,
    sharding,
    signals,
    workdirs,
    writers,
)
from train_lib.console import Console, say
from train_lib.data import TrainingData
from train_lib.program import Program, for_data
from train_lib.state import TrainState
from train_lib.train_log import TrainLog


def train_and_evaluate(
    config: ml_collections.ConfigDict,
    workdir: epath.PathLike,
    accept_changes: Collection[str] = (),
) -> TrainState:
    """The state of `train(set_up(...))`."""
    state, _ = train(set_up(config, workdir, accept_changes))
    return state


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run whose settings have been checked; nothing is compiled or written yet."""

    config: ml_collections.ConfigDict
    workdir: epath.Path
    data: TrainingData
    program: Program
    beginning: beginnings.Beginning


def set_up(
    config: ml_collections.ConfigDict,
    workdir: epath.PathLike,
    accept_changes: Collection[str] = (),
) -> Setup:
    """Checks all that a run needs before its first step.

    Args:
        config: see `configs/default.py`.
        workdir: local or `gs://` folder for checkpoints, TensorBoard logs and previews.
        accept_changes: fields that may differ from those of the checkpoint that is resumed, some of
            `settings.changeable`.

    Raises:
        ValueError: a setting is out of its range, or does not fit the devices or the data.
        checkpoint.OtherRunError: the last checkpoint in `workdir` belongs to another run.
        OSError: there is no data set, or `workdir` cannot be written to.
    """
    workdirs.check_writable(workdir)
    settings.check_changeable(accept_changes, config)
    writers.check(config)
    mesh = sharding.make_mesh(**config.mesh)
    data = TrainingData(config, mesh)
    data.check_memory()
    if config.preview_every:
        _ = data.preview_samples  # kept; what cannot be read is told now and not in some hours
    program = for_data(config, mesh, data.facts)
    beginning = beginnings.find(config, workdir, data, program, accept_changes)
    return Setup(config, workdirs.absolute(workdir), data, program, beginning)


def train(setup: Setup, verbose: bool = False) -> tuple[TrainState, bool]:
    """Trains up to `config.num_steps`, from the last checkpoint in the workdir if there is one.

    Args:
        setup: of the run.
        verbose: logs all parameters, and all that is written for TensorBoard.

    Returns:
        The last state, and whether all is done; it is not where a signal ended the run.

    Raises:
        FloatingPointError: training has diverged.
        OSError: a record, a file of the data set or a checkpoint cannot be read, or a checkpoint,
            logs or pictures cannot be written; or another run is in the workdir.
    """
    config = setup.config
    with (
        signals.StopRequest() as stop,
        # The other processes wait for the first one in the manager, until it has failed.
        contextlib.nullcontext() if jax.process_index() else workdirs.held(setup.workdir),
        checkpoint.open_manager(
            setup.workdir, config.keep_checkpoints, config.keep_every
        ) as manager,
        # Inside of the manager, which would wait for the other processes.
        failures.shared(),
    ):
        state, window, interrupted = _start_or_resume(setup, manager)
        start = int(state.step)
        if start == config.num_steps and not interrupted:
            say('Finished already: all %d steps are in %s.', start, setup.workdir)
            return state, True
        introduction.show(setup, start)
        if verbose:
            parameter_overview.log_parameter_overview(state.params, include_stats='sharding')
        with (
            writers.errors_named(setup.workdir),
            contextlib.closing(writers.make(config, setup.workdir, verbose)) as writer,
            Console(start, config.num_steps) as console,
        ):
            setup.beginning.show_config(writer)
            log = _make_log(setup, writer, console, window, manager)
            run = Run(**vars(setup), start=start, writer=writer, manager=manager, log=log)
            return _train(run, state, stop, interrupted)


@dataclasses.dataclass(frozen=True)
class Run(Setup):
    """The objects that the loop and its hooks work with.

    Attributes:
        start: the step that this process began with.
    """

    start: int
    writer: metric_writers.MetricWriter
    manager: ocp.CheckpointManager
    log: TrainLog

    def save(self, step: int, state: TrainState, interrupted: bool = False) -> bool:
        """Starts a checkpoint, after what was logged up to it is safe.

        Returns:
            False if there is none because the last step was skipped: its weights may be lost.
        """
        self.log.settle(step)
        if int(state.skipped_in_a_row):
            return False
        description = self.beginning.description_at(step)
        checkpoint.save(
            self.manager, step, state, self.log.window, description, interrupted=interrupted
        )
        return True


def _train(
    run: Run, state: TrainState, stop: signals.StopRequest, interrupted: bool
) -> tuple[TrainState, bool]:
    """The loop over steps; ends with a checkpoint.

    `interrupted`: a stop request came before all hooks due at the step of `state` had been called.
    """
    log, step = run.log, run.start
    due_now = [hook(run) for hook in hooks.HOOKS]
    # Whether all hooks due at `step` have been called and nobody has asked to stop.
    complete = not interrupted or hooks.call_due(due_now, run, step, state, stop)
    batches = run.data.train_batches(run.beginning.sample_at(step))
    while complete and step < run.config.num_steps:
        step += 1
        with log.clock.waiting_for_data():
            batch = next(batches)
        # Whatever moves to or from the device here would do so at every step.
        with jax.transfer_guard('disallow'):
            state, update = run.program.train_step(state, batch)
            log.add(step, update)
        complete = not stop.reached(step) and hooks.call_due(due_now, run, step, state, stop)
    is_saved = run.save(step, state, interrupted=not complete)
    # Before anything is torn down: after SIGTERM there may be seconds left.
    checkpoint.wait(run.manager)
    if not is_saved:
        skipped = int(state.skipped_in_a_row)
        told = f'Step {step} is not saved: the last {skipped} steps were not finite.'
        if complete:
            raise FloatingPointError(f'{told} {checkpoint.way_back(run.manager, step - skipped)}.')
        logging.warning(told)
    bad_records = run.data.read_counts().bad_records
    if bad_records:
        logging.warning('%d records could not be read and were left out here.', bad_records)
    return state, complete


def _start_or_resume(
    setup: Setup, manager: ocp.CheckpointManager
) -> tuple[TrainState, metrics.TrainMetrics, bool]:
    """The state, the metrics of an unfinished log window, and whether hooks are still due."""
    if (manager.latest_step() or 0) != setup.beginning.step:
        raise OSError(f'{setup.workdir}: another run has just trained there; start this one again.')
    program, no_metrics = setup.program, setup.program.no_metrics()
    window = jax.tree.map(_abstract, no_metrics)
    restored = checkpoint.restore(manager, program.abstract_state, window)
    return restored or (setup.beginning.state(program), no_metrics, False)


def _make_log(
    setup: Setup,
    writer: metric_writers.MetricWriter,
    console: Console,
    window: metrics.TrainMetrics,
    manager: ocp.CheckpointManager,
) -> TrainLog:
    """A log whose current window holds `window`."""
    log = TrainLog(
        writer,
        every=setup.config.log_every,
        batch_size=setup.config.batch_size,
        empty=setup.program.no_metrics(),
        max_skipped_in_a_row=setup.config.max_skipped_in_a_row,
        max_skipped=setup.config.max_skipped,
        read_counts=setup.data.read_counts,
        batches_ready=setup.data.batches_ready,
        derived=functools.partial(introduction.derived, setup),
        console=console,
        way_back=functools.partial(checkpoint.way_back, manager),
    )
    log.window = window
    return log


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
