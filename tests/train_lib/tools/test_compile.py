"""The training step compiled for slices that are not there, and what the command says of it."""

import importlib
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from configs import default
from coyo11m_tfds.text import gemma_weights
from tests.checkout import CHECKOUT
from tests.text.test_gemma import models  # noqa: F401, a fixture
from train_lib import chips
from train_lib import models as networks
from train_lib.tools import compile

PODS = {'tpu_v5e_16': 'v5e:4x4', 'tpu_v5e_128': 'v5e:8x16', 'tpu_v5e_256': 'v5e:16x16'}

# The command, where an import of these is an error.
_ALONE = """
import runpy, sys
for name in ('tensorflow', 'tensorflow_datasets', 'torch'):
    sys.modules[name] = None
runpy.run_module('train_lib.tools.compile', run_name='__main__', alter_sys=True)
"""


def _run(*arguments):
    return subprocess.run(
        [sys.executable, '-c', _ALONE, *arguments],
        cwd=CHECKOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
    )


def _report(**changes):
    report = {
        'topology': 'v5e:4x4',
        'chips': 16,
        'hosts': 4,
        'model': {'name': 'L/2', 'remat': 'full'},
        'mesh': {'data': 4, 'fsdp': 4},
        'batch_size': 1024,
        'model_flops': 19.7e12,
        'least_bytes': 3e9,
        'chip': 'v5e',
        'chip_memory': 16e9,
        'memory': {'arguments': 2e9, 'temporaries': 6e9, 'total': 8e9},
        'host_memory': 0,
        'compiled_flops': 39.4e12,
        'memory_bytes': 81.9e9,
        'collectives': [
            {'kind': 'all-gather', 'axis': 'fsdp', 'where': 'layers', 'bytes': 3_300_000_000}
        ],
        'collective_bytes': 3_300_000_000,
        'loops_of_unknown_length': 0,
    } | changes
    return report | compile.judge(report, chips.CHIPS['TPU v5 lite'])


@pytest.mark.parametrize(
    ('changes', 'verdict'),
    [
        ({}, 'fits: 50% of the memory, 1.10 times the least traffic, at most 50% of the peak rate, '
             'limited by arithmetic'),
        ({'compiled_flops': 6e12}, 'at most 100% of the peak rate, limited by '),
        ({'collectives': [{'kind': 'reduce-scatter', 'where': 'layers', 'bytes': 20_000_000_000},
                          {'kind': 'all-gather', 'where': 'layers', 'bytes': 20_000_000_000}],
          'collective_bytes': 40e9},
         'at most 50% of the peak rate, limited by arithmetic, and 33% if nothing runs beside'),
        ({'memory_bytes': 327.6e9}, 'at most 25% of the peak rate, limited by memory'),
        ({'collective_bytes': 80e9}, 'at most 25% of the peak rate, limited by links'),
        ({'memory': {'total': 17e9}}, 'does not fit: 106% of the memory'),
    ],
)  # fmt: skip
def test_the_slowest_of_three_limits_and_the_verdict_says_which(changes, verdict):
    report = _report(**changes)
    assert verdict in report['verdict']
    assert report['fits'] == (not verdict.startswith('does not'))


def test_the_table_has_every_part_and_one_verdict():
    text = compile.table(_report())
    for words in ('16 chips of v5e', 'data 4 x fsdp 4', 'arguments', 'the chip has',
                  'all-gather, fsdp, in layers', 'least for this mesh', '39.4 TFLOP, of which the '
                  'model 19.7'):  # fmt: skip
        assert words in text
    assert text.count('erdict') == 1


def test_what_the_compiler_refuses_is_a_verdict_without_a_table():
    report = _report() | {'fits': False, 'verdict': 'does not fit: Used 52.20G of 15.75G'}
    for name in ('memory', 'collectives', 'seconds'):
        del report[name]
    assert 'Verdict: does not fit: Used 52.20G of 15.75G.' in compile.table(report)


def test_without_libtpu_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match='libtpu is not installed: pip install'):
        compile.slice_devices('v5e:4x4')


