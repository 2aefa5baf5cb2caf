"""Chooses the text of a sample: from its record, from an added column, or one of several texts."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeGuard

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.columns import AddedColumn, Column

RECORDS_TEXT = 'records'  # what the text in the records is called among names of columns
SYNTAX = (
    f"'' or '{RECORDS_TEXT}' for the text in the records, the name of an added column, or several "
    'of these, each once, as NAME:WEIGHT,NAME:WEIGHT with weights above 0, at most 1e9'
)

TextSpec = str | Mapping[str, float]

_MAX_WEIGHT = 1e9


def parse_text_weights(spec: TextSpec) -> dict[str, float]:
    """Returns the weights of texts by name, in their order; '' is the text in the records.

    Raises:
        ValueError: The specification does not follow `SYNTAX`.
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(spec, Mapping):
        pairs += spec.items()
    else:
        for field in (spec or RECORDS_TEXT).split(','):
            name, colon, weight = field.partition(':')
            # An empty name is none: in a mapping it is the text in the records.
            stripped_name = name.strip() or None
            pairs.append((stripped_name, weight if colon else 1))
    weights: dict[str, float] = {}
    for name, weight in pairs:
        key = '' if name == RECORDS_TEXT else name
        # What is no number gets the weight 0, which is refused like any 0. NaN is in no range.
        try:
            number = float(weight)
        except (TypeError, ValueError):
            number = 0.0
        if key is None or key in weights or not 0 < number <= _MAX_WEIGHT:
            raise ValueError(f'text={spec!r}: expected {SYNTAX}')
        weights[key] = number
    if not weights:
        raise ValueError(f'text={spec!r}: expected {SYNTAX}')
    return weights


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Describes the embeddings or the tokens of one caption for each record."""

    name: str  # of the column; '' for the text in the records
    feature: str  # of a batch: `text_embedding` or `tokens`; '' without a text
    size: int  # width of an embedding, or number of tokens with padding
    encoder: str | None
    revision: str | None  # of the encoder; None if unknown
    max_tokens: int  # length limit of captions; 0 if there is none or it is unknown
    vocabulary: int  # all token ids are below this number; 0 for embeddings
    words: str  # of the encoder `words`, see `word_list`
    mean: np.ndarray  # of embeddings over the train split, float64 (size,); for tokens (0,)
    std: np.ndarray

    def __str__(self) -> str:
        encoder = f'{self.encoder!r}, revision {self.revision!r}'
        if self.feature == schema.TOKENS:
            return f'tokens of {encoder}, vocabulary {self.vocabulary}'
        if self.feature:
            return f'embeddings of {encoder}, {self.size} numbers'
        return 'no text'

    @property
    def kind(self) -> tuple:
        """The properties that texts for one model must share."""
        # Tokens of different lengths are padded to the longest.
        size = 0 if self.feature == schema.TOKENS else self.size
        return self.feature, self.encoder, self.revision, self.vocabulary, size


def check_same_kind(text: Text, owner: object, first: Text, first_owner: object) -> None:
    """Raises a ValueError unless one model can read two texts, of the owners that it names."""
    if text.kind == first.kind:
        return
    advice = ''
    if text.encoder == first.encoder == schema.WORDS:
        # Each run of this encoder lists the words of its own captions.
        advice = (
            '. Encode one of them again with --encoder=words:SIDECAR, the sidecar of the other, so '
            'that both number words alike'
        )
    raise ValueError(f'{owner} has {text}, expected {first} as {first_owner} has{advice}')


def text_in_records(metadata: Mapping[str, Any], text_dim: int, num_tokens: int) -> Text:
    """Returns the text in the records, from the metadata and the sizes of features; 0: no such."""
    # Only a build of this project records settings, and what of a sidecar with texts decides them.
    settings = metadata.get(schema.META_SETTINGS)
    sidecar = None
    if isinstance(settings, Mapping):
        sidecar = settings.get(schema.SETTINGS_TEXT)
    # Of embeddings in the `.pt` files, the settings only say 'pt'.
    if not isinstance(sidecar, Mapping):
        sidecar = {}
    feature = ''
    if text_dim:
        feature = schema.TEXT_EMBEDDING
    elif num_tokens:
        feature = schema.TOKENS
    return Text(
        name='',
        feature=feature,
        size=text_dim or num_tokens,
        encoder=metadata.get(schema.META_TEXT_ENCODER),
        revision=sidecar.get('revision'),
        max_tokens=sidecar.get('max_tokens', 0),
        vocabulary=metadata.get(schema.META_TEXT_VOCABULARY, 0),
        words=metadata.get(schema.META_TEXT_WORDS, ''),
        # Embeddings without statistics pass a model's standardization unchanged.
        mean=np.asarray(metadata.get(schema.META_TEXT_MEAN, [0] * text_dim), np.float64),
        std=np.asarray(metadata.get(schema.META_TEXT_STD, [1] * text_dim), np.float64),
    )


def _is_text(column: Column) -> TypeGuard[AddedColumn]:
    """Returns whether a column holds embeddings, or tokens whose vocabulary is known."""
    if not isinstance(column, AddedColumn):
        return False
    if column.feature == schema.TOKENS:
        return 'vocabulary' in column.encoder
    return column.feature == schema.TEXT_EMBEDDING


def _text_in_column(column: AddedColumn) -> Text:
    """Returns the text of an added column, which brought the description of its encoder."""
    encoder = column.encoder
    return Text(
        name=column.name,
        feature=column.feature,
        size=column.shape[0],
        encoder=encoder['encoder'],
        revision=encoder.get('revision'),
        max_tokens=encoder.get('max_tokens', 0),
        vocabulary=encoder.get('vocabulary', 0),
        words=encoder.get('words', ''),
        mean=np.asarray(column.mean, np.float64),
        std=np.asarray(column.std, np.float64),
    )


@dataclasses.dataclass(frozen=True)
class TextMixture:
    """The texts of which each sample takes one."""

    texts: tuple[Text, ...]  # at least one; all have the same `kind`
    weights: tuple[float, ...]
    size: int  # that of the longest text

    @property
    def feature(self) -> str:
        """Feature of a batch: `text_embedding` or `tokens`; '' without a text."""
        return self.texts[0].feature

    @property
    def names(self) -> list[str]:
        """Names of the columns; '' for the text in the records."""
        return [text.name for text in self.texts]

    @property
    def in_columns(self) -> bool:
        """Whether a text lies outside the records."""
        return any(self.names)

    @property
    def first(self) -> Self:
        """Only the first text, with the padded size of all."""
        return dataclasses.replace(self, texts=self.texts[:1], weights=self.weights[:1])

    @property
    def max_tokens(self) -> int:
        """Largest `max_tokens` of all texts; 0 if one has no limit."""
        limits = [text.max_tokens for text in self.texts]
        return max(limits) if all(limits) else 0

    def mean_and_std(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean and deviation of the mixture, float64 `(size,)`; `(0,)` for tokens."""
        means = [text.mean for text in self.texts]
        stds = [text.std for text in self.texts]
        return mix_moments(means, stds, self.weights)


