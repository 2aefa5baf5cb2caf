"""Decodes latents into pictures with the decoder of a VAE, in JAX.

    decoder = vae_decoder.load_decoder('madebyollin/taesdxl')   # or a folder in diffusers' layout
    rgb = decoder(latents)      # raw latents (n, 4, 32, 32) -> uint8 (n, 256, 256, 3)

It reads the decoders of diffusers' `AutoencoderKL` (the VAEs of Stable Diffusion, SDXL and similar
models) and `AutoencoderTiny` (TAESD, Ollin Boer Bohan: a distilled decoder of 1.2 million weights),
from config.json and safetensors. It needs neither torch nor diffusers, and reads no pickles.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from coyo11m_tfds.pictures import latent_rgb, vae_files
from coyo11m_tfds.pictures.vae_layers import VaeLayers
from coyo11m_tfds.storage import model_files

_BATCH = 4  # pictures at a time: SDXL's decoder takes 0.3 GB for one of 256 pixels
_SAMPLE_SIZE = 8  # latent positions, of the input by which a network is checked


def make_painter(
    vae: str,
    channels: int | None = None,
    maker: str = '',
    recorded_scale: Sequence[float] | None = None,
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the decoder of `load_decoder` or, with `vae=''`, the linear map of `latent_rgb`.

    It makes of raw latents `(n, C, H, W)` pictures, uint8 `(n, height, width, 3)`. `recorded_scale`
    is the one that the data set has.
    """
    if vae:
        return load_decoder(vae, channels, maker, recorded_scale)
    scale = latent_rgb.find_scale(maker, recorded_scale)
    return lambda latents: latent_rgb.latents_to_rgb(latents, scale)


def load_decoder(
    model: str,
    channels: int | None = None,
    maker: str = '',
    recorded_scale: Sequence[float] | None = None,
) -> 'VaeDecoder':
    """Loads a decoder from a folder or the hub, for latents of so many channels; None for any.

    An `AutoencoderTiny` needs the scale of the VAE that made the latents: `recorded_scale`, factor
    and shift, or that of `maker`, which names this VAE: a key of `latent_rgb.SCALES`, a folder or a
    hub name; '' stands for SDXL's, with a warning. Raises a ValueError for a VAE that cannot be
    read, or decodes latents of another number of channels.
    """
    vae = vae_files.open_vae(model, ('decoder.', 'post_quant_conv.'))
    # An `AutoencoderKL` takes raw latents.
    scale = 1.0, 0.0
    if vae.kind == 'AutoencoderTiny':
        scale = scale_of_latents(model, vae.config, maker, recorded_scale)
    decoder = VaeDecoder(vae, *scale)
    if channels not in (None, decoder.channels):
        raise ValueError(
            f'the VAE {model!r} decodes latents of {decoder.channels} channels, expected '
            f'{channels}, as the data have: name the VAE that made their latents'
        )
    return decoder


def scale_of_latents(
    model: str,
    config: Mapping[str, Any],
    maker: str,
    recorded_scale: Sequence[float] | None = None,
) -> latent_rgb.Scale:
    """Returns factor and shift from raw latents to those that an `AutoencoderTiny` decodes.

    `config` is that of the decoder `model`; the other arguments are as in `load_decoder`.
    """
    # First what the data set or the name says, which needs no files.
    scale = latent_rgb.find_scale(maker, recorded_scale)
    if scale:
        return scale
    reason = 'the data set does not name the VAE that made its latents'
    if maker:
        try:
            maker_config = config
            if maker != model_files.public_name(model):
                maker_config = vae_files.read_vae_config(maker)
            shift = maker_config.get('shift_factor') or 0.0
            return maker_config['scaling_factor'], shift
        except (ValueError, LookupError) as error:
            reason = (
                f'the scaling factor of {maker!r}, which made the latents, is unknown ({error})'
            )
    # TAESD's config.json has 1 for every VAE: its latents are scaled already.
    factor = config.get('scaling_factor', 1)
    if factor != 1:
        shift = config.get('shift_factor') or 0.0
        return factor, shift
    logging.warning(
        '%s: %s. They are scaled as those of SDXL; others get wrong colours.', model, reason
    )
    return latent_rgb.SCALES['sdxl']


