"""Tests of the check of accelerators; the devices of this machine are CPUs."""

import pathlib

import pytest

from coyo11m_tfds.checks import child, devices


def with_device(root: pathlib.Path, *names: str) -> pathlib.Path:
    for name in names:
        (root / 'dev' / name).parent.mkdir(parents=True, exist_ok=True)
        (root / 'dev' / name).touch()
    return root


@pytest.fixture
def on_cpus(monkeypatch) -> None:
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')


def test_a_device_that_the_libraries_do_not_see_is_a_warning(tmp_path, on_cpus):
    root = with_device(tmp_path, 'nvidia0')
    jax, torch = devices.check_devices(['jax', 'torch'], 60, root)
    for found in (jax, torch):
        assert (found.status, found.facts['devices'][0][0]) == ('warn', 'cpu')
        assert 'although there is a GPU' in found.text
    assert "'.[gpu]'" in jax.mend
    assert 'CUDA' in torch.mend


def test_what_is_plugged_in(tmp_path):
    assert devices.plugged_in(with_device(tmp_path, 'nvidiactl', 'accelerator')) == ''
    assert devices.plugged_in(with_device(tmp_path, 'accel0')) == 'tpu'
    assert devices.plugged_in(with_device(tmp_path, 'nvidia0')) == 'gpu'


def test_what_is_not_installed_is_not_imported(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, 'find_spec', lambda name: None)
    (found,) = devices.check_devices(['jax'], 60)
    assert (found.status, found.text) == ('pass', 'jax is not installed')


def test_devices_that_cannot_be_used_are_a_failure(monkeypatch):
    monkeypatch.setenv('JAX_PLATFORMS', 'nonesuch')
    (found,) = devices.check_devices(['jax'], 60)
    assert (found.status, 'nonesuch' in found.text) == ('fail', True)
    assert 'JAX_PLATFORMS=cpu' in found.mend


@pytest.mark.parametrize(
    ('code', 'message'),
    [
        ('import time; time.sleep(60)', 'no answer within'),
        ('import os; os.kill(os.getpid(), 9)', 'memory ran out'),
        ('raise SystemExit("error: no device")', '^no device$'),
        ('print("hello")', 'no answer, but: hello'),
        ('print("[1]")', r'no answer, but: \[1\]'),
        ('', 'no answer'),
    ],
)
def test_a_child_that_gives_no_answer(code, message):
    with pytest.raises((ValueError, TimeoutError), match=message):
        child.ask(['-c', code], 1)


def test_a_child_answers():
    code = 'import os; print("noise"); print(\'{"a": "%s"}\' % os.environ["X"])'
    assert child.ask(['-c', code], 60, {'X': 'y'}) == {'a': 'y'}
