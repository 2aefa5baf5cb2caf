"""A batch computed in parts gives what it gives at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import default
from train_lib import accumulate, flow, program, sharding, state, step
from train_lib.models import dit

TEXT = jax.ShapeDtypeStruct((1, 16), jnp.float32)
STATS = flow.Stats(*(np.full(n, v, np.float32) for n, v in ((4, 0), (4, 1), (16, 0), (16, 1))))


def _batch(mask=None):
    rng = np.random.default_rng(0)
    batch = {
        'key': np.zeros((12, 2), np.uint32),
        'latents': rng.standard_normal((12, 4, 8, 8)).astype(np.float16),
        'text_embedding': rng.standard_normal((12, 16)).astype(np.float16),
        'drop_text': rng.random(12) < 0.5,
    }
    return batch if mask is None else batch | {'mask': mask}


def _step(parts, batch):
    model = dit.DiT(width=32, depth=2, num_heads=2, patch_size=2, dtype=jnp.float32)
    # Not Adam: its first step is the gradient's sign, which hides the size of differences.
    tx = optax.sgd(0.1)
    train_step = step.make_train_step(
        model,
        tx,
        optax.constant_schedule(0.1),
        STATS,
        ema_decay=0.9,
        seed=0,
        logit_mean=0.0,
        logit_std=1.0,
        parts=parts,
    )
    init = state.make_init(model, tx, latent_shape=(8, 8, 4), text=TEXT)
    jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
    jitted, after = jit(train_step), init(jax.random.key(0))
    for _ in range(3):  # at the first weights most gradients are 0
        after, metrics = jitted(after, batch)
    return after, metrics.compute()


@pytest.mark.parametrize('masked', [pytest.param(False, marks=pytest.mark.slow), True])
def test_parts_give_the_step_of_the_whole_batch(masked):
    # The mask leaves parts with unequal numbers of samples.
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1], bool) if masked else None
    (whole, metrics), (parts, metrics_of_parts) = (_step(n, _batch(mask)) for n in (1, 3))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        (whole, metrics),
        (parts, metrics_of_parts),
    )


def test_entries_of_rows_come_in_the_order_of_rows():
    def loss(scale, rows):
        entries = scale * rows['x']
        return jnp.sum(entries), entries

    gradient = accumulate.in_parts(jax.value_and_grad(loss, has_aux=True), 4)
    (total, entries), grad = gradient(2.0, {'x': jnp.arange(24.0)})
    assert (total, grad) == (2 * 276, 276)
    np.testing.assert_array_equal(entries, 2 * np.arange(24.0))


@pytest.mark.parametrize(
    ('parts', 'devices'), [(0, 1), (-1, 1), (3, 1), (512, 1), (1, 3), (2, 256)]
)
def test_parts_and_devices_that_do_not_divide_a_batch_are_refused(parts, devices):
    config = default.get_config()
    config.accumulate = parts
    mesh = jax.sharding.AbstractMesh((devices, 1), (sharding.DATA_AXIS, sharding.FSDP_AXIS))
    expected = f'batch_size=256 in accumulate={parts} parts cannot be split over {devices} devices'
    with pytest.raises(ValueError, match=expected):
        program.make_program(config, mesh, STATS, latent_shape=(8, 8, 4))
