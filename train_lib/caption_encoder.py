"""The text encoder of a trained model, for captions of one's own.

    encoder = caption_encoder.make(facts)                             # that of the data set
    encoder = caption_encoder.make(facts, 'hf:/models/gemma-3-270m')  # the same in a local folder
    text = encoder.encode(['a red circle'])

Another model of the same name would give other embeddings, and pictures that have nothing to do
with their captions, so name and revision (a commit, or a digest of the files) are compared with
those in the data set's metadata.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from absl import logging

from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.encoder import DEFAULT_MAX_TOKENS, Encoder, Tokenizer
from coyo11m_tfds.text.words import split_words
from train_lib.data_facts import DataFacts

# Run the same models: on the same files their embeddings agree to a cosine of 0.99997.
_RUNNERS = 'hf', 'jax'

_IN_PT = 'pt'  # embeddings that came with the latents, from an encoder that nothing names
_OF_FOLDER = 'sha256:'  # how the revision of a model in a local folder begins


def make(facts: DataFacts, spec: str = '') -> Encoder | Tokenizer:
    """Loads the encoder that the text embeddings of a data set were made with, or the tokenizer.

    Args:
        facts: of that data set.
        spec: where to find it, as of `text_encoders.make_encoder`; '' where the data set's metadata
            say enough: not for a model in a local folder.

    Raises:
        ValueError: it is another one than that of the data set, `spec` is needed, or as of
            `text_encoders.make_encoder`.
    """
    wanted = facts.encoder
    runner, _, folder = wanted.partition(':')
    if not spec and wanted == _IN_PT:
        raise ValueError(
            'the text embeddings came with the latents, and nothing says what made them: name the '
            'text encoder with --encoder.'
        )
    if not spec and facts.encoder_revision.startswith(_OF_FOLDER):
        raise ValueError(
            f'the model was trained on text embeddings of {wanted}, whose files are in a folder '
            f'named {folder} ({facts.encoder_revision}): give it with '
            f'--encoder={runner}:/path/to/{folder}.'
        )
    spec = spec or wanted
    runner, colon, model = spec.partition(':')
    if colon and wanted != _IN_PT:  # before minutes are spent with loading it
        _check_name(facts, f'{runner}:{model_files.public_name(model)}')
    max_tokens = facts.max_tokens or DEFAULT_MAX_TOKENS
    make_one = text_encoders.make_tokenizer if facts.vocabulary else text_encoders.make_encoder
    encoder = make_one(spec, max_tokens)
    check(facts, encoder)
    return encoder


def texts(facts: DataFacts, encoder: Encoder | Tokenizer, captions: Sequence[str]) -> np.ndarray:
    """Captions for the model: embeddings float16 `(n, D)`, or token ids int32 `(n, T)`."""
    if facts.vocabulary:
        if unknown := unknown_words(facts, encoder, captions):
            logging.warning(
                'No caption of the training data has %s: the model does not know what %s.',
                ', '.join(map(repr, unknown)),
                'it means' if len(unknown) == 1 else 'they mean',
            )
        return text_encoders.pad(encoder.tokenize(captions), encoder.max_tokens)
    return cast(Encoder, encoder).encode(captions).astype(np.float16)


def unknown_words(
    facts: DataFacts, encoder: Encoder | Tokenizer, captions: Sequence[str]
) -> list[str]:
    """Words of captions that no caption of the training data has, each once; [] if unknown.

    A few are missed, because their ids are those of other words.
    """
    if not facts.known_tokens:
        return []
    known = np.unpackbits(np.frombuffer(bytes.fromhex(facts.known_tokens), np.uint8))
    words = dict.fromkeys(w for caption in captions for w in split_words(caption))
    ids = encoder.tokenize(list(words))
    return [word for word, [token] in zip(words, ids, strict=True) if not known[token]]


def check(facts: DataFacts, encoder: Encoder | Tokenizer) -> None:
    """Raises a ValueError for another encoder or tokenizer than that of the data set."""
    if facts.encoder == _IN_PT and cast(Encoder, encoder).dim == facts.text_dim:
        logging.warning('Nothing says whether %s made the text embeddings.', encoder.name)
        return
    _check_name(facts, encoder.name)
    if facts.encoder_revision not in ('', encoder.revision):
        raise ValueError(
            f'the captions are encoded by {encoder.name} of revision {encoder.revision}, but the '
            f'model was trained with revision {facts.encoder_revision}: '
            'name that one with --encoder.'
        )


def _check_name(facts: DataFacts, name: str) -> None:
    if model_name(name) != model_name(facts.encoder):
        revision = f' (revision {facts.encoder_revision})' if facts.encoder_revision else ''
        raise ValueError(
            f'the captions are encoded by {name!r}, but the model was trained with '
            f'{facts.encoder!r}{revision}: name that one with --encoder.'
        )


def model_name(name: str) -> str:
    """The name of an encoder without what runs it: `hf:a/b` and `jax:a/b` are the same model."""
    runner, _, model = name.partition(':')
    return model if runner in _RUNNERS else name
