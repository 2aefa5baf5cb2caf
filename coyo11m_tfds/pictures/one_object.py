"""The world of the demo: one coloured shape on a coloured background, somewhere, in some size."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds.pictures import shapes
from coyo11m_tfds.pictures.shapes import COLOURS, SHAPES, Scene, Thing

WORDINGS = (
    'A {size} {colour} {shape} {place} of the picture, on a {background} background.',
    'There is one {colour} {shape} on a {background} background.',
    'The picture has a {background} background. Before it stands a {size} {colour} {shape}.',
    'A plain {background} background with a {colour} {shape} {place}.',
)
PLACES = ('at the left', 'in the middle', 'at the right')
RADII = (8.0, 12.0)  # pixels
PROMPT_GEOMETRY = np.array([[shapes.WIDTH / 2, 0, RADII[1]]])  # a large object in the middle

# True pictures reach at least 0.87 with their own shape, and 0.81 with the next one on average.
LEAST_OVERLAP = 0.8

_CUT_OFF = 0.3  # share of the radius that may lie beyond the left or right border of a crop
_STEP = 0.5  # pixels from one centre to the next


def split_scenes() -> tuple[list[Scene], list[Scene]]:
    """Returns the combinations that are made and those that are held out, in a fixed order."""
    scenes = [
        Scene((Thing('', colour, shape),), background)
        for colour, shape, background in itertools.product(COLOURS, SHAPES, COLOURS)
        if colour != background
    ]
    return shapes.hold_out(scenes)


def random_geometry(scenes: Sequence[Scene], rng: np.random.Generator) -> np.ndarray:
    """Returns x and y of centres and radii in pixels, float32 `(n, 1, 3)`."""
    radius = rng.uniform(*RADII, len(scenes))
    low, high = (
        shapes.COMMON[0] + (1 - _CUT_OFF) * radius,
        shapes.COMMON[1] - (1 - _CUT_OFF) * radius,
    )
    x = low + (high - low) * rng.random(len(scenes))
    y = radius + (shapes.HEIGHT - 2 * radius) * rng.random(len(scenes))
    return np.stack([x, y, radius], axis=1).astype(np.float32)[:, None]


def write_caption(scene: Scene, geometry: np.ndarray, rng: np.random.Generator) -> str:
    """Writes a caption of a scene whose object has such `(x, y, radius)`, `(1, 3)`."""
    (x, _, radius), middle_radius = geometry[0], sum(RADII) / 2
    size = 'large' if radius > middle_radius else 'small'
    place = PLACES[int(len(PLACES) * x / shapes.WIDTH)]
    wording = WORDINGS[rng.integers(len(WORDINGS))]
    thing = scene.objects[0]._replace(size=size)
    return wording.format(**thing._asdict(), place=place, background=scene.background)


# --- What a picture shows ------------------------------------------------------------------------


def score_pictures(pictures: np.ndarray, scenes: Sequence[Scene]) -> dict[str, np.ndarray]:
    """Says of pictures, uint8 `(n, 32, 32, 3)`, what of their captions they show, as bool `(n,)`.

    The shape of a picture is that of the outline, of all at the places and in the sizes that occur
    in the data, with the largest overlap (intersection over union) with the shape's colour.
    """
    pairs = [drawn_colours(picture) for picture in pictures]
    overlaps = np.stack([_overlaps(*x) for x in zip(pictures, pairs, strict=True)])
    expected = np.array([SHAPES.index(scene.objects[0].shape) for scene in scenes])
    expected_pairs = [(scene.objects[0].colour, scene.background) for scene in scenes]
    colours = np.array([x == y for x, y in zip(pairs, expected_pairs, strict=True)])
    shape = (overlaps.argmax(1) == expected) & (overlaps.max(1) >= LEAST_OVERLAP)
    return {'colours': colours, 'shape': shape, 'all three': colours & shape}


def drawn_colours(picture: np.ndarray) -> tuple[str | None, str]:
    """Names the colours of the shape and of the background in a picture, uint8 `(H, W, 3)`.

    The background is the commonest colour along the border, the shape the commonest other one, if
    it covers a twentieth of the picture, as every shape in the data does.
    """
    colours = shapes.nearest_colours(picture)
    border = np.concatenate([colours[0], colours[-1], colours[1:-1, 0], colours[1:-1, -1]])
    background = np.bincount(border, minlength=len(COLOURS)).argmax()
    counts = np.bincount(colours.ravel(), minlength=len(COLOURS))
    counts[background] = 0
    names = list(COLOURS)
    shape = names[counts.argmax()] if counts.max() >= colours.size / 20 else None
    return shape, names[background]


def _overlaps(picture: np.ndarray, colours: tuple[str | None, str]) -> list[float]:
    """The largest intersection over union with an outline of each of `SHAPES`."""
    shape, background = colours
    # Without a visible shape there is nothing to compare: no outline overlaps.
    if shape is None:
        return [0.0] * len(SHAPES)
    palette = np.array([COLOURS[x] for x in (shape, background)], np.float32)
    to_shape, to_background = (np.linalg.norm(picture - colour, axis=-1) for colour in palette)
    shape_pixels = (to_shape < to_background).astype(np.float32).ravel()
    overlaps = []
    for outlines in map(_possible_outlines, SHAPES):
        common = outlines @ shape_pixels
        overlaps.append(np.max(common / (outlines.sum(1) + shape_pixels.sum() - common)))
    return overlaps


@functools.cache
def _possible_outlines(shape: str) -> np.ndarray:
    size, outlines = shapes.CROP_SIZE, []
    for radius in np.arange(RADII[0], RADII[1] + 1):
        # Crops cut a shape at the left or right, never at the top or bottom.
        margin = (1 - _CUT_OFF) * radius
        x = np.arange(margin, size - margin + _STEP, _STEP)
        y = np.arange(radius, size - radius + _STEP, _STEP)
        x, y = (centres.ravel() for centres in np.meshgrid(x, y))
        geometry = np.stack([x, y, np.full_like(x, radius)], 1).astype(np.float32)
        covers = shapes.pixel_coverage([shape] * len(geometry), geometry)
        outlines.append(covers[:, :, :size])
    return np.concatenate(outlines).reshape(-1, size**2)
