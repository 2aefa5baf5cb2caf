"""Gemma's tokenizer, always the fast one (Rust, the package `tokenizers`), without transformers.

    tokenizer = from_folder(Path('gemma-3-270m'))       # tokenizer.json
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(['a cat'])]

The same tokens as transformers' `AutoTokenizer` gives.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors


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
