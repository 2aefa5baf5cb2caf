"""Logs hold averages over whole windows, rates without pauses, and idle time alone."""

import time

import jax
import jax.numpy as jnp
import pytest
from clu import metric_writers

from train_lib import metrics, train_log


def _update(loss):
    return metrics.TrainMetrics.single_from_model_output(
        loss=jnp.float32(loss), grad_norm=jnp.float32(1), learning_rate=jnp.float32(0.1)
    )


class _Notes(metric_writers.MultiWriter):
    """Keeps what is written."""

    def __init__(self):
        super().__init__([])
        self.scalars = {}

    def write_scalars(self, step, scalars):
        self.scalars[step] = scalars


def _make_log(every):
    writer = _Notes()
    empty = metrics.TrainMetrics.empty()
    return train_log.TrainLog(writer, every=every, batch_size=1, empty=empty), writer


def _losses(writer):
    return {step: scalars['loss'] for step, scalars in writer.scalars.items()}


def test_windows_end_at_multiples_and_are_averages():
    log, writer = _make_log(every=3)
    for step in range(1, 8):
        log.add(step, _update(step))
    # The window that ends at step 6 was fetched when step 7 had been started.
    assert _losses(writer) == {3: 2.0, 6: 5.0}
    assert set(writer.scalars[6]) == {
        'loss',
        'grad_norm',
        'learning_rate',
        'examples_per_second',
        'data_wait_share',
    }


def test_a_window_goes_on_where_another_log_left_it():
    first, _ = _make_log(every=4)
    for step in (1, 2, 3):
        first.add(step, _update(step))
    second, writer = _make_log(every=4)
    second.window = first.window
    second.add(4, _update(4))
    second.settle(4)
    assert _losses(writer) == {4: 2.5}


def test_settling_twice_or_with_nothing_new_writes_nothing_new():
    log, writer = _make_log(every=2)
    log.settle(0)
    assert not writer.scalars
    for step in (1, 2):
        log.add(step, _update(step))
    log.settle(2)
    log.settle(2)
    assert _losses(writer) == {2: 1.5}


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_a_loss_that_is_not_finite_ends_the_run(bad):
    log, writer = _make_log(every=2)
    log.add(1, _update(1))
    log.add(2, _update(bad))
    with pytest.raises(FloatingPointError, match=r'loss.*in the steps up to 2'):
        log.add(3, _update(1))
    assert not writer.scalars


def test_no_checkpoint_of_an_unfinished_window_that_is_not_finite():
    log, _ = _make_log(every=100)
    log.add(1, _update(float('nan')))
    with pytest.raises(FloatingPointError, match='in the steps up to 1'):
        log.settle(1)


@jax.jit
def _work(x):
    return jax.lax.fori_loop(0, 15, lambda _, y: y @ x / 1e3, x)


@pytest.fixture(scope='module')
def work():
    """Something that keeps the device busy, and how many seconds."""
    x = jnp.ones((800, 800))
    jax.block_until_ready(_work(x))
    start = time.monotonic()
    jax.block_until_ready(_work(x))
    return lambda: _work(x), time.monotonic() - start


def _run(clock, steps, wait, start_step):
    clock.step_started(start_step())  # not counted
    for _ in range(steps):
        with clock.waiting_for_data():
            time.sleep(wait)
        result = start_step()
        clock.step_started(result)
    jax.block_until_ready(result)
    return clock.lap(batch_size=10)


def test_waiting_while_the_device_works_costs_nothing(work):
    start_step, seconds = work
    scalars = _run(train_log.StepClock(), 5, seconds / 10, start_step)
    assert scalars['data_wait_share'] < 0.2


def test_waiting_while_the_device_is_idle_is_counted(work):
    start_step, seconds = work
    scalars = _run(train_log.StepClock(), 3, 3 * seconds, start_step)
    assert 0.5 < scalars['data_wait_share'] <= 1


def test_what_is_aside_slows_nothing_down():
    clock = train_log.StepClock()

    def start_step():
        return jnp.zeros(())

    clock.step_started(start_step())
    with clock.waiting_for_data():
        time.sleep(0.1)
    clock.step_started(start_step())
    with clock.aside():
        time.sleep(0.5)
        # A checkpoint, say, has what is complete written.
        inside = clock.lap(batch_size=10)
        time.sleep(0.5)
    with clock.waiting_for_data():
        time.sleep(0.1)
    clock.step_started(start_step())
    after = clock.lap(batch_size=10)
    for scalars in (inside, after):
        assert 20 < scalars['examples_per_second'] <= 100
        assert 0.4 < scalars['data_wait_share'] <= 1


def test_a_lap_without_steps_says_nothing():
    clock = train_log.StepClock()
    assert clock.lap(batch_size=10) == {}
    clock.step_started(jnp.zeros(()))
    assert clock.lap(batch_size=10) == {}


def test_a_window_has_steps():
    with pytest.raises(ValueError, match='log_every=0'):
        _make_log(every=0)
