"""Checkpoints that hold the state and the place in the data, and refuse to go on with other data.

    with checkpoint.open_manager(workdir, keep=3, writable=True) as manager:
        restored = checkpoint.restore(manager, abstract_state, abstract_window, identity)
        state, window, interrupted = restored or fresh_start()
        checkpoint.save(manager, step, state, window, identity)

`state` is a `TrainState`; `window` are the metrics of an unfinished log window. `identity` is a
nested dict of plain values that says what the run is: the data set, the order of its samples, the
text encoder, the model. The order of the data is a function of the step, so the step is all that
has to be kept of the place in it.

Orbax writes a checkpoint under a temporary name and renames it when it is complete: a process
killed while it saves leaves the former checkpoint as the latest.
"""

import json
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from train_lib import workdirs

FOLDER = 'checkpoints'

_STATE = 'state'
_WINDOW = 'window'
_RUN = 'run'  # JSON: the identity, and:
_INTERRUPTED = 'interrupted'


class OtherRunError(ValueError):
    """A checkpoint belongs to a run with other data, another order or another model."""


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
    identity: Mapping,
    *,
    interrupted: bool = False,
) -> None:
    """Starts to save; does nothing where this step is saved already.

    The arrays are copied to the host before this returns, so they may be donated after it.

    Args:
        manager: from `open_manager`, writable.
        step: that the state has reached.
        state, window: pytrees of arrays.
        identity: plain values that say which run this is.
        interrupted: what was due after this step has not been done.
    """
    if manager.latest_step() == step:
        return
    items = {
        _STATE: ocp.args.StandardSave(state),
        _WINDOW: ocp.args.StandardSave(window),
        _RUN: ocp.args.JsonSave({'identity': identity, _INTERRUPTED: interrupted}),
    }
    manager.save(step, args=ocp.args.Composite(**items))


def restore(
    manager: ocp.CheckpointManager, abstract_state: Any, abstract_window: Any, identity: Mapping
) -> tuple[Any, Any, bool] | None:
    """Restores the last complete checkpoint, to go on with the run.

    Args:
        manager: from `open_manager`.
        abstract_state: a pytree of `jax.ShapeDtypeStruct` with the shardings that are wanted,
            which need not be those that were saved.
        abstract_window: the same for the metrics.
        identity: of this run.

    Returns:
        `(state, window, interrupted)`, or None where there is no checkpoint.

    Raises:
        OtherRunError: the checkpoint is of a run with another identity.
    """
    items = {_STATE: abstract_state, _WINDOW: abstract_window}
    restored = _restore(manager, items, identity)
    return restored and (restored[_STATE], restored[_WINDOW], restored[_RUN][_INTERRUPTED])


def restore_state(
    manager: ocp.CheckpointManager, abstract_state: Any, identity: Mapping
) -> Any | None:
    """Restores the state alone, to use what was trained; arguments and errors as in `restore`."""
    restored = _restore(manager, {_STATE: abstract_state}, identity)
    return restored and restored[_STATE]


def _restore(
    manager: ocp.CheckpointManager, abstract: Mapping[str, Any], identity: Mapping
) -> Mapping[str, Any] | None:
    step = manager.latest_step()
    if step is None:
        return None
    run = manager.restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))[_RUN]
    check_identity(run['identity'], identity, where=str(manager.directory / str(step)))
    items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    logging.info('Restored step %d from %s.', step, manager.directory)
    return dict(restored.items()) | {_RUN: run}


def check_identity(saved: Mapping, current: Mapping, where: str) -> None:
    """Compares two identities, field by field.

    Args:
        saved: of the checkpoint.
        current: of this run.
        where: the checkpoint's path, for the message.

    Raises:
        OtherRunError: names every field that differs with both of its values, and the way out.
    """
    before, now = _flatten(_as_json(saved)), _flatten(_as_json(current))
    missing = 'absent'
    different = [
        f'{name} was {before.get(name, missing)!r} and is now {now.get(name, missing)!r}'
        for name in sorted(before.keys() | now.keys())
        if before.get(name, missing) != now.get(name, missing)
    ]
    if different:
        raise OtherRunError(
            f'{where} belongs to another run: {"; ".join(different)}. '
            'To go on with it set this back; to start afresh use another --workdir.'
        )


def _as_json(identity: Mapping) -> dict:
    """What the identity looks like after it was saved and read: tuples as lists, and so on."""
    return json.loads(json.dumps(identity))


def _flatten(tree: Mapping, prefix: str = '') -> dict[str, Any]:
    """Nested dicts to one: `{'data': {'seed': 0}}` to `{'data.seed': 0}`."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f'{prefix}{key}.')
        else:
            flat[f'{prefix}{key}'] = value
    return flat
