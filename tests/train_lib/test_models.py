"""The transformer: shapes, conditioning, and what it must be at the start."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from coyo11m_tfds.text import text_encoders
from tests import runs
from tests.checkout import CHECKOUT
from train_lib import checkpoint, draw, models, train
from train_lib.models import dense, dit


def _inputs(batch=3, side=8, text_dim=16):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (batch, side, side, 4))
    t = jax.random.uniform(keys[1], (batch,))
    return x, t, jax.random.normal(keys[2], (batch, text_dim))


def _randomized(model, *inputs):
    """Weights without zeros, so that every path through the model is open."""
    params = model.init(jax.random.key(1), *inputs, None)['params']
    leaves, tree = jax.tree.flatten(params)
    rngs = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [
        leaf + 0.1 * jax.random.normal(rng, leaf.shape)
        for leaf, rng in zip(leaves, rngs, strict=True)
    ]
    return {'params': jax.tree.unflatten(tree, noisy)}


@pytest.fixture(scope='module')
def small():
    model = dit.DiT(width=32, depth=2, num_heads=4, patch_size=2, dtype=jnp.float32)
    inputs = _inputs()
    return model, _randomized(model, *inputs), inputs


@pytest.mark.parametrize(
    'name, millions', [('S/2', 33), ('B/2', 130), ('L/2', 458), ('XL/2', 675), ('tiny/4', 2)]
)
def test_sizes_are_those_of_the_paper(name, millions):
    """Peebles & Xie, table 1; the text embedding stands where they have a class label."""
    model = models.make(name)
    x, t, text = _inputs(side=32, text_dim=640)
    params = jax.eval_shape(model.init, jax.random.key(0), x, t, text, None)['params']
    count = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert count / 1e6 == pytest.approx(millions, rel=0.03)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}


@pytest.mark.parametrize('name', ['M/2', 'S', 'S/', 'S/0', 'S/x', ''])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match='SIZE/PATCH'):
        models.make(name)


def _shapes(model):
    inputs = _inputs(side=8)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs, None)['params']
    return jax.tree.map(lambda leaf: leaf.shape, params)


def test_what_is_given_replaces_the_preset_and_0_leaves_it():
    none = dict.fromkeys(('width', 'depth', 'num_heads', 'patch_size', 'mlp_ratio'), 0)
    assert models.make('S/2', **none) == models.make('S/2')
    given = {'width': 64, 'depth': 3, 'num_heads': 8, 'patch_size': 4, 'mlp_ratio': 2.5}
    blocks = _shapes(models.make('S/2', **given))['blocks']
    assert blocks['mlp_1']['kernel'] == (3, 64, 160)
    assert blocks['attention']['query_norm']['scale'] == (3, 8)
    assert _shapes(models.make('tiny/4', depth=4)) == _shapes(
        models.make('tiny/2', depth=4, patch_size=4)
    )


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'width': 50}, 'model.width=50: expected a multiple of 4 and of model.num_heads=6'),
        ({'num_heads': 5}, 'model.width=384: expected a multiple of 4 and of model.num_heads=5'),
        ({'mlp_ratio': 1.001}, 'model.mlp_ratio=1.001: expected a whole number'),
        ({'experts': 8}, "model.experts=8: expected 0, a model of kind 'dit' has no such field"),
        ({'kind': 'unet'}, "model.kind='unet': No module named 'unet'; expected 'dit' or MODULE:"),
        ({'kind': 'json'}, "model.kind='json': "),
        ({'kind': ':x'}, "model.kind=':x': "),
        ({'kind': 'json:Net'}, "'json' has no attribute 'Net'; expected 'dit' or MODULE:CLASS"),
        (
            {'kind': 'json:dumps'},
            "model.kind='json:dumps' lacks dtype, flops, pin, turns: expected",
        ),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_name_and_value(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        models.make('S/2', **fields)


@pytest.fixture
def own_model(tmp_path, monkeypatch) -> str:
    """The example of docs/training.md as a module that can be imported."""
    text = (CHECKOUT / 'docs' / 'training.md').read_text('utf-8')
    example = re.search(r'^```python\n(.*?class MyModel.*?)^```', text, re.M | re.S)[1]
    (tmp_path / 'a_package').mkdir()
    (tmp_path / 'a_package' / 'a_module.py').write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    return 'a_package.a_module:MyModel'


def test_the_model_of_the_docs_is_trained_and_draws(own_model, mini_dataset, tmp_path):
    model = models.make('S/2', kind=own_model)
    assert (type(model).__name__, model.width) == ('MyModel', 384)
    message = f"model.remat='full': expected 'none', a model of kind {own_model!r} has no such"
    with pytest.raises(ValueError, match=re.escape(message)):
        models.make('S/2', kind=own_model, remat='full')

    changes = {'model.kind': own_model, 'num_steps': 2, 'eval_every': 2, 'preview_every': 2}
    state = train.train_and_evaluate(runs.small_config(mini_dataset, **changes), tmp_path / 'W')
    assert state.params['Dense_0']['kernel'].shape == (641, 128)
    pictures = draw.Artist(tmp_path / 'W').draw(['a cat'], text_encoders.make_encoder('hash'))
    assert pictures.shape == (1, 32, 32, 3)


def test_the_flops_of_the_model_of_the_docs_are_those_of_its_products(own_model):
    model = models.make('S/2', kind=own_model, dtype='float32')
    inputs = _inputs(batch=1, side=8, text_dim=16)
    variables = model.init(jax.random.key(0), *inputs)
    found = jax.jit(model.apply).lower(variables, *inputs).compile().cost_analysis()['flops']
    # The edges of the convolutions, whose windows are not whole, count for less.
    assert 0.75 * model.flops((8, 8, 4), 16) < found < 1.1 * model.flops((8, 8, 4), 16)


def test_the_identity_of_a_run_says_what_decides_the_weights():
    config = default.get_config().model
    config.update({'depth': 3, 'dtype': 'float32', 'remat': 'full', 'text': 'sequence'})
    other = default.get_config().model
    changed = checkpoint.differences(models.identity(**config), models.identity(**other))
    assert changed == {
        'depth': 'depth was 3 and is now 0',
        'text': "text was 'sequence' and is now 'pooled'",
    }


def test_a_new_model_predicts_zero(small):
    model, _, inputs = small
    variables = model.init(jax.random.key(1), *inputs, None)
    np.testing.assert_array_equal(model.apply(variables, *inputs), 0)


def test_the_result_has_the_shape_of_the_latents_and_float32(small):
    _, variables, inputs = small
    model = dit.DiT(width=32, depth=2, num_heads=4, patch_size=2, dtype=jnp.bfloat16)
    out = model.apply(variables, *inputs)
    assert (out.shape, out.dtype) == (inputs[0].shape, jnp.float32)


def test_time_text_and_place_matter(small):
    model, variables, (x, t, text) = small
    out = model.apply(variables, x, t, text)
    assert not np.allclose(out, model.apply(variables, x, t / 2, text), atol=1e-3)
    assert not np.allclose(out, model.apply(variables, x, t, -text), atol=1e-3)
    # Without position vectors a transformer would commute with a shift by whole patches.
    shifted = jnp.roll(model.apply(variables, jnp.roll(x, 2, axis=1), t, text), -2, axis=1)
    assert not np.allclose(out, shifted, atol=1e-3)


def test_a_token_is_a_square_of_positions(small):
    model, variables, (x, t, text) = small
    # Without attention a token keeps to itself.
    silent = jax.tree.map_with_path(
        lambda path, leaf: 0 * leaf if 'attention' in str(path) else leaf, variables
    )

    def at_row_3_column_6(x):
        return model.apply(silent, x, t, text)[0, 3, 6].sum()

    touched = np.abs(jax.grad(at_row_3_column_6)(x)).sum(axis=(0, 3)) > 0
    assert np.argwhere(touched).tolist() == [[2, 6], [2, 7], [3, 6], [3, 7]]


def test_samples_of_a_batch_do_not_touch_each_other(small):
    model, variables, (x, t, text) = small
    alone = model.apply(variables, x[1:2], t[1:2], text[1:2])
    np.testing.assert_allclose(model.apply(variables, x, t, text)[1:2], alone, atol=1e-5)


def test_dropped_text_is_ignored_and_only_there(small):
    model, variables, (x, t, text) = small
    drop = jnp.array([True, False, True])
    out = model.apply(variables, x, t, text, drop)
    other = model.apply(variables, x, t, -text, drop)
    np.testing.assert_array_equal(out[0], other[0])
    np.testing.assert_array_equal(out[2], other[2])
    assert not np.allclose(out[1], other[1], atol=1e-3)
    nothing_dropped = model.apply(variables, x, t, text, jnp.zeros(3, bool))
    np.testing.assert_array_equal(nothing_dropped, model.apply(variables, x, t, text, None))


@pytest.mark.parametrize('remat', [True, False, 'True', 'offload'])
def test_another_value_of_remat_is_refused_with_what_to_write_instead(remat):
    with pytest.raises(ValueError, match=f'model.remat is {remat!r}.*"full".*"none"'):
        models.make('S/2', remat=remat)


def test_another_attention_is_refused():
    with pytest.raises(ValueError, match="'flash', expected one of xla, cudnn"):
        models.make('S/2', attention='flash')


@pytest.mark.parametrize('option', [{'remat': 'dots'}, {'remat': 'full'}, {'unroll': 2}])
def test_how_blocks_are_compiled_changes_nothing(small, option):
    model, variables, inputs = small
    other = dit.DiT(width=32, depth=2, num_heads=4, patch_size=2, dtype=jnp.float32, **option)

    def loss(model):
        return jax.grad(lambda v: jnp.sum(model.apply(v, *inputs) ** 2))(variables)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        loss(model),
        loss(other),
    )


def _saved_bytes(remat):
    """Of what the forward pass keeps for the backward pass, of 2 blocks on 3 x 16 tokens."""
    model = dit.DiT(width=32, depth=2, num_heads=4, patch_size=2, dtype=jnp.bfloat16, remat=remat)
    inputs = _inputs()
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs, None)
    _, backward = jax.eval_shape(lambda p: jax.vjp(lambda p: model.apply(p, *inputs), p), params)
    # Of the scanned blocks, less the weights, which are there whatever is kept.
    return sum(
        np.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(backward)
        if leaf.shape[:3] == (2, 3, 16)
    )


def test_remat_keeps_nothing_or_the_products_with_weights_or_all():
    block_input = 2 * 3 * 16 * 32 * 2  # blocks, samples, tokens, width, bytes
    none, dots, full = map(_saved_bytes, ('none', 'dots', 'full'))
    assert full == block_input
    assert dots == (1 + 3 + 1 + 4 + 1) * block_input  # qkv, out, mlp_1, mlp_2
    assert none > 1.5 * dots


def _matmul_flops(model, inputs):
    """By XLA's own count, elementwise operations among them."""
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs, None)
    compiled = jax.jit(model.apply).lower(variables, *inputs).compile()
    return compiled.cost_analysis()['flops']


