"""Drawing with what was trained: from the last checkpoint, with the right encoder."""

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from coyo11m_tfds import schema, text_encoders
from tests.test_train import REPO, rewritten, small_config
from train_lib import checkpoint, draw, train

ENDING = {'num_steps': 2, 'eval_every': 0}


@pytest.fixture(scope='module')
def run(mini_dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('run')
    config = small_config(mini_dataset, **ENDING)
    train.train_and_evaluate(config, workdir)
    return config, workdir


def test_every_caption_gets_a_picture_of_its_own(run):
    artist = draw.Artist(*run)
    assert (artist.step, artist.encoder_name) == (2, 'hash')
    encoder = text_encoders.make_encoder('hash')
    pictures = artist.draw(['a red circle', 'a blue square', 'a red circle'], encoder)
    assert (pictures.shape, pictures.dtype) == ((3, 32, 32, 3), np.uint8)
    assert not np.array_equal(pictures[0], pictures[1])
    np.testing.assert_array_equal(artist.draw(['a red circle'] * 3, encoder)[2], pictures[2])


class _OtherEncoder(text_encoders.HashEncoder):
    name = 'hf:other'


def test_captions_of_another_encoder_are_refused(run):
    with pytest.raises(ValueError, match="by 'hf:other', but the model was trained with 'hash'"):
        draw.Artist(*run).draw(['a cat'], _OtherEncoder())


def test_a_checkpoint_of_another_data_set_is_refused(run, mini_dataset, tmp_path):
    other = rewritten(mini_dataset, tmp_path / 'other', schema.META_TEXT_ENCODER)
    with pytest.raises(checkpoint.OtherRunError, match=r'text_encoder\.name'):
        draw.Artist(small_config(other, **ENDING), run[1])


def test_a_workdir_without_a_checkpoint_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=f'{tmp_path} holds no checkpoint'):
        draw.Artist(run[0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_grid(run, tmp_path):
    config, workdir = run
    (tmp_path / 'captions.txt').write_text('a red circle\n\na blue square on a green background\n')
    flags = [
        f'--config.{name}={value}'
        for name, value in _flat(config.to_dict())
        if isinstance(value, (int, float)) or value
    ]
    command = ['-m', 'train_lib.draw', '--config=configs/default.py', *flags]
    places = [f'--workdir={workdir}', f'--prompts={tmp_path}/captions.txt']
    output = subprocess.run(
        [sys.executable, *command, *places, f'--out={tmp_path}/new/grid.png'],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert re.search(rf'^pictures: {tmp_path}/new/grid.png$', output, re.MULTILINE)
    with Image.open(tmp_path / 'new' / 'grid.png') as picture:
        assert picture.width == 2 * 128 + 3 * 8


def _flat(tree, prefix=''):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value
