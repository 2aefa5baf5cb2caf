"""Diffusion transformer (DiT) with adaptive layer norm, conditioned on time and a text.

Architecture: Peebles & Xie, "Scalable Diffusion Models with Transformers" (2023), block adaLN-Zero,
with query and key normalization (Dehghani et al., "Scaling Vision Transformers to 22 Billion
Parameters", 2023), rotary position embedding besides the fixed positions, and the text embedding
instead of the class label. For token ids or hidden states of a text encoder, this is the mean of
the words' vectors. With `text='sequence'`, every block's attention sees these vectors next to the
picture's own tokens, as in Nichol et al., "GLIDE" (2021). The blocks are one scanned module, so
compile time and program size do not grow with the depth unless `unroll` does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from coyo11m_tfds.process.errors import FieldError
from train_lib.learning import positions
from train_lib.learning.attention import ATTENTION, Attention
from train_lib.learning.layers import REMAT, Dense, Dtype, OneDevice, keep
from train_lib.learning.word_vectors import Words, WordVectors

POOLED, SEQUENCE = 'pooled', 'sequence'
TEXTS = POOLED, SEQUENCE  # what of a text conditions the blocks
VELOCITY, LATENTS = PREDICTIONS = 'velocity', 'latents'  # what the last layer computes
# Divisor of the velocity at lesser times, as in Li & He, "Back to Basics: Let Denoising Generative
# Models Denoise" (2025), arXiv:2511.13720.
_LEAST_TIME = 0.05


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
            """Returns a dense layer of this name."""
            return Dense(self.width, dtype=self.dtype, name=name, **options)

        time = dense('time_1')(positions.embed_times(t))
        condition = dense('time_2')(nn.silu(time))
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
        index = jnp.zeros(t.shape, jnp.int32)
        if crop is not None:
            index = crop % self.crops
        # Index 0 becomes -1, whose vector is all zeros.
        one_hot = jax.nn.one_hot(index - 1, self.crops - 1, dtype=self.dtype)
        embed = dense('crops', use_bias=False, kernel_init=nn.initializers.zeros)
        return condition + embed(one_hot)


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
        modulation = keep(dense(condition))
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
        h = self.pin(nn.gelu(keep(hidden)))
        h = keep(Dense(width, dtype=self.dtype, name='mlp_2')(h))
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
        # Here and not at the first call, which is traced somewhere in the middle of a step.
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
        rows = height // p
        columns = width // p

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
        embed_patches = Dense(self.width, dtype=self.dtype, name='patches')
        tokens = embed_patches(_to_patches(x, p))
        sinusoids = positions.make_sinusoids(rows, columns, self.width)
        tokens += sinusoids.astype(self.dtype)
        head_dim = self.width // self.num_heads
        rotations = jnp.asarray(positions.make_rotations(rows, columns, head_dim))
        apply_blocks = self._make_blocks()
        tokens = apply_blocks(self.pin(tokens), self.pin(condition), rotations, words)

        patches = self._predict_patches(tokens, condition, channels)
        predicted = _from_patches(patches, rows, columns, p)
        if self.prediction == VELOCITY:
            return predicted
        # Towards the data the divisor goes to 0, and any error of the latents would become huge.
        divisor = jnp.maximum(t, _LEAST_TIME)[:, None, None, None]
        return (x - predicted) / divisor

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
        w = self.width
        p = self.patch_size
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
        condition = (positions.TIME_FEATURES + w + self.crops - 1) * w
        if text_dim:
            condition += (text_dim + w) * w
        return round(2 * (self.depth * block + ends + condition))

    def _make_blocks(self) -> Callable[..., jax.Array]:
        """Returns all blocks as one function of the arguments of `Block`."""
        policy = REMAT[self.remat]
        block_class: Any = Block
        if policy is not None:
            # A scan keeps XLA from merging what is computed again with what was computed first.
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

        # Each block has weights of its own, stacked, and first weights of its own.
        scanned = nn.scan(
            apply_block,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            in_axes=nn.broadcast,
            length=self.depth,
            unroll=self.unroll,
        )

        def apply_blocks(tokens: jax.Array, *context: Any) -> jax.Array:
            """Returns the tokens after all blocks."""
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
