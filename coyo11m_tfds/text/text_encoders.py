"""Makes encoders and tokenizers of captions by name.

    encoder = make_encoder('hash')                      # or 'hf:google/gemma-3-270m', 'hf:FOLDER'
    embeddings = encoder.encode(['a cat', 'two dogs'])  # float32 (2, encoder.dim)

    tokenizer = make_tokenizer('words', 16)             # or 'hf:FOLDER'; reads no weights
    pad(tokenizer.tokenize(['a cat']), 16)              # int32 (1, 16), padded with -1

`hash` (for tokens `words`) needs no weights; `hf:` runs a transformers model (`hf_encoder`), `jax:`
a Gemma 3 in JAX (`jax_encoder`). Both modules are imported only when needed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import words
from coyo11m_tfds.text.encoder import DEFAULT_MAX_TOKENS, Encoder, Tokenizer


def make_encoder(
    spec: str, max_tokens: int = DEFAULT_MAX_TOKENS, batch_tokens: int | None = None
) -> Encoder:
    """Makes the encoder that a specification names.

    Args:
        spec: `hash`, `hf:HUB_NAME`, `hf:FOLDER`, `jax:HUB_NAME` or `jax:FOLDER`.
        max_tokens: Length to which captions are cut, in tokens; not for `hash`.
        batch_tokens: Limit of the tokens in a device's forward pass, with padding; None for the
            device's default. Not for `hash`.
    """
    if spec == words.HashEncoder.name:
        return words.HashEncoder()
    _, encoder, model = _classes(spec)
    logging.info('Loading the text encoder %s', spec)
    return encoder(model, max_tokens, batch_tokens)


def make_tokenizer(spec: str, max_tokens: int = DEFAULT_MAX_TOKENS) -> Tokenizer:
    """Makes a tokenizer: `words`, `labels`, or that of a model (without reading its weights)."""
    if max_tokens > schema.MAX_TOKENS or (spec == words.WordsTokenizer.name and max_tokens < 1):
        raise ValueError(f'max_tokens={max_tokens}: expected 1 to {schema.MAX_TOKENS:,}')
    if spec == words.WordsTokenizer.name:
        return words.WordsTokenizer(max_tokens)
    if spec == words.LabelsTokenizer.name:
        return words.LabelsTokenizer()
    if spec == words.HashEncoder.name:
        raise ValueError(
            f'the encoder {spec!r} has no token ids: use words, or a model such as '
            'hf:google/gemma-3-270m.'
        )
    tokenizer, _, model = _classes(spec)
    return tokenizer(model, max_tokens)


def pad(tokens: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Pads rows of ids with `schema.TOKEN_PADDING`: int32 `(len(tokens), width)`."""
    padded = np.full((len(tokens), width), schema.TOKEN_PADDING, np.int32)
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    return padded


def _classes(spec: str) -> tuple[Any, Any, str]:
    """The classes of tokenizer and encoder for a model that exists, and the model's name."""
    runner, _, model = spec.partition(':')
    if runner not in ('hf', 'jax') or not model:
        raise ValueError(
            f'unknown encoder {spec!r}: expected hash, hf:HUB_NAME (as hf:google/gemma-3-270m) '
            'or hf:FOLDER (with a transformers model); jax: in place of hf: runs '
            'Gemma 3 without torch; words makes tokens alone (--tokens_only)'
        )
    model_files.folder(model, 'text encoder', ['config.json'])
    try:
        # torch and transformers take seconds to import, and `hash` needs neither.
        if runner == 'hf':
            from coyo11m_tfds.text import hf_encoder

            return hf_encoder.HfTokenizer, hf_encoder.HfEncoder, model
        from coyo11m_tfds.text import jax_encoder

        return jax_encoder.JaxTokenizer, jax_encoder.JaxEncoder, model
    except ModuleNotFoundError as error:
        extra = 'text' if runner == 'hf' else 'text-jax'
        raise ValueError(
            f'the text encoder {spec!r} needs {error.name}, which is not installed: '
            f"pip install -c constraints.txt -e '.[{extra}]'"
        ) from error