class VaeDecoder:
    """Turns raw latents into pictures, on one device."""

    def __init__(self, vae: vae_files.StoredVae, factor: float, shift: float):
        """Takes the files, and the scale of raw latents as `latent_rgb.SCALES` has it."""
        networks = {'AutoencoderKL': _decode_kl, 'AutoencoderTiny': _decode_tiny}
        sample_shape = (1, _SAMPLE_SIZE, _SAMPLE_SIZE, vae.channels)
        network, output = vae.bind(networks, sample_shape)
        self.channels = vae.channels
        # Pixels of a latent position, in each direction.
        self.factor = output.shape[1] // _SAMPLE_SIZE
        self._weights = jax.device_put(vae.read_weights())
        # Weights are an argument: as constants they would be part of what is compiled.
        self._decode = jax.jit(lambda weights, x: network(weights, (x - shift) * factor))

    def __call__(self, latents: np.ndarray) -> np.ndarray:
        """Decodes raw latents `(n, C, H, W)` to uint8 `(n, factor * H, factor * W, 3)`."""
        return latent_rgb.colours_to_bytes(self.decode(latents))

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Decodes raw latents to float32 `(n, factor * H, factor * W, 3)`; black is -1, white 1."""
        pictures = []
        for first in range(0, len(latents), _BATCH):
            batch = np.asarray(latents[first : first + _BATCH], np.float32)
            # Data sets have the channels first, the network has them last.
            batch = np.moveaxis(batch, 1, -1)
            count = len(batch)
            # One size of batches is one compilation.
            padded = np.pad(batch, [(0, _BATCH - count), (0, 0), (0, 0), (0, 0)])
            decoded = self._decode(self._weights, jax.device_put(padded))
            pictures.append(jax.device_get(decoded)[:count])
        return np.concatenate(pictures)


# --- Networks: latents and pictures are float32 `(n, H, W, C)`, results lie in [-1, 1] ------------


def _decode_tiny(layers: VaeLayers, latents: jax.Array) -> jax.Array:
    """diffusers' `DecoderTiny`, which takes scaled latents; see `scale_of_latents`."""
    names = (f'decoder.layers.{number}' for number in itertools.count())
    stages = layers.config['num_decoder_blocks']
    widths = layers.widths('decoder_block_out_channels', len(stages))
    # A soft clamp, which is part of diffusers' decoder.
    x = 3 * jnp.tanh(latents / 3)
    x = jax.nn.relu(layers.conv(next(names), x, widths[0]))
    next(names)  # the activation
    for number, num_blocks in enumerate(stages):
        for _ in range(num_blocks):
            x = layers.tiny_block(next(names), x)
        if number < len(stages) - 1:
            next(names)  # the upsampling
            x = _upsample(x, layers.config['upsampling_scaling_factor'])
            x = layers.conv(next(names), x, widths[number], has_bias=False)
    return 2 * layers.conv(next(names), x, width=3) - 1


def _decode_kl(layers: VaeLayers, latents: jax.Array) -> jax.Array:
    """diffusers' `Decoder` of `AutoencoderKL`, which takes raw latents."""
    num_stages = len(layers.config['up_block_types'])
    # From the latents to the picture, so the widest comes first.
    widths = layers.widths('block_out_channels', num_stages)[::-1]
    x = latents
    if layers.config['use_post_quant_conv']:
        x = layers.conv('post_quant_conv', x, x.shape[-1], size=1)
    x = layers.conv('decoder.conv_in', x, widths[0])
    x = layers.middle('decoder.mid_block', x)
    for stage, width in enumerate(widths):
        block = f'decoder.up_blocks.{stage}'
        for number in range(layers.config['layers_per_block'] + 1):
            x = layers.resnet(f'{block}.resnets.{number}', x, width)
        if stage < num_stages - 1:
            x = _upsample(x, 2)
            x = layers.conv(f'{block}.upsamplers.0.conv', x, x.shape[-1])
    return layers.out('decoder', x, width=3)


def _upsample(x: jax.Array, factor: int) -> jax.Array:
    """Repeats each position, in both directions."""
    return x.repeat(factor, axis=1).repeat(factor, axis=2)
