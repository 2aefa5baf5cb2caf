"""Logs hold averages over whole windows, rates without pauses, and idle time alone."""

import sys
import threading
import time
import types

import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from input_pipeline import ReadCounts
from train_lib.learning import metrics
from train_lib.lifecycle.log import AHEAD, StepClock, TrainLog

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


def _reading():
    """What training has read, as far as the log needs it."""
    reading = types.SimpleNamespace(counts=ReadCounts(), batches_ready=lambda: 1)
    reading.read_counts = lambda: reading.counts
    return reading


def _count(data, **amounts):
    sums = {name: getattr(data.counts, name) + amount for name, amount in amounts.items()}
    data.counts = data.counts._replace(**sums)


def _make_clock(data):
    return StepClock(data.batches_ready, data.read_counts)


def _make_log(every, data=None):
    """A log, and the scalars that it writes, by step."""
    scalars = {}
    writer = types.SimpleNamespace(write_scalars=scalars.__setitem__, flush=lambda: None)
    fields = {'log_every': every, 'max_skipped_in_a_row': 2, 'max_skipped': 4}
    config = ml_collections.ConfigDict(fields | {'batch_size': 1, 'num_steps': 9})
    empty = metrics.TrainMetrics.empty()
    log = TrainLog(
        config=config,
        writer=writer,
        clock=_make_clock(data or _reading()),
        steps_before=0,
        flops=0,
        describe_progress=lambda step: {},
        empty=empty,
        window=empty,
        advise_restart=lambda step: 'Start afresh',
    )
    return log, scalars


def _losses(scalars):
    return {step: x['train/loss'] for step, x in scalars.items()}


def test_windows_end_at_multiples_and_are_averages():
    log, written = _make_log(every=3)
    log.settle(0)
    for step in range(1, 8):
        log.add(step, _update(step))
    # The window that ends at step 6 was fetched when step 7 had been started.
    assert _losses(written) == {3: 2.0, 6: 5.0}
    assert ('host/memory_gb' in written[6]) == ON_LINUX

    other, written = _make_log(every=3)  # goes on where the first one left the window
    other.window = log.window
    for step in (8, 9):
        other.add(step, _update(step, skipped=step == 8))
    for _ in range(2):
        other.settle(9)
        assert _losses(written) == {9: 8.0}
    assert written[9]['train/skipped_steps'] == 1


def test_a_window_without_a_step_that_counts_has_no_mean():
    log, written = _make_log(every=1)
    log.add(1, _update(float('nan'), skipped=1, in_a_row=1))
    log.settle(1)
    assert 'train/loss' not in written[1]
    assert written[1]['train/skipped_steps'] == 1


@pytest.mark.parametrize('every', [2, 100])
@pytest.mark.parametrize(
    ('skipped', 'in_a_row', 'message'),
    [
        (3, 3, r'^3 steps in a row up to step 2 .* more than max_skipped_in_a_row=2'),
        (5, 1, r'^5 steps up to step 2 .* more than max_skipped=4'),
    ],
)
def test_too_many_skipped_steps_end_the_run(every, skipped, in_a_row, message):
    log, written = _make_log(every)
    log.add(1, _update(1, skipped - 1, in_a_row - 1))
    log.add(2, _update(1, skipped, in_a_row))
    with pytest.raises(FloatingPointError, match=message):
        log.settle(2)  # before a checkpoint, also in an unfinished window
    assert not written


class _Step:
    """What a step returns, as far as waiting for it goes; it takes until `end` is called."""

    def __init__(self):
        self._over = threading.Event()
        self.end = self._over.set
        self.block_until_ready = self._over.wait


def test_waiting_counts_while_the_device_is_idle_alone():
    clock = _make_clock(_reading())
    clock.step_started(jnp.zeros(()))  # not counted
    assert clock.lap(batch_size=10) == {}
    for _ in range(3):
        step = _Step()
        clock.step_started(step)
        with clock.waiting_for_data():
            time.sleep(0.05)
        step.end()
    assert clock.lap(batch_size=10)['input/wait_share_max'] == 0
    for _ in range(3):
        with clock.waiting_for_data():
            time.sleep(0.3)
        clock.step_started(jnp.zeros(()))
    assert 0.5 < clock.lap(batch_size=10)['input/wait_share_max'] <= 1


def test_what_was_read_is_told_as_rate_moment_and_sum():
    data = _reading()
    _count(data, num_bytes=50_000_000)
    log, written = _make_log(every=1, data=data)
    log.add(1, _update(1))
    _count(data, num_bytes=25_000_000, chunks_in_flight=5, bad_records=2)
    # Before this step there was none that counts, but the moment can be told.
    log.add(2, _update(1))
    assert 'input/read_mb_per_second' not in written[1]
    moment = [written[1][f'input/{name}'] for name in ('chunks_in_flight', 'bad_records')]
    assert moment == [5, 2]
    with log.clock.aside():  # for the steps that follow
        _count(data, num_bytes=6_000_000)
    log.settle(2)
    scalars = written[2]  # the seconds of both rates are the same; a batch is one sample
    rate = scalars['input/read_mb_per_second'] / scalars['train/samples_per_second']
    assert rate == pytest.approx(31)
    assert not any('cache' in name or 'request' in name for name in scalars)


def test_requests_and_what_a_cache_held_are_told_since_the_last_report():
    data = _reading()
    log, written = _make_log(every=1, data=data)
    log.add(1, _update(1))
    requests = {'num_requests': 4, 'request_seconds': 1.0, 'num_retries': 1}
    _count(data, **requests, cache_hits=6, cache_misses=4, cache_bytes=9_000_000)
    log.add(2, _update(1))
    log.settle(2)
    names = 'requests', 'request_seconds', 'retries', 'cache_hits', 'cache_misses', 'cache_mb'
    assert [written[2][f'input/{name}'] for name in names] == [4, 0.25, 1, 6, 4, 9]
    told = '4 requests of 0.25 s, 1 retry, cache 6 hits (9.0 MB), 4 misses'
    assert told in log.summary
    log.add(3, _update(1))
    log.settle(3)
    assert [written[3][f'input/{name}'] for name in names] == [0] * 6
    assert 'cache 0 hits (0 bytes), 0 misses' in log.summary


def test_what_is_aside_slows_nothing_down():
    clock = _make_clock(_reading())

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
    assert after['device/step_seconds_p95'] < 0.4
    for scalars in (inside, after):
        assert 20 < scalars['train/samples_per_second'] <= 100
        assert 0.4 < scalars['input/wait_share_max'] <= 1


def test_steps_count_when_they_are_finished_and_few_are_started_ahead():
    clock = _make_clock(_reading())
    clock.step_started(jnp.zeros(()))
    steps = [_Step() for _ in range(AHEAD + 1)]
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
