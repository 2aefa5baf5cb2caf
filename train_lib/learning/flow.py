"""Rectified flow: straight paths from data to noise, the velocity along them, and the way back.

With data x, noise e and time t in [0, 1] the path is `z = (1 - t) x + t e` and its velocity
`dz/dt = e - x`, which the model learns (Liu et al., "Flow Straight and Fast", 2022). Times are
logit-normal as in Esser et al., "Scaling Rectified Flow Transformers" (2024), section 3.1.
Pictures are drawn by steps along the learned velocity, with classifier-free guidance.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.stored_dataset import DatasetStats

Velocity = Callable[[jax.Array, jax.Array, Any, jax.Array], jax.Array]


def no_stats(text_dim: int, **facts: Any) -> DatasetStats:
    """Returns statistics of 4 channels, mean 0 and deviation 1, for programs without a data set.

    Args:
        text_dim: Width of the text embeddings; 0 for none.
        **facts: Other fields of `DatasetStats`.
    """
    return DatasetStats(
        latent_mean=np.zeros(4, np.float32),
        latent_std=np.ones(4, np.float32),
        text_mean=np.zeros(text_dim, np.float32),
        text_std=np.ones(text_dim, np.float32),
        **facts,
    )


def make_key(seed: int | jax.Array) -> jax.Array:
    """Returns the random key of a seed from 0 to 2**32 - 1, whatever JAX's configuration is."""
    # As `jax.random.key`, whose implementation and offset of seeds the environment can change.
    upper = jnp.zeros((), jnp.uint32)
    lower = jnp.asarray(seed, jnp.uint32)
    words = jnp.stack([upper, lower])
    return jax.random.wrap_key_data(words, impl='threefry2x32')


def draw_latents(moments: jax.Array, seeds: jax.Array, stats: DatasetStats) -> jax.Array:
    """Draws raw latents, float32 `(b, C, H, W)`, each by a seed of its own.

    Args:
        moments: Means, then deviations or log variances of the channels, `(b, 2C, H, W)`.
        seeds: Seeds of the noise, uint32 `(b,)`.
        stats: Statistics of the data set; its `moments` says which of the two they are.
    """
    means, deviations = jnp.split(moments.astype(jnp.float32), 2, axis=1)
    if stats.moments == schema.LOG_VARIANCE:
        deviations = jnp.exp(0.5 * jnp.clip(deviations, *schema.LOG_VARIANCE_LIMITS))

    def make_noise(seed: jax.Array) -> jax.Array:
        """Returns the noise of one sample."""
        return jax.random.normal(make_key(seed), means.shape[1:], jnp.float32)

    noise = jax.vmap(make_noise)(seeds)
    return means + deviations * noise


def standardize_latents(latents: jax.Array, stats: DatasetStats) -> jax.Array:
    """Standardizes raw latents `(b, C, H, W)` of any float dtype: float32 `(b, H, W, C)`."""
    # Of moments, `(b, 2C, H, W)`, these channels are the means.
    latents = latents[:, : stats.latents_shape[1]]
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


def logit_normal_times(
    rng: jax.Array, count: int, logit_mean: float, logit_std: float
) -> jax.Array:
    """Draws times in (0, 1), float32 `(count,)`, whose logits are normally distributed.

    A positive mean favours noisy times.
    """
    normal = jax.random.normal(rng, (count,), jnp.float32)
    return jax.nn.sigmoid(logit_mean + logit_std * normal)


def squared_errors(
    velocity: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    noise: jax.Array,
    t: jax.Array,
) -> jax.Array:
    """Returns the mean squared error of the predicted velocity for each sample, float32 `(b,)`.

    Args:
        velocity: Function of positions `(b, H, W, C)` and times `(b,)`, such as a bound model.
        x: Standardized latents, float32 `(b, H, W, C)`.
        noise: Normal noise of the same shape.
        t: Times, `(b,)`.
    """
    time = t[:, None, None, None]
    position = (1 - time) * x + time * noise
    predicted = velocity(position, t)
    true_velocity = noise - x
    return jnp.mean(jnp.square(predicted - true_velocity), axis=(1, 2, 3))


