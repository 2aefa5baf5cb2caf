"""Loads a text encoder and times it; `encoders` runs this in a process of its own.

python -m coyo11m_tfds.checks.try_encoder hf:google/gemma-3-270m
{"tokenizer": "GemmaTokenizer", "is_fast": true, "tokens_a_second": 800000, ...}
"""

import json
import sys
import time
from typing import Any

from coyo11m_tfds.process import ending
from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import text_encoders

_SECONDS = 1.0  # for each of the two measurements
_MOST_CAPTIONS = 4096

# 10 to 90 words, as long captions have.
_SENTENCE = 'A small wooden boat with a red sail lies on the calm water of a lake in the evening. '
CAPTIONS = [f'{number}. {_SENTENCE * (1 + number % 5)}' for number in range(32)]


def main() -> None:
    """Prints what was found as one line of JSON; an error ends it with one line and status 1."""
    spec = sys.argv[1]
    with ending.in_one_line('nothing was changed', (ValueError, OSError, ImportError)):
        facts = _look_at_tokenizer(spec)
        try:
            facts |= _look_at_encoder(spec)
        except ValueError as error:  # the tokenizer may be why, and its finding says so
            facts['error'] = ' '.join(str(error).split())
    print(json.dumps(facts))


def _look_at_encoder(spec: str) -> dict[str, Any]:
    encoder = text_encoders.make_encoder(spec)
    encoder.encode(CAPTIONS[:2])  # the first call compiles, and makes threads
    count, seconds = 4, 0.0
    while seconds < _SECONDS and count < _MOST_CAPTIONS:  # a GPU is only fast at many
        count *= 4
        captions = (CAPTIONS * (1 + count // len(CAPTIONS)))[:count]
        start = time.perf_counter()
        encoder.encode(captions)
        seconds = time.perf_counter() - start
    return {'name': encoder.name, 'dim': encoder.dim, 'captions_a_second': count / seconds}


def _look_at_tokenizer(spec: str) -> dict[str, Any]:
    """Of an encoder of transformers: whether its tokenizer is the one in Rust, and its speed."""
    if not spec.startswith('hf:'):
        return {}
    import transformers

    model = spec.removeprefix('hf:')
    folder = model_files.local_folder(model)
    gguf = folder and model_files.gguf_file(folder)
    options = {'gguf_file': gguf.name} if gguf else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model, trust_remote_code=False, **options
    )
    start, tokens = time.perf_counter(), 0
    while not tokens or time.perf_counter() - start < _SECONDS:
        tokens += sum(len(ids) for ids in tokenizer(CAPTIONS)['input_ids'])
    return {
        'tokenizer': type(tokenizer).__name__,
        'is_fast': tokenizer.is_fast,
        'tokens_a_second': tokens / (time.perf_counter() - start),
    }


if __name__ == '__main__':
    main()
