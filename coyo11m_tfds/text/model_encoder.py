"""What encoders with a model share: tokens, batches, and means in the order of the captions.

The tokenizer is that of the package `tokenizers`, without its wrapper in transformers, which takes
1.5 times as long. It releases the interpreter's lock, so another thread can run a model.
"""

import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tokenizers

from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage import model_fields, model_files
from coyo11m_tfds.text.protocols import Encoder, OnBatch, Tokenizer, ignore_batch

# What the package returns of a caption of 137 tokens takes 12 KB. MiniLM's tokenizer takes 170 us
# of CPU for one with 128 to 1,024 captions at a time, and 210 us with 30,000, whose memory is new
# each time (AMD EPYC).
_CAPTIONS_AT_ONCE = 1024

# Of widths of batches: more of them mean less padding, and more programs to compile.
_WIDTHS_AN_OCTAVE = 16
_SHORTEST = 16  # no batch is narrower
_MAX_VOCABULARY = 1 << 22


def check_tokenizer(path: pathlib.Path) -> None:
    """Raises a ValueError for a tokenizer.json that cannot be read, or would end the process.

    The package aborts at pairs that do not fit a prefix, which no published model has.
    """
    model = model_fields.read_object(path).get('model')
    if isinstance(model, dict) and 'merges' in model:
        no_text = model_fields.optional(model_fields.exactly(''))
        model_fields.check(model, {'continuing_subword_prefix': no_text}, path)


