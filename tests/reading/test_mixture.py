"""Mixtures: what every batch takes of each source, from files, against the naive reference."""

import dataclasses
import itertools
import json
import pathlib
import pickle
import random
import re
import shutil
import tracemalloc
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.reading import opened_splits
from coyo11m_tfds.sampling import filters, mixture, order
from coyo11m_tfds.sampling.order import (
    Order,
    OrderSettings,
    sample_crops,
    sample_drops,
    sample_texts,
    train_blocks,
)
from tests import damages
from tests.reading import naive_order, small_dataset
from tests.reading.batches import assert_same, wait_until_idle
from tests.reading.damaged import damage

LENGTHS = {
    'unequal': (70, 97, 64, 131, 33, 64, 40, 1),
    'in_place': (150, 150),
    'with_empty_ones': (0, 45, 0, 0, 83, 32, 0),
    'bfloat': (64,) * 4,  # dtypes are told apart as shapes are
    'bfloat_too': (90, 33),
}
TEXTS = {'': 1, 'two': 2, 'three': 3}  # by the name of a text its second number
# They mean what they mean to Python.
WHERES = (
    None,
    'score > 3',
    'not (score in (1, 2, -7) or 0 <= score < 1.5)',
    'key >= 0 and score != 9',
)


@dataclasses.dataclass(frozen=True)
class Written:
    """A data set on disk, with keys and scores in the order of its shards."""

    path: pathlib.Path
    lengths: tuple[int, ...]
    keys: np.ndarray
    scores: np.ndarray

    def kept(self, where: str | None) -> list[list[int]]:
        rows = zip(self.keys.tolist(), self.scores.tolist(), strict=True)
        keeps = [eval(where or 'True', {'key': key, 'score': score}) for key, score in rows]
        return naive_order.kept(self.lengths, keeps)


@pytest.fixture(scope='module')
def written(tmp_path_factory) -> dict[str, Written]:
    made = {}
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        folder = tmp_path_factory.mktemp(name)
        path = folder / 'small' / schema.VERSION
        where = {'source': folder / 'source'} if name == 'in_place' else {}
        dtype = ml_dtypes.bfloat16 if 'bfloat' in name else np.float16
        keys = small_dataset.write(path, {schema.TRAIN: lengths}, dtype=dtype, **where)
        scores = (np.arange(sum(lengths)) * 7919 % 1009 % 10).astype(np.int8)
        for column, values in (('score', scores), ('source', np.full_like(scores, number))):
            small_dataset.add_column(path, column, {schema.TRAIN: values})
        # The text of the records is (record, 1).
        for column, second in TEXTS.items() - {('', 1)}:
            text = np.stack([np.arange(len(scores)), np.full(len(scores), second)], axis=1)
            fields = {'feature': schema.TEXT_EMBEDDING, 'mean': [0.0, 0.0], 'std': [1.0, 1.0]}
            values = {schema.TRAIN: text.astype(np.float16)}
            small_dataset.add_column(path, column, values, encoder={'encoder': None}, **fields)
        made[name] = Written(path, lengths, keys[schema.TRAIN], scores)
    return made


@dataclasses.dataclass(frozen=True)
class Leg:
    """A part of a run: batches of one size, by so many processes, until it is killed."""

    each: int
    processes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Path:
    """A run of several legs."""

    mix: tuple[dict[str, Any], ...]
    stages: tuple[dict[str, Any], ...]
    settings: OrderSettings
    legs: tuple[Leg, ...]

    def weights(self, step: int) -> list[Fraction]:
        """The weights of a step."""
        found = [source['weight'] for source in self.mix]
        for stage in self.stages:
            if stage['from'] <= step:
                found = stage['weights']
        return [Fraction(str(weight)) for weight in found]

    @property
    def seeds(self) -> list[int]:
        """Of the sources, with that of the run where a source has none of its own."""
        return [source.get('seed', self.settings.seed) for source in self.mix]

    @property
    def shapes(self) -> list[str]:
        return ['bfloat' if 'bfloat' in source['name'] else '' for source in self.mix]


