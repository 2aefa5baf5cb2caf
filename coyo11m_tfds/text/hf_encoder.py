"""Embeds texts with a transformers model: its last hidden states, averaged over the tokens.

Weights are read only from safetensors, and code in a model's repository is never run.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from coyo11m_tfds.process import job
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import model_fields, model_files
from coyo11m_tfds.text import model_encoder
from coyo11m_tfds.text.model_encoder import ModelEncoder, ModelTokenizer

# Tokens in a forward pass, padding counted in: so memory stays the same however long the captions
# are. On a CPU more of them leave its caches: Gemma-3-270M does 9.1 captions/s a core with 512 to
# 2,048 tokens, 7.6 with 4,096 and 6.8 with 8,192. A GPU needs many to be busy (not measured).
BATCH_TOKENS = {'cpu': 2048, 'cuda': 32768}

_SAFE: dict[str, Any] = {'trust_remote_code': False}
_loading = functools.partial(model_files.loading, kind='text encoder', files='a tokenizer')


class HfTokenizer(ModelTokenizer):
    """The tokenizer of a transformers model; see `ModelTokenizer`."""

    def __init__(self, model: str, max_tokens: int, config: Any = None) -> None:
        """Loads the tokenizer; `config` is that of the model, if it has been read."""
        path = pathlib.Path(model, 'tokenizer.json')
        if path.is_file():
            model_encoder.check_tokenizer(path)
        with _loading(model):
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, **_SAFE)
            config = config or transformers.AutoConfig.from_pretrained(model, **_SAFE)
        if not tokenizer.is_fast:
            raise ValueError(
                f'text encoder {model!r}: its tokenizer, {type(tokenizer).__name__}, runs in '
                'Python; expected one with a tokenizer.json, which runs many times faster.'
            )
        # The least of what the user, the tokenizer and the model allow.
        positions = getattr(config, 'max_position_embeddings', None) or max_tokens
        length = min(max_tokens, tokenizer.model_max_length, positions)
        # Many causal models have no token for padding: then the one that ends a text.
        filler = 0
        if tokenizer.pad_token_id is not None:
            filler = tokenizer.pad_token_id
        elif tokenizer.eos_token_id is not None:
            filler = tokenizer.eos_token_id
        super().__init__(f'hf:{model}', length, tokenizer.backend_tokenizer, filler)


class HfEncoder(HfTokenizer, ModelEncoder):
    """An encoder or a causal language model of transformers, on a GPU if there is one.

    It computes in float32 on CPUs and in bfloat16 on GPUs that support it; averages are float32. A
    CPU core encodes 9 captions of 50 tokens a second with Gemma-3-270M, and 83 with MiniLM-L6.
    """

    def __init__(self, model: str, max_tokens: int, batch_tokens: int | None = None) -> None:
        """Loads tokenizer and weights; see `text_encoders.make_encoder`."""
        self._device = torch.device('cpu')
        if num_gpus := torch.cuda.device_count():
            # The processes of a machine share its GPUs.
            gpu = job.index_on_machine() % num_gpus
            self._device = torch.device('cuda', gpu)
        # Not float16: activations of models trained in bfloat16 (Gemma's) overflow in it.
        dtype = torch.float32
        if self._device.type == 'cuda' and torch.cuda.is_bf16_supported():
            dtype = torch.bfloat16
        self.dtype = str(dtype).removeprefix('torch.')
        self._model = _load_model(model, dtype)
        super().__init__(model, max_tokens, self._model.config)
        self._model.to(self._device)  # type: ignore[arg-type]  # its decorator loses `self`
        self._batch_tokens = batch_tokens or BATCH_TOKENS[self._device.type]
        # Tried once: no field of all configurations says how wide the states are.
        try:
            self.dim = self._pool([[self._filler]]).shape[1]
        # A network of other sizes than its weights, or for other inputs, raises anything.
        except Exception as error:
            raise ValueError(
                f'{self.name}: {type(self._model).__name__} makes no hidden states from text '
                f'alone ({model_fields.shorten(error)}); expected an encoder or a causal language '
                'model'
            ) from error

    def _start(
        self, tokens: Sequence[Sequence[int]], shape: tuple[int, int]
    ) -> Callable[[], np.ndarray]:
        """See `ModelEncoder`; a batch is only as wide as its longest text."""
        means = self._pool(tokens)
        # A GPU still computes then: only the copy to the host waits for it.
        return lambda: means.cpu().numpy()

    @torch.inference_mode()
    def _pool(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Runs the model on a batch; returns the means over real tokens, float32 `(n, dim)`."""
        rows = [torch.tensor(ids) for ids in tokens]
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        # On the right: so tokens have the positions of a caption alone, and causal models do not
        # attend to the padding. In other models, and in the mean, a mask leaves it out.
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._filler)
        padded = padded.to(self._device)
        places = torch.arange(padded.shape[1], device=self._device)
        is_real = places < lengths[:, None]
        output = self._model(input_ids=padded, attention_mask=is_real.long())
        # Averages are float32, whatever the model computes in.
        states = output.last_hidden_state.float()
        real_states = states.masked_fill(~is_real[..., None], 0)
        return real_states.sum(dim=1) / lengths[:, None]


# In quotes, as transformers imports its models, and triton with them, where one is first named.
def _load_model(model: str, dtype: torch.dtype) -> 'transformers.PreTrainedModel':
    """Loads the model in evaluation mode, or raises an error that says why it cannot."""
    with _loading(model):
        # Here, because some versions of transformers import triton where this is named.
        kind: Any = transformers.AutoModel
        config = transformers.AutoConfig.from_pretrained(model, **_SAFE)
        # Like T5, of which only the encoder is needed.
        if config.is_encoder_decoder:
            kind = transformers.AutoModelForTextEncoding
        model_files.check_floats(model)
        network, report = kind.from_pretrained(
            model, dtype=dtype, use_safetensors=True, output_loading_info=True, **_SAFE
        )
    missing = []
    for name in sorted(report['missing_keys']):
        # The pooling layer is not used.
        if not name.startswith('pooler.'):
            missing.append(name)
    if missing:
        raise ValueError(
            f'text encoder {model!r}: the weights lack {format_count(len(missing), "tensor")} '
            f'that the model needs, such as {missing[0]}; without it the model would be '
            'initialized at random. Download or save the whole model again.'
        )
    # Whole captions go through at once, so keys and values need not be kept for a next token.
    network.config.use_cache = False
    return network.eval()
