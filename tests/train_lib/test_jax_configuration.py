"""JAX's configuration, in its environment or by a program, changes no numbers without a word."""

import contextlib
import re

import jax
import numpy as np
import pytest

from configs import default
from coyo11m_tfds import schema
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.pictures import vae_decoder
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from tests import children, runs, small_vae
from tests.runs import small_config
from train_lib import data, draw, export, train
from train_lib.learning import metrics, sharding, step
from train_lib.lifecycle import beginnings

STATS = DatasetStats(
    latent_mean=np.ones(4, np.float32),
    latent_std=np.full(4, 2, np.float32),
    text_mean=np.zeros(0, np.float32),
    text_std=np.zeros(0, np.float32),
    latents_shape=(3, 4, 8, 8),
    vocabulary=30,
    moments=schema.LOG_VARIANCE,
)


@contextlib.contextmanager
def other_keys():
    with jax.default_prng_impl('rbg'), jax.legacy_prng_key('error'):
        jax.config.update('jax_random_seed_offset', 5)
        try:
            yield
        finally:
            jax.config.update('jax_random_seed_offset', 0)


@contextlib.contextmanager
def strict_promotion():
    with jax.numpy_dtype_promotion('strict'), jax.numpy_rank_promotion('raise'):
        yield


def compute_all():
    """What two steps, an evaluation and a drawing give, of a model with all kinds of inputs."""
    config = default.get_config()
    config.update(batch_size=8, accumulate=2, num_steps=10)
    config.model.update(name='tiny/2', width=64, depth=2, num_heads=2, unroll=1, text='sequence')
    config.optimizer.update(name='muon', warmup_steps=2)
    config.preview.update(num_steps=3, sampler='heun', guidance_low=0.3)
    program = step.make_program(config, sharding.make_mesh(devices=jax.devices()[:1]), STATS)
    random = np.random.default_rng(0)
    batch = {
        'key': random.integers(0, 2**32, (8, 2), np.uint32),
        'latents': random.uniform(1, 2, (8, 8, 8, 8)).astype(np.float16),
        'noise_seed': random.integers(0, 2**32, 8, np.uint32),
        'tokens': random.integers(-1, 30, (8, 5)).astype(np.int32),
        'crop': np.arange(8, dtype=np.int32) % 3,
        'drop_text': np.arange(8) % 3 == 0,
        'mask': np.arange(8) != 1,
    }
    merged, state = program.no_metrics(), program.init()
    for _ in range(2):
        state, update = program.train_step(state, batch)
        merged = metrics.merge(merged, update)
    evaluated = program.eval_step(state.ema_params, {**batch, 'crop': np.zeros(8, np.int32)})
    drawn = program.draw(state.ema_params, batch['tokens'][:4], np.int32(0))
    return jax.device_get((state, merged, evaluated, drawn))


@pytest.mark.slow  # compiles all programs of a run twice
def test_steps_and_drawings_are_the_same_with_other_keys_and_strict_promotion():
    expected = compute_all()
    with other_keys(), strict_promotion():
        result = compute_all()
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert jax.tree.map(np.result_type, result) == jax.tree.map(np.result_type, expected)


def test_vaes_work_where_promotion_is_an_error(tmp_path):
    latents = np.random.default_rng(0).normal(size=(2, 4, 8, 8)).astype(np.float32)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    small_vae.make(tmp_path / 'tiny')
    small_vae.make_kl_encoder(tmp_path / 'kl')
    with strict_promotion():
        paint = vae_decoder.make_painter(str(tmp_path / 'tiny'), 4, 'sdxl')
        assert paint(latents).shape == pictures.shape
        assert VaeEncoder(str(tmp_path / 'kl')).encode(pictures)[0].shape == latents.shape


REFUSED = {
    'jax_enable_x64': lambda: jax.enable_x64(True),
    'jax_threefry_partitionable': lambda: jax.threefry_partitionable(False),
    'jax_disable_jit': lambda: jax.disable_jit(),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_would_change_all_numbers_is_refused(mini_dataset, small_run, tmp_path, name):
    with REFUSED[name]():
        with pytest.raises(ValueError, match=f'^{name} is .*: expected'):
            train.set_up(small_config(mini_dataset), tmp_path / 'run')
        with pytest.raises(ValueError, match=f'^{name} is .*: expected'):
            draw.Artist(small_run[0])
        with pytest.raises(ValueError, match=f'^{name} is .*: expected'):
            export.export(small_run[0], tmp_path / 'out')
        with pytest.raises(ValueError, match=f'^{name} is .*: expected'):
            VaeEncoder(str(small_vae.make(tmp_path / 'vae')))
    assert not (tmp_path / 'run').exists() and not (tmp_path / 'out').exists()


def test_what_changes_roundings_is_among_the_settings(mini_dataset, small_run, monkeypatch):
    """A resumed run compares it, and stored pictures of others are not used."""

    def settings():
        config = small_config(mini_dataset)
        return data.TrainingData(config, sharding.make_mesh(**config.mesh)).settings

    usual, artist = settings(), draw.Artist(small_run[0])
    assert not [name for name in usual if 'precision' in name]
    with jax.default_matmul_precision('bfloat16'):
        changed, other_artist = settings(), draw.Artist(small_run[0])
    [name] = beginnings.describe_changes(usual, changed)
    assert name == 'environment.jax_default_matmul_precision'
    assert other_artist.settings != artist.settings
    monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_enable_fast_math=true')
    assert [*beginnings.describe_changes(usual, settings())] == ['environment.XLA_FLAGS']


def test_a_change_of_precision_is_accepted_by_its_name(mini_dataset, tmp_path):
    changes = {'eval_every': 0, 'checkpoint_every': 0}
    runs.train(mini_dataset, tmp_path, num_steps=2, **changes)
    name = 'environment.jax_default_matmul_precision'
    with jax.default_matmul_precision('float32'):
        with pytest.raises(beginnings.OtherRunError, match=f'accept_changes={re.escape(name)};'):
            runs.train(mini_dataset, tmp_path, num_steps=2, **changes)
        runs.train(mini_dataset, tmp_path, num_steps=2, accept=[name], **changes)


def test_a_platform_that_is_not_there_is_told_in_one_line(small_run):
    flags = f'--workdir={small_run[0]}', '--prompts=a red circle'
    ended = children.program('train_lib.draw', *flags, JAX_PLATFORMS='cpuu')
    assert ended.returncode == 1
    expected = 'error: JAX_PLATFORMS=cpuu: .* known backends: .*; expected a platform'
    assert re.match(expected, ended.stderr.splitlines()[-1]), ended.stderr
    assert 'Traceback' not in ended.stderr
