"""Several texts a record, of tokens, in evaluation, and where one is damaged.

`test_mixture.py` tests which one of several embeddings a sample takes.
"""

import itertools
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.sampling.order import sample_texts
from tests import damages
from tests.reading import small_dataset
from tests.reading.batches import planned_batch

LENGTHS = (70, 97, 64, 0, 131, 33)
SPLITS = {schema.TRAIN: LENGTHS, schema.VALIDATION: (20,)}
ORDER = {'batch_size': 8, 'seed': 3, 'chunk': 32, 'lanes': 4, 'window': 64}


def add(path, name, feature, rows_of, encoder) -> None:
    """Writes a column as `add_column` does; `rows_of` makes its rows from numbers of records."""
    values = {
        split: rows_of(np.arange(sum(lengths))).astype(schema.TEXT_DTYPES[feature])
        for split, lengths in SPLITS.items()
    }
    numbers = [0.0] * values[schema.TRAIN].shape[1]
    fields = {'feature': feature, 'mean': numbers, 'std': numbers, 'encoder': encoder}
    small_dataset.add_column(path, name, values, **fields)


def embeddings(number):
    """`(record, number of the text)`, as the records have `(record, 1)`."""
    return lambda rows: np.stack([rows, np.full_like(rows, number)], axis=1)


def tokens(number, size):
    """`(record, number of the text, number, ...)`."""
    return lambda rows: np.column_stack([rows] + [np.full_like(rows, number)] * (size - 1))


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp('texts') / schema.VERSION
    small_dataset.write(path, SPLITS)
    add(path, 'two', schema.TEXT_EMBEDDING, embeddings(2), {'encoder': None})
    words = {'encoder': 'words', 'revision': '1', 'max_tokens': 3, 'vocabulary': 2048}
    add(path, 'few', schema.TOKENS, tokens(1, 3), words)
    add(path, 'many', schema.TOKENS, tokens(2, 5), words | {'max_tokens': 5})
    return path


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 120),  # an epoch has about 49 steps
    weights=st.permutations(['few', 'many']).flatmap(
        lambda names: st.fixed_dictionaries(dict.fromkeys(names, st.floats(0.01, 100)))
    ),
)
def test_tokens_are_padded_to_the_longest_text(data, engine, seed, start, weights):
    order, features = ORDER | {'seed': seed}, (schema.KEY, schema.LATENTS, schema.TOKENS)
    plan = input_pipeline.train_plan(data, **order)
    batches = input_pipeline.train_batches(
        data, text=weights, engine=engine, features=features, start_step=start, **order
    )
    for step, batch in enumerate(itertools.islice(batches, 4), start):
        record = batch[schema.LATENTS][:, 0, 0, 1].astype(int)
        epoch, _, _ = planned_batch(plan.orders[0], ORDER['batch_size'], step)
        choice = sample_texts(seed, epoch, batch[schema.KEY], list(weights.values()))
        many = np.array([name == 'many' for name in weights])[choice]
        wanted = np.where(many[:, None], tokens(2, 5)(record), tokens(1, 5)(record))
        wanted[~many, 3:] = schema.TOKEN_PADDING
        assert batch[schema.TOKENS].dtype == np.int32
        np.testing.assert_array_equal(batch[schema.TOKENS], wanted)


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
def test_evaluation_takes_the_first_text_of_every_record(data, engine):
    arguments = {'batch_size': 16, 'engine': engine}
    batches = list(input_pipeline.eval_batches(data, text={'two': 1, '': 9}, **arguments))
    text = np.concatenate([batch[schema.TEXT_EMBEDDING] for batch in batches])
    mask = np.concatenate([batch['mask'] for batch in batches])
    np.testing.assert_array_equal(text[mask], embeddings(2)(np.arange(20)))
    assert not text[~mask].any()
    # As long as in training, so that the model is compiled for one shape.
    [few] = input_pipeline.eval_batches(
        data, text='few,many', batch_size=20, engine=engine, features=(schema.TOKENS,)
    )
    wanted = tokens(1, 5)(np.arange(20))
    wanted[:, 3:] = schema.TOKEN_PADDING
    np.testing.assert_array_equal(few[schema.TOKENS], wanted)


def test_a_damaged_record_has_no_text(data, tmp_path):
    copy = shutil.copytree(data, tmp_path / schema.VERSION)
    damages.flip(min(copy.glob('*train*.tfrecord*')), 100)
    asked = dict(features=(schema.TOKENS,), text='few,many', on_bad_records='skip')
    batches = itertools.islice(input_pipeline.train_batches(copy, **asked, **ORDER), 150)
    found, mask = (np.concatenate(x) for x in zip(*(b.values() for b in batches), strict=True))
    assert not mask.all()
    assert mask.mean() > 0.99
    assert not found[~mask].any()


def test_what_does_not_go_together_is_refused_before_anything_is_read(data):
    def read(text, *features):
        return input_pipeline.train_batches(data, text=text, features=features, **ORDER)

    message = r"features has 'tokens', but text='two' holds 'text_embedding'"
    with pytest.raises(ValueError, match=message):
        read('two', schema.TOKENS)
    assert next(read('two,records', schema.KEY)).keys() == {schema.KEY}
    with pytest.raises(ValueError, match=r"no feature 'tokens'"):
        read('', schema.TOKENS)
