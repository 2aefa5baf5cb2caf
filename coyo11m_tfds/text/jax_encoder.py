"""Embeds texts with Gemma 3 or Qwen3 in JAX: the last hidden states, averaged over the tokens.

It needs neither torch nor transformers, and reads no pickles. The local devices share the rows of a
batch, and each has all weights.
"""

import dataclasses
import functools
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

from coyo11m_tfds.process import jax_environment
from coyo11m_tfds.process.errors import FieldRule, one_of
from coyo11m_tfds.storage import model_fields, model_files
from coyo11m_tfds.storage.model_fields import list_of, number, whole
from coyo11m_tfds.text import language_model, model_encoder
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
_EMBEDDING = 'embed_tokens.weight'

# Weights in the files that the text model without its language-model head has no use for.
_OTHER_PARTS = re.compile(r'(.*\.)?(lm_head|vision_tower|multi_modal_projector)\.')

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
_MAX_LAYERS = 1024
_MAX_POSITIONS = 2**31 - 1

# Bounds of the fields of config.json, beyond those of any published model.
_FREQUENCY_BASE = number(1, 1e12)
RULES = {
    'vocab_size': whole(1, 1 << 22),
    'hidden_size': whole(1, 1 << 16),
    'intermediate_size': whole(1, 1 << 20),
    'num_hidden_layers': whole(1, _MAX_LAYERS),
    'num_attention_heads': whole(1, 1024),
    'num_key_value_heads': whole(1, 1024),
    # Positions turn pairs of numbers.
    'head_dim': whole(2, 4096, multiple_of=2),
    'max_position_embeddings': whole(1, _MAX_POSITIONS),
    'sliding_window': whole(1, _MAX_POSITIONS),
    'sliding_window_pattern': whole(1, _MAX_LAYERS),
    'layer_types': list_of(one_of(_GLOBAL, _LOCAL), _MAX_LAYERS),
    'query_pre_attn_scalar': number(1e-3, 1e6),
    'rms_norm_eps': number(1e-12, 1),
    'rope_theta': _FREQUENCY_BASE,
    'rope_local_base_freq': _FREQUENCY_BASE,
    'rope_parameters': model_fields.OBJECT,
    'rope_scaling': model_fields.OBJECT,
}
_ROPE_TYPE = one_of('default', 'linear')
_ROPE_RULES = {
    'rope_type': _ROPE_TYPE,
    'type': _ROPE_TYPE,
    'rope_theta': _FREQUENCY_BASE,
    'factor': number(1e-3, 1e6),
}
# A special token of tokenizer_config.json is a text or its description.
_TOKEN = FieldRule(
    'null, a text, or an object with a text as content',
    lambda token: token is None or isinstance(_content(token), str),
)


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
ARCHITECTURES = {'gemma3': _GEMMA3, 'gemma3_text': _GEMMA3, 'qwen3': _QWEN3}


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
        jax_environment.check()
        devices = jax.local_devices()
        if devices[0].platform == 'cpu':
            dtype = dtype or jnp.float32
            batch_tokens = batch_tokens or CPU_BATCH_TOKENS
        else:
            dtype = dtype or jnp.bfloat16
            batch_tokens = batch_tokens or BATCH_TOKENS
        super().__init__(model, max_tokens)
        config = self.checkpoint.config
        self.dim = config.width
        self.dtype = jnp.dtype(dtype).name
        # Devices share the rows of a batch, so a batch is for all of them.
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
        """See `ModelEncoder`."""
        padded = np.full(shape, _PADDING, np.int32)
        # Rows beyond the last text have the length 0.
        lengths = np.zeros(shape[0], np.int32)
        for row, ids in enumerate(tokens):
            padded[row, : len(ids)] = ids
            lengths[row] = len(ids)
        inputs = jax.device_put((padded, lengths), self._rows)
        # JAX returns before the devices have computed: only the copy to the host waits.
        means = self._pool(self._params, *inputs)
        return lambda: np.asarray(means)


