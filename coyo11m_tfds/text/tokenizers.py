"""Tokenizers of captions: text in, a row of token ids a caption out.

    tokenizer = make_tokenizer('words', max_tokens=16)
    tokens = tokenizer.tokenize(['a cat', 'two dogs'])     # int32 (2, 16), padded with -1

The model learns what a token means (`train_lib.models.words`), or a frozen encoder tells it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.text.text_encoders import hash_word, split_words


class Tokenizer(Protocol):
    """What `embed_captions` and a trained model ask of a tokenizer.

    Attributes:
        name: what the metadata of a data set calls it; free of paths of this machine.
        revision: changes when the same caption may get other ids.
        max_tokens: ids a caption, padding included; longer captions are cut.
        vocabulary: ids are less than this.
        truncated: captions that were cut so far.
    """

    name: str
    revision: str
    max_tokens: int
    vocabulary: int
    truncated: int

    def tokenize(self, captions: Sequence[str]) -> np.ndarray:
        """Returns ids int32 `(len(captions), max_tokens)`, padded with -1 at the end."""
        ...


def make_tokenizer(spec: str, max_tokens: int) -> Tokenizer:
    """Makes the tokenizer that a specification names: `words`.

    Raises:
        ValueError: the specification is unknown, or `max_tokens` out of range.
    """
    if spec != WordsTokenizer.name:
        raise ValueError(f"unknown tokenizer {spec!r}: expected 'words'")
    if not 1 <= max_tokens <= schema.MAX_TOKENS:
        raise ValueError(f'max_tokens={max_tokens}: expected 1 to {schema.MAX_TOKENS:,}')
    return WordsTokenizer(max_tokens)


class WordsTokenizer:
    """One token a word: the word's hash, so that nothing has to be counted or stored.

    Case, punctuation and the width of letters do not count. Two of the 33 words of the demo's
    captions never have the same id; of 1,000 words one in five shares its id with another.
    """

    name = 'words'
    revision = '1'  # to be raised with every change of the ids
    vocabulary = 4096

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.truncated = 0

    def tokenize(self, captions: Sequence[str]) -> np.ndarray:
        """See `Tokenizer`."""
        tokens = np.full((len(captions), self.max_tokens), -1, np.int32)
        for row, caption in zip(tokens, captions, strict=True):
            words = split_words(caption)
            self.truncated += len(words) > self.max_tokens
            ids = [hash_word(word) % self.vocabulary for word in words[: self.max_tokens]]
            row[: len(ids)] = ids
        return tokens
