"""Distances between two sets of pictures, and between pictures and their captions.

    picture_metrics.cmmd(drawn, data)            # 0 for sets of the same distribution
    picture_metrics.frechet(drawn, data)
    picture_metrics.clip_score(drawn, captions)  # up to 100

All functions take features of one image encoder, float `(n, D)`, and compute in float64.
"""

import numpy as np

# Jayasumana et al., "Rethinking FID: Towards a Better Evaluation Metric for Image Generation",
# 2024 (arXiv 2401.09603), section 4.2: for CLIP features of length 1.
_KERNEL_WIDTH = 10.0
_SCALE = 1000.0

_ROWS = 1024  # of a matrix of distances at a time


def cmmd(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the CLIP maximum mean discrepancy, times 1,000.

    The estimator is that of Jayasumana et al. (arXiv 2401.09603): the squared maximum mean
    discrepancy with a Gaussian kernel of width 10 on features of length 1. The mean includes the
    pairs of an item with itself, so the result is at least 0, and about
    `1000 * (1 - mean kernel) * (1 / n + 1 / m)` for two samples of one distribution.
    """
    x, y = _unit(x), _unit(y)
    return _SCALE * (_mean_kernel(x, x) + _mean_kernel(y, y) - 2 * _mean_kernel(x, y))


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the Fréchet distance of normal distributions fitted to the features.

    With the features of Inception it is the FID of Heusel et al., "GANs Trained by a Two Time-Scale
    Update Rule", 2017 (arXiv 1706.08500): |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)). It grows as
    the number of pictures falls, most of all below many times D, and needs two of each.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    cov_x, cov_y = (np.atleast_2d(np.cov(z, rowvar=False)) for z in (x, y))
    # The eigenvalues of C1 C2 are those of the symmetric C1^(1/2) C2 C1^(1/2).
    values, vectors = np.linalg.eigh(cov_x)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    shared = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ cov_y @ root), 0)).sum()
    moved = np.square(x.mean(axis=0) - y.mean(axis=0)).sum()
    return float(max(0.0, moved + np.trace(cov_x) + np.trace(cov_y) - 2 * shared))


def clip_score(images: np.ndarray, texts: np.ndarray) -> float:
    """Returns 100 times the mean cosine of pictures and their captions; negative ones count as 0.

    Hessel et al., "CLIPScore", 2021 (arXiv 2104.08718), equation 1, with today's usual factor of
    100 instead of 2.5. `texts` are features of the text encoder that belongs to the image encoder.
    """
    cosines = (_unit(images) * _unit(texts)).sum(axis=1)
    return float(100 * np.maximum(cosines, 0).mean())


def _unit(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def _mean_kernel(x: np.ndarray, y: np.ndarray) -> float:
    """The mean of exp(-|a - b|^2 / (2 width^2)) over all pairs of rows of length 1."""
    sums = [
        np.exp((x[first : first + _ROWS] @ y.T - 1) / _KERNEL_WIDTH**2).sum()
        for first in range(0, len(x), _ROWS)
    ]
    return float(sum(sums)) / (len(x) * len(y))
