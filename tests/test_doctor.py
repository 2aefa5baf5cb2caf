"""The command that examines a machine and what is to be done on it, as a user calls it."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from coyo11m_tfds import schema
from tests import children, made_sources
from tests.checkout import CHECKOUT
from tests.convert.build_kills import is_running, wait_until
from tests.fakes.cloud import Fault

SHARD = 'coyo11m_tfds-train-3f9a1c20.tfrecord-00003-of-00012'


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, '-m', 'coyo11m_tfds.doctor', *map(str, arguments)],
        cwd=CHECKOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def by_name(ended: subprocess.CompletedProcess) -> dict[str, dict]:
    """The findings of `--json` by name."""
    assert 'Traceback' not in ended.stderr
    return {found['name']: found for found in json.loads(ended.stdout)['findings']}


def test_a_machine_and_a_whole_way_are_examined(sample_source, mini_dataset, tmp_path):
    data_dir = mini_dataset.parents[2]
    config = tmp_path / 'pooled.py'
    demo = 'from configs import demo\ndef get_config():\n    config = demo.get_config()\n'
    config.write_text(f"{demo}    config.model.text = 'pooled'\n    return config\n")
    ended = run(
        f'--source={sample_source}',
        f'--data_dir={data_dir}',
        '--encoder=hash',
        f'--config={config}',
        '--timeout=150',  # of a busy machine
        '--build_config={"name": "x", "validation_fraction": 0.1, "shard_bytes": 2500000}',
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *lines, last = ended.stdout.splitlines()
    assert {line.partition('  ')[0] for line in lines} <= {'pass', 'warn'}
    names = [line.partition('  ')[2].partition(': ')[0] for line in lines]
    assert names == [
        'cores',
        'memory',
        'versions',
        'environment',
        'accelerators of jax',
        'accelerators of torch',
        'credentials of source',
        'credentials of data_dir',
        'source',
        'build',
        'disk of data_dir',
        'disk of scratch',
        'encoder',
        f'data set {mini_dataset}',
        'config',
        'settings',
    ]
    assert '1,173 records in 15 shards' in ended.stdout
    assert 'text embeddings of hash' in ended.stdout
    assert last.startswith('16 checks: ')


def test_what_fails_is_in_the_exit_status_and_in_the_document(mini_dataset, tmp_path):
    copy = tmp_path / schema.NAME / 'hash' / '1.0.0'
    shutil.copytree(mini_dataset, copy)
    (copy / SHARD).unlink()
    source = made_sources.write_source(tmp_path / 's', [range(40)])
    os.truncate(made_sources.latents_file(source, 0), 1000)
    ended = run(f'--data_dir={tmp_path}', f'--source={source}', '--json', '--timeout=150', RANK='x')
    assert ended.returncode == 1
    assert json.loads(ended.stdout)['ok'] is False
    found = by_name(ended)
    failed = {name for name, one in found.items() if one['status'] == 'fail'}
    assert failed == {f'data set {copy}', 'environment', 'source'}
    assert found[f'data set {copy}']['text'] == f'{SHARD}: is missing'
    assert found['cores']['facts']['usable'] >= 1


@pytest.mark.slow
def test_a_storage_that_hangs_does_not_keep_it_waiting(gcs):
    gcs.inject(Fault('stall', count=None, seconds=600, after_bytes=0))
    ended = run('--source=gs://hangs/s', '--json', '--timeout=2', COYO11M_STALL_SECONDS='600')
    found = by_name(ended)
    assert ended.returncode == 1
    for name in ('credentials of source', 'source'):
        assert found[name]['status'] == 'fail'
        assert 'no answer within' in found[name]['text']
    assert 'settings' in found  # what comes after it is not left out


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_ended_while_a_check_hangs(tmp_path, monkeypatch, number):
    """And neither that check nor its files outlive it."""
    (tmp_path / 'packages').mkdir()
    (tmp_path / 'packages' / 'jax.py').write_text(
        'import os, pathlib, signal, time\n'
        'signal.signal(signal.SIGINT, signal.SIG_IGN)  # as what waits in C does\n'
        f'pathlib.Path({str(tmp_path)!r}, "pid.part").write_text(str(os.getpid()))\n'
        f'os.rename({str(tmp_path / "pid.part")!r}, {str(tmp_path / "pid")!r})\n'
        'time.sleep(600)\n'
    )
    (tmp_path / 'temporary').mkdir()
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'packages'))
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'temporary'))
    program = """
        import runpy, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ['doctor', '--timeout=300']
        runpy.run_module('coyo11m_tfds.doctor', run_name='__main__')
    """
    with children.python(program) as child:
        wait_until((tmp_path / 'pid').exists)
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    said = [line for line in errors.splitlines() if not line.startswith('wait  ')]
    assert said == (['Interrupted: nothing was changed.'] if number == signal.SIGINT else [])
    assert list((tmp_path / 'temporary').iterdir()) == []
    wait_until(lambda: not is_running(int((tmp_path / 'pid').read_text())))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--build_config={"shard_bytes": 0}'], 'shard_bytes is 0'),
        (['--build_config={"shards": 0}'], "unknown field 'shards'; the fields are name, source"),
        (['--build_config=x'], '--build_config=x: is no JSON'),
        (['--build_config=["ab"]'], '--build_config=["ab"]: expected a JSON object'),
        (['--timeout=0'], '--timeout: 0: expected a number above 0'),
        (['--timeout=inf'], '--timeout: inf: expected a number above 0'),
    ],
)
def test_unusable_arguments_end_it_with_status_2(arguments, message):
    ended = run(*arguments)
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr
    assert 'Traceback' not in ended.stderr


def test_a_machine_that_only_trains_needs_no_packages_of_builds(mini_dataset):
    program = f"""
import sys
sys.modules.update(dict.fromkeys(['torch', 'pyarrow', 'isal', 'huggingface_hub', 'transformers']))
from coyo11m_tfds import doctor
from coyo11m_tfds.convert.settings import BuildSettings
from coyo11m_tfds.checks import choices, data_sets
found = [
    *choices.check_environment({{}}),
    *data_sets.check_health('{mini_dataset}'),
    choices.choose(BuildSettings(), {{}}, '', 0, 0, []),
]
print([one.status for one in found])
"""
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.stdout == "['pass', 'pass', 'pass']\n", done.stderr
