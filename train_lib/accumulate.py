"""Computes the gradient of a large batch part by part, to save memory.

    value_and_grad = accumulate.in_parts(jax.value_and_grad(loss, has_aux=True), 4)
    (value, losses), grads = value_and_grad(params, rows)

The loss must be a sum over rows, so that the losses of the parts add up to the loss of the batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ValueAndGrad = Callable[[Any, Any], tuple[tuple[jax.Array, jax.Array], Any]]


def in_parts(value_and_grad: ValueAndGrad, count: int) -> ValueAndGrad:
    """Returns the same function, computed over `count` parts of the rows in turn.

    Args:
        value_and_grad: `jax.value_and_grad` of a function from `(params, rows)` to a float32 sum
            over the rows and an array `(b, ...)`, one entry a row; `rows` is a pytree of arrays
            `(b, ...)`.
        count: a divisor of the rows on each device. Part i takes every `count`-th row, starting
            with row i. So each device computes its own rows in every part, and no row moves.
    """
    if count == 1:
        return value_and_grad

    def over_parts(params: Any, rows: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
        parts = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), rows)

        def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
            (value, entries), grads = value_and_grad(params, part)
            return jax.tree.map(jnp.add, total, (value, grads)), entries

        nothing = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
        (value, grads), entries = jax.lax.scan(add, nothing, parts)
        return (value, jnp.swapaxes(entries, 0, 1).reshape(-1, *entries.shape[2:])), grads

    return over_parts
