"""A text as token ids: a learned table of them, and what attention sees of a sequence.

words, pooled = WordTable(vocabulary=4096, width=384)(tokens, drop_text)
Attention(num_heads=6)(x, words)     # see `dit`
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from train_lib.models.dense import Dense


class Words(NamedTuple):
    """The texts of a batch as attention sees them.

    Attributes:
        vectors: `(b, n, width)`.
        present: bool `(b, n)`, False for padding and for what is dropped. At least one of a row is
            True.
    """

    vectors: jax.Array
    present: jax.Array


class WordTable(nn.Module):
    """Looks tokens up, each together with those beside it.

    Which colour belongs to which thing is said by who stands beside whom, so that a token's vector
    is made of its own and its two neighbours' in the table: a convolution of width 3. It needs no
    positions, and so no greatest length.

    Attributes:
        vocabulary: ids are less than this.
        width: of the vectors.
        dtype: of the computation; the table is float32.
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

        count = jnp.maximum(jnp.sum(real, 1, keepdims=True), 1)
        pooled = jnp.sum(jnp.where(real[..., None], vectors, 0), 1) / count.astype(self.dtype)
        kept = real if drop_text is None else real & ~drop_text[:, None]
        first = jnp.broadcast_to(nothing.astype(self.dtype), (len(tokens), 1, self.width))
        words = Words(
            jnp.concatenate([first, vectors], 1),
            jnp.pad(kept, [(0, 0), (1, 0)], constant_values=True),
        )
        return words, pooled
