"""The start of a run: its own last checkpoint, another run's weights, or a random state."""

import dataclasses
import json
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict

from coyo11m_tfds.process import errors
from train_lib.learning import models
from train_lib.learning.state import TrainState
from train_lib.learning.step import Program
from train_lib.lifecycle import checkpoint, config_rules
from train_lib.lifecycle.checkpoint import Description, SavedRun
from train_lib.lifecycle.writers import BackgroundWriter


class OtherRunError(ValueError):
    """A checkpoint is of a run with another model, encoder or optimizer, or with other settings."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The start of a run: from its last checkpoint, or as a new run."""

    description: Description  # of the run at `step`, with its present settings
    step: int  # of the last checkpoint; 0 without one
    has_new_config: bool  # whether the last checkpoint holds another configuration
    source: SavedRun | None = None  # with the first weights of a new run
    misfits: Collection[str] = ()  # parameters that are not taken from there: shapes differ

    def state(self, program: Program) -> TrainState:
        """Returns the state at step 0: weights are random or those of `source`, all else is new.

        Raises an OSError if the weights cannot be read.
        """
        state = program.init()
        if self.source is None:
            return state
        fitting = {}
        for name, abstract in flatten_dict(program.abstract_state.params, sep='/').items():
            if name not in self.misfits:
                fitting[name] = abstract
        average = self.description.config['init_average']
        restored = self.source.restore_weights(unflatten_dict(fitting, sep='/'), average=average)
        # Weights that were not restored stay random.
        initial = flatten_dict(state.params, sep='/')
        params = unflatten_dict(initial | flatten_dict(restored, sep='/'), sep='/')
        # A copy: a donated state must not hold one buffer twice.
        ema_params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params)
        return state.replace(params=params, ema_params=ema_params)

    def show_config(self, writer: BackgroundWriter) -> None:
        """Writes the configuration as text, if it has not been written yet."""
        if self.has_new_config:
            text = json.dumps(self.description.config, indent=2)
            # Markdown shows lines as they are if they are indented by four spaces.
            writer.write_texts(self.step, {'config': textwrap.indent(text, '    ')})


def find_beginning(
    config: ml_collections.ConfigDict,
    last: SavedRun | None,
    description: Description,
    program: Program,
    accept_changes: Collection[str] = (),
) -> Beginning:
    """Finds the start of a run, and checks that it fits; reads no weights, and writes nothing.

    Args:
        config: Configuration of the run.
        last: Its last checkpoint; None for a new run.
        description: Its description at step 0.
        program: Its compiled functions.
        accept_changes: Fields that may differ from those in the last checkpoint.

    Raises:
        OtherRunError: The last checkpoint belongs to another run, or has other settings.
        ValueError: The weights of a checkpoint do not fit the model.
        OSError: A checkpoint cannot be read.
    """
    # A run that has begun goes on, whatever it began with.
    if last is not None:
        return _resume(last, config.num_steps, description, program, accept_changes)
    source = None
    misfits: Collection[str] = ()
    if config.init_from:
        source, misfits = _open_first_weights(config.init_from, description, program)
    return Beginning(description, 0, has_new_config=True, source=source, misfits=misfits)


def _resume(
    last: SavedRun,
    num_steps: int,
    description: Description,
    program: Program,
    accept_changes: Collection[str],
) -> Beginning:
    """Returns the start of a run from its last checkpoint; `description` is that at step 0."""
    saved = last.description
    check_resumable(saved, description, accept_changes, checkpoint_path=str(last.folder))
    if num_steps < last.step:
        steps = f'{last.folder} has been trained for {last.step} steps'
        problem = f'{steps}, expected at least {last.step}'
        raise errors.FieldError('num_steps', num_steps, problem)
    # The identity is equal, but the data decide some shapes, such as those for texts and crops.
    misfits = last.find_misfits(program.abstract_state.params)
    if misfits:
        name, shapes = next(iter(misfits.items()))
        raise ValueError(
            f'{last.folder}: parameter {name} has shape {shapes}: expected the same model, trained '
            'on texts of the same kind and size and on as many crops of an image.'
        )
    position = _resume_position(saved.position, description.position)
    # TensorBoard has the configuration already, unless it has changed since.
    has_new_config = saved.config != description.config
    description = dataclasses.replace(description, position=position)
    return Beginning(description, last.step, has_new_config)


