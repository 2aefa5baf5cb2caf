"""What encoders and tokenizers of captions have in common, whatever makes their numbers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

# Takes the number of captions and the number of tokens of a forward pass.
OnBatch = Callable[[int, int], None]


def ignore_batch(captions: int, tokens: int) -> None:
    """The `on_batch` of a caller that shows no progress."""


class Tokenizer(Protocol):
    """Turns captions into tokens."""

    name: str  # in the metadata of a data set, without paths of this machine
    revision: str  # changes if a caption may get other tokens or another embedding
    max_tokens: int  # length to which captions are cut; 0 for no limit
    vocabulary: int  # all ids are below this number; 0 if tokens are not ids
    truncated: int  # number of captions cut so far

    def tokenize(self, captions: Sequence[str]) -> Sequence[Sequence[Any]]:
        """Returns the tokens of each caption; may run in another thread than `encode_tokens`."""


class Encoder(Tokenizer, Protocol):
    """Turns captions into embeddings. Each embedding depends only on its own caption."""

    dim: int  # width of an embedding
    dtype: str  # of the weights and of the computation
    pooling: str  # name of the rule that turns the states of tokens into one embedding

    def encode_tokens(self, tokens: Sequence[Sequence[Any]], on_batch: OnBatch = ...) -> np.ndarray:
        """Returns float32 `(len(tokens), dim)`; calls `on_batch` after each batch."""

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Returns float32 `(len(captions), dim)`."""
        return self.encode_tokens(self.tokenize(captions))
