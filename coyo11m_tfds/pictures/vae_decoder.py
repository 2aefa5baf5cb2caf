"""Decodes latents into pictures with the decoder of a VAE, in JAX.

    decoder = vae_decoder.load_decoder('madebyollin/taesdxl')   # or a folder in diffusers' layout
    rgb = decoder(latents)      # raw latents (n, 4, 32, 32) -> uint8 (n, 256, 256, 3)

It reads the decoders of diffusers' `AutoencoderKL` (the VAEs of Stable Diffusion, SDXL and similar
models) and `AutoencoderTiny` (TAESD, Ollin Boer Bohan: a distilled decoder of 1.2 million weights),
from config.json and safetensors. It needs neither torch nor diffusers, and reads no pickles.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from safetensors import SafetensorError, safe_open

from coyo11m_tfds import schema
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.storage import model_files

WEIGHTS_FILE = 'diffusion_pytorch_model.safetensors'
_HUB_FILES = [f'{at}{name}' for at in ('', 'vae/') for name in ('config.json', WEIGHTS_FILE)]
_DECODER_PREFIXES = 'decoder.', 'post_quant_conv.'  # the encoder's weights stay unread
# Factor and shift of raw latents, by the VAE: `(raw - shift) * factor` has a deviation near 1. From
# config.json of stable-diffusion-v1-5, sdxl-vae, stable-diffusion-3-medium and FLUX.1-dev.
SCALES = {
    'sd1': (0.18215, 0.0),
    'sdxl': (schema.VAE_SCALING_FACTOR, 0.0),
    'sd3': (1.5305, 0.0609),
    'flux': (0.3611, 0.1159),
}
_BATCH = 4  # pictures at a time: SDXL's decoder takes 0.3 GB for one of 256 pixels
_NORM_EPSILON = 1e-6
# Weights of attention as diffusers before 0.17 named them.
_NEW_NAMES = {'query': 'to_q', 'key': 'to_k', 'value': 'to_v', 'proj_attn': 'to_out.0'}
_OLD_NAME = re.compile(r'(attentions\.\d+)\.(query|key|value|proj_attn)\.')


def make_painter(
    vae: str, channels: int | None = None, maker: str = ''
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from raw latents `(n, C, H, W)` to uint8 `(n, height, width, 3)`.

    The arguments are as for `load_decoder`; with `vae=''` it is the linear map of `latent_rgb`.
    """
    return load_decoder(vae, channels, maker) if vae else latent_rgb.latents_to_rgb


def load_decoder(model: str, channels: int | None = None, maker: str = '') -> 'VaeDecoder':
    """Loads a decoder from a folder, or from the hub by name; ValueError if it does not fit.

    Args:
        model: A folder with config.json and safetensors, a folder that contains such a folder
            `vae`, or a name on the hub.
        channels: Number of channels of the latents; None for any.
        maker: VAE that made the latents, as the data set names it: a key of `SCALES`, or the folder
            or hub name of an `AutoencoderKL`; '' if unknown. An `AutoencoderTiny` needs its scaling
            factor; if that is unknown, SDXL's is taken, with a warning.
    """
    folder = _vae_folder(model)
    path = folder / WEIGHTS_FILE
    try:
        config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
        with safe_open(path, 'numpy') as file:
            names = [n for n in file.keys() if n.startswith(_DECODER_PREFIXES)]  # noqa: SIM118
            weights = {
                _OLD_NAME.sub(lambda match: f'{match[1]}.{_NEW_NAMES[match[2]]}.', name): (
                    file.get_tensor(name).astype(np.float32)
                )
                for name in names
            }
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(
            f'cannot read the VAE {model!r}: {error}. Expected config.json and {WEIGHTS_FILE}, as '
            'save_pretrained of diffusers writes them.'
        ) from error
    if isinstance(config, dict) and config.get('_class_name') == 'AutoencoderTiny':
        factor, shift = _scale_of_latents(model, config, maker)
        config |= {'scaling_factor': factor, 'shift_factor': shift}
    decoder = VaeDecoder(config, weights, str(path))
    if channels not in (None, decoder.channels):
        raise ValueError(
            f'the VAE {model!r} decodes latents of {decoder.channels} channels, expected '
            f'{channels}, as the data have: name the VAE that made their latents'
        )
    return decoder