def _resume_position(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the position from which a resumed run reads each source.

    It logs the sources that are read in another order from here on.
    """
    # A digest is of a data set in an order; the same data set may now have another order.
    samples_by_data_set = {}
    for digest, data_set in saved['data_sets'].items():
        samples_by_data_set[tuple(data_set)] = saved['samples'][digest]
    samples = dict(current['samples'])
    for digest in samples:
        # An equal digest stands for the same sequence of samples, which continues.
        if digest in saved['samples']:
            samples[digest] = saved['samples'][digest]
            continue
        data_set = current['data_sets'][digest]
        samples_before = samples_by_data_set.get(tuple(data_set))
        if samples_before is not None:
            # The same data set in another order: about as many of its samples count as read. The
            # lanes share them, and the quotient is rounded up.
            samples_of_all_lanes = samples_before * saved['lanes']
            samples[digest] = -(-samples_of_all_lanes // current['lanes'])
            effect = 'in the rest of this epoch, some records come twice and others not at all'
        else:
            effect = 'the other data set is read from its beginning'
        name = ' where '.join(data_set)
        logging.info(
            f'{name} is read in another order from sample {samples[digest]} of each lane on: '
            f'{effect}.'
        )
    return {**current, 'step': saved['step'], 'samples': samples}


def _open_first_weights(
    init_from: str, description: Description, program: Program
) -> tuple[SavedRun, Collection[str]]:
    """Returns the checkpoint that `init_from` names, and the parameters that do not fit.

    Raises a FieldError or an OSError if there is none, or no weight of it is of use.
    """
    # Errors name the field, because they are about the folder of another run.
    try:
        source = checkpoint.open_run(init_from)
        misfits = source.find_misfits(program.abstract_state.params)
        _check_kernels(misfits, program)
        identity = source.description.identity
        _check_heads(identity['model'], description.identity['model'])
    except ValueError as error:
        raise errors.FieldError('init_from', init_from, errors.describe_error(error)) from error
    except OSError as error:
        raise type(error)(f'init_from={init_from}: {errors.describe_error(error)}') from error
    # Weights that fit are of use whatever else differs, so this is only a warning.
    for text in describe_changes(identity, description.identity).values():
        logging.warning('The weights of %s were trained with other settings: %s.', init_from, text)
    for name, shapes in misfits.items():
        logging.warning(
            f'Not taken from {init_from}: parameter {name} has shape {shapes}. If this run has it, '
            'it begins anew.'
        )
    return source, misfits


def _check_kernels(misfits: Mapping[str, str], program: Program) -> None:
    """Raises a ValueError if no kernel fits (of those in `blocks`, if there are any)."""
    params = flatten_dict(program.abstract_state.params, sep='/')
    kernels = [name for name in params if name.endswith('/kernel')]
    # A model of another kind may have other names.
    if not kernels:
        kernels = list(params)
    block_kernels = [name for name in kernels if name.startswith('blocks/')]
    if block_kernels:
        kernels = block_kernels
    if misfits.keys() >= set(kernels):
        raise ValueError(
            f'no kernel fits: parameter {kernels[0]} has shape {misfits[kernels[0]]}; expected a '
            'run with the same model.width and model.depth'
        )


def _check_heads(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises a ValueError if the number of attention heads differs, which no shape reveals."""
    if saved['kind'] != current['kind']:
        return
    saved_model = models.make_model(**saved)
    model = models.make_model(**current)
    # A model of one's own may have none.
    before = getattr(saved_model, 'num_heads', 0)
    now = getattr(model, 'num_heads', 0)
    if before != now:
        raise ValueError(f'its model.num_heads is {before}, expected {now} as in this run')


def check_resumable(
    saved: Description, current: Description, accept_changes: Collection[str], checkpoint_path: str
) -> None:
    """Compares the description in a checkpoint with that of this run; logs accepted changes.

    Raises an OtherRunError if the identities differ, or settings that are not accepted.
    """
    changes = describe_changes(saved.identity, current.identity)
    if changes:
        raise OtherRunError(
            f'{checkpoint_path} belongs to another run: {"; ".join(changes.values())}. '
            'To resume that run, restore these; to start a new one, use another --workdir.'
        )
    changes = describe_changes(saved.settings, current.settings)
    unconfirmed = [name for name in sorted(changes) if name not in accept_changes]
    if unconfirmed:
        texts = '; '.join(changes[name] for name in unconfirmed)
        # All changes, so that the flag can be copied as it is.
        raise OtherRunError(
            f'{checkpoint_path} was trained with other settings: {texts}. To confirm this, add '
            f'--accept_changes={",".join(changes)}; otherwise restore the settings.'
        )
    for text in changes.values():
        logging.warning('Accepted change: %s.', text)


def describe_changes(saved: Mapping, current: Mapping) -> dict[str, str]:
    """Returns the fields that differ: a text with the saved and the current value, by name."""
    differences = config_rules.find_differences(_show_values(saved), _show_values(current))
    return {name: f'{name} was {old} and is now {new}' for name, (old, new) in differences.items()}


def _show_values(fields: Mapping) -> dict[str, str]:
    """Returns nested fields by names such as `data.lanes`, their values as Python shows them."""
    # By way of JSON, which turns tuples into lists, and so on.
    flat = config_rules.flatten_fields(json.loads(json.dumps(fields)))
    return {name: repr(value) for name, value in flat.items()}
