"""Loads the frozen text encoder that the step applies to token ids."""

# Imports neither TensorFlow nor torch: steps can be measured with JAX alone.

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.process.errors import FieldError
from coyo11m_tfds.text import language_model, text_encoders
from train_lib.learning import sharding
from train_lib.learning.word_vectors import Words

# Run the same models: on the same files their embeddings agree to a cosine of 0.99997.
_RUNNERS = 'hf', 'jax'


@dataclasses.dataclass(frozen=True)
class StepEncoder:
    """A frozen language model with its weights on a mesh."""

    # Such as `jax:Qwen/Qwen3-0.6B`, without the path of a folder.
    name: str
    # A commit on the hub, or `sha256:...` of the files in a folder.
    revision: str
    network: language_model.LanguageModel
    # Weights, or their shapes, whole on every device (docs/pods.md says why). Weights of products
    # have the dtype of the computation.
    params: Any

    @property
    def dim(self) -> int:
        """Width of the hidden states."""
        return self.network.config.width

    def encode(self, params: Any, tokens: jax.Array) -> Words:
        """Returns the last hidden states, `(b, T, dim)`, of token ids.

        Args:
            params: Weights, such as `self.params`: an argument, so that a step can take them.
            tokens: Token ids, int32 `(b, T)`, padded with -1.
        """
        # Padding becomes any id; attention looks back only, so words do not see what is behind.
        ids = jnp.maximum(tokens, 0)
        states: Any = self.network.apply({'params': params}, ids)
        return Words(states, tokens >= 0)


def load_step_encoder(
    spec: str, facts: DatasetStats, mesh: Mesh, *, dtype: str
) -> StepEncoder | None:
    """Loads a frozen encoder with its weights onto the devices of a mesh.

    Args:
        spec: `jax:FOLDER` or `jax:HUB_NAME`; '' for no encoder, which gives None.
        facts: Those of the data set, whose token ids the encoder must have made.
        mesh: Devices, each of which gets all weights.
        dtype: Dtype of the computation.

    Raises:
        FieldError: The data set holds no token ids, another encoder made them, or `spec` names no
            encoder.
    """
    if not spec:
        return None
    if not facts.vocabulary:
        problem = (
            f'the data set holds embeddings of {facts.text_encoder!r}, expected token ids '
            "(embed_captions --tokens_only), or ''"
        )
        raise FieldError('encoder', spec, problem)
    tokenizer = _open_tokenizer(spec, facts.text_max_tokens, facts)
    # Needs an extra, as `_open_tokenizer` has reported by now.
    from coyo11m_tfds.text import jax_encoder

    config = tokenizer.checkpoint.config
    encoder = _make_abstract(tokenizer.name, tokenizer.revision, config, dtype, mesh)
    params = jax_encoder.load_params(tokenizer.checkpoint, encoder.network.dtype)

    def place(leaf: jax.ShapeDtypeStruct, values: Any) -> jax.Array:
        """Returns one array on the devices."""
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

    params_on_devices = jax.tree.map(place, encoder.params, params)
    return dataclasses.replace(encoder, params=params_on_devices)


def abstract_step_encoder(spec: str, mesh: Mesh, *, dtype: str) -> StepEncoder | None:
    """Like `load_step_encoder` with shapes for weights; reads no files of `PUBLISHED` models."""
    if not spec:
        return None
    config = language_model.PUBLISHED.get(spec.removeprefix('jax:'))
    if config is None:
        config = _open_tokenizer(spec, schema.MAX_TOKENS).checkpoint.config
    return _make_abstract(spec, '', config, dtype, mesh)


def _open_tokenizer(spec: str, max_tokens: int, facts: DatasetStats | None = None) -> Any:
    """Opens the `JaxTokenizer` of an encoder, which knows the model's files.

    With `facts` it must be the one that made the texts of this data set.
    """
    if not spec.startswith('jax:'):
        raise FieldError('encoder', spec, "expected jax:FOLDER, jax:HUB_NAME or ''")
    try:
        tokenizer = text_encoders.make_tokenizer(spec, max_tokens)
        if facts is not None:
            check_same_encoder(facts, tokenizer.name, tokenizer.revision, tokenizer.vocabulary)
    except ValueError as error:
        raise FieldError('encoder', spec, str(error)) from error
    return tokenizer


def _make_abstract(
    name: str, revision: str, config: language_model.LanguageModelConfig, dtype: str, mesh: Mesh
) -> StepEncoder:
    """Returns an encoder with shapes instead of weights."""
    compute_dtype = jnp.dtype(dtype)
    place = functools.partial(sharding.abstract_array, placement=sharding.replicated(mesh))
    params = jax.tree.map(place, language_model.abstract_params(config, compute_dtype))
    network = language_model.LanguageModel(config, compute_dtype)
    return StepEncoder(name, revision, network, params)


def check_same_encoder(
    facts: DatasetStats, name: str, revision: str = '', vocabulary: int = 0
) -> None:
    """Raises a ValueError for an encoder that did not make the texts of a data set.

    Args:
        facts: Those of the data set.
        name: Name of the encoder, such as `hf:a/b`.
        revision: Its revision; '' if it is not known.
        vocabulary: Its number of token ids; 0 if it is not known.
    """
    # Another model of the same name would give other embeddings or ids, and so pictures that do not
    # match their captions: the revision is a commit, or a digest of the files.
    has_same_name = _model_name(name) == _model_name(facts.text_encoder)
    knows_revisions = bool(revision and facts.text_revision)
    has_same_revision = not knows_revisions or revision == facts.text_revision
    has_same_vocabulary = vocabulary in (0, facts.vocabulary)
    if not (has_same_name and has_same_revision and has_same_vocabulary):
        expected = _describe_encoder(facts.text_encoder, facts.text_revision, facts.vocabulary)
        raise ValueError(
            f'{_describe_encoder(name, revision, vocabulary)} encodes the captions, but {expected} '
            'made the texts of the training data: expected that encoder'
        )


def _describe_encoder(name: str, revision: str, vocabulary: int) -> str:
    """Returns the name of an encoder and what else is known of it, for messages."""
    description = repr(name)
    if revision:
        description += f' of revision {revision}'
    if vocabulary:
        description += f' with {vocabulary} ids'
    return description


def _model_name(name: str) -> str:
    """Returns the name without what runs the model: `hf:a/b` and `jax:a/b` are the same."""
    runner, _, model = name.partition(':')
    return model if runner in _RUNNERS else name
