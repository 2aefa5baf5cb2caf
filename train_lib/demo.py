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
from typing import NamedTuple

import numpy as np
from absl import flags
from etils import epath

from coyo11m_tfds import sample_data, schema
from train_lib import previews, run, workdirs
from train_lib.draw import Artist, load_encoder

FLAGS = flags.FLAGS

NUM_PROMPTS = 64

# True pictures reach at least 0.87 with their own shape, and 0.81 with the next one on average.
LEAST_OVERLAP = 0.8

_SIZE = schema.LATENT_SHAPE[-1]
_CUT_OFF = 0.3  # share of the radius that may lie beyond the left or right border
_STEP = 0.5  # pixels from one centre to the next
_BATCH = 1024  # outlines drawn at a time


class Scores(NamedTuple):
    """Scores of a set of pictures: three shares, and a mean.

    Attributes:
        colours: Share with both colours of the caption.
        shape: Share whose best outline is of the caption's shape and overlaps enough.
        all_three: Share with both.
        overlap: Mean overlap with the best outline of the caption's shape, from 0 to 1.
    """

    colours: float
    shape: float
    all_three: float
    overlap: float


def score_pictures(pictures: np.ndarray, scenes: Sequence[sample_data.Scene]) -> Scores:
    """Scores pictures, uint8 `(n, 32, 32, 3)`, by the scenes of their captions.

    `sample_data.drawn_colours` names the two colours of a picture. All outlines of all shapes, at
    the places and in the sizes that occur in the data, are compared with the pixels of the shape's
    colour. The shape of the picture is that of the outline with the largest overlap (intersection
    over union), which must be at least `LEAST_OVERLAP`.
    """
    colours = np.array(
        [
            sample_data.drawn_colours(picture) == (scene.colour, scene.background)
            for picture, scene in zip(pictures, scenes, strict=True)
        ]
    )
    found = np.stack([_overlaps(picture) for picture in pictures])
    asked = np.array([sample_data.SHAPES.index(scene.shape) for scene in scenes])
    shape = (found.argmax(1) == asked) & (found.max(1) >= LEAST_OVERLAP)
    overlap = found[np.arange(len(found)), asked]
    return Scores(*(float(x.mean()) for x in (colours, shape, colours & shape, overlap)))


def _overlaps(picture: np.ndarray) -> list[float]:
    """The largest intersection over union with an outline of each of `sample_data.SHAPES`."""
    shape, background = sample_data.drawn_colours(picture)
    if shape is None:
        return [0.0] * len(sample_data.SHAPES)
    inside, outside = (
        np.linalg.norm(picture - np.array(sample_data.COLOURS[name], np.float32), axis=-1)
        for name in (shape, background)
    )
    drawn = (inside < outside).astype(np.float32).ravel()
    best = []
    for name in sample_data.SHAPES:
        outlines = _possible_outlines(name)
        common = outlines @ drawn
        best.append(np.max(common / (outlines.sum(1) + drawn.sum() - common)))
    return best


@functools.cache
def _possible_outlines(shape: str) -> np.ndarray:
    """All outlines of a shape, float32 `(n, 1024)`."""
    low, high = sample_data.RADII
    grids = []
    for radius in np.arange(low, high + 1):
        beyond = (1 - _CUT_OFF) * radius
        x = np.arange(beyond, _SIZE - beyond + _STEP, _STEP)
        y = np.arange(radius, _SIZE - radius + _STEP, _STEP)
        grids.append(np.stack([*np.meshgrid(x, y), np.full((len(y), len(x)), radius)], -1))
    places = np.concatenate([grid.reshape(-1, 3) for grid in grids]).astype(np.float32)
    drawn = [
        sample_data.pixel_coverage(shape, *places[start : start + _BATCH].T).reshape(-1, _SIZE**2)
        for start in range(0, len(places), _BATCH)
    ]
    return np.concatenate(drawn)


def main() -> None:
    """Draws, measures and prints."""
    run.prepare()
    captions, scenes = zip(*sample_data.held_out_prompts(NUM_PROMPTS), strict=True)
    folder = epath.Path(FLAGS.workdir) / previews.FOLDER
    with run.errors_in_one_line():
        workdirs.check_writable(folder)
        artist = Artist(FLAGS.workdir)
        pictures = artist.draw(captions, load_encoder(artist.facts))
        path = folder / 'held_out.png'
        previews.write_png(path, previews.make_grid([pictures], captions))

    scores = score_pictures(pictures, scenes)
    print(f'pictures: {path}')
    for name in ('colours', 'shape', 'all_three'):
        share = getattr(scores, name)
        count = round(NUM_PROMPTS * share)
        print(f'{name.replace("_", " ")} right: {share:.2f} ({count}/{NUM_PROMPTS})')


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the training run.')
    run.start(main, required=['workdir'])
