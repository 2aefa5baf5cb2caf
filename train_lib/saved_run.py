"""A run's checkpoints seen from outside: what they say of it, and its weights alone.

    saved = saved_run.find('W')                     # the last checkpoint; None where there is none
    saved = saved_run.open_run('gs://bucket/W@2000')    # or a ValueError
    saved.description.config                        # of the run, as nested plain values
    params = saved.restore_weights(abstract_params, average=True)

Nothing is written. Neither the optimizer's state nor the run's mesh is needed: arrays go to the
shardings that are asked for.
"""

import dataclasses
import functools
import os
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from train_lib import checkpoint, checkpoint_record, workdirs

_FIELDS = {True: 'ema_params', False: 'params'}  # of `TrainState`, by `average`


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """One complete checkpoint.

    Attributes:
        folder: of this checkpoint.
        step: of the run.
    """

    folder: epath.Path
    step: int

    @functools.cached_property
    def description(self) -> checkpoint.Description:
        """The run's description in the checkpoint."""
        reader = ocp.Checkpointer(ocp.JsonCheckpointHandler())
        with checkpoint.errors_of_reading(self.folder), reader:
            run = reader.restore(self.folder / checkpoint.RUN)
        return checkpoint.Description.from_json(run)

    def check_shapes(self, abstract_params: Any) -> None:
        """Raises a ValueError that names the first parameter that has another shape here."""
        saved, wanted = _by_name(self._metadata), _by_name(abstract_params)
        for name in sorted(saved.keys() | wanted.keys()):
            there, here = saved.get(name, 'absent'), wanted.get(name, 'absent')
            if there != here:
                raise ValueError(
                    f'{self.folder}: parameter {name} has shape {there} there and {here} here: '
                    'expected the same model, trained on text embeddings of the same size.'
                )

    def restore_weights(self, abstract_params: Any, *, average: bool) -> Any:
        """Reads the weights and nothing else.

        Args:
            abstract_params: a pytree of `jax.ShapeDtypeStruct` with the shardings that are wanted.
            average: their moving average instead of the weights of the last step.

        Raises:
            ValueError: as `check_shapes`.
            OSError: they cannot be read.
        """
        self.check_shapes(abstract_params)
        item = {_FIELDS[average]: abstract_params}
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        with checkpoint.errors_of_reading(self.folder), ocp.PyTreeCheckpointer() as reader:
            restored = reader.restore(self.folder / checkpoint.STATE, args=args)
        kind = 'average of the weights' if average else 'weights'
        logging.info('Read the %s at step %d from %s.', kind, self.step, self.folder)
        return restored[_FIELDS[average]]

    def abstract_weights(self, placed: jax.sharding.Sharding) -> Any:
        """Shapes and dtypes of the weights, all with this sharding."""
        return jax.tree.map(
            lambda saved: jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=placed),
            self._metadata,
        )

    @functools.cached_property
    def _metadata(self) -> Any:
        """A pytree like that of the weights."""
        with checkpoint.errors_of_reading(self.folder):
            return ocp.PyTreeCheckpointHandler().metadata(self.folder / checkpoint.STATE)['params']


def find(workdir: epath.PathLike) -> SavedRun | None:
    """The last checkpoint of a run, or None where there is none; `OSError` if it is damaged."""
    steps = _steps(workdir)
    return _at(workdir, steps[-1]) if steps else None


def open_run(place: epath.PathLike) -> SavedRun:
    """Finds a checkpoint that has to be there.

    Args:
        place: `WORKDIR`, local or `gs://`, for its last checkpoint; or `WORKDIR@STEP`.

    Raises:
        ValueError: there is none, or none of that step.
        OSError: the folder does not exist or cannot be read, or the checkpoint is damaged.
    """
    workdir, at, step = os.fspath(place).rpartition('@')
    if not (at and step.isdecimal()):
        workdir, step = os.fspath(place), None
    workdirs.check_readable(workdir)
    steps = _steps(workdir)
    if not steps:
        raise ValueError(f'{workdir} holds no checkpoint: train first, or name another one.')
    if step is not None and int(step) not in steps:
        there = ', '.join(map(str, steps))
        raise ValueError(f'{workdir} holds no checkpoint of step {step}; there are {there}.')
    return _at(workdir, steps[-1] if step is None else int(step))


def _at(workdir: epath.PathLike, step: int) -> SavedRun:
    folder = _folder(workdir) / str(step)
    checkpoint_record.check(folder)
    return SavedRun(folder, step)


def _folder(workdir: epath.PathLike) -> epath.Path:
    return workdirs.absolute(workdir) / checkpoint.FOLDER


def _steps(workdir: epath.PathLike) -> list[int]:
    folder = _folder(workdir)
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


def _by_name(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by names such as `block/mlp/kernel`."""
    return {
        '/'.join(key.key for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
