"""A text as a sequence of vectors for attention, from token ids or an encoder's hidden states.

words, pooled = WordTable(vocabulary=4096, width=384)(tokens, drop_text)
words, pooled = WordStates(width=384)(states, drop_text)
Attention(num_heads=6)(x, words)     # see `dit`
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from train_lib.models.dense import Dense


class Words(NamedTuple):
    """The texts of a batch as sequences of vectors.

    Attributes:
        vectors: `(b, n, width)`.
        present: bool `(b, n)`, False for padding and for what is dropped. Attention needs one True
            in every row.
    """

    vectors: jax.Array
    present: jax.Array


class WordTable(nn.Module):
    """Looks up the vectors of tokens, each together with its neighbours.

    The order of words says which colour belongs to which thing. So a token's vector is a function
    of its own vector and those of its two neighbours in the text: a convolution of width 3. It
    needs no positions, and so has no greatest length.

    Attributes:
        vocabulary: number that all ids are below.
        width: width of the vectors.
        dtype: dtype of the computation; the table is float32.
    """

    vocabulary: int
    width: int
    dtype: jnp.dtype | type = jnp.bfloat16

    @nn.compact
    def __call__(
        self, tokens: jax.Array, drop_text: jax.Array | None = None
    ) -> tuple[Words, jax.Array]:
        """Returns the sequence and the mean of it.

        Args:
            tokens: ids int32 `(b, T)`, padded with -1.
            drop_text: bool `(b,)`, True where a text is to be ignored; None is False everywhere.

        Returns:
            `(words, pooled)`: words with `n = T + 1`, the first of which stands for no text and is
            always present; the mean of the tokens' vectors, `(b, width)`, zeros for an empty text.
        """
        table = self.param('table', nn.initializers.normal(1.0), (self.vocabulary, self.width))
        nothing = self.param('nothing', nn.initializers.normal(1.0), (self.width,))
        real = tokens >= 0
        own = jnp.where(real[..., None], table[tokens], 0).astype(self.dtype)
        around = jnp.pad(own, [(0, 0), (1, 1), (0, 0)])
        beside = jnp.concatenate([around[:, :-2], own, around[:, 2:]], -1)
        vectors = nn.silu(Dense(self.width, dtype=self.dtype, name='neighbours')(beside))

        return _sequence_and_mean(Words(vectors, real), nothing, drop_text)


class WordStates(nn.Module):
    """Normalizes and projects the hidden states of a text encoder.

    RMS norm with a learned scale, then a dense layer, as in Lumina-Next (Zhuo et al., 2024). This
    needs no statistics of the states.

    Attributes:
        width: width of the vectors.
        dtype: dtype of the computation.
    """

    width: int
    dtype: jnp.dtype | type = jnp.bfloat16

    @nn.compact
    def __call__(
        self, states: Words, drop_text: jax.Array | None = None
    ) -> tuple[Words, jax.Array]:
        """Returns the sequence and the mean of it, as `WordTable` does.

        Args:
            states: hidden states `(b, T, D)`; a text may have none.
            drop_text: as for `WordTable`.
        """
        nothing = self.param('nothing', nn.initializers.normal(1.0), (self.width,))
        normalized = nn.RMSNorm(dtype=self.dtype, name='norm')(states.vectors)
        vectors = Dense(self.width, dtype=self.dtype, name='projection')(normalized)
        return _sequence_and_mean(Words(vectors, states.present), nothing, drop_text)


def _sequence_and_mean(
    words: Words, nothing: jax.Array, drop_text: jax.Array | None
) -> tuple[Words, jax.Array]:
    """The words behind the vector `nothing`, without those that are dropped; the mean of all."""
    vectors, real = words
    dtype = vectors.dtype
    count = jnp.maximum(jnp.sum(real, 1, keepdims=True), 1)
    pooled = jnp.sum(jnp.where(real[..., None], vectors, 0), 1) / count.astype(dtype)
    kept = real if drop_text is None else real & ~drop_text[:, None]
    first = jnp.broadcast_to(nothing.astype(dtype), (len(vectors), 1, vectors.shape[-1]))
    sequence = Words(
        jnp.concatenate([first, vectors], 1),
        jnp.pad(kept, [(0, 0), (1, 0)], constant_values=True),
    )
    return sequence, pooled
