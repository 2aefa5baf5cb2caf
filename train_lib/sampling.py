"""Draws pictures from noise: steps along the learned velocity, with classifier-free guidance."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Velocity = Callable[[jax.Array, jax.Array, Any, jax.Array], jax.Array]


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
    """Integrates from noise (time 1) to data (time 0).

    Guidance: Ho & Salimans, "Classifier-Free Diffusion Guidance" (2022); the velocity used is
    `without + guidance * (with - without)`, so 1 is no guidance. It may be kept to an interval of
    times as in Kynkäänniemi et al. (2024, arXiv:2404.07724), equation 5; outside of it the text is
    followed as learned.

    Heun: Karras et al. (2022, arXiv:2206.00364), algorithm 1. An Euler step, then the mean of the
    velocities at both of its ends; the last step is Euler's, which leaves the error in proportion
    to the square of the step. It evaluates the model `2 * num_steps - 1` times.

    Args:
        velocity: The model, from `(z, t, text, drop_text)` to a velocity of the shape of z.
        noise: Standard normal `(b, H, W, C)`.
        text: As the model takes it, a pytree of arrays `(b, ...)`.
        guidance: Strength; 1 follows the text as learned, more follows it more closely.
        sampler: `euler` or `heun`.
        time_shift: See `step_times`.
        guidance_low, guidance_high: The lowest and the highest time at which guidance acts.

    Returns:
        Standardized latents float32 `(b, H, W, C)`.
    """
    count = noise.shape[0]
    # Both halves of guidance go through the model as one batch.
    texts = jax.tree.map(lambda x: jnp.concatenate([x, x]), text)
    drop_text = jnp.arange(2 * count) >= count

    def guided(z: jax.Array, time: jax.Array) -> jax.Array:
        both = velocity(jnp.concatenate([z, z]), jnp.full((2 * count,), time), texts, drop_text)
        with_text, without = jnp.split(both, 2)
        # The times are traced, so this cannot be a branch.
        inside = (guidance_low <= time) & (time <= guidance_high)
        return without + jnp.where(inside, guidance, 1.0) * (with_text - without)

    def euler_step(z: jax.Array, times: jax.Array) -> tuple[jax.Array, None]:
        time, next_time = times
        return z + (next_time - time) * guided(z, time), None

    def heun_step(z: jax.Array, times: jax.Array) -> tuple[jax.Array, None]:
        time, next_time = times
        start = guided(z, time)
        end = guided(z + (next_time - time) * start, next_time)
        return z + (next_time - time) * (start + end) / 2, None

    times = step_times(num_steps, time_shift)
    ends = jnp.stack([times[:-1], times[1:]], axis=1)
    z = noise.astype(jnp.float32)
    # Scans, so that one step is compiled and not all of them.
    if sampler == 'euler':
        return jax.lax.scan(euler_step, z, ends)[0]
    z, _ = jax.lax.scan(heun_step, z, ends[:-1])
    return euler_step(z, ends[-1])[0]


def step_times(num_steps: int, time_shift: float) -> np.ndarray:
    """The times at which steps begin and end: float32 `(num_steps + 1,)`, from 1 down to 0.

    Equal steps in t become `s * t / (1 + (s - 1) * t)` with s the shift, as in Esser et al.,
    "Scaling Rectified Flow Transformers" (2024), equation 23: more than 1 spends more steps at
    noisy times. In training, the log of the shift added to `flow.logit_mean` does the same.
    """
    # In float64: each time is rounded once, as in an export.
    t = 1 - np.arange(num_steps + 1) / num_steps
    return (time_shift * t / (1 + (time_shift - 1) * t)).astype(np.float32)
