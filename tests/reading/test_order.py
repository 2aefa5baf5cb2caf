"""The planned order, checked against a slow and obvious one, without files."""

import dataclasses
import hashlib
import itertools
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds import schema
from coyo11m_tfds.keyed_random import Permutation, derive, splitmix64
from coyo11m_tfds.reading import order as order_lib
from coyo11m_tfds.reading.order import Order

LENGTHS = (130, 97, 64, 201, 33, 1)


def make_order(**changes) -> Order:
    settings = dict(seed=3, batch_size=8, chunk=32, lanes=4, window=48)
    return Order(LENGTHS, **{**settings, **changes})


@st.composite
def orders(draw) -> Order:
    """Orders whose every lane is sure to hold a batch."""
    lane_batch = draw(st.integers(1, 9))
    lanes = draw(st.integers(1, 6))
    chunk = draw(st.sampled_from([32, 64, 96]))
    full = draw(st.integers(lanes, 3 * lanes)) * chunk
    lengths = [*draw(st.lists(st.integers(0, 300), max_size=6)), full + lanes * chunk * 5]
    return Order(
        lengths,
        seed=draw(st.integers(0, 2**64 - 1)),
        batch_size=lane_batch * lanes,
        chunk=chunk,
        lanes=lanes,
        window=draw(st.integers(1, 400)),
    )


def naive_lanes(order: Order, epoch: int, window: int) -> list[list[tuple[int, int]]]:
    """Every lane's (shard, record) in the order of an epoch, written out as the contract says."""
    chunks = [
        [(shard, record) for record in range(first, min(first + order.chunk, length))]
        for shard, length in enumerate(order.shard_lengths)
        for first in range(0, length, order.chunk)
    ]
    key = int(derive(order.seed, order_lib.CHUNKS, epoch))
    visited = Permutation(len(chunks), key).apply(np.arange(len(chunks)))
    lanes = [
        [record for chunk in visited[lane :: order.lanes] for record in chunks[chunk]]
        for lane in range(order.lanes)
    ]
    return [
        naive_shuffle(records, window, lambda w, lane=lane: (order.seed, epoch, lane, w))
        for lane, records in enumerate(lanes)
    ]


def naive_shuffle(records: list, window: int, key_of_window) -> list:
    shuffled = []
    for number, start in enumerate(range(0, len(records), window)):
        inside = records[start : start + window]
        seed, *numbers = key_of_window(number)
        key = derive(seed, order_lib.WINDOWS, *numbers)
        hashes = [int(splitmix64(key ^ np.uint64(i))) for i in range(len(inside))]
        shuffled += [inside[i] for i in sorted(range(len(inside)), key=hashes.__getitem__)]
    return shuffled


def naive_batches(order: Order, epoch: int, window: int) -> list[list[tuple[int, int]]]:
    lanes, size = naive_lanes(order, epoch, window), order.batch_size // order.lanes
    steps = min(map(len, lanes)) // size
    return [
        [record for lane in lanes for record in lane[step * size : (step + 1) * size]]
        for step in range(steps)
    ]


def planned_batch(order: Order, step: int) -> list[tuple[int, int]]:
    return list(zip(*(x.tolist() for x in order.batch_records(step)), strict=True))


def read_lane(order: Order, lane: int, start_step: int, steps: int) -> list[tuple[int, int]]:
    """Does in memory with a lane's reads and windows what the pipeline does with files."""
    epoch, step = order.locate(start_step)
    records, given = [], []
    while len(given) < steps * order.lane_batch:
        plan = order.epoch(epoch)
        for reads in plan.lane_reads(lane, step, block=3):
            for _, shard, first, skip, count, pad in zip(
                *map(np.ndarray.tolist, reads), strict=True
            ):
                records += [(shard, first + skip + i) for i in range(count)] + [None] * pad
        for block in plan.lane_windows(lane, step, block=2):
            for window in block:
                assert len(records) >= order.window, 'the reads of an epoch make whole windows'
                given += [records[i] for i in window if i >= 0]
                del records[: order.window]
        assert not records, 'an epoch reads nothing for the next one'
        epoch, step = epoch + 1, 0
    return given[: steps * order.lane_batch]


