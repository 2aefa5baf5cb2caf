"""VAEs in diffusers' layout (config.json and safetensors), and the layers that both halves share.

vae = vae_parts.read_vae('madebyollin/taesdxl', ('decoder.',))   # or a folder
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
_NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class StoredVae:
    """What the files of a VAE hold."""

    folder: pathlib.Path
    commit: str  # on the hub; '' for a folder
    config: Mapping[str, Any]
    kind: str  # class in diffusers, one of `_KINDS`
    channels: int  # of the latents
    weights: Mapping[str, np.ndarray]  # float32, by diffusers' names of today

    def bind(
        self, networks: Mapping[str, Callable], sample_shape: tuple[int, ...]
    ) -> tuple[Callable, Any]:
        """Returns the network of this kind, of weights and input, and the shapes of its results.

        `networks` are functions of `VaeLayers` and float32 input.
        """

        network, layers = networks[self.kind], VaeLayers(self.config, self.weights)
        misfit = f'{self.folder / WEIGHTS_FILE}: does not fit config.json'
        try:
            # Computes nothing: it shows which weights are missing, unused or of another shape.
            sample = jax.ShapeDtypeStruct(sample_shape, jnp.float32)
            output = jax.eval_shape(functools.partial(network, layers), sample)
        except (KeyError, TypeError, ValueError) as error:
            reason = str(error).partition('\n')[0]
            raise ValueError(f'{misfit}: {reason}') from error
        if unused_names := sorted(self.weights.keys() - layers.used_names):
            raise ValueError(
                f'{misfit}: {len(unused_names)} weights are unknown, such as {unused_names[0]}'
            )
        return lambda weights, x: network(VaeLayers(self.config, weights), x), output


def read_vae(model: str, prefixes: tuple[str, ...]) -> StoredVae:
    """Reads a VAE, and its weights of such names, from a folder, its folder `vae` or the hub."""
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


class VaeLayers:
    """Layers on float32 `(n, H, W, C)`, called by the names of their weights in diffusers."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Any]):
        self.config, self._weights = config, weights
        self.used_names = set[str]()

    def _weight(self, name: str) -> Any:
        if name not in self._weights:
            raise KeyError(f'{name} is missing')
        self.used_names.add(name)
        return self._weights[name]

    def check_blocks(self, field: str, block: str, activation: str) -> None:
        """Raises a ValueError for other kinds of blocks in a field, or another activation."""
        value = self.config.get(field, block)
        blocks = {value} if isinstance(value, str) else {*value}
        if blocks != {block} or self.config.get('act_fn', activation) != activation:
            raise ValueError(
                f'{field} is {value!r} and act_fn is {self.config.get("act_fn")!r}, expected only '
                f'{block} and {activation}'
            )

    def conv(self, name: str, x: jax.Array, stride: int = 1, padding: Any = 'SAME') -> jax.Array:
        """Convolves; the bias may be missing."""
        y = jax.lax.conv_general_dilated(
            x,
            self._weight(f'{name}.weight'),
            (stride, stride),
            padding,
            dimension_numbers=('NHWC', 'OIHW', 'NHWC'),
        )
        return y + self._weight(f'{name}.bias') if f'{name}.bias' in self._weights else y

    def tiny_block(self, name: str, x: jax.Array) -> jax.Array:
        """`AutoencoderTinyBlock`, of equal widths."""
        y = x
        for layer in (0, 2, 4):
            y = self.conv(f'{name}.conv.{layer}', y)
            y = jax.nn.relu(y) if layer < 4 else y
        return jax.nn.relu(x + y)

    def resnet(self, name: str, x: jax.Array) -> jax.Array:
        """`ResnetBlock2D` without a time."""
        y = self.conv(f'{name}.conv1', self._norm_silu(f'{name}.norm1', x))
        y = self.conv(f'{name}.conv2', self._norm_silu(f'{name}.norm2', y))
        if x.shape[-1] != y.shape[-1]:
            x = self.conv(f'{name}.conv_shortcut', x)
        return x + y

    def middle(self, name: str, x: jax.Array) -> jax.Array:
        """`UNetMidBlock2D`."""
        x = self.resnet(f'{name}.resnets.0', x)
        if self.config.get('mid_block_add_attention', True):
            x = self._self_attention(f'{name}.attentions.0', x)
        return self.resnet(f'{name}.resnets.1', x)

    def out(self, half: str, x: jax.Array) -> jax.Array:
        """The last layers of a half, `encoder` or `decoder`."""
        return self.conv(f'{half}.conv_out', self._norm_silu(f'{half}.conv_norm_out', x))

    def _self_attention(self, name: str, x: jax.Array) -> jax.Array:
        # One head over all positions.
        y = self._group_norm(f'{name}.group_norm', x).reshape(len(x), -1, x.shape[-1])

        def linear(layer: str, y: jax.Array) -> jax.Array:
            # In old files it is a convolution over one position.
            matrix = self._weight(f'{name}.{layer}.weight').reshape(x.shape[-1], -1)
            return y @ matrix.T + self._weight(f'{name}.{layer}.bias')

        query, key, value = (linear(layer, y) for layer in ('to_q', 'to_k', 'to_v'))
        scores = query @ key.swapaxes(1, 2) * x.shape[-1] ** -0.5
        return x + linear('to_out.0', jax.nn.softmax(scores) @ value).reshape(x.shape)

    def _norm_silu(self, name: str, x: jax.Array) -> jax.Array:
        return jax.nn.silu(self._group_norm(name, x))

    def _group_norm(self, name: str, x: jax.Array) -> jax.Array:
        """Normalizes groups of channels over all positions (Wu & He, "Group Normalization")."""
        groups = self.config.get('norm_num_groups', 32)
        grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
        mean = grouped.mean(axis=(1, 3), keepdims=True)
        variance = grouped.var(axis=(1, 3), keepdims=True)
        normed = ((grouped - mean) * jax.lax.rsqrt(variance + _NORM_EPSILON)).reshape(x.shape)
        return normed * self._weight(f'{name}.weight') + self._weight(f'{name}.bias')
