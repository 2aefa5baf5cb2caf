"""Several texts a record: which one a sample takes, from files, in both engines."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.reading.order import Order, OrderSettings, sample_texts
from tests.reading import small_dataset
from tests.reading.batches import global_batches
from tests.reading.planned import Planned

LENGTHS = (70, 97, 64, 0, 131, 33)
SPLITS = {schema.TRAIN: LENGTHS, schema.VALIDATION: (20,)}
FEATURES = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING)
MADE = {'encoder': 'hash', 'revision': '1', 'max_tokens': 0}
PADDING = -1


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
    metadata = {
        schema.META_TEXT_ENCODER: 'hash',
        schema.META_SETTINGS: {schema.SETTINGS_TEXT: MADE},
    }
    (path / schema.METADATA_FILE).write_text(json.dumps(metadata))
    add(path, 'two', schema.TEXT_EMBEDDING, embeddings(2), MADE)
    add(path, 'three', schema.TEXT_EMBEDDING, embeddings(3), MADE)
    words = {'encoder': 'words', 'revision': '1', 'max_tokens': 3, 'vocabulary': 2048}
    add(path, 'few', schema.TOKENS, tokens(1, 3), words)
    add(path, 'many', schema.TOKENS, tokens(2, 5), words | {'max_tokens': 5})
    return path


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run reads, and by how many processes from which step it is read."""

    seed: int
    window: int
    start: int
    processes: int
    weights: dict[str, float]

    @property
    def order(self) -> dict[str, int]:
        return {'batch_size': 8, 'seed': self.seed, 'chunk': 32, 'lanes': 4, 'window': self.window}


def runs(*names: str) -> st.SearchStrategy[Run]:
    weight = st.floats(0.01, 100)
    return st.builds(
        Run,
        seed=st.integers(0, 2**64 - 1),
        window=st.integers(1, 200),
        start=st.integers(0, 120),  # an epoch has about 49 steps
        processes=st.sampled_from([1, 2, 4]),
        weights=st.permutations(names).flatmap(
            lambda some: st.fixed_dictionaries(dict.fromkeys(some, weight))
        ),
    )


def read_together(data, run, count, **arguments) -> list[dict[str, np.ndarray]]:
    """Global batches from `run.start` on, put together from those of every process."""
    asked = dict(text=run.weights, start_step=run.start) | run.order | arguments
    return global_batches(data, run.processes, count, **asked)


def expected_texts(run: Run, step: int, keys: np.ndarray) -> np.ndarray:
    settings = {name: x for name, x in run.order.items() if name != 'batch_size'}
    plan = Planned(Order(LENGTHS, OrderSettings(**settings)), run.order['batch_size'])
    return sample_texts(run.seed, plan.batch(step)[0], keys, list(run.weights.values()))


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
@settings(max_examples=12)
@given(run=runs('', 'two', 'three'))
def test_a_sample_takes_the_text_that_seed_epoch_and_key_choose(data, engine, run):
    """Whatever the processes and the start; everything else is as with the records' text."""
    mixed = read_together(data, run, 5, engine=engine, features=FEATURES, caption_dropout=0.5)
    alone = dataclasses.replace(run, weights={'': 1})
    own = read_together(data, alone, 5, engine=engine, features=FEATURES, caption_dropout=0.5)
    number = np.array([{'': 1, 'two': 2, 'three': 3}[name] for name in run.weights])
    for step, (batch, without) in enumerate(zip(mixed, own, strict=True), run.start):
        assert batch.keys() == without.keys()
        for name in batch.keys() - {schema.TEXT_EMBEDDING}:
            np.testing.assert_array_equal(batch[name], without[name])
        text, own_text = batch[schema.TEXT_EMBEDDING], without[schema.TEXT_EMBEDDING]
        assert text.dtype == own_text.dtype
        np.testing.assert_array_equal(text[:, 0], own_text[:, 0])
        picked = expected_texts(run, step, batch[schema.KEY])
        np.testing.assert_array_equal(text[:, 1], number[picked])


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
@settings(max_examples=8)
@given(run=runs('few', 'many'))
def test_tokens_are_padded_to_the_longest_text(data, engine, run):
    features = (schema.KEY, schema.LATENTS, schema.TOKENS)
    batches = read_together(data, run, 4, engine=engine, features=features)
    for step, batch in enumerate(batches, run.start):
        record = batch[schema.LATENTS][:, 0, 0, 1].astype(int)
        picked = expected_texts(run, step, batch[schema.KEY])
        many = np.array([name == 'many' for name in run.weights])[picked]
        wanted = np.where(many[:, None], tokens(2, 5)(record), tokens(1, 5)(record))
        wanted[~many, 3:] = PADDING
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
    wanted[:, 3:] = PADDING
    np.testing.assert_array_equal(few[schema.TOKENS], wanted)


def test_a_damaged_record_has_no_text(data, tmp_path):
    copy = shutil.copytree(data, tmp_path / schema.VERSION)
    shard = min(copy.glob('*train*.tfrecord*'))
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    shard.write_bytes(damaged)
    run = Run(seed=3, window=64, start=0, processes=1, weights={'few': 1, 'many': 1})
    features = (schema.KEY, schema.TOKENS)
    batches = read_together(copy, run, 150, features=features, on_bad_records='skip')
    found = np.concatenate([batch[schema.TOKENS] for batch in batches])
    mask = np.concatenate([batch['mask'] for batch in batches])
    assert not mask.all()
    assert mask.mean() > 0.99
    assert not found[~mask].any()


def test_what_does_not_go_together_is_refused_before_anything_is_read(data):
    def read(text, *features):
        order = {'batch_size': 8, 'seed': 0, 'chunk': 32, 'lanes': 4}
        return input_pipeline.train_batches(data, text=text, features=features, **order)

    message = r"features has 'tokens', but text='two' holds 'text_embedding'"
    with pytest.raises(ValueError, match=message):
        read('two', schema.TOKENS)
    assert next(read('two,records', schema.KEY)).keys() == {schema.KEY}
    with pytest.raises(ValueError, match=r"no feature 'tokens'"):
        read('', schema.TOKENS)
