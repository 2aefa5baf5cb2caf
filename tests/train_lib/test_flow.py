"""The mathematics of rectified flow, its steps and its sampler."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train_lib import flow, sampling, state, step
from train_lib.models import dit

TEXT = jax.ShapeDtypeStruct((1, 16), jnp.float32)
STATS = flow.Stats(
    latent_mean=np.array([1.0, -2.0, 3.0, 0.5], np.float32),
    latent_std=np.array([5.0, 6.0, 7.0, 8.0], np.float32),
    text_mean=np.linspace(-1, 1, 16, dtype=np.float32),
    text_std=np.array([0.0] + 15 * [2.0], np.float32),
)


def _batch(size=8, side=8, seed=0):
    rng = np.random.default_rng(seed)
    # Plain areas: something that can be learned.
    latents = np.broadcast_to(6 * rng.standard_normal((size, 4, 1, 1)), (size, 4, side, side))
    return {
        'key': rng.integers(0, 2**32, (size, 2), np.uint32),
        'latents': latents.astype(np.float16),
        'text_embedding': rng.standard_normal((size, 16)).astype(np.float16),
        'mask': np.ones(size, bool),
    }


def _model():
    return dit.DiT(width=16, depth=1, num_heads=2, patch_size=2, dtype=jnp.float32)


def _make_trainer(tx, schedule):
    model = _model()
    first = state.make_init(model, tx, latent_shape=(8, 8, 4), text=TEXT)(jax.random.key(0))
    train_step = step.make_train_step(
        model, tx, schedule, STATS, ema_decay=0.9, seed=0, logit_mean=0.0, logit_std=1.0
    )
    eval_step = step.make_eval_step(model, STATS, seed=0)
    # Compiles in a third of the time.
    jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
    return jit(train_step), jit(eval_step), first


@pytest.fixture(scope='module')
def trainer():
    """A jitted step, its evaluation and a state to start from."""
    schedule = state.make_schedule('constant', num_steps=100, learning_rate=1e-2, warmup_steps=1)
    tx = state.make_optimizer('adamw', schedule, weight_decay=0.01, b1=0.9, b2=0.95, clip_norm=1.0)
    return _make_trainer(tx, schedule)


def test_standardizing_is_undone():
    raw = _batch()['latents'].astype(np.float32)
    x = flow.standardize_latents(jnp.asarray(raw), STATS)
    assert x.shape == (8, 8, 8, 4)
    np.testing.assert_allclose(flow.raw_latents(x, STATS), raw, rtol=1e-4, atol=1e-4)


def test_standardized_text_has_no_feature_that_never_varies():
    text = flow.standardize_text(jnp.full((2, 16), 3, jnp.float16), STATS)
    np.testing.assert_allclose(text[:, 0], 0)
    np.testing.assert_allclose(text[:, 1:], (3 - STATS.text_mean[1:])[None].repeat(2, 0) / 2)


def test_the_error_is_zero_for_the_true_velocity_alone():
    x, noise = jax.random.normal(jax.random.key(0), (2, 5, 4, 4, 3))
    t = jnp.linspace(0, 0.9, 5)
    exact = flow.squared_errors(lambda z, t: noise - x, x, noise, t)
    np.testing.assert_allclose(exact, 0, atol=1e-10)
    # z and the velocity fix the data: a model that inverts the path has no error either.
    inverse = flow.squared_errors(
        lambda z, t: (z - x) / jnp.maximum(t, 1e-9)[:, None, None, None], x, noise, t
    )
    np.testing.assert_allclose(inverse[1:], 0, atol=1e-5)
    assert np.all(flow.squared_errors(lambda z, t: 0 * z, x, noise, t) > 0.5)


def test_times_follow_the_logit_normal_distribution():
    t = flow.logit_normal_times(jax.random.key(0), 20_000, 0.5, 2.0)
    logits = np.log(t / (1 - t))
    assert logits.mean() == pytest.approx(0.5, abs=0.05)
    assert logits.std() == pytest.approx(2.0, rel=0.02)


def test_noise_of_a_key_depends_on_nothing_else():
    keys = _batch(64)['key']
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


def test_training_lowers_the_loss_and_the_average_follows(trainer):
    train_step, _, current = trainer
    batch, losses = _batch(), []
    for _ in range(60):
        current, metrics = train_step(current, batch)
        losses.append(float(metrics.compute()['loss']))
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])
    assert current.step == 60
    gap = optax.tree.norm(optax.tree.sub(current.params, current.ema_params))
    assert 0 < gap < 0.1 * optax.tree.norm(current.params)


def test_a_step_repeats_exactly_and_its_noise_changes_with_the_step(trainer):
    train_step, _, first = trainer
    again, metrics = train_step(first, _batch())
    same, same_metrics = train_step(first, _batch())
    jax.tree.map(np.testing.assert_array_equal, again, same)
    assert metrics.compute()['loss'] == same_metrics.compute()['loss']
    # A new model predicts zero whatever its weights: only noise and times can change the loss.
    later = train_step(first.replace(step=first.step + 1), _batch())[1]
    assert later.compute()['loss'] != metrics.compute()['loss']


def test_samples_are_weighed_by_the_mask():
    # Plain descent: what the weights move by is linear in the gradient.
    train_step, _, first = _make_trainer(optax.sgd(1e-2), lambda step: 1e-2)
    batch = _batch()
    batch['latents'] *= np.arange(1, 9, dtype=np.float16)[:, None, None, None]
    mask = np.arange(8) < 3

    def step_with(**changes):
        after, update = train_step(first, batch | changes)
        moved = optax.tree.sub(after.params, first.params)
        return moved, update

    whole, metrics_of_whole = step_with()
    some, metrics_of_some = step_with(mask=mask)
    others, metrics_of_others = step_with(mask=~mask)
    jax.tree.map(
        lambda all8, some3, other5: np.testing.assert_allclose(
            8 * all8, 3 * some3 + 5 * other5, rtol=1e-3, atol=1e-6
        ),
        whole,
        some,
        others,
    )
    assert not np.allclose(optax.tree.norm(some), optax.tree.norm(others), rtol=0.1)
    together = metrics_of_some.merge(metrics_of_others)
    loss = metrics_of_whole.compute()['loss']
    np.testing.assert_allclose(together.compute()['loss'], loss, rtol=1e-5)
    assert metrics_of_some.compute()['loss'] < 0.9 * loss

    # What stands where there is no sample changes nothing. The mask is among these.
    zeros = {
        name: np.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for name, x in batch.items()
    }
    jax.tree.map(np.testing.assert_array_equal, step_with(**zeros)[0], some)


def test_a_mask_that_leaves_all_changes_nothing(trainer):
    train_step, _, first = trainer
    batch = _batch()
    masked, update = train_step(first, batch)
    del batch['mask']
    unmasked, plain_update = train_step(first, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), masked, unmasked)
    np.testing.assert_allclose(update.compute()['loss'], plain_update.compute()['loss'], rtol=1e-6)


def test_a_batch_without_any_sample_leaves_everything_as_it_is(trainer):
    train_step, _, current = trainer
    # Moments, averages and weights that would move on by themselves.
    for _ in range(3):
        current, _ = train_step(current, _batch())
    after, update = train_step(current, _batch() | {'mask': np.zeros(8, bool)})
    assert after.step == current.step + 1
    jax.tree.map(np.testing.assert_array_equal, after.replace(step=current.step), current)
    assert np.isnan(update.compute()['loss'])  # the mean of nothing


@pytest.mark.parametrize('bad', [np.nan, np.inf, 6e4])
def test_a_step_that_is_not_finite_changes_nothing_but_counts(trainer, bad):
    train_step, _, current = trainer
    for _ in range(2):
        current, _ = train_step(current, _batch())
    batch = _batch()
    # A latent that is large but finite makes a loss that is: only its gradient may overflow.
    batch['latents'][3, 1, 0, 0] = bad
    skips = not np.isfinite(bad)
    expected = current
    for in_a_row in (1, 2):
        after, update = train_step(expected, batch)
        if not skips:
            assert (after.skipped, after.skipped_in_a_row) == (0, 0)
            return
        expected = expected.replace(
            step=expected.step + 1, skipped=jnp.int32(in_a_row), skipped_in_a_row=after.skipped
        )
        jax.tree.map(np.testing.assert_array_equal, after, expected)
        assert np.isnan(update.compute()['loss'])
    after, update = train_step(after, _batch())
    assert (after.skipped, after.skipped_in_a_row) == (2, 0)
    assert np.isfinite(update.compute()['loss'])


def test_the_evaluation_loss_does_not_depend_on_how_samples_are_batched(trainer):
    train_step, eval_step, current = trainer
    current, _ = train_step(current, _batch())
    batch = _batch(12, seed=1)
    whole = eval_step(current.params, batch).compute()['loss']
    order = np.random.default_rng(0).permutation(12)
    padded = {name: np.concatenate([a[order], a[:4]]) for name, a in batch.items()}
    padded['mask'][12:] = False
    merged = None
    for rows in (slice(0, 8), slice(8, 16)):
        part = eval_step(current.params, {name: a[rows] for name, a in padded.items()})
        merged = part if merged is None else merged.merge(part)
    np.testing.assert_allclose(merged.compute()['loss'], whole, rtol=1e-6)


def test_sampling_along_straight_paths_arrives_exactly():
    data = jax.random.normal(jax.random.key(1), (3, 4, 4, 2))
    noise = jax.random.normal(jax.random.key(2), data.shape)

    def velocity(z, t, text, drop_text):
        return jnp.concatenate([noise - data] * 2)

    for num_steps in (1, 7):
        out = sampling.sample(velocity, noise, jnp.zeros((3, 5)), guidance=1.0, num_steps=num_steps)
        np.testing.assert_allclose(out, data, atol=1e-5)


def test_guidance_goes_from_the_unconditional_through_the_conditional():
    def velocity(z, t, text, drop_text):
        one = jnp.where(drop_text, 1.0, 3.0)
        return jnp.broadcast_to(one[:, None, None, None], z.shape)

    noise = jnp.zeros((2, 4, 4, 1))
    for guidance, expected in [(0.0, 1.0), (1.0, 3.0), (2.5, 6.0)]:
        out = sampling.sample(velocity, noise, jnp.zeros((2, 5)), guidance=guidance, num_steps=4)
        np.testing.assert_allclose(out, -expected, rtol=1e-6)


def test_the_sampler_asks_for_times_from_one_downwards():
    def velocity(z, t, text, drop_text):
        return jnp.broadcast_to(t[:, None, None, None], z.shape)

    out = sampling.sample(
        velocity, jnp.zeros((1, 2, 2, 1)), jnp.zeros((1, 5)), guidance=1.0, num_steps=4
    )
    np.testing.assert_allclose(out, -(1.0 + 0.75 + 0.5 + 0.25) / 4)


def _decay(z, t, text, drop_text):
    """Velocity `z + t`, whose path from z at time 1 to time 0 is known: `(z + 2) / e - 1`."""
    return z + t[:, None, None, None]


def _error(**settings):
    noise = jax.random.normal(jax.random.key(3), (2, 4, 4, 1))
    out = sampling.sample(_decay, noise, jnp.zeros((2, 5)), guidance=1.0, **settings)
    return float(jnp.max(jnp.abs(out - ((noise + 2) / np.e - 1))))


@pytest.mark.parametrize('time_shift', [1.0, 2.0])
@pytest.mark.parametrize(('sampler', 'order'), [('euler', 1), ('heun', 2)])
def test_the_error_falls_with_the_order_of_the_sampler(sampler, order, time_shift):
    coarse, fine = (_error(num_steps=n, sampler=sampler, time_shift=time_shift) for n in (8, 32))
    assert np.log2(coarse / fine) / 2 == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize('num_steps', [1, 2, 7])
def test_heun_asks_for_both_ends_of_every_step_but_the_last(num_steps):
    asked = []

    def velocity(z, t, text, drop_text):
        jax.debug.callback(lambda time: asked.append(float(time)), t[0], ordered=True)
        return jnp.zeros_like(z)

    jax.block_until_ready(
        sampling.sample(
            velocity, jnp.zeros((1, 2, 2, 1)), jnp.zeros((1, 5)),
            guidance=1.0, num_steps=num_steps, sampler='heun',
        )
    )  # fmt: skip
    jax.effects_barrier()
    times = 1 - np.arange(num_steps) / num_steps
    expected = [time for pair in itertools.pairwise(times) for time in pair]
    np.testing.assert_allclose(asked, [*expected, times[-1]], atol=1e-6)


def test_times_are_shifted_towards_noise():
    np.testing.assert_allclose(sampling.step_times(4, 1.0), [1, 0.75, 0.5, 0.25, 0], atol=1e-7)
    # In SD3's words, sqrt(m / n) = 3.
    np.testing.assert_allclose(sampling.step_times(4, 3.0), [1, 0.9, 0.75, 0.5, 0], atol=1e-7)


def test_guidance_acts_within_its_interval_alone():
    def velocity(z, t, text, drop_text):
        one = jnp.where(drop_text, 1.0, 3.0)
        return jnp.broadcast_to(one[:, None, None, None], z.shape)

    # Ten steps at 1.0, 0.9 to 0.1: those from 0.7 down to 0.3 are guided, to 1 + 5 * (3 - 1).
    out = sampling.sample(
        velocity, jnp.zeros((2, 4, 4, 1)), jnp.zeros((2, 5)),
        guidance=5.0, num_steps=10, guidance_low=0.25, guidance_high=0.75,
    )  # fmt: skip
    np.testing.assert_allclose(out, -(5 * 11.0 + 5 * 3.0) / 10, rtol=1e-5)
