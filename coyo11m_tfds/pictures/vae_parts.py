"""VAEs in diffusers' layout (config.json and safetensors), and the layers that both halves share.

vae = vae_parts.open_vae('madebyollin/taesdxl', ('decoder.',))   # or a folder
network, output = vae.bind({'AutoencoderTiny': decode}, (1, 8, 8, vae.channels))
pictures = network(vae.read_weights(), latents)
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coyo11m_tfds.process.errors import FieldRule, one_of
from coyo11m_tfds.process.jax_environment import promote_as_usual
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import model_fields, model_files
from coyo11m_tfds.storage.model_fields import list_of, optional, whole

WEIGHTS_FILE = 'diffusion_pytorch_model.safetensors'
MAX_STAGES = 7  # of a half; between two of them the picture is halved or doubled
_HUB_FILES = [f'{at}{name}' for at in ('', 'vae/') for name in ('config.json', WEIGHTS_FILE)]
# Weights of attention as diffusers before 0.17 named them.
_NEW_NAMES = {'query': 'to_q', 'key': 'to_k', 'value': 'to_v', 'proj_attn': 'to_out.0'}
_ATTENTION_MATRIX = re.compile(r'attentions\.\d+\.to_.*\.weight$')
_OLD_NAME = re.compile(r'(attentions\.\d+)\.(query|key|value|proj_attn)\.')
_NORM_EPSILON = 1e-6

_WIDTHS = list_of(whole(1, 65_536), MAX_STAGES)
_SCALE_RULES = {
    'scaling_factor': model_fields.number(1e-6, 1e6),
    'shift_factor': optional(model_fields.number(-1e6, 1e6)),
}
_RULES = {
    'latent_channels': whole(1, 1024),
    'in_channels': model_fields.exactly(3),
    'out_channels': model_fields.exactly(3),
    **_SCALE_RULES,
}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The fields of one class of diffusers: what they may be, and what they are if missing."""

    rules: Mapping[str, FieldRule]
    defaults: Mapping[str, Any]


KINDS = {
    'AutoencoderKL': _Kind(
        rules={
            **_RULES,
            'act_fn': one_of('silu'),
            'down_block_types': list_of(one_of('DownEncoderBlock2D'), MAX_STAGES),
            'up_block_types': list_of(one_of('UpDecoderBlock2D'), MAX_STAGES),
            'block_out_channels': _WIDTHS,
            'layers_per_block': whole(1, 64),
            'norm_num_groups': whole(1, 65_536),
            'use_quant_conv': model_fields.BOOLEAN,
            'use_post_quant_conv': model_fields.BOOLEAN,
            'mid_block_add_attention': model_fields.BOOLEAN,
        },
        defaults={
            'latent_channels': 4,
            'down_block_types': ['DownEncoderBlock2D'],
            'up_block_types': ['UpDecoderBlock2D'],
            'layers_per_block': 1,
            'norm_num_groups': 32,
            'use_quant_conv': True,
            'use_post_quant_conv': True,
            'mid_block_add_attention': True,
            'scaling_factor': 0.18215,
            'shift_factor': None,
        },
    ),
    'AutoencoderTiny': _Kind(
        rules={
            **_RULES,
            'act_fn': one_of('relu'),
            'upsample_fn': one_of('nearest'),
            'num_encoder_blocks': list_of(whole(0, 64), MAX_STAGES),
            'num_decoder_blocks': list_of(whole(0, 64), MAX_STAGES),
            'encoder_block_out_channels': _WIDTHS,
            'decoder_block_out_channels': _WIDTHS,
            'upsampling_scaling_factor': whole(1, 2),
        },
        defaults={
            'latent_channels': 4,
            'num_encoder_blocks': [1, 3, 3, 3],
            'num_decoder_blocks': [3, 3, 3, 1],
            'upsampling_scaling_factor': 2,
            'scaling_factor': 1.0,
            'shift_factor': None,
        },
    ),
}

# Only the scale of its latents is of use here.
_OTHER_KIND = _Kind(rules=_SCALE_RULES, defaults={})


