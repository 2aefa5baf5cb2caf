"""Sums over the records, from which mean and standard deviation follow.

    moments = Moments(4)
    add_latents(moments, values)            # float32 (n, 3, 4, 32, 32)
    mean, std = join([moments, others]).mean_and_std()

Adding the same numbers in the same order gives the same result to the last bit, so shards may be
summed by different workers and joined in the order of the shards.
"""

from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema


class Moments:
    """Sums of several quantities.

    Attributes:
        count: number of values of each quantity.
        sums: float64 `(n,)`.
        squares: sums of squares, float64 `(n,)`.
    """

    def __init__(self, size: int):
        self.count = 0
        self.sums = np.zeros(size)
        self.squares = np.zeros(size)

    def add(self, count: int, sums: np.ndarray, squares: np.ndarray) -> None:
        """Adds `count` further values of each quantity, given their sums and squares `(n,)`."""
        self.count += count
        self.sums += sums
        self.squares += squares

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        """Returns the mean and the (population) standard deviation of each quantity."""
        mean = self.sums / self.count
        variance = np.maximum(self.squares / self.count - mean**2, 0)
        return mean.tolist(), np.sqrt(variance).tolist()


def join(parts: Sequence[Moments]) -> Moments:
    """Adds up the moments of several shards."""
    joined = Moments(len(parts[0].sums))
    for part in parts:
        joined.add(part.count, part.sums, part.squares)
    return joined


def add_latents(moments: Moments, values: np.ndarray) -> np.ndarray:
    """Adds latents to the moments of the 4 channels.

    Sums over one channel of one crop (1,024 numbers) are float32, sums of those float64: within
    1e-6 of float64 throughout, in a fifth of the time.

    Args:
        moments: of size 4.
        values: float32 `(n, 3, 4, 32, 32)`.

    Returns:
        Which samples are finite, bool `(n,)`.
    """
    channels = schema.LATENT_SHAPE[0]
    flat = values.reshape(len(values), schema.NUM_CROPS, channels, -1)
    sums = flat.sum(axis=-1)
    squares = np.einsum('ncki,ncki->nck', flat, flat)
    moments.add(
        count=flat.shape[0] * flat.shape[1] * flat.shape[3],
        sums=sums.sum(axis=(0, 1), dtype=np.float64),
        squares=squares.sum(axis=(0, 1), dtype=np.float64),
    )
    return np.isfinite(squares).all(axis=(1, 2))


def add_vectors(moments: Moments, vectors: np.ndarray) -> None:
    """Adds vectors `(n, dim)` to moments of size `dim`."""
    exact = vectors.astype(np.float64)
    moments.add(count=len(exact), sums=exact.sum(axis=0), squares=(exact**2).sum(axis=0))
