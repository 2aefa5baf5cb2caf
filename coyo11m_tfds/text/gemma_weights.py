"""Reads Gemma 3's text model from the files that transformers reads.

    checkpoint = open_checkpoint('google/gemma-3-270m')  # of the Hugging Face hub, or its cache
    checkpoint = open_checkpoint('gemma-3-270m/')        # config.json, *.safetensors, tokenizer
    params = load_params(checkpoint, jnp.bfloat16)       # for gemma.Gemma(checkpoint.config)
    tokenizer = checkpoint.tokenizer()

Of the multimodal sizes (4B and more) only the text model is read. Needs neither torch nor
transformers, and unpickles nothing.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors import SafetensorError, safe_open

from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import gemma, gemma_config, gemma_tokenizer

# Weights by our names and those in the files (less `.weight`): of each layer, and of the rest.
_LAYER = {
    'attention_norm.scale': 'input_layernorm',
    'attention.query.kernel': 'self_attn.q_proj',
    'attention.key.kernel': 'self_attn.k_proj',
    'attention.value.kernel': 'self_attn.v_proj',
    'attention.out.kernel': 'self_attn.o_proj',
    'attention.query_norm.scale': 'self_attn.q_norm',
    'attention.key_norm.scale': 'self_attn.k_norm',
    'post_attention_norm.scale': 'post_attention_layernorm',
    'mlp_norm.scale': 'pre_feedforward_layernorm',
    'mlp.gate.kernel': 'mlp.gate_proj',
    'mlp.up.kernel': 'mlp.up_proj',
    'mlp.down.kernel': 'mlp.down_proj',
    'post_mlp_norm.scale': 'post_feedforward_layernorm',
}
_REST = {'embedding': 'embed_tokens', 'norm.scale': 'norm'}

# Weights in the files that the text model without its language-model head has no use for.
_OTHER_PARTS = re.compile(r'(.*\.)?(lm_head|vision_tower|multi_modal_projector)\.')

_HUB_FILES = ['config.json', '*.safetensors', '*.safetensors.index.json', 'tokenizer*.json']


def open_checkpoint(model: str) -> 'Checkpoint':
    """Opens a folder, or a model of the hub, which is downloaded unless it is in the cache.

    Raises:
        ValueError: there is no such model, it has not exactly one kind of weights that are safe to
            read, or it is not a Gemma 3 that `gemma.Gemma` can compute.
    """
    folder = model_files.folder(model, 'text encoder', _HUB_FILES)
    if gguf := model_files.gguf_file(folder):
        raise ValueError(f'{gguf}: jax: expected *.safetensors; for GGUF files use hf:.')
    try:
        return Checkpoint(folder)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f'cannot read the text encoder {model!r}: {error}') from error


def abstract_params(config: gemma.Config, dtype: jnp.dtype | type) -> dict[str, Any]:
    """Shapes and dtypes of what `load_params` returns, as `jax.ShapeDtypeStruct`."""
    init = gemma.Gemma(config).init
    shapes = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))['params']

    def stored(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kind = np.float32 if path[-1].key == 'scale' else dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind)

    return jax.tree_util.tree_map_with_path(stored, shapes)


def load_params(checkpoint: 'Checkpoint', dtype: jnp.dtype | type) -> dict[str, Any]:
    """Reads all weights, each once.

    Returns:
        The parameters of `gemma.Gemma(checkpoint.config)` as NumPy arrays: of `dtype`, but scales
        of norms float32; those of all layers stacked as `(depth, ...)`.

    Raises:
        ValueError: weights are missing, unexpected, damaged, not of floating point, or not of the
            shape that the configuration implies.
    """
    shapes = flax.traverse_util.flatten_dict(abstract_params(checkpoint.config, dtype), sep='.')
    params = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    targets = _targets(params)
    missing, unexpected = targets.keys() - checkpoint.names, checkpoint.names - targets.keys()
    if missing or unexpected:
        raise ValueError(
            f'{checkpoint.path}: the weights do not fit the configuration: {len(missing)} are '
            f'missing {sorted(missing)[:3]}, {len(unexpected)} unexpected {sorted(unexpected)[:3]}.'
        )
    for name, target in targets.items():
        try:
            values = checkpoint.read(name)
        except (SafetensorError, ValueError) as error:
            raise ValueError(f'{checkpoint.path}: cannot read {name}: {error}') from error
        if values.shape != target.shape or not jnp.issubdtype(values.dtype, jnp.floating):
            raise ValueError(
                f'{checkpoint.path}: {name} is {values.dtype} {values.shape}, expected floating '
                f'point {target.shape}.'
            )
        target[...] = values
    return flax.traverse_util.unflatten_dict(params, sep='.')


def _targets(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where to write each weight, by its name in the files, in the files' order of axes."""
    targets = {f'{theirs}.weight': params[ours] for ours, theirs in _REST.items()}
    for ours, theirs in _LAYER.items():
        for i, stacked in enumerate(params[f'layers.{ours}']):
            # A kernel is (in, out) here and (out, in) there.
            targets[f'layers.{i}.{theirs}.weight'] = stacked.T
    return targets


class Checkpoint:
    """A folder as `save_pretrained` of transformers writes it.

    Attributes:
        path: of the folder.
        config: sizes of the model.
        names: of the text model's weights, without the prefix that they share.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        raw = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
        self.config = gemma_config.from_transformers(raw, str(folder / 'config.json'))
        index = folder / 'model.safetensors.index.json'
        paths = set(folder.glob('*.safetensors'))
        if index.is_file():
            shards = json.loads(index.read_text(encoding='utf-8'))['weight_map'].values()
            paths = {folder / shard for shard in shards}
        self._files: dict[str, safe_open] = {}
        for path in sorted(paths):
            file = safe_open(path, 'numpy')
            for name in file.keys():  # noqa: SIM118, it is not a mapping
                if name in self._files:
                    raise ValueError(f'{path}: {name} comes in another file of the folder too.')
                self._files[name] = file
        text = {name for name in self._files if not _OTHER_PARTS.match(name)}
        self._prefix = next((n for n in text if n.endswith('embed_tokens.weight')), '')
        self._prefix = self._prefix.removesuffix('embed_tokens.weight')
        self.names = frozenset(name.removeprefix(self._prefix) for name in text)

    def read(self, name: str) -> np.ndarray:
        """Returns the weight of a name in `names`."""
        name = self._prefix + name
        return self._files[name].get_tensor(name)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Returns the tokenizer; raises ValueError if it is missing."""
        return gemma_tokenizer.from_folder(self.path)
