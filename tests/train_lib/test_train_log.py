"""Logs hold averages over whole windows, rates without pauses, and idle time alone."""

import dataclasses
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from clu import metric_writers

from train_lib import metrics, step_clock, train_log

ON_LINUX = sys.platform == 'linux'


def _update(loss, skipped=0, in_a_row=0):
    return metrics.TrainMetrics.single_from_model_output(
        loss=jnp.float32(loss),
        counts=jnp.asarray(np.isfinite(loss)),
        grad_norm=jnp.float32(1),
        learning_rate=jnp.float32(0.1),
        skipped_steps=jnp.int32(skipped),
        skipped_in_a_row=jnp.int32(in_a_row),
    )


class _Notes(metric_writers.MultiWriter):
    """Keeps what is written."""

    def __init__(self):
        super().__init__([])
        self.scalars = {}

    def write_scalars(self, step, scalars):
        self.scalars[step] = scalars


def _make_log(every, read_counts=None):
    writer = _Notes()
    empty = metrics.TrainMetrics.empty()
    log = train_log.TrainLog(
        writer,
        every=every,
        batch_size=1,
        empty=empty,
        max_skipped_in_a_row=2,
        max_skipped=4,
        read_counts=read_counts,
    )
    return log, writer


def _losses(scalars):
    return {step: written['train/loss'] for step, written in scalars.items()}


def test_windows_end_at_multiples_and_are_averages():
    log, writer = _make_log(every=3)
    for step in range(1, 8):
        log.add(step, _update(step))
    # The window that ends at step 6 was fetched when step 7 had been started.
    assert _losses(writer.scalars) == {3: 2.0, 6: 5.0}
    expected = {
        'train/loss',
        'train/grad_norm',
        'train/learning_rate',
        'train/skipped_steps',
        'train/steps_per_second',
        'train/samples_per_second',
        'device/step_seconds_median',
        'device/step_seconds_p95',
        'input/wait_share_min',
        'input/wait_share_max',
        'host/memory_gb',
    }
    if not ON_LINUX:
        expected.remove('host/memory_gb')
    assert set(writer.scalars[6]) == expected


def test_a_window_goes_on_where_another_log_left_it():
    first, _ = _make_log(every=4)
    for step in (1, 2, 3):
        first.add(step, _update(step))
    second, writer = _make_log(every=4)
    second.window = first.window
    second.add(4, _update(4))
    second.settle(4)
    assert _losses(writer.scalars) == {4: 2.5}


def test_settling_twice_or_with_nothing_new_writes_nothing_new():
    log, writer = _make_log(every=2)
    log.settle(0)
    assert not writer.scalars
    for step in (1, 2):
        log.add(step, _update(step))
    log.settle(2)
    log.settle(2)
    assert _losses(writer.scalars) == {2: 1.5}


def test_a_window_without_a_step_that_counts_has_no_mean():
    log, writer = _make_log(every=1)
    log.add(1, _update(float('nan'), skipped=1, in_a_row=1))
    log.add(2, _update(3, skipped=1))
    log.settle(2)
    assert 'train/loss' not in writer.scalars[1]
    assert _losses({2: writer.scalars[2]}) == {2: 3}
    assert [writer.scalars[step]['train/skipped_steps'] for step in (1, 2)] == [1, 1]


@pytest.mark.parametrize(
    ('skipped', 'in_a_row', 'message'),
    [
        (3, 3, r'^3 steps in a row up to step 2 .* more than max_skipped_in_a_row=2'),
        (5, 1, r'^5 steps up to step 2 .* more than max_skipped=4'),
    ],
)
def test_too_many_skipped_steps_end_the_run(skipped, in_a_row, message):
    log, writer = _make_log(every=2)
    log.add(1, _update(1, skipped, in_a_row))
    log.add(2, _update(1, skipped))
    with pytest.raises(FloatingPointError, match=message):
        log.add(3, _update(1))
    assert not writer.scalars


def test_no_checkpoint_after_too_many_skipped_steps_in_an_unfinished_window():
    log, _ = _make_log(every=100)
    log.add(1, _update(1, skipped=4, in_a_row=2))
    log.settle(1)
    log.add(2, _update(1, skipped=5, in_a_row=3))
    with pytest.raises(FloatingPointError, match='3 steps in a row up to step 2'):
        log.settle(2)


class _Step:
    """What a step returns, as far as waiting for it goes; it takes until `end` is called."""

    def __init__(self):
        self._over = threading.Event()
        self.end = self._over.set
        self.block_until_ready = self._over.wait


def test_waiting_while_the_device_works_costs_nothing():
    clock, step = step_clock.StepClock(), _Step()
    step.end()
    clock.step_started(step)  # not counted
    for _ in range(3):
        step = _Step()
        clock.step_started(step)
        with clock.waiting_for_data():
            time.sleep(0.05)
        step.end()
    assert clock.lap(batch_size=10)['input/wait_share_max'] == 0


