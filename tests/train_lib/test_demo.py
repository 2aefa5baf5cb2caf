"""What a picture of the demo shows is recognized where it is true, and only there."""

import dataclasses

import numpy as np
import pytest

from coyo11m_tfds import sample_data
from coyo11m_tfds.pictures import latent_rgb
from train_lib import demo

_COUNT = 24


@pytest.fixture(scope='module')
def truth():
    """Pictures of combinations that are held out, by way of their latents, and what they show."""
    rng = np.random.Generator(np.random.Philox(key=5))
    _, held_out = sample_data.split_scenes()
    scenes = [held_out[i % len(held_out)] for i in range(_COUNT)]
    radius = rng.uniform(*sample_data.RADII, _COUNT)
    # As much of a shape is cut off as in the data at most.
    x = 0.7 * radius + (32 - 1.4 * radius) * rng.random(_COUNT)
    y = radius + (32 - 2 * radius) * rng.random(_COUNT)
    geometry = np.stack([x, y, radius], 1).astype(np.float32)
    cover = sample_data.pixel_coverage([scene.shape for scene in scenes], geometry)
    cover = cover[:, :, :32, None]
    inside, outside = (
        np.array([sample_data.COLOURS[getattr(scene, field)] for scene in scenes])[:, None, None]
        for field in ('colour', 'background')
    )
    pictures = cover * inside + (1 - cover) * outside
    latents = latent_rgb.rgb_to_latents(np.round(pictures).astype(np.uint8)).astype(np.float16)
    return latent_rgb.latents_to_rgb(latents.astype(np.float32)), scenes


def shares_of(pictures, scenes):
    """Of pictures with the right colours, shape, and all three."""
    return [x.mean() for x in demo.score_pictures(pictures, scenes).values()]


def test_true_pictures_are_right_and_plain_ones_wrong(truth):
    pictures, scenes = truth
    assert shares_of(pictures, scenes) == [1, 1, 1]
    mixed = pictures.copy()
    mixed[: _COUNT // 3] = sample_data.COLOURS['blue']
    assert shares_of(mixed, scenes) == pytest.approx([2 / 3, 2 / 3, 2 / 3])


@pytest.mark.parametrize(
    ('field', 'expected'), [('shape', [1, 0, 0]), ('colour', [0, 1, 0]), ('background', [0, 1, 0])]
)
def test_pictures_of_something_else_are_all_wrong_in_that(truth, field, expected):
    def another(name, names):
        return names[(names.index(name) + 1) % len(names)]

    names = sample_data.SHAPES if field == 'shape' else tuple(sample_data.COLOURS)
    pictures, scenes = truth
    others = [
        dataclasses.replace(scene, **{field: another(getattr(scene, field), names)})
        for scene in scenes
    ]
    assert shares_of(pictures, others) == expected
