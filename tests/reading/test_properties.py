"""What reading promises for any data set, any settings and any number of processes, from files.

`test_order.py` holds the plan to the contract. Here the batches of all engines are held to it,
from records and from latents in place, on a disk and in a bucket.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.sampling.order import Order, OrderSettings, sample_crops, sample_drops
from tests import built
from tests.fakes.cloud import Gcs, fake_gcs
from tests.reading import naive_order, small_dataset
from tests.reading.batches import Batch, assert_same, joined, planned_batch, wait_until_idle

SHARDS = {
    'unequal': (70, 97, 64, 131, 33, 64, 40, 1),
    'with_empty_ones': (0, 45, 0, 0, 83, 32, 0),
    'one': (300,),
    'of_a_single_record': (1,) * 60,
    'even': (64,) * 6,
}
FORMS = ('records', 'in place', 'in a bucket')
FEATURES = (*stored_dataset.FEATURES, input_pipeline.CROP)
COUNT = 7  # batches of a run


def global_batches(data: object, processes: int, count: int, **arguments) -> list[Batch]:
    """`count` global batches of `train_batches`, put together from those of every process."""
    return joined(
        itertools.islice(
            input_pipeline.train_batches(
                data, process_index=process, process_count=processes, **arguments
            ),
            count,
        )
        for process in range(processes)
    )


class Written:
    """A data set: `paths` of all its `FORMS`, `keys` in the order of the shards."""

    def __init__(self, paths: dict[str, str], keys: np.ndarray):
        self.paths, self.keys = paths, keys


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
    def settings(self) -> OrderSettings:
        return OrderSettings(self.seed, self.chunk, self.lanes, self.window)

    @property
    def order(self) -> Order:
        return Order(SHARDS[self.shards], self.settings)

    @property
    def steps(self) -> int:
        """Whole batches of an epoch."""
        return self.order.lane_length * self.lanes // self.batch_size

    def planned(self, step: int) -> list[np.ndarray]:
        """Epoch, shard and record of each sample of a batch after `start`."""
        return planned_batch(self.order, self.batch_size, self.start + step)

    def expected(self) -> list[list[np.ndarray]]:
        """Batches from `start` on: of each the epochs and the numbers of its records."""
        first, sizes = np.cumsum([0, *SHARDS[self.shards]]), [self.batch_size] * COUNT
        start = self.start * self.batch_size // self.lanes
        shards = [list(range(length)) for length in SHARDS[self.shards]]
        weights = [Fraction(1)]
        batches = naive_order.mixture(
            [shards], [self.settings], lambda step: weights, sizes, start=start
        )
        found = [np.array(batch).T for batch in batches]
        return [[epoch, first[shard] + record] for _, epoch, shard, record in found]

    def batches(self, data, **arguments) -> list[dict[str, np.ndarray]]:
        """Batches from `start` on, put together from those of every process."""
        order = dataclasses.asdict(self.settings) | {'batch_size': self.batch_size}
        asked = dict(features=FEATURES, caption_dropout=0.5, start_step=self.start, **order)
        return global_batches(data, self.processes, COUNT, **asked, **arguments)


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
    return dataclasses.replace(run, start=draw(st.integers(0, 2 * run.steps + 1)))


ODD_RUNS = [
    Run('unequal', 12, lanes=6, window=10**6, processes=2, start=20),  # window > lane
    Run('with_empty_ones', 12, lanes=2, window=4, processes=2, start=7),  # < B/L
    Run('unequal', 4, lanes=2, chunk=320, start=50),  # chunk > shard
    Run('one', 3, lanes=3, window=400, processes=3, start=150),  # several epochs in
    Run('even', 64, lanes=2, chunk=64, window=1, start=5),  # each block is a batch
    Run('of_a_single_record', 240, lanes=6, processes=3, start=1),  # 4 epochs a batch
]


@pytest.fixture(scope='module')
def server(tmp_path_factory) -> Iterator[Gcs]:
    with pytest.MonkeyPatch.context() as patch, fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        for variable, value in server.env.items():
            patch.setenv(variable, value)
        yield server


@pytest.fixture(scope='module')
def written(server, tmp_path_factory) -> dict[str, Written]:
    return {name: write(server, tmp_path_factory.mktemp(name), name) for name in SHARDS}


def write(server: Gcs, folder: pathlib.Path, name: str) -> Written:
    splits, url = {schema.TRAIN: SHARDS[name]}, f'gs://data/{name}'
    records, in_place, uploaded = (folder / form / schema.VERSION for form in FORMS)
    keys = small_dataset.write(records, splits)[schema.TRAIN]
    for path in (in_place, uploaded):
        small_dataset.write(path, splits, source=path.parent / 'source')
    server.upload_folder(uploaded.parent / 'source', f'{url}/source')
    small_dataset.redirect(uploaded, f'{url}/source')
    server.upload_folder(uploaded, f'{url}/{schema.VERSION}')
    paths = str(records), str(in_place), f'{url}/{schema.VERSION}'
    return Written(dict(zip(FORMS, paths, strict=True)), keys)


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


@pytest.mark.parametrize(
    ('form', 'engine', 'examples'),
    [
        ('records', 'rows', 5),
        ('records', 'chunks', 4),
        ('records', 'tf_data', 1),  # it makes a graph for every process
        ('in place', 'rows', 4),
        ('in place', 'chunks', 2),
        ('in a bucket', 'chunks', 2),
    ],
)
def test_batches_are_those_of_the_contract(written, form, engine, examples):
    """Whatever the processes and the start, over the ends of epochs."""

    def check(run: Run) -> None:
        data = written[run.shards]
        batches = run.batches(data.paths[form], engine=engine)
        for batch, (epoch, record) in zip(batches, run.expected(), strict=True):
            np.testing.assert_array_equal(records_of(data, batch), record)
            crops = sample_crops(run.seed, epoch, batch['key'], 3)
            np.testing.assert_array_equal(batch['latents'][:, 0, 0, 0], crops)
            drops = sample_drops(run.seed, epoch, batch['key'], 0.5)
            np.testing.assert_array_equal(batch['drop_text'], drops)

    for run in ODD_RUNS[:: 3 if engine == 'tf_data' else 1]:
        check(run)
    settings(max_examples=examples)(given(runs())(check))()


@settings(max_examples=1)
@given(
    shards=st.sampled_from(sorted(SHARDS)),
    processes=st.integers(1, 4),
    local=st.integers(1, 40),
    chunk=st.sampled_from([32, 64, 320]),
)
@example(shards='with_empty_ones', processes=4, local=60, chunk=32)  # one has padding alone
@example(shards='of_a_single_record', processes=3, local=20, chunk=64)  # no padding at all
def test_evaluation_reads_every_record_once_over_all_processes(
    written, shards, processes, local, chunk
):
    data = written[shards]
    path, parts = data.paths['records'], []
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
        batches = input_pipeline.eval_dataset(path, **arguments)
        parts.append(list(batches.as_numpy_iterator()))
        for engine in ('rows', 'chunks'):
            others = input_pipeline.eval_batches(path, engine=engine, **arguments)
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
    for start in (0, run.steps - 1, run.steps):
        counter = input_pipeline.ReadCounter()
        batches = input_pipeline.train_batches(
            written['even'].paths['records'],
            batch_size=8,
            engine='chunks',
            start_step=start,
            parallel_reads=1,
            prefetch=1,
            counter=counter,
            **dataclasses.asdict(run.settings),
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
    fields = {'batch_size': batch_size, 'lanes': lanes}
    path = written['one'].paths['records']
    asked = {'seed': 0, 'chunk': 32, 'process_count': processes}
    with pytest.raises(ValueError, match='works') as error:
        input_pipeline.train_batches(path, **asked, **fields)
    advice = re.findall(r'(batch_size|lanes)=(\d+)', str(error.value).rpartition(';')[2])
    fields |= {name: int(value) for name, value in advice}
    input_pipeline.train_batches(path, **asked, **fields)


# --- Damaged records ---------------------------------------------------------------------------

# What one byte that is changed belongs to; or the file ends there.
KINDS = ('length', 'value', 'checksum', 'end')


def damaged(data: bytes, record: int, kind: str) -> bytes:
    """A shard, of which a record, or what follows it, cannot be read."""
    sizes = [16 + len(x) for x in built.split_records(data)]
    begin, end = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))[record]
    if kind == 'end':
        return data[: end - 1]
    at = {'length': begin, 'value': end - 5, 'checksum': end - 1}[kind]
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@contextlib.contextmanager
def all_damaged(server: Gcs, data: Written, damages: dict[int, tuple[int, str]]) -> Iterator[None]:
    """In its `with` block records are damaged in all forms: by shards a number and a kind."""
    with contextlib.ExitStack() as stack:
        for folder in data.paths.values():
            for shard, (record, kind) in damages.items():
                content, put = open_shard(server, folder, f'.tfrecord-{shard:05}-of-')
                stack.callback(put, content)
                put(damaged(content, record, kind))
        yield


def open_shard(server: Gcs, folder: str, name: str) -> tuple[bytes, Callable[[bytes], None]]:
    """The content of a file, and what puts another one in its place."""
    if folder.startswith('gs://'):
        bucket, _, prefix = folder.removeprefix('gs://').partition('/')
        objects = server.objects(bucket)
        [found] = [x for x in objects if x.startswith(prefix) and name in x]
        return objects[found], functools.partial(server.put, bucket, found)
    [file] = pathlib.Path(folder).glob(f'*{name}*')
    return file.read_bytes(), functools.partial(replace, file)


def replace(file: pathlib.Path, data: bytes) -> None:
    """By another file: what is mapped must not be truncated."""
    new = file.with_suffix('.new')
    new.write_bytes(data)
    os.replace(new, file)


def may_be_lost(damages: dict[int, tuple[int, str]], shard: int, record: int) -> bool:
    """Its value costs a record; all else costs the run that the index describes, or all behind."""
    at, kind = damages.get(shard, (record + 1, 'value'))
    if kind == 'value':
        return record == at
    run, other = record // schema.CHUNK_STRIDE, at // schema.CHUNK_STRIDE
    return run >= other if kind == 'end' else run == other


@settings(max_examples=5)
@given(
    run=st.builds(
        Run,
        shards=st.sampled_from(['unequal', 'with_empty_ones', 'even']),
        batch_size=st.integers(1, 9).map(lambda n: 4 * n),
        seed=st.integers(0, 2**64 - 1),
        chunk=st.sampled_from([32, 64]),
        lanes=st.just(4),
        window=st.integers(1, 200),
        processes=st.sampled_from([1, 2, 4]),
        start=st.integers(0, 60),
    ),
    places=st.lists(
        st.tuples(st.integers(0, COUNT - 1), st.integers(0, 35), st.sampled_from(KINDS)),
        min_size=1,
        max_size=4,
    ),
)
def test_what_is_damaged_is_left_out_alike_and_nothing_else_changes(server, written, run, places):
    """Each place is one of a record in a batch that is read."""
    damages = {}
    for step, place, kind in places:
        _, shard, record = (x[place % run.batch_size] for x in run.planned(step))
        damages[int(shard)] = int(record), kind
    data, skip = written[run.shards], {'on_bad_records': 'skip', 'max_bad_fraction': 1}
    with all_damaged(server, data, damages):
        expected = run.batches(data.paths['in place'], engine='rows', **skip)
        for form, engine in zip(FORMS, ('rows', 'chunks', 'chunks'), strict=True):
            assert_same(run.batches(data.paths[form], engine=engine, **skip), expected)
    whole = run.batches(data.paths['in place'], engine='rows')
    lost = set()
    for step, (batch, before) in enumerate(zip(expected, whole, strict=True)):
        mask = batch.pop('mask')
        _, shards, numbers = run.planned(step)
        lost |= set(zip(shards[~mask].tolist(), numbers[~mask].tolist(), strict=True))
        for name, values in before.items():
            np.testing.assert_array_equal(batch[name][mask], values[mask])
        assert not any(batch[name][~mask].any() for name in batch.keys() - {'caption', 'drop_text'})
        assert set(batch['caption'][~mask]) <= {b''}
    assert {(shard, record) for shard, (record, _) in damages.items()} <= lost
    assert all(may_be_lost(damages, *place) for place in lost)
