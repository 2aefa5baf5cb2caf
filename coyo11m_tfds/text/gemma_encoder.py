"""Embeds texts with Gemma 3 in JAX: its last hidden states, averaged over the tokens.

It reads sizes, weights and tokenizer of the text model from transformers' files, of the multimodal
sizes (4B and more) too, and computes the embeddings of `hf_encoder` on TPU, GPU or CPU. It needs
neither torch nor transformers, and reads no pickles. The local devices share the rows of a batch,
and each has all weights. Batches have few shapes, and each shape is compiled once.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open

from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import gemma
from coyo11m_tfds.text.model_encoder import ModelEncoder, ModelTokenizer

# Tokens in a forward pass of one device, padding counted in: so memory stays the same however long
# the captions are. On a CPU more of them leave its caches: Gemma-3-270M takes 53 to 56 ms of CPU a
# caption of 49 tokens with 512 to 1,024 tokens, 63 with 2,048 and 80 with 4,096. An accelerator
# has enough to do with 8,192 (1.6 TFLOP of the 270M model; not measured on one), and with more, on
# several devices, the batches of a part get so tall that their rows differ in length.
CPU_BATCH_TOKENS = 1024
BATCH_TOKENS = 8192

# Gemma's own token for it; any other gives the same embeddings.
_PADDING = 0

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

# Names of sizes in config.json, and what `Gemma3TextConfig` takes where one is missing.
_SIZES = {
    'vocab_size': ('vocab_size', 262_208),
    'width': ('hidden_size', 2304),
    'mlp_width': ('intermediate_size', 9216),
    'num_heads': ('num_attention_heads', 8),
    'num_kv_heads': ('num_key_value_heads', 4),
    'head_dim': ('head_dim', 256),
    'window': ('sliding_window', 4096),
    'query_scalar': ('query_pre_attn_scalar', 256),
    'norm_epsilon': ('rms_norm_eps', 1e-6),
    'max_positions': ('max_position_embeddings', 131_072),
}
_DEPTH = 'num_hidden_layers', 26
# One layer in so many is global.
_PATTERN = 6
_LOCAL, _GLOBAL = 'sliding_attention', 'full_attention'
_LOCAL_BASE, _GLOBAL_BASE = ('rope_local_base_freq', 10_000.0), ('rope_theta', 1_000_000.0)
# Variations of the architecture that no Gemma 3 language model uses, and `gemma.Gemma` lacks.
_FIXED = {
    'hidden_activation': 'gelu_pytorch_tanh',
    'attention_bias': False,
    'attn_logit_softcapping': None,
    'use_bidirectional_attention': False,
}


class JaxTokenizer(ModelTokenizer):
    """The fast tokenizer of a Gemma 3; see `ModelTokenizer`."""

    def __init__(self, model: str, max_tokens: int) -> None:
        """Loads the tokenizer; see `text_encoders.make_tokenizer`."""
        self.checkpoint = open_checkpoint(model)
        length = min(max_tokens, self.checkpoint.config.max_positions)
        super().__init__(f'jax:{model}', length, self.checkpoint.tokenizer(), _PADDING)


class JaxEncoder(JaxTokenizer, ModelEncoder):
    """A Gemma 3 text model on the local devices.

    It computes in float32 on CPUs and in bfloat16 elsewhere; norms, softmax and averages are always
    float32.
    """

    def __init__(
        self,
        model: str,
        max_tokens: int,
        batch_tokens: int | None = None,
        dtype: jnp.dtype | type | None = None,
    ) -> None:
        """Loads tokenizer and weights; see `text_encoders.make_encoder`.

        `dtype` is that of weights and computation; None for float32 on CPUs, bfloat16 elsewhere.
        """
        devices = jax.local_devices()
        on_cpu = devices[0].platform == 'cpu'
        dtype = dtype or (jnp.float32 if on_cpu else jnp.bfloat16)
        batch_tokens = batch_tokens or (CPU_BATCH_TOKENS if on_cpu else BATCH_TOKENS)
        super().__init__(model, max_tokens)
        config = self.checkpoint.config
        self.dim = config.width
        self.dtype = jnp.dtype(dtype).name
        self._num_devices = len(devices)
        self._batch_tokens = batch_tokens * len(devices)

        mesh = Mesh(np.array(devices), ('data',))
        self._rows = NamedSharding(mesh, P('data'))
        params = load_params(self.checkpoint, dtype)
        self._params = jax.device_put(params, NamedSharding(mesh, P()))
        network = gemma.Gemma(config, dtype)
        self._pool = jax.jit(functools.partial(_pool_states, network), out_shardings=self._rows)

    def _start(
        self, tokens: Sequence[Sequence[int]], shape: tuple[int, int]
    ) -> Callable[[], np.ndarray]:
        padded, lengths = np.full(shape, _PADDING, np.int32), np.zeros(shape[0], np.int32)
        for i, ids in enumerate(tokens):
            padded[i, : len(ids)], lengths[i] = ids, len(ids)
        means = self._pool(self._params, *jax.device_put((padded, lengths), self._rows))
        return lambda: np.asarray(means)


def _pool_states(network: gemma.Gemma, params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    # Else accelerators round the operands of float32 products to fewer bits.
    precision = 'highest' if network.dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        states: Any = network.apply({'params': params}, tokens)
        return gemma.mean_states(states, lengths)


def open_checkpoint(model: str) -> 'GemmaCheckpoint':
    """Opens a folder, or a model of the hub, which it downloads if the cache lacks it."""
    folder = model_files.fetch_folder(model, 'text encoder', _HUB_FILES)
    model_files.check_weights(folder)
    try:
        return GemmaCheckpoint(folder)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f'cannot read the text encoder {model!r}: {error}') from error


def load_params(checkpoint: 'GemmaCheckpoint', dtype: jnp.dtype | type) -> dict[str, Any]:
    """Reads the parameters of `gemma.Gemma(checkpoint.config)` as NumPy arrays, each once.

    They are in `dtype`, except for the scales of norms in float32. Those of all layers are stacked
    as `(depth, ...)`.
    """
    shapes = flax.traverse_util.flatten_dict(
        gemma.abstract_params(checkpoint.config, dtype), sep='.'
    )
    params = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    targets = _targets(params)
    missing, unexpected = targets.keys() - checkpoint.names, checkpoint.names - targets.keys()
    if missing or unexpected:
        raise ValueError(
            f'{checkpoint.path}: the weights do not fit the configuration: {len(missing)} are '
            f'missing {sorted(missing)[:3]}, {len(unexpected)} unexpected '
            f'{sorted(unexpected)[:3]}. Download or save the model again.'
        )
    for name, target in targets.items():
        try:
            values = checkpoint.read(name)
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f'{checkpoint.path}: cannot read {name}: {error}. Download or save the model again.'
            ) from error
        if values.shape != target.shape or not jnp.issubdtype(values.dtype, jnp.floating):
            raise ValueError(
                f'{checkpoint.path}: {name} is {values.dtype} {values.shape}, expected floating '
                f'point {target.shape}.'
            )
        target[...] = values
    return flax.traverse_util.unflatten_dict(params, sep='.')


def _targets(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the array of each weight by its name in the files, with the axes in their order."""
    targets = {f'{stored_name}.weight': params[name] for name, stored_name in _REST.items()}
    for name, stored_name in _LAYER.items():
        for i, layer in enumerate(params[f'layers.{name}']):
            # A kernel is (in, out) here and (out, in) there.
            targets[f'layers.{i}.{stored_name}.weight'] = layer.T
    return targets


