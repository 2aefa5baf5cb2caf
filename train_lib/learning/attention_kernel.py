"""Attention of a whole picture in one TPU kernel (Pallas): packed products in, mixed values out.

    tokens = Product(x @ kernel + jax.lax.stop_gradient(bias), bias)        # queries, keys, values
    mixed = attend(tokens, None, query_scale, key_scale, rotations, 8)      # (b, n, width)
    words = Product(keys_and_values, words_bias, present)                   # of a text
    mixed = attend(tokens, words, query_scale, key_scale, rotations, 8)

The chip's vector memory holds all tokens of a sample at once: scores stay there, and queries, keys
and values need no transposition between the products before and after. The grid runs over the
samples; a head takes 128 columns of the packed product. The backward pass computes the scores
again, as in Dao et al., "FlashAttention" (2022), without blocks, because all keys are in memory. It
also sums the gradients of the products' biases: otherwise the compiler would read all gradients
once more, a tenth of a step's time of L/2 by its estimate.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HEAD_DIM = 128  # columns of a tile of the TPU's memory
_ROWS = 16  # rows of a tile of bfloat16
# A sample's blocks, twice each for the next one's transfer, take 30 MB of vector memory. A v5e chip
# has 128 MB; the compiler allows 16 MB unless it is given a limit.
_MAX_TOKENS = 512
_MEMORY = 64 * 2**20
_EPSILON = 1e-6  # of the norms, as in flax.linen.RMSNorm
_FACTOR = HEAD_DIM**-0.5
_ABSENT = -1e30  # score of a word that is not there


def fits(num_tokens: int, head_dim: int, num_words: int = 0) -> bool:
    """Whether the kernel supports heads and tokens of these sizes."""
    has_whole_tiles = head_dim == HEAD_DIM and num_tokens % _ROWS == 0
    fits_memory = num_tokens + num_words <= _MAX_TOKENS
    return has_whole_tiles and fits_memory


class Product(NamedTuple):
    """Queries, keys and values of tokens, or keys and values of words."""

    values: jax.Array  # of all heads side by side, `(b, n, 3 * width)` or `(b, t, 2 * width)`
    # `(3 * width,)` or `(2 * width,)`. `values` include it as a constant; its gradient flows here.
    bias: jax.Array
    present: Any = None  # bool `(b, t)`, False for missing words; None for tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
    tokens: Product,
    words: Product | None,
    query_scale: jax.Array,  # of the norms, float32 `(128,)`
    key_scale: jax.Array,
    rotations: jax.Array,  # as for `rotate_pairs`, `(n, 256)`
    num_heads: int,
    interpret: bool = False,  # computes slowly on any device, for tests
) -> jax.Array:
    """Returns what the heads mix, side by side: `(b, n, width)` in the dtype of the tokens.

    Tokens attend to each other and to the words that are present.
    """
    mixed, _ = _forward(tokens, words, query_scale, key_scale, rotations, num_heads, interpret)
    return mixed


def _forward(tokens, words, query_scale, key_scale, rotations, num_heads, interpret):
    """Returns what `attend` returns, and what the backward pass needs: the arguments."""
    batch, count, width = tokens.values.shape
    (mixed,) = _call_kernel(
        _forward_kernel,
        'attend',
        _operands(tokens, words, query_scale, key_scale, rotations, axis=1),
        [jax.ShapeDtypeStruct((batch, count, width // 3), tokens.values.dtype)],
        num_heads=num_heads,
        interpret=interpret,
    )
    return mixed, (tokens, words, query_scale, key_scale, rotations)


def _backward(num_heads, interpret, saved, gradient):
    """Returns the gradients of the arguments of `attend`; rotations have none."""
    # Of tokens and, if there is a text, of words.
    products = [product for product in saved[:2] if product is not None]
    # One row for all samples: the kernel adds up the gradients of scales and biases in it.
    outputs = [jax.ShapeDtypeStruct((1, 2, HEAD_DIM), jnp.float32)]
    for values, bias, _ in products:
        outputs += [
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            jax.ShapeDtypeStruct((1, 1, *bias.shape), jnp.float32),
        ]
    inputs = [gradient]
    inputs += _operands(*saved, axis=2)
    grad_scales, *gradients = _call_kernel(
        _backward_kernel,
        'attend_backward',
        inputs,
        outputs,
        num_heads=num_heads,
        interpret=interpret,
    )
    # In pairs, as their outputs are listed above.
    of_values = gradients[::2]
    of_biases = gradients[1::2]
    grad_products = []
    for product, grad_values, grad_bias in zip(products, of_values, of_biases, strict=True):
        grad_bias = grad_bias[0, 0].astype(product.bias.dtype)
        grad_products.append(Product(grad_values, grad_bias))
    grad_tokens = grad_products[0]
    grad_words = grad_products[1] if len(products) > 1 else None
    grad_query_scale, grad_key_scale = grad_scales[0]
    return grad_tokens, grad_words, grad_query_scale, grad_key_scale, None


attend.defvjp(_forward, _backward)


def _operands(tokens, words, query_scale, key_scale, rotations, *, axis: int) -> list[jax.Array]:
    """Returns what a kernel reads; `present` gets a further `axis`, the one of the queries."""
    operands = [tokens.values, query_scale[None, None], key_scale[None, None], rotations[None]]
    if words is not None:
        present = jnp.expand_dims(words.present.astype(jnp.float32), axis)
        operands += [words.values, present]
    return operands


def _call_kernel(
    kernel, name, inputs: Sequence, outputs: Sequence, *, num_heads: int, interpret: bool
):
    """Runs a kernel for one sample after the other; arrays of one row are the same for all."""

    def block(array) -> pl.BlockSpec:
        """Returns which part of an array the kernel sees for a sample."""
        rows, *sizes = array.shape

        def index(sample) -> tuple:
            """Returns the numbers of the block along each axis."""
            # The same for every sample: it is transferred once, and sums stay in place.
            if rows == 1:
                return 0, 0, 0
            return sample, 0, 0

        return pl.BlockSpec((1, *sizes), index)

    batch = len(inputs[0])
    return pl.pallas_call(
        functools.partial(kernel, num_heads=num_heads, num_inputs=len(inputs)),
        grid=(batch,),
        in_specs=[block(array) for array in inputs],
        out_specs=[block(array) for array in outputs],
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
        interpret=interpret,
        name=name,
    )(*inputs)


def _forward_kernel(*refs, num_heads: int, num_inputs: int) -> None:
    """Mixes the values of one sample."""
    inputs = refs[:num_inputs]
    (out,) = refs[num_inputs:]
    for head in range(num_heads):
        attended = _attend_one_head(inputs, head, num_heads, key_axis=1)
        pairs = zip(attended.weights, attended.values, strict=True)
        products = [_product(weight.astype(value.dtype), value, 1, 0) for weight, value in pairs]
        mixed = sum(products)
        # Normalized behind the product: it has fewer numbers than the weights.
        out[0, :, _columns(head)] = (mixed * attended.factor).astype(out.dtype)


def _backward_kernel(*refs, num_heads: int, num_inputs: int) -> None:
    """Computes the gradients of one sample's products, and adds those of scales and biases."""
    gradient_ref, *inputs = refs[:num_inputs]
    grad_scales, *targets = refs[num_inputs:]
    grad_biases = targets[1::2]
    products = list(zip(targets[::2], grad_biases, strict=True))
    _zero_before_first_sample(grad_scales, *grad_biases)
    query_scale = inputs[1][0, 0] * _FACTOR
    key_scale = inputs[2][0, 0]
    rotations = inputs[3][0]
    grad_query_scale = grad_key_scale = jnp.zeros(HEAD_DIM, jnp.float32)
    for head in range(num_heads):
        attended = _attend_one_head(inputs, head, num_heads, key_axis=0)
        query = attended.query
        gradient = gradient_ref[0, :, _columns(head)]
        weights = [weight * attended.factor for weight in attended.weights]
        slopes = [_product(value, gradient, 1, 1) for value in attended.values]
        # The gradient of a softmax, whose mean is over the keys of tokens and words together.
        pairs = list(zip(weights, slopes, strict=True))
        mean = sum(jnp.sum(w * d, 0, keepdims=True) for w, d in pairs)
        grad_scores = [(w * (d - mean)).astype(query.dtype) for w, d in pairs]
        score_pairs = zip(grad_scores, attended.keys, strict=True)
        grad_query = sum(_product(x, key, 0, 0) for x, key in score_pairs)
        grad_query = _rotate_by_product(grad_query, rotations, query.dtype, -1)
        grad_query, grad_scale = _norm_backward(attended.raw_query, query_scale, grad_query)
        _add_gradient(products[0], head, grad_query)
        grad_query_scale += grad_scale
        for i, product in enumerate(products):
            is_of_tokens = i == 0
            grad_keys = _product(grad_scores[i], query, 1, 0)
            if is_of_tokens:
                grad_keys = _rotate_by_product(grad_keys, rotations, query.dtype, -1)
            grad_keys, grad_scale = _norm_backward(attended.raw_keys[i], key_scale, grad_keys)
            grad_key_scale += grad_scale
            first = head
            # The keys of tokens lie behind their queries; words have no queries.
            if is_of_tokens:
                first += num_heads
            _add_gradient(product, first, grad_keys)
            grad_values = _product(weights[i].astype(gradient.dtype), gradient, 1, 0)
            _add_gradient(product, first + num_heads, grad_values)
    grad_scales[0, 0] += grad_query_scale * _FACTOR
    grad_scales[0, 1] += grad_key_scale


