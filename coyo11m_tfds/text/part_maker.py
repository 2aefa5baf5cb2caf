"""The parts of a sidecar: a pure function of captions, encoder and number of parts.

    captions = Captions(joined, part_captions=32768)
    for number, keys, values in part_maker.make(captions, [0, 3], encoder):
        ...                                             # float16 (n, dim)

A part is a range of keys. Equal captions of a part are encoded once, and a part is tokenized while
the model works on the one before. How a part is cut into batches depends on its captions alone, so
that it comes out the same whoever makes it, in whatever company.
"""

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.text import tokenizers
from coyo11m_tfds.text.text_encoders import Encoder, OnBatch, Tokenizer

# Enough for batches of like length on several devices, few enough to lose little when a part is
# interrupted: an hour of Gemma-3-270M on a core. 42 MB of 640 numbers each.
PART_CAPTIONS = 32768


class Captions:
    """The captions of a source in the order of their keys, cut into parts.

    Attributes:
        digest: of all of them.
        count: of parts.
    """

    def __init__(self, captions: Joined, part_captions: int = PART_CAPTIONS):
        """Takes what `captions.join` made of all keys; parts have at most `part_captions` each."""
        self.digest: str = captions.facts['digest']
        self._captions = captions
        self._keys = captions.places[captions.sizes > 0]
        self.count = -(-len(self._keys) // part_captions)

    def __len__(self) -> int:
        return len(self._keys)

    def size(self, number: int) -> int:
        """Returns how many captions a part has."""
        return len(self.keys(number))

    def keys(self, number: int) -> np.ndarray:
        """Returns the keys of a part, int64 `(n,)`, ascending."""
        bounds = [len(self) * n // self.count for n in (number, number + 1)]
        return self._keys[slice(*bounds)]

    def texts(self, number: int) -> list[bytes]:
        """Returns the captions of a part as UTF-8."""
        return self._captions.read(self.keys(number))


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A part that is tokenized.

    Attributes:
        texts: those that differ.
        tokens: of each of them.
        places: int64 `(n,)`, which of them each caption of the part is.
    """

    number: int
    texts: list[str]
    tokens: Sequence[Sequence[Any]]
    places: np.ndarray


def make(
    captions: Captions,
    numbers: Sequence[int],
    encoder: Encoder | Tokenizer,
    on_batch: OnBatch,
    tokens_only: bool = False,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Makes some parts, one after the other.

    Args:
        captions: to encode.
        numbers: of the parts.
        encoder: makes the embeddings, or with `tokens_only` the tokens.
        on_batch: told of what is done; may raise an exception to end it.
        tokens_only: whether to make token ids in place of embeddings.

    Yields:
        `(number, keys, values)`: keys int64 `(n,)`, ascending; embeddings float16 `(n, dim)`, or
        token ids int32 `(n, encoder.max_tokens)`, padded with -1.

    Raises:
        ValueError: a number is not finite in float16.
    """
    with concurrent.futures.ThreadPoolExecutor(1, 'tokenize') as thread:
        coming = None
        for number, following in itertools.zip_longest(numbers, numbers[1:]):
            prepared = coming.result() if coming else _prepare(captions, number, encoder)
            if following is not None:
                coming = thread.submit(_prepare, captions, following, encoder)
            if tokens_only:
                values = tokenizers.pad(prepared.tokens, encoder.max_tokens)
                num_tokens = int((values != tokenizers.PADDING).sum())
                on_batch(len(values), num_tokens, num_tokens)
            else:
                values = _encode(prepared, cast(Encoder, encoder), on_batch)
            on_batch(len(prepared.places) - len(values), 0, 0)
            yield number, captions.keys(number), values[prepared.places]


def _prepare(captions: Captions, number: int, tokenizer: Tokenizer) -> _Prepared:
    texts = captions.texts(number)
    place_of: dict[bytes, int] = {}
    places = np.array([place_of.setdefault(text, len(place_of)) for text in texts], np.int64)
    different = [text.decode() for text in place_of]
    return _Prepared(number, different, tokenizer.tokenize(different), places)


def _encode(prepared: _Prepared, encoder: Encoder, on_batch: OnBatch) -> np.ndarray:
    with np.errstate(over='ignore'):
        values = encoder.encode_tokens(prepared.tokens, on_batch).astype(np.float16)
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise ValueError(
            f'{encoder.name} makes numbers that float16 cannot hold of the caption '
            f'{prepared.texts[bad[0]][:100]!r}; use another encoder or leave the caption out.'
        )
    return values