def _scale_of_latents(model: str, config: Mapping[str, Any], maker: str) -> tuple[float, float]:
    """Returns factor and shift from raw latents to those that an `AutoencoderTiny` decodes."""
    reason = 'the data set does not name the VAE that made its latents'
    if maker in SCALES:
        return SCALES[maker]
    if maker:
        try:
            maker_config = json.loads((_vae_folder(maker) / 'config.json').read_text('utf-8'))
            factor, shift = maker_config['scaling_factor'], maker_config.get('shift_factor')
            return float(factor), float(shift or 0)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = (
                f'the scaling factor of {maker!r}, which made the latents, is unknown ({error})'
            )
    # TAESD's config.json has 1 for every VAE: its latents are scaled already.
    if (factor := config.get('scaling_factor', 1)) != 1:
        return factor, config.get('shift_factor') or 0.0
    logging.warning(
        '%s: %s. They are scaled as those of SDXL; others get wrong colours.', model, reason
    )
    return SCALES['sdxl']


def _vae_folder(model: str) -> pathlib.Path:
    folder = model_files.fetch_folder(model, 'VAE', _HUB_FILES)
    return folder / 'vae' if (folder / 'vae').is_dir() else folder


class VaeDecoder:
    """Turns raw latents of `channels` channels into pictures, on one device.

    One latent position becomes `factor` pixels in each direction.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, np.ndarray], path: str):
        """Takes the content of config.json, and float32 weights by diffusers' names."""
        kinds = {'AutoencoderKL': _decode_kl, 'AutoencoderTiny': _decode_tiny}
        kind = config.get('_class_name') if isinstance(config, dict) else None
        if kind not in list(kinds):
            raise ValueError(f'{path}: _class_name is {kind!r}, expected one of {", ".join(kinds)}')
        decode = functools.partial(kinds[kind], config)
        weight_use = _WeightUse(weights)
        try:
            self.channels = config['latent_channels']
            sample = jax.ShapeDtypeStruct((1, 8, 8, self.channels), jnp.float32)
            # Computes nothing: it shows which weights are missing, unused or of another shape.
            decoded = jax.eval_shape(lambda latents: decode(weight_use, latents), sample)
        except (KeyError, TypeError, ValueError) as error:
            reason = str(error).partition('\n')[0]
            raise ValueError(f'{path}: does not fit config.json: {reason}') from error
        if unused_names := sorted(weights.keys() - weight_use.names):
            raise ValueError(
                f'{path}: does not fit config.json: {len(unused_names)} weights are unknown, such '
                f'as {unused_names[0]}'
            )
        self.factor = decoded.shape[1] // 8
        self._weights = jax.device_put(dict(weights))
        self._decode = jax.jit(decode)

    def __call__(self, latents: np.ndarray) -> np.ndarray:
        """Decodes raw latents `(n, C, H, W)` to uint8 `(n, factor * H, factor * W, 3)`."""
        return np.round((np.clip(self.decode(latents), -1, 1) + 1) * 127.5).astype(np.uint8)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Decodes raw latents to float32 `(n, factor * H, factor * W, 3)`; black is -1, white 1."""
        pictures = []
        for first in range(0, len(latents), _BATCH):
            batch = np.moveaxis(np.asarray(latents[first : first + _BATCH], np.float32), 1, -1)
            # One size of batches is one compilation.
            padded = np.pad(batch, [(0, _BATCH - len(batch)), (0, 0), (0, 0), (0, 0)])
            decoded = self._decode(self._weights, jax.device_put(padded))
            pictures.append(jax.device_get(decoded)[: len(batch)])
        return np.concatenate(pictures)


class _WeightUse(dict[str, Any]):
    """Weights, and the names of those that a network has read."""

    def __init__(self, weights: Mapping[str, Any]):
        super().__init__(weights)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(f'{name} is missing')
        self.names.add(name)
        return super().__getitem__(name)


# --- Networks: latents and pictures are float32 `(n, H, W, C)`, results lie in [-1, 1] ------------

_Weights = Mapping[str, Any]


def _decode_tiny(config: Mapping[str, Any], weights: _Weights, latents: jax.Array) -> jax.Array:
    """diffusers' `DecoderTiny`, which takes scaled latents; see `_scale_of_latents`."""
    if config.get('act_fn', 'relu') != 'relu' or config.get('upsample_fn', 'nearest') != 'nearest':
        raise ValueError(
            f'act_fn is {config.get("act_fn")!r} and upsample_fn is {config.get("upsample_fn")!r}, '
            'expected relu and nearest'
        )
    layers = iter(range(1000))

    def name() -> str:
        return f'decoder.layers.{next(layers)}'

    scaled = (latents - config['shift_factor']) * config['scaling_factor']
    # A soft clamp, which is part of diffusers' decoder.
    x = 3 * jnp.tanh(scaled / 3)
    x = jax.nn.relu(_conv(weights, name(), x))
    next(layers)  # the activation
    stages = config['num_decoder_blocks']
    for number, num_blocks in enumerate(stages):
        for _ in range(num_blocks):
            block, y = name(), x
            for layer in (0, 2, 4):
                y = _conv(weights, f'{block}.conv.{layer}', y)
                y = jax.nn.relu(y) if layer < 4 else y
            x = jax.nn.relu(x + y)
        if number < len(stages) - 1:
            next(layers)  # the upsampling
            x = _upsample(x, config.get('upsampling_scaling_factor', 2))
        x = _conv(weights, name(), x)
    return 2 * x - 1


