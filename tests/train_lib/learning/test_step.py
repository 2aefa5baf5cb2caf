"""One step learns, weighs by masks, and changes nothing where it is not finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from configs import default
from tests import children
from tests.train_lib.learning.test_flow import STATS
from train_lib.learning import dit, sharding, state
from train_lib.learning import step as steps

TEXT = jax.ShapeDtypeStruct((1, 16), jnp.float32)


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


def make_trainer(tx, schedule, accumulate=1, stats=STATS, dtype=jnp.float32, **fields):
    model = dit.DiT(width=16, depth=1, num_heads=2, patch_size=2, crops=3, dtype=dtype)
    init = state.make_init(model, tx, latent_shape=(8, 8, 4), text=TEXT)
    first = jax.jit(init)(jax.random.key(0))
    config = default.get_config()
    config.update(ema_decay=0.9, accumulate=accumulate, **fields)
    train_step = steps.make_train_step(config, model, tx, schedule, stats)
    eval_step = steps.make_eval_step(config, model, stats)
    steps_of_none = (functools.partial(jax.jit(x), None) for x in (train_step, eval_step))
    return *steps_of_none, first


# By NumPy: JAX would compile each operation for each shape.
def _subtract(one, other):
    return jax.tree.map(np.subtract, *jax.device_get((one, other)))


def _norm(tree):
    return np.linalg.norm([np.linalg.norm(x) for x in jax.tree.leaves(jax.device_get(tree))])


@pytest.fixture(scope='module')
def trainer():
    """A jitted step, its evaluation and a state to start from."""
    optimizer = default.get_config().optimizer
    optimizer.update(schedule='constant', learning_rate=1e-2, warmup_steps=1, b2=0.95)
    schedule, tx = state.make_optimizer(**optimizer, num_steps=100)
    return make_trainer(tx, schedule)


def test_training_lowers_the_loss_and_the_average_follows(trainer):
    train_step, _, current = trainer
    batch, losses = _batch(), []
    for _ in range(60):
        current, metrics = train_step(current, batch)
        losses.append(float(metrics.compute()['loss']))
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])
    assert current.step == 60
    gap = _norm(_subtract(current.params, current.ema_params))
    assert 0 < gap < 0.1 * _norm(current.params)


def test_samples_are_weighed_by_the_mask():
    # Plain descent: what the weights move by is linear in the gradient.
    train_step, _, first = make_trainer(optax.sgd(1e-2), lambda step: 1e-2)
    batch = _batch()
    batch['latents'] *= np.arange(1, 9, dtype=np.float16)[:, None, None, None]
    mask = np.arange(8) < 3

    def step_with(**changes):
        after, update = train_step(first, batch | changes)
        return _subtract(after.params, first.params), update

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
    assert not np.allclose(_norm(some), _norm(others), rtol=0.1)
    together = metrics_of_some.merge(metrics_of_others)
    loss = metrics_of_whole.compute()['loss']
    np.testing.assert_allclose(together.compute()['loss'], loss, rtol=1e-5)
    assert metrics_of_some.compute()['loss'] < 0.9 * loss

    # What stands where there is no sample changes nothing. The mask is among these.
    zeros = {name: x.copy() for name, x in batch.items()}
    for x in zeros.values():
        x[~mask] = 0
    jax.tree.map(np.testing.assert_array_equal, step_with(**zeros)[0], some)


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


def test_the_gain_from_texts_is_what_the_text_of_the_sample_before_costs(trainer):
    train_step, eval_step, current = trainer
    for _ in range(5):
        current, _ = train_step(current, _batch())
    batch = _batch()
    batch['mask'][-2:] = False
    found = eval_step(current.params, batch).compute()
    # All but the first sample, which comes after padding.
    rows = {'mask': np.arange(8) % 7 % 6 > 0}
    others = {'text_embedding': np.roll(batch['text_embedding'], 1, axis=0)}
    own, other = (eval_step(current.params, batch | x | rows).compute() for x in ({}, others))
    gain = other['loss'] - own['loss']
    assert abs(gain) > 1e-4
    np.testing.assert_allclose(found['text_gain'], gain, rtol=1e-3)


def test_parts_give_the_step_of_the_whole_batch():
    # Not Adam: its first step is the gradient's sign, which hides the size of differences. The mask
    # leaves parts with unequal numbers of samples.
    batch = _batch(12) | {'mask': np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1], bool)}
    batch |= {'drop_text': np.arange(12) % 3 == 0, 'crop': np.arange(12) % 3 - 1}

    def after(parts):
        train_step, _, current = make_trainer(optax.sgd(0.1), lambda step: 0.1, parts)
        for _ in range(3):  # at the first weights most gradients are 0
            current, update = train_step(current, batch)
        return current, update.compute()

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), after(1), after(3)
    )


def test_kernels_of_blocks_have_gradients_of_the_dtype_in_which_devices_add_them_up():
    def after_one_step(dtype):
        # Plain momentum, which after one step is the gradient.
        train_step, _, first = make_trainer(
            optax.trace(0.5), lambda step: 0.1, dtype=jnp.bfloat16, gradient_dtype=dtype
        )
        # Other weights than the first, with which most gradients are 0.
        params = jax.tree.map(
            lambda x: x + 0.1 * np.cos(np.arange(x.size, dtype=x.dtype)).reshape(x.shape),
            jax.device_get(first.params),
        )
        after, update = train_step(first.replace(params=params), _batch())
        gradients = jax.device_get(after.opt_state.trace)
        return flatten_dict(gradients, sep='.'), update.compute()['loss']

    (whole, loss), (rounded, same_loss) = map(after_one_step, ('float32', 'bfloat16'))
    assert loss == same_loss
    for name, gradient in rounded.items():
        assert gradient.dtype == jnp.float32
        np.testing.assert_allclose(gradient, whole[name], rtol=2**-8)
        if name.startswith('blocks.') and name.endswith('.kernel'):
            np.testing.assert_array_equal(gradient, gradient.astype(jnp.bfloat16))
            assert np.any(gradient != whole[name])


@pytest.mark.parametrize(
    ('parts', 'devices'), [(0, 1), (-1, 1), (3, 1), (512, 1), (1, 3), (2, 256)]
)
def test_parts_and_devices_that_do_not_divide_a_batch_are_refused(parts, devices):
    config = default.get_config()
    config.accumulate = parts
    mesh = jax.sharding.AbstractMesh((devices, 1), (sharding.DATA_AXIS, sharding.FSDP_AXIS))
    expected = f'batch_size=256: cannot be split over {devices} devices with accumulate={parts}: '
    with pytest.raises(ValueError, match=expected):
        steps.make_program(config, mesh, STATS)


_ALONE = """
for name in ('tensorflow', 'tensorflow_datasets', 'torch'):
    sys.modules[name] = None  # an import of it is an error
import jax, numpy as np
from configs import default
from train_lib.learning import flow, sharding, step
config = default.get_config()
config.model.update(name='tiny/4', width=16, depth=1, unroll=1, dtype='float32')
facts = flow.no_stats(text_dim=5, latents_shape=(1, 4, 8, 8))
made = step.make_program(config, sharding.make_mesh(), facts)
batch = {
    'key': np.zeros((2, 2), np.uint32),
    'latents': np.zeros((2, 4, 8, 8), np.float16),
    'text_embedding': np.zeros((2, 5), np.float16),
}
state, update = made.train_step(made.init(), batch | {'drop_text': np.zeros(2, bool)})
evaluated = made.eval_step(state.ema_params, batch | {'mask': np.ones(2, bool)})
print(float(update.compute()['loss']), float(evaluated.compute()['loss']))
"""


def test_model_and_steps_run_where_there_is_jax_alone():
    assert all(np.isfinite(float(loss)) for loss in children.output(_ALONE).split())
