"""The training loop: start or resume, step, tell, evaluate, draw, save.

    from configs import demo
    state = train.train_and_evaluate(demo.get_config(), workdir='W')

A run can be killed at any moment and started again with the same command: it goes on from its
last checkpoint and computes what it would have computed. SIGTERM makes it save and return.
"""

import dataclasses
from collections.abc import Collection

import jax
import ml_collections
import orbax.checkpoint as ocp
from absl import logging
from clu import metric_writers, parameter_overview, periodic_actions
from etils import epath

from coyo11m_tfds import preview
from train_lib import (
    beginnings,
    checkpoint,
    evaluation,
    failures,
    metrics,
    previews,
    settings,
    sharding,
    signals,
    workdirs,
)
from train_lib.data import TrainingData
from train_lib.program import Program, make_program
from train_lib.state import TrainState
from train_lib.train_log import TrainLog

# The first profile: late enough that everything has been compiled.
_PROFILE_AFTER = 10  # steps


def train_and_evaluate(
    config: ml_collections.ConfigDict,
    workdir: epath.PathLike,
    accept_changes: Collection[str] = (),
) -> TrainState:
    """`train(set_up(...))`."""
    return train(set_up(config, workdir, accept_changes))


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
        OSError: `workdir` cannot be written to.
    """
    workdirs.check_writable(workdir)
    settings.check_changeable(accept_changes, config)
    mesh = sharding.make_mesh(**config.mesh)
    data = TrainingData(config, mesh)
    data.check_memory()
    if config.preview_every:
        _ = data.preview_samples  # kept; what cannot be read is told now and not in some hours
    program = make_program(config, mesh, data.facts.stats, latent_shape=data.facts.latent_shape)
    beginning = beginnings.find(config, workdir, data, program, accept_changes)
    return Setup(config, workdirs.absolute(workdir), data, program, beginning)


def train(setup: Setup) -> TrainState:
    """Trains up to `config.num_steps`, from the last checkpoint in the workdir if there is one.

    Returns:
        The last state; its `step` is less than `config.num_steps` where SIGTERM ended the run.

    Raises:
        FloatingPointError: training has diverged.
    """
    config, workdir = setup.config, setup.workdir
    writer = metric_writers.create_default_writer(workdir, just_logging=jax.process_index() > 0)
    with (
        signals.StopRequest() as stop,
        checkpoint.open_manager(workdir, config.keep_checkpoints, config.keep_every) as manager,
        # Inside of the manager, which would wait for the other processes.
        failures.shared(),
        metric_writers.ensure_flushes(writer),
    ):
        if jax.process_index() == 0:
            setup.beginning.show_config(workdir)
        run = _Run(**vars(setup), writer=writer, manager=manager)
        state, window, interrupted = run.start_or_resume()
        parameter_overview.log_parameter_overview(state.params, include_stats='sharding')
        return _train(run, state, window, stop, interrupted)


@dataclasses.dataclass(frozen=True)
class _Run(Setup):
    """What the loop works with, and what it does now and then."""

    writer: metric_writers.MetricWriter
    manager: ocp.CheckpointManager

    def start_or_resume(self) -> tuple[TrainState, metrics.TrainMetrics, bool]:
        """The state, the metrics of an unfinished log window, and whether what is due was not."""
        program, no_metrics = self.program, self.program.no_metrics()
        window = jax.tree.map(_abstract, no_metrics)
        restored = checkpoint.restore(self.manager, program.abstract_state, window)
        return restored or (self.beginning.state(program), no_metrics, False)

    def make_log(self, window: metrics.TrainMetrics) -> TrainLog:
        """A log whose current window holds `window`."""
        log = TrainLog(
            self.writer,
            every=self.config.log_every,
            batch_size=self.config.batch_size,
            empty=self.program.no_metrics(),
            max_skipped_in_a_row=self.config.max_skipped_in_a_row,
            max_skipped=self.config.max_skipped,
            read_counts=self.data.read_counts,
        )
        log.window = window
        return log

    def save(self, step: int, state: TrainState, log: TrainLog, interrupted: bool = False) -> None:
        """Starts a checkpoint, after what was logged up to it is safe."""
        log.settle(step)
        description = self.beginning.description
        checkpoint.save(self.manager, step, state, log.window, description, interrupted=interrupted)

    def evaluate(self, step: int, state: TrainState) -> None:
        """Writes the loss of the validation split."""
        batches = self.data.eval_batches()
        scalars = evaluation.evaluate(self.program.eval_step, state.ema_params, batches)
        self.writer.write_scalars(step, scalars)

    def draw(self, step: int, state: TrainState) -> None:
        """Writes a grid of pictures as PNG and to TensorBoard."""
        samples = self.data.preview_samples
        drawn = self.program.draw(state.ema_params, samples.text_embedding)
        pictures = [
            preview.latents_to_rgb(samples.latents),
            preview.latents_to_rgb(jax.device_get(drawn)),
        ]
        grid = previews.make_grid(pictures, samples.captions, title='left: data, right: model')
        self.writer.write_images(step, {'previews': grid[None]})
        if jax.process_index() == 0:
            previews.write_png(self.workdir / previews.FOLDER / f'step_{step:06}.png', grid)


def _train(
    run: _Run,
    state: TrainState,
    window: metrics.TrainMetrics,
    stop: signals.StopRequest,
    interrupted: bool,
) -> TrainState:
    """The loop over steps; ends with a checkpoint.

    `interrupted` says that SIGTERM came before what was due at the step of `state`.
    """
    config, start = run.config, int(state.step)
    log = run.make_log(window)
    progress = periodic_actions.ReportProgress(
        num_train_steps=config.num_steps, writer=run.writer, every_secs=60
    )
    hooks = [progress, *_profiler(run, start)]
    if interrupted:
        _now_and_then(run, start, state, log, progress)
    interrupted = False
    batches = run.data.train_batches(run.beginning.position.batch_at(start))
    for step in range(start + 1, config.num_steps + 1):
        with progress.timed('data'), log.clock.waiting_for_data():
            batch = next(batches)
        # Whatever moves to or from the device here would do so at every step.
        with jax.transfer_guard('disallow'):
            state, update = run.program.train_step(state, batch)
            log.add(step, update)
        for hook in hooks:
            hook(step)
        if stop.reached(step):
            logging.info('SIGTERM: saving step %d and stopping.', step)
            interrupted = True
            break
        _now_and_then(run, step, state, log, progress)
    run.save(int(state.step), state, log, interrupted)
    # Before anything is torn down: after SIGTERM there may be seconds left.
    run.manager.wait_until_finished()
    bad_records = run.data.read_counts().bad_records
    if bad_records:
        logging.warning('%d records could not be read and were left out here.', bad_records)
    return state


def _now_and_then(
    run: _Run,
    step: int,
    state: TrainState,
    log: TrainLog,
    progress: periodic_actions.ReportProgress,
) -> None:
    """Evaluates, draws and saves, each at its steps and at the last one."""
    config = run.config

    def due(every: int) -> bool:
        return every > 0 and (step % every == 0 or step == config.num_steps)

    if due(config.eval_every):
        with progress.timed('evaluation'), log.clock.aside():
            run.evaluate(step, state)
    if due(config.preview_every):
        with progress.timed('previews'), log.clock.aside():
            run.draw(step, state)
    # Last, so that nothing due at this step is missing after a run is killed and goes on.
    if due(config.checkpoint_every):
        with progress.timed('checkpoint'), log.clock.aside():
            run.save(step, state, log)


def _profiler(run: _Run, start: int) -> list[periodic_actions.Profile]:
    if not run.config.profile_steps:
        return []
    return [
        periodic_actions.Profile(
            logdir=run.workdir,
            num_profile_steps=run.config.profile_steps,
            profile_duration_ms=None,
            first_profile=start + _PROFILE_AFTER,
            every_secs=None,
        )
    ]


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
