"""Diffusion transformer (DiT) with adaptive layer norm, conditioned on time and a text.

Architecture: Peebles & Xie, "Scalable Diffusion Models with Transformers" (2023), block adaLN-Zero,
with query and key normalization (Dehghani et al., "Scaling Vision Transformers to 22 Billion
Parameters", 2023), rotary position embedding besides the fixed positions, and the text embedding
instead of the class label. For token ids or hidden states of a text encoder, this is the mean of
the words' vectors. With `text='sequence'`, every block's attention sees these vectors next to the
picture's own tokens, as in Nichol et al., "GLIDE" (2021). The blocks are one scanned module, so
compile time and program size do not grow with the depth unless `unroll` does.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict
from jax.ad_checkpoint import checkpoint_name

from coyo11m_tfds.process.errors import FieldError
from train_lib.learning import attention_kernel
from train_lib.learning.attention_kernel import Product

Dtype = jnp.dtype | type


class OneDevice:
    """Keeps all activations on one device; `sharding.RowPinning` is the same for a mesh."""

    on_tpus = False  # whether `map` can call kernels for TPUs

    def __call__(self, x: jax.Array) -> jax.Array:
        """Keeps `(b, ...)` on the devices of its rows."""
        return x

    def map(self, function: Callable, rows: Any, shared: Any) -> Any:
        """Calls `function(rows, shared)` with each device's rows, `(b, ...)`; returns all rows."""
        return function(rows, shared)


_KEPT = 'kept'

# What of each block is kept for the backward pass, besides its input; it computes the rest again.
REMAT = {
    'none': None,
    # Products with weights, and what attention mixes: 10 widths a token in bfloat16, no scores.
    'dots': jax.checkpoint_policies.save_only_these_names(_KEPT),
    'full': jax.checkpoint_policies.nothing_saveable,
}
POOLED, SEQUENCE = 'pooled', 'sequence'
TEXTS = POOLED, SEQUENCE  # what of a text conditions the blocks
VELOCITY, LATENTS = PREDICTIONS = 'velocity', 'latents'  # what the last layer computes
# cudnn: fused, on NVIDIA GPUs alone, in 16 bits. pallas: `attention_kernel` on a mesh of TPUs, for
# tokens and heads that it takes; else as xla.
ATTENTION = ('xla', 'cudnn', 'pallas')

_TIME_FEATURES = 256
_MAX_PERIOD = 10_000.0  # of the sinusoids; as in DiT and Vaswani et al. (2017)
_ROTARY_PERIOD = 100.0  # tokens; a picture has 16 in a row
_TIME_SCALE = 1_000.0  # t in [0, 1] to the range the sinusoids are made for
# Divisor of the velocity at lesser times, as in Li & He, "Back to Basics: Let Denoising Generative
# Models Denoise" (2025), arXiv:2511.13720.
_LEAST_TIME = 0.05


# --- The dense layer ----------------------------------------------------------------------------

# `flax.linen.Dense` with kernel gradients in float32. Flax casts the kernel before the product, so
# its gradient has the type of the product, and devices add up their parts of it in that type: in
# bfloat16 each addition rounds to 8 bits. Here the product for the gradient returns the type of the
# kernel: float32, in which the matrix units accumulate anyway and the devices add up, unless the
# step casts the kernel (`gradient_dtype` of a configuration).


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(x: jax.Array, kernel: jax.Array, dimension_numbers, precision=None) -> jax.Array:
    return jax.lax.dot_general(x, kernel.astype(x.dtype), dimension_numbers, precision=precision)


def _dot_forward(x, kernel, dimension_numbers, precision):
    return _dot(x, kernel, dimension_numbers, precision), (x, kernel)


