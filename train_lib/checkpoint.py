"""Checkpoints that hold the state and what the run is, and refuse another run's.

    saved = saved_run.find(workdir)
    if saved:
        checkpoint.check_same(saved.description, description, accept_changes=[], where='W')
    with checkpoint.open_manager(workdir, keep=3) as manager:
        restored = checkpoint.restore(manager, abstract_state, abstract_window)
        state, window, interrupted = restored or fresh_start()
        checkpoint.save(manager, step, state, window, description)
        checkpoint.wait(manager)

`state` is a `TrainState`; `window` are the metrics of an unfinished log window. `description` says
what the run is and how it is set, see `Description`: enough to draw with its weights where there is
no data set. `saved_run` reads checkpoints of other runs.

Orbax writes a checkpoint under a temporary name and renames it when it is complete: a process
killed while it saves leaves the former checkpoint as the latest. A complete one has a record of its
files, which `saved_run` compares when it opens one.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from train_lib import checkpoint_record, settings, workdirs

FOLDER = 'checkpoints'

STATE = 'state'
RUN = 'run'  # JSON: the fields of the description, and:
_WINDOW = 'window'
_INTERRUPTED = 'interrupted'


class OtherRunError(ValueError):
    """A checkpoint belongs to a run with other data, another order, model or settings."""


@dataclasses.dataclass(frozen=True)
class Description:
    """The identity of a run, in plain values: a resume compares it with that of the checkpoint.

    Attributes:
        identity: what no run can change: the text encoder and the model. May be nested.
        settings: what a run can change on purpose; names of fields with their values.
        config: the whole configuration, as nested values; not compared.
        facts: what a model needs to know of its data, of `data_facts.DataFacts`; not compared.
        position: its place in its data: the number of the next `sample` of every lane, and that of
            the `lanes` and a digest of the `order`; not compared.
    """

    identity: Mapping[str, Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    position: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, run: Mapping[str, Any]) -> 'Description':
        """Of what `save` has written."""
        return cls(**{field.name: run[field.name] for field in dataclasses.fields(cls)})


def open_manager(workdir: epath.PathLike, keep: int, keep_every: int = 0) -> ocp.CheckpointManager:
    """Opens `workdir/checkpoints` for the run itself, and for it alone.

    Makes the folder and removes what a killed process left half-written, and checkpoints that are
    more than shall stay. Saves go on in a background thread; leaving the manager's context waits
    for them.

    Args:
        workdir: local or `gs://` folder.
        keep: how many checkpoints stay, the last ones.
        keep_every: those of steps that it divides stay as well; 0 for no others.
    """
    policies = [ocp.checkpoint_managers.LatestN(keep)]
    if keep_every:
        policies.append(ocp.checkpoint_managers.EveryNSteps(keep_every))
    folder = workdirs.absolute(workdir) / FOLDER
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
        create=True,
        cleanup_tmp_directories=True,
        temporary_path_class=_recorded(folder),
    )
    manager = ocp.CheckpointManager(folder, options=options, item_names=(STATE, _WINDOW, RUN))
    # Orbax removes none before it has written another one, for which there may be no room.
    for step in sorted(manager.all_steps())[:-keep]:
        if not keep_every or step % keep_every:
            manager.delete(step)
    return manager


def _recorded(folder: epath.Path) -> type:
    """What writes a checkpoint in a folder, with a record of its files before it is complete."""
    base: Any = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)

    class Recorded(base):
        async def finalize(self) -> None:
            if self.get_final().parent == folder:  # else it is a part of a checkpoint
                await asyncio.to_thread(checkpoint_record.write, self.get())
            await super().finalize()

    return Recorded


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: Any,
    window: Any,
    description: Description,
    *,
    interrupted: bool = False,
) -> None:
    """Starts to save; does nothing where this step is saved already.

    The arrays are copied to the host before this returns, so they may be donated after it.

    Args:
        manager: from `open_manager`.
        step: that the state has reached.
        state, window: pytrees of arrays.
        description: of this run.
        interrupted: the hooks that are due after this step have not all been called.

    Raises:
        OSError: this checkpoint or the one before it cannot be written; the message names it.
    """
    if manager.latest_step() == step:
        return
    items = {
        STATE: ocp.args.StandardSave(state),
        _WINDOW: ocp.args.StandardSave(window),
        RUN: ocp.args.JsonSave(dataclasses.asdict(description) | {_INTERRUPTED: interrupted}),
    }
    with _errors_of_writing(manager):
        manager.save(step, args=ocp.args.Composite(**items))


def wait(manager: ocp.CheckpointManager) -> None:
    """Waits until the last checkpoint is complete; raises as `save`."""
    with _errors_of_writing(manager):
        manager.wait_until_finished()


def restore(
    manager: ocp.CheckpointManager, abstract_state: Any, abstract_window: Any
) -> tuple[Any, Any, bool] | None:
    """Restores the last complete checkpoint, to resume the run.

    Args:
        manager: from `open_manager`.
        abstract_state: a pytree of `jax.ShapeDtypeStruct` with the shardings that are wanted,
            which need not be those that were saved.
        abstract_window: the same for the metrics.

    Returns:
        `(state, window, interrupted)`, or None where there is no checkpoint.

    Raises:
        OSError: it cannot be read; the message names it.
    """
    step = manager.latest_step()
    if step is None:
        return None
    items = {
        STATE: ocp.args.StandardRestore(abstract_state),
        _WINDOW: ocp.args.StandardRestore(abstract_window),
        RUN: ocp.args.JsonRestore(),
    }
    with errors_of_reading(manager.directory / str(step)):
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    logging.info('Restored step %d from %s.', step, manager.directory)
    return restored[STATE], restored[_WINDOW], restored[RUN][_INTERRUPTED]


def way_back(manager: ocp.CheckpointManager, step: int) -> str:
    """How to resume from the last checkpoint before `step`, in words."""
    older = [saved for saved in sorted(manager.all_steps()) if saved < step]
    if not older:
        return 'Start afresh in another --workdir'
    folders = [f'{manager.directory}/{saved}' for saved in manager.all_steps() if saved >= step]
    removing = f'Remove {" and ".join(folders)} and resume' if folders else 'Resume'
    return f'{removing} from {manager.directory}/{older[-1]}'


@contextlib.contextmanager
def errors_of_reading(folder: epath.Path) -> Iterator[None]:
    """Turns Orbax's errors into an `OSError` of one line that names the checkpoint."""
    try:
        yield
    except Exception as error:  # Orbax raises errors of all kinds
        raise OSError(
            f'{folder}: the checkpoint cannot be read: {_first_line(error)}; if it is damaged, '
            'remove this folder to use the checkpoint before it.'
        ) from error


