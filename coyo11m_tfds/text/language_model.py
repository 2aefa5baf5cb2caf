"""Gemma 3 and Qwen3 in Flax: tokens in, hidden states out; no language-model head.

Architectures: Gemma Team, "Gemma 3 Technical Report" (2025); Qwen Team, "Qwen3 Technical Report"
(2025). Padding is on the right. The attention is causal, so the states of real tokens do not depend
on the padding, and only code that averages states or attends to them needs a mask.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from coyo11m_tfds.process.jax_environment import promote_as_usual

Dtype = jnp.dtype | type


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al., "RoFormer", 2021) for one kind of layer.

    `factor` divides positions (Chen et al., "Extending Context Window of Large Language Models via
    Position Interpolation", 2023; `rope_scaling` of type `linear`).
    """

    base: float  # of the geometric series of wavelengths
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of a model; `jax_encoder` lists their names in transformers' config.json.

    The defaults of the last fields are those of Qwen3.

    Attributes:
        num_kv_heads: Number of heads of keys and values, shared by equal groups of queries' heads
            (Ainslie et al., "GQA", 2023).
        is_local: For each layer, whether a token attends only to the last `window` tokens (with
            itself), or to all tokens before it.
    """

    vocab_size: int  # rows of the embedding table
    width: int  # of a hidden state
    mlp_width: int  # of the feed-forward layers
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int  # width of a head
    is_local: tuple[bool, ...]
    max_positions: int  # tokens of the longest text for the model
    query_scalar: float  # its square root divides attention logits
    norm_epsilon: float = 1e-6  # added under the root in all norms
    global_rope: Rope = Rope(1_000_000.0)  # positions in layers that are not local
    local_rope: Rope = Rope(10_000.0)
    window: int = 0  # of local layers, in tokens
    activation: Callable[[jax.Array], jax.Array] = nn.silu  # of the gate
    scale_embeddings: bool = False  # by the square root of the width
    post_norms: bool = False  # after attention and feed-forward, before they are added

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.is_local)

    def flops(self, num_tokens: int) -> int:
        """Returns the forward FLOPs of a text's matrix products, with padding and masked scores."""
        # Queries and outputs have as many heads, keys and values have fewer.
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        # A gated feed-forward layer has three matrices.
        weights = self.width * (heads + 3 * self.mlp_width)
        # Products with keys and with values.
        scores = 2 * num_tokens * self.num_heads * self.head_dim
        # A product and a sum for each token and number.
        return 2 * num_tokens * self.depth * (weights + scores)


# Sizes of models on the hub by name, for programs that only compile them.
PUBLISHED = {
    'Qwen/Qwen3-0.6B': LanguageModelConfig(
        vocab_size=151_936,
        width=1024,
        mlp_width=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        is_local=(False,) * 28,
        max_positions=40_960,
        query_scalar=128,
    ),
    'google/gemma-3-270m': LanguageModelConfig(
        vocab_size=262_144,
        width=640,
        mlp_width=2048,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        is_local=(*[True] * 5, False) * 3,
        max_positions=32_768,
        query_scalar=256,
        window=512,
        activation=nn.gelu,
        scale_embeddings=True,
        post_norms=True,
    ),
}


@promote_as_usual
def abstract_params(config: LanguageModelConfig, dtype: Dtype) -> dict[str, Any]:
    """Returns the weights of `LanguageModel(config)` as `jax.ShapeDtypeStruct`.

    Scales of norms are float32, the rest is of `dtype`.
    """
    init = LanguageModel(config).init
    one_token = jnp.zeros((1, 1), jnp.int32)
    params = jax.eval_shape(init, jax.random.key(0), one_token)['params']

    def with_dtype(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Returns the shape of one array with its dtype."""
        if path[-1].key == 'scale':
            return jax.ShapeDtypeStruct(leaf.shape, np.float32)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree_util.tree_map_with_path(with_dtype, params)


def mean_states(states: jax.Array, lengths: jax.Array) -> jax.Array:
    """Averages hidden states `(b, T, width)` over the first `lengths` `(b,)` tokens of each row.

    Returns:
        float32 `(b, width)`; zeros if a length is 0.
    """
    is_real = jnp.arange(states.shape[1]) < lengths[:, None]
    total = jnp.sum(states.astype(jnp.float32), axis=1, where=is_real[..., None])
    return total / jnp.maximum(lengths, 1)[:, None]


def _rotation(rope: Rope, tokens: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of every position and frequency, each float32 `(tokens, 1, head_dim / 2)`."""
    # In float64, so that each is rounded only once.
    frequencies = rope.base ** -(np.arange(0, head_dim, 2) / head_dim)
    positions = np.arange(tokens)[:, None, None] / rope.factor
    angles = positions * frequencies
    cosine = np.cos(angles).astype(np.float32)
    sine = np.sin(angles).astype(np.float32)
    return cosine, sine


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + head_dim / 2) of `(b, T, heads, head_dim)` by their angles."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention with normalized and rotated queries and keys.

    Maps states `(b, T, width)`, cosines and sines of `_rotation`, and a mask, bool `(T, T)`, True
    where a token attends to another, to `(b, T, width)`.
    """

    config: LanguageModelConfig
    dtype: Dtype

    @nn.compact
    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns what the states `x` gather from each other; see above."""
        config = self.config

        def heads(count: int, name: str) -> jax.Array:
            """Returns the product with a layer by heads, `(b, T, count, head_dim)`."""
            width = count * config.head_dim
            y = nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)(x)
            return y.reshape(*x.shape[:-1], count, config.head_dim)

        # Before the rotation, which keeps lengths.
        norm = functools.partial(nn.RMSNorm, config.norm_epsilon, self.dtype)
        query = heads(config.num_heads, 'query')
        query = norm(name='query_norm')(query)
        key = heads(config.num_kv_heads, 'key')
        key = norm(name='key_norm')(key)
        mixed = jax.nn.dot_product_attention(
            _rotate(query, cos, sin),
            _rotate(key, cos, sin),
            heads(config.num_kv_heads, 'value'),
            mask=mask[None, None],
            scale=config.query_scalar**-0.5,
        )
        mixed = mixed.reshape(*x.shape[:-1], -1)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name='out')(mixed)