@dataclasses.dataclass(frozen=True)
class StoredVae:
    """What the files of a VAE hold; no weight has been read."""

    folder: pathlib.Path
    commit: str  # on the hub; '' for a folder
    config: Mapping[str, Any]  # with the defaults of diffusers, each field within its bounds
    shapes: Mapping[str, jax.ShapeDtypeStruct]  # float32, by diffusers' names of today
    _file: model_files.WeightFile
    _stored_names: Mapping[str, str]  # in the file, by those of today

    @property
    def kind(self) -> str:
        """Name of the class in diffusers."""
        return self.config['_class_name']

    @property
    def channels(self) -> int:
        """Number of channels of the latents."""
        return self.config['latent_channels']

    def bind(
        self, networks: Mapping[str, Callable], sample_shape: tuple[int, ...]
    ) -> tuple[Callable, Any]:
        """Returns the network of this kind, of weights and input, and the shapes of its results.

        `networks` are functions of `VaeLayers` and float32 input. Raises a ValueError for weights
        that are missing, unused or of another shape than config.json says.
        """
        network, used_names = networks[self.kind], set[str]()

        @promote_as_usual
        def apply(weights: Mapping[str, Any], x: jax.Array) -> Any:
            layers = VaeLayers(self.config, weights)
            output = network(layers, x)
            used_names.update(layers.used_names)
            return output

        misfit = f'{self.folder / WEIGHTS_FILE}: does not fit config.json'
        try:
            # Computes nothing, and reads no weights.
            sample = jax.ShapeDtypeStruct(sample_shape, jnp.float32)
            output = jax.eval_shape(apply, dict(self.shapes), sample)
        except (TypeError, ValueError) as error:
            reason = str(error).partition('\n')[0]
            raise ValueError(f'{misfit}: {reason}') from error
        if unused_names := sorted(self.shapes.keys() - used_names):
            weights = format_count(len(unused_names), 'weight is', 'weights are')
            raise ValueError(f'{misfit}: {weights} unknown, such as {unused_names[0]!r}')
        return apply, output

    def read_weights(self) -> dict[str, np.ndarray]:
        """Reads the weights, float32, by diffusers' names of today."""
        return {
            name: self._file.read(stored_name).astype(np.float32).reshape(self.shapes[name].shape)
            for name, stored_name in self._stored_names.items()
        }


def open_vae(model: str, prefixes: tuple[str, ...]) -> StoredVae:
    """Opens a VAE, with its weights of such names, of a folder, its folder `vae` or the hub."""
    folder, commit = _fetch_vae(model)
    try:
        config = _read_config(folder)
        kinds = {'_class_name': one_of(*KINDS)}
        model_fields.check({'_class_name': None, **config}, kinds, folder / 'config.json')
        file = model_files.WeightFile(folder / WEIGHTS_FILE)
        shapes, stored_names = _find_weights(file, prefixes)
    except ValueError as error:
        raise ValueError(
            f'cannot read the VAE {model!r}: {error}. Expected config.json and {WEIGHTS_FILE}, as '
            'save_pretrained of diffusers writes them.'
        ) from error
    return StoredVae(folder, commit, config, shapes, file, stored_names)


def read_vae_config(model: str) -> dict[str, Any]:
    """Returns config.json of a VAE of any class; its scale lies within bounds, if it has one."""
    return _read_config(_fetch_vae(model)[0])