@pytest.mark.parametrize('text', [pytest.param('pooled', marks=pytest.mark.slow), 'sequence'])
def test_texts_are_vectors_or_tokens_as_the_configuration_says(monkeypatch, text):
    monkeypatch.setattr(compile, 'slice_devices', lambda *_: jax.devices()[:1])
    monkeypatch.setitem(chips.CHIPS, 'cpu', chips.CHIPS['TPU v5 lite'])
    config = default.get_config()
    fields = {'name': 'tiny/16', 'depth': 1, 'text': text}
    config.update_from_flattened_dict({f'model.{name}': x for name, x in fields.items()})
    config.batch_size = 8
    report = compile.analyze(config, 'here', text_dim=24, num_tokens=9, vocabulary=64)
    assert report['fits']
    model = networks.make(**config.model, vocabulary=64 if text == 'sequence' else 0)
    text_dim = 24 if text == 'pooled' else 0
    assert report['model_flops'] == 3 * 8 * model.flops((32, 32, 4), text_dim, 9)


def test_a_frozen_encoder_is_part_of_what_is_compiled(monkeypatch, models):  # noqa: F811
    monkeypatch.setattr(compile, 'slice_devices', lambda *_: jax.devices()[:1])
    monkeypatch.setitem(chips.CHIPS, 'cpu', chips.CHIPS['TPU v5 lite'])
    config = default.get_config()
    config.update_from_flattened_dict({'model.name': 'tiny/16', 'model.depth': 1, 'batch_size': 8})
    config.encoder = f'jax:{models}/text'
    report = compile.analyze(config, 'here', text_dim=0, num_tokens=64)
    checkpoint = gemma_weights.open_checkpoint(f'{models}/text')
    params = jax.tree.leaves(gemma_weights.load_params(checkpoint, jnp.bfloat16))
    assert report['encoder'] == {
        'name': 'jax:text',
        'flops': 8 * checkpoint.config.flops(64),
        'bytes': sum(leaf.nbytes for leaf in params),
    }
    asked = report['model_flops'] + report['encoder']['flops']
    assert report['compiled_flops'] == pytest.approx(asked, rel=0.05)
    assert report['encoder']['flops'] > 0.1 * asked
    text = compile.table(report)
    assert 'of which the encoder' in text
    assert ', the encoder 0.0' in text


def test_a_setting_out_of_its_range_is_refused_as_by_a_run():
    config = default.get_config()
    config.batch_size = 0
    with pytest.raises(ValueError, match='batch_size=0: expected at least 1'):
        compile.analyze(config, 'v5e:4x4', text_dim=24)


def test_a_topology_that_there_is_not_is_refused():
    pytest.importorskip('libtpu')
    done = _run('--config=configs/default.py', '--topology=v5e:3x5')
    assert done.returncode == 1
    assert 'error: --topology=v5e:3x5: expected a name such as v5e:4x4' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'topology'), PODS.items())
def test_a_pods_configuration_does_what_its_docstring_says(name, topology):
    pytest.importorskip('libtpu')
    done = _run(f'--config=configs/{name}.py', f'--topology={topology}', '--json')
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report['memory_share'] <= 0.9
    assert report['traffic_ratio'] <= 1.2
    assert report['mfu_bound'] >= 0.6
    assert report['loops_of_unknown_length'] == 0
    documentation = importlib.import_module(f'configs.{name}').__doc__
    assert report['verdict'] in re.sub(r'\s+', ' ', documentation)
    assert compile.table(report) in (CHECKOUT / 'docs' / 'pods.md').read_text()


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_sum():
    pytest.importorskip('libtpu')
    done = _run('--config=configs/default.py', '--topology=v5e:2x2', '--config.batch_size=4096')
    assert done.returncode == 1
    assert re.search(r'Verdict: does not fit: .*\d+G.*15.75G', done.stdout), done.stdout


@pytest.mark.slow
def test_policies_of_rematerialization_trade_arithmetic_for_memory():
    pytest.importorskip('libtpu')
    reports = {}
    for remat in ('none', 'dots', 'full'):
        done = _run(
            '--config=configs/default.py',
            '--topology=v5e:2x2',
            '--json',
            f'--config.model.remat={remat}',
        )
        assert done.returncode == 0, done.stderr
        reports[remat] = json.loads(done.stdout)
    flops = [reports[remat]['compiled_flops'] for remat in ('none', 'dots', 'full')]
    assert flops == sorted(flops) and flops[2] > 1.25 * flops[0]
    memory = [reports[remat]['memory']['temporaries'] for remat in ('none', 'dots', 'full')]
    assert memory == sorted(memory, reverse=True)
    # All that is computed once is the model, but for attention's backward pass.
    assert flops[0] == pytest.approx(reports['none']['model_flops'], rel=0.05)
