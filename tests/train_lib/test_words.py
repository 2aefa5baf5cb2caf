"""Texts as sequences in the model: what attention sees, what padding and dropping change."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from tests.train_lib.test_models import _matmul_flops, _randomized
from train_lib import models
from train_lib.models import dit
from train_lib.models.words import Words

TOKENS = np.array([[5, 9, 2, -1, -1], [5, 3, -1, -1, -1], [7, 7, 7, 7, 7]], np.int32)
EMPTY = np.full((3, 5), -1, np.int32)


def _inputs(tokens=TOKENS, text_of=np.asarray):
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
    variables = _randomized(made, *_inputs(text_of=text_of))
    apply = jax.jit(made.apply)
    return lambda tokens, drop_text=None: apply(variables, *_inputs(tokens, text_of), drop_text)


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


def test_words_reach_the_blocks_only_as_a_sequence():
    config = default.get_config().model.to_dict() | {'dtype': 'float32', 'depth': 2}

    def names(text):
        made = models.make(**config | {'text': text}, vocabulary=12)
        init = jax.eval_shape(made.init, jax.random.key(0), *_inputs(), None)
        return {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(init)}

    more = names('sequence') - names('pooled')
    assert more == {
        "['params']['blocks']['attention']['words']['kernel']",
        "['params']['blocks']['attention']['words']['bias']",
    }


def test_sequences_of_what_is_one_vector_are_refused():
    with pytest.raises(ValueError, match=r"model\.text='sequence'.*--tokens_only.*'pooled'"):
        models.make('S/2', text='sequence')


@pytest.mark.parametrize(('text_of', 'dim'), [(np.asarray, 0), (_states, 24)])
@pytest.mark.parametrize('text', dit.TEXTS)
def test_flops_are_those_of_the_matrix_products(text, text_of, dim):
    # Without a loop, which XLA would count once; wide, for few elementwise operations beside.
    fields = {'width': 256, 'depth': 2, 'num_heads': 4, 'patch_size': 2, 'dtype': jnp.float32}
    made = dit.DiT(**fields, unroll=2, text=text, vocabulary=12)
    tokens = np.tile(TOKENS, (1, 8))
    found = _matmul_flops(made, _inputs(tokens, text_of)) / len(tokens)
    assert made.flops((8, 8, 4), dim, tokens.shape[1]) == pytest.approx(found, rel=0.02)
