"""Text embeddings from a transformers model: its last hidden states, averaged over the tokens.

    encoder = HfEncoder('google/gemma-3-270m', 512)  # of the Hugging Face hub, or its cache
    encoder = HfEncoder('all-MiniLM-L6-v2/', 512)    # a folder: config, safetensors, tokenizer
    encoder = HfEncoder('gemma/', 512)               # a folder with one GGUF file
    embeddings = encoder.encode(['a cat', 'two dogs'])  # float32 (2, encoder.dim)

Weights are read from safetensors or GGUF alone, and code in a model's repository is never run.
Padding goes to the right, whatever the tokenizer prefers: then every token has the position that
it has in a caption on its own, in models with absolute positions too, a causal model never
attends to padding, and a mask keeps it from the others and from the mean.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from absl import logging
from safetensors import SafetensorError

from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import fast_tokenizer
from coyo11m_tfds.text.text_encoders import Encoder, OnBatch, Tokenizer, ignore_batch, one_behind

# Tokens in a forward pass, padding counted in: so memory stays the same however long the captions
# are. On a CPU more of them leave its caches: Gemma-3-270M does 9.1 captions/s a core with 512 to
# 2,048 tokens, 7.6 with 4,096 and 6.8 with 8,192. A GPU needs many to be busy (not measured).
BATCH_TOKENS = {'cpu': 2048, 'cuda': 32768}


class HfTokenizer(Tokenizer):
    """The tokenizer of a transformers model.

    Attributes:
        name: `hf:` and the name on the hub or the folder's own name.
        revision: of a model on the hub its commit; of a folder a digest of the files in it.
        max_tokens: the greatest length, special tokens counted in; the model's own if smaller.
        vocabulary: ids are less than this.
        truncated: captions cut to it so far.
    """

    def __init__(self, model: str, max_tokens: int, config: Any = None) -> None:
        """Loads the tokenizer.

        Args:
            model: a folder, or a name on the hub.
            max_tokens: longer captions are cut to it.
            config: of the model, if it has been read already.

        Raises:
            ValueError: there is no such model, or max_tokens is too small.
        """
        source = _source(model)
        with _naming(model):
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(model, **source)
            config = config or transformers.AutoConfig.from_pretrained(model, **source)
        self._tokenizer.truncation_side = 'right'
        self.name = f'hf:{model_files.public_name(model)}'
        self.revision = model_files.revision(model)
        self.max_tokens = _greatest_length(max_tokens, self._tokenizer, config)
        self.vocabulary = len(self._tokenizer)
        self.truncated = 0
        if not self._tokenizer.is_fast:
            logging.warning(
                '%s: its tokenizer, %s, runs in Python, many times slower than the fast ones (in '
                'Rust), so that the model will wait for it. Save the model with a tokenizer.json.',
                self.name,
                type(self._tokenizer).__name__,
            )

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of every caption, at least one and at most `max_tokens`."""
        if self._tokenizer.is_fast:
            backend = self._tokenizer.backend_tokenizer
            tokens, truncated = fast_tokenizer.encode(backend, captions, self.max_tokens)
        else:
            tokens, truncated = self._tokenize_slowly(captions)
        self.truncated += truncated
        return [ids or [self._filler] for ids in tokens]

    def _tokenize_slowly(self, captions: Sequence[str]) -> tuple[list[list[int]], int]:
        tokens, truncated = [], 0
        for caption in captions:
            ids = self._tokenizer(caption, verbose=False)['input_ids']
            if len(ids) > self.max_tokens:
                truncated += 1
                # Not a slice: the tokenizer keeps its special tokens at both ends.
                cut = self._tokenizer(caption, truncation=True, max_length=self.max_tokens)
                ids = cut['input_ids']
            tokens.append(ids)
        return tokens, truncated

    @property
    def _filler(self) -> int:
        """A token for padding, which the mask hides; many causal models have none of their own."""
        special = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in special if token is not None)


