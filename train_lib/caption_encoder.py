"""Loads the text encoder of a data set, for new captions and for the training step.

    encoder = caption_encoder.make(facts)                             # that of the data set
    encoder = caption_encoder.make(facts, 'hf:/models/gemma-3-270m')  # the same in a local folder
    text = caption_encoder.texts(facts, encoder, ['a red circle'])

    # Token ids in, hidden states out; its weights are never trained.
    encoder = caption_encoder.load('jax:/models/gemma-3-270m', facts, mesh, dtype='bfloat16')

Another model of the same name would give other embeddings or ids, and so pictures that do not match
their captions. So this module compares the name and the revision (a commit, or a digest of the
files) with those in the data set's metadata. It imports neither TensorFlow nor torch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import gemma, text_encoders
from coyo11m_tfds.text.encoder import DEFAULT_MAX_TOKENS, Encoder, Tokenizer
from coyo11m_tfds.text.words import split_words
from train_lib import sharding
from train_lib.models.dit import Words

# Run the same models: on the same files their embeddings agree to a cosine of 0.99997.
_RUNNERS = 'hf', 'jax'

_IN_PT = 'pt'  # embeddings that came with the latents, from an encoder that nothing names
_OF_FOLDER = 'sha256:'  # how the revision of a model in a local folder begins


# --- Captions of one's own ----------------------------------------------------------------------


def make(facts: DatasetStats, spec: str = '') -> Encoder | Tokenizer:
    """Loads the encoder, or the tokenizer, that made the texts of a data set.

    Args:
        spec: Place of the encoder, see `text_encoders.make_encoder`; '' to take it from the
            metadata of the data set, which do not hold a local folder.

    Raises:
        ValueError: The encoder is not that of the data set, or `spec` is needed; or as
            `text_encoders.make_encoder`.
    """
    wanted = facts.text_encoder
    runner, _, folder = wanted.partition(':')
    if not spec and wanted == _IN_PT:
        raise ValueError(
            'the text embeddings came with the latents, and the data set does not name the encoder '
            'that made them: name it with --encoder.'
        )
    if not spec and facts.text_revision.startswith(_OF_FOLDER):
        raise ValueError(
            f'the model was trained on text embeddings of {wanted}, whose files are in a folder '
            f'named {folder} ({facts.text_revision}): give it with '
            f'--encoder={runner}:/path/to/{folder}.'
        )
    spec = spec or wanted
    runner, colon, model = spec.partition(':')
    if colon and wanted != _IN_PT:  # before minutes are spent with loading it
        _check_same(facts, f'{runner}:{model_files.public_name(model)}')
    max_tokens = facts.text_max_tokens or DEFAULT_MAX_TOKENS
    make_one = text_encoders.make_tokenizer if facts.vocabulary else text_encoders.make_encoder
    encoder = make_one(spec, max_tokens)
    check(facts, encoder)
    return encoder


def texts(facts: DatasetStats, encoder: Encoder | Tokenizer, captions: Sequence[str]) -> np.ndarray:
    """Encodes captions: embeddings float16 `(n, D)`, or token ids int32 `(n, T)`.

    Raises a ValueError if a token is not in the vocabulary of the data set.
    """
    if not facts.vocabulary:
        return cast(Encoder, encoder).encode(captions).astype(np.float16)
    if unknown := unknown_words(facts, encoder, captions):
        logging.warning(
            'No caption of the training data has %s: the model does not know what %s.',
            ', '.join(map(repr, unknown)),
            'it means' if len(unknown) == 1 else 'they mean',
        )
    ids = text_encoders.pad(encoder.tokenize(captions), encoder.max_tokens)
    if ids.max(initial=0) >= facts.vocabulary:
        at = ids.max(axis=1).argmax()
        raise ValueError(
            f'{captions[at]!r} has token {ids[at].max()}, expected one of the {facts.vocabulary} '
            'tokens of the training data, numbered from 0.'
        )
    return ids


def unknown_words(facts: DatasetStats, encoder: Tokenizer, captions: Sequence[str]) -> list[str]:
    """Returns the words of captions that do not occur in the training data; [] if unknown.

    It misses a few words, whose ids equal those of other words.
    """
    if not facts.known_tokens:
        return []
    known = np.unpackbits(np.frombuffer(bytes.fromhex(facts.known_tokens), np.uint8))
    words = dict.fromkeys(w for caption in captions for w in split_words(caption))
    ids = encoder.tokenize(list(words))
    return [word for word, [token] in zip(words, ids, strict=True) if not known[token]]


def check(facts: DatasetStats, encoder: Encoder | Tokenizer) -> None:
    """Raises a ValueError if an encoder or tokenizer is not that of the data set."""
    if facts.text_encoder == _IN_PT and cast(Encoder, encoder).dim == facts.text_dim:
        logging.warning(
            'The data set does not say whether %s made its text embeddings.', encoder.name
        )
        return
    _check_same(facts, encoder.name, encoder.revision)


def _check_same(facts: DatasetStats, name: str, revision: str = '', vocabulary: int = 0) -> None:
    """Raises a ValueError for another encoder; '' and 0 stand for what is not known."""
    same_name = _model_name(name) == _model_name(facts.text_encoder)
    same_revision = '' in (revision, facts.text_revision) or revision == facts.text_revision
    if not (same_name and same_revision and vocabulary in (0, facts.vocabulary)):
        given, wanted = (
            f'{name!r}'
            + f' of revision {revision}' * bool(revision)
            + f' with {ids} ids' * bool(ids)
            for name, revision, ids in (
                (name, revision, vocabulary),
                (facts.text_encoder, facts.text_revision, facts.vocabulary),
            )
        )
        raise ValueError(
            f'{given} encodes the captions, but {wanted} made the texts of the training data: '
            'expected that encoder'
        )


def _model_name(name: str) -> str:
    """The name of an encoder without what runs it: `hf:a/b` and `jax:a/b` are the same model."""
    runner, _, model = name.partition(':')
    return model if runner in _RUNNERS else name


# --- In the step --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepEncoder:
    """A Gemma 3 text model with its weights on a mesh.

    For a caption of 128 tokens, records hold 0.5 KB of ids; its hidden states of Gemma-3-270M take
    164 KB.

    Attributes:
        name: Name such as `jax:google/gemma-3-270m`, without the path of a folder.
        revision: A commit on the hub, or `sha256:...` of the files in a folder.
        params: Weights of the model, whole on every device, or their shapes. Weights of products
            have the dtype of the computation. If weights were split over `fsdp`, the chips of a
            v5e-16 that trains L/2 would exchange 1.7 times as much, to save 0.4 GB of
            Gemma-3-270M's 0.54 GB a chip.
    """

    name: str
    revision: str
    network: gemma.Gemma
    params: Any

    @property
    def dim(self) -> int:
        """Width of a hidden state."""
        return self.network.config.width

    def encode(self, params: Any, tokens: jax.Array) -> Words:
        """Returns the last hidden states of token ids, int32 `(b, T)`, padded with -1."""
        states: Any = self.network.apply({'params': params}, jnp.maximum(tokens, 0))
        return Words(states, tokens >= 0)


def load(spec: str, facts: DatasetStats, mesh: Mesh, *, dtype: str) -> StepEncoder | None:
    """Loads the encoder that `config.encoder` names.

    Args:
        spec: `jax:FOLDER` or `jax:HUB_NAME`; '' for none.
        dtype: Dtype of the model's computation. The encoder computes in float32 if the model does,
            otherwise in bfloat16, because Gemma's hidden states exceed the range of float16.

    Raises:
        ValueError: The records hold no tokens, or tokens of another encoder; or as
            `gemma_weights.load_params`.
    """
    if not spec:
        return None
    if not facts.vocabulary:
        raise ValueError(
            f'encoder={spec!r}: the data set holds embeddings of {facts.text_encoder!r}, expected '
            "token ids (embed_captions --tokens_only), or encoder=''"
        )
    tokenizer = _open(spec, facts.text_max_tokens, facts)
    from coyo11m_tfds.text import gemma_weights  # needs an extra, as `_open` has told by now

    config = tokenizer.checkpoint.config
    encoder = _abstract(tokenizer.name, tokenizer.revision, config, dtype, mesh)
    params = gemma_weights.load_params(tokenizer.checkpoint, encoder.network.dtype)
    placed = jax.tree.map(
        lambda leaf, values: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: values[index]
        ),
        encoder.params,
        params,
    )
    return dataclasses.replace(encoder, params=placed)


def abstract(spec: str, mesh: Mesh, *, dtype: str) -> StepEncoder | None:
    """Like `load`, but with shapes in place of weights, and without a data set.

    It reads no files of a model in `gemma.PUBLISHED`.
    """
    if not spec:
        return None
    config = gemma.PUBLISHED.get(spec.removeprefix('jax:'))
    config = config or _open(spec, schema.MAX_TOKENS).checkpoint.config
    return _abstract(spec, '', config, dtype, mesh)


def _open(spec: str, max_tokens: int, facts: DatasetStats | None = None) -> Any:
    """The `JaxTokenizer` of `spec`, which knows the model's files; that of `facts`, if given."""
    if not spec.startswith('jax:'):
        raise ValueError(f"encoder={spec!r}: expected jax:FOLDER, jax:HUB_NAME or ''")
    try:
        tokenizer = text_encoders.make_tokenizer(spec, max_tokens)
        if facts is not None:
            _check_same(facts, tokenizer.name, tokenizer.revision, tokenizer.vocabulary)
    except ValueError as error:
        raise ValueError(f'encoder={spec!r}: {error}') from error
    return tokenizer


def _abstract(
    name: str, revision: str, config: gemma.Config, dtype: str, mesh: Mesh
) -> StepEncoder:
    computed = jnp.dtype(jnp.float32 if dtype == 'float32' else jnp.bfloat16)
    whole = sharding.replicated(mesh)
    params = jax.tree.map(
        lambda leaf: sharding.abstract(leaf, whole), gemma.abstract_params(config, computed)
    )
    return StepEncoder(name, revision, gemma.Gemma(config, computed), params)
