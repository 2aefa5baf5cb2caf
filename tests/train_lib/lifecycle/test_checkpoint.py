"""What was saved comes back, the last few are kept, and a damaged one is refused by name."""

import pathlib
import random
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import children, damages
from tests.runs import saved_steps, small_config
from train_lib import draw, run_setup, train
from train_lib.lifecycle import beginnings, checkpoint
from train_lib.lifecycle.checkpoint import Description


def _state(value):
    return {'kernel': jnp.full((3, 2), value, jnp.float32), 'step': jnp.int32(value)}


def _window(value):
    return {'loss': jnp.float32(value)}


def _save(manager, step, value=None, **options):
    value = step if value is None else value
    checkpoint.save_step(manager, step, _state(value), _window(value), Description({}), **options)


def test_the_last_checkpoint_comes_back_bit_for_bit(tmp_path):
    with checkpoint.open_manager(tmp_path, keep=2) as manager:
        assert checkpoint.restore_last(manager, _state(0), _window(0)) is None
        for step in (1, 2, 3):
            _save(manager, step, step / 3, interrupted=step == 3)
        _save(manager, 3, 7)  # a step is saved once
    assert sorted(saved_steps(tmp_path)) == [2, 3]
    with checkpoint.open_manager(tmp_path, keep=2) as manager:
        restored = checkpoint.restore_last(manager, _state(0), _window(0))
        jax.tree.map(np.testing.assert_array_equal, restored, (_state(3 / 3), _window(3 / 3), True))
        checkpoint.mark_complete(manager, 3)
        assert checkpoint.restore_last(manager, _state(0), _window(0))[2] is False
    assert checkpoint.find_last(tmp_path).step == 3


@pytest.mark.parametrize(('keep_every', 'kept'), [(0, [5, 6]), (2, [2, 4, 5, 6])])
def test_checkpoints_of_every_so_many_steps_are_kept_beside_the_last(tmp_path, keep_every, kept):
    # As two runs of one workdir.
    for steps in (range(1, 5), range(5, 7)):
        with checkpoint.open_manager(tmp_path, 2, keep_every) as manager:
            for step in steps:
                _save(manager, step)
    assert sorted(saved_steps(tmp_path)) == kept
    with checkpoint.open_manager(tmp_path, 1, keep_every):  # makes room before it writes
        assert sorted(saved_steps(tmp_path)) == [step for step in kept if step != 5]


@pytest.fixture
def full_disk():
    """Writing more than 0.2 MB to a file fails, with an OSError as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_of_several_errors_the_first_is_told(full_disk, tmp_path):
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)))
    large = {'kernel': weights}, _window(0), Description({})
    # Two folders: Orbax may still be writing to the first when it has raised its error.
    written = f'^{tmp_path}/disk/checkpoints: a checkpoint cannot be written: .*File too large'
    for name, message in (('log', 'the log is full'), ('disk', written)):
        with (
            pytest.raises(OSError, match=message),
            checkpoint.open_manager(tmp_path / name, keep=2) as manager,
        ):
            checkpoint.save_step(manager, 1, *large)
            if name == 'log':
                raise OSError('the log is full')


_RESHARD = """
    import jax, jax.numpy as jnp
    from train_lib.lifecycle import checkpoint
    from train_lib.learning import sharding

    def placed(tree, fsdp):
        return jax.device_put(tree, sharding.by_shape(tree, sharding.make_mesh(-1, fsdp)))

    state = {'kernel': jnp.arange(2**16, dtype=jnp.float32).reshape(256, 256)}
    window = {'loss': jnp.ones(())}
    with checkpoint.open_manager(sys.argv[1], keep=1) as manager:
        checkpoint.save_step(manager, 1, placed(state, 1), window, checkpoint.Description({}))
        manager.wait_until_finished()
        restored, _, _ = checkpoint.restore_last(manager, placed(state, 4), window)
    assert (restored['kernel'] == state['kernel']).all()
    print(restored['kernel'].addressable_shards[0].data.shape)
