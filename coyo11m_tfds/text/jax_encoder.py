"""Embeds texts with Gemma 3 or Qwen3 in JAX: the last hidden states, averaged over the tokens.

It needs neither torch nor transformers, and reads no pickles. The local devices share the rows of a
batch, and each has all weights.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open

from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import language_model
from coyo11m_tfds.text.model_encoder import ModelEncoder, ModelTokenizer

# Tokens in a forward pass of one device, padding counted in: so memory stays the same however long
# the captions are. On a CPU more of them leave its caches: Gemma-3-270M takes 53 to 56 ms of CPU a
# caption of 49 tokens with 512 to 1,024 tokens, 63 with 2,048 and 80 with 4,096. An accelerator
# has enough to do with 8,192 (1.6 TFLOP of the 270M model; not measured on one), and with more, on
# several devices, the batches of a part get so tall that their rows differ in length.
CPU_BATCH_TOKENS = 1024
BATCH_TOKENS = 8192

# For batches, whose rows are averaged without it; any token gives the same embeddings.
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
    'mlp.gate.kernel': 'mlp.gate_proj',
    'mlp.up.kernel': 'mlp.up_proj',
    'mlp.down.kernel': 'mlp.down_proj',
}
_REST = {'embedding': 'embed_tokens', 'norm.scale': 'norm'}

# Weights in the files that the text model without its language-model head has no use for.
_OTHER_PARTS = re.compile(r'(.*\.)?(lm_head|vision_tower|multi_modal_projector)\.')

# What files of other programs, or of other contents, end in.
_MALFORMED = OSError, SafetensorError, json.JSONDecodeError, AttributeError, KeyError, TypeError

_HUB_FILES = ['config.json', '*.safetensors', '*.safetensors.index.json', 'tokenizer*.json']

# Names of sizes in config.json.
_SIZES = {
    'vocab_size': 'vocab_size',
    'width': 'hidden_size',
    'mlp_width': 'intermediate_size',
    'num_heads': 'num_attention_heads',
    'num_kv_heads': 'num_key_value_heads',
    'head_dim': 'head_dim',
    'max_positions': 'max_position_embeddings',
}
_LOCAL, _GLOBAL = 'sliding_attention', 'full_attention'


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What tells the models of one `model_type` from those of another."""

    # As of transformers for fields that config.json lacks; one layer in `sliding_window_pattern` is
    # global.
    defaults: Mapping[str, Any]
    # Values that no published model deviates from, of variations that `language_model` lacks.
    fixed: Mapping[str, Any]
    layer: Mapping[str, str]  # weights besides `_LAYER`
    norm_offset: float = 0.0  # added to the stored scales of norms
    # Of `LanguageModelConfig`, where they are not in config.json.
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA3 = Architecture(
    defaults={
        'vocab_size': 262_208,
        'hidden_size': 2304,
        'intermediate_size': 9216,
        'num_hidden_layers': 26,
        'num_attention_heads': 8,
        'num_key_value_heads': 4,
        'head_dim': 256,
        'sliding_window': 4096,
        'sliding_window_pattern': 6,
        'query_pre_attn_scalar': 256,
        'rms_norm_eps': 1e-6,
        'rope_theta': 1_000_000.0,
        'rope_local_base_freq': 10_000.0,
        'max_position_embeddings': 131_072,
    },
    fixed={
        'hidden_activation': 'gelu_pytorch_tanh',
        'attention_bias': False,
        'attn_logit_softcapping': None,
        'use_bidirectional_attention': False,
    },
    layer={
        'post_attention_norm.scale': 'post_attention_layernorm',
        'mlp_norm.scale': 'pre_feedforward_layernorm',
        'post_mlp_norm.scale': 'post_feedforward_layernorm',
    },
    norm_offset=1.0,
    fields={'activation': nn.gelu, 'scale_embeddings': True, 'post_norms': True},
)
_QWEN3 = Architecture(
    defaults={
        'vocab_size': 151_936,
        'hidden_size': 4096,
        'intermediate_size': 22_016,
        'num_hidden_layers': 32,
        'num_attention_heads': 32,
        'num_key_value_heads': 32,
        'head_dim': 128,
        'sliding_window_pattern': 1,
        'rms_norm_eps': 1e-6,
        'rope_theta': 10_000.0,
        'max_position_embeddings': 32_768,
    },
    fixed={'hidden_act': 'silu', 'attention_bias': False, 'use_sliding_window': False},
    layer={'mlp_norm.scale': 'post_attention_layernorm'},
)
_ARCHITECTURES = {'gemma3': _GEMMA3, 'gemma3_text': _GEMMA3, 'qwen3': _QWEN3}


