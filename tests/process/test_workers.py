"""A signal to all processes of a program does not reach its workers."""

import os
import time

import pytest

from coyo11m_tfds.process import stop_signals, workers
from tests import children


def test_workers_leave_signals_to_their_parent():
    with workers.open_pool(1) as pool:
        worker = pool.submit(os.getpid).result()
        for number in stop_signals.STOP_SIGNALS:
            os.kill(worker, number)
        assert pool.submit(os.getpid).result() == worker


_ALL_PROCESSES = """
import os, signal
from coyo11m_tfds.process import stop_signals, workers

os.setpgid(0, 0)
with workers.open_pool(1) as pool:
    worker = pool.submit(os.getpid).result()
    for number in stop_signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)
    # A queue needs the process that removes what pools leave.
    with workers.open_pool(1) as other:
        assert other.submit(os.getpid).result() != pool.submit(os.getpid).result() == worker
"""


def test_a_signal_to_all_processes_of_a_program_leaves_no_word():
    with children.python(_ALL_PROCESSES) as child:
        output = child.communicate()
    assert (child.returncode, output) == (0, ('', ''))


def test_a_pool_ends_all_workers_when_one_dies():
    with pytest.raises(RuntimeError, match='A worker process died'), workers.open_pool(2) as pool:
        other = pool.submit(time.sleep, 600)
        pool.submit(os._exit, 1).result()
    assert other.done()