"""


def test_a_checkpoint_can_be_restored_to_other_shardings(tmp_path):
    assert children.output(_RESHARD, tmp_path, devices=4, forked=True) == '(256, 64)\n'


STEP = 4


@pytest.fixture(scope='module')
def run(small_run, mini_dataset):
    """What has been checked of a run before its first step, and its workdir with a checkpoint."""
    changes = {'num_steps': STEP, 'eval_every': 0, 'preview.guidance': 3.0}
    return train.set_up(small_config(mini_dataset, **changes), small_run[0])


def resumed(run, workdir):
    description = run_setup.describe_run(run.config, run.data, run.program)
    beginnings.find_beginning(run.config, checkpoint.find_last(workdir), description, run.program)


def begun(run, workdir):
    """As by another run's `init_from`."""
    config = run.config.copy_and_resolve_references()
    config.init_from = str(workdir)
    description = run_setup.describe_run(config, run.data, run.program)
    beginnings.find_beginning(config, None, description, run.program)


def drawn(_, workdir):
    draw.Artist(workdir)


@pytest.mark.parametrize('read', [resumed, begun, drawn])
def test_each_file_is_compared_before_anything_is_restored(run, tmp_path, read):
    workdir, copy = pathlib.Path(run.workdir), tmp_path / 'copy'
    folder = workdir / checkpoint.FOLDER / str(STEP)
    names = {path.relative_to(folder) for path in folder.rglob('*') if path.is_file()}
    names -= {pathlib.Path(name) for name in checkpoint.NOT_RECORDED}
    assert len(names) > 15
    for name in sorted(names):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(workdir / checkpoint.FOLDER, copy / checkpoint.FOLDER)
        path = copy / checkpoint.FOLDER / str(STEP) / name
        damages.flip(path, random.randrange(path.stat().st_size))
        expected = f'{path}: .* damaged: remove the folder {path.parents[len(name.parts) - 1]} to'
        with pytest.raises(OSError, match=expected) as error:
            read(run, copy)
        assert '\n' not in str(error.value)
    path.unlink()
    with pytest.raises(OSError, match=f'{path}: this file .* missing'):
        read(run, copy)


@pytest.mark.parametrize('read', [resumed, begun, drawn])
def test_a_step_under_another_number_is_refused_with_its_own(run, tmp_path, read):
    steps = shutil.copytree(pathlib.Path(run.workdir), tmp_path / 'copy') / checkpoint.FOLDER
    shutil.copytree(steps / str(STEP), steps / '7')
    expected = f'^(init_from=.*: )?{steps}/7 is a checkpoint of step 4 in a folder named 7: rename'
    with pytest.raises(OSError, match=expected):
        read(run, steps.parent)
    # As a copy that somebody keeps it is no step.
    (steps / '7').rename(steps / 'best_7')
    read(run, steps.parent)
    with pytest.raises(ValueError, match='holds no checkpoint of step 7; there are 2, 4'):
        checkpoint.open_run(steps.parent, step=7)


def test_a_folder_comes_before_a_step_of_a_run(run, tmp_path):
    """`lr@2` is the run of this name, and step 2 of `lr` only where there is none."""
    lr = shutil.copytree(run.workdir, tmp_path / 'lr')
    other = tmp_path / 'lr@2'

    def folder_of(place, **step) -> str:
        return str(checkpoint.open_run(place, **step).folder.relative_to(tmp_path))

    assert folder_of(other) == folder_of(lr, step=2) == 'lr/checkpoints/2'
    shutil.copytree(lr, other)
    assert folder_of(other) == 'lr@2/checkpoints/4'
    assert folder_of(f'{other}@2') == folder_of(other, step=2) == 'lr@2/checkpoints/2'
    assert folder_of(lr, step=2) == 'lr/checkpoints/2'
    assert draw.Artist(lr, step=2).step == 2 and draw.Artist(other).step == 4
    with pytest.raises(FileNotFoundError, match=f'^{lr}@9: there is no such folder'):
        checkpoint.open_run(f'{lr}@9', step=2)
