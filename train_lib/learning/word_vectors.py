"""Texts as sequences of vectors, made from token ids or from hidden states of a text encoder."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from train_lib.learning.layers import Dense, Dtype


class Words(NamedTuple):
    """The texts of a batch as sequences of vectors; attention needs a present one in every row."""

    vectors: jax.Array  # `(b, n, width)`
    present: jax.Array  # bool `(b, n)`, False for padding and dropped texts


class WordVectors(nn.Module):
    """Makes the vectors of a text's words from token ids or from hidden states of a text encoder.

    Token ids are looked up in a learned table. The order of words says which colour belongs to
    which thing, so the vector of a token is a function of its own entry and of those of its two
    neighbours: a convolution of width 3, which needs no positions and has no length limit. Hidden
    states get an RMS norm with a learned scale and a dense layer, as in Lumina-Next (Zhuo et al.,
    2024), and need no statistics.
    """

    vocabulary: int  # all ids are below this number
    width: int
    dtype: Dtype = jnp.bfloat16  # of the computation; the table is float32

    @nn.compact
    def __call__(
        self, text: jax.Array | Words, drop_text: jax.Array | None = None
    ) -> tuple[Words, jax.Array]:
        """Returns the words behind a vector for no text, and their mean, `(b, width)`.

        Args:
            text: Token ids, int32 `(b, T)`, padded with -1, or hidden states `(b, T, D)`; a text
                may have none.
            drop_text: bool `(b,)`, True for texts to ignore; None to ignore none. The mean includes
                their words, too.
        """
        if isinstance(text, Words):
            vectors = self._project_states(text.vectors)
            is_word = text.present
        else:
            is_word = text >= 0
            vectors = self._look_up(text, is_word)
        nothing = self.param('nothing', nn.initializers.normal(1.0), (self.width,))

        # At least 1: a text without words has a mean of zeros.
        count = jnp.maximum(jnp.sum(is_word, 1, keepdims=True), 1)
        vectors_or_0 = jnp.where(is_word[..., None], vectors, 0)
        total = jnp.sum(vectors_or_0, 1)
        pooled = total / count.astype(self.dtype)
        present = is_word
        if drop_text is not None:
            present = is_word & ~drop_text[:, None]
        # Attention divides by the sum over what is present: a dropped text leaves this vector.
        first = jnp.broadcast_to(nothing.astype(self.dtype), (len(vectors), 1, self.width))
        present = jnp.pad(present, [(0, 0), (1, 0)], constant_values=True)
        sequence = jnp.concatenate([first, vectors], 1)
        return Words(sequence, present), pooled

    def _project_states(self, states: jax.Array) -> jax.Array:
        """Returns the vectors of hidden states `(b, T, D)`."""
        normalized = nn.RMSNorm(dtype=self.dtype, name='norm')(states)
        return Dense(self.width, dtype=self.dtype, name='projection')(normalized)

    def _look_up(self, ids: jax.Array, is_word: jax.Array) -> jax.Array:
        """Returns the vectors of token ids `(b, T)`, from their entries and their neighbours'."""
        table = self.param('table', nn.initializers.normal(1.0), (self.vocabulary, self.width))
        is_word = is_word[..., None]
        entries = jnp.asarray(table)[ids]
        # Padding, -1, has taken the last entry.
        entries = jnp.where(is_word, entries, 0).astype(self.dtype)
        # Beyond the ends of a text lie zeros, as beyond its last word.
        padded = jnp.pad(entries, [(0, 0), (1, 1), (0, 0)])
        before = padded[:, :-2]
        behind = padded[:, 2:]
        triples = jnp.concatenate([before, entries, behind], -1)
        mix = Dense(self.width, dtype=self.dtype, name='neighbours')
        return nn.silu(mix(triples))
