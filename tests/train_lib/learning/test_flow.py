"""The mathematics of rectified flow and of its sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from train_lib.learning import flow

STATS = DatasetStats(
    latent_mean=np.array([1.0, -2.0, 3.0, 0.5], np.float32),
    latent_std=np.array([5.0, 6.0, 7.0, 8.0], np.float32),
    text_mean=np.linspace(-1, 1, 16, dtype=np.float32),
    text_std=np.array([0.0] + 15 * [2.0], np.float32),
    latents_shape=(3, 4, 8, 8),
)


def test_standardizing_is_undone():
    raw = np.random.default_rng(0).normal(size=(8, 4, 8, 8)).astype(np.float32)
    x = flow.standardize_latents(jnp.asarray(raw), STATS)
    assert x.shape == (8, 8, 8, 4)
    np.testing.assert_allclose(flow.raw_latents(x, STATS), raw, rtol=1e-4, atol=1e-4)


def test_times_follow_the_logit_normal_distribution():
    t = flow.logit_normal_times(jax.random.key(0), 20_000, 0.5, 2.0)
    logits = np.log(t / (1 - t))
    assert logits.mean() == pytest.approx(0.5, abs=0.05)
    assert logits.std() == pytest.approx(2.0, rel=0.02)


def test_noise_of_a_key_depends_on_nothing_else():
    keys = np.random.default_rng(0).integers(0, 2**32, (64, 2), np.uint32)
    noise, times = flow.noise_and_times_of_keys(keys, (4, 4, 2), seed=7)
    order = np.random.default_rng(0).permutation(64)[:40]
    other_noise, other_times = flow.noise_and_times_of_keys(keys[order], (4, 4, 2), seed=7)
    np.testing.assert_array_equal(other_noise, noise[order])
    np.testing.assert_array_equal(other_times, times[order])
    assert len(np.unique(times)) == 64
    assert not np.array_equal(flow.noise_and_times_of_keys(keys, (4, 4, 2), seed=8)[1], times)
    for word in (0, 1):
        other_keys = keys.copy()
        other_keys[:, word] += 1
        other_times = flow.noise_and_times_of_keys(other_keys, (4, 4, 2), seed=7)[1]
        assert not np.any(other_times == times)


def _decay(z, t, text, drop_text):
    """Velocity `z + t`, whose path from z at time 1 to time 0 is known: `(z + 2) / e - 1`."""
    return z + t[:, None, None, None]


def _error(**settings):
    noise = jax.random.normal(jax.random.key(3), (2, 4, 4, 1))
    out = flow.sample(_decay, noise, jnp.zeros((2, 5)), guidance=1.0, **settings)
    return float(jnp.max(jnp.abs(out - ((noise + 2) / np.e - 1))))


@pytest.mark.parametrize('time_shift', [1.0, 2.0])
@pytest.mark.parametrize(('sampler', 'order'), [('euler', 1), ('heun', 2)])
def test_the_error_falls_with_the_order_of_the_sampler(sampler, order, time_shift):
    coarse, fine = (_error(num_steps=n, sampler=sampler, time_shift=time_shift) for n in (8, 32))
    assert np.log2(coarse / fine) / 2 == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize(
    ('settings', 'guided'),
    [
        ({'guidance': 1.0}, 0),
        ({'guidance': 1}, 0),
        ({'guidance': 3.0}, 8),
        ({'guidance': 0.0}, 8),
        ({'guidance': 3.0, 'guidance_low': 0.4, 'guidance_high': 0.8}, 3),
        ({'guidance': 3.0, 'guidance_low': 0.01}, 8),
        ({'guidance': 3.0, 'guidance_low': 0.8, 'guidance_high': 0.85}, 0),
        ({'guidance': 1.0, 'sampler': 'heun'}, 0),
        ({'guidance': 3.0, 'sampler': 'heun'}, 15),
        ({'guidance': 3.0, 'guidance_low': 0.4, 'guidance_high': 0.8, 'sampler': 'heun'}, 6),
    ],
)
def test_only_guidance_computes_the_half_without_text(settings, guided):
    drops = []

    def velocity(z, t, text, drop_text):
        jax.debug.callback(lambda rows: drops.append(rows.tolist()), drop_text)
        by_text = jnp.where(drop_text, 0.0, text[:, 0])
        return _decay(z, t, text, drop_text) + by_text[:, None, None, None]

    noise, text = jnp.ones((2, 4, 4, 1)), jnp.ones((2, 5))
    drawn = flow.sample(velocity, noise, text, num_steps=8, **settings)
    jax.effects_barrier()
    # Heun's method evaluates the model twice at each time but the first.
    count = 15 if settings.get('sampler') == 'heun' else 8
    assert flow.count_evaluations(num_steps=8, **settings) == count + guided
    assert drops.count([False, False, True, True]) == guided
    assert drops.count([False, False]) == count - guided == len(drops) - guided

    low, high = settings.get('guidance_low', 0.0), settings.get('guidance_high', 1.0)

    def guided_velocity(z, t, text, drop_text):
        scale = jnp.where((low <= t) & (t <= high), settings['guidance'], 1.0)
        return _decay(z, t, text, drop_text) + scale[:, None, None, None]

    same_steps = {'num_steps': 8, 'sampler': settings.get('sampler', 'euler')}
    expected = flow.sample(guided_velocity, noise, text, guidance=1.0, **same_steps)
    np.testing.assert_allclose(drawn, expected, rtol=1e-5)
