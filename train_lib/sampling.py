"""Pictures out of noise: Euler steps along the learned velocity, with classifier-free guidance.

    latents = sample(velocity, noise, text, guidance=2.0, num_steps=25)

Neither TensorFlow nor torch is imported here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Velocity = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def sample(
    velocity: Velocity, noise: jax.Array, text: jax.Array, *, guidance: float, num_steps: int
) -> jax.Array:
    """Integrates from noise (time 1) to data (time 0).

    Guidance: Ho & Salimans, "Classifier-Free Diffusion Guidance" (2022); the velocity used is
    `without + guidance * (with - without)`, so 1 is no guidance.

    Args:
        velocity: the model, from `(z, t, text, drop_text)` to a velocity of the shape of z.
        noise: standard normal `(b, H, W, C)`.
        text: standardized text vectors `(b, D)`.
        guidance: strength; 1 follows the text as learned, more follows it more closely.
        num_steps: Euler steps of equal length.

    Returns:
        Standardized latents float32 `(b, H, W, C)`.
    """
    count = noise.shape[0]
    # Both halves of guidance go through the model as one batch.
    texts = jnp.concatenate([text, text])
    drop_text = jnp.arange(2 * count) >= count

    def euler_step(z: jax.Array, time: jax.Array) -> tuple[jax.Array, None]:
        both = velocity(jnp.concatenate([z, z]), jnp.full((2 * count,), time), texts, drop_text)
        with_text, without = jnp.split(both, 2)
        return z - (without + guidance * (with_text - without)) / num_steps, None

    times = 1 - jnp.arange(num_steps, dtype=jnp.float32) / num_steps
    return jax.lax.scan(euler_step, noise.astype(jnp.float32), times)[0]
