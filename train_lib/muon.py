"""Muon: steps along momentum whose singular values are all brought near 1.

Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024): Nesterov momentum, in
float32, and five steps of a Newton-Schulz iteration with his coefficients, which bring singular
values to between 0.5 and 1.5. Updates are scaled to the root mean square of AdamW's, as in Liu et
al., arXiv:2502.16982.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

_MOMENTUM = 0.95
_NUM_STEPS = 5
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the first, third and fifth power
_ADAMW_RMS = 0.2
# Matrices side by side in a kernel, by the name of its module: queries, keys and values.
_SIDE_BY_SIDE = {'qkv': 3, 'words': 2}

MapMatrices = Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float,
    dtype: jnp.dtype | str = jnp.float32,
    map_matrices: MapMatrices = lambda function, stack: function(stack),
) -> optax.GradientTransformation:
    """Returns the optimizer of a pytree of kernels `(..., in, out)`, of which each is a stack.

    A kernel in a module `qkv` or `words` is three or two matrices side by side, each of which is
    orthogonalized for itself: its update is as large as that of any other matrix, and the values'
    gradient does not decide the direction of the queries'. Matrices are iterated and moved between
    devices in `dtype`; bfloat16 is Jordan's.
    """

    def direction(path: Any, momentum: jax.Array) -> jax.Array:
        count = _SIDE_BY_SIDE.get(path[-2].key, 1)
        rows, columns = momentum.shape[-2], momentum.shape[-1] // count
        if columns * count != momentum.shape[-1]:
            raise ValueError(
                f'{jax.tree_util.keystr(path)} is {momentum.shape}: in a module named '
                f'{path[-2].key!r}, Muon expects {count} matrices side by side; rename the module'
            )

        def orthogonalize_each(kernels: jax.Array) -> jax.Array:
            matrices = kernels.reshape(-1, rows, count, columns).swapaxes(1, 2)
            return orthogonalize(matrices).swapaxes(1, 2).reshape(kernels.shape)

        # Cast before the matrices move between devices: half of the bytes in bfloat16.
        update = map_matrices(orthogonalize_each, momentum.astype(dtype)).astype(momentum.dtype)
        return _ADAMW_RMS * math.sqrt(max(rows, columns)) * update

    return optax.chain(
        optax.trace(_MOMENTUM, nesterov=True),
        optax.stateless(lambda momenta, _: jax.tree_util.tree_map_with_path(direction, momenta)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def orthogonalize(matrices: jax.Array) -> jax.Array:
    """Returns matrices `(..., rows, columns)` with singular values near 1; zeros stay zeros."""
    # A wide matrix has the smaller product with its transpose.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # The iteration converges for singular values up to 1, which this norm bounds.
    norms = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = (x / jnp.maximum(norms, 1e-20)).astype(matrices.dtype)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_NUM_STEPS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    return x.mT if is_tall else x
