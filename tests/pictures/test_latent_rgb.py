"""The linear map from latents to pictures and back."""

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from coyo11m_tfds.pictures import latent_rgb, vae_decoder


@hypothesis.given(hnp.arrays(np.uint8, (2, 3, 5, 3)))
def test_the_picture_comes_back(picture):
    latents = latent_rgb.rgb_to_latents(picture)
    assert latents.shape == (2, 4, 3, 5)
    assert latents.dtype == np.float32
    np.testing.assert_array_equal(latent_rgb.latents_to_rgb(latents), picture)


@pytest.mark.parametrize('dtype, grey_levels', [(np.float16, 1), (ml_dtypes.bfloat16, 2)])
def test_the_picture_survives_two_byte_floats(dtype, grey_levels):
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    back = latent_rgb.latents_to_rgb(latent_rgb.rgb_to_latents(picture).astype(dtype))
    assert np.abs(back.astype(int) - picture).max() <= grey_levels


def test_scaled_latents_give_the_picture_of_raw_ones():
    raw = np.random.default_rng(0).normal(0, 5, (4, 8, 8)).astype(np.float32)
    expected = latent_rgb.latents_to_rgb(raw).astype(int)
    for vae, factor, shift in (('madebyollin/taesdxl', 1, 0), ('flux', 0.3611, 0.1159)):
        latents = raw * 0.13025 / factor + shift
        picture = vae_decoder.make_painter('', 4, vae)(latents)
        assert np.abs(picture - expected).max() <= 1
    assert latent_rgb.find_scale('stabilityai/sdxl-vae') is None
    assert latent_rgb.find_scale('taesd', [2.0, 0.5]) == (2.0, 0.5)


def test_colours_that_no_screen_can_show_are_clipped():
    assert latent_rgb.latents_to_rgb(np.full((4, 1, 1), 1e4, np.float32)).tolist() == [
        [[0, 255, 255]]
    ]


@pytest.mark.parametrize('channels', [1, 2, 3, 16, 32])
def test_other_latents_show_their_principal_components(channels):
    """The first follows the direction that varies most, whatever the others do."""
    rng = np.random.default_rng(channels)
    strength = rng.standard_normal((5, 1, 8, 12))
    direction = np.linspace(1, 2, channels)[:, None, None]
    latents = strength * direction + 0.01 * rng.standard_normal((5, channels, 8, 12)) + 7
    rgb = latent_rgb.latents_to_rgb(latents.astype(np.float16))
    assert rgb.shape == (5, 8, 12, 3) and rgb.dtype == np.uint8
    expected = np.clip(strength[:, 0] / strength.std() / 2, -1, 1) * 127.5 + 127.5
    assert np.abs(rgb[..., 0] - expected).mean() < 10
    assert latent_rgb.latents_to_rgb(np.zeros((channels, 3, 3))).shape == (3, 3, 3)