def _decode_kl(config: Mapping[str, Any], weights: _Weights, latents: jax.Array) -> jax.Array:
    """diffusers' `Decoder` of `AutoencoderKL`, which takes raw latents."""
    if {*config['up_block_types']} != {'UpDecoderBlock2D'} or config.get('act_fn') != 'silu':
        raise ValueError(
            f'up_block_types are {config["up_block_types"]} and act_fn is '
            f'{config.get("act_fn")!r}, expected only UpDecoderBlock2D and silu'
        )
    norm = functools.partial(_group_norm, weights, config.get('norm_num_groups', 32))
    x = latents
    if config.get('use_post_quant_conv', True):
        x = _conv(weights, 'post_quant_conv', x)
    x = _conv(weights, 'decoder.conv_in', x)
    x = _resnet(weights, norm, 'decoder.mid_block.resnets.0', x)
    if config.get('mid_block_add_attention', True):
        x = _self_attention(weights, norm, 'decoder.mid_block.attentions.0', x)
    x = _resnet(weights, norm, 'decoder.mid_block.resnets.1', x)
    num_stages = len(config['up_block_types'])
    for stage in range(num_stages):
        for block in range(config['layers_per_block'] + 1):
            x = _resnet(weights, norm, f'decoder.up_blocks.{stage}.resnets.{block}', x)
        if stage < num_stages - 1:
            x = _conv(weights, f'decoder.up_blocks.{stage}.upsamplers.0.conv', _upsample(x, 2))
    return _conv(weights, 'decoder.conv_out', jax.nn.silu(norm('decoder.conv_norm_out', x)))


_Norm = Callable[[str, jax.Array], jax.Array]


def _resnet(weights: _Weights, norm: _Norm, name: str, x: jax.Array) -> jax.Array:
    y = _conv(weights, f'{name}.conv1', jax.nn.silu(norm(f'{name}.norm1', x)))
    y = _conv(weights, f'{name}.conv2', jax.nn.silu(norm(f'{name}.norm2', y)))
    if x.shape[-1] != y.shape[-1]:
        x = _conv(weights, f'{name}.conv_shortcut', x)
    return x + y


def _self_attention(weights: _Weights, norm: _Norm, name: str, x: jax.Array) -> jax.Array:
    # One head over all positions.
    y = norm(f'{name}.group_norm', x).reshape(len(x), -1, x.shape[-1])

    def linear(layer: str, y: jax.Array) -> jax.Array:
        # In old files it is a convolution over one position.
        matrix = weights[f'{name}.{layer}.weight'].reshape(x.shape[-1], -1)
        return y @ matrix.T + weights[f'{name}.{layer}.bias']

    query, key, value = (linear(layer, y) for layer in ('to_q', 'to_k', 'to_v'))
    scores = query @ key.swapaxes(1, 2) * x.shape[-1] ** -0.5
    return x + linear('to_out.0', jax.nn.softmax(scores) @ value).reshape(x.shape)


def _group_norm(weights: _Weights, groups: int, name: str, x: jax.Array) -> jax.Array:
    """Normalizes groups of channels over all positions (Wu & He, "Group Normalization", 2018)."""
    grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    mean = grouped.mean(axis=(1, 3), keepdims=True)
    variance = grouped.var(axis=(1, 3), keepdims=True)
    normed = ((grouped - mean) * jax.lax.rsqrt(variance + _NORM_EPSILON)).reshape(x.shape)
    return normed * weights[f'{name}.weight'] + weights[f'{name}.bias']


def _conv(weights: _Weights, name: str, x: jax.Array) -> jax.Array:
    kernel = weights[f'{name}.weight']
    y = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'OIHW', 'NHWC')
    )
    return y + weights[f'{name}.bias'] if f'{name}.bias' in weights else y


def _upsample(x: jax.Array, factor: int) -> jax.Array:
    return x.repeat(factor, axis=1).repeat(factor, axis=2)
