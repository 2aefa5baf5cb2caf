"""Makes a decoder of random weights whose pictures are twice as large as the latents."""

import json
import pathlib

import numpy as np
import safetensors.numpy

from coyo11m_tfds.pictures import vae_decoder


def make(folder: pathlib.Path, channels: int = 4) -> pathlib.Path:
    """Writes the decoder, of latents with so many channels, to a folder, which it returns."""
    random = np.random.default_rng(0)
    config = {'_class_name': 'AutoencoderTiny', 'latent_channels': channels}
    (folder / 'config.json').write_text(json.dumps(config | {'num_decoder_blocks': [0, 0]}))
    shapes = {'0.weight': (8, channels), '0.bias': (8,), '3.weight': (8, 8), '4.weight': (3, 8)}
    weights = {
        f'decoder.layers.{name}': random.normal(size=(*shape, 3, 3)[: 4 if shape[1:] else 1])
        for name, shape in {**shapes, '4.bias': (3,)}.items()
    }
    weights = {name: (0.1 * weight).astype(np.float32) for name, weight in weights.items()}
    safetensors.numpy.save_file(weights, folder / vae_decoder.WEIGHTS_FILE)
    return folder
