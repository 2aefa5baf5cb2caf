"""Draws captions that are new to the demo's model, and measures the pictures.

    python -m train_lib.demo --workdir=demo/run

The captions are combinations of colour, shape and background that
`coyo11m_tfds.sample_data` leaves out of the data. The program prints the path
of the pictures and three shares: of the pictures with the caption's colours of
shape and background, of those with the caption's shape, and of those with all
three.
"""

import functools
from collections.abc import Sequence

import numpy as np
from absl import flags
from etils import epath

from coyo11m_tfds import sample_data, schema
from train_lib import previews, run, workdirs
from train_lib.draw import Artist

FLAGS = flags.FLAGS

NUM_PROMPTS = 64

# True pictures reach at least 0.87 with their own shape, and 0.81 with the next one on average.
LEAST_OVERLAP = 0.8

_SIZE = schema.LATENT_SHAPE[-1]
_CUT_OFF = 0.3  # share of the radius that may lie beyond the left or right border
_STEP = 0.5  # pixels from one centre to the next


def score_pictures(
    pictures: np.ndarray, scenes: Sequence[sample_data.Scene]
) -> dict[str, np.ndarray]:
    """Says what of their captions pictures, uint8 `(n, 32, 32, 3)`, show: bool `(n,)` by name."""
    # A picture shows the shape whose outline, at some place and in some size that occur in the
    # data, has the largest overlap with the shape's colour.
    pairs = [sample_data.drawn_colours(picture) for picture in pictures]
    overlaps = np.stack([_overlaps(*x) for x in zip(pictures, pairs, strict=True)])
    expected = np.array([sample_data.SHAPES.index(scene.shape) for scene in scenes])
    colours = np.array(
        [pair == (x.colour, x.background) for pair, x in zip(pairs, scenes, strict=True)]
    )
    shape = (overlaps.argmax(1) == expected) & (overlaps.max(1) >= LEAST_OVERLAP)
    return {'colours': colours, 'shape': shape, 'all three': colours & shape}


def _overlaps(picture: np.ndarray, colours: tuple[str | None, str]) -> list[float]:
    """The largest intersection over union with an outline of each of `sample_data.SHAPES`."""
    shape, background = colours
    # Without a visible shape there is nothing to compare: no outline overlaps.
    if shape is None:
        return [0.0] * len(sample_data.SHAPES)
    palette = np.array([sample_data.COLOURS[x] for x in (shape, background)], np.float32)
    to_shape, to_background = (np.linalg.norm(picture - colour, axis=-1) for colour in palette)
    shape_pixels = (to_shape < to_background).astype(np.float32).ravel()
    overlaps = []
    for outlines in map(_possible_outlines, sample_data.SHAPES):
        common = outlines @ shape_pixels
        overlaps.append(np.max(common / (outlines.sum(1) + shape_pixels.sum() - common)))
    return overlaps


@functools.cache
def _possible_outlines(shape: str) -> np.ndarray:
    low, high = sample_data.RADII
    outlines = []
    for radius in np.arange(low, high + 1):
        # Crops cut a shape at the left or right, never at the top or bottom.
        margin = (1 - _CUT_OFF) * radius
        x = np.arange(margin, _SIZE - margin + _STEP, _STEP)
        y = np.arange(radius, _SIZE - radius + _STEP, _STEP)
        x, y = (centres.ravel() for centres in np.meshgrid(x, y))
        geometry = np.stack([x, y, np.full_like(x, radius)], 1).astype(np.float32)
        covers = sample_data.pixel_coverage([shape] * len(geometry), geometry)
        outlines.append(covers[:, :, :_SIZE])
    return np.concatenate(outlines).reshape(-1, _SIZE**2)


def main() -> None:
    run.prepare()
    # The same captions for every run: their seed is fixed.
    captions, scenes = zip(*sample_data.held_out_prompts(NUM_PROMPTS), strict=True)
    folder = epath.Path(FLAGS.workdir) / previews.FOLDER
    workdirs.check_writable(folder)
    pictures = Artist(FLAGS.workdir).draw(captions)
    path = folder / 'held_out.png'
    previews.write_png(path, previews.make_grid([pictures], captions))

    print(f'pictures: {path}')
    for name, is_right in score_pictures(pictures, scenes).items():
        print(f'{name} right: {is_right.mean():.2f} ({is_right.sum()}/{NUM_PROMPTS})')


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the training run.')
    run.start(main, required=['workdir'])
