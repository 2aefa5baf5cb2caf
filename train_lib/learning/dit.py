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
    """Multiplies `(..., in)` by a kernel `(in, out)`, as `flax.linen.Dense` calls it."""
    return jax.lax.dot_general(x, kernel.astype(x.dtype), dimension_numbers, precision=precision)


def _dot_forward(x, kernel, dimension_numbers, precision):
    return _dot(x, kernel, dimension_numbers, precision), (x, kernel)


def _dot_backward(dimension_numbers, precision, saved, gradient):
    """Returns the gradients of `x`, in its dtype, and of the kernel, in that of the kernel."""
    x, kernel = saved
    over_outputs = ((gradient.ndim - 1,), (1,)), ((), ())
    grad_x = jax.lax.dot_general(
        gradient, kernel.astype(x.dtype), over_outputs, precision=precision
    )
    # As matrices: over two axes, XLA on CPUs would copy both factors, an eighth of a step's time.
    rows = x.reshape(-1, x.shape[-1])
    row_gradients = gradient.reshape(-1, gradient.shape[-1])
    over_rows = ((0,), (0,)), ((), ())
    grad_kernel = jax.lax.dot_general(
        rows, row_gradients, over_rows, precision=precision, preferred_element_type=kernel.dtype
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
        pooled = jnp.sum(jnp.where(is_word[..., None], vectors, 0), 1) / count.astype(self.dtype)
        present = is_word
        if drop_text is not None:
            present = is_word & ~drop_text[:, None]
        # Attention divides by the sum over what is present: a dropped text leaves this vector.
        first = jnp.broadcast_to(nothing.astype(self.dtype), (len(vectors), 1, self.width))
        present = jnp.pad(present, [(0, 0), (1, 0)], constant_values=True)
        return Words(jnp.concatenate([first, vectors], 1), present), pooled

    def _project_states(self, states: jax.Array) -> jax.Array:
        """Returns the vectors of hidden states `(b, T, D)`."""
        normalized = nn.RMSNorm(dtype=self.dtype, name='norm')(states)
        return Dense(self.width, dtype=self.dtype, name='projection')(normalized)

    def _look_up(self, ids: jax.Array, is_word: jax.Array) -> jax.Array:
        """Returns the vectors of token ids `(b, T)`, from their entries and their neighbours'."""
        table = self.param('table', nn.initializers.normal(1.0), (self.vocabulary, self.width))
        entries = jnp.where(is_word[..., None], jnp.asarray(table)[ids], 0).astype(self.dtype)
        # Beyond the ends of a text lie zeros, as beyond its last word.
        padded = jnp.pad(entries, [(0, 0), (1, 1), (0, 0)])
        triples = jnp.concatenate([padded[:, :-2], entries, padded[:, 2:]], -1)
        return nn.silu(Dense(self.width, dtype=self.dtype, name='neighbours')(triples))


def sincos_positions_2d(rows: int, columns: int, width: int) -> np.ndarray:
    """Returns sine-cosine vectors of positions, float32 `(rows * columns, width)`, row by row.

    Half of the numbers are of the row, half of the column, as in DiT.
    """
    angles = _angles(rows, columns, _MAX_PERIOD, width // 4)
    vectors = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return np.concatenate(list(vectors), axis=-1).astype(np.float32)


def make_rotations(rows: int, columns: int, head_dim: int) -> np.ndarray:
    """Returns rotations of queries and keys by position, float32 `(rows * columns, 2 * head_dim)`.

    Rotary position embedding (Su et al., "RoFormer", 2021), half of a head for each axis, with the
    period of Heo et al. (2024), section 3.2, as `attention_kernel.rotate_pairs` takes them.
    """
    of_rows, of_columns = _angles(rows, columns, _ROTARY_PERIOD, head_dim // 4)
    angles = np.concatenate([of_rows, of_columns], axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([cosine, cosine, -sine, sine], axis=-1).astype(np.float32)


def _angles(rows: int, columns: int, period: float, count: int) -> np.ndarray:
    """Returns the angles of each axis, position and frequency, `(2, rows * columns, count)`."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing='ij'))
    frequencies = period ** -(np.arange(count) / count)
    return places.reshape(2, -1, 1) * frequencies


def time_features(t: jax.Array) -> jax.Array:
    """Returns sinusoids of times `(b,)` in [0, 1]: float32 `(b, 256)`."""
    # In float64, so that each is rounded only once.
    frequencies = _TIME_SCALE * _MAX_PERIOD ** -np.arange(0, 1, 2 / _TIME_FEATURES)
    angles = t.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales and shifts tokens `(b, n, width)` by vectors `(b, width)`."""
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
        """Returns the sum of the embeddings; the arguments are those of `DiT`, text `(b, D)`."""

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
        # Nothing is added for the middle crop, so drawing needs to know of none. Places before the
        # middle are negative.
        index = jnp.zeros(t.shape, jnp.int32) if crop is None else crop % self.crops
        one_hot = jax.nn.one_hot(index - 1, self.crops - 1, dtype=self.dtype)
        embed = dense('crops', use_bias=False, kernel_init=nn.initializers.zeros)
        return condition + embed(one_hot)


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
        by_kernel = self.implementation == 'pallas' and self.pin.on_tpus
        by_kernel = by_kernel and _kernel_takes(num_tokens, num_words, head_dim)
        # The kernel sums the gradient of the bias: the layer must not do it again.
        dense = _DenseWithConstantBias if by_kernel else Dense

        def multiply(inputs: jax.Array, count: int, name: str) -> Product:
            """Returns `count` matrices of `width` columns side by side."""
            layer = dense(count * width, dtype=self.dtype, name=name)
            values = checkpoint_name(self.pin(layer(inputs)), _KEPT)
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
        out = Dense(width, dtype=self.dtype, name='out')(checkpoint_name(mixed, _KEPT))
        return checkpoint_name(self.pin(out), _KEPT)

    def _mix_by_kernel(
        self, tokens: Product, words: Product | None, *scales_and_rotations: jax.Array
    ) -> jax.Array:
        """Computes as `mix_by_xla` does, by the kernel for TPUs."""

        def attend(rows: Any, shared: Any) -> jax.Array:
            values, word_values, present = rows
            bias, word_bias, *others = shared
            words = None
            if word_values is not None:
                words = Product(word_values, word_bias, present)
            return attention_kernel.attend(Product(values, bias), words, *others, self.num_heads)

        word_values, word_bias, present = (None, None, None) if words is None else words
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
        """Returns the tokens `x`, `(b, n, width)`, as the condition, `(b, width)`, changes them."""
        x = self.pin(x)
        condition = self.pin(condition)
        width = x.shape[-1]
        zeros = nn.initializers.zeros
        # Gates of zero at the start: the block adds nothing then.
        dense = Dense(6 * width, dtype=self.dtype, kernel_init=zeros, name='modulation')
        modulation = checkpoint_name(dense(condition), _KEPT)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, axis=-1)

        h = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)(x)
        attention = Attention(
            num_heads=self.num_heads,
            dtype=self.dtype,
            implementation=self.attention,
            pin=self.pin,
            name='attention',
        )
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
            value = getattr(self, field)
            if value not in values:
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
            all_words, embedding = vectors(text, drop_text)
            if self.text == SEQUENCE:
                words = jax.tree.map(self.pin, all_words)
        conditioning = Conditioning(self.width, self.crops, self.dtype, name='conditioning')
        condition = nn.silu(conditioning(t, embedding, drop_text, crop))
        tokens = Dense(self.width, dtype=self.dtype, name='patches')(_to_patches(x, p))
        tokens += sincos_positions_2d(rows, columns, self.width).astype(self.dtype)
        rotations = jnp.asarray(make_rotations(rows, columns, self.width // self.num_heads))
        apply_blocks = self._make_blocks()
        tokens = apply_blocks(self.pin(tokens), self.pin(condition), rotations, words)

        patches = self._predict_patches(tokens, condition, channels)
        predicted = _from_patches(patches, rows, columns, p)
        if self.prediction == VELOCITY:
            return predicted
        return (x - predicted) / jnp.maximum(t, _LEAST_TIME)[:, None, None, None]

    def _predict_patches(self, tokens: jax.Array, condition: jax.Array, channels: int) -> jax.Array:
        """Returns the last layer's patches, float32 `(b, n, patch_size**2 * channels)`."""
        zeros = nn.initializers.zeros
        modulation = Dense(2 * self.width, dtype=self.dtype, kernel_init=zeros, name='modulation')
        tokens = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)(tokens)
        shift, scale = jnp.split(modulation(condition), 2, axis=-1)
        tokens = _modulate(tokens, shift, scale)
        # float32 from here on: the loss is a difference of numbers of like size.
        size = self.patch_size**2 * channels
        velocity = Dense(size, dtype=jnp.float32, kernel_init=zeros, name='velocity')
        return velocity(tokens.astype(jnp.float32))

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
        # Of a block: qkv and out, mlp_1 and mlp_2; then the scores, what they mix, and modulation.
        products = 4 + 2 * self.mlp_ratio
        block = tokens * (products * w**2 + 2 * tokens * w) + 6 * w**2
        # Of the layers before and behind the blocks: patches and velocity, and modulation.
        ends = tokens * 2 * p**2 * channels * w + 2 * w**2
        if self.vocabulary:
            # A word's vector is of a state, or of three entries of the table.
            ends += num_tokens * (text_dim or 3 * w) * w
            text_dim = w
        if self.text == SEQUENCE:
            # Keys and values of the words and of the vector for no text, their scores and mixing.
            block += (num_tokens + 1) * (2 * w**2 + 2 * tokens * w)
        # Of the condition: two layers for the time, two for a text, one for the crops.
        condition = (_TIME_FEATURES + w + self.crops - 1) * w
        if text_dim:
            condition += (text_dim + w) * w
        return round(2 * (self.depth * block + ends + condition))

    def _make_blocks(self) -> Callable[..., jax.Array]:
        """Returns all blocks as one function of the arguments of `Block`."""
        policy = REMAT[self.remat]
        block_class: Any = Block
        if policy is not None:
            block_class = nn.remat(Block, prevent_cse=False, policy=policy)
        block = block_class(
            num_heads=self.num_heads,
            mlp_ratio=self.mlp_ratio,
            dtype=self.dtype,
            attention=self.attention,
            pin=self.pin,
            name='blocks',
        )

        def apply_block(module: nn.Module, tokens: jax.Array, *context: Any):
            """Returns the tokens after one block, and nothing that the scan would stack."""
            return module(tokens, *context), None

        scanned = nn.scan(
            apply_block,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            in_axes=nn.broadcast,
            length=self.depth,
            unroll=self.unroll,
        )

        def apply_blocks(tokens: jax.Array, *context: Any) -> jax.Array:
            tokens, _ = scanned(block, tokens, *context)
            return tokens

        return apply_blocks


def _to_patches(x: jax.Array, p: int) -> jax.Array:
    """Cuts `(b, H, W, C)` into squares of p by p positions: `(b, H * W / p**2, p**2 * C)`."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // p, p, width // p, p, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, p * p * channels)


def _from_patches(patches: jax.Array, rows: int, columns: int, p: int) -> jax.Array:
    """Inverts `_to_patches` for pictures of `rows` by `columns` squares."""
    batch = patches.shape[0]
    x = patches.reshape(batch, rows, columns, p, p, -1).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * p, columns * p, -1)


def flatten_weights(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns weights by PyTorch's names, float32, block by block.

    A kernel becomes `weight`, `(out, in)`.
    """
    arrays = {}
    for name, x in flatten_dict(params, sep='.').items():
        if not name.startswith('blocks.'):
            arrays[name] = x
            continue
        # The blocks are one scanned module, whose weights are stacked.
        suffix = name.removeprefix('blocks.')
        for number, layer in enumerate(x):
            arrays[f'blocks.{number}.{suffix}'] = layer
    weights = {}
    for name, array in arrays.items():
        if name.endswith('.kernel'):
            name = f'{name.removesuffix("kernel")}weight'
            array = array.T
        weights[name] = np.ascontiguousarray(array, np.float32)
    return weights
