"""What the blocks of a model are made of: dense layers, devices, values kept for gradients."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name

Dtype = jnp.dtype | type

_KEPT = 'kept'  # name of the values that a remat policy may keep

# What of each block is kept for the backward pass, besides its input; it computes the rest again.
REMAT = {
    'none': None,
    # Products with weights, and what attention mixes: 10 widths a token in bfloat16, no scores.
    'dots': jax.checkpoint_policies.save_only_these_names(_KEPT),
    'full': jax.checkpoint_policies.nothing_saveable,
}


def keep(x: jax.Array) -> jax.Array:
    """Returns `x`, which the policy `dots` of `REMAT` keeps for the backward pass."""
    return checkpoint_name(x, _KEPT)


class OneDevice:
    """Keeps all activations on one device; `sharding.RowPinning` is the same for a mesh."""

    on_tpus = False  # whether `map` can call kernels for TPUs

    def __call__(self, x: jax.Array) -> jax.Array:
        """Keeps `(b, ...)` on the devices of its rows."""
        return x

    def map(self, function: Callable, rows: Any, shared: Any) -> Any:
        """Calls `function(rows, shared)` with each device's rows, `(b, ...)`; returns all rows."""
        return function(rows, shared)


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
DenseWithConstantBias = functools.partial(Dense, promote_dtype=_promote_with_constant_bias)
