"""The benchmark of training steps: both models compute the same, and the command does its work."""

import copy

import jax
import numpy as np
import pytest
import torch

from benchmarks import torch_dit
from configs import default
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from tests import children
from train_lib import flow, models, sharding
from train_lib.export import flatten_weights
from train_lib.step import make_program

_FIELDS = {'width': 32, 'depth': 2, 'num_heads': 4, 'patch_size': 2}
_LATENT_SHAPE, _TEXT_DIM = (8, 8, 4), 16


def _config():
    config = default.get_config()
    config.batch_size = 4
    config.model.update(dtype='float32', **_FIELDS)
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
    """Those of step `number` of `train_lib.step`."""
    rngs = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
    arrays = (
        jax.random.normal(rngs[0], (4, *_LATENT_SHAPE)),
        flow.logit_normal_times(rngs[1], 4, 0, 1),
    )
    return [torch.from_numpy(np.array(array)) for array in arrays]


@pytest.fixture(scope='module')
def ours():
    """The program in JAX, and a state as NumPy arrays whose weights have no zeros."""
    config = _config()
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    stats = DatasetStats(**_stats())
    compiled = make_program(config, mesh, stats)
    state = jax.tree.map(np.array, compiled.init())
    rng = np.random.default_rng(3)

    def noisy(weights):
        return weights + 0.1 * rng.standard_normal(weights.shape, np.float32)

    params = jax.tree.map(noisy, state.params)
    return config, compiled, state.replace(params=params, ema_params=params)


@pytest.fixture
def theirs(ours):
    """The model in torch with the weights of that state."""
    *_, state = ours
    model = torch_dit.TorchDiT(**_FIELDS, dtype=torch.float32, side=8, text_dim=_TEXT_DIM)
    exported = flatten_weights(state.params)
    assert exported.keys() == model.weights.keys()
    with torch.no_grad():
        for name, weights in model.weights.items():
            weights.copy_(torch.from_numpy(exported[name]))
    return model


def _difference(ours, theirs):
    """Relative to ours, of all numbers together."""
    return np.linalg.norm(theirs - ours) / np.linalg.norm(ours)


def _weights_after(trainer, model):
    """New weights and their average by name."""
    pairs = zip(model.weights.items(), trainer.average, strict=True)
    return {name: [x.detach().numpy() for x in (new, mean)] for (name, new), mean in pairs}


@pytest.mark.slow
def test_three_steps_lead_to_the_same_weights_and_average(ours, theirs):
    config, compiled, state = ours
    remat = copy.deepcopy(theirs)
    remat.remat = 'full'
    settings = {'ema_decay': config.ema_decay}
    for name in ('learning_rate', 'weight_decay', 'b1', 'b2', 'clip_norm'):
        settings[name] = config.optimizer[name]
    trainers = [torch_dit.Trainer(m, _in_torch(_stats()), **settings) for m in (theirs, remat)]
    before = flatten_weights(state.params)
    # Placed as the step wants it: otherwise it would be compiled twice.
    state = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), state, compiled.abstract_state)
    for number in range(3):
        state, metrics = compiled.train_step(state, _batch())
        losses = [t.step(_in_torch(_batch()), *_noise_and_times(number)).item() for t in trainers]
        assert losses == pytest.approx([float(metrics.compute()['loss'])] * 2, rel=1e-5)
    assert metrics.compute()['grad_norm'] > config.optimizer.clip_norm
    state = jax.tree.map(np.array, state)
    after, remat_after = map(_weights_after, trainers, (theirs, remat))
    both = flatten_weights(state.params), flatten_weights(state.ema_params)
    for name, pair in after.items():
        for expected, new in zip(both, pair, strict=True):
            # Adam makes steps of full length of gradients that are no more than rounding errors.
            moved = expected[name] - before[name]
            assert _difference(moved, new - before[name]) < 1e-3, name
        np.testing.assert_allclose(remat_after[name], pair, atol=1e-6)


def test_sizes_and_flops_are_those_of_train_lib():
    for size, fields in models.SIZES.items():
        names = 'width', 'depth', 'num_heads'
        assert tuple(fields[name] for name in names) == torch_dit.SIZES[size]
    with torch.device('meta'):
        theirs = torch_dit.make('XL/2').flops()
    assert theirs == models.make_model('XL/2').flops((32, 32, 4), 640)
    with pytest.raises(ValueError, match="'M/2': expected SIZE/PATCH with SIZE one of tiny, S"):
        torch_dit.make('M/2')


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