def draw_path(seed: int) -> Path:
    draw = random.Random(seed)
    names = draw.sample(sorted(LENGTHS), draw.randint(1, 4))
    lanes = draw.randint(1, 6)

    def weights() -> tuple[float, ...]:
        return tuple(draw.choice((0, 1, 1, 2, 3, 0.5, 0.3)) for _ in names)

    mix = tuple(
        {'name': name, 'weight': weight, 'where': draw.choice(WHERES)}
        for name, weight in zip(names, weights(), strict=True)
    )
    begins = sorted(draw.sample(range(12), draw.randint(0, 2)))
    dividing = [n for n in range(1, lanes + 1) if lanes % n == 0]
    legs = [
        Leg(draw.randint(2, 12), draw.choice(dividing), draw.randint(1, 5))
        for _ in range(draw.randint(1, 3))
    ]
    settings = OrderSettings(
        draw.randrange(2**63), draw.choice((32, 64, 320)), lanes, draw.randint(1, 200)
    )
    stages = tuple({'from': begin, 'weights': weights()} for begin in begins)
    for source in mix:
        if draw.random() < 0.5:
            source['seed'] = draw.randrange(2**63)
        source['text'] = {
            text: draw.choice((1, 2, 0.3)) for text in draw.sample([*TEXTS], draw.randint(1, 3))
        }
    return Path(mix, stages, settings, tuple(legs))


def walk(path: Path, written: dict[str, Written], engine: str = 'rows') -> int:
    """Runs a path and compares every record of it.

    Returns how many batches there were: none if a source or shape gets no sample by its weight.
    """
    lanes = path.settings.lanes
    mix = [
        {name: x for name, x in source.items() if x is not None}
        | {'dir': written[source['name']].path}
        for source in path.mix
    ]
    asked = dict(
        engine=engine,
        features=('key', 'latents', 'text_embedding', 'caption', 'source'),
        caption_dropout=0.5,
        stages=path.stages,
        **dataclasses.asdict(path.settings),
    )
    try:
        for leg in path.legs:
            input_pipeline.train_batches(mix, batch_size=leg.each * lanes, **asked).close()
    except ValueError as refused:
        assert re.search('weight|none of the|come in lockstep', str(refused))
        return 0
    state: dict | None = None
    sizes = [leg.each * lanes for leg in path.legs for _ in range(leg.count)]
    sources = [written[source['name']].kept(source['where']) for source in path.mix]
    numbers = [list(LENGTHS).index(source['name']) for source in path.mix]
    settings = [dataclasses.replace(path.settings, seed=seed) for seed in path.seeds]
    expected = naive_order.mixture(sources, settings, path.weights, sizes, path.shapes)
    for leg in path.legs:
        asked |= {'batch_size': leg.each * lanes, 'start': state}
        parts = [
            input_pipeline.train_batches(
                mix, process_index=process, process_count=leg.processes, **asked
            )
            for process in range(leg.processes)
        ]
        for _ in range(leg.count):
            read = [next(part) for part in parts]
            batch = {name: np.concatenate([part[name] for part in read]) for name in read[0]}
            compare(next(expected), batch, path, written, numbers)
        # Each of them says the same, whatever it has read ahead.
        states = {json.dumps(part.get_state()) for part in parts}
        assert len(states) == 1
        state = json.loads(states.pop())
        for part in parts:
            part.close()
    return len(sizes)


def compare(expected, batch, path: Path, written: dict[str, Written], numbers: list[int]) -> None:
    source, epoch, shard, record = np.array(expected).T
    np.testing.assert_array_equal(batch['source'], np.array(numbers)[source])
    data = [written[path.mix[of]['name']] for of in source]
    number = [sum(x.lengths[:n]) + r for x, n, r in zip(data, shard, record, strict=True)]
    keys = [x.keys[n] for x, n in zip(data, number, strict=True)]
    np.testing.assert_array_equal(batch['key'], keys)
    np.testing.assert_array_equal(batch['text_embedding'][:, 0], number)
    assert batch['caption'].tolist() == [f'record {n}'.encode() for n in number]
    for of, seed in enumerate(path.seeds):
        own, keys = source == of, batch['key'][source == of]
        names, weights = zip(*path.mix[of]['text'].items(), strict=True)
        texts = np.array([TEXTS[name] for name in names])
        texts = texts[sample_texts(seed, epoch[own], keys, weights)]
        np.testing.assert_array_equal(batch['text_embedding'][own, 1], texts)
        crops = sample_crops(seed, epoch[own], keys, schema.NUM_CROPS)
        np.testing.assert_array_equal(batch['latents'][own, 0, 0, 0].astype(int), crops)
        drops = sample_drops(seed, epoch[own], keys, 0.5)
        np.testing.assert_array_equal(batch['drop_text'][own], drops)


