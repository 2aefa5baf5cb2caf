"""Reads VAEs in diffusers' layout: config.json and safetensors, as `save_pretrained` writes them.

vae = vae_files.read_vae('madebyollin/taesdxl', ('decoder.',))   # or a folder
network, output = vae.bind({'AutoencoderTiny': decode}, (1, 8, 8, vae.channels))
pictures = network(vae.weights, latents)
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from coyo11m_tfds.storage import model_files

WEIGHTS_FILE = 'diffusion_pytorch_model.safetensors'
_HUB_FILES = [f'{at}{name}' for at in ('', 'vae/') for name in ('config.json', WEIGHTS_FILE)]
_KINDS = 'AutoencoderKL', 'AutoencoderTiny'
# Weights of attention as diffusers before 0.17 named them.
_NEW_NAMES = {'query': 'to_q', 'key': 'to_k', 'value': 'to_v', 'proj_attn': 'to_out.0'}
_OLD_NAME = re.compile(r'(attentions\.\d+)\.(query|key|value|proj_attn)\.')


@dataclasses.dataclass(frozen=True)
class StoredVae:
    """What the files of a VAE hold.

    Attributes:
        folder: Local folder of the files.
        commit: Commit on the hub; '' for a folder.
        config: Content of config.json.
        kind: Class in diffusers, one of `AutoencoderKL` and `AutoencoderTiny`.
        channels: Number of channels of the latents.
        weights: Those that were read, float32, by diffusers' names of today.
    """

    folder: pathlib.Path
    commit: str
    config: Mapping[str, Any]
    kind: str
    channels: int
    weights: Mapping[str, np.ndarray]

    def bind(
        self, networks: Mapping[str, Callable], sample_shape: tuple[int, ...]
    ) -> tuple[Callable, Any]:
        """Returns the network of this VAE, and what it makes of float32 input of a shape.

        `networks` are functions of the configuration, the weights and the input, by `kind`. The
        network that is returned takes the weights and the input; the second value has the shapes
        of its results. A ValueError names what does not fit.
        """
        network = functools.partial(networks[self.kind], self.config)
        weight_use = _WeightUse(self.weights)
        misfit = f'{self.folder / WEIGHTS_FILE}: does not fit config.json'
        try:
            # Computes nothing: it shows which weights are missing, unused or of another shape.
            output = jax.eval_shape(
                lambda x: network(weight_use, x), jax.ShapeDtypeStruct(sample_shape, jnp.float32)
            )
        except (KeyError, TypeError, ValueError) as error:
            reason = str(error).partition('\n')[0]
            raise ValueError(f'{misfit}: {reason}') from error
        if unused_names := sorted(self.weights.keys() - weight_use.names):
            raise ValueError(
                f'{misfit}: {len(unused_names)} weights are unknown, such as {unused_names[0]}'
            )
        return network, output


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


def read_vae(model: str, prefixes: tuple[str, ...]) -> StoredVae:
    """Reads a VAE with the weights of such names; ValueError if the files are not those of a VAE.

    `model` is a folder with config.json and safetensors, a folder that contains such a folder
    `vae`, or a name on the hub.
    """
    folder, commit = _fetch_vae(model)
    try:
        config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
        with safe_open(folder / WEIGHTS_FILE, 'numpy') as file:
            names = [n for n in file.keys() if n.startswith(prefixes)]  # noqa: SIM118
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
    fields = config if isinstance(config, dict) else {}
    kind, channels = fields.get('_class_name'), fields.get('latent_channels')
    if kind not in _KINDS:
        raise ValueError(f'{folder}: _class_name is {kind!r}, expected one of {", ".join(_KINDS)}')
    if not isinstance(channels, int) or channels < 1:
        raise ValueError(f'{folder}: latent_channels is {channels!r}, expected a number')
    return StoredVae(folder, commit, fields, kind, channels, weights)


def read_vae_config(model: str) -> Any:
    """Returns the content of a VAE's config.json."""
    return json.loads((_fetch_vae(model)[0] / 'config.json').read_text(encoding='utf-8'))


def _fetch_vae(model: str) -> tuple[pathlib.Path, str]:
    """Returns the local folder of a VAE, and its commit on the hub."""
    folder = model_files.fetch_folder(model, 'VAE', _HUB_FILES)
    commit = '' if model_files.local_folder(model, 'VAE') else folder.name
    return folder / 'vae' if (folder / 'vae').is_dir() else folder, commit
