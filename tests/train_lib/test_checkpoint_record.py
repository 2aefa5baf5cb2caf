"""A damaged checkpoint is refused by the name of its file, whoever reads it."""

import hashlib
import os
import pathlib
import random
import shutil

import jax
import numpy as np
import pytest

from tests.runs import small_config
from train_lib import beginnings, checkpoint, checkpoint_record, draw, saved_run, train

STEP = 2


@pytest.fixture(scope='module')
def run(mini_dataset, tmp_path_factory):
    """What has been checked of a run before its first step, and its workdir with a checkpoint."""
    workdir = tmp_path_factory.mktemp('run')
    config = small_config(mini_dataset, num_steps=STEP, eval_every=0, checkpoint_every=0)
    train.train_and_evaluate(config, workdir)
    return train.set_up(config, workdir)


def flip_a_bit(data):
    bit = random.randrange(8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def overwrite(data, new):
    place = random.randrange(len(data))
    return (data[:place] + new + data[place + len(new) :])[: len(data)]


DAMAGES = {
    'bit': flip_a_bit,
    'random': lambda data: overwrite(data, random.randbytes(16)),
    'zeros': lambda data: overwrite(data, bytes(512)),
    'cut': lambda data: data[: random.randrange(len(data))],
}


def damaged(workdir, target, choose, damage):
    """Copies a workdir and changes one file of its checkpoint; that file's path."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(workdir / checkpoint.FOLDER, target / checkpoint.FOLDER, copy_function=os.link)
    files = [path for path in (target / checkpoint.FOLDER / str(STEP)).rglob('*') if path.is_file()]
    path = choose(sorted(path for path in files if path.stat().st_size))
    data = path.read_bytes()
    path.unlink()  # not the original, which it is a link to
    path.write_bytes(damage(data))
    return path


def resumed(run, workdir):
    """The state and the description that a run would go on with."""
    beginning = beginnings.find(run.config, workdir, run.data, run.program)
    empty = run.program.no_metrics()
    window = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), empty
    )
    with checkpoint.open_manager(workdir, keep=4) as manager:
        restored = checkpoint.restore(manager, run.program.abstract_state, window)
    return restored, vars(beginning.description)


def begun(run, workdir):
    """The state that a run would begin with that is told to by `init_from`."""
    config = run.config.copy_and_resolve_references()
    config.init_from = str(workdir)
    beginning = beginnings.find(config, workdir.parent / 'new', run.data, run.program)
    return beginning.state(run.program)


def drawn(run, workdir):
    """What pictures would be made of."""
    del run
    artist = draw.Artist(workdir)
    return artist._params, artist.facts.to_json()


def digest(tree):
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        found.update(f'{path} {np.asarray(leaf).dtype}'.encode() + np.asarray(leaf).tobytes())
    return found.hexdigest()


def workdir_of(run):
    return pathlib.Path(run.workdir)


@pytest.mark.parametrize('read', [resumed, begun, drawn])
def test_each_file_is_compared_before_anything_is_restored(run, tmp_path, read):
    copy = tmp_path / 'copy'
    folder = workdir_of(run) / checkpoint.FOLDER / str(STEP)
    names = {path.relative_to(folder) for path in folder.rglob('*') if path.is_file()}
    assert len(names) > 15
    for name in sorted(names - {pathlib.Path(name) for name in checkpoint_record._LATER}):
        path = copy / checkpoint.FOLDER / str(STEP) / name
        damaged(workdir_of(run), copy, lambda _, path=path: path, flip_a_bit)
        expected = f'{path}: .* damaged: remove the folder {path.parents[len(name.parts) - 1]} to'
        with pytest.raises(OSError, match=expected) as error:
            read(run, copy)
        assert '\n' not in str(error.value)


def test_a_file_that_is_missing_is_named(run, tmp_path):
    path = damaged(workdir_of(run), tmp_path, lambda files: files[-1], bytes)
    path.unlink()
    with pytest.raises(OSError, match=f'{path}: this file .* missing'):
        saved_run.open_run(tmp_path)


@pytest.mark.slow
def test_of_500_random_damages_none_is_restored_with_other_values(run, tmp_path):
    intact = {read: digest(read(run, workdir_of(run))) for read in (resumed, begun, drawn)}
    refused = 0
    for number in range(500):
        damage = DAMAGES[list(DAMAGES)[number % 4]]
        path = damaged(workdir_of(run), tmp_path / 'copy', random.choice, damage)
        read = random.choice(list(intact))
        try:
            found = digest(read(run, tmp_path / 'copy'))
        except OSError as error:
            assert str(path) in str(error) and '\n' not in str(error), error
            refused += 1
        else:
            assert found == intact[read], path
    print(f'{refused} of 500 were refused; the others changed nothing that is read')