class ModelTokenizer(Tokenizer):
    """The tokenizer of a model; a cut caption keeps its special tokens."""

    def __init__(
        self, spec: str, max_tokens: int, backend: tokenizers.Tokenizer, filler: int
    ) -> None:
        """Takes a `backend`, whose padding and truncation it changes, and a token for padding.

        `spec` is `hf:` or `jax:`, and a folder or a name on the hub. Captions are cut to
        `max_tokens`, special tokens included.
        """
        runner, _, model = spec.partition(':')
        self.name = f'{runner}:{model_files.public_name(model)}'
        with model_files.naming_errors(f'{self.name}: its tokenizer fails'):
            special = backend.num_special_tokens_to_add(is_pair=False)
            ids = backend.get_vocab(with_added_tokens=True).values()
        if max_tokens <= special:
            raise ValueError(
                f'max_tokens is {max_tokens}, expected more than the {special} special tokens of '
                'each caption'
            )
        self.revision = model_files.revision(model)
        # By the largest id: vocabularies have gaps.
        self.vocabulary = max(ids, default=-1) + 1
        if self.vocabulary > _MAX_VOCABULARY:
            raise ValueError(
                f'{self.name}: its tokenizer has the token id {self.vocabulary - 1}, expected less '
                f'than {_MAX_VOCABULARY}'
            )
        self.max_tokens = max_tokens
        self.truncated = 0
        self._backend = backend
        self._filler = filler

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of every caption, at least one and at most `max_tokens`.

        Raises a ValueError if the tokenizer fails, or gives an id beyond its vocabulary.
        """
        # An earlier user of the tokenizer may have set them differently.
        self._backend.no_padding()
        self._backend.enable_truncation(self.max_tokens)
        blocks = []
        for start in range(0, len(captions), _CAPTIONS_AT_ONCE):
            blocks.append(list(captions[start : start + _CAPTIONS_AT_ONCE]))
        # Of two threads one collects ids, on one core, while the other has all cores for its block.
        with ThreadPool(2, 'tokenize') as threads:
            tokenized_blocks = list(threads.map(self._tokenize_block, blocks))
        tokens = []
        for block_ids, num_truncated in tokenized_blocks:
            self.truncated += num_truncated
            # The mean of no states is not a number.
            tokens += [ids or [self._filler] for ids in block_ids]
        return tokens

    def _tokenize_block(self, captions: list[str]) -> tuple[list[list[int]], int]:
        """Returns the ids of each caption, and how many captions were cut."""
        with model_files.naming_errors(f'{self.name}: its tokenizer fails'):
            encodings = self._backend.encode_batch_fast(captions)
        ids = []
        num_truncated = 0
        largest = 0
        for encoding in encodings:
            row = encoding.ids
            ids.append(row)
            if row:
                largest = max(largest, max(row))
            if encoding.overflowing:
                num_truncated += 1
        # Special tokens need not be in the vocabulary.
        if largest >= self.vocabulary:
            raise ValueError(
                f'{self.name}: its tokenizer gives the token id {largest}, expected less than '
                f'{self.vocabulary}, as its vocabulary has'
            )
        return ids, num_truncated


class ModelEncoder(Encoder):
    """Embeds captions with a model: the last hidden states, averaged over the tokens.

    The batch changes an embedding only by rounding (about 1e-6 of its length in float32), because
    the order of sums in a matrix product depends on the product's shape.
    """

    pooling = 'mean'
    _batch_tokens: int  # limit of a batch over all devices, with padding
    _num_devices = 1

    def _start(
        self, tokens: Sequence[Sequence[int]], shape: tuple[int, int]
    ) -> Callable[[], np.ndarray]:
        """Starts a batch of this padded shape; returns a function that waits for `(n, dim)`."""
        raise NotImplementedError

    def encode_tokens(
        self, tokens: Sequence[Sequence[int]], on_batch: OnBatch = ignore_batch
    ) -> np.ndarray:
        """See `Encoder`."""
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        embeddings = np.empty((len(tokens), self.dim), np.float32)

        def finish(rows: np.ndarray, wait: Callable[[], np.ndarray]) -> None:
            """Waits for a batch, and puts its embeddings where they belong."""
            batch = wait()
            # Behind its rows, a batch may have some of padding.
            embeddings[rows] = batch[: len(rows)]
            num_tokens = int(lengths[rows].sum())
            on_batch(len(rows), num_tokens)

        running = None
        for rows, shape in plan_batches(lengths, self._batch_tokens, self._num_devices):
            tokens_of_batch = [tokens[row] for row in rows]
            # Before the wait for the previous batch, so that no device is idle.
            wait = self._start(tokens_of_batch, shape)
            if running:
                finish(*running)
            running = rows, wait
        if running:
            finish(*running)
        return embeddings


def plan_batches(
    lengths: np.ndarray, batch_tokens: int, num_devices: int = 1
) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
    """Groups rows of similar lengths, integers `(n,)`, so that batches have little padding.

    Yields `(rows, (height, width))`: the numbers of at most `height` rows, int64 `(k,)`, none
    longer than `width`. Height times width is at most `batch_tokens`, or one row a device.
    """
    # The longest first, so that the first of the rows that are left is as wide as its batch.
    order = np.argsort(-lengths, kind='stable')
    start = 0
    while start < len(order):
        # Batches have few shapes, because each has to be compiled: heights are the largest for one
        # of 16 widths an octave or, with few rows left, powers of two.
        longest = int(lengths[order[start]])
        width = _round_up(longest)
        # Of one device: as many rows as the limit allows, and no more than are left.
        max_height = max(1, batch_tokens // (width * num_devices))
        num_rows = len(order) - start
        num_left = -(-num_rows // num_devices)  # rounded up
        enough = 1 << (num_left - 1).bit_length()  # the least power of two that is not less
        height = min(max_height, enough) * num_devices
        yield order[start : start + height], (height, width)
        start += height


def _round_up(length: int) -> int:
    """The least of 16, 17, 18, ..., 32, 34, 36, ..., 64, 68, ... that is not less than `length`."""
    octave = 1 << (length - 1).bit_length()  # the least power of two that is not less
    step = max(1, octave // (2 * _WIDTHS_AN_OCTAVE))
    num_steps = -(-length // step)  # rounded up
    return max(_SHORTEST, num_steps * step)
