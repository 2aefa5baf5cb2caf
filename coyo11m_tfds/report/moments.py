"""Sums over the records, from which mean and standard deviation follow.

    moments = Moments(4)
    finite = add_latents(moments, values)   # float32 (n, 3, 4, 32, 32) -> bool (n,)
    mean, std = join([moments, others]).mean_and_std()

Adding the same blocks of numbers in the same order gives the same result to the last bit, so shards
may be summed by different workers and joined in the order of the shards.
"""

import math
from collections.abc import Sequence
from typing import Self

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
        """Returns the mean and the (population) standard deviation of each quantity.

        Raises:
            ValueError: no value was added.
        """
        if not self.count:
            raise ValueError('moments of no value have neither mean nor standard deviation.')
        mean = self.sums / self.count
        variance = np.maximum(self.squares / self.count - mean**2, 0)
        return mean.tolist(), np.sqrt(variance).tolist()

    def to_json(self) -> dict:
        """Returns plain values from which `from_json` restores these moments to the last bit."""
        return {'count': self.count, 'sums': self.sums.tolist(), 'squares': self.squares.tolist()}

    @classmethod
    def from_json(cls, content: dict) -> Self:
        """The inverse of `to_json`, also after writing to JSON and reading it."""
        moments = cls(len(content['sums']))
        moments.add(content['count'], np.array(content['sums']), np.array(content['squares']))
        return moments


def join(parts: Sequence[Moments]) -> Moments:
    """Adds up the moments of several shards, at least one."""
    joined = Moments(len(parts[0].sums))
    for part in parts:
        joined.add(part.count, part.sums, part.squares)
    return joined


def add_latents(
    moments: Moments, values: np.ndarray, wanted: np.ndarray | None = None
) -> np.ndarray:
    """Adds latents to the moments of the 4 channels; a sample that is not finite is left out.

    Sums over one channel of one crop (1,024 numbers) are float32, sums of those float64: in a fifth
    of the time of float64 throughout, and on real latents the mean is within 1e-8 standard
    deviations of it, the standard deviation within 1e-7 of its size. `einsum` sums 3.6 times as
    fast as `sum`, and its order does not depend on the processor as that of BLAS does.

    Args:
        moments: of size 4.
        values: float32 `(n, 3, 4, 32, 32)`.
        wanted: samples to add if they are finite, bool `(n,)`; None for all.

    Returns:
        Which samples were added, bool `(n,)`. Numbers whose squares add up to more than float32
        holds (1e19 is one) count as not finite.
    """
    channels, *rows_and_columns = schema.LATENT_SHAPE
    size = math.prod(rows_and_columns)
    flat = values.reshape(len(values), schema.NUM_CROPS, channels, size)
    sums = np.einsum('ncki->nck', flat)
    squares = np.einsum('ncki,ncki->nck', flat, flat)
    added = np.isfinite(squares).all(axis=(1, 2))
    if wanted is not None:
        added &= wanted
    moments.add(
        count=int(added.sum()) * schema.NUM_CROPS * size,
        sums=sums[added].sum(axis=(0, 1), dtype=np.float64),
        squares=squares[added].sum(axis=(0, 1), dtype=np.float64),
    )
    return added


def add_vectors(moments: Moments, vectors: np.ndarray) -> None:
    """Adds finite vectors `(n, dim)` to moments of size `dim`."""
    exact = np.asarray(vectors, np.float64)
    moments.add(count=len(exact), sums=exact.sum(axis=0), squares=(exact**2).sum(axis=0))
