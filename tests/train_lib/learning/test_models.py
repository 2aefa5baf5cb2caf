"""The transformer: shapes, conditioning, and what it must be at the start."""

import functools
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coyo11m_tfds.text import text_encoders
from tests import runs
from tests.test_readme import blocks
from train_lib import draw, train
from train_lib.learning import dit, layers, models
from train_lib.learning.word_vectors import Words


def _inputs(batch=3, side=8, text_dim=16):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (batch, side, side, 4))
    t = jax.random.uniform(keys[1], (batch,))
    return x, t, jax.random.normal(keys[2], (batch, text_dim))


def randomized(model, *inputs):
    """Weights without zeros, so that every path through the model is open."""
    rng = np.random.default_rng(2)

    def random(path, leaf):
        mean = float(path[-1].key == 'scale')
        return np.float32(mean + 0.15 * rng.standard_normal(leaf.shape))

    shapes = jax.eval_shape(model.init, jax.random.key(1), *inputs, None)
    return jax.tree.map_with_path(random, shapes)


@pytest.fixture(scope='module')
def small():
    model = dit.DiT(width=32, depth=2, num_heads=4, patch_size=2, dtype=jnp.float32)
    inputs = _inputs()
    return model, randomized(model, *inputs), inputs


@pytest.mark.parametrize(
    'name, millions', [('S/2', 33), ('B/2', 130), ('L/2', 458), ('XL/2', 675), ('tiny/4', 2)]
)
def test_sizes_are_those_of_the_paper(name, millions):
    """Peebles & Xie, table 1; the text embedding stands where they have a class label."""
    model = models.make_model(name)
    x, t, text = _inputs(side=32, text_dim=640)
    params = jax.eval_shape(model.init, jax.random.key(0), x, t, text, None)['params']
    count = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert count / 1e6 == pytest.approx(millions, rel=0.03)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}


def _shapes(model):
    inputs = _inputs(side=8)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs, None)['params']
    return jax.tree.map(lambda leaf: leaf.shape, params)


def test_what_is_given_replaces_the_preset_and_0_leaves_it():
    none = dict.fromkeys(('width', 'depth', 'num_heads', 'patch_size', 'mlp_ratio'), 0)
    assert models.make_model('S/2', **none) == models.make_model('S/2')
    given = {'width': 64, 'depth': 3, 'num_heads': 8, 'patch_size': 4, 'mlp_ratio': 2.5}
    blocks = _shapes(models.make_model('S/2', **given))['blocks']
    assert blocks['mlp_1']['kernel'] == (3, 64, 160)
    assert blocks['attention']['query_norm'] == (3, 8)
    assert _shapes(models.make_model('tiny/4', depth=4)) == _shapes(
        models.make_model('tiny/2', depth=4, patch_size=4)
    )


def test_attention_sees_tokens_where_records_hold_them():
    assert models.make_model('S/2', vocabulary=30, text='').text == 'sequence'
    assert models.make_model('S/2', vocabulary=30, text='pooled').text == 'pooled'
    assert models.make_model('S/2', text='').text == 'pooled'


WRONG = {
    'a size without numbers': ({'name': 'M/2'}, "model.name='M/2': expected SIZE/PATCH"),
    'a patch of a digit that is no number': (
        {'name': 'S/²'},
        "model.name='S/²': expected SIZE/PATCH",
    ),
    'a truth as what is computed again': (
        {'remat': True},
        'model.remat=True: expected one of none, dots, full',
    ),
    'an attention that is none': (
        {'attention': 'flash'},
        "model.attention='flash': expected one of xla, cudnn",
    ),
    'a text of two kinds': (
        {'text': 'both'},
        "model.text='both': expected one of pooled, sequence",
    ),
    'words of a data set of embeddings': (
        {'text': 'sequence'},
        "model.text='sequence': the data set holds embeddings, expected",
    ),
    'a prediction that is none': (
        {'prediction': 'noise'},
        "model.prediction='noise': expected one of velocity, latents",
    ),
    'a width that heads do not divide': (
        {'width': 50},
        'model.width=50: expected a multiple of 24, 4 times model.num_heads=6',
    ),
    'heads that do not divide the width': (
        {'num_heads': 5},
        'model.width=384: expected a multiple of 20, 4 times model.num_heads=5',
    ),
    'a width of the MLP with a point': (
        {'mlp_ratio': 1.001},
        'model.mlp_ratio=1.001: expected a whole number',
    ),
    'two crops of three': (
        {'crops': 2, 'num_crops': 3},
        'model.crops=2: the data set has 3 crops of an image, expec',
    ),
    'experts': (
        {'experts': 8},
        "model.experts=8: expected 0, a model of kind 'dit' has no such field",
    ),
    'a module that is not there': (
        {'kind': 'unet'},
        "model.kind='unet': No module named 'unet'; expected 'dit' or MODULE:",
    ),
    'a module without its package': (
        {'kind': '.unet:Net'},
        "model.kind='.unet:Net': the 'package' argument is required",
    ),
    'a class that is not there': (
        {'kind': 'json:Net'},
        "'json' has no attribute 'Net'; expected 'dit' or MODULE:CLASS",
    ),
    'a function that is no model': (
        {'kind': 'json:dumps'},
        "model.kind='json:dumps': lacks dtype, flops, pin: expected",
    ),
}


