"""A signal to all processes of a program does not reach its workers."""

import os
import time

import pytest

from coyo11m_tfds.process import stop_signals, workers


def test_workers_leave_signals_to_their_parent():
    with workers.open_pool(1) as pool:
        worker = pool.submit(os.getpid).result()
        for number in stop_signals.STOP_SIGNALS:
            os.kill(worker, number)
        assert pool.submit(os.getpid).result() == worker


def test_a_pool_ends_all_workers_when_one_dies():
    with pytest.raises(RuntimeError, match='A worker process died'), workers.open_pool(2) as pool:
        other = pool.submit(time.sleep, 600)
        pool.submit(os._exit, 1).result()
    assert other.done()
