"""The kernel computes what XLA does, by running it step by step on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_lib.models import attention_kernel
from train_lib.models.dit import Attention, Words

HEADS, WIDTH = 2, 256


def make(num_tokens: int, num_words: int, dtype):
    random = np.random.default_rng(num_tokens + num_words)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    qkv, scales = normal(2, num_tokens, 3 * WIDTH), 1 + normal(2, 128).astype(jnp.float32) / 4
    words = present = None
    if num_words:
        words = normal(2, num_words, 2 * WIDTH)
        # Of the second text all but the first is dropped.
        present = jnp.asarray(random.random((2, num_words)) > 0.3).at[:, 0].set(True)
        present = present.at[1, 1:].set(False)
    return (qkv, *scales, words, present), normal(2, num_tokens, WIDTH)


def by_xla(qkv, query_scale, key_scale, words, present):
    attention = Attention(HEADS, qkv.dtype)
    of_words = () if words is None else (words, present)
    return attention.mix_by_xla((query_scale, key_scale), qkv, *of_words)


def by_kernel(*operands):
    return attention_kernel.attend(*operands, HEADS, True)


@pytest.mark.parametrize(
    'num_tokens, num_words, dtype, noise',
    [(48, 0, 'float32', 2e-6), (32, 13, 'float32', 2e-6), (16, 129, 'bfloat16', 2e-2)],
)
def test_results_and_gradients_are_those_of_xla(num_tokens, num_words, dtype, noise):
    operands, gradient = make(num_tokens, num_words, jnp.dtype(dtype))
    *values, present = operands
    count = len([value for value in values if value is not None])

    def with_gradients(function):
        out, back = jax.vjp(
            lambda *some: function(*some, *values[count:], present), *values[:count]
        )
        return out, *back(gradient)

    for ours, theirs in zip(with_gradients(by_kernel), with_gradients(by_xla), strict=True):
        assert ours.dtype == theirs.dtype
        difference = np.abs(np.float32(ours) - np.float32(theirs)).max()
        assert difference <= noise * np.abs(np.float32(theirs)).max()


@pytest.mark.parametrize(
    'num_tokens, head_dim, num_words, fits',
    [
        (256, 128, 0, True),
        (256, 128, 129, True),
        (256, 64, 0, False),  # a head fills no tile
        (250, 128, 0, False),
        (1024, 128, 0, False),
    ],
)
def test_what_does_not_fit_is_left_to_xla(num_tokens, head_dim, num_words, fits):
    assert attention_kernel.fits(num_tokens, head_dim, num_words) == fits


@pytest.mark.parametrize('with_words', [False, True])
def test_a_model_that_asks_for_the_kernel_runs_without_a_tpu(with_words):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, WIDTH)), jnp.float32)
    words = Words(x[:, :5], jnp.arange(5) < jnp.array([[5], [2]])) if with_words else None
    plain = Attention(HEADS, jnp.float32)
    params = plain.init(jax.random.key(0), x, words)
    asked = Attention(HEADS, jnp.float32, 'pallas')
    np.testing.assert_array_equal(asked.apply(params, x, words), plain.apply(params, x, words))
