"""Configurations are found by name, and files are left as they are."""

import pathlib
import sys

import pytest

from tests.checkout import CHECKOUT
from train_lib import named_configs

CONFIGS = CHECKOUT / 'configs'


@pytest.fixture
def elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', sys.path.copy())
    return tmp_path


@pytest.mark.parametrize('name', ['demo', 'demo.py', 'configs/demo.py'])
def test_a_name_becomes_the_path(elsewhere, name):
    path = str(CONFIGS / 'demo.py')

    assert named_configs.resolve(['x', f'--config={name}', '--workdir=w']) == [
        *('x', f'--config={path}', '--workdir=w')
    ]
    assert named_configs.resolve(['x', '-config', name]) == ['x', '-config', path]


def test_a_file_of_ones_own_can_import_those_of_the_package(elsewhere, monkeypatch):
    (elsewhere / 'mine.py').touch()
    monkeypatch.setattr(sys, 'path', [])
    for _ in range(2):
        named_configs.resolve(['x', '--config=mine.py'])
    assert sys.path == [str(CHECKOUT)]


def test_what_is_no_name_stays(elsewhere):
    (elsewhere / 'demo.py').touch()
    arguments = ['x', '--config=demo.py:big', '--config.data.dir=demo', '--workdir', 'demo']

    assert named_configs.resolve(arguments) == arguments


def test_an_unknown_name_is_answered_with_those_that_there_are(elsewhere):
    with pytest.raises(SystemExit, match=r'^error: --config=dmeo: .*: default, demo, gpu, tpu'):
        named_configs.resolve(['x', '--config=dmeo'])
