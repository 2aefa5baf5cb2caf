"""VAEs in diffusers' layout: config.json, checked, and weights in safetensors.

vae = vae_files.open_vae('madebyollin/taesdxl', ('decoder.',))   # or a folder
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

from coyo11m_tfds.pictures.vae_layers import VaeLayers
from coyo11m_tfds.process.errors import FieldRule, one_of
from coyo11m_tfds.process.jax_environment import promote_as_usual
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import model_fields, model_files
from coyo11m_tfds.storage.model_fields import list_of, optional, whole

WEIGHTS_FILE = 'diffusion_pytorch_model.safetensors'
MAX_STAGES = 7  # of a half; between two of them the picture is halved or doubled
_CONFIG_FILE = 'config.json'
# The files of a whole model have the VAE in a folder.
_HUB_FILES = [_CONFIG_FILE, WEIGHTS_FILE, f'vae/{_CONFIG_FILE}', f'vae/{WEIGHTS_FILE}']
# Weights of attention as diffusers before 0.17 named them.
_NEW_NAMES = {'query': 'to_q', 'key': 'to_k', 'value': 'to_v', 'proj_attn': 'to_out.0'}
_ATTENTION_MATRIX = re.compile(r'attentions\.\d+\.to_.*\.weight$')
_OLD_NAME = re.compile(r'(attentions\.\d+)\.(query|key|value|proj_attn)\.')

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
        network = networks[self.kind]
        used_names = set[str]()

        @promote_as_usual
        def apply(weights: Mapping[str, Any], x: jax.Array) -> Any:
            """Computes the network, and notes the weights that it uses."""
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
        unused_names = sorted(self.shapes.keys() - used_names)
        if unused_names:
            weights = format_count(len(unused_names), 'weight is', 'weights are')
            raise ValueError(f'{misfit}: {weights} unknown, such as {unused_names[0]!r}')
        return apply, output

    def read_weights(self) -> dict[str, np.ndarray]:
        """Returns the weights, float32, by diffusers' names of today."""
        weights = {}
        for name, stored_name in self._stored_names.items():
            stored = self._file.read(stored_name).astype(np.float32)
            # Old files have the matrices of attention as convolutions.
            weights[name] = stored.reshape(self.shapes[name].shape)
        return weights


def open_vae(model: str, prefixes: tuple[str, ...]) -> StoredVae:
    """Opens a VAE of a folder, of the folder `vae` in it, or of the hub.

    Of its weights, it has those whose names begin with one of `prefixes`. Raises a ValueError for a
    VAE of another class, and for files that cannot be read or do not say what they must.
    """
    folder, commit = _fetch_vae(model)
    try:
        config = _read_config(folder)
        # It must name its class.
        rules = {'_class_name': one_of(*KINDS)}
        model_fields.check({'_class_name': None, **config}, rules, folder / _CONFIG_FILE)
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
    folder, _ = _fetch_vae(model)
    return _read_config(folder)


def _fetch_vae(model: str) -> tuple[pathlib.Path, str]:
    """Returns the local folder of a VAE, and its commit on the hub."""
    folder = model_files.fetch_folder(model, 'VAE', _HUB_FILES)
    # The hub's cache has a folder for each commit, of its name.
    commit = '' if model_files.local_folder(model, 'VAE') else folder.name
    sub_folder = folder / 'vae'
    if sub_folder.is_dir():
        folder = sub_folder
    return folder, commit


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns config.json; of a kind that is computed here, all fields are there and checked."""
    path = folder / _CONFIG_FILE
    config = model_fields.read_object(path)
    name = config.get('_class_name')
    kind = _OTHER_KIND
    if isinstance(name, str):
        kind = KINDS.get(name, _OTHER_KIND)
    model_fields.check(config, kind.rules, path)
    return {**kind.defaults, **config}


def _rename_attention(match: re.Match[str]) -> str:
    """Returns the layer in an old name of a weight as diffusers names it today."""
    block, old_name = match.groups()
    return f'{block}.{_NEW_NAMES[old_name]}.'


def _find_weights(
    file: model_files.WeightFile, prefixes: tuple[str, ...]
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, str]]:
    """Returns the shapes of the weights and their names in the file, by their names of today."""
    shapes = dict[str, jax.ShapeDtypeStruct]()
    stored_names = dict[str, str]()
    for stored_name in sorted(file.names):
        # The other half of the VAE is not needed.
        if not stored_name.startswith(prefixes):
            continue
        name = _OLD_NAME.sub(_rename_attention, stored_name)
        if name in shapes:
            raise ValueError(f'{file.path}: has {stored_name!r} and {stored_names[name]!r}')
        shape = file.shape(stored_name)
        # In old files attention is a convolution over one position.
        if _ATTENTION_MATRIX.search(name) and shape[2:] == (1, 1):
            shape = shape[:2]
        shapes[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        stored_names[name] = stored_name
    return shapes, stored_names
