"""Tokenizers of captions: text in, token ids out.

    tokenizer = make_tokenizer('words', max_tokens=16)      # or 'hf:google/gemma-3-270m', ...
    ids = tokenizer.tokenize(['a cat', 'two dogs'])         # [[2112, 1843], [3829, 3130]]
    pad(ids, tokenizer.max_tokens)                          # int32 (2, 16), padded with -1

The model learns what a token means (`train_lib.models.words`). `words` needs no files. All other
names are those of text encoders (`text_encoders`) and stand for the tokenizers of these.
"""

from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.text_encoders import Tokenizer, hash_word, split_words

PADDING = schema.TOKEN_PADDING


def make_tokenizer(spec: str, max_tokens: int = text_encoders.DEFAULT_MAX_TOKENS) -> Tokenizer:
    """Makes the tokenizer that a specification names: `words`, or the one of an encoder.

    Raises:
        ValueError: `max_tokens` is out of range, or as of `text_encoders.make_tokenizer`.
    """
    if not 1 <= max_tokens <= schema.MAX_TOKENS:
        raise ValueError(f'max_tokens={max_tokens}: expected 1 to {schema.MAX_TOKENS:,}')
    if spec == WordsTokenizer.name:
        return WordsTokenizer(max_tokens)
    return text_encoders.make_tokenizer(spec, max_tokens)


def pad(tokens: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Returns rows of ids as int32 `(len(tokens), width)`, padded with `PADDING` at the end."""
    padded = np.full((len(tokens), width), PADDING, np.int32)
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    return padded


class WordsTokenizer:
    """One token a word: the word's hash, so that nothing has to be counted or stored.

    Case, punctuation and the width of letters do not count. Two of the 33 words of the demo's
    captions never have the same id; of 1,000 words one in five shares its id with another.
    """

    name = schema.WORDS
    revision = '1'  # to be raised with every change of the ids
    vocabulary = 4096

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.truncated = 0

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        found = [split_words(caption) for caption in captions]
        self.truncated += sum(len(words) > self.max_tokens for words in found)
        return [
            [hash_word(word) % self.vocabulary for word in words[: self.max_tokens]]
            for words in found
        ]
