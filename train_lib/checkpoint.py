"""Checkpoints that hold the state and the place in the data, and refuse another run's.

    with checkpoint.open_manager(workdir, keep=3, writable=True) as manager:
        restored = checkpoint.restore(manager, abstract_state, abstract_window, description)
        state, window, interrupted = restored or fresh_start()
        checkpoint.save(manager, step, state, window, description)

`state` is a `TrainState`; `window` are the metrics of an unfinished log window. `description` says
what the run is and how it is set, see `Description`. The order of the data is a function of the
step, so the step is all that has to be kept of the place in it.

Orbax writes a checkpoint under a temporary name and renames it when it is complete: a process
killed while it saves leaves the former checkpoint as the latest.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from train_lib import settings, workdirs

FOLDER = 'checkpoints'

_STATE = 'state'
_WINDOW = 'window'
_RUN = 'run'  # JSON: the fields of the description, and:
_INTERRUPTED = 'interrupted'


class OtherRunError(ValueError):
    """A checkpoint belongs to a run with other data, another order, model or settings."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a run is, in plain values: a resumed run is compared with what its checkpoint says.

    Attributes:
        identity: what no run can change: the data set, the order of its samples, the text encoder,
            the model. May be nested.
        settings: what it may, if that is meant; names of fields with their values.
    """

    identity: Mapping[str, Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def open_manager(
    workdir: epath.PathLike, keep: int, *, writable: bool = False
) -> ocp.CheckpointManager:
    """Opens `workdir/checkpoints`.

    Args:
        workdir: local or `gs://` folder.
        keep: how many checkpoints stay, the last ones.
        writable: for the run itself, and for it alone: makes the folder and removes what a killed
            process left half-written. Saves go on in a background thread; leaving the manager's
            context waits for them.
    """
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        create=writable,
        cleanup_tmp_directories=writable,
        read_only=not writable,
    )
    folder = workdirs.absolute(workdir) / FOLDER
    return ocp.CheckpointManager(folder, options=options, item_names=(_STATE, _WINDOW, _RUN))


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
        manager: from `open_manager`, writable.
        step: that the state has reached.
        state, window: pytrees of arrays.
        description: of this run.
        interrupted: what was due after this step has not been done.
    """
    if manager.latest_step() == step:
        return
    items = {
        _STATE: ocp.args.StandardSave(state),
        _WINDOW: ocp.args.StandardSave(window),
        _RUN: ocp.args.JsonSave(dataclasses.asdict(description) | {_INTERRUPTED: interrupted}),
    }
    manager.save(step, args=ocp.args.Composite(**items))


def restore(
    manager: ocp.CheckpointManager,
    abstract_state: Any,
    abstract_window: Any,
    description: Description,
    accept_changes: Collection[str] = (),
) -> tuple[Any, Any, bool] | None:
    """Restores the last complete checkpoint, to resume the run.

    Args:
        manager: from `open_manager`.
        abstract_state: a pytree of `jax.ShapeDtypeStruct` with the shardings that are wanted,
            which need not be those that were saved.
        abstract_window: the same for the metrics.
        description: of this run.
        accept_changes: names of settings that may differ from those of the checkpoint. The next
            one holds the new values.

    Returns:
        `(state, window, interrupted)`, or None where there is no checkpoint.

    Raises:
        OtherRunError: the checkpoint is of a run with another identity, or with other settings that
            are not accepted.
    """
    items = {_STATE: abstract_state, _WINDOW: abstract_window}
    restored = _restore(manager, items, description, accept_changes)
    return restored and (restored[_STATE], restored[_WINDOW], restored[_RUN][_INTERRUPTED])


def restore_state(
    manager: ocp.CheckpointManager, abstract_state: Any, identity: Mapping
) -> Any | None:
    """Restores the state alone, to use what was trained, however it was set; else as `restore`."""
    restored = _restore(manager, {_STATE: abstract_state}, Description(identity))
    return restored and restored[_STATE]


def _restore(
    manager: ocp.CheckpointManager,
    abstract: Mapping[str, Any],
    description: Description,
    accept_changes: Collection[str] = (),
) -> Mapping[str, Any] | None:
    step = manager.latest_step()
    if step is None:
        return None
    run = manager.restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))[_RUN]
    saved = Description(run['identity'], run.get('settings', {}))
    check_same(saved, description, accept_changes, where=str(manager.directory / str(step)))
    items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    logging.info('Restored step %d from %s.', step, manager.directory)
    return dict(restored.items()) | {_RUN: run}


def check_same(
    saved: Description, current: Description, accept_changes: Collection[str], where: str
) -> None:
    """Compares two descriptions, field by field; the settings only if the current one has any.

    Args:
        saved: of the checkpoint.
        current: of this run.
        accept_changes: settings that may differ; those that do are told in the log.
        where: the checkpoint's path, for the message.

    Raises:
        OtherRunError: names every field that differs with both of its values, and the way out.
    """
    if other := _differences(saved.identity, current.identity):
        raise OtherRunError(
            f'{where} belongs to another run: {"; ".join(other.values())}. '
            'To resume it set this back; to start afresh use another --workdir.'
        )
    changed = _differences(saved.settings, current.settings) if current.settings else {}
    if unasked := changed.keys() - set(accept_changes):
        raise OtherRunError(
            f'{where} was trained with other settings: '
            f'{"; ".join(changed[name] for name in sorted(unasked))}. If that is meant, add '
            f'--accept_changes={",".join(changed)}; if not, set this back.'
        )
    for text in changed.values():
        logging.warning('A change that is accepted: %s.', text)


def _differences(saved: Mapping, current: Mapping) -> dict[str, str]:
    """Names of fields that differ, to what they were and are."""
    # As JSON, because that makes lists of tuples, and so on.
    before, now = (settings.flatten(json.loads(json.dumps(x))) for x in (saved, current))
    missing = 'absent'
    return {
        name: f'{name} was {before.get(name, missing)!r} and is now {now.get(name, missing)!r}'
        for name in sorted(before.keys() | now.keys())
        if before.get(name, missing) != now.get(name, missing)
    }
