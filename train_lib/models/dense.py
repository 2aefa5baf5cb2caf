"""The dense layer of the models: computes in a narrow type, with kernel gradients in float32.

    y = Dense(features, dtype=jnp.bfloat16, name='qkv')(x)

Parameters, names and all numbers of the forward pass are those of `flax.linen.Dense`.
`flax.linen.Dense` casts the kernel before the product. So the gradient has the type of the product,
and devices add up their parts of it in that type: in bfloat16 each addition rounds to 8 bits. Here
the product for the gradient returns float32, in which the matrix units accumulate anyway, and the
devices add up float32.
"""

import functools

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(x: jax.Array, kernel: jax.Array, dimension_numbers, precision=None) -> jax.Array:
    return jax.lax.dot_general(x, kernel.astype(x.dtype), dimension_numbers, precision=precision)


def _dot_forward(x, kernel, dimension_numbers, precision):
    # Not by `_dot`: policies of rematerialization look for products, and would not find this one.
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), dimension_numbers, precision=precision)
    return y, (x, kernel)


def _dot_backward(dimension_numbers, precision, saved, gradient):
    x, kernel = saved
    for_x = (((gradient.ndim - 1,), (1,)), ((), ()))
    # As matrices: over two axes, XLA on CPUs would copy both factors, an eighth of a step's time.
    rows, gradients = (a.reshape(-1, a.shape[-1]) for a in (x, gradient))
    for_kernel = (((0,), (0,)), ((), ()))
    return (
        jax.lax.dot_general(gradient, kernel.astype(x.dtype), for_x, precision=precision),
        jax.lax.dot_general(
            rows, gradients, for_kernel, precision=precision, preferred_element_type=kernel.dtype
        ),
    )


_dot.defvjp(_dot_forward, _dot_backward)


def _promote_all_but_kernel(inputs, kernel, bias, *, dtype):
    inputs, bias = promote_dtype(inputs, bias, dtype=dtype)
    return inputs, kernel, bias


Dense = functools.partial(
    nn.Dense,
    promote_dtype=_promote_all_but_kernel,  # type: ignore[arg-type]  # declared for any arrays
    dot_general=_dot,
)