def _fetch_vae(model: str) -> tuple[pathlib.Path, str]:
    """Returns the local folder of a VAE, and its commit on the hub."""
    folder = model_files.fetch_folder(model, 'VAE', _HUB_FILES)
    commit = '' if model_files.local_folder(model, 'VAE') else folder.name
    return folder / 'vae' if (folder / 'vae').is_dir() else folder, commit


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns config.json; of a kind that is computed here, all fields are there and checked."""
    path = folder / 'config.json'
    config = model_fields.read_object(path)
    name = config.get('_class_name')
    kind = KINDS.get(name, _OTHER_KIND) if isinstance(name, str) else _OTHER_KIND
    model_fields.check(config, kind.rules, path)
    return {**kind.defaults, **config}


def _find_weights(
    file: model_files.WeightFile, prefixes: tuple[str, ...]
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, str]]:
    """Returns the shapes of the weights and their names in the file, by their names of today."""
    shapes, stored_names = dict[str, jax.ShapeDtypeStruct](), dict[str, str]()
    for stored_name in sorted(name for name in file.names if name.startswith(prefixes)):
        name = _OLD_NAME.sub(lambda match: f'{match[1]}.{_NEW_NAMES[match[2]]}.', stored_name)
        if name in shapes:
            raise ValueError(f'{file.path}: has {stored_name!r} and {stored_names[name]!r}')
        shape = file.shape(stored_name)
        # In old files attention is a convolution over one position.
        if _ATTENTION_MATRIX.search(name) and shape[2:] == (1, 1):
            shape = shape[:2]
        shapes[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        stored_names[name] = stored_name
    return shapes, stored_names


class VaeLayers:
    """Layers on float32 `(n, H, W, C)`, called by the names of their weights in diffusers.

    A layer raises a ValueError if a weight is missing or of another shape than it expects.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Any]):
        self.config, self._weights = config, weights
        self.used_names = set[str]()

    def widths(self, field: str, num_stages: int) -> list[int | None]:
        """Returns the channels of each stage of a half, None if config.json does not have them."""
        widths = self.config.get(field, [None] * num_stages)
        if len(widths) != num_stages:
            raise ValueError(f'{field} is {widths}, expected one number for each of {num_stages}')
        return widths

    def conv(
        self,
        name: str,
        x: jax.Array,
        width: int | None,
        size: int = 3,
        stride: int = 1,
        padding: Any = 'SAME',
        has_bias: bool = True,
    ) -> jax.Array:
        """Convolves to `width` channels, or as many as the weight makes, with a square kernel."""
        weight = self._weight(f'{name}.weight', width, x.shape[-1], size, size)
        y = jax.lax.conv_general_dilated(
            x, weight, (stride, stride), padding, dimension_numbers=('NHWC', 'OIHW', 'NHWC')
        )
        return y + self._weight(f'{name}.bias', y.shape[-1]) if has_bias else y

    def tiny_block(self, name: str, x: jax.Array) -> jax.Array:
        """`AutoencoderTinyBlock`, of equal widths."""
        y = x
        for layer in (0, 2, 4):
            y = self.conv(f'{name}.conv.{layer}', y, x.shape[-1])
            y = jax.nn.relu(y) if layer < 4 else y
        return jax.nn.relu(x + y)

    def resnet(self, name: str, x: jax.Array, width: int | None) -> jax.Array:
        """`ResnetBlock2D` without a time."""
        y = self.conv(f'{name}.conv1', self._norm_silu(f'{name}.norm1', x), width)
        y = self.conv(f'{name}.conv2', self._norm_silu(f'{name}.norm2', y), y.shape[-1])
        if x.shape[-1] != y.shape[-1]:
            x = self.conv(f'{name}.conv_shortcut', x, y.shape[-1], size=1)
        return x + y

    def middle(self, name: str, x: jax.Array) -> jax.Array:
        """`UNetMidBlock2D`."""
        x = self.resnet(f'{name}.resnets.0', x, x.shape[-1])
        if self.config['mid_block_add_attention']:
            x = self._self_attention(f'{name}.attentions.0', x)
        return self.resnet(f'{name}.resnets.1', x, x.shape[-1])

    def out(self, half: str, x: jax.Array, width: int) -> jax.Array:
        """The last layers of a half, `encoder` or `decoder`."""
        return self.conv(f'{half}.conv_out', self._norm_silu(f'{half}.conv_norm_out', x), width)

    def _weight(self, name: str, *shape: int | None) -> Any:
        """Returns a weight of a shape, of which None stands for any number."""
        if name not in self._weights:
            raise ValueError(f'{name} is missing')
        weight = self._weights[name]
        expected = ', '.join('any' if size is None else str(size) for size in shape)
        fits = weight.ndim == len(shape) and all(
            stored >= 1 if size is None else stored == size
            for size, stored in zip(shape, weight.shape, strict=True)
        )
        if not fits:
            raise ValueError(f'{name} has the shape {weight.shape}, expected ({expected})')
        self.used_names.add(name)
        return weight

    def _self_attention(self, name: str, x: jax.Array) -> jax.Array:
        # One head over all positions.
        width = x.shape[-1]
        y = self._group_norm(f'{name}.group_norm', x).reshape(len(x), -1, width)

        def linear(layer: str, y: jax.Array) -> jax.Array:
            matrix = self._weight(f'{name}.{layer}.weight', width, width)
            return y @ matrix.T + self._weight(f'{name}.{layer}.bias', width)

        query, key, value = (linear(layer, y) for layer in ('to_q', 'to_k', 'to_v'))
        scores = query @ key.swapaxes(1, 2) * width**-0.5
        return x + linear('to_out.0', jax.nn.softmax(scores) @ value).reshape(x.shape)

    def _norm_silu(self, name: str, x: jax.Array) -> jax.Array:
        return jax.nn.silu(self._group_norm(name, x))

    def _group_norm(self, name: str, x: jax.Array) -> jax.Array:
        """Normalizes groups of channels over all positions (Wu & He, "Group Normalization")."""
        groups, width = self.config['norm_num_groups'], x.shape[-1]
        if width % groups:
            raise ValueError(
                f'norm_num_groups is {groups}, expected a divisor of the {width} channels of {name}'
            )
        grouped = x.reshape(len(x), -1, groups, width // groups)
        mean = grouped.mean(axis=(1, 3), keepdims=True)
        variance = grouped.var(axis=(1, 3), keepdims=True)
        normed = ((grouped - mean) * jax.lax.rsqrt(variance + _NORM_EPSILON)).reshape(x.shape)
        return normed * self._weight(f'{name}.weight', width) + self._weight(f'{name}.bias', width)
