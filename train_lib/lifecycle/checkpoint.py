"""Checkpoints of a run: the run saves and restores them, and other programs read them."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax.traverse_util import flatten_dict

from coyo11m_tfds import storage
from coyo11m_tfds.storage import json_digest
from train_lib.learning import sharding
from train_lib.lifecycle import config_rules, workdirs

FOLDER = 'checkpoints'  # in a workdir
RECORD = 'checksums.json'  # in a checkpoint
# Not in the record, and not needed to restore: Orbax writes them after it.
NOT_RECORDED = '_CHECKPOINT_METADATA', 'commit_success.txt'

# Items of a checkpoint.
STATE = 'state'
_RUN = 'run'  # JSON: the fields of the description, and:
_INTERRUPTED = 'interrupted'
_COMPLETED = 'completed'  # file: the hooks of an interrupted one have been called since
_WINDOW = 'window'

_WEIGHTS = {True: 'ema_params', False: 'params'}  # in `TrainState`, by `average`


@dataclasses.dataclass(frozen=True)
class Description:
    """The description of a run in plain values; a resumed run compares the first two fields."""

    # Fields that a resumed run cannot change: text encoder, model, optimizer's name.
    identity: Mapping[str, Any]
    # Fields that it can change on purpose.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The whole configuration as nested values.
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Fields of `DatasetStats`, so that programs can draw without the data set.
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Position of the run in its data, see `data.TrainingData`.
    position: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# --- By the run itself --------------------------------------------------------------------------


@contextlib.contextmanager
def open_manager(
    workdir: epath.PathLike, keep: int, keep_every: int = 0
) -> Iterator[ocp.CheckpointManager]:
    """Opens `workdir/checkpoints`, closes it at the end, and waits for a checkpoint to be written.

    Args:
        workdir: Folder of the run.
        keep: Number of the last checkpoints to keep.
        keep_every: Checkpoints of the multiples of so many steps are kept, too; 0 for none.
    """
    # A checkpoint stays if one of them keeps it.
    policies = [ocp.checkpoint_managers.LatestN(keep)]
    if keep_every:
        policies.append(ocp.checkpoint_managers.EveryNSteps(keep_every))
    # Orbax takes no relative paths.
    folder = workdirs.absolute(workdir) / FOLDER
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
        create=True,
        cleanup_tmp_directories=True,
        temporary_path_class=_make_recorded_path(folder),
    )
    manager = ocp.CheckpointManager(folder, options=options, item_names=(STATE, _WINDOW, _RUN))
    # Orbax removes none before it has written another one, for which there may be no room.
    for step in sorted(manager.all_steps())[:-keep]:
        is_kept = keep_every > 0 and step % keep_every == 0
        if not is_kept:
            manager.delete(step)
    try:
        yield manager
    except BaseException:
        # Orbax raises an error of writing once more, but the first error is the one to report.
        with contextlib.suppress(Exception):
            manager.close()
        raise
    with _name_write_errors(manager):
        manager.close()


def _make_recorded_path(folder: epath.Path) -> type:
    """Returns Orbax's class of temporary paths, made to record files before they are complete."""
    base: Any = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)

    class RecordedPath(base):
        """A temporary path, whose files are recorded when it gets its name."""

        async def finalize(self) -> None:
            """Records the files and gives the path its name."""
            # Orbax also calls this for each item inside of a checkpoint.
            final = self.get_final()
            if final.parent == folder:
                await asyncio.to_thread(_write_record, self.get(), int(final.name))
            await super().finalize()

    return RecordedPath


def save_step(
    manager: ocp.CheckpointManager,
    step: int,
    state: Any,
    window: Any,
    description: Description,
    *,
    interrupted: bool = False,
) -> None:
    """Copies the arrays to the host and starts to save them; does nothing if this step is saved.

    Args:
        manager: See `open_manager`.
        step: Number of steps of the run.
        state: State after them.
        window: Metrics of an unfinished log window.
        description: Description of the run at this step.
        interrupted: Whether hooks that are due after this step were not called.

    Raises:
        OSError: This checkpoint, or the one before, cannot be written.
    """
    # The hook of the last step has saved it already, or nothing was left to train.
    if manager.latest_step() == step:
        return
    items = {
        STATE: ocp.args.StandardSave(state),
        _WINDOW: ocp.args.StandardSave(window),
        _RUN: ocp.args.JsonSave(dataclasses.asdict(description) | {_INTERRUPTED: interrupted}),
    }
    with _name_write_errors(manager):
        manager.save(step, args=ocp.args.Composite(**items))


def mark_complete(manager: ocp.CheckpointManager, step: int) -> None:
    """Records that all hooks due after a saved step have been called."""
    # A file beside the items: what Orbax has written is never changed.
    if jax.process_index() == 0:
        with _name_write_errors(manager):
            (manager.directory / str(step) / _COMPLETED).write_text('')


def wait_until_saved(manager: ocp.CheckpointManager) -> None:
    """Waits until the last checkpoint is complete; raises an OSError if it cannot be written."""
    with _name_write_errors(manager):
        manager.wait_until_finished()


