"""Texts asked for by name and weight: what is understood, what is refused, and statistics."""

import numpy as np
import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.columns import AddedColumn

MADE = {'encoder': 'hash', 'revision': '1', 'max_tokens': 0}
TOKENS = {'encoder': 'words', 'revision': '1', 'max_tokens': 3, 'vocabulary': 9}


def column(name, size=2, feature=schema.TEXT_EMBEDDING, **made) -> AddedColumn:
    numbers = [1.0] * size if feature == schema.TEXT_EMBEDDING else []
    dtype = schema.TEXT_DTYPES.get(feature, 'float32')
    return AddedColumn(name, dtype, (size,), {}, {}, feature, numbers, numbers, made or MADE)


COLUMNS = {
    found.name: found
    for found in [
        column('short'),
        column('wide', 3),
        column('foreign', encoder='hf:m', revision='1'),
        column('later', **MADE | {'revision': '2'}),
        column('words', 3, schema.TOKENS, **TOKENS),
        column('more_words', 5, schema.TOKENS, **TOKENS | {'max_tokens': 5}),
        column('other_words', 3, schema.TOKENS, **TOKENS | {'vocabulary': 10}),
        column('old_words', 3, schema.TOKENS, encoder='words', revision='1'),
        column('score', 2, ''),
    ]
}
METADATA = {
    schema.META_TEXT_ENCODER: 'hash',
    schema.META_SETTINGS: {schema.SETTINGS_TEXT: {'revision': '1', 'max_tokens': 0}},
    schema.META_TEXT_MEAN: [0.0, 4.0],
    schema.META_TEXT_STD: [1.0, 2.0],
}
OWN = texts.text_in_records(METADATA, 2, 0)


def choose(spec, own=OWN) -> texts.TextMixture:
    return texts.resolve_texts('D', spec, own, COLUMNS)


@pytest.mark.parametrize(
    ('spec', 'weights'),
    [
        ('', {'': 1}),
        ('records', {'': 1}),
        ('short', {'short': 1}),
        ('short:3', {'short': 3}),
        ('records:2,short:1', {'': 2, 'short': 1}),
        (' short : 0.5 , records', {'short': 0.5, '': 1}),
        ({'': 2, 'short': 1}, {'': 2, 'short': 1}),
        ({'records': 2}, {'': 2}),
    ],
)
def test_texts_are_named_with_weights_in_their_order(spec, weights):
    assert list(texts.parse_text_weights(spec).items()) == list(weights.items())


@pytest.mark.parametrize(
    'spec',
    [
        *('short:0', 'short:-1', 'short:nan', 'short:inf', 'short:2e9', 'short:', 'short:a'),
        *('a:1,a:2', 'a,', ',', ':2', 'a:1:2'),
        *({}, {'a': 0}, {'a': None}, {'': 1, 'records': 1}),
    ],
)
def test_what_is_no_choice_of_texts_is_refused(spec):
    with pytest.raises(ValueError) as error:
        texts.parse_text_weights(spec)
    assert str(error.value).startswith(f'text={spec!r}: expected ')
    assert '\n' not in str(error.value)


NOT_TOGETHER = {
    'a name that is none': (
        'nothing',
        r"'nothing' is not a column of text.*; there are \['short', 'wide', ",
    ),
    'a column of numbers': (
        'records:2,score:1',
        "'score' is not a column of text.*add_column --text adds some",
    ),
    'a column without its vocabulary': (
        'old_words',
        "'old_words' is not a column .* or of tokens with their vocabulary",
    ),
    'embeddings of other sizes': (
        'records,wide',
        "'wide' has embeddings of 'hash', revision '1', 3 numbers, expected .* 2",
    ),
    'embeddings of other encoders': (
        'short,foreign',
        "'foreign' has .* 'hf:m', .* expected embeddings of 'hash', .* 'short'",
    ),
    'embeddings of other revisions': (
        'later,records',
        "'records' has .* revision '1', 2 numbers, expected .* revision '2'",
    ),
    'embeddings and tokens': (
        'records,words',
        "'words' has tokens of 'words', .*, expected embeddings of .* 'records'",
    ),
    'tokens of other vocabularies': (
        'words,other_words',
        "'other_words' has .* vocabulary 10, expected .* vocabulary 9",
    ),
}


@pytest.mark.parametrize(('spec', 'message'), NOT_TOGETHER.values(), ids=NOT_TOGETHER)
def test_texts_that_no_model_takes_together_are_refused_by_name(spec, message):
    with pytest.raises(ValueError, match=f'^D: text={spec!r}: {message}'):
        choose(spec)


def test_records_without_a_text_have_none_to_mix():
    own = texts.text_in_records({}, 0, 0)
    assert choose('', own).feature == ''
    assert choose('short', own).names == ['short']
    for spec in ('records,short', 'short,records'):
        with pytest.raises(ValueError, match='no text'):
            choose(spec, own)


def test_tokens_are_as_long_as_those_of_the_longest():
    chosen = choose('words:1,more_words:3')
    assert (chosen.feature, chosen.size, chosen.max_tokens) == (schema.TOKENS, 5, 5)
    assert chosen.first.names == ['words']
    assert chosen.first.size == 5
    assert [len(x) for x in chosen.mean_and_std()] == [0, 0]


def test_statistics_are_those_of_samples_drawn_by_weight():
    """Of one text they are its own; of several as if all values lay together, in these shares."""
    rng = np.random.default_rng(0)
    values = {name: rng.normal(at, 1 + at, (500, 2)) for name, at in [('', 3), ('a', -1), ('b', 0)]}
    weights = {'': 2, 'a': 1, 'b': 3}

    def moments(x: np.ndarray) -> dict[str, list[float]]:
        return {'mean': x.mean(axis=0).tolist(), 'std': x.std(axis=0).tolist()}

    own = moments(values[''])
    metadata = {schema.META_TEXT_MEAN: own['mean'], schema.META_TEXT_STD: own['std']}
    columns = {
        name: AddedColumn(
            name, 'float16', (2,), {}, {}, schema.TEXT_EMBEDDING, **moments(x), encoder=MADE
        )
        for name, x in values.items()
    }
    records = texts.text_in_records(METADATA | metadata, 2, 0)
    mixed = texts.resolve_texts('D', weights, records, columns).mean_and_std()
    together = np.concatenate([values[name] for name, n in weights.items() for _ in range(n)])
    np.testing.assert_allclose(mixed, [together.mean(axis=0), together.std(axis=0)], rtol=1e-12)
    for name in weights:
        alone = texts.resolve_texts('D', {name: 7}, records, columns).mean_and_std()
        np.testing.assert_array_equal(alone, list(moments(values[name]).values()))
