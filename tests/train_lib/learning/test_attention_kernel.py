"""The kernel computes what XLA does, by running it step by step on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_lib.learning import attention_kernel, sharding
from train_lib.learning.attention import Attention
from train_lib.learning.attention_kernel import Product
from train_lib.learning.dit import DiT
from train_lib.learning.layers import OneDevice
from train_lib.learning.positions import make_rotations

HEADS, WIDTH = 2, 256


def make(num_tokens: int, num_words: int, dtype):
    random = np.random.default_rng(num_tokens + num_words)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    qkv, scales = normal(2, num_tokens, 3 * WIDTH), 1 + normal(2, 128).astype(jnp.float32) / 4
    words = None
    if num_words:
        words = normal(2, num_words, 2 * WIDTH)
        # Of the second text all but the first is dropped.
        present = jnp.asarray(random.random((2, num_words)) > 0.3).at[:, 0].set(True)
        present = present.at[1, 1:].set(False)

    def product(values, present=None):
        bias = normal(values.shape[-1]).astype(jnp.float32)
        return Product(values, bias, present)

    words = product(words, present) if num_words else None
    return (product(qkv), words, *scales), normal(2, num_tokens, WIDTH)


def by_xla(tokens, words, *scales):
    attention = Attention(HEADS, tokens.values.dtype)

    def with_gradient_of_bias(values, bias, present):
        # Biases are in the values already: zeros with their gradient are added.
        zeros = bias - jax.lax.stop_gradient(bias)
        return Product(values + zeros.astype(values.dtype), bias, present)

    tokens, words = (x and with_gradient_of_bias(*x) for x in (tokens, words))
    return attention.mix_by_xla(tokens, words, *scales, turns_of(tokens))


def by_kernel(*operands):
    return attention_kernel.attend(*operands, turns_of(operands[0]), HEADS, True)


def turns_of(tokens):
    return jnp.asarray(make_rotations(4, tokens.values.shape[1] // 4, 128))


@pytest.mark.parametrize(
    'num_tokens, num_words, dtype, noise', [(48, 0, 'float32', 2e-6), (16, 129, 'bfloat16', 2e-2)]
)
def test_results_and_gradients_are_those_of_xla(num_tokens, num_words, dtype, noise):
    operands, gradient = make(num_tokens, num_words, jnp.dtype(dtype))

    def with_gradients(function):
        @jax.jit
        def computed(gradient, *operands):
            out, back = jax.vjp(function, *operands)
            gradients = jax.tree.leaves(back(gradient))
            return out, *(x for x in gradients if x.dtype != jax.dtypes.float0)

        return computed(gradient, *operands)

    for ours, theirs in zip(with_gradients(by_kernel), with_gradients(by_xla), strict=True):
        assert ours.dtype == theirs.dtype
        difference = np.abs(np.float32(ours) - np.float32(theirs)).max()
        assert difference <= noise * np.abs(np.float32(theirs)).max()


class OnTpus(OneDevice):
    """Says that kernels can be called."""

    on_tpus = True


@pytest.fixture
def interpreted(monkeypatch):
    """Has models call the kernel, computed by this machine."""
    attend = attention_kernel.attend
    monkeypatch.setattr(attention_kernel, 'attend', lambda *operands: attend(*operands, True))
    monkeypatch.setattr(sharding.RowPinning, 'on_tpus', True)


@pytest.mark.parametrize('text', ['pooled', 'sequence'])
def test_a_model_has_the_same_gradients_with_the_kernel(interpreted, caplog, text):
    random = np.random.default_rng(1)
    x, t = random.normal(size=(2, 8, 8, 4)).astype(np.float32), np.float32([0.2, 0.7])
    of_texts = random.normal(size=(2, 24)).astype(np.float32)
    if text == 'sequence':
        of_texts = np.array([[5, 3, -1], [1, 2, 4]], np.int32)
    rows = x, t, of_texts, np.array([False, True])
    plain = DiT(128, 1, 1, 2, 2, jnp.float32, text=text, vocabulary=8 * (text == 'sequence'))
    # Blocks begin as the identity, without gradients.
    params = jax.tree.map(
        lambda leaf: np.float32(random.normal(size=leaf.shape) / 8),
        jax.eval_shape(plain.init, jax.random.key(0), *rows),
    )

    def gradients(model):
        return jax.jit(jax.grad(lambda params: jnp.sum(model.apply(params, *rows) ** 2)))(params)

    asked = plain.clone(attention='pallas', remat='dots', pin=OnTpus())
    for ours, theirs in zip(
        *(jax.tree.leaves(gradients(model)) for model in (asked, plain)), strict=True
    ):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert not caplog.records


# The tokens fill no tile, the columns of a head do not, or the tokens are too many.
@pytest.mark.parametrize(('rows', 'num_heads'), [(3, 1), (4, 2), (256, 1)])
def test_other_tokens_and_heads_are_left_to_xla_with_a_warning(
    interpreted, caplog, rows, num_heads
):
    model = DiT(128, 1, num_heads, 1, attention='pallas', pin=OnTpus())
    x = jnp.ones((1, rows, 4, 4))
    jax.eval_shape(model.init, jax.random.key(0), x, jnp.ones(1), jnp.ones((1, 24)))
    expected = f'of {rows * 4} tokens and 0 words with heads of {128 // num_heads}'
    assert [expected in record.message for record in caplog.records] == [True]
