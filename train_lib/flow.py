"""Rectified flow: straight paths from data to noise, and the velocity along them.

With data x, noise e and time t in [0, 1] the path is `z = (1 - t) x + t e` and its velocity
`dz/dt = e - x`, which the model learns (Liu et al., "Flow Straight and Fast", 2022). Times are
logit-normal as in Esser et al., "Scaling Rectified Flow Transformers" (2024), section 3.1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coyo11m_tfds.dataset.stored_dataset import DatasetStats


def no_stats(text_dim: int, **facts: Any) -> DatasetStats:
    """Returns statistics of 4 channels, mean 0 and deviation 1, for programs without a data set."""
    arrays: Any = (np.full(size, x, np.float32) for size in (4, text_dim) for x in (0, 1))
    return DatasetStats(*arrays, **facts)


def standardize_latents(latents: jax.Array, stats: DatasetStats) -> jax.Array:
    """Standardizes raw latents `(b, C, H, W)` of any float dtype: float32 `(b, H, W, C)`."""
    latents = jnp.transpose(latents.astype(jnp.float32), (0, 2, 3, 1))
    return (latents - stats.latent_mean) / stats.latent_std


def raw_latents(standardized: jax.Array, stats: DatasetStats) -> jax.Array:
    """Inverts `standardize_latents`: from `(b, H, W, C)` to raw float32 `(b, C, H, W)`."""
    return jnp.transpose(standardized * stats.latent_std + stats.latent_mean, (0, 3, 1, 2))


def standardize_text(text: jax.Array, stats: DatasetStats) -> jax.Array:
    """Standardizes text embeddings `(b, D)` of any float dtype: float32, mean 0, deviation 1."""
    # A feature that never varies says nothing: it becomes 0 instead of a division by zero.
    varies = stats.text_std > 1e-6
    scale = jnp.where(varies, 1 / jnp.where(varies, stats.text_std, 1), 0)
    return (text.astype(jnp.float32) - stats.text_mean) * scale


def logit_normal_times(rng: jax.Array, count: int, mean: float, std: float) -> jax.Array:
    """Draws times in (0, 1), float32 `(count,)`: the sigmoid of a normal variable.

    A positive `mean` favours noisy times, which decide the coarse layout of a picture.
    """
    return jax.nn.sigmoid(mean + std * jax.random.normal(rng, (count,)))


def squared_errors(
    velocity: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    noise: jax.Array,
    t: jax.Array,
) -> jax.Array:
    """Returns the mean squared error of the predicted velocity for each sample, `(b,)`.

    `velocity` is the model, a function from `(z, t)` to a velocity in the shape of z; x are
    standardized latents `(b, H, W, C)`, noise is standard normal, times t are `(b,)`.
    """
    time = t[:, None, None, None]
    predicted = velocity((1 - time) * x + time * noise, t)
    return jnp.mean(jnp.square(predicted - (noise - x)), axis=(1, 2, 3))


def noise_and_times_of_keys(
    keys: jax.Array, shape: tuple[int, ...], seed: int
) -> tuple[jax.Array, jax.Array]:
    """Returns standard normal noise `(b, *shape)` and uniform times `(b,)` in [0, 1), float32.

    They are functions of the samples' keys (low and high words, uint32 `(b, 2)`) and the seed, so
    an evaluation gives the same loss for any order of samples, batch size and number of hosts.
    """

    def draw(words: jax.Array) -> tuple[jax.Array, jax.Array]:
        # In two halves, because JAX has no 64-bit integers by default.
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), words[0]), words[1])
        noise_rng, time_rng = jax.random.split(rng)
        return jax.random.normal(noise_rng, shape), jax.random.uniform(time_rng)

    return jax.vmap(draw)(keys)
