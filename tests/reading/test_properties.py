"""What reading promises for any data set, any settings and any number of processes, from files.

`test_order.py` holds the plan to the contract; here the batches of all engines are held to it, over
shards of all lengths (empty ones too) and settings drawn at random.
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
from tests.reading.batches import assert_same, global_batches, wait_until_idle
from tests.reading.planned import Planned, settings_of

SHARDS = {
    'unequal': (70, 97, 64, 131, 33, 64, 40, 1),
    'with empty ones': (0, 45, 0, 0, 83, 32, 0),
    'one': (300,),
    'of a single record': (1,) * 60,
    'even': (64,) * 6,
}

FEATURES = (*stored_dataset.FEATURES, input_pipeline.CROP)

# Of tf.data there are few, as it makes a graph for every process.
EXAMPLES = pytest.mark.parametrize(
    ('engine', 'examples'), [('rows', 30), ('chunks', 30), ('tf_data', 2)]
)


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

    def expected(self, count: int) -> list[list[np.ndarray]]:
        """Batches from `start` on: of each the epochs and the numbers of its records."""
        first, sizes = np.cumsum([0, *SHARDS[self.shards]]), [self.batch_size] * count
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
            features=FEATURES,
            caption_dropout=0.5,
            start_step=self.start,
            **self.order_settings,
            **arguments,
        )


@st.composite
def runs(draw) -> Run:
    """Runs whose settings fit their data set, from any step of the first two epochs."""
    lanes = draw(st.integers(1, 6))
    run = Run(
        shards=draw(st.sampled_from(sorted(SHARDS))),
        batch_size=lanes * draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 2**64 - 1)),
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


def records_of(data: Written, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The numbers of a batch's records, after a check that all its features are of the same."""
    by_key = np.argsort(data.keys)
    record = by_key[np.searchsorted(data.keys, batch['key'], sorter=by_key)]
    np.testing.assert_array_equal(data.keys[record], batch['key'])
    np.testing.assert_array_equal(batch['latents'][:, 0, 0, 1], record)
    assert batch['crop'].dtype == np.int32
    np.testing.assert_array_equal(batch['crop'] + 1, batch['latents'][:, 0, 0, 0])
    np.testing.assert_array_equal(batch['text_embedding'][:, 0], record)
    assert batch['caption'].tolist() == [f'record {r}'.encode() for r in record]
    return record


@EXAMPLES
def test_batches_are_those_of_the_contract(written, engine, examples):
    """Whatever the processes and the start, over the ends of epochs."""

    @settings(max_examples=examples)
    @given(run=runs())
    @example(run=Run('unequal', 12, lanes=6, window=10**6, processes=2, start=20))  # window > lane
    @example(run=Run('with empty ones', 12, lanes=2, window=4, processes=2, start=7))  # < B/L
    @example(run=Run('unequal', 4, lanes=2, chunk=320, start=50))  # chunk > shard
    @example(run=Run('even', 64, lanes=2, chunk=64, window=1, start=5))  # each block is a batch
    @example(run=Run('one', 3, lanes=3, window=400, processes=3, start=150))  # several epochs in
    @example(run=Run('of a single record', 240, lanes=6, processes=3, start=1))  # 4 epochs a batch
    def check(run: Run) -> None:
        data, count = written[run.shards], 7
        batches = run.batches(data.builder, count, engine=engine)
        for batch, (epoch, record) in zip(batches, run.expected(count), strict=True):
            np.testing.assert_array_equal(records_of(data, batch), record)
            crops = sample_crops(run.seed, epoch, batch['key'], 3)
            np.testing.assert_array_equal(batch['latents'][:, 0, 0, 0], crops)
            drops = sample_drops(run.seed, epoch, batch['key'], 0.5)
            np.testing.assert_array_equal(batch['drop_text'], drops)

    check()


@settings(max_examples=2)
@given(
    shards=st.sampled_from(sorted(SHARDS)),
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
            features=FEATURES,
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
    for name in ('latents', 'crop'):
        assert not any(batch[name][~batch['mask']].any() for batch in batches)


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
        input_pipeline.train_batches,
        written['one'].builder,
        seed=0,
        chunk=32,
        process_count=processes,
    )
    with pytest.raises(ValueError, match='works') as error:
        make(**fields)
    advice = re.findall(r'(batch_size|lanes)=(\d+)', str(error.value).rpartition(';')[2])
    make(**fields | {name: int(value) for name, value in advice})
