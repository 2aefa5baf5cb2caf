"""The beginning of a run: its own last checkpoint, another run's weights, or a random state.

    beginning = beginnings.find(config, workdir, data, program, accept_changes=['batch_size'])
    batches = data.train_batches(beginning.position.batch_at(step))
    state = beginning.state(program)    # of a run without a checkpoint of its own

All that can be refused is refused by `find`, which reads no weights and writes nothing.
"""

import dataclasses
import json
import textwrap
from collections.abc import Collection

import jax
import jax.numpy as jnp
import ml_collections
from absl import logging
from clu import metric_writers
from etils import epath

from coyo11m_tfds.process import ending
from train_lib import checkpoint, saved_run
from train_lib.data import TrainingData
from train_lib.position import Position, carry_over
from train_lib.program import Program
from train_lib.state import TrainState


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Where a run begins or resumes.

    Attributes:
        description: of the run from now on, for its checkpoints.
        step: of its last checkpoint; 0 where it has none.
        has_new_config: its last checkpoint, if there is one, holds another configuration.
        source: the checkpoint whose weights a new run begins with, or None.
    """

    description: checkpoint.Description
    step: int
    has_new_config: bool
    source: saved_run.SavedRun | None

    @property
    def position(self) -> Position:
        """Where in its data the run is."""
        return Position(**self.description.position)

    def state(self, program: Program) -> TrainState:
        """The state at step 0.

        Weights are random or those of `source`; their average begins at them, and the optimizer
        knows nothing yet.
        """
        state = program.init()
        if self.source is None:
            return state
        average = self.description.config['init_average']
        params = self.source.restore_weights(program.abstract_state.params, average=average)
        # A copy: a donated state must not hold one buffer twice.
        copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params)
        return state.replace(params=params, ema_params=copied)

    def show_config(self, writer: metric_writers.MetricWriter) -> None:
        """Writes the configuration as text, where it has not been written yet."""
        if self.has_new_config:
            text = json.dumps(self.description.config, indent=2)
            # Markdown shows lines as they are if they are indented by four spaces.
            writer.write_texts(self.step, {'config': textwrap.indent(text, '    ')})


def find(
    config: ml_collections.ConfigDict,
    workdir: epath.PathLike,
    data: TrainingData,
    program: Program,
    accept_changes: Collection[str] = (),
) -> Beginning:
    """Looks for what the run begins with, and checks that it fits.

    Args:
        config: see `configs/default.py`.
        workdir: local or `gs://`.
        data: of the run.
        program: of the run.
        accept_changes: fields that may differ from those of its last checkpoint.

    Raises:
        checkpoint.OtherRunError: the last checkpoint belongs to another run, or has other settings
            that are not accepted.
        ValueError: weights have other shapes; `init_from` has no checkpoint; or the run has been
            trained for more than `num_steps`.
        OSError: `init_from` does not exist, or a checkpoint cannot be read.
    """
    description = checkpoint.Description(
        identity=data.identity | program.identity,
        settings=data.settings,
        # As JSON has it, to be compared with what comes back from there.
        config=json.loads(json.dumps(config.to_dict())),
        facts=data.facts.to_json(),
        position=dataclasses.asdict(Position()),
    )
    own = saved_run.find(workdir)
    if own is None:
        source = _source(config.init_from, description, program) if config.init_from else None
        return Beginning(description, 0, True, source)
    saved = own.description
    checkpoint.check_same(saved, description, accept_changes, where=str(own.folder))
    if config.num_steps < own.step:
        raise ValueError(
            f'num_steps={config.num_steps}: {own.folder} has been trained for {own.step} steps, '
            'expected at least as many'
        )
    own.check_shapes(program.abstract_state.params)
    place = carry_over(
        Position(**saved.position), own.step, saved.settings, description.settings, data.order
    )
    description = dataclasses.replace(description, position=dataclasses.asdict(place))
    return Beginning(description, own.step, saved.config != description.config, None)


def _source(
    init_from: str, description: checkpoint.Description, program: Program
) -> saved_run.SavedRun:
    """The checkpoint that `init_from` names, with weights that fit."""
    try:
        source = saved_run.open_run(init_from)
        source.check_shapes(program.abstract_state.params)
        identity = source.description.identity
    except (ValueError, OSError) as error:
        raise type(error)(f'init_from={init_from}: {ending.describe(error)}') from error
    for text in checkpoint.differences(identity, description.identity).values():
        logging.warning('The weights of %s were trained otherwise: %s.', init_from, text)
    return source
