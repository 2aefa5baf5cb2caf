"""The start of a run: its own last checkpoint, another run's weights, or a random state.

`find` makes all checks before the run reads weights or writes anything.
"""

import dataclasses
import json
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import logging
from clu import metric_writers
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from coyo11m_tfds.process import ending
from train_lib import checkpoint, config_rules, models
from train_lib.checkpoint import Description, SavedRun
from train_lib.data import TrainingData
from train_lib.state import TrainState
from train_lib.step import Program


class OtherRunError(ValueError):
    """A checkpoint is of a run with another model, encoder or optimizer, or other settings."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The start of a run: from its last checkpoint, or as a new run.

    Attributes:
        description: Description of the run at `step`, with its present settings.
        step: Step of the last checkpoint; 0 without a checkpoint.
        data: Data of the run.
        has_new_config: Whether the last checkpoint holds another configuration.
        source: Checkpoint with the first weights of a new run, or None.
        others: Names of parameters that are not taken from there, because their shapes differ.
    """

    description: Description
    step: int
    data: TrainingData
    has_new_config: bool
    source: SavedRun | None = None
    others: Collection[str] = ()

    def position_at(self, step: int) -> dict[str, Any]:
        """Returns the place in the data after a step."""
        return self.data.position_at(self.description.position, step)

    def description_at(self, step: int) -> Description:
        """Returns the description of the run for the checkpoint of a step."""
        return dataclasses.replace(self.description, position=self.position_at(step))

    def state(self, program: Program) -> TrainState:
        """Returns the state at step 0.

        Weights are random or those of `source`; their average equals them, and the optimizer's
        state is new.
        """
        state = program.init()
        if self.source is None:
            return state
        average = self.description.config['init_average']
        abstract = flatten_dict(program.abstract_state.params, sep='/')
        wanted = {name: x for name, x in abstract.items() if name not in self.others}
        taken = self.source.restore_weights(unflatten_dict(wanted, sep='/'), average=average)
        own = flatten_dict(state.params, sep='/')
        params = unflatten_dict(own | flatten_dict(taken, sep='/'), sep='/')
        # A copy: a donated state must not hold one buffer twice.
        copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params)
        return state.replace(params=params, ema_params=copied)

    def show_config(self, writer: metric_writers.MetricWriter) -> None:
        """Writes the configuration as text, if it has not been written yet."""
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
    """Finds the start of a run, and checks that it fits.

    Args:
        accept_changes: Fields that may differ from the last checkpoint.
    """
    encoder = program.encoder
    told = {'encoder': {'name': encoder.name, 'revision': encoder.revision}} if encoder else {}
    description = Description(
        identity=data.identity | told,
        settings=data.settings,
        # As JSON has it, to be compared with what comes back from there.
        config=json.loads(json.dumps(config.to_dict())),
        facts=data.facts.to_json(),
        position=data.position,
    )
    own = checkpoint.find(workdir)
    if own is None:
        found = _source(config.init_from, description, program) if config.init_from else (None, ())
        return Beginning(description, 0, data, True, *found)
    saved = own.description
    check_same(saved, description, accept_changes, where=str(own.folder))
    if config.num_steps < own.step:
        raise ValueError(
            f'num_steps={config.num_steps}: {own.folder} has been trained for {own.step} steps, '
            f'expected at least {own.step}'
        )
    if others := own.other_shapes(program.abstract_state.params):
        name, shapes = next(iter(others.items()))
        raise ValueError(
            f'{own.folder}: parameter {name} has shape {shapes}: expected the same model, trained '
            'on texts of the same kind and size and on as many crops of an image.'
        )
    place = _next_position(saved.position, description.position)
    has_new_config = saved.config != description.config
    description = dataclasses.replace(description, position=place)
    return Beginning(description, own.step, data, has_new_config)