class GemmaCheckpoint:
    """A folder `path` in the form of transformers' `save_pretrained`, with the sizes `config`.

    `names` are those of the text model's weights, without their common prefix.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        raw = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
        self.config = read_config(raw, str(folder / 'config.json'))
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
        """Reads the weight with a name in `names`."""
        return self._files[self._prefix + name].get_tensor(self._prefix + name)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Returns the tokenizer, with the tokens of transformers' `AutoTokenizer`."""
        path, settings = self.path / 'tokenizer.json', self.path / 'tokenizer_config.json'
        if not path.is_file():
            raise ValueError(
                f'{path} is missing; expected the fast tokenizer in the folder of the weights. '
                '`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it.'
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The package raises nothing narrower.
        except Exception as error:
            raise ValueError(f'{path} is not a tokenizer: {error}') from error
        tokenizer.no_padding()
        options = json.loads(settings.read_text(encoding='utf-8')) if settings.is_file() else {}
        if {'add_bos_token', 'add_eos_token'} & options.keys():
            start, stop = (
                _content(options.get(f'{end}_token')) if options.get(f'add_{end}_token') else None
                for end in ('bos', 'eos')
            )
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single=' '.join(part for part in (start, '$A', stop) if part),
                special_tokens=[(t, tokenizer.token_to_id(t)) for t in (start, stop) if t],
            )
        return tokenizer


def read_config(raw: Mapping[str, Any], name: str) -> gemma.GemmaConfig:
    """Reads the content of config.json; for a multimodal model, the part for text."""
    if raw.get('model_type') not in ('gemma3', 'gemma3_text'):
        raise ValueError(
            f'{name}: model_type is {raw.get("model_type")!r}, expected gemma3_text or gemma3; '
            'hf: runs other models.'
        )
    text = raw.get('text_config', raw)
    for key, value in _FIXED.items():
        if (text.get(key) or value) != value:
            raise ValueError(f'{name}: {key} is {text[key]!r}, expected {value!r}.')
    depth, kinds = text.get(*_DEPTH), text.get('layer_types')
    if kinds is None:
        period = text.get('sliding_window_pattern', _PATTERN)
        kinds = [_LOCAL if (layer + 1) % period else _GLOBAL for layer in range(depth)]
    if len(kinds) != depth or not set(kinds) <= {_LOCAL, _GLOBAL}:
        raise ValueError(
            f'{name}: layer_types is {kinds}, expected {_LOCAL} or {_GLOBAL} for each of {depth} '
            'layers.'
        )
    return gemma.GemmaConfig(
        **{ours: text.get(*theirs) for ours, theirs in _SIZES.items()},
        is_local=tuple(kind == _LOCAL for kind in kinds),
        local_rope=_rope(text, _LOCAL, _LOCAL_BASE, name),
        global_rope=_rope(text, _GLOBAL, _GLOBAL_BASE, name),
    )


def _rope(text: Mapping[str, Any], kind: str, base: tuple[str, float], name: str) -> gemma.Rope:
    """Reads `rope_parameters` of a kind of layer, or what files older than transformers 5 have."""
    settings = dict((text.get('rope_parameters') or {}).get(kind) or {})
    if kind == _GLOBAL:
        settings |= text.get('rope_scaling') or {}
    scaling = settings.get('rope_type', settings.get('type', 'default'))
    if scaling not in ('default', 'linear'):
        raise ValueError(f'{name}: rope_type is {scaling!r}, expected default or linear.')
    factor = settings['factor'] if scaling == 'linear' else 1.0
    return gemma.Rope(settings.get('rope_theta', text.get(*base)), factor)


def _content(token: Any) -> str:
    """A special token of tokenizer_config.json, which is a string or its description."""
    return token['content'] if isinstance(token, dict) else token