@pytest.fixture
def short_blocks(monkeypatch) -> None:
    """Few rows are planned at once: a path reads only some, and crosses more ends of blocks."""
    monkeypatch.setattr(order, '_BLOCK_ROWS', 64)


# tf.data reads latents of one dtype, and makes a graph for every process: one short path.
@pytest.mark.parametrize(
    'engine, seeds', [('rows', range(24)), ('chunks', range(50, 54)), ('tf_data', [2826])]
)
def test_random_paths_equal_the_reference(written, short_blocks, engine, seeds):
    assert sum(walk(draw_path(seed), written, engine) for seed in seeds) > len(seeds)


@pytest.mark.slow
def test_a_thousand_random_paths_equal_the_reference(written, short_blocks):
    possible = walked = seed = 0
    while possible < 1000:
        count = walk(draw_path(seed), written, 'chunks' if seed % 10 == 0 else 'rows')
        possible, walked, seed = possible + bool(count), walked + count, seed + 1
    assert walked > 4000


ORDER = {'seed': 3, 'chunk': 32, 'lanes': 4, 'window': 40, 'batch_size': 32}
ALL = ('key', 'latents', 'crop', 'text_embedding', 'caption', 'score')


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(batches, count))


def test_sources_are_read_each_in_its_way(written, monkeypatch):
    """As with some of them local and some on gs://."""
    mix = [{'dir': written[name].path} for name in ('unequal', 'in_place')]
    asked = dict(ORDER, features=ALL, caption_dropout=0.5)
    expected = take(input_pipeline.train_batches(mix, **asked), 6)
    monkeypatch.setattr(opened_splits, 'MAX_FILES', 2)
    plans = [input_pipeline.train_plan([source], **ORDER) for source in mix]
    assert [plan.engine for plan in plans] == ['chunks', 'rows']
    assert_same(take(input_pipeline.train_batches(mix, **asked), 6), expected)


@pytest.mark.parametrize('lengths', [(250, 250), (250, 200, 50)])
def test_the_same_images_twice_need_a_seed_of_their_own(tmp_path, lengths):
    """As of two resolutions, whose shards may be cut in another way."""
    paths = [tmp_path / name / schema.VERSION for name in ('small', 'large')]
    for path, shard_lengths in zip(paths, ((250, 250), lengths), strict=True):
        small_dataset.write(path, {schema.TRAIN: shard_lengths})
    mix = [{'dir': path} for path in paths]
    with pytest.raises(
        ValueError, match=r"would come in lockstep\. Give 'coyo11m_tfds_2' a 'seed' of"
    ):
        input_pipeline.train_batches(mix, **ORDER)
    mix[1]['seed'] = 4
    batches = take(input_pipeline.train_batches(mix, **ORDER, features=('key',)), 7)
    twins = [len(batch['key']) - len(set(batch['key'].tolist())) for batch in batches]
    assert sum(twins) < 0.2 * 7 * 16  # by chance one in 31 of the 16 in each


def test_batches_are_of_one_shape_and_strides_share_them(written):
    mix = [{'dir': written[x].path} for x in ('bfloat', 'unequal', 'bfloat_too')]
    whole = take(input_pipeline.train_batches(mix, **ORDER, features=ALL), 15)
    dtypes = [batch['latents'].dtype.name for batch in whole]
    assert dtypes == ['bfloat16', 'float16', 'bfloat16'] * 5
    for worker in range(2):
        share = dict(ORDER, start_step=worker, stride=2, features=ALL)
        assert_same(take(input_pipeline.train_batches(mix, **share), 7), whole[worker::2][:7])
    # The order does not depend on what is asked for.
    dataset = input_pipeline.train_dataset(mix, **ORDER, features=('key', 'score'))
    narrow = [{name: batch[name] for name in ('key', 'score')} for batch in whole]
    assert_same(list(dataset.take(15).as_numpy_iterator()), narrow)


