"""Gemma's tokenizer, always the fast one (Rust, the package `tokenizers`), without transformers.

    tokenizer = from_folder(Path('gemma-3-270m'))       # tokenizer.json
    tokenizer = from_gguf(fields, 'gemma.gguf')         # the vocabulary in a GGUF file
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(['a cat'])]

The same tokens as transformers' `AutoTokenizer` gives.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_SPACE = '▁'  # what SentencePiece writes for a space

# `tokenizer.ggml.token_type` of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_CONTROL, _USER_DEFINED = 3, 4


def from_folder(folder: Path) -> Tokenizer:
    """Reads tokenizer.json, and from tokenizer_config.json whether texts get a start and an end.

    Raises:
        ValueError: there is no such file, or it cannot be parsed.
    """
    path = folder / 'tokenizer.json'
    if not path.is_file():
        raise ValueError(
            f'{path} is missing; expected the fast tokenizer beside the weights. '
            '`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it.'
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f'{path} is not a tokenizer: {error}') from error
    tokenizer.no_padding()
    settings = folder / 'tokenizer_config.json'
    options = json.loads(settings.read_text(encoding='utf-8')) if settings.is_file() else {}
    if 'add_bos_token' in options or 'add_eos_token' in options:
        start = options.get('add_bos_token') and _content(options.get('bos_token'))
        end = options.get('add_eos_token') and _content(options.get('eos_token'))
        _add_ends(tokenizer, start, end)
    return tokenizer


def from_gguf(fields: Mapping[str, Any], path: str) -> Tokenizer:
    """Makes the tokenizer that the metadata of a GGUF file describe.

    Such a file lists the vocabulary but not the merges of the byte-pair encoding. In Gemma's
    vocabulary a merge comes before another if its result does, and of those with one result the
    one with the longest left part is first.

    Args:
        fields: those of the file without their prefix `tokenizer.ggml.`, arrays as lists.
        path: of the file, for messages.

    Raises:
        ValueError: the vocabulary is not one of SentencePiece.
    """
    if fields.get('model') != 'llama':
        raise ValueError(
            f'{path}: tokenizer.ggml.model is {fields.get("model")!r}, expected "llama" '
            '(SentencePiece), as Gemma 3 has it.'
        )
    tokens = [_SPACE * len(t) if t and not t.strip(' ') else t for t in fields['tokens']]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            list(_merges(vocabulary)),
            unk_token=tokens[fields['unknown_token_id']],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(' ', _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]
    )
    kinds = list(zip(fields['tokens'], fields.get('token_type', ()), strict=False))
    control = [AddedToken(t, normalized=False) for t, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens(control)
    # These are kept whole too, but for runs of spaces, which the merges make.
    whole = [t for t, kind in kinds if kind == _USER_DEFINED and t in vocabulary]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in whole])
    # llama.cpp starts a SentencePiece text so unless it is told not to.
    start = tokens[fields['bos_token_id']] if fields.get('add_bos_token', True) else None
    end = tokens[fields['eos_token_id']] if fields.get('add_eos_token', False) else None
    _add_ends(tokenizer, start, end)
    return tokenizer


def _merges(vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield left, right


def _content(token: Any) -> str:
    """A special token of tokenizer_config.json, which is a string or its description."""
    return token['content'] if isinstance(token, dict) else token


def _add_ends(tokenizer: Tokenizer, start: str | None, end: str | None) -> None:
    """Has every text begin with the token `start` and end with `end`, where they are not None."""
    parts = [start, '$A', end]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=' '.join(part for part in parts if part),
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in (start, end) if t],
    )