@pytest.mark.parametrize(('fields', 'message'), WRONG.values(), ids=WRONG)
def test_a_field_that_does_not_fit_is_refused_by_name_and_value(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        models.make_model(**{'name': 'S/2'} | fields)


@pytest.fixture
def own_model(tmp_path, monkeypatch) -> str:
    """The example of docs/training.md as a module that can be imported."""
    [example] = [text for _, text in blocks('docs/training.md') if 'class MyModel' in text]
    (tmp_path / 'a_package').mkdir()
    (tmp_path / 'a_package' / 'a_module.py').write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    return 'a_package.a_module:MyModel'


def test_the_model_of_the_docs_is_trained_and_draws(own_model, mini_dataset, tmp_path):
    model = models.make_model('S/2', kind=own_model)
    assert (type(model).__name__, model.width) == ('MyModel', 384)
    message = f"model.remat='full': expected 'none', a model of kind {own_model!r} has no such"
    with pytest.raises(ValueError, match=re.escape(message)):
        models.make_model('S/2', kind=own_model, remat='full')

    changes = {'model.kind': own_model, 'model.depth': 0, 'model.unroll': 0}
    changes |= {'num_steps': 2, 'eval_every': 2, 'preview_every': 2}
    state = train.train_and_evaluate(runs.small_config(mini_dataset, **changes), tmp_path / 'W')
    assert state.params['Dense_0']['kernel'].shape == (641, 32)
    pictures = draw.Artist(tmp_path / 'W').draw(['a cat'], text_encoders.make_encoder('hash'))
    assert pictures.shape == (1, 32, 32, 3)


@pytest.mark.parametrize(('count', 'asked', 'told'), [(3, 0, 3), (3, 1, 1), (3, 5, 5), (1, 0, 1)])
def test_crops_are_told_apart_as_many_as_there_are_unless_asked(count, asked, told):
    assert models.make_model('S/2', crops=asked, num_crops=count).crops == told


def test_each_crop_matters_but_the_middle_one_which_is_the_model_without_crops(small):
    model, _, inputs = small
    telling = model.clone(crops=4)
    first = jax.jit(telling.init)(jax.random.key(1), *inputs, None)['params']
    np.testing.assert_array_equal(first['conditioning']['crops']['kernel'], np.zeros((3, 32)))
    apply, variables = jax.jit(telling.apply), randomized(telling, *inputs)
    velocities = [
        np.asarray(apply(variables, *inputs, None, jnp.full(3, crop))) for crop in (-1, 0, 1, 2)
    ]
    for one, other in itertools.combinations(velocities, 2):
        assert np.abs(one - other).max() > 1e-3
    mixed = apply(variables, *inputs, None, jnp.array([2, 0, -1]))
    expected = [velocities[3][0], velocities[1][1], velocities[0][2]]
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
    for same in (model, telling):
        velocity = jax.jit(same.apply)(variables, *inputs)
        np.testing.assert_allclose(velocity, velocities[1], atol=1e-6)


def test_a_new_model_predicts_zero_in_float32(small):
    model, variables, inputs = small
    first = jax.jit(model.init)(jax.random.key(1), *inputs, None)
    np.testing.assert_array_equal(jax.jit(model.apply)(first, *inputs), np.zeros((3, 8, 8, 4)))
    narrow = dit.DiT(width=32, depth=2, num_heads=4, patch_size=2, dtype=jnp.bfloat16)
    assert jax.eval_shape(narrow.apply, variables, *inputs).dtype == jnp.float32
    with pytest.raises(ValueError, match='latents of 7x7 cannot be cut into patches of 2x2'):
        model.apply(variables, *_inputs(side=7))


def test_the_velocity_from_predicted_latents_leads_back_to_them(small):
    """But at small times, where it would grow without end, it leads only a part of the way."""
    model, variables, (x, _, text) = small
    times = np.array([1, 0.5, 0.01], np.float32)  # of the three samples
    divisors = np.array([1, 0.5, 0.05], np.float32)[:, None, None, None]
    latents = jax.jit(model.apply)(variables, x, times, text)
    predicting = model.clone(prediction=dit.LATENTS)
    velocity = jax.jit(predicting.apply)(variables, x, times, text)
    np.testing.assert_allclose(np.asarray(x) - divisors * velocity, latents, atol=1e-5)


def test_how_blocks_are_compiled_changes_nothing(small):
    model, variables, inputs = small

    def gradients(**option):
        apply = model.clone(**option).apply
        return jax.jit(jax.grad(lambda v: jnp.sum(apply(v, *inputs) ** 2)))(variables)

    expected = gradients()
    for option in ({'remat': 'dots'}, {'remat': 'full'}, {'unroll': 2}):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        jax.tree.map(close, gradients(**option), expected)


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
    assert dots == (1 + 3 + 1 + 1 + 4 + 1) * block_input  # qkv, mixed, out, mlp_1, mlp_2
    assert none > 1.5 * dots


def test_gradients_of_kernels_are_float32_before_devices_add_them_up():
    x = jax.random.normal(jax.random.key(0), (2, 5, 8), jnp.bfloat16)
    layer = layers.Dense(4, dtype=jnp.bfloat16)
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


TOKENS = np.array([[5, 9, 2, -1, -1], [5, 3, -1, -1, -1], [7, 7, 7, 7, 7]], np.int32)
EMPTY = np.full((3, 5), -1, np.int32)
LONG = np.tile(TOKENS, (1, 8))


def _text_inputs(tokens=TOKENS, text_of=np.asarray):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (len(tokens), 8, 8, 4))
    return x, jax.random.uniform(keys[1], (len(tokens),)), text_of(tokens)