@pytest.mark.parametrize('engine', ['rows', 'tf_data'])
def test_a_stage_begins_between_two_batches_of_a_stride(written, short_blocks, engine):
    mix = [{'dir': written[x].path, 'weight': w} for x, w in (('unequal', 1), ('in_place', 0))]
    stages = ({'from': 5, 'weights': (1, 3)}, {'from': 9, 'weights': (0, 1)})
    asked = dict(ORDER, stages=stages, features=('key', 'source'), engine=engine)
    whole = take(input_pipeline.train_batches(mix, **asked), 21)
    assert [int(batch['source'].sum()) for batch in whole] == [0] * 5 + [24] * 4 + [32] * 12
    for worker, stride in [*zip(range(3), [3] * 3, strict=True), (0, 7), (6, 7)]:
        share = input_pipeline.train_batches(mix, **asked, start_step=worker, stride=stride)
        assert_same(take(share, 21 // stride), whole[worker::stride])


def test_a_further_source_goes_on_beside_the_first(written):
    """As one does whose data set was appended to: the new version is another source."""
    old, new = ({'dir': written[name].path} for name in ('unequal', 'in_place'))
    batches = input_pipeline.train_batches([old], **ORDER)
    take(batches, 5)
    state = batches.get_state()
    both = input_pipeline.train_batches([old, new], **ORDER)
    (added,) = both.get_state()['samples'].keys() - state['samples'].keys()
    with pytest.raises(ValueError, match='A further source begins with 0 samples'):
        both.set_state(state)
    both.set_state({**state, 'samples': state['samples'] | {added: 0}})
    alone = dict(ORDER, batch_size=16)
    expected = [
        take(input_pipeline.train_batches(source['dir'], **alone, start=start), 3)
        for source, start in ((old, state), (new, None))
    ]
    for batch, *parts in zip(take(both, 3), *expected, strict=True):
        keys = np.concatenate([part['key'].reshape(4, 4) for part in parts], axis=1)
        np.testing.assert_array_equal(batch['key'], keys.ravel())


def test_a_mixture_with_a_condition_is_pickled(written):
    mix = [{'dir': written['unequal'].path, 'where': 'not score in (1, 2)', 'seed': 3}]
    opened = input_pipeline.open_mix(mix)
    again = pickle.loads(pickle.dumps(opened))
    expected = take(input_pipeline.train_batches(opened, **ORDER), 3)
    assert_same(take(input_pipeline.train_batches(again, **ORDER), 3), expected)


@pytest.mark.parametrize(
    'where', ['key != 0', 'score > 3 and not key == 0', 'score > 99 or key < 0']
)
def test_a_record_whose_key_cannot_be_read_meets_no_condition(written, tmp_path, where):
    """The others come as in a data set without it."""
    data, damaged = written['unequal'], {(2, 3), (4, 32)}
    path = tmp_path / 'small' / schema.VERSION
    shutil.copytree(data.path, path)
    for shard, record in damaged:
        damage(path, shard, record)
    mix, skip = [{'dir': path, 'where': where}], {'on_bad_records': 'skip'}
    with pytest.raises(input_pipeline.DamagedError, match='cannot be read'):
        input_pipeline.train_batches(mix, **ORDER)
    shards = naive_order.kept(data.lengths, [True] * len(data.keys))
    places = [(shard, record) for shard, records in enumerate(shards) for record in records]
    rows = zip(places, data.keys.tolist(), data.scores.tolist(), strict=True)
    expected = [
        key
        for place, key, score in rows
        if place not in damaged and eval(where, {}, {'key': key, 'score': score})
    ]
    assert 0 < len(expected) < len(data.keys)
    plan = input_pipeline.train_plan(mix, batch_size=32, seed=0, chunk=32, lanes=4, **skip)
    assert plan.orders[0].num_records == len(expected)
    for engine in ('rows', 'chunks', 'tf_data'):
        asked = dict(batch_size=64, split='train', features=('key',), engine=engine, **skip)
        with pytest.raises(ValueError, match='give one of them'):
            input_pipeline.eval_batches([*mix, {'dir': written['in_place'].path}], **asked)
        batches = list(input_pipeline.eval_batches(mix, **asked))
        keys = np.concatenate([batch['key'][batch['mask']] for batch in batches])
        assert keys.tolist() == expected
        batch = next(input_pipeline.train_batches(mix, **ORDER, engine=engine, **skip))
        assert batch['mask'].all() and set(batch['key'].tolist()) <= set(expected)


@pytest.mark.parametrize('name', ['long', 'in_place'])
def test_of_few_kept_records_only_their_runs_are_fetched(tmp_path, caplog, name):
    path, source = tmp_path / 'small' / schema.VERSION, tmp_path / 'source'
    where = {'source': source} if name == 'in_place' else {}
    small_dataset.write(path, {schema.TRAIN: (1000, 1000)}, **where)
    kept = np.zeros(2000, np.uint8)
    kept[[5, 40, 90, 100, 600, 1001, 1900, 1990]] = 1  # of the runs 0, 1, 2, 3, 18, 31, 59, 61
    small_dataset.add_column(path, 'kept', {schema.TRAIN: kept})
    mix, counter = [{'dir': path, 'where': 'kept == 1'}], input_pipeline.ReadCounter()
    asked = {'batch_size': 4, 'seed': 0, 'lanes': 2, 'chunk': 256, 'features': ('key', 'latents')}
    with caplog.at_level('INFO'):
        chunks = input_pipeline.train_batches(mix, **asked, engine='chunks', counter=counter)
    expected = take(input_pipeline.train_batches(mix, **asked, engine='rows'), 2)
    assert_same(take(chunks, 2), expected)
    wait_until_idle(counter)
    read = counter.read()
    assert 'kept == 1 keeps 0.4% of split' in caplog.text and 'fetches 12.8% of it' in caplog.text
    size = sum(file.stat().st_size for file in path.glob('*.tfrecord*'))
    if where:
        size += sum(file.stat().st_size for file in source.iterdir())
    # The block of these batches and the next one: runs 0 to 3 come with one request.
    assert read.num_chunks <= 2 * 5 and read.num_bytes < 2.1 * 0.128 * size
    damage(path, 0, 100, at=20)
    skips = asked | {'on_bad_records': 'skip'}
    expected = take(input_pipeline.train_batches(mix, **skips, engine='rows'), 8)
    assert_same(take(input_pipeline.train_batches(mix, **skips, engine='chunks'), 8), expected)
    assert not all(batch['mask'].all() for batch in expected)


def test_what_was_rounded_is_told_with_what_is_exact():
    assert mixture.BatchShares(16, (3, 1), names=('a', 'b')).summary == ['shares a 0.75, b 0.25']
    (told,) = mixture.BatchShares(16, (0.7, 0.3), names=('a', 'b')).summary
    assert told.startswith('shares a 0.6875 (requested 0.7), b 0.3125 (requested 0.3), in steps of')
    exact, multiple = re.search(r'weights (\S+) are exact.* multiple of (\d+) times', told).groups()
    exactly = mixture.BatchShares(16, [int(x) for x in exact.split(':')], names=('a', 'b'))
    assert 'requested' not in exactly.summary[0]
    assert 'requested' not in mixture.BatchShares(int(multiple), (0.7, 0.3)).summary[0]


NO_MIXTURES = {
    'a weight of less than a record in each batch': (
        {'weight': 0.01},
        r"source 'b' has 0\.0099.* too little for one of the 8 .*size of 101",
    ),
    'a weight of 0': ({'weight': 0}, "source 'b' has weight 0 in every stage"),
    'a negative weight': ({'weight': -1}, r'weights \[1.0, -1\]: expected a number of at least 0'),
    'an empty condition': ({'where': ''}, "where='': .* expected comparisons"),
    'a condition that compares nothing': ({'where': 'score'}, "'score' does not compare anything"),
    'a condition that no record meets': (
        {'where': 'score > 99'},
        "where='score > 99' keeps none of the 300 records",
    ),
    'a condition with a power': (
        {'where': 'score > 8 and key > 2**3'},
        "'2 \\*\\* 3' is neither a name nor",
    ),
    'a condition on the name of the source': (
        {'where': 'score > 8 and source == 1 and key in (1,)'},
        'keeps none',
    ),
    'a condition on a column that is not there': (
        {'where': 'width > 2'},
        "'width' is not a column of single numbers; there are .'key', 's",
    ),
    'a condition on a column of lists': (
        {'where': 'text_embedding > 2'},
        'is not a column of single numbers',
    ),
    'a text that is a number': ({'text': 'score'}, "text='score': 'score' is not a column of text"),
    'one name twice': ({'name': 'a'}, "mix has the name 'a' twice"),
    'no folder': ({'folder': 'x'}, "expected dicts with 'dir'"),
    'a number as text': ({'text': 5}, 'mix: text=5: expected a string, or a dict of weights'),
    'no condition': ({'where': None}, 'mix: where=None: expected a string'),
    'a seed that is a text': ({'seed': '1'}, "mix: seed='1': expected a whole number"),
    'a number for same_vae': ({'same_vae': 1}, 'mix: same_vae=1: expected True or False'),
    'the same records in the same order': (
        {'dir': 'unequal'},
        "'a' .* and 'b' .* with 500 records each and the same seed",
    ),
    'the same records by a seed of 65 bits': (
        {'dir': 'unequal', 'seed': ORDER['seed'] + 2**64},
        "'b' .* with 500 records each",
    ),
    'the same records by a condition that all meet': (
        {'dir': 'unequal', 'where': 'key >= key'},
        "'b' .* with 500 records each",
    ),
}


@pytest.mark.parametrize('changes, message', NO_MIXTURES.values(), ids=NO_MIXTURES)
def test_a_mixture_that_makes_no_sense_is_refused(written, changes, message):
    second = {'dir': 'in_place', 'name': 'b', **changes}
    mix = [
        source | {'dir': written[source['dir']].path}
        for source in ({'dir': 'unequal', 'name': 'a'}, second)
    ]
    with pytest.raises(ValueError, match=message) as refused:
        input_pipeline.train_batches(mix, **ORDER)
    assert '\n' not in str(refused.value)


NO_STAGES = {
    'a weight for one of two sources': (({'from': 3, 'weights': (1,)},), 'for each of 2 sources'),
    'a step before the first': (
        ({'from': -3, 'weights': (1, 1)},),
        "'from'=-3: expected at least 0",
    ),
    'no step': (({'weights': (1, 1)},), "expected {'from': STEP, 'weights'"),
    'a step that does not come later': (
        ({'from': 3, 'weights': (1, 1)},) * 2,
        "'from': 3 does not come after 3",
    ),
    'a weight that is no number': (
        ({'from': 3, 'weights': (1, float('nan'))},),
        'a number of at least 0',
    ),
}


@pytest.mark.parametrize('stages, message', NO_STAGES.values(), ids=NO_STAGES)
def test_stages_that_make_no_sense_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        mixture.BatchShares(4, (1, 1), stages)


def _of_words(revision: str) -> dict:
    """The settings of a build whose words have a list of this revision."""
    return {schema.SETTINGS_TEXT: {'revision': revision}}


MADE_BY = {
    'first': {},
    'like_it': {'mean': 0.9, 'std': 6.0},
    'shifted': {'mean': 4.0},
    'wide': {'std': 8.0},
    'deep': {'channels': 16},
    'constant': {'std': 0.0},
    'constant_too': {'std': 0.0},
    'constant_elsewhere': {'std': 0.0, 'mean': 0.6},
    'other_text': {'encoder': 'hf:other'},
    'words': {'encoder': 'words', schema.META_SETTINGS: _of_words('2-a')},
    'other_words': {'encoder': 'words', schema.META_SETTINGS: _of_words('2-b')},
    'sdxl': {'vae': 'sdxl'},
    'flux': {'vae': 'flux'},
    'mit': {'license': 'mit'},
    'cc0': {'license': 'cc0-1.0'},
}


@pytest.fixture(scope='module')
def made(tmp_path_factory) -> dict[str, dict]:
    """Sources whose metadata say what made them, of other numbers of records each."""
    folder = tmp_path_factory.mktemp('made')
    for number, (name, changes) in enumerate(MADE_BY.items()):
        small_dataset.write(folder / name / schema.VERSION, {schema.TRAIN: (100 + number,)})
        facts = {'mean': 0.5, 'std': 5.0, 'encoder': 'hash', 'channels': 4} | changes
        channels = facts.pop('channels')
        facts[schema.META_LATENT_MEAN] = [facts.pop('mean')] * channels
        facts[schema.META_LATENT_STD] = [facts.pop('std')] * channels
        facts[schema.META_TEXT_ENCODER] = facts.pop('encoder')
        path = folder / name / schema.VERSION / schema.METADATA_FILE
        path.write_text(json.dumps(facts))
    return {name: {'dir': folder / name / schema.VERSION} for name in MADE_BY}


CHUNK_OF_32 = dict(ORDER, chunk=32)
OTHER_MAKERS = {
    'latents of another mean': (
        ['first', 'shifted'],
        r"have mean .* say so with 'same_vae': True",
    ),
    'latents of another deviation': (
        ['first', 'wide'],
        r"have mean .* say so with 'same_vae': True",
    ),
    'constant latents of another mean': (
        ['constant', 'constant_elsewhere'],
        r"have mean .* say so with 'same_vae': True",
    ),
    'embeddings of another encoder': (
        ['first', 'other_text'],
        r"of 'hf:other'.*, expected embeddings of 'hash'",
    ),
    'words of another list': (
        ['words', 'other_words'],
        r"'2-b'.*, expected .* '2-a'.* has\. Encode one of them again with --encoder=words:SIDECAR",
    ),
    'latents of another VAE, with one between that names none': (
        ['sdxl', 'first', 'flux'],
        r"flux/.* come from VAE 'flux', those of .* from 'sdxl'",
    ),
}


@pytest.mark.parametrize(('names', 'message'), OTHER_MAKERS.values(), ids=OTHER_MAKERS)
def test_latents_and_texts_of_other_encoders_are_refused(made, names, message):
    with pytest.raises(ValueError, match=message):
        input_pipeline.train_batches([made[name] for name in names], **CHUNK_OF_32)


def test_no_word_of_a_user_makes_latents_of_two_named_vaes_one(made):
    mix = [made['sdxl'], made['flux'] | {'same_vae': True}]
    with pytest.raises(ValueError, match=r"flux/.* come from VAE 'flux', those of .* from 'sdxl'"):
        input_pipeline.train_batches(mix, **CHUNK_OF_32)


def test_latents_of_other_shapes_have_no_statistics(made):
    of_16_channels = input_pipeline.open_mix([made['first'], made['deep']])
    message = r'deep.* in each channel, .*: expected latents of one VAE'
    with pytest.raises(ValueError, match=message):
        input_pipeline.mix_stats(of_16_channels, '')  # as a trainer calls it first


TOGETHER = {
    'latents that are nearly alike': ('like_it', {}),
    'latents of another mean that a user knows': ('shifted', {'same_vae': True}),
    'latents of another deviation that a user knows': ('wide', {'same_vae': True}),
    'latents of a VAE of which the others say nothing': ('sdxl', {}),
}


@pytest.mark.parametrize(('name', 'options'), TOGETHER.values(), ids=TOGETHER)
def test_latents_of_one_encoder_are_mixed(made, name, options):
    input_pipeline.train_batches([made['first'], made[name] | options], **CHUNK_OF_32)


def test_constant_latents_are_mixed(made):
    input_pipeline.train_batches([made['constant'], made['constant_too']], **CHUNK_OF_32)


def test_texts_of_other_encoders_are_mixed_where_they_are_not_read(made):
    mix = [made['first'], made['other_text']]
    input_pipeline.train_batches(mix, **CHUNK_OF_32, features=('key', 'latents'))


def test_statistics_of_a_mixture_are_those_of_its_shares(made):
    mix = input_pipeline.open_mix([made['first'], made['like_it'] | {'weight': 3}])
    stats = input_pipeline.mix_stats(mix, '')
    np.testing.assert_allclose(stats.latent_mean, [0.8] * 4, rtol=1e-6)
    variance = 0.25 * (25 + 0.09) + 0.75 * (36 + 0.01)
    np.testing.assert_allclose(stats.latent_std, [variance**0.5] * 4, rtol=1e-6)
    assert stats.license == ''
    three = input_pipeline.open_mix([made['mit'], made['first'], made['cc0']])
    assert input_pipeline.mix_stats(three, '').license == 'mit and unknown and cc0-1.0'


@pytest.mark.parametrize(
    'text',
    [
        'a > 2.5 and b >= 256',
        'not (a < 1 or b in (1, 2, -3))',
        '0 < a <= b != 3',
        'a not in [1, 2] or not b == 2',
        'a > b',
    ],
)
def test_a_condition_holds_where_python_says_so(text):
    random_ = np.random.default_rng(0)
    columns = {
        'a': np.append(random_.integers(-3, 8, 200) / 2, [np.nan, np.inf]).astype(np.float32),
        'b': random_.choice([-3, 0, 1, 2, 3, 255, 256], 202),
    }
    found = filters.Condition.parse(text)
    assert sorted(found.names) == ['a', 'b']
    rows = zip(columns['a'].tolist(), columns['b'].tolist(), strict=True)
    expected = [eval(text, {}, {'a': a, 'b': b}) for a, b in rows]
    assert 0 < sum(expected) < len(expected)
    np.testing.assert_array_equal(found.evaluate(columns), expected)
    assert filters.Condition.parse(found.text).text == found.text


@pytest.mark.parametrize(
    'text',
    [
        'f(a) > 1',
        '__import__("os").system("true")',
        'a.b > 1',
        'a[0] > 1',
        'a > "x"',
        'a is 1',
        'a + 1 > 2',
        'a > 1e999',
        'a > 10**9',
        'a > 99999999999999999999',
        'a == True',
        'a in b',
        '1 < 2',
        'a > 1 if a else b',
        '[x for x in a] > 1',
        '(' * 1000 + 'a > 1' + ')' * 1000,
        'not ' * 490 + 'a > 1',
        'a > 1 and ' * 300 + 'a > 2',
        'a > 1\nb > 2',
        'a := 3',
        '\0',
    ],
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ValueError, match='expected comparisons'):
        filters.Condition.parse(text)


def test_numbers_are_compared_as_their_column_holds_them():
    tenth = np.array([0.1], np.float32)
    assert filters.Condition.parse('a == 0.1').evaluate({'a': tenth}).all()
    half = np.array([1, 60000], np.float16)
    assert filters.Condition.parse('a < 1e9').evaluate({'a': half}).all()
    large = np.array([2**62 + 1], np.int64)
    assert (
        filters.Condition.parse(f'a == {2**62 + 1} and a != {2**62}').evaluate({'a': large}).all()
    )
    assert filters.Condition.parse('a < 300').evaluate({'a': np.array([255], np.uint8)}).all()


def test_a_condition_on_forty_million_records_takes_little_memory():
    lengths, block = np.full(400, 100_000), 1 << 18
    tracemalloc.start()
    kept = filters.KeptRecords(
        lengths,
        (np.arange(at, min(at + block, 40_000_000)) % 3 == 0 for at in range(0, 40_000_000, block)),
    )
    planned = Order(lengths, OrderSettings(seed=0), kept)
    block = next(train_blocks(planned, range(1), 1, 10**6, itertools.count()))
    number = int(block.record[0, 0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.num_records == 13_333_334 and 0 <= number < 100_000
    assert peak < 60e6


def test_a_damaged_column_is_named(written, tmp_path):
    path = tmp_path / 'small' / schema.VERSION
    small_dataset.write(path, {schema.TRAIN: (100,)})
    small_dataset.add_column(path, 'score', {schema.TRAIN: np.arange(100)})
    damages.flip(path / 'column_score-train.npy', -30)
    with pytest.raises(input_pipeline.DamagedError, match=r'column_score-train\.npy: its values'):
        input_pipeline.train_batches([{'dir': path, 'where': 'score > 5'}], **ORDER)
