"""Hashed words: embeddings and token ids without weights or other files.

Results are the same on every machine and in every process, unlike those of `hash()`.
"""

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.text.encoder import Encoder, OnBatch, Tokenizer, ignore_batch

_WORD = re.compile(r'\w+')
_PAIR_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so (a, b) and (b, a) differ
_BUCKETS_A_FEATURE = 4  # one for each 16 bits of a feature's hash
_ROWS_AT_ONCE = 1024  # few enough for their arrays to stay in a cache


def split_words(caption: str) -> list[str]:
    """Splits a caption into words, in small letters, without punctuation."""
    return _WORD.findall(unicodedata.normalize('NFKC', caption).lower())


@functools.lru_cache(maxsize=1 << 20)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), 'little')


class HashEncoder(Encoder):
    """Signed feature hashing of words and pairs of neighbouring words, without learning.

    Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning": each feature adds
    +1 or -1 to a bucket, so that inner products are kept on average. Here each feature goes to 4
    buckets (as in the sparse projections of Kane and Nelson 2014): nearly always two of a caption's
    50 features share a bucket, and with only one bucket each, a model could not tell them apart.
    The 4 buckets cost a fifth of the speed. Embeddings have length 1, or 0 for a caption without
    words.

    Speed on one core with captions of COCO: 110,000/s of 10 words, 46,000/s of 42 words.
    """

    name = 'hash'
    revision = '1'  # to be raised with every change of the embeddings
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
            words = tokens[start : start + _ROWS_AT_ONCE]
            rows = np.repeat(np.arange(len(words)), [len(w) for w in words])
            hashes = np.fromiter((_hash(w) for ws in words for w in ws), np.uint64, len(rows))
            neighbours = rows[1:] == rows[:-1]
            pairs = splitmix64(hashes[:-1] * _PAIR_MULTIPLIER + hashes[1:])[neighbours]
            embeddings[start : start + len(words)] = self._project(
                np.concatenate([hashes, pairs]),
                np.concatenate([rows, rows[1:][neighbours]]),
                len(words),
            )
            on_batch(len(words), len(rows))
        return embeddings

    def _project(self, features: np.ndarray, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Adds every feature (uint64) to its buckets in its row, and scales rows to length 1."""
        bits = features.astype('<u8').view('<u2').reshape(-1, _BUCKETS_A_FEATURE)
        buckets = (bits >> 1).astype(np.int64) * self.dim >> 15
        signs = 1.0 - 2.0 * (bits & 1)
        cells = rows[:, None] * self.dim + buckets
        sums = np.bincount(cells.ravel(), signs.ravel(), minlength=num_rows * self.dim)
        sums = sums.reshape(num_rows, self.dim)
        # Whole numbers so far, so the squares add up exactly in any order; the length is 0 or >= 1.
        lengths = np.sqrt(np.square(sums).sum(axis=1, keepdims=True))
        return (sums / np.maximum(lengths, 1)).astype(np.float32)


class WordsTokenizer(Tokenizer):
    """Each word becomes a token, its hash; so there is no vocabulary to store.

    Case, punctuation and the width of letters do not matter. The 33 words of the demo's captions
    have different ids; of 1,000 words, one in five shares its id with another word. The model
    learns a vector for each id (`train_lib.models.dit`).
    """

    name = schema.WORDS
    revision = '1'  # to be raised with every change of the ids
    vocabulary = 4096

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.truncated = 0

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        texts = [split_words(caption) for caption in captions]
        self.truncated += sum(len(words) > self.max_tokens for words in texts)
        return [[_hash(w) % self.vocabulary for w in words[: self.max_tokens]] for words in texts]


class LabelsTokenizer(Tokenizer):
    """The number of a class becomes its token, as in builds from sources with labels."""

    name = schema.LABELS
    revision = '1'
    max_tokens = 1
    vocabulary = 0  # that of a data set depends on its labels
    truncated = 0

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`; raises a ValueError for a caption that is not a number."""
        for caption in captions:
            if not caption.strip().isdecimal():
                raise ValueError(f'{caption!r}: expected the number of a class, such as 207')
        return [[int(caption)] for caption in captions]
