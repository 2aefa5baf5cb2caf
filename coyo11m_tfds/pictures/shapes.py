"""Pictures of coloured shapes, which the worlds of `coyo11m_tfds.sample_data` are made of.

A picture is 32 pixels high and 40 wide, a little wider than a crop; the crops are taken at its
left, middle and right.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Muted between green and magenta: there the preview is weak (the least singular value of
# `schema.RGB_FACTORS` is 0.08, the others are 0.85 and 0.29), so that a vivid green or purple would
# take latents many times larger than real ones.
COLOURS = {
    'red': (205, 75, 60),
    'green': (80, 135, 85),
    'blue': (45, 95, 185),
    'yellow': (240, 190, 95),
    'purple': (135, 90, 150),
    'cyan': (115, 190, 215),
    'white': (245, 245, 245),
    'black': (25, 25, 25),
}
SHAPES = ('circle', 'square', 'triangle')
PALETTE = np.array(list(COLOURS.values()), np.float32)  # `(8, 3)`

HEIGHT, WIDTH = 32, 40
CROP_SIZE, CROP_OFFSETS = 32, (0, 4, 8)
# The stretch along x that all crops have in common.
COMMON = CROP_OFFSETS[-1], WIDTH - CROP_OFFSETS[-1]

_HELD_OUT_SHARE = 5  # one combination in so many
_OVERSAMPLING = 4  # sub-pixels a side, for smooth edges
_COLOUR_JITTER = 6  # grey levels


class Thing(NamedTuple):
    """An object."""

    size: str  # '' for any
    colour: str
    shape: str


class Scene(NamedTuple):
    """What a picture shows."""

    objects: tuple[Thing, ...]
    background: str
    relation: str = ''  # of the first object to the second


def hold_out(scenes: Sequence[Scene]) -> tuple[list[Scene], list[Scene]]:
    """Returns the scenes that are made and those that are held out, in a fixed order."""
    order = np.random.Generator(np.random.Philox(key=11)).permutation(len(scenes))
    cut = len(scenes) // _HELD_OUT_SHARE
    return [scenes[i] for i in sorted(order[cut:])], [scenes[i] for i in sorted(order[:cut])]


def draw_scenes(
    scenes: Sequence[Scene], geometry: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draws scenes as uint8 `(n, HEIGHT, WIDTH, 3)` with smooth edges.

    `geometry` has x and y of centres and radii in pixels, `(n, objects, 3)`.
    """

    def jitter(names: list[str]) -> np.ndarray:
        colours = np.array([COLOURS[name] for name in names], np.float32)
        shift = rng.uniform(-_COLOUR_JITTER, _COLOUR_JITTER, (len(names), 3))
        return (colours + shift)[:, None, None]

    layers = list(zip(*(scene.objects for scene in scenes), strict=True))
    colours = [jitter([thing.colour for thing in layer]) for layer in layers]
    pictures = jitter([scene.background for scene in scenes])
    for number, layer in enumerate(layers):
        cover = pixel_coverage([thing.shape for thing in layer], geometry[:, number])[..., None]
        pictures = cover * colours[number] + (1 - cover) * pictures
    return np.round(np.clip(pictures, 0, 255)).astype(np.uint8)


def pixel_coverage(shapes: Sequence[str], geometry: np.ndarray) -> np.ndarray:
    """Returns the shares of pixels, `(n, H, W)`, inside shapes of `(x, y, radius)` in pixels."""
    fine = _OVERSAMPLING
    rows = (np.arange(HEIGHT * fine, dtype=np.float32) + 0.5) / fine
    columns = (np.arange(WIDTH * fine, dtype=np.float32) + 0.5) / fine
    x, y, radius = (values[:, None, None] for values in geometry.T)
    dy, dx = (rows[None, :, None] - y) / radius, (columns[None, None, :] - x) / radius
    # In units of the radius. The sides make the three shapes about equally large.
    tests = {
        'circle': lambda x, y: x * x + y * y <= 1,
        'square': lambda x, y: np.maximum(abs(x), abs(y)) <= 0.88,
        'triangle': lambda x, y: (y <= 0.9) & (abs(x) <= 0.58 * (y + 1.1)),
    }
    inside = np.empty((len(shapes), len(rows), len(columns)), bool)
    for shape, test in tests.items():
        mask = np.array([name == shape for name in shapes])
        inside[mask] = test(dx[mask], dy[mask])
    blocks = inside.reshape(len(shapes), HEIGHT, fine, WIDTH, fine)
    return blocks.mean((2, 4), dtype=np.float32)


def nearest_colours(picture: np.ndarray) -> np.ndarray:
    """Returns the number in `PALETTE` of the colour of every pixel, int `(H, W)`."""
    return np.linalg.norm(picture[:, :, None].astype(np.float32) - PALETTE, axis=-1).argmin(-1)