def _states(tokens):
    """Like those of a causal encoder: of a token and all before it; of padding anything."""
    table = 10 * np.random.default_rng(0).standard_normal((13, 24)).astype(np.float32)
    return Words(np.cumsum(table[tokens], 1), tokens >= 0)


@pytest.fixture(
    scope='module',
    params=itertools.product(dit.TEXTS, (np.asarray, _states)),
    ids=lambda pair: f'{pair[0]}-{pair[1].__name__}',
)
def model(request):
    """The model with weights, as a function of tokens and what is dropped."""
    fields = {'width': 32, 'depth': 2, 'num_heads': 4, 'patch_size': 2, 'dtype': jnp.float32}
    text, text_of = request.param
    made = dit.DiT(**fields, text=text, vocabulary=12)
    variables = randomized(made, *_text_inputs(text_of=text_of))
    apply = jax.jit(made.apply)
    return lambda tokens, drop_text=None: apply(
        variables, *_text_inputs(tokens, text_of), drop_text
    )


def test_padding_changes_nothing(model):
    longer = np.pad(TOKENS, [(0, 0), (0, 4)], constant_values=-1)
    np.testing.assert_allclose(model(longer), model(TOKENS), atol=1e-5)


def test_every_token_its_place_and_its_absence_matter(model):
    velocity = np.asarray(model(TOKENS))
    for change in ([5, 9, 3, -1, -1], [9, 5, 2, -1, -1], [5, 9, -1, -1, -1]):
        others = TOKENS.copy()
        others[0] = change
        found = np.asarray(model(others))
        assert np.abs(found[0] - velocity[0]).max() > 1e-3
        np.testing.assert_allclose(found[1:], velocity[1:], atol=1e-5)  # of other samples


def test_of_a_dropped_text_nothing_is_left(model):
    drop = np.array([True, True, False])
    np.testing.assert_allclose(model(TOKENS, drop)[:2], model(TOKENS + 1, drop)[:2], atol=1e-5)
    np.testing.assert_array_equal(model(TOKENS, drop)[2], model(TOKENS)[2])
    assert np.abs(model(TOKENS, drop) - model(TOKENS))[:2].max() > 1e-3


def test_an_empty_text_is_one_like_any_other(model):
    velocity = np.asarray(model(EMPTY))
    assert np.isfinite(velocity).all()
    assert np.abs(velocity - model(EMPTY, np.ones(3, bool))).max() > 1e-3
    assert np.abs(velocity - model(TOKENS)).max() > 1e-3


@pytest.mark.parametrize(
    ('fields', 'inputs', 'text_sizes'),
    [
        ({'mlp_ratio': 1.5}, _inputs(batch=3, side=8, text_dim=48), (48, 0)),
        ({'vocabulary': 12}, _text_inputs(LONG), (0, 40)),
        ({'vocabulary': 12, 'text': dit.SEQUENCE}, _text_inputs(LONG, _states), (24, 40)),
    ],
)
def test_flops_are_those_of_the_products(fields, inputs, text_sizes):
    # Without a loop, which XLA would count once; wide, for few elementwise operations.
    sizes = {'width': 512, 'depth': 2, 'num_heads': 4, 'patch_size': 2, 'dtype': jnp.float32}
    model = dit.DiT(**sizes, unroll=2, **fields)
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs, None)
    compiled = jax.jit(model.apply).lower(variables, *inputs).compile()
    flops = compiled.cost_analysis()['flops'] / 3
    assert model.flops((8, 8, 4), *text_sizes) == pytest.approx(flops, rel=0.02)
