"""A text encoder inside the step: token ids in, hidden states out; its weights are never trained.

    encoder = step_encoder.load('jax:/models/gemma-3-270m', facts, mesh, dtype='bfloat16')
    program = make_program(config, mesh, facts.stats, ..., encoder=encoder)

It has to be the encoder whose tokenizer made the token ids of the data set. For a caption of 128
tokens records then hold 0.5 KB of ids, where hidden states of Gemma-3-270M would take 164 KB.
Neither TensorFlow nor torch is imported here.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coyo11m_tfds import schema
from coyo11m_tfds.text import gemma, text_encoders
from coyo11m_tfds.text.encoder import Tokenizer
from train_lib import caption_encoder, sharding
from train_lib.data_facts import DataFacts
from train_lib.models.words import Words


@dataclasses.dataclass(frozen=True)
class StepEncoder:
    """A Gemma 3 text model with its weights on a mesh.

    Attributes:
        name: such as `jax:google/gemma-3-270m`, without the path of a folder.
        revision: a commit on the hub, or `sha256:...` of the files in a folder.
        network: the model.
        params: its weights, whole on every device, or their shapes; those of products in the dtype
            of the computation. Split over `fsdp`, XLA moves 1.7 times as much between the chips of
            a v5e-16 that trains L/2, to save 0.4 GB a chip of Gemma-3-270M's 0.54.
    """

    name: str
    revision: str
    network: gemma.Gemma
    params: Any

    @property
    def dim(self) -> int:
        """Numbers of a hidden state."""
        return self.network.config.width

    @property
    def identity(self) -> dict[str, str]:
        """What a resume compares, see `checkpoint.Description`."""
        return {'name': self.name, 'revision': self.revision}

    def encode(self, params: Any, tokens: jax.Array) -> Words:
        """Last hidden states of token ids, int32 `(b, T)`, padded with -1 at the end."""
        states: Any = self.network.apply({'params': params}, jnp.maximum(tokens, 0))
        return Words(states, tokens >= 0)


def load(spec: str, facts: DataFacts, mesh: Mesh, *, dtype: str) -> StepEncoder | None:
    """Loads the encoder that `config.encoder` names.

    Args:
        spec: `jax:FOLDER` or `jax:HUB_NAME`; '' for none.
        facts: of the data set whose tokens it is to encode.
        mesh: of the devices.
        dtype: of the model's computation. The encoder computes in float32 beside a model that does,
            else in bfloat16, since Gemma's hidden states exceed the range of float16.

    Raises:
        ValueError: the records hold no tokens, or those of another encoder; or as
            `gemma_weights.load_params`.
    """
    if not spec:
        return None
    _check_tokens(spec, facts)
    tokenizer = _open(spec, facts.max_tokens)
    _check_same(spec, tokenizer, facts)
    from coyo11m_tfds.text import gemma_weights  # needs an extra, as `_open` has told by now

    encoder = _abstract(tokenizer, dtype, mesh)
    params = gemma_weights.load_params(tokenizer.checkpoint, encoder.network.dtype)
    return dataclasses.replace(encoder, params=jax.tree.map(_place, params, encoder.params))


def abstract(spec: str, mesh: Mesh, *, dtype: str) -> StepEncoder | None:
    """As `load`, but with shapes in the place of weights, and for no data set."""
    return _abstract(_open(spec, schema.MAX_TOKENS), dtype, mesh) if spec else None


def _open(spec: str, max_tokens: int) -> Any:
    """The `JaxTokenizer` of `spec`, which knows the model's files."""
    if not spec.startswith('jax:'):
        raise ValueError(f"encoder={spec!r}: expected jax:FOLDER, jax:HUB_NAME or ''")
    try:
        return text_encoders.make_tokenizer(spec, max_tokens)
    except ValueError as error:
        raise ValueError(f'encoder={spec!r}: {error}') from error


def _check_tokens(spec: str, facts: DataFacts) -> None:
    if not facts.vocabulary:
        raise ValueError(
            f'encoder={spec!r}: the data set holds embeddings of {facts.encoder!r}, expected token '
            "ids (embed_captions --tokens_only), or encoder=''"
        )


def _check_same(spec: str, tokenizer: Tokenizer, facts: DataFacts) -> None:
    same_name = caption_encoder.model_name(tokenizer.name) == caption_encoder.model_name(
        facts.encoder
    )
    same_revision = facts.encoder_revision in ('', tokenizer.revision)
    if not (same_name and same_revision and tokenizer.vocabulary == facts.vocabulary):
        raise ValueError(
            f'encoder={spec!r} is {tokenizer.name} of revision {tokenizer.revision} with '
            f'{tokenizer.vocabulary} ids, but the token ids of the data set were made by '
            f'{facts.encoder} of revision {facts.encoder_revision or "unknown"} with '
            f'{facts.vocabulary}: expected the folder or name of that one'
        )


def _abstract(tokenizer: Any, dtype: str, mesh: Mesh) -> StepEncoder:
    from coyo11m_tfds.text import gemma_weights

    computed = jnp.dtype(jnp.float32 if dtype == 'float32' else jnp.bfloat16)
    network = gemma.Gemma(tokenizer.checkpoint.config, computed)
    whole = sharding.replicated(mesh)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        gemma_weights.abstract_params(network.config, computed),
    )
    return StepEncoder(tokenizer.name, tokenizer.revision, network, params)


def _place(values: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Puts a weight on the devices of this process."""
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])