class HfEncoder(HfTokenizer, Encoder):
    """An encoder or a causal language model of transformers, on the GPU where there is one.

    Computes in float32 on CPUs and in bfloat16 on GPUs that have it; averages in float32. Of one
    caption the embedding is the same in any company but for rounding (about 1e-6 of its length in
    float32), because the order of sums in a matrix product depends on the product's shape.

    Captions of 50 tokens a second and CPU core: Gemma-3-270M 9, MiniLM-L6 83.

    Attributes:
        dim: numbers an embedding (the model's hidden size).
        dtype: of weights and computation.
        pooling: the mean.
    """

    pooling = 'mean'

    def __init__(
        self,
        model: str,
        max_tokens: int,
        batch_tokens: int | None = None,
    ) -> None:
        """Loads tokenizer and weights.

        Args:
            model: a folder, or a name on the hub.
            max_tokens: longer captions are cut to it.
            batch_tokens: tokens in a forward pass at most, padding counted in; None for what
                `BATCH_TOKENS` has for the device.

        Raises:
            ValueError: there is no such model, it has no weights that are safe to read, some of
                its weights are missing, it is not a text model, or max_tokens is too small.
        """
        self._device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        dtype = _dtype(self._device)
        self.dtype = str(dtype).removeprefix('torch.')
        self._model = _load(model, dtype)
        super().__init__(model, max_tokens, self._model.config)
        self._model.to(self._device)  # type: ignore[arg-type]  # its decorator loses `self`
        self._batch_tokens = batch_tokens or BATCH_TOKENS[self._device.type]
        self.dim = self._probe()

    def encode_tokens(
        self, tokens: Sequence[Sequence[int]], on_batch: OnBatch = ignore_batch
    ) -> np.ndarray:
        """Returns float32 `(len(tokens), dim)`; see `text_encoders.Encoder`."""
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        embeddings = np.empty((len(tokens), self.dim), np.float32)
        batches = length_batches(lengths, self._batch_tokens)
        started = ((rows, self._pool([tokens[row] for row in rows])) for rows in batches)
        for rows, means in one_behind(started):
            embeddings[rows] = means.cpu().numpy()
            on_batch(len(rows), int(lengths[rows].sum()), len(rows) * int(lengths[rows[0]]))
        return embeddings

    @torch.inference_mode()
    def _pool(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Runs the model on a batch; returns the means over real tokens, float32 `(n, dim)`."""
        lengths = torch.tensor([len(ids) for ids in tokens], device=self._device)
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for ids in tokens], batch_first=True, padding_value=self._filler
        ).to(self._device)
        real = torch.arange(padded.shape[1], device=self._device) < lengths[:, None]
        states = self._model(input_ids=padded, attention_mask=real.long()).last_hidden_state
        states = states.float().masked_fill(~real[..., None], 0)
        return states.sum(dim=1) / lengths[:, None]

    def _probe(self) -> int:
        """Encodes one token to see whether this is a text model; returns the width."""
        try:
            return self._pool([[self._filler]]).shape[1]
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f'{self.name}: {type(self._model).__name__} makes no hidden states from text '
                f'alone ({error}); expected an encoder or a causal language model'
            ) from error


def length_batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Groups rows of like length, longest first, so that little of a batch is padding.

    Args:
        lengths: int64 `(n,)`, tokens of each row.
        batch_tokens: rows times the longest of them is at most this, unless a row alone is more.

    Yields:
        int64 `(k,)`, numbers of rows; each row comes once.
    """
    order = np.argsort(-lengths, kind='stable')
    start = 0
    while start < len(order):
        stop = start + max(1, batch_tokens // int(lengths[order[start]]))
        yield order[start:stop]
        start = stop


# --- Loading --------------------------------------------------------------------------------


def _dtype(device: torch.device) -> torch.dtype:
    # Not float16: activations of models trained in bfloat16 (Gemma's) overflow in it.
    bfloat16 = device.type == 'cuda' and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if bfloat16 else torch.float32


def _source(model: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` besides the name."""
    folder = model_files.local_folder(model)
    gguf = folder and model_files.gguf_file(folder)
    source: dict[str, Any] = {'trust_remote_code': False}
    return source | ({'gguf_file': gguf.name} if gguf else {})


@contextlib.contextmanager
def _naming(model: str) -> Iterator[None]:
    """Turns what loading a model raises into a ValueError that says what is expected."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ValueError(
            f'cannot load the text encoder {model!r}: {error}\n'
            'Expected a folder with config.json, *.safetensors and a tokenizer, a folder with one '
            'GGUF file, or a name on the Hugging Face hub (which needs the network unless the '
            'model is in the cache; pickled weights and code in the repository are not accepted).'
        ) from error


def _load(model: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Loads the model, in evaluation mode, or says why it cannot."""
    source = _source(model)
    with _naming(model):
        network, report = _auto_class(model, source).from_pretrained(
            model, dtype=dtype, use_safetensors=True, output_loading_info=True, **source
        )
    _check_complete(model, report['missing_keys'])
    # Whole captions go through at once, so keys and values need not be kept for a next token.
    network.config.use_cache = False
    return network.eval()


def _auto_class(model: str, source: dict[str, Any]) -> Any:
    """The class that gives hidden states of text: of models like T5, only the encoder."""
    if 'gguf_file' in source:  # its configuration takes as long to read as the whole file
        return transformers.AutoModel
    config = transformers.AutoConfig.from_pretrained(model, **source)
    if config.is_encoder_decoder:
        return transformers.AutoModelForTextEncoding
    return transformers.AutoModel


def _check_complete(model: str, missing: set[str]) -> None:
    """Refuses a model part of whose weights would be random; its pooling layer is not used."""
    lacking = sorted(name for name in missing if not name.startswith('pooler.'))
    if lacking:
        raise ValueError(
            f'text encoder {model!r}: the weights lack {len(lacking)} tensors that the model '
            f'needs, such as {lacking[0]}; without them it would be initialized at random'
        )


def _greatest_length(max_tokens: int, tokenizer: Any, config: Any) -> int:
    """The least of what is asked for and what tokenizer and model can take.

    Raises:
        ValueError: that leaves no room for a word beside the special tokens.
    """
    positions = getattr(config, 'max_position_embeddings', None) or max_tokens
    length = min(max_tokens, tokenizer.model_max_length, positions)
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise ValueError(
            f'max_tokens is {length}, expected more than the {special} special tokens that every '
            'caption gets'
        )
    return length
