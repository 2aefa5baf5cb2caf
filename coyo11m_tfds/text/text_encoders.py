"""Encoders of captions: text in, one embedding a caption out.

    encoder = make_encoder('hash')                      # or 'hf:google/gemma-3-270m', 'hf:FOLDER'
    embeddings = encoder.encode(['a cat', 'two dogs'])     # float32 (2, encoder.dim)

    tokens = encoder.tokenize(['a cat', 'two dogs'])    # the same in two steps, so that a thread
    embeddings = encoder.encode_tokens(tokens)             # can tokenize ahead of the model

    make_tokenizer('hf:FOLDER', 128).tokenize(['a cat'])    # [[2, 35, 14]]; reads no weights

`hash` needs no weights and is the default; `hf:` runs a transformers model (`hf_encoder`), `jax:`
a Gemma 3 in JAX (`jax_encoder`). The embedding of a caption depends on that caption alone, not on
those that it is encoded together with.
"""

import contextlib
import functools
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.storage import model_files

DEFAULT_MAX_TOKENS = 512

T = TypeVar('T')


# Told after each forward pass of its captions, their tokens, and what it computed of tokens and
# padding together.
OnBatch = Callable[[int, int, int], None]


class Tokenizer(Protocol):
    """A tokenizer, as `embed_captions` uses it.

    Attributes:
        name: what the metadata of a data set calls it; free of paths of this machine.
        revision: changes when the same caption may get other tokens, or another embedding.
        max_tokens: captions are cut to so many tokens; 0 for no limit.
        vocabulary: ids are less than this; 0 where tokens are not ids.
        truncated: captions cut to the greatest length so far.
    """

    name: str
    revision: str
    max_tokens: int
    vocabulary: int
    truncated: int

    def tokenize(self, captions: Sequence[str]) -> Sequence[Sequence[Any]]:
        """Returns the tokens of each caption; may run in another thread than `encode_tokens`."""
        ...


class Encoder(Tokenizer, Protocol):
    """A text encoder, as `embed_captions` uses it.

    Attributes:
        dim: Numbers of an embedding.
        dtype: Dtype of the weights and of the computation.
        pooling: How the states of the tokens become one embedding.
    """

    dim: int
    dtype: str
    pooling: str

    def encode_tokens(self, tokens: Sequence[Sequence[Any]], on_batch: OnBatch = ...) -> np.ndarray:
        """Returns float32 `(len(tokens), dim)`; the batches depend on the tokens alone.

        Args:
            tokens: what `tokenize` returned.
            on_batch: may raise an exception to end it.
        """
        ...

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Returns float32 `(len(captions), dim)`."""
        return self.encode_tokens(self.tokenize(captions))


def ignore_batch(captions: int, tokens: int, slots: int) -> None:
    """The `on_batch` of who does not ask how far it is."""


def one_behind(results: Iterator[T]) -> Iterator[T]:
    """Yields each result after the next one has been started, so that a device is never idle."""
    waiting: list[T] = []
    for result in results:
        yield from waiting
        waiting = [result]
    yield from waiting


def make_encoder(
    spec: str,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    batch_tokens: int | None = None,
) -> Encoder:
    """Makes the encoder that a specification names.

    Args:
        spec: `hash`, `hf:HUB_NAME`, `hf:FOLDER`, `jax:HUB_NAME` or `jax:FOLDER`.
        max_tokens: longer captions are cut; not for `hash`.
        batch_tokens: tokens in a forward pass of a device at most, or None for what suits the
            device; not for `hash`.

    Raises:
        ValueError: the specification is unknown, the model cannot be had or is unfit, or what runs
            it is not installed.
    """
    if spec == HashEncoder.name:
        return HashEncoder()
    runner, model = _take_apart(spec)
    logging.info('Loading the text encoder %s', spec)
    # torch and transformers take seconds to import, and `hash` needs neither.
    if runner == 'hf':
        with _needing('text', spec):
            from coyo11m_tfds.text import hf_encoder

        return hf_encoder.HfEncoder(model, max_tokens, batch_tokens)
    with _needing('text-jax', spec):
        from coyo11m_tfds.text import jax_encoder

    return jax_encoder.JaxEncoder(model, max_tokens, batch_tokens)


def make_tokenizer(spec: str, max_tokens: int = DEFAULT_MAX_TOKENS) -> Tokenizer:
    """Makes the tokenizer alone of an encoder that has token ids; see `make_encoder`."""
    if spec == HashEncoder.name:
        raise ValueError(
            f'the encoder {spec!r} has no token ids: name words, or a model, as '
            'hf:google/gemma-3-270m.'
        )
    runner, model = _take_apart(spec)
    if runner == 'hf':
        with _needing('text', spec):
            from coyo11m_tfds.text import hf_encoder

        return hf_encoder.HfTokenizer(model, max_tokens)
    with _needing('text-jax', spec):
        from coyo11m_tfds.text import jax_encoder

    return jax_encoder.JaxTokenizer(model, max_tokens)


def check(spec: str) -> None:
    """Looks in seconds whether there is such an encoder; raises as `make_encoder` if not."""
    if spec != HashEncoder.name:
        _take_apart(spec)


def _take_apart(spec: str) -> tuple[str, str]:
    """Returns what runs a model, and its name, if there is such a model."""
    runner, _, model = spec.partition(':')
    if runner not in ('hf', 'jax') or not model:
        raise ValueError(
            f'unknown encoder {spec!r}: expected hash, hf:HUB_NAME (as hf:google/gemma-3-270m) '
            'or hf:FOLDER (with a transformers model or one GGUF file); jax: in place of hf: runs '
            'Gemma 3 without torch; words makes tokens alone (--tokens_only)'
        )
    model_files.folder(model, 'text encoder', ['config.json'])
    return runner, model


@contextlib.contextmanager
def _needing(extra: str, spec: str) -> Iterator[None]:
    """Turns a failed import into a ValueError that says which extra brings the module."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f'the text encoder {spec!r} needs {error.name}, which is not installed: '
            f"pip install -c constraints.txt -e '.[{extra}]'"
        ) from error