def mix_moments(
    means: Sequence[np.ndarray], stds: Sequence[np.ndarray], weights: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the standard deviation, float64 `(n,)`, of a mixture by weights."""
    # Unchanged to the last bit, as the records of one text have them.
    if len(means) == 1:
        return means[0], stds[0]
    share = np.array(weights, np.float64)[:, None] / sum(weights)
    mean = (share * np.stack(means)).sum(axis=0)
    # The variance is the mean of the variances and of the squared distances between the means.
    variances = np.stack(stds) ** 2
    squared_distances = (np.stack(means) - mean) ** 2
    variance = (share * (variances + squared_distances)).sum(axis=0)
    return mean, np.sqrt(variance)


def resolve_texts(
    folder: str | os.PathLike[str],
    spec: TextSpec,
    in_records: Text,
    columns: Mapping[str, Column],
) -> TextMixture:
    """Returns the texts of a specification.

    Args:
        folder: That of the data set, for errors.
        spec: See `parse_text_weights`.
        in_records: The text in the records.
        columns: All columns of the data set by name.

    Raises:
        ValueError: The specification does not follow `SYNTAX`, a column is no text, or the texts
            are of different kinds.
    """
    weights = parse_text_weights(spec)
    text_columns = {name: column for name, column in columns.items() if _is_text(column)}
    mixed_texts = []
    for name in weights:
        if name and name not in text_columns:
            raise ValueError(
                f'{folder}: text={spec!r}: {name!r} is not a column of text embeddings or of '
                f'tokens with their vocabulary; there are {list(text_columns)}. python -m '
                'coyo11m_tfds.add_column --text adds some.'
            )
        text = in_records
        if name:
            text = _text_in_column(text_columns[name])
        mixed_texts.append(text)
    # One model reads all of them, so they must be alike.
    first = mixed_texts[0]
    for text in mixed_texts[1:]:
        owner = f'{folder}: text={spec!r}: {text.name or RECORDS_TEXT!r}'
        check_same_kind(text, owner, first, repr(first.name or RECORDS_TEXT))
    size = max(text.size for text in mixed_texts)
    return TextMixture(tuple(mixed_texts), tuple(weights.values()), size)