@settings(deadline=None, max_examples=25)
@given(orders(), st.integers(1, 2000))
def test_batches_are_those_of_the_contract(order, window):
    order = dataclasses.replace(order, window=window)
    batches = naive_batches(order, 0, window) + naive_batches(order, 1, window)
    assert order.epoch(0).steps + order.epoch(1).steps == len(batches)
    for step in {0, 1, len(batches) // 2, len(batches) - 1}:
        assert planned_batch(order, step) == batches[step]


@settings(deadline=None, max_examples=25)
@given(orders(), st.data())
def test_processes_read_their_parts_of_the_planned_batches_from_any_step(order, data):
    """Of a number of processes that divides the lanes, each of which has only its own plan."""
    two_epochs = order.epoch(0).steps + order.epoch(1).steps
    start = data.draw(st.integers(0, two_epochs))
    processes = data.draw(st.sampled_from(order_lib.divisors(order.lanes)))
    steps = min(order.epoch(0).steps + 2, 20)
    lanes, size = [], order.lane_batch
    for own in np.split(np.arange(order.lanes), processes):
        plan = dataclasses.replace(order)
        lanes += [read_lane(plan, int(lane), start, steps) for lane in own]
    for step in range(steps):
        batch = [record for lane in lanes for record in lane[step * size : (step + 1) * size]]
        assert batch == planned_batch(order, start + step)


@settings(deadline=None, max_examples=25)
@given(orders(), st.data())
def test_a_start_reads_less_than_a_window_and_a_chunk_in_vain(order, data):
    step = data.draw(st.integers(0, order.epoch(0).steps - 1))
    epoch = order.epoch(0)
    for lane in range(order.lanes):
        reads = [np.concatenate(x) for x in zip(*epoch.lane_reads(lane, step), strict=True)]
        reads = order_lib.Reads(*reads)
        assert (reads.first % schema.CHUNK_STRIDE == 0).all()
        assert ((reads.count > 0) & (reads.skip >= 0) & (reads.pad >= 0)).all()
        ends = reads.first + reads.skip + reads.count
        assert (ends <= order.shard_lengths[reads.shard]).all()
        wanted = (epoch.steps - step) * order.lane_batch
        # At the start what the window has given before; at the end what the last window leaves.
        assert (reads.skip + reads.count).sum() < wanted + 2 * (order.window + order.chunk)
        chunks = np.stack([reads.shard, reads.first // order.chunk])
        assert np.unique(chunks, axis=1).shape == chunks.shape, 'a chunk is read twice'


@settings(deadline=None, max_examples=25)
@given(orders(), st.integers(0, 3))
def test_an_epoch_has_each_record_once_except_for_a_tail(order, number):
    """The tail is what lanes have left over when the shortest cannot fill its part of a batch."""
    epoch = order.epoch(number)
    start = sum(order.epoch(e).steps for e in range(number))
    batches = [planned_batch(order, start + step) for step in range(epoch.steps)]
    records = list(itertools.chain.from_iterable(batches))
    assert len(set(records)) == len(records) == epoch.steps * order.batch_size
    assert all(0 <= record < order.shard_lengths[shard] for shard, record in records)
    left_over = epoch.lane_lengths - epoch.steps * order.lane_batch
    assert 0 <= left_over.min() < order.lane_batch
    assert len(records) + left_over.sum() == order.shard_lengths.sum()


def test_each_epoch_leaves_out_other_records():
    order = make_order(batch_size=40)
    everything = {(s, r) for s, length in enumerate(LENGTHS) for r in range(length)}
    left_out, step = [], 0
    for epoch in range(6):
        seen = set()
        for _ in range(order.epoch(epoch).steps):
            seen |= set(planned_batch(order, step))
            step += 1
        left_out.append(frozenset(everything - seen))
    assert all(left_out) and len(set(left_out)) == 6
    assert not frozenset.intersection(*left_out), 'some records are never seen'


def test_seed_and_epoch_decide_the_order():
    first = planned_batch(make_order(), 0)
    assert planned_batch(make_order(), 0) == first
    assert planned_batch(make_order(seed=4), 0) != first
    order = make_order()
    assert planned_batch(order, order.epoch(0).steps) != first


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**32),
    st.integers(1, 2**32),
    st.sampled_from([1, 2, 4]),
    st.integers(20, 200),
)
def test_another_seed_or_epoch_is_another_order(seed, to_other, epoch, to_later, lanes, window):
    """Of the chunks as of the records in a window; 20 of them cannot come again by chance."""
    lengths = (32 * 40, 32 * 40 + 7)

    def chunks_and_windows(seed: int, epoch: int) -> list[list]:
        order = Order(lengths, seed, batch_size=8, chunk=32, lanes=lanes, window=window)
        plan = order.epoch(epoch)
        (reads,), windows = plan.lane_reads(0), next(plan.lane_windows(0))
        return [np.stack([reads.shard, reads.first]).tolist(), windows[0].tolist()]

    first = chunks_and_windows(seed, epoch)
    assert chunks_and_windows(seed, epoch) == first
    for other in (((seed + to_other) % 2**64, epoch), (seed, epoch + to_later)):
        chunks, windows = chunks_and_windows(*other)
        assert chunks != first[0] and windows != first[1]


def test_the_order_stays_what_it_was_in_earlier_versions():
    """Checkpoints name a place in this order: a change would make them mean another place."""

    def digest_of(arrays: list[np.ndarray]) -> str:
        return hashlib.sha256(np.concatenate(arrays).astype('<i8').tobytes()).hexdigest()[:16]

    def digest(order: Order) -> str:
        return digest_of([np.stack(order.batch_records(step)) for step in (0, 5, 11, 40)])

    assert digest(make_order()) == '2a97816a5958b05a'
    large = Order((2_000_003, 2_500_000), seed=1, batch_size=64, chunk=32)
    assert digest(large) == '3bd1bae587a8c61f'
    keys = np.arange(-500, 500) * 2**53
    choices = [order_lib.sample_crops(2, 3, keys), order_lib.sample_drops(2, 3, keys, 0.1)]
    assert digest_of(choices) == '1fb42cbbb8da5710'
    assert digest_of([order_lib.sample_texts(2, 3, keys, (2, 1, 0.5))]) == '80ccd4757252007c'


def test_locate_counts_steps_over_epochs():
    order = make_order()
    steps = [order.epoch(e).steps for e in range(3)]
    assert order.locate(0) == (0, 0)
    assert order.locate(steps[0] - 1) == (0, steps[0] - 1)
    assert order.locate(steps[0]) == (1, 0)
    assert order.locate(sum(steps) + 1) == (3, 1)
    with pytest.raises(ValueError, match='step=-1'):
        order.locate(-1)


@pytest.mark.parametrize(
    'changes',
    [
        dict(chunk=48),
        dict(chunk=0),
        dict(window=0),
        dict(lanes=3),
        dict(lanes=0),
        dict(batch_size=0),
        dict(lanes=32, batch_size=32),
        dict(chunk=256),
        dict(batch_size=512, chunk=64),
    ],
)
def test_an_error_names_settings_that_work(changes):
    with pytest.raises(ValueError) as error:
        make_order(**changes)
    name, value = next(iter(changes.items()))
    assert f'{name}={value}' in str(error.value)
    advice = re.findall(r'(\w+)=(\d+)', str(error.value).split(';')[1])
    assert make_order(**{**changes, **{k: int(v) for k, v in advice}}).epoch(0).steps > 0


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any),
    st.integers(-1, 64),
    st.integers(-1, 200),
    st.integers(-1, 20),
    st.integers(0, 300),
)
def test_what_an_error_advises_leads_to_settings_that_work(lengths, batch, chunk, lanes, window):
    """And what is accepted has a batch in every epoch, whatever its permutation of the chunks."""
    settings = dict(batch_size=batch, chunk=chunk, lanes=lanes, window=window)
    for _ in range(5):  # advice on chunk, on window, on lanes, on all together, and no more
        try:
            order = Order(lengths, seed=0, **settings)
            break
        except ValueError as error:
            advice = str(error).split(';')[1].replace('batch_size of at most ', 'batch_size=')
            settings |= {k: int(v) for k, v in re.findall(r'(\w+)=(\d+)', advice)}
    else:
        pytest.fail(f'{settings} are refused after all advice')
    assert all(order.epoch(epoch).steps > 0 for epoch in range(4))