# --- Feature hashing ------------------------------------------------------------------------

_WORD = re.compile(r'\w+')
_PAIR_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so (a, b) and (b, a) differ
_BUCKETS_A_FEATURE = 4  # one for each 16 bits of a feature's hash
_ROWS_AT_ONCE = 1024  # few enough for their arrays to stay in a cache


class HashEncoder(Encoder):
    """Signed feature hashing of words and pairs of neighbouring words; nothing is learned.

    Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning": each feature adds
    +1 or -1 to a bucket, so that inner products are kept on average. Here each feature goes to 4
    buckets (as in the sparse projections of Kane and Nelson 2014): of the 50 features of a
    caption two share a bucket nearly always, and would be one and the same feature to a model if
    they had no other. It costs a fifth of the speed. Embeddings have length 1, or 0 where a caption
    has no word, and are the same on every machine.

    On one core, of captions in COCO: 110,000/s of 10 words, 46,000/s of 42 words.
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
            embeddings[start : start + len(words)] = self._encode_words(words)
            num_words = sum(map(len, words))
            on_batch(len(words), num_words, num_words)
        return embeddings

    def _encode_words(self, words: Sequence[Sequence[str]]) -> np.ndarray:
        rows = np.repeat(np.arange(len(words)), [len(w) for w in words])
        hashes = np.fromiter((hash_word(w) for ws in words for w in ws), np.uint64, len(rows))

        neighbours = rows[1:] == rows[:-1]
        pairs = splitmix64(hashes[:-1] * _PAIR_MULTIPLIER + hashes[1:])[neighbours]
        return self._project(
            np.concatenate([hashes, pairs]),
            np.concatenate([rows, rows[1:][neighbours]]),
            len(words),
        )

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


def split_words(caption: str) -> list[str]:
    """The words of a caption, in small letters, without punctuation."""
    return _WORD.findall(unicodedata.normalize('NFKC', caption).lower())


@functools.lru_cache(maxsize=1 << 20)
def hash_word(word: str) -> int:
    """64 bits that are the same in every process and on every platform, unlike `hash()`."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), 'little')
