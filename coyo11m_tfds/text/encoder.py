"""Interfaces of tokenizers and text encoders, and batches of texts of similar lengths.

`Tokenizer` and `Encoder` are the interfaces for `embed_captions` and training. This module imports
only numpy.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

DEFAULT_MAX_TOKENS = 512

# Takes the number of captions and the number of tokens of a forward pass.
OnBatch = Callable[[int, int], None]

_WIDTHS_AN_OCTAVE = 16  # of batches; more of them mean less padding and more programs to compile
_SHORTEST = 16  # no batch is narrower


class Tokenizer(Protocol):
    """Turns captions into tokens."""

    name: str  # in the metadata of a data set, without paths of this machine
    revision: str  # changes if a caption may get other tokens or another embedding
    max_tokens: int  # length to which captions are cut; 0 for no limit
    vocabulary: int  # all ids are below this number; 0 if tokens are not ids
    truncated: int  # number of captions cut so far

    def tokenize(self, captions: Sequence[str]) -> Sequence[Sequence[Any]]:
        """Returns the tokens of each caption; may run in another thread than `encode_tokens`."""
        ...


class Encoder(Tokenizer, Protocol):
    """Turns captions into embeddings. Each embedding depends only on its own caption."""

    dim: int  # width of an embedding
    dtype: str  # of the weights and of the computation
    pooling: str  # name of the rule that turns the states of tokens into one embedding

    def encode_tokens(self, tokens: Sequence[Sequence[Any]], on_batch: OnBatch = ...) -> np.ndarray:
        """Returns float32 `(len(tokens), dim)`; the batches depend only on the tokens.

        `on_batch` is called after each batch; its exceptions end the encoding.
        """
        ...

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Returns float32 `(len(captions), dim)`."""
        return self.encode_tokens(self.tokenize(captions))


def ignore_batch(captions: int, tokens: int) -> None:
    """Ignores a batch: the `on_batch` of a caller that shows no progress."""


def plan_batches(
    lengths: np.ndarray, batch_tokens: int, num_devices: int = 1
) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
    """Groups rows of similar length, longest first, so that batches have little padding.

    Batches have few shapes. A width is that of the longest row, rounded up to one of 16 widths an
    octave. A height is the largest for this width, of multiples of `num_devices`; with few rows
    left, it is the next power of two.

    Args:
        lengths: Number of tokens of each row, integers `(n,)`.
        batch_tokens: Limit for the height times the width of a batch; one row a device is always
            allowed.

    Yields:
        `(rows, (height, width))`: the numbers of at most `height` rows, int64 `(k,)`, none longer
        than `width`. Each row comes once.
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
