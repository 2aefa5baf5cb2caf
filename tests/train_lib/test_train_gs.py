"""The whole life of a run on gs://: data, checkpoints, logs and pictures in buckets.

The commands are those of a user, as processes; the storage server is on loopback.
"""

import os
import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from coyo11m_tfds.text import text_encoders
from tests import children, runs
from tests.fakes.cloud import Fault
from train_lib import draw
from train_lib.lifecycle import checkpoint, workdirs
from train_lib.results import previews

DATA, RUN = 'gs://data/1.0.0', 'gs://runs/a'
SETTINGS = {'num_steps': 8, 'eval_every': 5, 'preview_every': 4, 'checkpoint_every': 2}


@pytest.fixture(scope='module')
def undisturbed(mini_dataset, tmp_path_factory):
    """Losses of a run on a disk."""
    workdir = tmp_path_factory.mktemp('undisturbed')
    runs.train(mini_dataset, workdir, **SETTINGS | {'checkpoint_every': 0})
    return runs.losses(workdir)


@pytest.fixture
def storage(gcs, mini_dataset):
    gcs.upload_folder(mini_dataset, DATA)
    return gcs


def checkpoints(gcs):
    """Steps to whether the checkpoint is complete."""
    steps = {}
    for name in gcs.objects('runs'):
        if found := re.match(r'a/checkpoints/(\d+)/(commit_success.txt$)?', name):
            steps[int(found[1])] = bool(found[2]) or steps.get(int(found[1]), False)
    return steps


def test_a_run_in_buckets_that_is_killed_goes_on_as_if_undisturbed(storage, undisturbed, tmp_path):
    process = runs.start(DATA, RUN, forked=True, **SETTINGS)
    # One checkpoint is complete and another is being written.
    children.wait_until(lambda: {*checkpoints(storage).values()} == {True, False}, process)
    process.kill()
    process.communicate()
    resumed = runs.start(DATA, RUN, forked=True, **SETTINGS)
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    storage.download_folder(RUN, tmp_path)
    assert runs.losses(tmp_path) == undisturbed
    assert checkpoints(storage) == {6: True, 8: True}
    assert not [name for name in storage.objects('runs') if name.endswith('.lock')]
    pictures = {name for name in storage.objects('runs') if name.endswith('.png')}
    assert pictures == {f'a/previews/step_{step:06}.png' for step in (4, 8)}
    assert not (runs.CHECKOUT / 'gs:').exists()
    check_drawing(storage, tmp_path)


def check_drawing(storage, folder):
    """By the command, on another number of devices, as in this process."""
    captions = ['a red circle', 'a blue square on a green background']
    # As some editors begin a file.
    (folder / 'captions.txt').write_text('\n\n'.join(captions), 'utf-8-sig')
    flags = f'--workdir={RUN}', '--step=8', f'--prompts={folder}/captions.txt', '--singles'
    devices = f'--xla_force_host_platform_device_count=3 {os.environ["XLA_FLAGS"]}'
    done = children.program('train_lib.draw', *flags, forked=True, XLA_FLAGS=devices)
    assert done.returncode == 0, done.stderr
    path = f'{RUN}/previews/captions_000008'
    assert f'pictures: {path}.png and {path}/\n' in done.stdout
    storage.download_folder(RUN, folder)
    drawn = draw.Artist(folder).draw(captions, text_encoders.make_encoder('hash'))
    path = folder / 'previews' / 'captions_000008'
    with Image.open(path.with_suffix('.png')) as picture:
        expected = previews.make_grid([drawn], captions).astype(int)
        # By rounding, and what makes the pictures four times as large.
        assert np.abs(np.asarray(picture) - expected).max() <= 3
    for number, caption in enumerate(captions):
        with Image.open(path / f'{number:05}.png') as picture:
            assert np.abs(np.asarray(picture).astype(int) - drawn[number]).max() <= 1
        assert (path / f'{number:05}.txt').read_text() == f'{caption}\n'


def test_a_workdir_is_checked_without_a_trace(gcs, tmp_path):
    workdirs.check_writable('gs://runs/new/folder/')
    workdirs.check_writable(tmp_path / 'new' / 'folder')
    assert gcs.objects('runs') == {}
    assert not list(tmp_path.iterdir())
    gcs.inject(Fault('403', match='delete runs'))
    with pytest.raises(PermissionError, match='deleting gs://runs/a/'):
        workdirs.check_writable(RUN)


def test_a_workdir_that_cannot_be_is_refused(gcs, tmp_path):
    (tmp_path / 'file').write_text('')
    # Before hours of training whose first checkpoint Orbax would not write.
    with pytest.raises(ValueError, match=r'could not be written; expected .* path is UTF-8'):
        workdirs.check_takes_checkpoints(tmp_path / 'caf\udce9')
    with pytest.raises(
        OSError, match=r'^gs://no-such-bucket: there is no such bucket\. Make it with'
    ):
        workdirs.check_writable('gs://no-such-bucket/a')
    for folder, error in {
        'hf://datasets/a/b': ValueError,
        tmp_path / 'file' / 'run': NotADirectoryError,
    }.items():
        with pytest.raises(error, match=re.escape(str(folder))):
            workdirs.check_writable(folder)
    for folder in ('gs://runs/b', 'gs://no-such-bucket', tmp_path / 'missing'):
        with pytest.raises(OSError, match=re.escape(str(folder))):
            checkpoint.open_run(folder)


@pytest.mark.parametrize('name', ['lr#1', 'lr?', 'a/../b', 'lr[1]'])
def test_a_workdir_whose_arrays_would_get_elsewhere_is_refused(storage, name):
    with pytest.raises(ValueError, match=re.escape(f'gs://runs/{name}: its checkpoints could ')):
        runs.train(DATA, f'gs://runs/{name}', **SETTINGS)
    assert storage.objects('runs') == {}


@pytest.mark.parametrize('name', ['lr[1]', 'lr*', 'lr?', 'lr\\1'])
def test_a_workdir_whose_name_is_a_pattern_is_refused_on_a_disk_too(mini_dataset, tmp_path, name):
    with pytest.raises(ValueError, match=re.escape(f'{name}: its checkpoints could not be read')):
        runs.train(mini_dataset, tmp_path / name, **SETTINGS)
    assert not list(tmp_path.iterdir())


def test_a_url_is_absolute_and_a_path_becomes_so(tmp_path, monkeypatch):
    assert str(workdirs.absolute('gs://bucket/a/')).rstrip('/') == 'gs://bucket/a'
    monkeypatch.chdir(tmp_path)
    assert workdirs.absolute('a') == pathlib.Path.cwd() / 'a'
