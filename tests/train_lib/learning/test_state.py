"""Muon for the kernels of blocks beside AdamW: which changes what, and that a run resumes by it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import runs
from train_lib.learning import dit, state
from train_lib.lifecycle import beginnings

LAYERS, WIDTH = 2, 16


@functools.cache
def _shapes():
    sizes = {'width': WIDTH, 'depth': LAYERS, 'num_heads': 2, 'patch_size': 2, 'vocabulary': 9}
    model = dit.DiT(**sizes, text=dit.SEQUENCE)
    x, t, text = jnp.zeros((1, 8, 8, 4)), jnp.zeros(1), jnp.zeros((1, 5), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), x, t, text)['params']


def _normal(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), _shapes())


def _optimizer(name, weight_decay=0.0):
    fields = {'schedule': 'constant', 'num_steps': 9, 'warmup_steps': 0, 'learning_rate': 1e-3}
    fields |= {'muon_learning_rate': 1e-2, 'b1': 0.9, 'b2': 0.99, 'clip_norm': 1.0}
    return state.make_optimizer(name, weight_decay=weight_decay, **fields)[1]


@functools.cache
def _updates(name, *, weight_decay=0.0):
    """Of the first step, by path, from a gradient whose part for the values is large."""
    tx, params, grads = _optimizer(name, weight_decay), _normal(0), _normal(1)
    grads['blocks']['attention']['qkv']['kernel'][..., 2 * WIDTH :] *= 30
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    paths = jax.tree_util.tree_leaves_with_path(updates)
    return {'.'.join(part.key for part in path): np.asarray(leaf) for path, leaf in paths}


PARTS = {'attention.qkv': 3, 'attention.words': 2, 'attention.out': 1, 'mlp_1': 1, 'mlp_2': 1}
BY_MUON = {f'blocks.{name}.kernel': parts for name, parts in PARTS.items()}


def test_muon_moves_each_matrix_by_a_nearly_orthogonal_one_and_leaves_the_rest_to_adamw():
    updates, adamw = _updates('muon'), _updates('adamw')
    differ = {name for name in updates if not np.array_equal(updates[name], adamw[name])}
    assert differ == set(BY_MUON)
    for name, parts in BY_MUON.items():
        assert updates[name].shape[0] == LAYERS
        for matrix in np.concatenate(np.split(updates[name], parts, axis=-1)):
            values = np.linalg.svd(matrix, compute_uv=False)
            unit = 1e-2 * 0.2 * np.sqrt(max(matrix.shape))  # rate, root mean square of AdamW's
            # A random square matrix may have one value that is too small for five turns.
            assert values[-2] > 0.5 * unit, (name, values / unit)
            assert values[0] < 1.5 * unit, (name, values / unit)


def test_zeros_and_bfloat16_are_orthogonalized_without_nan():
    matrices = jax.random.normal(jax.random.key(0), (3, 8, 24), jnp.bfloat16).at[1].set(0)
    result = state.orthogonalize(matrices)
    assert result.dtype == jnp.bfloat16
    values = np.linalg.svd(result.astype(jnp.float32), compute_uv=False)
    assert np.all(values[1] == 0)
    assert np.all((values[[0, 2]] > 0.5) & (values[[0, 2]] < 1.5))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_small_momenta_move_matrices_as_far_as_large_ones(dtype):
    made = state.muon(1.0, weight_decay=0, dtype=dtype)
    kernel = jax.random.normal(jax.random.key(0), (1, 16, 16))
    for gradient in (kernel, 1e-9 * kernel):
        tree = {'out': {'kernel': gradient}}
        update, _ = made.update(tree, made.init(tree), tree)
        assert 0.15 < np.sqrt(np.mean(np.square(update['out']['kernel']))) < 0.25


@pytest.mark.parametrize(('name', 'rate'), [('adamw', 1e-3), ('muon', 1e-2)])
def test_kernels_decay_by_the_rate_of_what_changes_them_and_nothing_else_does(name, rate):
    plain, decayed, params = _updates(name), _updates(name, weight_decay=0.5), _normal(0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        full = '.'.join(part.key for part in path)
        own = rate if full in BY_MUON else 1e-3
        expected = -0.5 * own * leaf if full.endswith('kernel') else 0 * leaf
        np.testing.assert_allclose(decayed[full] - plain[full], expected, atol=1e-6)


def test_a_rate_rises_stays_and_falls():
    rate = state.make_schedule('wsd', num_steps=100, learning_rate=1.0, warmup_steps=10)
    steps = 0, 5, 10, 40, 70, 85, 100
    np.testing.assert_allclose([rate(x) for x in steps], [0, 0.5, 1, 1, 1, 0.5, 0], atol=1e-6)
    # Also behind a warm-up that leaves less than its three tenths to the fall.
    rate = state.make_schedule('wsd', num_steps=100, learning_rate=1.0, warmup_steps=80)
    np.testing.assert_allclose([rate(x) for x in (80, 90, 100)], [1, 0.5, 0], atol=1e-6)


def init_by_muon(params) -> None:
    _optimizer('muon').init(params)


def update_by_muon(params) -> None:
    _optimizer('muon').update(params, _optimizer('muon').init(params), params)


REFUSED = {
    'an optimizer that is none': (
        lambda: _updates('lion'),
        "optimizer.name='lion': expected 'adamw' or 'muon'",
    ),
    'a schedule that is none': (
        lambda: state.make_schedule('step', num_steps=9, learning_rate=1, warmup_steps=1),
        "optimizer.schedule='step'",
    ),
    'muon for a model without blocks': (
        lambda: init_by_muon({'other': {'kernel': jnp.zeros((4, 4))}, 'scale': jnp.ones(4)}),
        "optimizer.name='muon'.*'blocks'.*'adamw'",
    ),
    'muon for queries, keys and values of 8 columns': (
        lambda: update_by_muon({'blocks': {'qkv': {'kernel': jnp.ones((4, 8))}}}),
        r"\(4, 8\): in a module named 'qkv'.* expects 3 matrices",
    ),
}


@pytest.mark.parametrize(('optimize', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_optimized_is_refused(optimize, message):
    with pytest.raises(ValueError, match=message):
        optimize()


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