class JaxTokenizer(ModelTokenizer):
    """The fast tokenizer of a model's folder; see `ModelTokenizer`."""

    def __init__(self, model: str, max_tokens: int) -> None:
        """Loads the tokenizer; see `text_encoders.make_tokenizer`."""
        self.checkpoint = open_checkpoint(model)
        length = min(max_tokens, self.checkpoint.config.max_positions)
        super().__init__(f'jax:{model}', length, *self.checkpoint.tokenizer())


class JaxEncoder(JaxTokenizer, ModelEncoder):
    """A language model on the local devices; norms, softmax and averages are always float32."""

    def __init__(
        self,
        model: str,
        max_tokens: int,
        batch_tokens: int | None = None,
        dtype: jnp.dtype | type | None = None,
    ) -> None:
        """Loads tokenizer and weights; computes in `dtype`, float32 on CPUs or bfloat16."""
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
        network = language_model.LanguageModel(config, dtype)
        self._pool = jax.jit(functools.partial(_pool_states, network), out_shardings=self._rows)

    def _start(
        self, tokens: Sequence[Sequence[int]], shape: tuple[int, int]
    ) -> Callable[[], np.ndarray]:
        padded, lengths = np.full(shape, _PADDING, np.int32), np.zeros(shape[0], np.int32)
        for i, ids in enumerate(tokens):
            padded[i, : len(ids)], lengths[i] = ids, len(ids)
        means = self._pool(self._params, *jax.device_put((padded, lengths), self._rows))
        return lambda: np.asarray(means)


