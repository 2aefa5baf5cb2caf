"""Positions counted in samples: nothing comes twice when a run resumes with another batch size."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds.reading.order import Order
from train_lib.position import Position, carry_over

SETTINGS = {
    'data.dir': 'a',
    'seed': 0,
    'batch_size': 8,
    'data.chunk': 32,
    'data.lanes': 2,
    'data.window': 64,
}
SHARDS = (200, 97, 0, 333, 64, 150)


def _order(settings, shards=SHARDS):
    fields = {name.rpartition('.')[2]: value for name, value in settings.items()}
    del fields['dir']
    return Order(shards, **fields)


def _records(order, batch):
    return list(zip(*(numbers.tolist() for numbers in order.batch_records(batch)), strict=True))


@given(
    st.sampled_from([2, 4, 6, 8, 16, 34, 48]),
    st.sampled_from([2, 4, 6, 8, 16, 34, 48]),
    st.integers(0, 400),
)
def test_with_another_batch_size_an_epoch_goes_on_where_it_was(old_size, new_size, step):
    before, now = (SETTINGS | {'batch_size': size} for size in (old_size, new_size))
    former, order = _order(before), _order(now)
    place = carry_over(Position(), step, before, now, order)
    assert place.samples_at(step + 3, new_size) == step * old_size + 3 * new_size

    epoch, steps = former.locate(step)
    used = [r for i in range(steps) for r in _records(former, step - steps + i)]
    first = place.batch_at(step)
    rest = []
    for batch in range(first, first + 1000):
        if order.locate(batch)[0] != epoch:
            break
        rest += _records(order, batch)
    assert order.locate(batch) == (epoch + 1, 0)  # the next epoch from its beginning
    assert len(set(used + rest)) == len(used) + len(rest)  # none twice
    if rest:
        # Left out: less than one batch now, and the tail that the new size leaves of any epoch.
        whole = order.epoch(epoch).steps * new_size
        assert whole - new_size < len(used) + len(rest) <= whole


@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([2, 4, 6, 16])), min_size=1, max_size=4)
)
def test_changes_follow_each_other(changes):
    place, step, samples, settings = Position(), 0, 0, SETTINGS
    for steps, batch_size in changes:
        step += steps
        samples += steps * settings['batch_size']
        changed = settings | {'batch_size': batch_size}
        expected = _order(settings).locate(place.batch_at(step))
        used = expected[1] * settings['batch_size']
        place = carry_over(place, step, settings, changed, _order(changed))
        settings = changed
        assert place.samples_at(step, batch_size) == samples
        epoch, steps_in_it = _order(settings).locate(place.batch_at(step))
        if epoch == expected[0]:
            assert used <= steps_in_it * batch_size < used + batch_size
        else:
            assert (epoch, steps_in_it) == (expected[0] + 1, 0)


def test_a_run_that_changes_nothing_stays_where_it_is():
    place = Position(step=7, batch=3, samples=40)
    other = SETTINGS | {'num_steps': 5}
    assert carry_over(place, 9, SETTINGS, other, _order(SETTINGS)) == place
    assert place.batch_at(9) == 5


@pytest.mark.parametrize(
    'change', [{'data.lanes': 4}, {'data.chunk': 64}, {'data.window': 32}, {'seed': 1}]
)
def test_another_permutation_begins_at_the_same_share_of_the_epoch(change, caplog):
    caplog.set_level('INFO')
    now = SETTINGS | change
    step = _order(SETTINGS).epoch(0).steps + 11
    place = carry_over(Position(), step, SETTINGS, now, _order(now))
    assert _order(now).locate(place.batch_at(step)) == (1, 11)
    assert f'{step * 8} samples were used in {step} steps; reading resumes in epoch 1.' in (
        caplog.text
    )
    assert 'some records come twice and others not at all' in caplog.text


def test_another_data_set_is_read_from_its_beginning(caplog):
    caplog.set_level('INFO')
    now = SETTINGS | {'data.dir': 'b', 'batch_size': 16}
    order = dataclasses.replace(_order(now), shard_lengths=np.array([500]))
    place = carry_over(Position(), 30, SETTINGS, now, order)
    assert (place.batch_at(30), place.samples_at(31, 16)) == (0, 256)
    assert '240 samples were used in 30 steps; the other data set is read from its beg' in (
        caplog.text
    )


def test_without_a_planned_order_samples_are_counted_from_the_beginning():
    now = SETTINGS | {'batch_size': 48}
    assert carry_over(Position(), 31, SETTINGS, now, None) == Position(31, 6, 248)
