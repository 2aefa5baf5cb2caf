"""Tells how much of its caption a picture of the demo shows: both colours, and the shape.

    scores = demo_scores.judge(pictures, scenes)
    print(scores.colours, scores.shape, scores.all_three)   # shares of the pictures

The colours are named by `sample_data.drawn_colours`. The shape is that whose outline, drawn as the
data are at any place and size, overlaps best with the pixels that have the shape's colour. Neither
TensorFlow nor torch is imported here.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import sample_data, schema

# True pictures reach at least 0.87 with their own shape, and 0.81 with the next one on average.
LEAST_OVERLAP = 0.8

_SIZE = schema.LATENT_SHAPE[-1]
_CUT_OFF = 0.3  # of the radius: so much of a shape may lie beyond the left or right border
_STEP = 0.5  # pixels from one centre to the next
_BATCH = 1024  # outlines drawn at a time


class Scores(NamedTuple):
    """Shares of the pictures, and a mean.

    Attributes:
        colours: both colours are those of the caption.
        shape: the shape is that of the caption, and an outline overlaps enough with it.
        all_three: both of these.
        overlap: with the best outline of the caption's shape, from 0 to 1, on average.
    """

    colours: float
    shape: float
    all_three: float
    overlap: float


def judge(pictures: np.ndarray, scenes: Sequence[sample_data.Scene]) -> Scores:
    """Scores pictures uint8 `(n, 32, 32, 3)` by what they were to show."""
    colours = np.array(
        [
            sample_data.drawn_colours(picture) == (scene.colour, scene.background)
            for picture, scene in zip(pictures, scenes, strict=True)
        ]
    )
    found = np.stack([overlaps(picture) for picture in pictures])
    asked = np.array([sample_data.SHAPES.index(scene.shape) for scene in scenes])
    shape = (found.argmax(1) == asked) & (found.max(1) >= LEAST_OVERLAP)
    overlap = found[np.arange(len(found)), asked]
    return Scores(*(float(x.mean()) for x in (colours, shape, colours & shape, overlap)))


def overlaps(picture: np.ndarray) -> np.ndarray:
    """How well each of `sample_data.SHAPES` fits what stands out from the background.

    Args:
        picture: uint8 `(32, 32, 3)`.

    Returns:
        float32 `(3,)`: the largest intersection over union with an outline of that shape; zeros
        where nothing stands out.
    """
    drawn = _figure(picture).ravel()
    best = []
    for shape in sample_data.SHAPES:
        outlines, areas = _outlines(shape)
        common = outlines @ drawn
        best.append(np.max(common / (areas + drawn.sum() - common)))
    return np.array(best, np.float32)


def _figure(picture: np.ndarray) -> np.ndarray:
    """Pixels that are nearer to the shape's colour than to the background's: float32, 0 or 1."""
    shape, background = sample_data.drawn_colours(picture)
    if shape is None:
        return np.zeros(picture.shape[:2], np.float32)
    inside, outside = (
        np.linalg.norm(picture - np.array(sample_data.COLOURS[name], np.float32), axis=-1)
        for name in (shape, background)
    )
    return (inside < outside).astype(np.float32)


@functools.cache
def _outlines(shape: str) -> tuple[np.ndarray, np.ndarray]:
    """All outlines of a shape, float32 `(n, 1024)`, and the area of each, `(n,)`."""
    low, high = sample_data.RADII
    grids = []
    for radius in np.arange(low, high + 1):
        beyond = (1 - _CUT_OFF) * radius
        x = np.arange(beyond, _SIZE - beyond + _STEP, _STEP)
        y = np.arange(radius, _SIZE - radius + _STEP, _STEP)
        grids.append(np.stack([*np.meshgrid(x, y), np.full((len(y), len(x)), radius)], -1))
    places = np.concatenate([grid.reshape(-1, 3) for grid in grids]).astype(np.float32)
    drawn = [
        sample_data.outlines(shape, *places[start : start + _BATCH].T).reshape(-1, _SIZE**2)
        for start in range(0, len(places), _BATCH)
    ]
    outlines = np.concatenate(drawn)
    return outlines, outlines.sum(1)
