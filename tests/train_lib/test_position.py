"""Positions counted in samples: a run resumes with another batch size where it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from input_pipeline import Order, OrderSettings
from train_lib.position import Position, carry_over

SETTINGS = {
    'data.dir': 'a',
    'seed': 0,
    'batch_size': 8,
    'data.chunk': 32,
    'data.lanes': 2,
    'data.window': 64,
}
ORDER = Order((200, 97, 0, 333, 64, 150), OrderSettings(seed=0, chunk=32, lanes=2, window=64))


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([2, 4, 6, 16, 34])), min_size=1, max_size=4
    )
)
def test_with_other_batch_sizes_a_run_goes_on_less_than_a_batch_further_on(changes):
    place, step, samples, settings = Position(), 0, 0, SETTINGS
    for steps, batch_size in changes:
        step += steps
        samples += steps * settings['batch_size']
        used = place.batch_at(step) * settings['batch_size']
        changed = settings | {'batch_size': batch_size}
        place = carry_over(place, step, settings, changed, ORDER)
        settings = changed
        assert place.samples_at(step, batch_size) == samples
        assert used <= place.batch_at(step) * batch_size < used + batch_size


def test_a_run_that_changes_nothing_stays_where_it_is():
    place = Position(step=7, batch=3, samples=40)
    other = SETTINGS | {'num_steps': 5}
    assert carry_over(place, 9, SETTINGS, other, ORDER) == place
    assert place.batch_at(9) == 5


@pytest.mark.parametrize(
    'change', [{'data.lanes': 4}, {'data.chunk': 64}, {'data.window': 32}, {'seed': 1}]
)
def test_another_permutation_begins_where_the_last_one_was(change, caplog):
    caplog.set_level('INFO')
    place = carry_over(Position(), 111, SETTINGS, SETTINGS | change, ORDER)
    assert place.batch_at(111) == 111
    assert '888 samples were used in 111 steps; reading resumes with batch 111 of 8' in caplog.text
    assert 'some records come twice and others not at all' in caplog.text


def test_another_data_set_is_read_from_its_beginning(caplog):
    caplog.set_level('INFO')
    now = SETTINGS | {'data.dir': 'b', 'batch_size': 16}
    place = carry_over(Position(), 30, SETTINGS, now, ORDER)
    assert (place.batch_at(30), place.samples_at(31, 16)) == (0, 256)
    assert '240 samples were used in 30 steps; the other data set is read from its beg' in (
        caplog.text
    )


def test_without_a_planned_order_samples_are_counted_from_the_beginning():
    now = SETTINGS | {'batch_size': 48}
    assert carry_over(Position(), 31, SETTINGS, now, None) == Position(31, 6, 248)
