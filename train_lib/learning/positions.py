"""Sinusoids of positions and of times, and rotations of queries and keys by position."""

import jax
import jax.numpy as jnp
import numpy as np

TIME_FEATURES = 256  # sinusoids of a time
_MAX_PERIOD = 10_000.0  # of the sinusoids; as in DiT and Vaswani et al. (2017)
_ROTARY_PERIOD = 100.0  # tokens; a picture has 16 in a row
_TIME_SCALE = 1_000.0  # t in [0, 1] to the range the sinusoids are made for


def make_sinusoids(rows: int, columns: int, width: int) -> np.ndarray:
    """Returns sine-cosine vectors of positions, float32 `(rows * columns, width)`, row by row.

    Half of the numbers are of the row, half of the column, as in DiT.
    """
    angles = _angles(rows, columns, _MAX_PERIOD, width // 4)
    vectors = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return np.concatenate(list(vectors), axis=-1).astype(np.float32)


def make_rotations(rows: int, columns: int, head_dim: int) -> np.ndarray:
    """Returns rotations of queries and keys by position, float32 `(rows * columns, 2 * head_dim)`.

    Rotary position embedding (Su et al., "RoFormer", 2021), half of a head for each axis, with the
    period of Heo et al. (2024), section 3.2, as `attention_kernel.rotate_pairs` takes them.
    """
    of_rows, of_columns = _angles(rows, columns, _ROTARY_PERIOD, head_dim // 4)
    angles = np.concatenate([of_rows, of_columns], axis=-1)
    cosine = np.cos(angles)
    sine = np.sin(angles)
    # Twice, as each angle turns a pair: (x, y) to (x cos - y sin, y cos + x sin).
    return np.concatenate([cosine, cosine, -sine, sine], axis=-1).astype(np.float32)


def _angles(rows: int, columns: int, period: float, count: int) -> np.ndarray:
    """Returns the angles of each axis, position and frequency, `(2, rows * columns, count)`."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing='ij'))
    frequencies = period ** -(np.arange(count) / count)
    return places.reshape(2, -1, 1) * frequencies


def embed_times(t: jax.Array) -> jax.Array:
    """Returns sinusoids of times `(b,)` in [0, 1]: float32 `(b, 256)`."""
    # In float64, so that each is rounded only once.
    frequencies = _TIME_SCALE * _MAX_PERIOD ** -np.arange(0, 1, 2 / TIME_FEATURES)
    angles = t.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