@contextlib.contextmanager
def _errors_of_writing(manager: ocp.CheckpointManager) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax raises errors of all kinds
        message = f'{manager.directory}: a checkpoint cannot be written: {_first_line(error)}'
        raise OSError(message) from error


def _first_line(error: Exception) -> str:
    line = str(error.__cause__ or error).partition('\n')[0]
    return re.sub(r" \[\w+='.*", '', line)  # TensorStore adds details


def check_same(
    saved: Description, current: Description, accept_changes: Collection[str], where: str
) -> None:
    """Compares two descriptions, field by field.

    Args:
        saved: of the checkpoint.
        current: of this run.
        accept_changes: settings that may differ; differences are logged.
        where: the checkpoint's path, for the message.

    Raises:
        OtherRunError: names every field that differs with both of its values, and the way out.
    """
    if other := differences(saved.identity, current.identity):
        raise OtherRunError(
            f'{where} belongs to another run: {"; ".join(other.values())}. '
            'To resume it set this back; to start afresh use another --workdir.'
        )
    changed = differences(saved.settings, current.settings)
    if unasked := changed.keys() - set(accept_changes):
        raise OtherRunError(
            f'{where} was trained with other settings: '
            f'{"; ".join(changed[name] for name in sorted(unasked))}. If that is meant, add '
            f'--accept_changes={",".join(changed)}; if not, set this back.'
        )
    for text in changed.values():
        logging.warning('A change that is accepted: %s.', text)


def differences(saved: Mapping, current: Mapping) -> dict[str, str]:
    """Names of fields that differ, to what they were and are."""
    # As JSON, because that makes lists of tuples, and so on.
    before, now = (settings.flatten(json.loads(json.dumps(x))) for x in (saved, current))
    words = [{name: repr(x) for name, x in values.items()} for values in (before, now)]
    told = {name: [x.get(name, 'absent') for x in words] for name in before.keys() | now.keys()}
    return {
        name: f'{name} was {was} and is now {is_now}'
        for name, (was, is_now) in sorted(told.items())
        if was != is_now
    }
