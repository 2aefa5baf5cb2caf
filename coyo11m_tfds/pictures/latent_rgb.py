"""Pictures from latents without a VAE, and latents from pictures.

    rgb = latent_rgb.latents_to_rgb(latents)   # raw (..., 4, 32, 32) -> uint8 (..., 32, 32, 3)
    latents = latent_rgb.rgb_to_latents(rgb)   # the other way, for made-up data

The map is linear (`schema.RGB_FACTORS`), one pixel a latent position, so a 256-pixel image gives
a 32-pixel picture: enough to see what a model draws.
"""

import numpy as np

from coyo11m_tfds import schema


def latents_to_rgb(latents: np.ndarray) -> np.ndarray:
    """Turns latents into colours by a linear map that approximates the decoder.

    Args:
        latents: Raw latents, any float dtype, `(..., 4, H, W)`.

    Returns:
        uint8 `(..., H, W, 3)`.
    """
    scaled = np.asarray(latents, np.float32) * schema.VAE_SCALING_FACTOR
    rgb = np.einsum('...chw,cr->...hwr', scaled, schema.RGB_FACTORS) + schema.RGB_BIAS
    return np.round((np.clip(rgb, -1, 1) + 1) * 127.5).astype(np.uint8)


def rgb_to_latents(rgb: np.ndarray) -> np.ndarray:
    """Finds raw latents whose linear preview is the given picture.

    Four latent channels hold more than three colours, so many latents give one picture; the
    Moore-Penrose inverse picks those of least norm. It is a right inverse:
    `latents_to_rgb(rgb_to_latents(x)) == x`, also after rounding to float16 or bfloat16 within
    the rounding of one grey level or two.

    Args:
        rgb: uint8 `(..., H, W, 3)`.

    Returns:
        float32 raw latents `(..., 4, H, W)`.
    """
    colours = np.asarray(rgb, np.float32) / 127.5 - 1 - schema.RGB_BIAS
    scaled = np.einsum('...hwr,rc->...chw', colours, np.linalg.pinv(schema.RGB_FACTORS))
    return (scaled / schema.VAE_SCALING_FACTOR).astype(np.float32)