@jax_environment.promote_as_usual
def _pool_states(
    network: language_model.LanguageModel, params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Returns the means of the states of each row's tokens, float32 `(b, width)`."""
    # Else accelerators round the operands of float32 products to fewer bits.
    precision = 'highest' if network.dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        states: Any = network.apply({'params': params}, tokens)
        return language_model.mean_states(states, lengths)


def open_checkpoint(model: str) -> 'LanguageModelCheckpoint':
    """Opens a folder, or a model of the hub, which it downloads if the cache lacks it.

    Raises a ValueError for a folder without weights in safetensors, and for another model.
    """
    folder = model_files.fetch_folder(model, 'text encoder', _HUB_FILES)
    model_files.check_weights(folder)
    return LanguageModelCheckpoint(folder)


def load_params(checkpoint: 'LanguageModelCheckpoint', dtype: jnp.dtype | type) -> dict[str, Any]:
    """Reads the parameters of `LanguageModel(checkpoint.config)` in `dtype`, norms in float32.

    Those of all layers are stacked as `(depth, ...)`. Raises a ValueError for weights that do not
    fit the configuration.
    """
    abstract = language_model.abstract_params(checkpoint.config, dtype)
    shapes = flax.traverse_util.flatten_dict(abstract, sep='.')
    # The shapes are compared before the weights get memory.
    _check_weights(checkpoint, shapes)
    params = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    # Straight into their places in the stacks, so that the weights are in memory once.
    for name, target in _targets(params, checkpoint.architecture).items():
        target[...] = checkpoint.read(name)
    for name, array in params.items():
        if name.endswith('.scale'):
            array += checkpoint.architecture.norm_offset
    return flax.traverse_util.unflatten_dict(params, sep='.')


def _check_weights(
    checkpoint: 'LanguageModelCheckpoint', shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Raises a ValueError unless the files have exactly the weights of these parameters."""
    # Arrays of one number each, which have the shapes but not the memory.
    outlines = {}
    for name, leaf in shapes.items():
        outlines[name] = np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    expected = _targets(outlines, checkpoint.architecture)
    missing = expected.keys() - checkpoint.names
    unexpected = checkpoint.names - expected.keys()
    if missing or unexpected:
        raise ValueError(
            f'{checkpoint.path}: the weights do not fit the configuration, with {len(missing)} '
            f'missing {sorted(missing)[:3]} and {len(unexpected)} unexpected '
            f'{sorted(unexpected)[:3]}. Download or save the model again.'
        )
    for name, outline in expected.items():
        shape = checkpoint.shape(name)
        if shape != outline.shape:
            raise ValueError(
                f'{checkpoint.path}: {name} has the shape {shape}, expected {outline.shape}.'
            )


def _targets(params: Mapping[str, np.ndarray], architecture: Architecture) -> dict[str, np.ndarray]:
    """Returns the array of each weight by its name in the files, with the axes in their order."""
    targets = {}
    for name, stored_name in _REST.items():
        targets[f'{stored_name}.weight'] = params[name]
    names_of_layer = {**_LAYER, **architecture.layer}
    for name, stored_name in names_of_layer.items():
        for layer, array in enumerate(params[f'layers.{name}']):
            # A kernel is (in, out) here and (out, in) there.
            targets[f'layers.{layer}.{stored_name}.weight'] = array.T
    return targets


class LanguageModelCheckpoint:
    """A folder in the form of transformers' `save_pretrained`."""

    path: Path
    config: language_model.LanguageModelConfig
    architecture: Architecture
    names: frozenset[str]  # of the text model's weights, without their common prefix

    def __init__(self, folder: Path) -> None:
        """Reads config.json and the headers of the weights; ValueError for another model."""
        self.path = folder
        config_path = folder / 'config.json'
        raw = model_fields.read_object(config_path)
        self.config = parse_model_config(raw, str(config_path))
        self.architecture = ARCHITECTURES[raw['model_type']]
        self._files: dict[str, model_files.WeightFile] = {}
        for path in _find_weight_files(folder):
            file = model_files.WeightFile(path)
            for name in file.names:
                if name in self._files:
                    raise ValueError(f'{path}: {name!r} comes in another file of the folder too.')
                self._files[name] = file
        text_names = {name for name in self._files if not _OTHER_PARTS.match(name)}
        # Such as `model.` or, of a multimodal model, `language_model.model.`.
        self._prefix = ''
        for name in sorted(text_names):
            if name.endswith(_EMBEDDING):
                self._prefix = name.removesuffix(_EMBEDDING)
        self.names = frozenset(name.removeprefix(self._prefix) for name in text_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight with a name in `names`, which has to be of floats."""
        stored_name = self._prefix + name
        return self._files[stored_name].shape(stored_name)

    def read(self, name: str) -> np.ndarray:
        """Returns a weight whose `shape` was accepted, in the dtype of the file."""
        stored_name = self._prefix + name
        return self._files[stored_name].read(stored_name)

    def tokenizer(self) -> tuple[tokenizers.Tokenizer, int]:
        """Returns the tokenizer and its token for padding, both as `hf_encoder` has them.

        Raises a ValueError without a tokenizer.json, and for one that cannot be used.
        """
        path = self.path / 'tokenizer.json'
        if not path.is_file():
            raise ValueError(
                f'{path} is missing; expected the fast tokenizer in the folder of the weights. '
                '`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it.'
            )
        model_encoder.check_tokenizer(path)
        with model_files.naming_errors(f'{path} is not a tokenizer'):
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        return tokenizer, self._find_filler(tokenizer)

    def _find_filler(self, tokenizer: tokenizers.Tokenizer) -> int:
        """Returns the token for padding or, of a model without it, the one that ends a text."""
        path = self.path / 'tokenizer_config.json'
        options = model_fields.read_object(path) if path.is_file() else {}
        model_fields.check(options, {'pad_token': _TOKEN, 'eos_token': _TOKEN}, path)
        for use in ('pad_token', 'eos_token'):
            name = _content(options.get(use))
            # A name that the tokenizer lacks has no number.
            token = tokenizer.token_to_id(name) if name else None
            if token is not None:
                return token
        return _PADDING


def _find_weight_files(folder: Path) -> list[Path]:
    """Returns the files of weights in a folder: those of its index or, without one, all."""
    paths = {path.name: path for path in folder.glob('*.safetensors')}
    index = folder / 'model.safetensors.index.json'
    if index.is_file():

        def holds(weight_map: Any) -> bool:
            """Whether an index names a file of this folder for each weight."""
            if not isinstance(weight_map, dict):
                return False
            for name in weight_map.values():
                # Names of the folder's own files, so that none leads out of it.
                if not isinstance(name, str) or name not in paths:
                    return False
            return True

        in_folder = FieldRule(
            'an object with a *.safetensors of this folder for each weight', holds
        )
        content = model_fields.read_object(index)
        # It must have the field.
        model_fields.check({'weight_map': None, **content}, {'weight_map': in_folder}, index)
        paths = {name: paths[name] for name in content['weight_map'].values()}
    return sorted(paths.values())


def parse_model_config(raw: Mapping[str, Any], name: str) -> language_model.LanguageModelConfig:
    """Returns what config.json says; `name` is its path, for errors.

    Raises a ValueError for values out of range, and for models that would be computed wrongly.
    """
    model_type = raw.get('model_type')
    architecture = None
    # A list or an object would be no key.
    if isinstance(model_type, str):
        architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        raise ValueError(
            f'{name}: model_type is {model_fields.show(model_type)}, expected one of '
            f'{", ".join(ARCHITECTURES)}; hf: runs other models.'
        )
    # That of a multimodal model has a part for text.
    model_fields.check(raw, {'text_config': model_fields.OBJECT}, name)
    stored = _without_nulls(raw.get('text_config', raw))
    text = {**architecture.defaults, **stored}
    fixed = {field: model_fields.exactly(value) for field, value in architecture.fixed.items()}
    model_fields.check(text, RULES | fixed, name)
    # Queries share keys in equal groups.
    heads_rule = whole(1, 1024, multiple_of=text['num_key_value_heads'])
    model_fields.check(text, {'num_attention_heads': heads_rule}, name)
    sizes = {ours: text[theirs] for ours, theirs in _SIZES.items()}
    return language_model.LanguageModelConfig(
        **sizes,
        is_local=_find_local_layers(text, name),
        query_scalar=text.get('query_pre_attn_scalar', text['head_dim']),
        norm_epsilon=text['rms_norm_eps'],
        global_rope=_read_rope(text, _GLOBAL, 'rope_theta', name),
        local_rope=_read_rope(text, _LOCAL, 'rope_local_base_freq', name),
        window=text.get('sliding_window', 0),
        **architecture.fields,
    )


def _find_local_layers(text: Mapping[str, Any], name: str) -> tuple[bool, ...]:
    """Returns for each layer whether its attention is local."""
    depth = text['num_hidden_layers']
    kinds = text.get('layer_types')
    if kinds is None:
        # Older files say instead how many layers come from one global one to the next.
        period = text['sliding_window_pattern']
        kinds = []
        for number in range(1, depth + 1):
            kinds.append(_LOCAL if number % period else _GLOBAL)
    allowed = [_GLOBAL]
    if 'sliding_window' in text:
        allowed.append(_LOCAL)
    if len(kinds) != depth or not set(kinds) <= set(allowed):
        raise ValueError(
            f'{name}: layer_types is {model_fields.show(kinds)}, expected {" or ".join(allowed)} '
            f'for each of {depth} layers.'
        )
    return tuple(kind == _LOCAL for kind in kinds)


def _read_rope(text: Mapping[str, Any], kind: str, base: str, name: str) -> language_model.Rope:
    """Reads `rope_parameters` of a kind of layer, or what files older than transformers 5 have."""
    stored = text.get('rope_parameters', {})
    model_fields.check(stored, {kind: model_fields.OBJECT}, f'{name}: rope_parameters')
    # An object for each kind of layer, or one for all layers.
    settings = _without_nulls(stored.get(kind, stored))
    # Gemma 3 stretches only the positions of global layers.
    if kind == _GLOBAL:
        settings |= _without_nulls(text.get('rope_scaling', {}))
    model_fields.check(settings, _ROPE_RULES, name)
    factor = 1.0
    rope_type = settings.get('rope_type', settings.get('type'))
    if rope_type == 'linear':
        # It must have the factor.
        model_fields.check({'factor': None, **settings}, _ROPE_RULES, name)
        factor = settings['factor']
    frequency_base = settings.get('rope_theta', text.get(base, 10_000.0))
    return language_model.Rope(frequency_base, factor)


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that have a value: in these files, null stands for the default."""
    return {field: value for field, value in fields.items() if value is not None}


def _content(token: Any) -> Any:
    """Returns the text of a special token, for which `_TOKEN` holds."""
    return token.get('content') if isinstance(token, dict) else token
