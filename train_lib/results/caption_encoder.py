"""The encoder or tokenizer of captions, as it made the texts that a model has learned."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from absl import logging

from coyo11m_tfds.dataset import word_list
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.storage import model_files
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.text_encoders import (
    DEFAULT_MAX_TOKENS,
    Encoder,
    HashEncoder,
    Tokenizer,
    split_words,
)
from train_lib.learning import step_encoder
from train_lib.results import previews

_IN_PT = 'pt'  # embeddings that came with the latents, from an encoder that nothing names
_OF_FOLDER = 'sha256:'  # how the revision of a model in a local folder begins


def load(facts: DatasetStats, spec: str = '') -> Encoder | Tokenizer:
    """Loads the encoder, or the tokenizer, that made the texts of a data set.

    Args:
        facts: Those of the data set.
        spec: Name of the encoder, such as `hf:FOLDER`; with '' the metadata of the data set name
            it, which do not hold a local folder.

    Raises:
        ValueError: The data set has no texts, does not name the place of their encoder, or another
            one made them.
    """
    if not (facts.vocabulary or facts.text_dim):
        raise ValueError(
            'the model was trained without text and knows no captions; its pictures are in the '
            f'folder {previews.FOLDER} of the run.'
        )
    expected = facts.text_encoder
    if not spec and expected == _IN_PT:
        raise ValueError(
            'the text embeddings came with the latents, and the data set does not name the encoder '
            'that made them: name it with --encoder.'
        )
    if not spec and facts.text_revision.startswith(_OF_FOLDER):
        runner, _, folder = expected.partition(':')
        raise ValueError(
            f'the model was trained on text embeddings of {expected}, whose files are in a folder '
            f'named {folder} ({facts.text_revision}): give it with '
            f'--encoder={runner}:/path/to/{folder}.'
        )
    spec = spec or expected
    runner, colon, model = spec.partition(':')
    # By its name, before loading it takes minutes.
    if colon and expected != _IN_PT:
        step_encoder.check_same_encoder(facts, f'{runner}:{model_files.public_name(model)}')
    max_tokens = facts.text_max_tokens or DEFAULT_MAX_TOKENS
    encoder: Encoder | Tokenizer
    if facts.vocabulary:
        encoder = text_encoders.make_tokenizer(spec, max_tokens, facts.text_words)
    else:
        encoder = text_encoders.make_encoder(spec, max_tokens)
    # Again, by its revision and its width, which only the loaded one tells.
    check(facts, encoder)
    return encoder


def encode(
    facts: DatasetStats, encoder: Encoder | Tokenizer, captions: Sequence[str]
) -> np.ndarray:
    """Encodes captions as the data set stores them; warns of words that the model has not seen.

    Args:
        facts: Those of the training data.
        encoder: Result of `load`.
        captions: Captions.

    Returns:
        Embeddings, float16 `(n, D)`, or token ids, int32 `(n, T)`, padded with -1.

    Raises:
        ValueError: A caption has a token that the training data cannot have.
    """
    unknown = find_unknown_words(facts, encoder, captions)
    if unknown:
        # The list of words that have numbers lacks rare ones if it is full.
        num_known = facts.text_words.count(' ') + 1
        is_full = num_known == word_list.MAX_WORDS
        logging.warning(
            '%s caption of the training data has %s: the model does not know what %s.',
            'Hardly a' if is_full else 'No',
            ', '.join(map(repr, unknown)),
            'it means' if len(unknown) == 1 else 'they mean',
        )
    # Float16, as the data set stores them: the model has seen no others.
    if not facts.vocabulary:
        return cast(Encoder, encoder).encode(captions).astype(np.float16)
    return text_encoders.pad(tokenize(facts, encoder, captions), encoder.max_tokens)


def tokenize(
    facts: DatasetStats, encoder: Tokenizer, captions: Sequence[str]
) -> Sequence[Sequence[int]]:
    """Returns the token ids of captions; a ValueError for one that the data set cannot have."""
    rows = encoder.tokenize(captions)
    for caption, ids in zip(captions, rows, strict=True):
        largest = max(ids, default=0)
        # JAX raises no error for a number that the model's table does not have.
        if largest >= facts.vocabulary:
            raise ValueError(
                f'{caption!r} has token {largest}, expected one of the {facts.vocabulary} tokens '
                'of the training data, numbered from 0.'
            )
    return rows


def find_unknown_words(
    facts: DatasetStats, encoder: Tokenizer, captions: Sequence[str]
) -> list[str]:
    """Returns the words of captions that no training caption has, in the order of the captions.

    With `hash` it misses words that share their bucket with another. Without a list of words it
    knows of none.
    """
    # A dict keeps the order, and each word once.
    distinct: dict[str, None] = {}
    for caption in captions:
        distinct.update(dict.fromkeys(split_words(caption)))
    words = list(distinct)
    if facts.text_encoder == HashEncoder.name:
        # A bucket without mean and deviation got no word of any caption.
        is_empty = (facts.text_mean == 0) & (facts.text_std == 0)
        vectors = cast(Encoder, encoder).encode(words)
        # A word that training has seen has filled all of its buckets.
        falls_into_empty = np.any(vectors[:, is_empty], axis=1)
        return [words[number] for number in np.flatnonzero(falls_into_empty)]
    # A full list lacks rare words, so the caller says "hardly" of what it does not have.
    if facts.text_words:
        known_words = set(word_list.parse(facts.text_words))
        return [word for word in words if word not in known_words]
    return []


def check(facts: DatasetStats, encoder: Encoder | Tokenizer) -> None:
    """Raises a ValueError for an encoder that did not make the texts of a data set.

    It only warns where the data set does not tell.
    """
    # Nothing names the encoder of embeddings that came with the latents: their width must do.
    if facts.text_encoder == _IN_PT and cast(Encoder, encoder).dim == facts.text_dim:
        logging.warning(
            'The data set does not say whether %s made its text embeddings.', encoder.name
        )
        return
    step_encoder.check_same_encoder(facts, encoder.name, encoder.revision)