class GatedMLP(nn.Module):
    """Gated feed-forward layer; the shape stays `(b, T, width)`.

    Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    width: int
    activation: Callable[[jax.Array], jax.Array]
    dtype: Dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the states after the layer."""

        def dense(width: int, name: str) -> nn.Dense:
            """Returns a dense layer without a bias."""
            return nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)

        gate = self.activation(dense(self.width, 'gate')(x))
        values = dense(self.width, 'up')(x)
        return dense(x.shape[-1], 'down')(gate * values)


class LanguageModelLayer(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it, and after it in Gemma."""

    config: LanguageModelConfig
    dtype: Dtype

    @nn.compact
    def __call__(
        self, x: jax.Array, is_local: jax.Array, kinds: tuple[tuple[jax.typing.ArrayLike, ...], ...]
    ) -> tuple[jax.Array, None]:
        """Applies the layer to hidden states `(b, T, width)`; `nn.scan` needs this signature.

        `kinds` is `(cos, sin, mask)` for local layers, and for all others.
        """
        config = self.config

        def norm(name: str, y: jax.Array) -> jax.Array:
            """Returns states, normalized by the norm of this name."""
            return nn.RMSNorm(config.norm_epsilon, self.dtype, name=name)(y)

        # Chosen by a value: scanned layers are one program, which cannot differ between them.
        cos, sin, mask = jax.tree.map(lambda a, b: jnp.where(is_local, a, b), *kinds)
        attend = GroupedQueryAttention(config, self.dtype, name='attention')
        y = attend(norm('attention_norm', x), cos, sin, mask)
        if config.post_norms:
            y = norm('post_attention_norm', y)
        x = x + y
        mlp = GatedMLP(config.mlp_width, config.activation, self.dtype, name='mlp')
        y = mlp(norm('mlp_norm', x))
        if config.post_norms:
            y = norm('post_mlp_norm', y)
        return x + y, None


class LanguageModel(nn.Module):
    """A causal language model, from token ids to the last hidden states."""

    config: LanguageModelConfig
    dtype: Dtype = jnp.bfloat16  # of computation and result; norms and softmax are float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the last hidden states, `dtype` `(b, T, width)`.

        Args:
            tokens: Token ids, int32 `(b, T)`, each text at the start of its row. The ids after a
                text are arbitrary, and so are their states.
        """
        config = self.config
        length = tokens.shape[1]
        shape = config.vocab_size, config.width
        init = nn.initializers.normal(1 / np.sqrt(config.width))
        table = self.param('embedding', init, shape)
        x = table[tokens].astype(self.dtype)
        if config.scale_embeddings:
            # The factor is rounded to the dtype, as it was when the model was trained.
            x *= jnp.asarray(np.sqrt(config.width), self.dtype)

        # Once for all layers, each of which chooses one of the two kinds.
        distance = np.arange(length)[:, None] - np.arange(length)
        causal = distance >= 0
        near = causal & (distance < config.window)
        local_cos, local_sin = _rotation(config.local_rope, length, config.head_dim)
        global_cos, global_sin = _rotation(config.global_rope, length, config.head_dim)
        kinds = ((local_cos, local_sin, near), (global_cos, global_sin, causal))
        # One scanned module, so that compile time does not grow with depth.
        layers = nn.scan(
            LanguageModelLayer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            in_axes=(0, nn.broadcast),
            length=config.depth,
        )(config, self.dtype, name='layers')
        x, _ = layers(x, jnp.array(config.is_local), kinds)
        return nn.RMSNorm(config.norm_epsilon, self.dtype, name='norm')(x)
