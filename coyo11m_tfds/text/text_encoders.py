"""Encoders and tokenizers of captions: hashed words, and models by name.

encoder = make_encoder('hash')                      # or 'jax:Qwen/Qwen3-0.6B', 'hf:FOLDER'
embeddings = encoder.encode(['a cat', 'two dogs'])  # float32 (2, encoder.dim)

words = list_words(['a cat', 'a dog'])              # 'a:2 cat:1 dog:1'
tokenizer = make_tokenizer('words', 16, words)      # or 'hf:FOLDER'; reads no weights
pad(tokenizer.tokenize(['a cat']), 16)              # int32 (1, 16), padded with -1
"""

import functools
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import word_list
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text.protocols import Encoder, OnBatch, Tokenizer, ignore_batch

DEFAULT_MAX_TOKENS = 512

_WORD = re.compile(r'\w+')
# Odd, so that the pairs (a, b) and (b, a) differ.
_PAIR_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# One for each 16 bits of a feature's hash, as in the sparse projections of Kane and Nelson 2014:
# nearly always two of a caption's 50 features share a bucket, and with only one bucket each, a
# model could not tell them apart. They cost a fifth of the speed.
_BUCKETS_A_FEATURE = 4
# Few enough for their arrays to stay in a cache.
_ROWS_AT_ONCE = 1024


def split_words(caption: str) -> list[str]:
    """Splits a caption into words, in small letters, without punctuation."""
    # The width of letters, as in Japanese texts, makes no other word.
    normalized = unicodedata.normalize('NFKC', caption)
    return _WORD.findall(normalized.lower())


# Captions repeat their words, and a look-up takes less time than a hash.
@functools.lru_cache(maxsize=1 << 20)
def _hash(word: str) -> int:
    """Returns a hash of 64 bits, the same on all machines."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little')


class HashEncoder(Encoder):
    """Signed feature hashing of words and pairs of neighbouring words, without learning.

    Each feature adds +1 or -1 to a bucket, so that inner products are kept on average (Weinberger
    et al. 2009, "Feature Hashing for Large Scale Multitask Learning"). Embeddings have length 1, or
    0 for a caption without words. Speed on one core with captions of COCO: 110,000/s of 10 words,
    46,000/s of 42 words.
    """

    name = 'hash'
    # To be raised with every change of the embeddings.
    revision = '1'
    max_tokens = 0
    vocabulary = 0
    dim = schema.DEFAULT_TEXT_DIM
    dtype = 'float32'
    pooling = 'sum'
    truncated = 0

    def tokenize(self, captions: Sequence[str]) -> list[list[str]]:
        """Returns the words of each caption."""
        return [split_words(caption) for caption in captions]

    def encode_tokens(
        self, tokens: Sequence[Sequence[str]], on_batch: OnBatch = ignore_batch
    ) -> np.ndarray:
        """Returns float32 `(len(tokens), 640)`; see `Encoder`."""
        embeddings = np.empty((len(tokens), self.dim), np.float32)
        for start in range(0, len(tokens), _ROWS_AT_ONCE):
            captions = tokens[start : start + _ROWS_AT_ONCE]
            # Of each word, the number of its caption and a hash.
            lengths = [len(words) for words in captions]
            rows = np.repeat(np.arange(len(captions)), lengths)
            all_words = itertools.chain.from_iterable(captions)
            hashes = np.fromiter(map(_hash, all_words), np.uint64, len(rows))
            # Words that follow each other in one caption are a feature, too.
            are_neighbours = rows[1:] == rows[:-1]
            pairs = splitmix64(hashes[:-1] * _PAIR_MULTIPLIER + hashes[1:])
            pairs = pairs[are_neighbours]
            rows_of_pairs = rows[1:][are_neighbours]
            embeddings[start : start + len(captions)] = self._project(
                np.concatenate([hashes, pairs]),
                np.concatenate([rows, rows_of_pairs]),
                len(captions),
            )
            on_batch(len(captions), len(rows))
        return embeddings

    def _project(self, features: np.ndarray, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Returns the sums of features, float32 `(num_rows, dim)`, scaled to length 1.

        `features` are hashes, uint64 `(n,)`, and `rows` their captions, int64 `(n,)`.
        """
        # Of 16 bits of a hash, one is the sign, and 15 choose the bucket.
        bits = features.astype('<u8').view('<u2').reshape(-1, _BUCKETS_A_FEATURE)
        buckets = (bits >> 1).astype(np.int64) * self.dim >> 15
        signs = 1.0 - 2.0 * (bits & 1)
        # A cell of `sums` is a bucket of a caption.
        cells = rows[:, None] * self.dim + buckets
        sums = np.bincount(cells.ravel(), signs.ravel(), minlength=num_rows * self.dim)
        sums = sums.reshape(num_rows, self.dim)
        # Whole numbers so far, so the squares add up exactly in any order; the length is 0 or >= 1.
        lengths = np.sqrt(np.square(sums).sum(axis=1, keepdims=True))
        return (sums / np.maximum(lengths, 1)).astype(np.float32)


