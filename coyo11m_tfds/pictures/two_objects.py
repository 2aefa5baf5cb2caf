"""A harder world: two objects of different colours on white, and how they stand to each other.

Each is small or large, and one is left of the other or above it: "A small red circle left of a
large blue square." A caption may also begin with the other one.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coyo11m_tfds.pictures import shapes
from coyo11m_tfds.pictures.shapes import COLOURS, PALETTE, SHAPES, Scene, Thing

BACKGROUND = 'white'
RADII = {'small': (3.0, 3.6), 'large': (5.0, 5.5)}  # pixels
PROMPT_GEOMETRY = np.empty((0, 3))  # a caption says no more than the scene
# From the first object to the second, along x and along y, and back.
RELATIONS = {'left of': 'right of', 'above': 'below'}
WORDINGS = (
    'A {first} {relation} a {second}.',
    'There is a {first} {relation} a {second}.',
    'The picture shows two things: a {first}, {relation} a {second}.',
)

# Mean square of the difference from the nearest outline, times the pixels of the picture, divided
# by those of the object. True pictures have at most 0.05.
MOST_DIFFERENCE = 0.15

_GAP = 1.0  # least distance of the objects, pixels
_SOLID = 1  # least pixels of one colour within a visible object
_REACH = 8  # pixels from the middle of an object to the sides of its window
_NAMES = list(COLOURS)
_WHITE = _NAMES.index(BACKGROUND)


def split_scenes() -> tuple[list[Scene], list[Scene]]:
    """Returns the combinations that are made and those that are held out, in a fixed order."""
    colours = [colour for colour in COLOURS if colour != BACKGROUND]
    things = list(itertools.starmap(Thing, itertools.product(RADII, colours, SHAPES)))
    scenes = [
        Scene((first, second), BACKGROUND, relation)
        for first, relation, second in itertools.product(things, RELATIONS, things)
        if first.colour != second.colour
    ]
    return shapes.hold_out(scenes)


def random_geometry(scenes: Sequence[Scene], rng: np.random.Generator) -> np.ndarray:
    """Returns x and y of centres and radii in pixels, float32 `(n, 2, 3)`.

    All crops show both objects whole, which are further apart along the axis of their relation than
    across it.
    """
    return np.array([_place_objects(scene, rng) for scene in scenes], np.float32)


def _place_objects(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    radii = np.array([[rng.uniform(*RADII[thing.size])] for thing in scene.objects])
    low, high = np.array([[shapes.COMMON[0], 0], [shapes.COMMON[1], shapes.HEIGHT]])
    axis = list(RELATIONS).index(scene.relation)
    while True:
        centres = rng.uniform(low + radii, high - radii)
        distance = centres[1] - centres[0]
        if distance[axis] >= max(radii.sum() + _GAP, 1.2 * abs(distance[1 - axis])):
            return np.concatenate([centres, radii], 1)


def write_caption(scene: Scene, geometry: np.ndarray, rng: np.random.Generator) -> str:
    """Writes a caption that begins with one of the two objects; `geometry` says no more."""
    things, relation = [' '.join(thing) for thing in scene.objects], scene.relation
    if rng.integers(2):
        things, relation = things[::-1], RELATIONS[relation]
    wording = WORDINGS[rng.integers(len(WORDINGS))]
    return wording.format(first=things[0], relation=relation, second=things[1])


# --- What a picture shows ------------------------------------------------------------------------


class Outline(NamedTuple):
    """The outline that differs least from an object, and the difference."""

    shape: str
    centre: np.ndarray  # x and y, pixels
    size: str
    difference: float


def score_pictures(pictures: np.ndarray, scenes: Sequence[Scene]) -> dict[str, np.ndarray]:
    """Says of pictures, uint8 `(n, 32, 32, 3)`, what of their captions they show, as bool `(n,)`.

    The two commonest colours within areas of one colour are those of the objects. The shape and the
    size of an object are those of the outline that differs least from it.
    """
    rows = [_score_picture(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    names = 'colours', 'shape', 'size', 'relation'
    return {**dict(zip(names, np.array(rows).T, strict=True)), 'all': np.all(rows, axis=1)}


def _score_picture(picture: np.ndarray, scene: Scene) -> list[bool]:
    colours = shapes.nearest_colours(picture)
    solid = _solid_areas(colours)
    counts = np.bincount(colours[solid], minlength=len(COLOURS))
    counts[_WHITE] = 0
    expected = [_NAMES.index(thing.colour) for thing in scene.objects]
    # Without both objects there is nothing to compare.
    if {*np.argsort(counts)[-2:]} != {*expected} or min(counts[expected]) < _SOLID:
        return [False] * 4
    covers = _object_coverage(picture, colours, solid, expected)
    first, second = outlines = [_fit_outline(cover) for cover in covers]
    pairs = list(zip(outlines, scene.objects, strict=True))
    are_shapes = max(first.difference, second.difference) <= MOST_DIFFERENCE
    distance, axis = second.centre - first.centre, list(RELATIONS).index(scene.relation)
    return [
        True,
        are_shapes and all(outline.shape == thing.shape for outline, thing in pairs),
        are_shapes and all(outline.size == thing.size for outline, thing in pairs),
        bool(distance[axis] > abs(distance[1 - axis])),
    ]


def _solid_areas(colours: np.ndarray) -> np.ndarray:
    """Where a pixel has the colour of its four neighbours, bool `(H, W)`.

    At its edges an object has mixed colours, which may be those of others.
    """
    solid, middle = np.zeros(colours.shape, bool), colours[1:-1, 1:-1]
    around = colours[:-2, 1:-1], colours[2:, 1:-1], colours[1:-1, :-2], colours[1:-1, 2:]
    solid[1:-1, 1:-1] = np.all([middle == x for x in around], axis=0)
    return solid


def _object_coverage(
    picture: np.ndarray, colours: np.ndarray, solid: np.ndarray, expected: list[int]
) -> list[np.ndarray]:
    """The shares of pixels that the objects of the expected colours cover, `(H, W)` each."""
    pixels = np.argwhere(np.ones(picture.shape[:2], bool))
    insides = [np.argwhere(solid & (colours == colour)) for colour in expected]
    squares = [np.square(pixels[:, None] - inside).sum(-1).min(1) for inside in insides]
    # A mixed colour does not say of which object it is, so the nearer one has the pixel.
    nearest = np.argmin(squares, axis=0).reshape(picture.shape[:2])
    # Of this picture, whose white may have a tint.
    white = np.median(picture[solid & (colours == _WHITE)], axis=0)
    covers = []
    for number, colour in enumerate(expected):
        contrast = PALETTE[colour] - white
        shares = (picture - white) @ contrast / (contrast @ contrast)
        covers.append(np.clip(shares, 0, 1) * (nearest == number))
    return covers


def _fit_outline(cover: np.ndarray) -> Outline:
    middle = [np.average(x, weights=cover) for x in np.indices(cover.shape)]
    row, column = np.round(middle).astype(int)
    window = np.pad(cover, _REACH)[row : row + 2 * _REACH, column : column + 2 * _REACH].ravel()
    names, geometry, covers = _possible_outlines()
    squares = np.square(covers).sum(1) - 2 * covers @ window
    best = squares.argmin()
    x, y, radius = geometry[best]
    size = min(RADII, key=lambda name: abs(radius - np.mean(RADII[name])))
    difference = float(squares[best] + np.square(cover).sum()) / cover.sum()
    return Outline(names[best], np.array([x + column, y + row]), size, difference)


@functools.cache
def _possible_outlines() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Shapes, geometry and coverage of outlines near the middle of a window."""
    radii = np.concatenate([np.arange(low - 0.2, high + 0.3, 0.2) for low, high in RADII.values()])
    places = np.arange(_REACH - 2, _REACH + 2.5, 0.5)
    grid = np.stack([x.ravel() for x in np.meshgrid(places, places, radii)], 1)
    geometry = np.tile(grid, (len(SHAPES), 1)).astype(np.float32)
    names = [name for name in SHAPES for _ in grid]
    batches = [slice(i, i + 512) for i in range(0, len(names), 512)]
    covers = np.concatenate([shapes.pixel_coverage(names[x], geometry[x]) for x in batches])
    side = 2 * _REACH
    return names, geometry, covers[:, :side, :side].reshape(len(names), -1)
