"""The benchmark of training steps: both models compute the same, and the command does its work."""

import jax
import numpy as np
import pytest
import torch

from benchmarks import torch_dit
from configs import default
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from tests import children
from train_lib.learning import flow, sharding
from train_lib.learning.dit import flatten_weights
from train_lib.learning.step import make_program

_SIZES = {
    'width': 32,
    'depth': 2,
    'num_heads': 4,
    'patch_size': 2,
    'text': 'pooled',
    'prediction': 'velocity',
}
_LATENT_SHAPE, _TEXT_DIM = (8, 8, 4), 16


def _config():
    config = default.get_config()
    config.batch_size = 4
    config.model.update(dtype='float32', **_SIZES)
    config.optimizer.update(schedule='constant', warmup_steps=0, learning_rate=1e-2, clip_norm=0.1)
    return config


def _stats():
    rng = np.random.default_rng(1)
    sizes = {'latent_mean': 4, 'latent_std': 4, 'text_mean': _TEXT_DIM, 'text_std': _TEXT_DIM}
    return {name: rng.uniform(0.5, 2, size).astype(np.float32) for name, size in sizes.items()}


def _batch():
    rng = np.random.default_rng(2)
    return {
        'latents': 5 * rng.standard_normal((4, 4, 8, 8), np.float32),
        'text_embedding': rng.standard_normal((4, _TEXT_DIM), np.float32),
        'drop_text': np.array([False, True, False, False]),
    }


def _in_torch(arrays):
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _noise_and_times(number):
    """Those of step `number` of `train_lib.learning.step`."""
    rngs = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
    arrays = (
        jax.random.normal(rngs[0], (4, *_LATENT_SHAPE)),
        flow.logit_normal_times(rngs[1], 4, 0, 1),
    )
    return [torch.from_numpy(np.array(array)) for array in arrays]


@pytest.mark.slow
def test_three_steps_lead_to_the_same_weights_and_average():
    config = _config()
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    program = make_program(config, mesh, DatasetStats(**_stats()))
    state = program.init()
    # Without zeros, so that every path through the model is open.
    rng = np.random.default_rng(3)
    params = jax.tree.map(
        lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), jax.device_get(state.params)
    )
    before = flatten_weights(params)
    state = state.replace(
        params=jax.device_put(params, sharding.by_shape(params, mesh)),
        ema_params=jax.device_put(params, sharding.by_shape(params, mesh)),
    )
    options = {'ema_decay': config.ema_decay, 'dtype': torch.float32}
    for name in ('learning_rate', 'weight_decay', 'b1', 'b2', 'clip_norm'):
        options[name] = config.optimizer[name]
    trainers = [
        torch_dit.Trainer(_in_torch(before), _SIZES, _in_torch(_stats()), **options, remat=remat)
        for remat in ('none', 'full')
    ]
    for number in range(3):
        state, metrics = program.train_step(state, _batch())
        losses = [t.step(_in_torch(_batch()), *_noise_and_times(number)).item() for t in trainers]
        assert losses == pytest.approx([float(metrics.compute()['loss'])] * 2, rel=1e-5)
    assert metrics.compute()['grad_norm'] > config.optimizer.clip_norm
    plain, remat = trainers
    for ours, field in ((state.params, 'weights'), (state.ema_params, 'average')):
        for name, expected in flatten_weights(jax.device_get(ours)).items():
            theirs, with_remat = (getattr(x, field)[name].detach().numpy() for x in (plain, remat))
            # Adam makes steps of full length of gradients that are no more than rounding errors.
            gap = np.linalg.norm(theirs - expected) / np.linalg.norm(expected - before[name])
            assert gap < 1e-3, name
            np.testing.assert_allclose(with_remat, theirs, atol=1e-6)


@pytest.mark.slow
def test_the_command_measures_without_tensorflow_and_torch_and_says_what_failed(tmp_path):
    for package in ('tensorflow', 'torch'):
        (tmp_path / f'{package}.py').write_text(f'raise ModuleNotFoundError("no {package} here")')
    flags = ['--models=tiny/8', '--batch_size=2', '--repeats=1', '--steps=2', '--warmup=1']
    flags.append('--only=jax:dots,torch,jax:cudnn')  # the last one is for GPUs
    # With more, threads wait busily for each other where cores are few.
    variables = {'PYTHONPATH': str(tmp_path), 'OMP_NUM_THREADS': '1'}
    ended = children.program('benchmarks.step', *flags, f'--dir={tmp_path}/work', **variables)
    assert ended.returncode == 1, ended.stderr
    assert '| tiny/8, jax:dots | ' in ended.stdout
    assert 'tiny/8, torch, left out: no torch here' in ended.stdout
    assert 'tiny/8, jax:cudnn, failed: ' in ended.stdout