def _pool_states(
    network: language_model.LanguageModel, params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    # Else accelerators round the operands of float32 products to fewer bits.
    precision = 'highest' if network.dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        states: Any = network.apply({'params': params}, tokens)
        return language_model.mean_states(states, lengths)


def open_checkpoint(model: str) -> 'LanguageModelCheckpoint':
    """Opens a folder, or a model of the hub, which it downloads if the cache lacks it."""
    folder = model_files.fetch_folder(model, 'text encoder', _HUB_FILES)
    model_files.check_weights(folder)
    try:
        return LanguageModelCheckpoint(folder)
    except _MALFORMED as error:
        raise ValueError(f'cannot read the text encoder {model!r}: {error}') from error


def load_params(checkpoint: 'LanguageModelCheckpoint', dtype: jnp.dtype | type) -> dict[str, Any]:
    """Reads the parameters of `LanguageModel(checkpoint.config)` in `dtype`, norms in float32.

    Those of all layers are stacked as `(depth, ...)`.
    """
    shapes = flax.traverse_util.flatten_dict(
        language_model.abstract_params(checkpoint.config, dtype), sep='.'
    )
    params = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    targets = _targets(params, checkpoint.architecture)
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
    for name, array in params.items():
        if name.endswith('.scale'):
            array += checkpoint.architecture.norm_offset
    return flax.traverse_util.unflatten_dict(params, sep='.')


def _targets(params: Mapping[str, np.ndarray], architecture: Architecture) -> dict[str, np.ndarray]:
    """Returns the array of each weight by its name in the files, with the axes in their order."""
    targets = {f'{stored_name}.weight': params[name] for name, stored_name in _REST.items()}
    for name, stored_name in {**_LAYER, **architecture.layer}.items():
        for i, layer in enumerate(params[f'layers.{name}']):
            # A kernel is (in, out) here and (out, in) there.
            targets[f'layers.{i}.{stored_name}.weight'] = layer.T
    return targets


class LanguageModelCheckpoint:
    """A folder `path` in the form of transformers' `save_pretrained`, with the sizes `config`.

    `names` are those of the text model's weights, without their common prefix.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        raw = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
        self.config = parse_model_config(raw, str(folder / 'config.json'))
        self.architecture = _ARCHITECTURES[raw['model_type']]
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

    def tokenizer(self) -> tuple[tokenizers.Tokenizer, int]:
        """Returns the tokenizer and its token for padding, both as `hf_encoder` has them."""
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
        names = [_content(options.get(f'{use}_token')) for use in ('pad', 'eos')]
        fillers = [tokenizer.token_to_id(name) for name in names if name]
        return tokenizer, next((token for token in fillers if token is not None), _PADDING)


def parse_model_config(raw: Mapping[str, Any], name: str) -> language_model.LanguageModelConfig:
    """Returns what config.json says; refuses models that would be computed wrongly."""
    architecture = _ARCHITECTURES.get(raw.get('model_type', ''))
    if architecture is None:
        raise ValueError(
            f'{name}: model_type is {raw.get("model_type")!r}, expected one of '
            f'{", ".join(_ARCHITECTURES)}; hf: runs other models.'
        )
    # That of a multimodal model has a part for text.
    text = raw.get('text_config', raw)
    for key, value in architecture.fixed.items():
        if (text.get(key) or value) != value:
            raise ValueError(f'{name}: {key} is {text[key]!r}, expected {value!r}.')
    text = {**architecture.defaults, **{k: x for k, x in text.items() if x is not None}}
    _check_sizes(text, name)
    return language_model.LanguageModelConfig(
        **{ours: text[theirs] for ours, theirs in _SIZES.items()},
        is_local=_read_layer_kinds(text, name),
        query_scalar=text.get('query_pre_attn_scalar', text['head_dim']),
        norm_epsilon=text['rms_norm_eps'],
        global_rope=_read_rope(text, _GLOBAL, 'rope_theta', name),
        local_rope=_read_rope(text, _LOCAL, 'rope_local_base_freq', name),
        window=text.get('sliding_window', 0),
        **architecture.fields,
    )


def _check_sizes(text: Mapping[str, Any], name: str) -> None:
    for key in (*_SIZES.values(), 'num_hidden_layers'):
        if not isinstance(text[key], int) or text[key] < 1:
            raise ValueError(f'{name}: {key} is {text[key]!r}, expected a positive whole number.')
    # Queries share keys in equal groups, and positions turn pairs of numbers.
    for key, divisor in (('num_attention_heads', text['num_key_value_heads']), ('head_dim', 2)):
        if text[key] % divisor:
            raise ValueError(f'{name}: {key} is {text[key]}, expected a multiple of {divisor}.')


def _read_layer_kinds(text: Mapping[str, Any], name: str) -> tuple[bool, ...]:
    """Whether each layer is local."""
    depth, period = text['num_hidden_layers'], text['sliding_window_pattern']
    kinds = text.get('layer_types')
    if kinds is None:
        kinds = [_LOCAL if (layer + 1) % period else _GLOBAL for layer in range(depth)]
    allowed = [_GLOBAL, _LOCAL] if 'sliding_window' in text else [_GLOBAL]
    if len(kinds) != depth or not set(kinds) <= set(allowed):
        raise ValueError(
            f'{name}: layer_types is {kinds}, expected {" or ".join(allowed)} for each of {depth} '
            'layers.'
        )
    return tuple(kind == _LOCAL for kind in kinds)


def _read_rope(text: Mapping[str, Any], kind: str, base: str, name: str) -> language_model.Rope:
    """Reads `rope_parameters` of a kind of layer, or what files older than transformers 5 have."""
    stored = text.get('rope_parameters', {})
    settings = dict(stored.get(kind, stored))
    if kind == _GLOBAL:
        settings |= text.get('rope_scaling', {})
    scaling = settings.get('rope_type', settings.get('type', 'default'))
    if scaling not in ('default', 'linear'):
        raise ValueError(f'{name}: rope_type is {scaling!r}, expected default or linear.')
    factor = settings['factor'] if scaling == 'linear' else 1.0
    return language_model.Rope(settings.get('rope_theta', text.get(base, 10_000.0)), factor)


def _content(token: Any) -> str:
    """A special token of tokenizer_config.json, which is a string or its description."""
    return token['content'] if isinstance(token, dict) else token
