"""Scalars and pictures reach TensorBoard and, where that is asked for, Weights & Biases.

wandb runs for real, in its offline mode; its file is read back.
"""

import re
import sys

import numpy as np
import pytest
from etils import epath

from tests import runs
from train_lib import train
from train_lib.lifecycle import writers

pytest.importorskip('wandb')


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    (tmp_path / 'wandb').mkdir()
    for name, value in {
        'WANDB_MODE': 'offline',
        'WANDB_DIR': str(tmp_path),
        'WANDB_CACHE_DIR': str(tmp_path / 'cache'),
        'WANDB_DATA_DIR': str(tmp_path / 'data'),
        'WANDB_CONFIG_DIR': str(tmp_path / 'config'),
    }.items():
        monkeypatch.setenv(name, value)


def config_with(project):
    return runs.small_config('/nowhere', **{'wandb.project': project})


def write(workdir, step):
    writer = writers.make_writer(config_with('tests'), epath.Path(workdir))
    writer.write_scalars(step, {'train/loss': 1.5 * step, 'eval/loss': np.float32(2)})
    writer.write_images(step, {'previews': np.full((1, 8, 6, 3), 200, np.uint8)})
    writer.write_texts(step, {'config': 'seed: <0>'})
    writer.close()


def test_wandb_gets_what_tensorboard_gets_and_a_resumed_run_keeps_its_id(tmp_path):
    workdir = tmp_path / 'run'
    write(workdir, 10)
    write(workdir, 20)
    run_id = (workdir / 'wandb_id.txt').read_text()
    files = sorted((tmp_path / 'wandb').glob(f'offline-run-*-{run_id}/run-{run_id}.wandb'))
    assert len(files) == len(list((tmp_path / 'wandb').glob('offline-run-*'))) >= 1
    content = b''.join(file.read_bytes() for file in files)
    for name in (b'train/loss', b'eval/loss', b'images/separated'):
        assert content.count(name) >= 2
    assert len(list((tmp_path / 'wandb').glob('**/*.png'))) == 2
    pages = [path.read_text() for path in (tmp_path / 'wandb').glob('**/*.html')]
    assert ['<pre>seed: &lt;0&gt;</pre>' in page for page in pages] == [True, True]
    scalars = runs.read_scalars(workdir)
    assert scalars['train/loss', 10] == [15] and scalars['train/loss', 20] == [30]


def test_without_a_project_wandb_is_not_even_imported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)  # an import of it is an error
    writers.make_writer(config_with(''), epath.Path(tmp_path / 'run')).close()
    assert not (tmp_path / 'run' / 'wandb_id.txt').exists()


def test_where_wandb_is_missing_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(ValueError, match=re.escape("pip install -c constraints.txt -e '.[wandb]'")):
        train.set_up(config_with('tests'), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