def test_waiting_while_the_device_is_idle_is_counted():
    clock = step_clock.StepClock()
    clock.step_started(jnp.zeros(()))
    for _ in range(3):
        with clock.waiting_for_data():
            time.sleep(0.3)
        clock.step_started(jnp.zeros(()))
    assert 0.5 < clock.lap(batch_size=10)['input/wait_share_max'] <= 1


def test_what_is_aside_slows_nothing_down():
    clock = step_clock.StepClock()

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
        assert 20 < scalars['train/samples_per_second'] <= 100
        assert 0.4 < scalars['input/wait_share_max'] <= 1


def test_a_lap_after_what_was_aside_begins_after_it():
    clock = step_clock.StepClock()
    for _ in range(2):
        clock.step_started(jnp.zeros(()))
    with clock.aside():
        time.sleep(1)
    clock.lap(batch_size=10)
    clock.step_started(jnp.zeros(()))
    assert clock.lap(batch_size=10)['device/step_seconds_p95'] < 0.9


def test_steps_count_when_they_are_finished_and_few_are_started_ahead():
    clock = step_clock.StepClock()
    clock.step_started(jnp.zeros(()))
    steps = [_Step() for _ in range(step_clock.AHEAD + 1)]
    for step in steps[:-1]:
        clock.step_started(step)  # none is over, and the host need not wait
    waiting = threading.Thread(target=clock.step_started, args=[steps[-1]])
    waiting.start()
    waiting.join(0.3)
    had_to_wait = waiting.is_alive()
    for step in steps:
        time.sleep(0.1)
        step.end()
    waiting.join()
    assert had_to_wait
    scalars = clock.lap(batch_size=10)
    # However fast they were dispatched.
    assert scalars['train/steps_per_second'] <= 10
    rate = scalars['train/steps_per_second']
    assert scalars['train/samples_per_second'] == pytest.approx(10 * rate)
    assert 0.09 < scalars['device/step_seconds_median'] < scalars['device/step_seconds_p95']


def test_a_lap_without_steps_says_nothing():
    clock = step_clock.StepClock()
    assert clock.lap(batch_size=10) == {}
    clock.step_started(jnp.zeros(()))
    assert clock.lap(batch_size=10) == {}


@dataclasses.dataclass
class _Counts:
    num_bytes: int = 0
    chunks_in_flight: int = 0
    bad_records: int = 0


def _mb_per_step(scalars):
    """The seconds of both rates are the same; a batch is one sample here."""
    return scalars['input/read_mb_per_second'] / scalars['train/samples_per_second']


def test_what_was_read_is_told_as_rate_moment_and_sum():
    counts = _Counts(num_bytes=50_000_000)
    log, writer = _make_log(every=1, read_counts=lambda: counts)
    log.add(1, _update(1))
    counts.num_bytes += 25_000_000
    counts.chunks_in_flight, counts.bad_records = 5, 2
    # Before this step there was none that counts, but the moment can be told.
    log.add(2, _update(1))
    assert 'input/read_mb_per_second' not in writer.scalars[1]
    assert (
        writer.scalars[1]['input/chunks_in_flight'],
        writer.scalars[1]['input/bad_records'],
    ) == (5, 2)

    counts.chunks_in_flight, counts.bad_records = 3, 4
    log.add(3, _update(1))
    counts.num_bytes += 4_000_000
    log.add(4, _update(1))
    assert _mb_per_step(writer.scalars[2]) == pytest.approx(25)
    assert _mb_per_step(writer.scalars[3]) == pytest.approx(4)
    assert (
        writer.scalars[3]['input/chunks_in_flight'],
        writer.scalars[3]['input/bad_records'],
    ) == (3, 4)


def test_what_is_read_aside_is_for_the_steps_that_follow():
    counts = _Counts()
    log, writer = _make_log(every=1, read_counts=lambda: counts)
    for step in (1, 2):
        log.add(step, _update(1))
    with log.clock.aside():
        counts.num_bytes += 6_000_000
        time.sleep(0.2)
    log.settle(2)
    assert _mb_per_step(writer.scalars[2]) == pytest.approx(6)


@pytest.mark.skipif(not ON_LINUX, reason='only Linux tells it')
def test_memory_is_what_this_process_holds_now():
    log, writer = _make_log(every=1)

    def held(step):
        log.add(step, _update(1))
        log.settle(step)
        return writer.scalars[step]['host/memory_gb']

    before = held(1)
    array = np.ones(40_000_000)
    during = held(2)
    del array
    after = held(3)
    assert 0.03 < before < 100
    assert 0.25 < during - before < 0.6
    assert after < during - 0.2
