"""Encoders of captions: text in, one vector a caption out.

    encoder = make_encoder('hash')                      # or 'hf:google/gemma-3-270m', 'hf:FOLDER'
    vectors = encoder.encode(['a cat', 'two dogs'])     # float32 (2, encoder.dim)

`hash` needs no weights and is the default; `hf:` runs a transformers model (`hf_encoder`), `jax:`
a Gemma 3 in JAX (`jax_encoder`). The vector of a caption depends on that caption alone, not on
those that it is encoded together with.
"""

import contextlib
import functools
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.keyed_random import splitmix64

DEFAULT_MAX_TOKENS = 512


class Encoder(Protocol):
    """What `embed_captions` asks of an encoder.

    Attributes:
        name: what the metadata of a data set calls it; free of paths of this machine.
        revision: changes when the same caption may get another vector.
        max_tokens: captions are cut to so many tokens; 0 for no limit.
        dim: numbers a vector.
        truncated: captions cut to the encoder's greatest length so far.
    """

    name: str
    revision: str
    max_tokens: int
    dim: int
    truncated: int

    def encode(
        self, captions: Sequence[str], on_captions: Callable[[int], None] = ...
    ) -> np.ndarray:
        """Returns float32 `(len(captions), dim)`.

        Args:
            captions: to encode.
            on_captions: is told how many more are done, after each forward pass.
        """
        ...


def ignore_captions(count: int) -> None:
    """The `on_captions` of who does not ask how far it is."""


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
    if re.fullmatch('(hf|jax):.+', spec):
        logging.info('Loading the text encoder %s', spec)
    if spec.startswith('hf:') and spec != 'hf:':
        # torch and transformers take seconds to import, and `hash` needs neither.
        with _needing('text', spec):
            from coyo11m_tfds.text import hf_encoder

        return hf_encoder.HfEncoder(spec.removeprefix('hf:'), max_tokens, batch_tokens)
    if spec.startswith('jax:') and spec != 'jax:':
        with _needing('text_jax', spec):
            from coyo11m_tfds.text import jax_encoder

        return jax_encoder.JaxEncoder(spec.removeprefix('jax:'), max_tokens, batch_tokens)
    raise ValueError(
        f'unknown encoder {spec!r}: expected hash, hf:HUB_NAME (as hf:google/gemma-3-270m) '
        'or hf:FOLDER (with a transformers model or one GGUF file); jax: in place of hf: runs '
        'Gemma 3 without torch'
    )


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


class HashEncoder:
    """Signed feature hashing of words and pairs of neighbouring words; nothing is learned.

    Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning": each feature adds
    +1 or -1 to a bucket, so that inner products are kept on average. Here each feature goes to 4
    buckets (as in the sparse projections of Kane and Nelson 2014): of the 50 features of a
    caption two share a bucket nearly always, and would be one and the same feature to a model if
    they had no other. It costs a fifth of the speed. Vectors have length 1, or 0 where a caption
    has no word.

    On one core, of captions in COCO: 110,000/s of 10 words, 46,000/s of 42 words.
    """

    name = 'hash'
    revision = '1'  # to be raised with every change of the vectors
    max_tokens = 0
    dim = schema.DEFAULT_TEXT_DIM
    truncated = 0

    def encode(
        self, captions: Sequence[str], on_captions: Callable[[int], None] = ignore_captions
    ) -> np.ndarray:
        """Returns float32 `(len(captions), 640)`, the same on every machine."""
        words = [split_words(caption) for caption in captions]
        rows = np.repeat(np.arange(len(words)), [len(w) for w in words])
        hashes = np.fromiter((hash_word(w) for ws in words for w in ws), np.uint64, len(rows))

        neighbours = rows[1:] == rows[:-1]
        pairs = splitmix64(hashes[:-1] * _PAIR_MULTIPLIER + hashes[1:])[neighbours]
        vectors = self._project(
            np.concatenate([hashes, pairs]),
            np.concatenate([rows, rows[1:][neighbours]]),
            len(captions),
        )
        on_captions(len(captions))
        return vectors

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
