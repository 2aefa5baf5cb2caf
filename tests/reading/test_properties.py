"""What reading promises for any data set, any settings and any number of processes, from files.

`test_order.py` holds the plan to the contract; here the batches that come out of the pipeline are
held to it, over shards of all lengths (empty ones too) and settings drawn at random.
"""

import dataclasses
import functools
import itertools
import math
import re

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import example, given, settings
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.reading.order import Order, OrderSettings, sample_crops, sample_drops
from tests.reading import naive_order, small_dataset
from tests.reading.batches import assert_same, global_batches, joined, wait_until_idle
from tests.reading.planned import Planned, settings_of

SHARDS = {
    'unequal': (70, 97, 64, 131, 33, 64, 40, 1),
    'with empty ones': (0, 45, 0, 0, 83, 32, 0),
    'one': (300,),
    'of a single record': (1,) * 60,
    'even': (64,) * 6,
}

# Reading makes a tf.data graph for every process, which takes longer than the records do: few
# examples in the fast run, many in the slow one.
FEW, MANY = 2, 100


@dataclasses.dataclass(frozen=True)
class Written:
    """A data set on disk; keys in the order of the shards."""

    builder: tfds.core.DatasetBuilder
    keys: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run reads, and by how many processes from which step it is read."""

    shards: str
    batch_size: int
    seed: int = 0
    chunk: int = 32
    lanes: int = 1
    window: int = 48
    processes: int = 1
    start: int = 0

    @property
    def order_settings(self) -> dict[str, int]:
        names = ('batch_size', 'seed', 'chunk', 'lanes', 'window')
        return {name: getattr(self, name) for name in names}

    @property
    def settings(self) -> OrderSettings:
        return settings_of(**self.order_settings)

    @property
    def plan(self) -> Planned:
        return Planned(Order(SHARDS[self.shards], self.settings), self.batch_size)

    def expected(self, sizes: list[int]) -> list[list[np.ndarray]]:
        """Batches from `start` on: of each the epochs and the numbers of its records."""
        first = np.cumsum([0, *SHARDS[self.shards]])
        start = self.start * self.batch_size // self.lanes
        batches = naive_order.batches(SHARDS[self.shards], self.settings, sizes, start)
        found = [np.array(batch).T for batch in batches]
        return [[epoch, first[shard] + record] for epoch, shard, record in found]

    def batches(self, data, count: int, **arguments) -> list[dict[str, np.ndarray]]:
        """Batches from `start` on, put together from those of every process."""
        return global_batches(
            data,
            self.processes,
            count,
            features=stored_dataset.FEATURES,
            caption_dropout=0.5,
            start_step=self.start,
            **self.order_settings,
            **arguments,
        )


SEEDS = st.integers(0, 2**64 - 1)
ANY_SHARDS = st.sampled_from(sorted(SHARDS))


@st.composite
def runs(draw, shards=ANY_SHARDS, seeds=SEEDS) -> Run:
    """Runs whose settings fit their data set, from any step of the first two epochs."""
    lanes = draw(st.integers(1, 6))
    run = Run(
        shards=draw(shards),
        batch_size=lanes * draw(st.integers(1, 12)),
        seed=draw(seeds),
        chunk=draw(st.sampled_from([32, 64, 320])),
        lanes=lanes,
        window=draw(st.integers(1, 400)),
        processes=draw(st.sampled_from([n for n in range(1, lanes + 1) if lanes % n == 0])),
    )
    return dataclasses.replace(run, start=draw(st.integers(0, 2 * run.plan.steps + 1)))


@pytest.fixture(scope='module')
def written(tmp_path_factory) -> dict[str, Written]:
    made = {}
    for name, lengths in SHARDS.items():
        path = tmp_path_factory.mktemp('written') / 'small' / schema.VERSION
        keys = small_dataset.write(path, {schema.TRAIN: lengths})
        made[name] = Written(tfds.builder_from_directory(path), keys[schema.TRAIN])
    return made


def read(data: Written, run: Run, count: int, **arguments) -> list[dict[str, np.ndarray]]:
    """`count` batches of one process, every feature in them, which all ways to read give alike."""
    arguments |= run.order_settings | dict(features=stored_dataset.FEATURES, caption_dropout=0.5)
    batches = input_pipeline.train_dataset(
        data.builder, parallel_reads=1, prefetch=1, **arguments
    ).take(count)
    by_chunks = list(batches.as_numpy_iterator())
    without_counter = {name: x for name, x in arguments.items() if name != 'counter'}
    for engine in ('rows', 'chunks'):
        batches = input_pipeline.train_batches(data.builder, engine=engine, **without_counter)
        assert_same(list(itertools.islice(batches, count)), by_chunks)
    return by_chunks


def read_together(data: Written, run: Run, count: int) -> list[dict[str, np.ndarray]]:
    """`count` global batches from `run.start` on, put together from those of every process."""
    share = {'start_step': run.start, 'process_count': run.processes}
    parts = [read(data, run, count, process_index=p, **share) for p in range(run.processes)]
    assert {len(x) for part in parts for batch in part for x in batch.values()} == {
        run.batch_size // run.processes
    }
    return joined(parts)


def records_of(data: Written, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The numbers of a batch's records, after a check that all its features are of the same."""
    by_key = np.argsort(data.keys)
    record = by_key[np.searchsorted(data.keys, batch['key'], sorter=by_key)]
    np.testing.assert_array_equal(data.keys[record], batch['key'])
    np.testing.assert_array_equal(batch['latents'][:, 0, 0, 1], record)
    np.testing.assert_array_equal(batch['text_embedding'][:, 0], record)
    assert batch['caption'].tolist() == [f'record {r}'.encode() for r in record]
    return record