def test_too_large_a_batch_says_how_many_records_there_are():
    with pytest.raises(ValueError, match='a batch_size of at most 526 with lanes=1 works'):
        make_order(batch_size=1024)
    assert make_order(batch_size=526, lanes=1).epoch(0).steps == 1
    with pytest.raises(ValueError, match='no records'):
        Order((), seed=0, batch_size=1, lanes=1)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=6).filter(sum),
    st.lists(st.integers(0, 1200), max_size=3),
    st.sampled_from([32, 64]),
)
def test_consecutive_reads_are_all_records_in_order(lengths, cuts, chunk):
    total = sum(lengths)
    cuts = [0, *sorted(min(cut, total) for cut in cuts), total]
    got = []
    for begin, end in itertools.pairwise(cuts):
        reads = order_lib.consecutive_reads(np.array(lengths), begin, end, chunk)
        assert (reads.skip + reads.count <= chunk + schema.CHUNK_STRIDE).all()
        for _, shard, first, skip, count, _ in zip(*map(np.ndarray.tolist, reads), strict=True):
            got += [(shard, first + skip + i) for i in range(count)]
    assert got == [(shard, i) for shard, length in enumerate(lengths) for i in range(length)]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 300) | st.integers(2**16 - 2, 2**16 + 2) | st.integers(2**18 - 2, 2**18 + 2),
    st.integers(0, 2**64 - 1),
)
def test_permutation_is_one_and_can_be_inverted(size, key):
    permutation = Permutation(size, key)
    values = permutation.apply(np.arange(size))
    assert np.array_equal(np.bincount(values, minlength=size), np.ones(size))
    assert np.array_equal(permutation.invert(values), np.arange(size))


