"""The planned order without files; `test_properties` compares it with a slow and obvious one."""

import hashlib
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds.dataset.keyed_random import Permutation
from coyo11m_tfds.sampling import order as order_lib
from coyo11m_tfds.sampling.order import Order, OrderSettings
from tests.reading.batches import planned_batch

LENGTHS = (130, 97, 64, 201, 33, 1)


def make_order(lengths=LENGTHS, **changes) -> Order:
    return Order(
        lengths, OrderSettings(**{'seed': 3, 'chunk': 32, 'lanes': 4, 'window': 48} | changes)
    )


def test_each_record_is_left_out_of_as_many_epochs_as_chance_allows():
    """Of 363 records and 4 lanes an epoch leaves out 3: each is in 99.2% of all epochs."""
    lengths = (130, 97, 64, 71, 1)
    order, epochs = make_order(lengths, chunk=64, window=1024), 3000
    first = np.cumsum([0, *lengths])
    seen = np.zeros(363)
    for epoch in range(epochs):
        found = order.samples(range(4), epoch * order.lane_length, (epoch + 1) * order.lane_length)
        seen += np.bincount((first[found.shard] + found.record).ravel(), minlength=363)
    share = 360 / 363
    chance = np.sqrt(share * (1 - share) / epochs)  # the standard deviation
    assert abs(seen.sum() / (363 * epochs) - share) < 1e-12
    assert (seen / epochs).std() < 1.2 * chance
    assert np.abs(seen / epochs - share).max() < 5 * chance


def test_the_order_of_many_records_stays_what_it_was_in_earlier_versions():
    """Checkpoints name a place in this order; the goldens have that of few records."""
    order = make_order((2_000_003, 2_500_000), seed=1, lanes=16, window=1024)
    batches = [planned_batch(order, 64, step) for step in (0, 20, 44, 160)]
    found = np.concatenate([np.stack(batch, axis=1) for batch in batches])
    assert hashlib.sha256(found.astype('<i8').tobytes()).hexdigest()[:16] == 'f992c08af0095783'


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any),
    st.integers(-1, 200),
    st.integers(-1, 64),
    st.integers(-1, 300),
)
def test_what_an_error_advises_leads_to_settings_that_work(lengths, chunk, lanes, window):
    changes = dict(chunk=chunk, lanes=lanes, window=window)
    for _ in range(5):  # advice on chunk, on window, twice on lanes, and no more
        try:
            order = make_order(lengths, **changes)
            break
        except ValueError as error:
            asked, advice = str(error).split(';')
            found = {k: int(v) for k, v in re.findall(r'(\w+)=(-?\d+)', advice)}
            assert all(f'{name}={changes[name]}' in asked for name in found)
            changes |= found
    else:
        pytest.fail(f'{changes} are refused after all advice')
    assert len(planned_batch(order, 7 * order.settings.lanes, 5)[0]) == 7 * order.settings.lanes


def test_too_few_records_are_told_in_numbers():
    with pytest.raises(ValueError, match='11 records are fewer than lanes=16; lanes=8 works'):
        make_order((7, 0, 4), lanes=16)
    with pytest.raises(ValueError, match='there are no records in 2 shards'):
        make_order((0, 0))


@settings(max_examples=15)
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
    size, keys = 2**16 + 3, 150
    some = np.arange(0, size - 1, 97)
    box = np.zeros(256)
    for key in range(keys):
        permutation = Permutation(size, key)
        here = permutation.apply(some) * 16 // size
        right = permutation.apply(some + 1) * 16 // size
        box += np.bincount(here * 16 + right, minlength=256)
    assert chi_square(box) < 350  # 255 degrees of freedom: more in one case of 30,000


@given(
    seed=st.integers(0, 2**64 - 1),
    samples=st.lists(st.tuples(st.integers(0, 100), st.integers(-(2**63), 2**63 - 1)), max_size=5),
)
def test_choices_about_a_sample_depend_on_its_epoch_and_key_alone(seed, samples):
    """A batch may span the end of an epoch."""
    epochs, keys = np.array([*samples, *samples], np.int64).reshape(-1, 2).T
    for choose in (
        lambda *where: order_lib.sample_crops(seed, *where, 3),
        lambda *where: order_lib.sample_drops(seed, *where, 0.5),
        lambda *where: order_lib.sample_texts(seed, *where, (1, 1, 2)),
    ):
        alone = [choose(epoch, np.array([key]))[0] for epoch, key in samples]
        together = choose(epochs, keys)
        assert together.tolist() == [*alone, *alone]
        assert ((together >= 0) & (together <= 3)).all()


def test_choices_are_evenly_distributed_and_independent():
    keys = np.arange(60_000)
    crops = order_lib.sample_crops(1, 0, keys, 3)
    drops = order_lib.sample_drops(1, 0, keys, 0.25)
    for seed, epoch in [(1, 1), (2, 0)]:
        others = order_lib.sample_crops(seed, epoch, keys, 3)
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
    crops, drops = order_lib.sample_crops(1, 0, keys, 3), order_lib.sample_drops(1, 0, keys, 0.5)
    others = [crops, drops] + [
        order_lib.sample_texts(seed, epoch, keys, (3, 1, 2)) for seed, epoch in [(1, 1), (2, 0)]
    ]
    for other in others:
        for value in range(other.max() + 1):
            share_there = np.bincount(texts[other == value], minlength=3) / (other == value).sum()
            assert np.abs(share_there - share).max() < 0.02
    np.testing.assert_array_equal(texts, order_lib.sample_texts(1, 0, keys, (6, 2, 4)))
    assert not order_lib.sample_texts(1, 0, keys, (5,)).any()


def test_a_billion_records_are_planned_in_little_memory():
    lengths = np.random.default_rng(0).integers(5000, 5500, 190_000)
    tracemalloc.start()
    order = Order(lengths, OrderSettings(seed=0, lanes=256))
    order.samples(range(200, 216), 10**9, 10**9 + 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert order.num_records > 990_000_000
    assert peak < 100e6