def list_words(captions: Iterable[str]) -> str:
    """Returns the list of the words of captions for `make_tokenizer`, see `word_list`."""
    words, _ = measure_words(captions)
    return words


def measure_words(captions: Iterable[str]) -> tuple[str, int]:
    """Returns the result of `list_words`, and the most words of a caption; 0 without captions."""
    longest = 0

    def split_captions() -> Iterator[list[str]]:
        """Yields the words of each caption."""
        nonlocal longest
        for caption in captions:
            words = split_words(caption)
            longest = max(longest, len(words))
            yield words

    # In one pass: reading all captions takes longer than counting.
    words = word_list.count_words(split_captions())
    return words, longest


class WordsTokenizer(Tokenizer):
    """Each word becomes a token, its number in a list; all words that the list lacks become 0.

    Case, punctuation and the width of letters do not matter. The list is that of the captions of a
    sidecar, whose metadata hold it.
    """

    name = schema.WORDS

    def __init__(self, max_tokens: int, words: str):
        """Takes a list of words as `list_words` makes it."""
        self.words = words
        self.max_tokens = max_tokens
        self.truncated = 0
        self.revision = word_list.digest(words)
        self._ids = {word: number for number, word in enumerate(word_list.parse(words), 1)}
        self.vocabulary = len(self._ids) + 1

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        tokens = []
        for caption in captions:
            words = split_words(caption)
            if len(words) > self.max_tokens:
                self.truncated += 1
            tokens.append([self._ids.get(word, 0) for word in words[: self.max_tokens]])
        return tokens


class LabelsTokenizer(Tokenizer):
    """The number of a class becomes its token, as in builds from sources with labels."""

    name = schema.LABELS
    revision = '1'
    max_tokens = 1
    vocabulary = 0  # that of a data set depends on its labels
    truncated = 0

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`; raises a ValueError for a caption that is no number of a class."""
        tokens = []
        for caption in captions:
            number = schema.parse_integer(caption.strip())
            if number is None or number < 0:
                raise ValueError(f'{caption!r}: expected the number of a class, such as 207')
            tokens.append([number])
        return tokens


def make_encoder(
    spec: str, max_tokens: int = DEFAULT_MAX_TOKENS, batch_tokens: int | None = None
) -> Encoder:
    """Makes the encoder `hash`, `hf:HUB_NAME`, `hf:FOLDER`, `jax:HUB_NAME` or `jax:FOLDER`.

    Captions are cut to `max_tokens`. `batch_tokens` limits the tokens in a device's forward pass,
    with padding; None stands for the device's default. Neither is for `hash`. Raises a ValueError
    for an unknown encoder, and for a model that is not there or cannot be used.
    """
    if spec == HashEncoder.name:
        return HashEncoder()
    _, encoder, model = _model_classes(spec)
    logging.info('Loading the text encoder %s', spec)
    return encoder(model, max_tokens, batch_tokens)


def make_tokenizer(spec: str, max_tokens: int = DEFAULT_MAX_TOKENS, words: str = '') -> Tokenizer:
    """Makes a tokenizer: `words`, `labels`, or that of a model (without reading its weights).

    `words` is the list that `words` numbers, see `list_words`. Raises a ValueError as
    `make_encoder` does, and for a `max_tokens` out of range.
    """
    if max_tokens > schema.MAX_TOKENS or (spec == WordsTokenizer.name and max_tokens < 1):
        raise ValueError(f'max_tokens={max_tokens}: expected 1 to {schema.MAX_TOKENS:,}')
    if spec == WordsTokenizer.name:
        return WordsTokenizer(max_tokens, words)
    if spec == LabelsTokenizer.name:
        return LabelsTokenizer()
    if spec == HashEncoder.name:
        raise ValueError(
            f'the encoder {spec!r} has no token ids: use words, or a model such as '
            'jax:Qwen/Qwen3-0.6B.'
        )
    tokenizer, _, model = _model_classes(spec)
    return tokenizer(model, max_tokens)


def pad(tokens: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Returns rows of ids, padded with `schema.TOKEN_PADDING`: int32 `(len(tokens), width)`."""
    padded = np.full((len(tokens), width), schema.TOKEN_PADDING, np.int32)
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    return padded


def _model_classes(spec: str) -> tuple[Any, Any, str]:
    """Returns the classes of tokenizer and encoder for a model that exists, and its name."""
    runner, _, name = spec.partition(':')
    # transformers reads a `~` as the name of a folder.
    model = storage.expand_home(name)
    if runner not in ('hf', 'jax') or not model:
        raise ValueError(
            f'unknown encoder {spec!r}: expected hash, jax:HUB_NAME (as jax:Qwen/Qwen3-0.6B) or '
            'jax:FOLDER (with Qwen3 or Gemma 3); hf: in place of jax: runs other models of '
            'transformers; words makes only tokens (--tokens_only)'
        )
    # Before the imports: so a wrong name is refused at once.
    model_files.fetch_folder(model, 'text encoder', ['config.json'])
    try:
        # Only here: torch and transformers take seconds to import, and `hash` needs neither.
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