# --- The same batches for every number of processes, from every step ---------------------------


def check_union_is_the_tail(data: Written, run: Run) -> None:
    count = run.plan.steps // 2 + 2
    whole = read(data, run, run.start + count)
    assert_same(read_together(data, run, count), whole[run.start :])


@settings(max_examples=FEW)
@given(run=runs())
@example(run=Run('unequal', 12, lanes=6, window=10**6, processes=2, start=20))  # window > lane
@example(run=Run('with empty ones', 12, lanes=2, window=4, processes=2, start=7))  # window < B/L
@example(run=Run('one', 8, lanes=4, chunk=32, window=32, processes=4, start=3))  # window = chunk
@example(run=Run('unequal', 4, lanes=2, chunk=320, start=50))  # chunk > shard
@example(run=Run('of a single record', 12, lanes=6, processes=2, start=5))
def test_processes_read_between_them_the_tail_of_the_run_from_0(written, run):
    check_union_is_the_tail(written[run.shards], run)


@pytest.mark.slow
@settings(max_examples=MANY)
@given(run=runs())
def test_processes_read_between_them_the_tail_of_the_run_from_0_at_length(written, run):
    check_union_is_the_tail(written[run.shards], run)


def check_epochs(data: Written, run: Run) -> None:
    """What comes in the first two epochs; a batch may have records of both."""
    length, count = run.plan.order.lane_length * run.lanes, len(data.keys)
    batches = read(data, run, 2 * length // run.batch_size + 1)
    records = [records_of(data, batch) for batch in batches]
    epochs = [run.plan.batch(step)[0] for step in range(len(batches))]
    record, epoch = np.concatenate(records), np.concatenate(epochs)
    for number in range(2):
        of_epoch = record[epoch == number]
        assert len(of_epoch) == length > count - run.lanes
        assert len(np.unique(of_epoch)) == length, 'a key comes twice'


@settings(max_examples=FEW)
@given(run=runs())
@example(run=Run('even', 16, lanes=4, chunk=64, window=1))
@example(run=Run('with empty ones', 7, chunk=64, window=100))
def test_an_epoch_has_every_key_once_but_for_a_tail(written, run):
    check_epochs(written[run.shards], run)


@pytest.mark.slow
@settings(max_examples=MANY)
@given(run=runs())
def test_an_epoch_has_every_key_once_but_for_a_tail_at_length(written, run):
    check_epochs(written[run.shards], run)


def test_a_batch_larger_than_the_data_set_spans_epochs(written):
    """Each of which has a record once: 300 records come in three epochs of 1,000, a third more."""
    run = Run('one', batch_size=1000, lanes=4)
    counts = [
        np.bincount(records_of(written['one'], batch), minlength=300)
        for batch in read(written['one'], run, 3)
    ]
    assert set(counts[0]) == {3, 4}
    assert set(sum(counts)) == {10}


@pytest.mark.slow
@settings(max_examples=FEW)
@given(
    run=runs(shards=st.just('unequal')),
    to_other=st.integers(1, 2**64 - 1),
)
def test_another_seed_is_another_order_of_other_choices(written, run, to_other):
    """Windows of 20 or more records cannot come again by chance."""
    run = dataclasses.replace(run, window=max(20, run.window))
    other = dataclasses.replace(run, seed=(run.seed + to_other) % 2**64)
    count = math.ceil(200 / run.batch_size)
    first, second = (
        [
            np.concatenate([batch[name] for batch in read(written['unequal'], r, count)])
            for name in ('key', 'latents', 'drop_text')
        ]
        for r in (run, other)
    )
    assert not np.array_equal(first[0], second[0])
    by_key = [
        {key: (crop, drop) for key, crop, drop in zip(k, x[:, 0, 0, 0], d, strict=True)}
        for k, x, d in (first, second)
    ]
    common = by_key[0].keys() & by_key[1].keys()
    assert len(common) > 20
    for choice in (0, 1):  # the crop, and whether the text is dropped
        assert any(by_key[0][key][choice] != by_key[1][key][choice] for key in common)


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
@settings(max_examples=60)
@given(run=runs())
@example(run=Run('even', 64, lanes=2, chunk=64, window=1, start=5))  # each block is a batch
@example(run=Run('one', 3, lanes=3, window=400, processes=3, start=150))  # several epochs in
@example(run=Run('of a single record', 240, lanes=6, processes=3, start=1))  # four epochs a batch
def test_batches_are_those_of_the_contract(written, engine, run):
    """Without TensorFlow, which takes no graph: many more settings than with it."""
    data, count = written[run.shards], 7
    batches = run.batches(data.builder, count, engine=engine)
    expected = run.expected([run.batch_size] * count)
    for batch, (epoch, record) in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(records_of(data, batch), record)
        crops = sample_crops(run.seed, epoch, batch['key'])
        np.testing.assert_array_equal(batch['latents'][:, 0, 0, 0], crops)
        drops = sample_drops(run.seed, epoch, batch['key'], 0.5)
        np.testing.assert_array_equal(batch['drop_text'], drops)


@pytest.mark.parametrize(('engine', 'examples'), [('rows', 12), ('chunks', 12), ('tf_data', FEW)])
def test_another_batch_size_goes_on_with_the_same_sequence(written, engine, examples):
    """From any sample, which need not be one that a batch of the new size begins with."""

    @settings(max_examples=examples)
    @given(run=runs(), parts=st.lists(st.integers(1, 30), min_size=2, max_size=4))
    def check(run: Run, parts: list[int]) -> None:
        data, sizes = written[run.shards], [part * run.lanes for part in parts]
        sample = run.start * run.batch_size // run.lanes
        expected = run.expected([size for size in sizes for _ in range(2)])
        for size, part in zip(sizes, parts, strict=True):
            asked = run.order_settings | {'batch_size': size, 'features': stored_dataset.FEATURES}
            for step in range(2):
                batches = input_pipeline.train_batches(
                    data.builder, engine=engine, start_sample=sample, start_step=step, **asked
                )
                record = records_of(data, next(batches))
                np.testing.assert_array_equal(record, expected.pop(0)[1])
            sample += 2 * part

    check()


# --- Choices about a sample --------------------------------------------------------------------


def choices(data: Written, run: Run) -> dict[tuple[int, int], tuple[int, bool]]:
    """`{(epoch, key): (crop, dropped)}` of all processes' batches, over an epoch and a half."""
    found = {}
    count = run.plan.steps * 3 // 2 + 1
    for step, batch in enumerate(read_together(data, run, count), run.start):
        epochs, _, _ = run.plan.batch(step)
        crops = batch['latents'][:, 0, 0, 0].astype(int)
        columns = (x.tolist() for x in (epochs, batch['key'], crops, batch['drop_text']))
        for epoch, key, crop, drop in zip(*columns, strict=True):
            found[epoch, key] = crop, drop
    return found


@settings(max_examples=FEW)
@given(
    several=SEEDS.flatmap(
        lambda seed: st.tuples(
            *[runs(shards=st.sampled_from(['unequal', 'even']), seeds=st.just(seed))] * 2
        )
    )
)
def test_crop_and_drop_of_a_key_in_an_epoch_are_the_same_in_every_run(written, several):
    first, second = (choices(written[run.shards], run) for run in several)
    common = first.keys() & second.keys()
    # Both data sets have the same first keys: what shards they lie in does not count either.
    assert {key: first[key] for key in common} == {key: second[key] for key in common}
    for found in (first, second):
        assert {crop for crop, _ in found.values()} == {0, 1, 2}
        assert {drop for _, drop in found.values()} == {False, True}


def test_the_next_epoch_chooses_anew(written):
    run = Run('unequal', batch_size=20, lanes=2)
    found = choices(written['unequal'], run)
    twice = [
        (found[0, key], found[1, key]) for epoch, key in found if epoch == 1 and (0, key) in found
    ]
    assert len(twice) > 100
    for choice in (0, 1):  # the crop, and whether the text is dropped
        assert any(first[choice] != second[choice] for first, second in twice)


# --- Evaluation --------------------------------------------------------------------------------


@settings(max_examples=FEW)
@given(
    shards=ANY_SHARDS,
    processes=st.integers(1, 4),
    local=st.integers(1, 40),
    chunk=st.sampled_from([32, 64, 320]),
)
@example(shards='with empty ones', processes=4, local=60, chunk=32)  # one has padding alone
@example(shards='of a single record', processes=3, local=20, chunk=64)  # no padding at all
def test_evaluation_reads_every_record_once_over_all_processes(
    written, shards, processes, local, chunk
):
    data = written[shards]
    parts = []
    for process in range(processes):
        arguments = dict(
            batch_size=processes * local,
            features=stored_dataset.FEATURES,
            split=schema.TRAIN,
            chunk=chunk,
            process_index=process,
            process_count=processes,
            parallel_reads=2,
            prefetch=1,
        )
        batches = input_pipeline.eval_dataset(data.builder, **arguments)
        parts.append(list(batches.as_numpy_iterator()))
        for engine in ('rows', 'chunks'):
            others = input_pipeline.eval_batches(data.builder, engine=engine, **arguments)
            assert_same(list(others), parts[-1])
        assert batches.cardinality() == len(parts[-1])
    assert {len(part) for part in parts} == {math.ceil(len(data.keys) / (processes * local))}
    batches = list(itertools.chain.from_iterable(parts))
    assert {len(x) for batch in batches for x in batch.values()} == {local}
    real = [{name: x[batch['mask']] for name, x in batch.items()} for batch in batches]
    seen = np.concatenate([records_of(data, batch) for batch in real])
    assert seen.tolist() == list(range(len(data.keys)))
    assert all((batch['latents'][:, 0, 0, 0] == 1).all() for batch in real), 'not the middle crop'
    assert not any(batch['latents'][~batch['mask']].any() for batch in batches)


# --- What a start costs ------------------------------------------------------------------------


def test_a_start_reads_the_same_few_chunks_wherever_it_is(written):
    """Of twelve chunks; windows are as long as one, so each is in two of them."""
    run = Run('even', batch_size=8, window=32)
    for start in (0, run.plan.steps - 1, run.plan.steps):
        counter = input_pipeline.ReadCounter()
        batches = input_pipeline.train_batches(
            written['even'].builder,
            engine='chunks',
            start_step=start,
            parallel_reads=1,
            prefetch=1,
            counter=counter,
            **run.order_settings,
        )
        next(batches)
        wait_until_idle(counter)
        # The batch's own window, the next one, and what the one after that begins with.
        assert 2 <= counter.read().num_chunks <= 6


# --- Numbers of processes that do not fit ------------------------------------------------------


@pytest.mark.parametrize(
    ('batch_size', 'lanes', 'processes'),
    [(16, 4, 3), (16, 4, 8), (12, 4, 6), (7, 7, 2), (1, 1, 8)],
)
def test_a_number_of_processes_that_does_not_fit_gets_settings_that_do(
    written, batch_size, lanes, processes
):
    """Advice that is followed leads to reading."""
    fields = {'batch_size': batch_size, 'lanes': lanes}
    make = functools.partial(
        input_pipeline.train_dataset,
        written['one'].builder,
        seed=0,
        chunk=32,
        process_count=processes,
    )
    with pytest.raises(ValueError, match='works') as error:
        make(**fields)
    advice = re.findall(r'(batch_size|lanes)=(\d+)', str(error.value).rpartition(';')[2])
    make(**fields | {name: int(value) for name, value in advice})
