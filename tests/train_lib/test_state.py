"""Muon for the kernels of blocks beside AdamW: which changes what, and that a run resumes by it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import runs
from train_lib import beginnings, state
from train_lib.models import dit

LAYERS, WIDTH = 2, 16


def _params():
    model = dit.DiT(width=WIDTH, depth=LAYERS, num_heads=2, patch_size=2, dtype=jnp.float32)
    x, t, text = jnp.zeros((1, 8, 8, 4)), jnp.zeros(1), jnp.zeros((1, 12))
    params = model.init(jax.random.key(0), x, t, text, None)['params']
    return jax.tree.map(lambda leaf: leaf + 0.1, params)  # so that decay can be seen


def _gradients(params):
    leaves, tree = jax.tree.flatten(params)
    rngs = jax.random.split(jax.random.key(1), len(leaves))
    noise = [jax.random.normal(rng, leaf.shape) for rng, leaf in zip(rngs, leaves, strict=True)]
    return jax.tree.unflatten(tree, noise)


def _optimizer(name, weight_decay=0.0):
    rates = optax.constant_schedule(1e-3), optax.constant_schedule(1e-2)
    fields = {'b1': 0.9, 'b2': 0.99, 'clip_norm': 1.0}
    return state.make_optimizer(name, *rates, weight_decay=weight_decay, **fields)


def _updates(name, *, weight_decay=0.0):
    """Of the first step, by path."""
    tx, params = _optimizer(name, weight_decay), _params()
    updates, _ = tx.update(_gradients(params), tx.init(params), params)
    paths = jax.tree_util.tree_leaves_with_path(updates)
    return {'.'.join(part.key for part in path): np.asarray(leaf) for path, leaf in paths}


BY_MUON = {f'blocks.{name}.kernel' for name in ('attention.qkv', 'attention.out', 'mlp_1', 'mlp_2')}


def test_muon_moves_every_layer_by_a_nearly_orthogonal_matrix_and_leaves_the_rest_to_adamw():
    updates, adamw = _updates('muon'), _updates('adamw')
    differ = {name for name in updates if not np.array_equal(updates[name], adamw[name])}
    assert differ == BY_MUON
    for name in BY_MUON:
        assert updates[name].shape[0] == LAYERS
        for matrix in updates[name]:
            values = np.linalg.svd(matrix, compute_uv=False)
            unit = 1e-2 * 0.2 * np.sqrt(max(matrix.shape))  # rate, root mean square of AdamW's
            assert np.all((0.5 * unit < values) & (values < 1.5 * unit)), (name, values / unit)


@pytest.mark.parametrize(('name', 'rate'), [('adamw', 1e-3), ('muon', 1e-2)])
def test_kernels_decay_by_the_rate_of_what_changes_them_and_nothing_else_does(name, rate):
    plain, decayed, params = _updates(name), _updates(name, weight_decay=0.5), _params()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        full = '.'.join(part.key for part in path)
        own = rate if full in BY_MUON else 1e-3
        expected = -0.5 * own * leaf if full.endswith('kernel') else 0 * leaf
        np.testing.assert_allclose(decayed[full] - plain[full], expected, atol=1e-7)


def test_a_rate_rises_stays_and_falls():
    rate = state.make_schedule('wsd', num_steps=100, learning_rate=1.0, warmup_steps=10)
    steps = 0, 5, 10, 40, 70, 85, 100
    np.testing.assert_allclose([rate(x) for x in steps], [0, 0.5, 1, 1, 1, 0.5, 0], atol=1e-6)


def test_what_cannot_be_optimized_is_refused():
    with pytest.raises(ValueError, match=r"optimizer.name='lion': expected 'adamw' or 'muon'"):
        _updates('lion')
    with pytest.raises(ValueError, match=r"optimizer.name='muon'.*'blocks'.*'adamw'"):
        _optimizer('muon').init({'other': {'kernel': jnp.zeros((4, 4))}, 'scale': jnp.ones(4)})
    with pytest.raises(ValueError, match=r"optimizer.schedule='step'"):
        state.make_schedule('step', num_steps=9, learning_rate=1, warmup_steps=1)


@pytest.mark.slow
def test_a_run_by_muon_resumes_as_if_it_had_not_stopped_and_stays_with_muon(mini_dataset, tmp_path):
    def run(folder, num_steps, **changes):
        settings = {'optimizer.name': 'muon', 'eval_every': 0, 'num_steps': num_steps} | changes
        return runs.train(mini_dataset, tmp_path / folder, ['num_steps'], **settings)

    whole = run('whole', 6)
    run('parts', 3)
    parts = run('parts', 6)
    jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
    jax.tree.map(np.testing.assert_array_equal, parts.opt_state, whole.opt_state)
    with pytest.raises(
        beginnings.OtherRunError, match=r"optimizer.name was 'muon' and is now 'adamw'"
    ):
        run('parts', 9, **{'optimizer.name': 'adamw'})