def noise_and_times_of_keys(
    keys: jax.Array, shape: tuple[int, ...], seed: int
) -> tuple[jax.Array, jax.Array]:
    """Returns normal noise, float32 `(b, *shape)`, and uniform times `(b,)`.

    Both are functions of the seed and of the keys of records, uint32 `(b, 2)`, so an evaluation
    gives every record the same noise and time at every step.
    """

    def draw_one(words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the noise and the time of one key."""
        # A key comes in two halves, because JAX has no 64-bit integers by default.
        rng = jax.random.fold_in(make_key(seed), words[0])
        rng = jax.random.fold_in(rng, words[1])
        noise_rng, time_rng = jax.random.split(rng)
        noise = jax.random.normal(noise_rng, shape, jnp.float32)
        time = jax.random.uniform(time_rng, dtype=jnp.float32)
        return noise, time

    return jax.vmap(draw_one)(keys)


def sample(
    velocity: Velocity,
    noise: jax.Array,
    text: Any,
    *,
    guidance: float,
    num_steps: int,
    sampler: str = 'euler',
    time_shift: float = 1.0,
    guidance_low: float = 0.0,
    guidance_high: float = 1.0,
) -> jax.Array:
    """Integrates from noise (time 1) to data (time 0), both float32 `(b, H, W, C)`.

    Args:
        velocity: Function of positions, times `(b,)`, texts and `drop_text`, bool `(b,)`.
        noise: Where the paths begin.
        text: Texts as the model takes them, a pytree of arrays with one row for each sample.
        guidance: Strength of classifier-free guidance; 1 is none.
        num_steps: Number of steps.
        sampler: 'euler' or 'heun'.
        time_shift: See `step_times`.
        guidance_low: Lowest time with guidance.
        guidance_high: Highest time with guidance.

    Guidance: Ho & Salimans, "Classifier-Free Diffusion Guidance" (2022); the velocity used is
    `without + guidance * (with - without)`, so 1 is no guidance. It may be kept to an interval of
    times as in Kynkäänniemi et al. (2024, arXiv:2404.07724), equation 5; outside of it the text is
    followed as learned. Only guidance computes the half without text.

    Heun: Karras et al. (2022, arXiv:2206.00364), algorithm 1. An Euler step, then the mean of the
    velocities at both of its ends; the last step is Euler's, which leaves the error in proportion
    to the square of the step. It evaluates the model `2 * num_steps - 1` times.
    """
    count = noise.shape[0]
    times = step_times(num_steps, time_shift)
    # Both halves of guidance go through the model as one batch.
    texts = jax.tree.map(lambda x: jnp.concatenate([x, x]), text)
    drop_text = jnp.arange(2 * count) >= count

    def with_guidance(z: jax.Array, time: jax.Array) -> jax.Array:
        """Returns the guided velocity."""
        positions = jnp.concatenate([z, z])
        both = velocity(positions, jnp.full((2 * count,), time), texts, drop_text)
        with_text, without = jnp.split(both, 2)
        return without + guidance * (with_text - without)

    def as_learned(z: jax.Array, time: jax.Array) -> jax.Array:
        """Returns the velocity of the model with its text."""
        return velocity(z, jnp.full((count,), time), text, jnp.zeros((count,), bool))

    def is_inside(time: Any) -> Any:
        """Returns whether guidance applies at a time, or at each of several."""
        return _is_within(time, guidance_low, guidance_high)

    # No step begins at the last time.
    are_inside = is_inside(times[:-1])

    def slope(z: jax.Array, time: jax.Array) -> jax.Array:
        """Returns the velocity, guided at the times of the interval."""
        # Both are known when the function is traced, so what is not needed is not compiled.
        if guidance == 1 or not np.any(are_inside):
            return as_learned(z, time)
        if np.all(are_inside):
            return with_guidance(z, time)
        # Only where both are needed, because a branch compiles the model twice.
        return jax.lax.cond(is_inside(time), with_guidance, as_learned, z, time)

    def euler_step(z: jax.Array, times: jax.Array) -> tuple[jax.Array, None]:
        """Takes a step between two times along the velocity at its beginning."""
        time, next_time = times
        return z + (next_time - time) * slope(z, time), None

    def heun_step(z: jax.Array, times: jax.Array) -> tuple[jax.Array, None]:
        """Takes a step between two times along the mean of the velocities at both."""
        time, next_time = times
        start = slope(z, time)
        end = slope(z + (next_time - time) * start, next_time)
        return z + (next_time - time) * (start + end) / 2, None

    ends = jnp.stack([times[:-1], times[1:]], axis=1)
    z = noise.astype(jnp.float32)
    # Scans, so that one step is compiled and not all of them.
    if sampler == 'euler':
        z, _ = jax.lax.scan(euler_step, z, ends)
        return z
    z, _ = jax.lax.scan(heun_step, z, ends[:-1])
    # As Karras et al., who do not evaluate the model at time 0.
    z, _ = euler_step(z, ends[-1])
    return z


def count_evaluations(
    *,
    guidance: float,
    num_steps: int,
    sampler: str = 'euler',
    time_shift: float = 1.0,
    guidance_low: float = 0.0,
    guidance_high: float = 1.0,
) -> int:
    """Returns how often `sample`, which takes these arguments, computes the model for a picture.

    With guidance these are two at a time, with and without the text.
    """
    times = step_times(num_steps, time_shift)
    evaluated = times[:-1]
    # All steps but the last evaluate the model at both ends.
    if sampler == 'heun':
        evaluated = np.concatenate([evaluated, times[1:-1]])
    if guidance == 1:
        return len(evaluated)
    are_inside = _is_within(evaluated, guidance_low, guidance_high)
    return len(evaluated) + int(np.sum(are_inside))


def _is_within(time: Any, low: float, high: float) -> Any:
    """Returns whether a time, or each of several, lies in an interval with both its ends."""
    return (low <= time) & (time <= high)


def step_times(num_steps: int, time_shift: float) -> np.ndarray:
    """Returns the times at which steps begin and end, float32 `(num_steps + 1,)`, from 1 down to 0.

    The shift is that of Esser et al., "Scaling Rectified Flow Transformers" (2024), equation 23:
    more than 1 spends more steps at noisy times. In training, its log added to `flow.logit_mean`
    does the same.
    """
    # In float64: each time is rounded once, as in an export.
    t = 1 - np.arange(num_steps + 1) / num_steps
    return (time_shift * t / (1 + (time_shift - 1) * t)).astype(np.float32)