def _zero_before_first_sample(*refs) -> None:
    """Clears what the samples add to, before the first one."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


def _add_gradient(product, head: int, gradient) -> None:
    """Writes the gradient of 128 columns of a product, and adds it up for their bias."""
    grad_values, grad_bias = product
    grad_values[0, :, _columns(head)] = gradient.astype(grad_values.dtype)
    grad_bias[0, 0, _columns(head)] += jnp.sum(gradient, 0)


class _AttendedHead(NamedTuple):
    """The values of one head of a sample; lists hold those of tokens, then those of words."""

    query: Any  # normalized and rotated
    keys: list[Any]
    values: list[Any]
    weights: list[Any]  # of the softmax, before its normalization
    factor: Any  # normalizes them
    raw_query: Any
    raw_keys: list[Any]


def _attend_one_head(inputs, head: int, num_heads: int, key_axis: int) -> _AttendedHead:
    """Computes the weights of one head, with everything that they follow from."""
    # Each product over the rows of its first factor costs a transposition: the forward pass has one
    # by queries and keys, the backward pass two, or one by keys and queries. So `key_axis` chooses
    # the axis of the keys in scores and weights.
    qkv, query_scale, key_scale, rotations, *words_and_present = inputs
    raw_query = qkv[0, :, _columns(head)]
    raw_keys = [qkv[0, :, _columns(num_heads + head)]]
    values = [qkv[0, :, _columns(2 * num_heads + head)]]
    if words_and_present:
        words, present = words_and_present
        raw_keys.append(words[0, :, _columns(head)])
        values.append(words[0, :, _columns(num_heads + head)])
    dtype = raw_query.dtype
    # The scale of the queries takes the factor of the scores: that costs no product.
    query = normalize(raw_query, query_scale[0, 0] * _FACTOR)
    query = _rotate_by_product(query, rotations[0], dtype).astype(dtype)
    keys = [normalize(key, key_scale[0, 0]) for key in raw_keys]
    # Words have no positions.
    keys[0] = _rotate_by_product(keys[0], rotations[0], dtype)
    keys = [key.astype(dtype) for key in keys]
    if key_axis:
        scores = [_product(query, key, 1, 1) for key in keys]
    else:
        scores = [_product(key, query, 1, 1) for key in keys]
    if words_and_present:
        scores[1] = jnp.where(present[0] > 0, scores[1], _ABSENT)
    # The greatest of both lists, or exp would overflow.
    maxima = [jnp.max(score, key_axis, keepdims=True) for score in scores]
    greatest = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp(score - greatest) for score in scores]
    factor = 1 / sum(jnp.sum(weight, key_axis, keepdims=True) for weight in weights)
    return _AttendedHead(query, keys, values, weights, factor, raw_query, raw_keys)


def _columns(head: int) -> slice:
    """Returns the columns of a head in a packed product."""
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


def _product(a, b, axis_a: int, axis_b: int):
    """Multiplies matrices over one axis of each; sums are float32."""
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the RMS norm over the last axis, as `flax.linen.RMSNorm`, in float32."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + _EPSILON)
    return wide * (inverse * scale)


def rotate_pairs(x: jax.Array, rotations: jax.Array) -> jax.Array:
    """Turns each pair of entries `(i, i + d / 2)` of float32 `(..., d)` by its angle.

    `rotations` holds cosines, then signed sines of the angles, `(..., 2 * d)`.
    """
    cosines, sines = jnp.split(rotations, 2, -1)
    return x * cosines + jnp.roll(x, x.shape[-1] // 2, -1) * sines


def _rotate_by_product(x: jax.Array, rotations: jax.Array, dtype: Any, sign: int = 1) -> jax.Array:
    """Like `rotate_pairs`, or its inverse; a product swaps the halves, rounded to `dtype`."""
    # The matrix unit has spare time. For L/2 on v5e the forward pass of a sample takes 8,134
    # bundles, 9,659 with the halves moved over lanes, 6,891 without rotations.
    cosines = rotations[:, :HEAD_DIM]
    sines = rotations[:, HEAD_DIM:]
    # The permutation of the halves, 1 where row and column are half a head apart. Made in the
    # kernel: a constant of the program would be one more operand.
    row = jax.lax.broadcasted_iota(jnp.int32, (HEAD_DIM, HEAD_DIM), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (HEAD_DIM, HEAD_DIM), 1)
    swap = (jnp.abs(row - column) == HEAD_DIM // 2).astype(dtype)
    return x * cosines + sign * _product(x.astype(dtype), swap, 1, 0) * sines


def _norm_backward(x, scale, gradient):
    """Returns the gradients of `normalize`: of `x` and, summed over the rows, of `scale`."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + _EPSILON)
    unit = wide * inverse
    scaled = gradient * scale
    grad_x = inverse * (scaled - unit * jnp.mean(unit * scaled, -1, keepdims=True))
    return grad_x, jnp.sum(gradient * unit, 0)
