"""Embeds texts with Gemma 3 in JAX: its last hidden states, averaged over the tokens.

It computes the embeddings of `hf_encoder` from the same files, without torch and transformers, on
TPU, GPU or CPU. The local devices share the rows of a batch, and each has all weights. Batches have
few shapes, and each shape is compiled once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coyo11m_tfds.text import gemma, gemma_weights
from coyo11m_tfds.text.model_tokenizer import ModelEncoder, ModelTokenizer

# Tokens in a forward pass of one device, padding counted in: so memory stays the same however long
# the captions are. On a CPU more of them leave its caches: Gemma-3-270M takes 53 to 56 ms of CPU a
# caption of 49 tokens with 512 to 1,024 tokens, 63 with 2,048 and 80 with 4,096. An accelerator
# has enough to do with 8,192 (1.6 TFLOP of the 270M model; not measured on one), and with more, on
# several devices, the batches of a part get so tall that their rows differ in length.
CPU_BATCH_TOKENS = 1024
BATCH_TOKENS = 8192

_PADDING = 0  # Gemma's own token for it; any other gives the same embeddings


class JaxTokenizer(ModelTokenizer):
    """The fast tokenizer of a Gemma 3; see `ModelTokenizer`."""

    def __init__(self, model: str, max_tokens: int) -> None:
        """Loads the tokenizer; raises the errors of `text_encoders.make_tokenizer`."""
        self.checkpoint = gemma_weights.open_checkpoint(model)
        length = min(max_tokens, self.checkpoint.config.max_positions)
        super().__init__(f'jax:{model}', length, self.checkpoint.tokenizer(), _PADDING)


class JaxEncoder(JaxTokenizer, ModelEncoder):
    """A Gemma 3 text model on the local devices.

    It computes in float32 on CPUs and in bfloat16 elsewhere; norms, softmax and averages are always
    float32.
    """

    def __init__(
        self,
        model: str,
        max_tokens: int,
        batch_tokens: int | None = None,
        dtype: jnp.dtype | type | None = None,
    ) -> None:
        """Loads tokenizer and weights; raises the errors of `text_encoders.make_encoder`.

        Args:
            batch_tokens: See `make_encoder`; None for `CPU_BATCH_TOKENS` or `BATCH_TOKENS`.
            dtype: Dtype of weights and computation; None for float32 on CPUs, bfloat16 elsewhere.
        """
        devices = jax.local_devices()
        on_cpu = devices[0].platform == 'cpu'
        dtype = dtype or (jnp.float32 if on_cpu else jnp.bfloat16)
        batch_tokens = batch_tokens or (CPU_BATCH_TOKENS if on_cpu else BATCH_TOKENS)
        super().__init__(model, max_tokens)
        config = self.checkpoint.config
        self.dim = config.width
        self.dtype = jnp.dtype(dtype).name
        self._num_devices = len(devices)
        self._batch_tokens = batch_tokens * len(devices)

        mesh = Mesh(np.array(devices), ('data',))
        self._rows = NamedSharding(mesh, P('data'))
        params = gemma_weights.load_params(self.checkpoint, dtype)
        self._params = jax.device_put(params, NamedSharding(mesh, P()))
        network = gemma.Gemma(config, dtype)
        self._pool = jax.jit(functools.partial(_pool, network), out_shardings=self._rows)

    def _start(
        self, tokens: Sequence[Sequence[int]], shape: tuple[int, int]
    ) -> Callable[[], np.ndarray]:
        padded, lengths = np.full(shape, _PADDING, np.int32), np.zeros(shape[0], np.int32)
        for i, ids in enumerate(tokens):
            padded[i, : len(ids)], lengths[i] = ids, len(ids)
        means = self._pool(self._params, *jax.device_put((padded, lengths), self._rows))
        return lambda: np.asarray(means)


def _pool(network: gemma.Gemma, params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    # Else accelerators round the operands of float32 products to fewer bits.
    precision = 'highest' if network.dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        states: Any = network.apply({'params': params}, tokens)
        return gemma.mean_states(states, lengths)
