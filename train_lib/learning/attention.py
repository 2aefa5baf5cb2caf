"""Attention of a picture's tokens to each other and to words, by XLA, cuDNN or a TPU's kernel."""

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging

from train_lib.learning import attention_kernel
from train_lib.learning.attention_kernel import Product
from train_lib.learning.layers import Dense, DenseWithConstantBias, Dtype, OneDevice, keep
from train_lib.learning.word_vectors import Words

# cudnn: fused, on NVIDIA GPUs alone, in 16 bits. pallas: `attention_kernel` on a mesh of TPUs, for
# tokens and heads that it takes; else as xla.
ATTENTION = ('xla', 'cudnn', 'pallas')


@functools.cache  # warns once, however often a model is traced
def _kernel_takes(num_tokens: int, num_words: int, head_dim: int) -> bool:
    """Whether the kernel computes attention of these sizes; warns if it does not."""
    if attention_kernel.fits(num_tokens, head_dim, num_words):
        return True
    logging.warning(
        'model.attention=pallas: XLA computes the attention of %d tokens and %d words with heads '
        'of %d, because the kernel does not take these.',
        num_tokens,
        num_words,
        head_dim,
    )
    return False


class Attention(nn.Module):
    """Multi-head attention of tokens `(b, n, width)` to each other and to words."""

    num_heads: int
    dtype: Dtype = jnp.bfloat16
    implementation: Literal['xla', 'cudnn', 'pallas'] = 'xla'
    pin: OneDevice = OneDevice()

    @nn.compact
    def __call__(self, x: jax.Array, rotations: jax.Array, words: Words | None = None) -> jax.Array:
        """Returns what the tokens `x` gather from each other and from words, `(b, n, width)`.

        `rotations` are those of `make_rotations`.
        """
        _, num_tokens, width = x.shape
        head_dim = width // self.num_heads
        num_words = 0 if words is None else words.present.shape[1]
        by_kernel = False
        if self.implementation == 'pallas' and self.pin.on_tpus:
            by_kernel = _kernel_takes(num_tokens, num_words, head_dim)
        # The kernel sums the gradient of the bias: the layer must not do it again.
        dense = DenseWithConstantBias if by_kernel else Dense

        def multiply(inputs: jax.Array, count: int, name: str) -> Product:
            """Returns `count` matrices of `width` columns side by side."""
            layer = dense(count * width, dtype=self.dtype, name=name)
            values = keep(self.pin(layer(inputs)))
            return Product(values, layer.variables['params']['bias'])

        tokens = multiply(x, 3, 'qkv')
        context = None
        if words is not None:
            context = multiply(words.vectors, 2, 'words')._replace(present=words.present)
        ones = nn.initializers.ones
        query_scale = self.param('query_norm', ones, (head_dim,))
        key_scale = self.param('key_norm', ones, (head_dim,))
        mix = self._mix_by_kernel if by_kernel else self.mix_by_xla
        # What attention mixes is kept for the backward pass; scores are not.
        mixed = self.pin(mix(tokens, context, query_scale, key_scale, rotations))
        out = Dense(width, dtype=self.dtype, name='out')(keep(mixed))
        return keep(self.pin(out))

    def _mix_by_kernel(
        self, tokens: Product, words: Product | None, *scales_and_rotations: jax.Array
    ) -> jax.Array:
        """Computes as `mix_by_xla` does, by the kernel for TPUs."""

        def attend(rows: Any, shared: Any) -> jax.Array:
            """Returns what the heads mix for the rows of one device."""
            values, word_values, present = rows
            bias, word_bias, *others = shared
            words = None
            if word_values is not None:
                words = Product(word_values, word_bias, present)
            return attention_kernel.attend(Product(values, bias), words, *others, self.num_heads)

        word_values = word_bias = present = None
        if words is not None:
            word_values, word_bias, present = words
        rows = tokens.values, word_values, present
        shared = tokens.bias, word_bias, *scales_and_rotations
        # A device calls the kernel with its rows alone: XLA cannot split a call of one.
        return self.pin.map(attend, rows, shared)

    def mix_by_xla(
        self,
        tokens: Product,
        words: Product | None,
        query_scale: jax.Array,
        key_scale: jax.Array,
        rotations: jax.Array,
    ) -> jax.Array:
        """Returns the values that the heads mix, side by side: `(b, n, width)`.

        Args:
            tokens: Queries, keys and values of the tokens.
            words: Keys and values of words; None without a text.
            query_scale: Scale of the norm of the queries, float32 `(width / num_heads,)`.
            key_scale: Scale of the norm of the keys, of the same shape.
            rotations: As `make_rotations` returns them.
        """
        query, key, value = self._split_heads(tokens.values, 3)
        query = attention_kernel.normalize(query, query_scale)
        query = attention_kernel.rotate_pairs(query, rotations[:, None])
        key = attention_kernel.normalize(key, key_scale)
        key = attention_kernel.rotate_pairs(key, rotations[:, None])
        mask = None
        if words is not None:
            word_keys, word_values = self._split_heads(words.values, 2)
            # Not rotated: the vectors of words hold their order already.
            word_keys = attention_kernel.normalize(word_keys, key_scale)
            key = jnp.concatenate([key, word_keys], 1)
            value = jnp.concatenate([value, word_values], 1)
            # Behind the tokens of the picture, which are all present.
            num_tokens = query.shape[1]
            mask = jnp.pad(words.present, [(0, 0), (num_tokens, 0)], constant_values=True)
            mask = mask[:, None, None]
        mixed = jax.nn.dot_product_attention(
            query.astype(value.dtype),
            key.astype(value.dtype),
            value,
            mask=mask,
            # 'pallas' comes here where the kernel does not run.
            implementation='cudnn' if self.implementation == 'cudnn' else 'xla',
        )
        return mixed.reshape(*mixed.shape[:2], -1)

    def _split_heads(self, x: jax.Array, count: int) -> list[jax.Array]:
        """Cuts a product into queries, keys and values: each `(b, n, heads, width / heads)`."""
        heads = x.reshape(*x.shape[:2], count * self.num_heads, -1)
        return jnp.split(heads, count, axis=2)
