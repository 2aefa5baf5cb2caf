"""SIGTERM becomes an answer that is the same on every process, and other signals stay as they are.

Real processes get real signals.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap

from train_lib import signals


def test_sigterm_is_noted_and_survived():
    before = signal.getsignal(signal.SIGTERM)
    with signals.StopRequest() as stop:
        assert not stop.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reached(2)
        assert stop.reached(3)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_was_noted_is_forgotten_by_the_next_run():
    with signals.StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
    with signals.StopRequest() as stop:
        assert not stop.reached(1)


_WORKER = """
    import os, signal, sys, time
    import jax
    from train_lib import signals

    index, port = int(sys.argv[1]), sys.argv[2]
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(f'127.0.0.1:{port}', 2, index)
    with signals.StopRequest() as stop:
        for step in range(1, 500):
            # One process is slower, and only that one gets the signal.
            time.sleep(0.03 if index else 0.01)
            if index == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.reached(step):
                print('stopped at', step)
                break
    jax.distributed.shutdown()
"""


def test_two_processes_stop_at_the_same_step_when_one_gets_the_signal():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    env = os.environ | {'JAX_PLATFORMS': 'cpu'}
    workers = [
        subprocess.Popen(
            [sys.executable, '-c', textwrap.dedent(_WORKER), str(index), port],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    lines = [out.strip().splitlines()[-1] for out, _ in outputs]
    assert lines[0] == lines[1]
    step = int(lines[0].removeprefix('stopped at '))
    assert 5 <= step < 499
