"""Sizes of a Gemma 3 text model, read from transformers' config.json."""

from collections.abc import Mapping
from typing import Any

from coyo11m_tfds.text import gemma

# `Gemma3TextConfig`.
_DEFAULTS = {
    'vocab_size': 262_208,
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'sliding_window': 4096,
    'query_pre_attn_scalar': 256,
    'rms_norm_eps': 1e-6,
    'max_position_embeddings': 131_072,
}
# Variations of the architecture that no Gemma 3 language model uses, and `gemma.Gemma` has not.
_FIXED = {
    'hidden_activation': 'gelu_pytorch_tanh',
    'attention_bias': False,
    'attn_logit_softcapping': None,
    'use_bidirectional_attention': False,
}
_PATTERN = 6  # one layer in so many is global
_LOCAL_BASE, _GLOBAL_BASE = 10_000.0, 1_000_000.0


def from_transformers(raw: Mapping[str, Any], name: str) -> gemma.Config:
    """Reads what config.json holds; of a multimodal model, the part for text.

    Raises:
        ValueError: it is another model, or one that `gemma.Gemma` cannot compute.
    """
    if raw.get('model_type') not in ('gemma3', 'gemma3_text'):
        raise ValueError(
            f'{name}: model_type is {raw.get("model_type")!r}, expected gemma3_text or gemma3; '
            'hf: runs other models.'
        )
    text = raw.get('text_config', raw)
    for key, value in _FIXED.items():
        if (text.get(key) or value) != value:
            raise ValueError(f'{name}: {key} is {text[key]!r}, expected {value!r}.')
    sizes = {key: text.get(key, default) for key, default in _DEFAULTS.items()}
    return gemma.Config(
        vocab_size=sizes['vocab_size'],
        width=sizes['hidden_size'],
        mlp_width=sizes['intermediate_size'],
        num_heads=sizes['num_attention_heads'],
        num_kv_heads=sizes['num_key_value_heads'],
        head_dim=sizes['head_dim'],
        is_local=_local_layers(text, sizes['num_hidden_layers'], name),
        window=sizes['sliding_window'],
        local_rope=_rope(text, 'sliding_attention', 'rope_local_base_freq', _LOCAL_BASE, name),
        global_rope=_rope(text, 'full_attention', 'rope_theta', _GLOBAL_BASE, name),
        query_scalar=sizes['query_pre_attn_scalar'],
        norm_epsilon=sizes['rms_norm_eps'],
        max_positions=sizes['max_position_embeddings'],
    )


def _local_layers(text: Mapping[str, Any], depth: int, name: str) -> tuple[bool, ...]:
    kinds = text.get('layer_types')
    if kinds is None:
        period = text.get('sliding_window_pattern', _PATTERN)
        return tuple((layer + 1) % period != 0 for layer in range(depth))
    if len(kinds) != depth or not set(kinds) <= {'sliding_attention', 'full_attention'}:
        raise ValueError(
            f'{name}: layer_types is {kinds}, expected sliding_attention or full_attention for '
            f'each of {depth} layers.'
        )
    return tuple(kind == 'sliding_attention' for kind in kinds)


def _rope(
    text: Mapping[str, Any], kind: str, base_key: str, default: float, name: str
) -> gemma.Rope:
    """Reads `rope_parameters` of a kind of layer, or what files older than transformers 5 have."""
    settings = dict((text.get('rope_parameters') or {}).get(kind) or {})
    if kind == 'full_attention':
        settings |= text.get('rope_scaling') or {}
    scaling = settings.get('rope_type', settings.get('type', 'default'))
    if scaling not in ('default', 'linear'):
        raise ValueError(f'{name}: rope_type is {scaling!r}, expected default or linear.')
    base = settings.get('rope_theta', text.get(base_key, default))
    return gemma.Rope(base, settings['factor'] if scaling == 'linear' else 1.0)
