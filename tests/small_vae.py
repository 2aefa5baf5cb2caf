"""Makes VAEs of random weights whose pictures are twice as large as the latents."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import torch

from coyo11m_tfds.pictures import vae_files

_WIDTH = 8


def make(folder: pathlib.Path, channels: int = 4, halvings: int = 1) -> pathlib.Path:
    """Writes an `AutoencoderTiny`, of latents with so many channels; returns the folder."""
    square = _WIDTH, _WIDTH, 3, 3
    without_bias = set()
    for number in range(1, halvings + 1):
        without_bias.add(f'encoder.layers.{number}')
        without_bias.add(f'decoder.layers.{2 * number + 1}')
    shapes = dict.fromkeys(sorted(without_bias), square) | {
        'decoder.layers.0': (_WIDTH, channels, 3, 3),
        f'decoder.layers.{2 * halvings + 2}': (3, _WIDTH, 3, 3),
        'encoder.layers.0': (_WIDTH, 3, 3, 3),
        f'encoder.layers.{halvings + 1}': (channels, _WIDTH, 3, 3),
    }
    blocks = [0] * (halvings + 1)
    config = {'num_decoder_blocks': blocks, 'num_encoder_blocks': blocks}
    return _write(folder, 'AutoencoderTiny', channels, config, shapes, without_bias)


def make_kl_encoder(folder: pathlib.Path, channels: int = 4) -> pathlib.Path:
    """Writes the encoder of an `AutoencoderKL`, which gives moments."""
    blocks = 'down_blocks.0.', 'down_blocks.1.', 'mid_block.'
    resnets = [f'{block}resnets.0' for block in blocks]
    resnets.append('mid_block.resnets.1')
    square = (_WIDTH, _WIDTH, 3, 3)
    shapes = {
        'encoder.conv_in': (_WIDTH, 3, 3, 3),
        **{f'encoder.{name}.conv{i}': square for name in resnets for i in (1, 2)},
        **{f'encoder.{name}.norm{i}': (_WIDTH,) for name in resnets for i in (1, 2)},
        'encoder.down_blocks.0.downsamplers.0.conv': square,
        'encoder.conv_norm_out': (_WIDTH,),
        'encoder.conv_out': (2 * channels, _WIDTH, 3, 3),
        'quant_conv': (2 * channels, 2 * channels, 1, 1),
    }
    config = {'down_block_types': ['DownEncoderBlock2D'] * 2, 'layers_per_block': 1}
    config |= {'norm_num_groups': 2, 'mid_block_add_attention': False}
    return _write(folder, 'AutoencoderKL', channels, config, shapes)


def make_with_diffusers(folder: pathlib.Path, kind: str, **options) -> torch.nn.Module:
    """Saves a VAE of a class in diffusers, and returns it; skips the test without diffusers."""
    diffusers = pytest.importorskip('diffusers')
    torch.manual_seed(0)
    if kind == 'AutoencoderKL':
        blocks = ['DownEncoderBlock2D'] * 3, ['UpDecoderBlock2D'] * 3
        options |= dict(zip(('down_block_types', 'up_block_types'), blocks, strict=True))
        options |= {'block_out_channels': (32, 64, 128), 'layers_per_block': 2}
    vae_class = getattr(diffusers, kind)
    vae = vae_class(latent_channels=4, **options).eval()
    for weight in vae.parameters():
        # Scales and biases begin as ones and zeros, with which a mistake would not show.
        if weight.ndim == 1:
            torch.nn.init.uniform_(weight, -0.5, 0.5)
    vae.save_pretrained(folder)
    return vae


def _write(folder, kind, channels, config, shapes, without_bias=()) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        weights[f'{name}.weight'] = 0.1 * random.normal(size=shape)
        if name not in without_bias:
            weights[f'{name}.bias'] = 0.1 * random.normal(size=shape[:1])
    weights = {name: weight.astype(np.float32) for name, weight in weights.items()}
    safetensors.numpy.save_file(weights, folder / vae_files.WEIGHTS_FILE)
    config = {'_class_name': kind, 'latent_channels': channels, **config}
    (folder / 'config.json').write_text(json.dumps(config))
    return folder
