"""Turns latents into pictures without a VAE, and pictures into latents.

The map is linear with one pixel for each latent position, so a 256-pixel image gives a 32-pixel
picture, in which a person can recognize the motif. Latents of four channels are brought to the
scale of the VAE that made them, and then count as those of a VAE of the SDXL family
(`schema.RGB_FACTORS`). Pictures of other latents show their first three principal components.
"""

import re
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema

Scale = tuple[float, float]  # factor and shift

# Of raw latents, by the VAE: `(raw - shift) * factor` has a deviation near 1. From config.json of
# stable-diffusion-v1-5, sdxl-vae, stable-diffusion-3-medium and FLUX.1-dev.
SCALES: dict[str, Scale] = {
    'sd1': (0.18215, 0.0),
    'sdxl': (schema.VAE_SCALING_FACTOR, 0.0),
    'sd3': (1.5305, 0.0609),
    'flux': (0.3611, 0.1159),
}
# Every `AutoencoderTiny` that is published (taesd, taesdxl, taesd3, taef1) makes scaled latents.
_TINY_NAME = re.compile(r'(.*/)?tae(sd|f)[^/]*', re.IGNORECASE)


def find_scale(vae: str, recorded: Sequence[float] | None = None) -> Scale | None:
    """Returns the scale of a VAE that was recorded, or that of its name; None for other names."""
    if recorded:
        factor, shift = recorded
        return factor, shift
    if _TINY_NAME.fullmatch(vae):
        return 1.0, 0.0
    return SCALES.get(vae)


def latents_to_rgb(latents: np.ndarray, scale: Scale | None = None) -> np.ndarray:
    """Returns raw latents `(..., C, H, W)` as pictures, uint8 `(..., H, W, 3)`, by a linear map.

    `scale` is that of the VAE that made them, as in `SCALES`; None stands for SDXL's.
    """
    if latents.shape[-3] == len(schema.RGB_FACTORS):
        factor, shift = scale or SCALES['sdxl']
        # The map was fitted to scaled latents, which are alike in all VAEs of the family.
        scaled = (np.asarray(latents, np.float32) - shift) * factor
        rgb = np.einsum('...chw,cr->...hwr', scaled, schema.RGB_FACTORS) + schema.RGB_BIAS
    else:
        rgb = _principal_components(np.asarray(latents, np.float64))
    return colours_to_bytes(rgb)


def colours_to_bytes(colours: np.ndarray) -> np.ndarray:
    """Returns colours from -1, black, to 1, white, as uint8 of one shape; others are cut off."""
    levels = (np.clip(colours, -1, 1) + 1) * 127.5
    return np.round(levels).astype(np.uint8)


def _principal_components(latents: np.ndarray) -> np.ndarray:
    """Returns the three directions of most variance, `(..., H, W, 3)`, as colours around 0.

    They are those of all pictures together, so that equal latents get equal colours.
    """
    channels = np.moveaxis(latents, -3, -1)
    values = channels.reshape(-1, channels.shape[-1])
    centred = values - values.mean(axis=0)
    covariance = centred.T @ centred / max(1, len(values))
    # In ascending order of the variances.
    variances, vectors = np.linalg.eigh(covariance)
    first = len(variances) - 1
    rgb = np.zeros((len(values), 3))
    for colour in range(3):
        # With fewer channels than colours, the first component is shown again: one channel is grey.
        number = first - colour if colour <= first else first
        vector = vectors[:, number]
        # Of equal values, rounding may make the variance less than 0.
        deviation = np.sqrt(max(variances[number], 1e-12))
        # The largest weight is made positive, because the sign of an eigenvector is arbitrary.
        sign = np.sign(vector[np.abs(vector).argmax()])
        # The colours span two deviations to each side of the mean.
        rgb[:, colour] = centred @ vector * sign / (2 * deviation)
    return rgb.reshape(*channels.shape[:-1], 3)


def rgb_to_latents(rgb: np.ndarray) -> np.ndarray:
    """Returns raw latents `(..., 4, H, W)`, float32, whose linear preview is `rgb`.

    `latents_to_rgb(rgb_to_latents(x)) == x` for uint8 `(..., H, W, 3)`, and up to two grey levels
    if the latents are rounded to float16 or bfloat16.
    """
    # Four channels hold more than three colours, so many latents give the same picture. The
    # Moore-Penrose inverse, a right inverse of the map, chooses those of least norm.
    colours = np.asarray(rgb, np.float32) / 127.5 - 1 - schema.RGB_BIAS
    scaled = np.einsum('...hwr,rc->...chw', colours, np.linalg.pinv(schema.RGB_FACTORS))
    return (scaled / schema.VAE_SCALING_FACTOR).astype(np.float32)