def restore_last(
    manager: ocp.CheckpointManager, state: Any, window: Any
) -> tuple[Any, Any, bool] | None:
    """Restores `(state, window, interrupted)` of the last checkpoint; None without one.

    Args:
        manager: See `open_manager`.
        state: Shapes, dtypes and shardings of the state.
        window: Arrays with those of the log window.

    Raises:
        OSError: The checkpoint cannot be read.
    """
    step = manager.latest_step()
    if step is None:
        return None
    # With the shardings of this run, which may have other devices than the one that saved it.
    items = {
        STATE: ocp.args.StandardRestore(jax.tree.map(sharding.abstract_array, state)),
        _WINDOW: ocp.args.StandardRestore(jax.tree.map(sharding.abstract_array, window)),
        _RUN: ocp.args.JsonRestore(),
    }
    with _name_read_errors(manager.directory / str(step)):
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    logging.info('Restored step %d from %s.', step, manager.directory)
    is_completed = (manager.directory / str(step) / _COMPLETED).exists()
    interrupted = restored[_RUN][_INTERRUPTED] and not is_completed
    return restored[STATE], restored[_WINDOW], interrupted


def advise_restart(manager: ocp.CheckpointManager, step: int) -> str:
    """Returns advice for a resume from the last checkpoint before `step`, where it diverged."""
    changes = 'lower optimizer.learning_rate or raise optimizer.warmup_steps'
    earlier_steps = []
    later_folders = []
    for saved_step in sorted(manager.all_steps()):
        if saved_step < step:
            earlier_steps.append(saved_step)
        else:
            later_folders.append(f'{manager.directory}/{saved_step}')
    if not earlier_steps:
        return f'Start afresh in another --workdir: {changes}'
    action = 'Resume'
    # They hold weights that had already diverged.
    if later_folders:
        action = f'Remove {" and ".join(later_folders)} and resume'
    flag = '--accept_changes=optimizer.learning_rate,optimizer.warmup_steps'
    return f'{action} from {manager.directory}/{earlier_steps[-1]} with {flag}: {changes}'


def _name_read_errors(folder: epath.Path) -> contextlib.AbstractContextManager[None]:
    """Turns errors of reading a checkpoint into an OSError of one line."""
    advice = '; if it is damaged, remove this folder to use the checkpoint before it.'
    return _shorten_errors(f'{folder}: the checkpoint cannot be read', advice)


def _name_write_errors(manager: ocp.CheckpointManager) -> contextlib.AbstractContextManager[None]:
    """Turns errors of writing a checkpoint into an OSError of one line."""
    return _shorten_errors(f'{manager.directory}: a checkpoint cannot be written')


@contextlib.contextmanager
def _shorten_errors(problem: str, advice: str = '') -> Iterator[None]:
    """Turns any error into an OSError with the problem, the error's first line and the advice."""
    try:
        yield
    except Exception as error:
        # Orbax raises errors of all kinds, to whose first line TensorStore adds details.
        line = str(error.__cause__ or error).partition('\n')[0]
        line = re.sub(r" \[\w+='.*", '', line)
        raise OSError(f'{problem}: {line}{advice}') from error


# --- From outside -------------------------------------------------------------------------------


def find_last(workdir: epath.PathLike) -> 'SavedRun | None':
    """Returns a run's last checkpoint, or None without one; raises an OSError if it is damaged."""
    steps = _list_steps(workdir)
    if not steps:
        return None
    return SavedRun(workdir, steps[-1])


def open_run(place: epath.PathLike, step: int | None = None) -> 'SavedRun':
    """Opens the checkpoint of a step of a run, local or `gs://`.

    Args:
        place: `WORKDIR` or, without `step`, also `WORKDIR@STEP`, if there is no folder of this
            name.
        step: Step of the checkpoint; None for the last one.

    Raises:
        ValueError: The run has no such checkpoint.
        OSError: There is no such folder, it may not be read, or the checkpoint is damaged.
    """
    workdir = os.fspath(place)
    folder = storage.open_writable_folder(workdir)
    if not folder.exists() and step is None:
        workdir, step = _split_place(workdir)
        folder = storage.open_writable_folder(workdir)
    if not folder.exists():
        raise FileNotFoundError(f'{workdir}: there is no such folder.')
    # Reports now what may not be allowed: Orbax would find no steps.
    folder.list()
    steps = _list_steps(workdir)
    if not steps:
        raise ValueError(f'{workdir} holds no checkpoint: train first, or name another workdir.')
    if step is None:
        step = steps[-1]
    if step not in steps:
        step_list = ', '.join(map(str, steps))
        raise ValueError(f'{workdir} holds no checkpoint of step {step}; there are {step_list}.')
    return SavedRun(workdir, step)


def _split_place(place: str) -> tuple[str, int | None]:
    """Returns the workdir and the step of `WORKDIR@STEP`; the step is None for another form."""
    workdir, _, step = place.rpartition('@')
    if workdir and step.isdecimal():
        return workdir, int(step)
    return place, None


