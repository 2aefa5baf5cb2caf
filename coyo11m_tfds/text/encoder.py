"""Interfaces of tokenizers and text encoders, and batches of similar lengths.

    for rows, (height, width) in plan_batches(lengths, batch_tokens=2048):
        ...                     # rows of similar lengths, each once

`Tokenizer` and `Encoder` are the interfaces for `embed_captions` and training. This module imports
only numpy.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

DEFAULT_MAX_TOKENS = 512

# Told after each forward pass of its captions, their tokens, and what it computed of tokens and
# padding together.
OnBatch = Callable[[int, int, int], None]

_WIDTHS_AN_OCTAVE = 16  # of batches; more of them mean less padding and more programs to compile
_SHORTEST = 16  # no batch is narrower

T = TypeVar('T')


class Tokenizer(Protocol):
    """Turns captions into tokens.

    Attributes:
        name: Name in the metadata of a data set; free of paths of this machine.
        revision: Changes when the same caption may get other tokens, or another embedding.
        max_tokens: Captions are cut to so many tokens; 0 for no limit.
        vocabulary: Ids are less than this; 0 where tokens are not ids.
        truncated: Captions cut to the greatest length so far.
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
    """Turns captions into embeddings, each of its caption alone whatever is encoded beside it.

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
            tokens: What `tokenize` returned.
            on_batch: May raise an exception to end it.
        """
        ...

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Returns float32 `(len(captions), dim)`."""
        return self.encode_tokens(self.tokenize(captions))


def ignore_batch(captions: int, tokens: int, slots: int) -> None:
    """The `on_batch` of a caller that shows no progress."""


def one_behind(results: Iterator[T]) -> Iterator[T]:
    """Yields each result after the next one has been started, so that a device is never idle."""
    waiting: list[T] = []
    for result in results:
        yield from waiting
        waiting = [result]
    yield from waiting


def plan_batches(
    lengths: np.ndarray, batch_tokens: int, num_devices: int = 1
) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
    """Groups rows of like length, longest first, so that little of a batch is padding.

    The shapes are few: a batch is as wide as its longest row, rounded up to one of 16 widths an
    octave, and as high as its width allows; the last one only as high as a power of two allows.

    Args:
        lengths: Integers `(n,)`, tokens of each row.
        batch_tokens: Height times width of a batch at most, unless a row a device is more.
        num_devices: Heights are multiples of it.

    Yields:
        `(rows, (height, width))`: int64 `(k,)`, numbers of at most `height` rows, none of which is
        longer than `width`; each row comes once.
    """
    order = np.argsort(-lengths, kind='stable')
    start = 0
    while start < len(order):
        width = _round_up(int(lengths[order[start]]))
        height = max(1, batch_tokens // (width * num_devices))  # of one device
        left = -(-(len(order) - start) // num_devices)
        height = min(height, 1 << (left - 1).bit_length()) * num_devices
        yield order[start : start + height], (height, width)
        start += height


def _round_up(length: int) -> int:
    """The least of 16, 17, 18, ..., 32, 34, 36, ..., 64, 68, ... that is not less than `length`."""
    octave = 1 << (length - 1).bit_length()  # the least power of two that is not less
    step = max(1, octave // (2 * _WIDTHS_AN_OCTAVE))
    return max(_SHORTEST, -(-length // step) * step)