def _dot_backward(dimension_numbers, precision, saved, gradient):
    x, kernel = saved
    last, first = (((gradient.ndim - 1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))
    grad_x = jax.lax.dot_general(gradient, kernel.astype(x.dtype), last, precision=precision)
    # As matrices: over two axes, XLA on CPUs would copy both factors, an eighth of a step's time.
    rows, gradients = (a.reshape(-1, a.shape[-1]) for a in (x, gradient))
    grad_kernel = jax.lax.dot_general(
        rows, gradients, first, precision=precision, preferred_element_type=kernel.dtype
    )
    return grad_x, grad_kernel


_dot.defvjp(_dot_forward, _dot_backward)


def _promote_all_but_kernel(inputs, kernel, bias, *, dtype):
    inputs, bias = promote_dtype(inputs, bias, dtype=dtype)
    return inputs, kernel, bias


def _promote_with_constant_bias(inputs, kernel, bias, *, dtype):
    return _promote_all_but_kernel(inputs, kernel, jax.lax.stop_gradient(bias), dtype=dtype)


Dense = functools.partial(
    nn.Dense,
    promote_dtype=_promote_all_but_kernel,  # type: ignore[arg-type]  # declared for any arrays
    dot_general=_dot,
)
_DenseWithConstantBias = functools.partial(Dense, promote_dtype=_promote_with_constant_bias)


# --- Texts as sequences -------------------------------------------------------------------------


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
        """Returns the words behind a vector for no text, and their mean `(b, width)`.

        Ids are int32 `(b, T)`, padded with -1, states `(b, T, D)`; a text may have none.
        """
        dense = functools.partial(Dense, self.width, dtype=self.dtype)
        if isinstance(text, Words):
            normalized = nn.RMSNorm(dtype=self.dtype, name='norm')(text.vectors)
            vectors, real = dense(name='projection')(normalized), text.present
        else:
            table = self.param('table', nn.initializers.normal(1.0), (self.vocabulary, self.width))
            real = text >= 0
            entries = jnp.where(real[..., None], jnp.asarray(table)[text], 0).astype(self.dtype)
            padded = jnp.pad(entries, [(0, 0), (1, 1), (0, 0)])
            triples = jnp.concatenate([padded[:, :-2], entries, padded[:, 2:]], -1)
            vectors = nn.silu(dense(name='neighbours')(triples))
        nothing = self.param('nothing', nn.initializers.normal(1.0), (self.width,))

        count = jnp.maximum(jnp.sum(real, 1, keepdims=True), 1)
        pooled = jnp.sum(jnp.where(real[..., None], vectors, 0), 1) / count.astype(self.dtype)
        present = real if drop_text is None else real & ~drop_text[:, None]
        # Attention divides by the sum over what is present: a dropped text leaves this vector.
        first = jnp.broadcast_to(nothing.astype(self.dtype), (len(vectors), 1, self.width))
        present = jnp.pad(present, [(0, 0), (1, 0)], constant_values=True)
        return Words(jnp.concatenate([first, vectors], 1), present), pooled


def sincos_positions_2d(rows: int, columns: int, width: int) -> np.ndarray:
    """Returns sine-cosine vectors of positions, float32 `(rows * columns, width)`, row by row."""
    angles = _angles(rows, columns, _MAX_PERIOD, width // 4)
    vectors = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return np.concatenate(list(vectors), axis=-1).astype(np.float32)


def make_rotations(rows: int, columns: int, head_dim: int) -> np.ndarray:
    """Returns rotations of queries and keys by position, `(rows * columns, 2 * head_dim)`."""
    # Rotary position embedding (Su et al., "RoFormer", 2021), half of a head for each axis, with
    # the period of Heo et al. (2024), section 3.2.
    angles = np.concatenate(list(_angles(rows, columns, _ROTARY_PERIOD, head_dim // 4)), axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([cosine, cosine, -sine, sine], axis=-1).astype(np.float32)


def _angles(rows: int, columns: int, period: float, count: int) -> np.ndarray:
    """The angles of each axis, position and frequency, `(2, rows * columns, count)`."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing='ij'))
    return grid.reshape(2, -1, 1) * period ** -(np.arange(count) / count)


def time_features(t: jax.Array) -> jax.Array:
    """Returns sinusoids of times `(b,)` in [0, 1]: float32 `(b, 256)`."""
    # In float64, so that each is rounded only once.
    frequencies = _TIME_SCALE * _MAX_PERIOD ** -np.arange(0, 1, 2 / _TIME_FEATURES)
    angles = t.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    return x * (1 + scale[:, None]) + shift[:, None]


class Conditioning(nn.Module):
    """Embeds the time, the text and the crop, and adds the embeddings: `(b, width)` in `dtype`."""

    width: int
    crops: int = 1
    dtype: Dtype = jnp.bfloat16

    @nn.compact
    def __call__(
        self, t: jax.Array, text: jax.Array, drop_text: jax.Array | None, crop: jax.Array | None
    ) -> jax.Array:
        def dense(name: str, **options: Any) -> nn.Module:
            return Dense(self.width, dtype=self.dtype, name=name, **options)

        condition = dense('time_2')(nn.silu(dense('time_1')(time_features(t))))
        if text.shape[1]:
            words = dense('text_1')(text)
            # Stands in for the text where it is dropped: what guidance calls unconditional.
            nothing = self.param('no_text', nn.initializers.normal(0.02), (self.width,))
            if drop_text is not None:
                words = jnp.where(drop_text[:, None], nothing.astype(self.dtype), words)
            condition += dense('text_2')(nn.silu(words))
        if self.crops == 1:
            return condition
        # Nothing is added for the middle crop, so drawing needs to know of none.
        index = jnp.zeros(t.shape, jnp.int32) if crop is None else crop % self.crops
        one_hot = jax.nn.one_hot(index - 1, self.crops - 1, dtype=self.dtype)
        embed = dense('crops', use_bias=False, kernel_init=nn.initializers.zeros)
        return condition + embed(one_hot)


@functools.cache  # warns once, however often a model is traced
def _kernel_takes(num_tokens: int, num_words: int, head_dim: int) -> bool:
    if attention_kernel.fits(num_tokens, head_dim, num_words):
        return True
    logging.warning(
        'model.attention=pallas: XLA computes the attention of %d tokens and %d words with heads '
        'of %d, because the kernel does not take these.',
        *(num_tokens, num_words, head_dim),
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
        width = x.shape[-1]
        head_dim = width // self.num_heads
        num_words = words.present.shape[1] if words is not None else 0
        by_kernel = self.implementation == 'pallas' and self.pin.on_tpus
        by_kernel = by_kernel and _kernel_takes(x.shape[1], num_words, head_dim)

        def product(inputs: jax.Array, count: int, name: str, *present: jax.Array) -> Product:
            # The kernel sums the gradient of the bias: the layer must not do it again.
            dense = _DenseWithConstantBias if by_kernel else Dense
            layer = dense(count * width, dtype=self.dtype, name=name)
            values = checkpoint_name(self.pin(layer(inputs)), _KEPT)
            return Product(values, layer.variables['params']['bias'], *present)

        tokens = product(x, 3, 'qkv')
        context = product(words.vectors, 2, 'words', words.present) if words is not None else None
        ones = nn.initializers.ones
        query_scale = self.param('query_norm', ones, (head_dim,))
        key_scale = self.param('key_norm', ones, (head_dim,))
        mix = self._mix_by_kernel if by_kernel else self.mix_by_xla
        mixed = self.pin(mix(tokens, context, query_scale, key_scale, rotations))
        out = Dense(width, dtype=self.dtype, name='out')(checkpoint_name(mixed, _KEPT))
        return checkpoint_name(self.pin(out), _KEPT)

    def _mix_by_kernel(
        self, tokens: Product, words: Product | None, *scales_and_rotations: jax.Array
    ) -> jax.Array:
        def attend(rows, shared):
            (values, word_values, present), (bias, word_bias, *others) = rows, shared
            words = None if word_values is None else Product(word_values, word_bias, present)
            return attention_kernel.attend(Product(values, bias), words, *others, self.num_heads)

        # A device calls the kernel with its rows alone: XLA cannot split a call of one.
        word_values, word_bias, present = words or (None, None, None)
        rows = tokens.values, word_values, present
        return self.pin.map(attend, rows, (tokens.bias, word_bias, *scales_and_rotations))

    def mix_by_xla(
        self,
        tokens: Product,
        words: Product | None,
        query_scale: jax.Array,
        key_scale: jax.Array,
        rotations: jax.Array,
    ) -> jax.Array:
        query, key, value = self._heads(tokens.values, 3)
        query, key = (
            attention_kernel.rotate_pairs(attention_kernel.normalize(x, scale), rotations[:, None])
            for x, scale in ((query, query_scale), (key, key_scale))
        )
        mask = None
        if words is not None:
            word_keys, word_values = self._heads(words.values, 2)
            # Not rotated: the vectors of words hold their order already.
            word_keys = attention_kernel.normalize(word_keys, key_scale)
            key = jnp.concatenate([key, word_keys], 1)
            value = jnp.concatenate([value, word_values], 1)
            mask = jnp.pad(words.present, [(0, 0), (query.shape[1], 0)], constant_values=True)
            mask = mask[:, None, None]
        mixed = jax.nn.dot_product_attention(
            query.astype(value.dtype),
            key.astype(value.dtype),
            value,
            mask=mask,
            implementation='cudnn' if self.implementation == 'cudnn' else 'xla',
        )
        return mixed.reshape(*mixed.shape[:2], -1)

    def _heads(self, x: jax.Array, count: int) -> list[jax.Array]:
        """Cuts a product into queries, keys and values: each `(b, n, heads, width / heads)`."""
        return jnp.split(x.reshape(*x.shape[:2], count * self.num_heads, -1), count, axis=2)


class Block(nn.Module):
    """One transformer block; at the start of training it is the identity (adaLN-Zero)."""

    num_heads: int
    mlp_ratio: float = 4
    dtype: Dtype = jnp.bfloat16
    attention: Literal['xla', 'cudnn', 'pallas'] = 'xla'
    pin: OneDevice = OneDevice()

    @nn.compact
    def __call__(
        self, x: jax.Array, condition: jax.Array, rotations: jax.Array, words: Words | None = None
    ) -> jax.Array:
        x, condition = self.pin(x), self.pin(condition)
        width = x.shape[-1]
        zeros = nn.initializers.zeros
        dense = Dense(6 * width, dtype=self.dtype, kernel_init=zeros, name='modulation')
        modulation = checkpoint_name(dense(condition), _KEPT)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, axis=-1)

        h = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)(x)
        fields = self.num_heads, self.dtype, self.attention, self.pin
        attention = Attention(*fields, name='attention')
        h = attention(_modulate(h, shift_1, scale_1), rotations, words)
        x = x + gate_1[:, None] * h

        h = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)(x)
        h = _modulate(h, shift_2, scale_2)
        hidden = Dense(int(self.mlp_ratio * width), dtype=self.dtype, name='mlp_1')(h)
        h = self.pin(nn.gelu(checkpoint_name(hidden, _KEPT)))
        h = checkpoint_name(Dense(width, dtype=self.dtype, name='mlp_2')(h), _KEPT)
        return self.pin(x + gate_2[:, None] * h)


class DiT(nn.Module):
    """Predicts the velocity of rectified flow.

    Attributes:
        width: Width of the tokens; a multiple of 4 times `num_heads`.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        patch_size: Side of the square of latent positions that makes a token.
        mlp_ratio: Width of a block's hidden layer divided by the width of the tokens.
        dtype: Dtype of the computation. Parameters and the result are float32.
        remat: Values of a block that are kept for the backward pass, a key of `REMAT`.
        attention: Implementation of attention, one of `ATTENTION`.
        text: What of a text conditions the blocks, one of `TEXTS`.
        prediction: What the last layer computes, one of `PREDICTIONS`. The clean latents x give the
            velocity (z - x) / t at z and time t; the result is always the velocity.
        vocabulary: All token ids are below this number; 0 if texts are embeddings.
        crops: Number of crops of an image that the model distinguishes; 1 for no distinction.
        unroll: Blocks in one iteration of the compiled loop. With all 6 blocks of the tiny model in
            one, a step takes 13% less time on 2 CPU cores. On TPUs, large models gain a quarter
            (docs/pods.md); the price is a longer compilation.
        pin: Places activations `(b, ...)` on devices (`sharding.RowPinning`) before and after each
            product. Without it, XLA's partitioner splits them like the weights and moves them.
    """

    width: int
    depth: int
    num_heads: int
    patch_size: int
    mlp_ratio: float = 4
    dtype: Dtype = jnp.bfloat16
    remat: str = 'none'
    attention: Literal['xla', 'cudnn', 'pallas'] = 'xla'
    text: str = POOLED
    prediction: str = VELOCITY
    vocabulary: int = 0
    crops: int = 1
    unroll: int = 1
    pin: OneDevice = OneDevice()

    def __post_init__(self):
        super().__post_init__()
        choices = {
            'remat': REMAT,
            'attention': ATTENTION,
            'text': TEXTS,
            'prediction': PREDICTIONS,
        }
        for field, values in choices.items():
            if (value := getattr(self, field)) not in values:
                raise FieldError(f'model.{field}', value, f'expected one of {", ".join(values)}')
        if self.text == SEQUENCE and not self.vocabulary:
            problem = (
                'the data set holds embeddings, expected tokens (embed_captions --tokens_only), '
                "or 'pooled'"
            )
            raise FieldError('model.text', self.text, problem)
        if self.width % (4 * self.num_heads):
            multiple = f'{4 * self.num_heads}, 4 times model.num_heads={self.num_heads}'
            raise FieldError('model.width', self.width, f'expected a multiple of {multiple}')
        if self.mlp_ratio * self.width % 1:
            problem = f'expected a whole number when multiplied by model.width={self.width}'
            raise FieldError('model.mlp_ratio', self.mlp_ratio, problem)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        t: jax.Array,
        text: jax.Array | Words,
        drop_text: jax.Array | None = None,
        crop: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the velocity, float32 `(b, H, W, C)`.

        Args:
            x: Noisy latents, standardized, `(b, H, W, C)`.
            t: Times in [0, 1], `(b,)`; 0 is data, 1 is noise.
            text: Standardized text embeddings `(b, D)`; with a vocabulary token ids, int32
                `(b, T)`, padded with -1, or hidden states of these, `(b, T, D)`.
            drop_text: bool `(b,)`, True for texts to ignore; None to ignore none.
            crop: int32 `(b,)`, place of the crop among those of its image, 0 for the middle one;
                None is 0 everywhere.
        """
        _, height, width, channels = x.shape
        p = self.patch_size
        if height % p or width % p:
            raise ValueError(
                f'latents of {height}x{width} cannot be cut into patches of {p}x{p}: expected a '
                'model.name or model.patch_size whose patches divide both sides'
            )
        rows, columns = height // p, width // p

        # The mean of the words conditions the blocks; with 'sequence', attention sees each of them.
        words: Words | None = None
        embedding: Any = text
        if self.vocabulary:
            vectors = WordVectors(self.vocabulary, self.width, self.dtype, name='words')
            words, embedding = vectors(text, drop_text)
            words = jax.tree.map(self.pin, words) if self.text == SEQUENCE else None
        conditioning = Conditioning(self.width, self.crops, self.dtype, name='conditioning')
        condition = nn.silu(conditioning(t, embedding, drop_text, crop))
        tokens = Dense(self.width, dtype=self.dtype, name='patches')(_to_patches(x, p))
        tokens += sincos_positions_2d(rows, columns, self.width).astype(self.dtype)
        rotations = jnp.asarray(make_rotations(rows, columns, self.width // self.num_heads))
        tokens = self._blocks()(self.pin(tokens), self.pin(condition), rotations, words)

        zeros = nn.initializers.zeros
        modulation = Dense(2 * self.width, dtype=self.dtype, kernel_init=zeros, name='modulation')
        tokens = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)(tokens)
        tokens = _modulate(tokens, *jnp.split(modulation(condition), 2, axis=-1))
        # float32 from here on: the loss is a difference of numbers of like size.
        velocity = Dense(p * p * channels, dtype=jnp.float32, kernel_init=zeros, name='velocity')
        predicted = _from_patches(velocity(tokens.astype(jnp.float32)), rows, columns, p)
        if self.prediction == VELOCITY:
            return predicted
        return (x - predicted) / jnp.maximum(t, _LEAST_TIME)[:, None, None, None]

    def flops(self, latent_shape: Sequence[int], text_dim: int, num_tokens: int = 0) -> int:
        """Returns the forward FLOPs of a sample's matrix products; training takes three times that.

        A multiplication with its addition counts two, as in Kaplan et al., "Scaling Laws for Neural
        Language Models" (2020), table 1; the scores of the attention count as in Chowdhery et al.,
        "PaLM" (2022), appendix B. Recomputation to save memory does not count.

        Args:
            latent_shape: `(height, width, channels)` of one sample.
            text_dim: Width of a text embedding or of an encoder's states; 0 for token ids, or
                without a text.
            num_tokens: Number of tokens of a text with padding; only for models with a vocabulary.
        """
        height, columns, channels = latent_shape
        w, p = self.width, self.patch_size
        tokens = height * columns // p**2
        products = 4 + 2 * self.mlp_ratio  # qkv and out, mlp_1 and mlp_2
        block = tokens * (products * w**2 + 2 * tokens * w) + 6 * w**2  # and modulation
        ends = tokens * 2 * p**2 * channels * w + 2 * w**2
        if self.vocabulary:
            ends += num_tokens * (text_dim or 3 * w) * w
            text_dim = w
        if self.text == SEQUENCE:  # and no text
            block += (num_tokens + 1) * (2 * w**2 + 2 * tokens * w)
        inputs = _TIME_FEATURES + w + (text_dim + w if text_dim else 0) + self.crops - 1
        condition = inputs * w
        return round(2 * (self.depth * block + ends + condition))

    def _blocks(self):
        policy = REMAT[self.remat]
        block = nn.remat(Block, prevent_cse=False, policy=policy) if policy else Block

        def body(module: nn.Module, tokens: jax.Array, *context: Any):
            return module(tokens, *context), None

        blocks = nn.scan(
            body,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            in_axes=nn.broadcast,
            length=self.depth,
            unroll=self.unroll,
        )
        fields = self.num_heads, self.mlp_ratio, self.dtype, self.attention, self.pin
        stack = block(*fields, name='blocks')
        return lambda tokens, *context: blocks(stack, tokens, *context)[0]


def _to_patches(x: jax.Array, p: int) -> jax.Array:
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // p, p, width // p, p, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, p * p * channels)


def _from_patches(patches: jax.Array, rows: int, columns: int, p: int) -> jax.Array:
    batch = patches.shape[0]
    x = patches.reshape(batch, rows, columns, p, p, -1).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * p, columns * p, -1)


def flatten_weights(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns weights by PyTorch's names, block by block; kernels become `weight` `(out, in)`."""
    weights = {}
    for name, x in flatten_dict(params, sep='.').items():
        arrays = {name: x}
        # The blocks are one scanned module, whose weights are stacked.
        if name.startswith('blocks.'):
            suffix = name.removeprefix('blocks.')
            arrays = {f'blocks.{number}.{suffix}': layer for number, layer in enumerate(x)}
        for key, array in arrays.items():
            if key.endswith('.kernel'):
                key, array = key.removesuffix('kernel') + 'weight', array.T
            weights[key] = np.ascontiguousarray(array, np.float32)
    return weights