def chi_square(counts: np.ndarray) -> float:
    expected = counts.mean()
    return float(((counts - expected) ** 2).sum() / expected)


def test_small_permutations_are_equally_frequent():
    seen = [tuple(Permutation(4, key).apply(np.arange(4)).tolist()) for key in range(4800)]
    _, counts = np.unique(seen, axis=0, return_counts=True)
    assert len(counts) == 24
    assert chi_square(counts) < 60  # 23 degrees of freedom: more in one case of 30,000


def test_large_permutations_are_uniform():
    """Where a value and its right neighbour go, counted in 16 x 16 boxes over many keys."""
    size, keys = 2**16 + 3, 400
    some = np.arange(0, size - 1, 97)
    box = np.zeros(256)
    for key in range(keys):
        permutation = Permutation(size, key)
        here = permutation.apply(some) * 16 // size
        right = permutation.apply(some + 1) * 16 // size
        box += np.bincount(here * 16 + right, minlength=256)
    assert chi_square(box) < 350  # 255 degrees of freedom: more in one case of 30,000


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(-(2**63), 2**63 - 1))
def test_choices_about_a_sample_depend_on_nothing_else(seed, epoch, key):
    keys = np.array([key, 5, key])
    crops = order_lib.sample_crops(seed, epoch, keys)
    assert crops[0] == crops[2] == order_lib.sample_crops(seed, epoch, keys[:1])[0]
    drops = order_lib.sample_drops(seed, epoch, keys, 0.5)
    assert drops[0] == drops[2] == order_lib.sample_drops(seed, epoch, keys[:1], 0.5)[0]


def test_choices_are_evenly_distributed_and_independent():
    keys = np.arange(60_000)
    crops = order_lib.sample_crops(1, 0, keys)
    drops = order_lib.sample_drops(1, 0, keys, 0.25)
    for seed, epoch in [(1, 1), (2, 0)]:
        others = order_lib.sample_crops(seed, epoch, keys)
        together = np.bincount(crops * 6 + others * 2 + drops, minlength=18).reshape(9, 2)
        assert chi_square(together[:, 0]) < 40 and chi_square(together[:, 1]) < 40  # 8 degrees
        other_drops = order_lib.sample_drops(seed, epoch, keys, 0.25)
        assert abs((drops & other_drops).mean() - 0.25**2) < 0.005
    assert abs(drops.mean() - 0.25) < 0.01
    assert not order_lib.sample_drops(1, 0, keys, 0.0).any()
    assert order_lib.sample_drops(1, 0, keys, 1.0).all()


def test_a_text_is_taken_in_shares_by_weight_whatever_else_is_chosen():
    keys = np.arange(60_000)
    texts = order_lib.sample_texts(1, 0, keys, (3, 1, 2))
    share = np.bincount(texts, minlength=3) / len(keys)
    assert np.abs(share - [1 / 2, 1 / 6, 1 / 3]).max() < 0.01
    crops, drops = order_lib.sample_crops(1, 0, keys), order_lib.sample_drops(1, 0, keys, 0.5)
    others = [crops, drops] + [
        order_lib.sample_texts(seed, epoch, keys, (3, 1, 2)) for seed, epoch in [(1, 1), (2, 0)]
    ]
    for other in others:
        for value in range(other.max() + 1):
            share_there = np.bincount(texts[other == value], minlength=3) / (other == value).sum()
            assert np.abs(share_there - share).max() < 0.02
    np.testing.assert_array_equal(texts, order_lib.sample_texts(1, 0, keys, (6, 2, 4)))
    assert not order_lib.sample_texts(1, 0, keys, (5,)).any()


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(-(2**63), 2**63 - 1))
def test_the_text_of_a_sample_depends_on_nothing_else(seed, epoch, key):
    keys = np.array([key, 5, key])
    texts = order_lib.sample_texts(seed, epoch, keys, (1, 1, 1e-9, 1e9))
    assert texts.min() >= 0 and texts.max() <= 3
    assert texts[0] == texts[2] == order_lib.sample_texts(seed, epoch, keys[:1], (1, 1, 1e-9, 1e9))


def test_a_billion_records_are_planned_in_little_memory():
    lengths = np.random.default_rng(0).integers(5000, 5500, 190_000)
    tracemalloc.start()
    order = Order(lengths, seed=0, batch_size=4096, lanes=256)
    epoch, step = order.locate(1_000_000)
    next(order.epoch(epoch).lane_reads(200, step))
    next(order.epoch(epoch).lane_windows(200, step))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert order.shard_lengths.sum() > 990_000_000
    assert peak < 100e6