def _list_steps(workdir: epath.PathLike) -> list[int]:
    """Returns the steps of the complete checkpoints of a run, in ascending order."""
    folder = workdirs.absolute(workdir) / FOLDER
    if not folder.exists():
        return []
    steps = []
    for path in ocp.utils.checkpoint_steps_paths(folder):
        # Orbax takes a copy that somebody keeps there, such as `best_700`, for the step itself.
        if path.name.isdecimal() and path.name == str(int(path.name)):
            steps.append(int(path.name))
    return sorted(steps)


class SavedRun:
    """A complete checkpoint, for reading only; damage is an OSError that names the file.

    Attributes:
        workdir: Absolute path of the run's folder.
        step: Number of steps of the run.
        folder: Folder of the checkpoint.
    """

    def __init__(self, workdir: epath.PathLike, step: int):
        """Opens a checkpoint that exists, and compares its files with their record."""
        self.workdir = workdirs.absolute(workdir)
        self.step = step
        self.folder = self.workdir / FOLDER / str(step)
        _check_record(self.folder, step)

    @functools.cached_property
    def description(self) -> Description:
        """The description of the run at this step."""
        reader = ocp.Checkpointer(ocp.JsonCheckpointHandler())
        with _name_read_errors(self.folder), reader:
            run = reader.restore(self.folder / _RUN)
        names = [field.name for field in dataclasses.fields(Description)]
        return Description(**{name: run[name] for name in names})

    def find_misfits(self, abstract_params: Any) -> dict[str, str]:
        """Returns the parameters whose shapes differ, by name: `'(2, 3) there and absent here'`.

        `abstract_params` has the shapes of this run's weights.
        """
        saved_shapes = _list_shapes(self._metadata)
        own_shapes = _list_shapes(abstract_params)
        misfits = {}
        differences = config_rules.find_differences(saved_shapes, own_shapes)
        for name, (saved, own) in differences.items():
            misfits[name] = f'{saved} there and {own} here'
        return misfits

    def restore_weights(self, abstract_params: Any, *, average: bool) -> Any:
        """Returns the weights of the last step, or their moving average.

        Args:
            abstract_params: Shapes and shardings of the weights to read, or one sharding for all
                weights.
            average: Whether to read the moving average.

        Raises:
            OSError: The checkpoint cannot be read.
        """
        if isinstance(abstract_params, jax.sharding.Sharding):
            to_abstract = functools.partial(sharding.abstract_array, placement=abstract_params)
            abstract_params = jax.tree.map(to_abstract, self._metadata)
        item = {_WEIGHTS[average]: abstract_params}
        # Of the state, only these weights: the optimizer's are twice as large.
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        with _name_read_errors(self.folder), ocp.PyTreeCheckpointer() as reader:
            restored = reader.restore(self.folder / STATE, args=args)
        kind = 'average of the weights' if average else 'weights'
        logging.info('Read the %s at step %d from %s.', kind, self.step, self.folder)
        return restored[_WEIGHTS[average]]

    @functools.cached_property
    def _metadata(self) -> Any:
        """Shapes and dtypes of the weights."""
        with _name_read_errors(self.folder):
            return ocp.PyTreeCheckpointHandler().metadata(self.folder / STATE)['params']


def _list_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of weights by their names, such as `blocks/mlp_1/kernel`."""
    return {name: tuple(leaf.shape) for name, leaf in flatten_dict(params, sep='/').items()}


# --- The record of a checkpoint's files ---------------------------------------------------------


def _write_record(folder: epath.Path, step: int) -> None:
    """Records size and CRC-32C of the files of a checkpoint, in its folder."""
    # Read again, as they lie there: the record says what arrived, not what was sent.
    files = _read_states(folder)
    for name in NOT_RECORDED:
        files.pop(name, None)
    (folder / RECORD).write_bytes(json_digest.seal({'step': step, 'files': files}))


def _check_record(folder: epath.Path, step: int) -> None:
    """Compares the step, and this process's share of the files, with the record.

    Raises an OSError if they differ.
    """
    try:
        record = json_digest.unseal((folder / RECORD).read_bytes())
        recorded_step = record['step']
        files = record['files']
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError) as error:
        raise _damage_error(folder, RECORD) from error
    if recorded_step != step:
        raise OSError(
            f'{folder} is a checkpoint of step {recorded_step} in a folder named {step}: '
            f'rename it to {recorded_step}, or remove it.'
        )
    # No process of a run can take a step without the others, so each reads only a share.
    share = sorted(files)[jax.process_index() :: jax.process_count()]
    states = _read_states(folder, share)
    for name in share:
        if states.get(name) != files[name]:
            raise _damage_error(folder, name)


def _damage_error(folder: epath.Path, name: str) -> OSError:
    """Returns the error of a file of a checkpoint that is not what was written."""
    return OSError(
        f'{folder / name}: this file of a checkpoint is missing or damaged: remove the '
        f'folder {folder} to use the checkpoint before it.'
    )


def _read_states(folder: epath.Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """Returns size and CRC-32C of files below a folder, by name; of all without `names`."""
    states = storage.open_folder(folder).inventory(names=names, deep=True)
    return {name: list(state) for name, state in states.items()}