@pytest.mark.parametrize('mlp_ratio', [4, 1.5])
def test_flops_are_those_of_the_products(mlp_ratio):
    # Without a loop, which XLA would count once; wide, for few elementwise operations beside.
    sizes = {'width': 256, 'depth': 2, 'num_heads': 4, 'patch_size': 2, 'mlp_ratio': mlp_ratio}
    model = dit.DiT(**sizes, dtype=jnp.float32, unroll=2)
    inputs = _inputs(batch=4, side=16, text_dim=48)
    assert model.flops((16, 16, 4), 48) == pytest.approx(_matmul_flops(model, inputs) / 4, rel=0.02)


def test_gradients_of_kernels_are_float32_before_devices_add_them_up():
    x = jax.random.normal(jax.random.key(0), (2, 5, 8), jnp.bfloat16)
    layer = dense.Dense(4, dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(1), x)

    def gradient(layer):
        return jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(variables)['params']['kernel']

    plain = nn.Dense(4, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(layer.apply(variables, x), plain.apply(variables, x))
    own, rounded = gradient(layer), gradient(plain)
    assert own.dtype == jnp.float32
    np.testing.assert_allclose(own, rounded, rtol=2**-7)
    np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16))
    assert np.any(own != own.astype(jnp.bfloat16))


def test_latents_that_no_patch_divides_are_refused(small):
    model, variables, _ = small
    with pytest.raises(ValueError, match='7x7'):
        model.apply(variables, *_inputs(side=7))


def test_positions_differ_and_need_a_width_divisible_by_four():
    positions = dit.sincos_positions_2d(4, 6, 16)
    assert positions.shape == (24, 16)
    assert len(np.unique(positions.round(5), axis=0)) == 24
    with pytest.raises(ValueError, match='18'):
        dit.sincos_positions_2d(4, 4, 18)