def _next_position(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run reads next of each source; a change of an order is logged."""
    before = {tuple(x): saved['samples'][digest] for digest, x in saved['data_sets'].items()}
    samples = dict(now['samples'])
    for digest in samples:
        data_set = now['data_sets'][digest]
        if digest in saved['samples']:
            samples[digest] = saved['samples'][digest]
            continue
        if tuple(data_set) in before:
            samples[digest] = -(-before[tuple(data_set)] * saved['lanes'] // now['lanes'])
            told = 'in the rest of this epoch some records come twice and others not at all'
        else:
            told = 'the other data set is read from its beginning'
        name, first = ' where '.join(data_set), samples[digest]
        logging.info(f'{name} comes in another order from sample {first} of each lane on: {told}.')
    return {**now, 'step': saved['step'], 'samples': samples}


def _source(
    init_from: str, description: Description, program: Program
) -> tuple[SavedRun, Collection[str]]:
    """The checkpoint that `init_from` names, and the parameters that do not fit."""
    try:
        source = checkpoint.open_run(init_from)
        others = source.other_shapes(program.abstract_state.params)
        _check_shares(others, program)
        identity = source.description.identity
        _check_heads(identity['model'], description.identity['model'])
    except (ValueError, OSError) as error:
        raise type(error)(f'init_from={init_from}: {ending.describe(error)}') from error
    for text in differences(identity, description.identity).values():
        logging.warning('The weights of %s were trained with other settings: %s.', init_from, text)
    for name, shapes in others.items():
        logging.warning(
            f'Not taken from {init_from}: parameter {name} has shape {shapes}. If this run has it, '
            'it begins anew.'
        )
    return source, others


def _check_shares(others: Mapping[str, str], program: Program) -> None:
    """Raises a ValueError if no kernel fits (of those in `blocks`, if there are any)."""
    params = flatten_dict(program.abstract_state.params, sep='/')
    kernels = [name for name in params if name.endswith('/kernel')] or list(params)
    needed = [name for name in kernels if name.startswith('blocks/')] or kernels
    if others.keys() >= set(needed):
        raise ValueError(
            f'no kernel fits: parameter {needed[0]} has shape {others[needed[0]]}; expected a run '
            'with the same model.width and model.depth'
        )


def _check_heads(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises a ValueError for another number of attention heads, which no shape shows."""
    if saved['kind'] != current['kind']:
        return
    before, now = (getattr(models.make_model(**x), 'num_heads', 0) for x in (saved, current))
    if before != now:
        raise ValueError(f'its model.num_heads is {before}, expected {now} as in this run')


def check_same(
    saved: Description, current: Description, accept_changes: Collection[str], where: str
) -> None:
    """Compares the description in the checkpoint at `where` with that of this run.

    Args:
        accept_changes: Settings that may differ; their differences are logged.
    """
    if other := differences(saved.identity, current.identity):
        raise OtherRunError(
            f'{where} belongs to another run: {"; ".join(other.values())}. '
            'To resume that run, restore these; to start a new one, use another --workdir.'
        )
    changed = differences(saved.settings, current.settings)
    if unasked := changed.keys() - set(accept_changes):
        raise OtherRunError(
            f'{where} was trained with other settings: '
            f'{"; ".join(changed[name] for name in sorted(unasked))}. To confirm this, add '
            f'--accept_changes={",".join(changed)}; otherwise restore the settings.'
        )
    for text in changed.values():
        logging.warning('Accepted change: %s.', text)


def differences(saved: Mapping, current: Mapping) -> dict[str, str]:
    """Returns the fields that differ, with their saved and current values."""
    # As JSON, because that makes lists of tuples, and so on.
    before, now = (config_rules.flatten_fields(json.loads(json.dumps(x))) for x in (saved, current))
    told = {}
    for name in sorted(before.keys() | now.keys()):
        was, is_now = (repr(x[name]) if name in x else 'absent' for x in (before, now))
        if was != is_now:
            told[name] = f'{name} was {was} and is now {is_now}'
    return told
