"""Distances of sets of pictures against their definitions."""

import itertools

import numpy as np
import pytest
import scipy.linalg

from train_lib import picture_metrics


def features(count: int, dim: int, seed: int, shift: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, dim)) @ random.normal(size=(dim, dim)) + shift).astype('f4')


def naive_cmmd(x: np.ndarray, y: np.ndarray) -> float:
    def kernel(a, b):
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        return np.exp(-np.square(a - b).sum() / (2 * 10**2))

    def mean(a, b):
        return np.mean([kernel(p, q) for p, q in itertools.product(a, b)])

    x, y = x.astype(np.float64), y.astype(np.float64)
    return 1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y))


def naive_frechet(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    c, d = np.cov(x.T), np.cov(y.T)
    root = scipy.linalg.sqrtm(c @ d).real
    return np.square(x.mean(0) - y.mean(0)).sum() + np.trace(c + d - 2 * root)


def test_cmmd_is_its_definition(monkeypatch):
    monkeypatch.setattr(picture_metrics, '_ROWS', 7)  # fewer than there are
    x, y = features(30, 6, 0), features(20, 6, 1, shift=0.5)
    assert picture_metrics.cmmd(x, y) == pytest.approx(naive_cmmd(x, y), rel=1e-6)
    assert picture_metrics.cmmd(x, x) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize('count', [200, 5])  # of 5, covariances of 8 numbers are singular
def test_frechet_is_its_definition(count):
    x, y = features(count, 8, 0), features(2 * count, 8, 1, shift=0.5)
    assert picture_metrics.frechet(x, y) == pytest.approx(naive_frechet(x, y), rel=1e-4)
    assert picture_metrics.frechet(x, x) == pytest.approx(0, abs=1e-6)


def test_a_score_counts_directions_and_no_negative_ones():
    images = np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    texts = np.array([[1.0, 0.0], [0.0, -1.0], [0.0, 5.0]])
    assert picture_metrics.clip_score(images, texts) == pytest.approx(100 * (1 + 0.5**0.5) / 3)
