"""A run ends early in order: by a signal, with all its hosts; by the failure of one, with its name.

Real processes, started as a user starts them, get real signals and find each other over loopback.
"""

import os
import pathlib
import signal
import socket
import sys
import time

import pytest

from coyo11m_tfds.process import stop_signals
from tests import children, runs
from train_lib.lifecycle import signals

REQUEUE = 75  # of configs/default.py
SECONDS = 45  # that leaving may take here; a stalled hook alone would take longer

ENDLESS = {'num_steps': 10_000, 'eval_every': 0, 'checkpoint_every': 0}


@pytest.mark.parametrize('number', stop_signals.STOP_SIGNALS)
def test_a_signal_is_noted_and_survived_and_forgotten_by_the_next_run(number):
    before = signal.getsignal(number)
    with signals.StopRequest() as stop:
        assert not stop.reached(1)
        os.kill(os.getpid(), number)
        assert stop.reached(2)
        assert stop.reached(3)
    assert signal.getsignal(number) is before
    with signals.StopRequest() as stop:
        assert not stop.reached(1)


@pytest.mark.parametrize('handler', ['ignored', 'of the program'])
def test_a_signal_that_is_ignored_or_is_the_programs_own_does_not_stop_a_run(handler):
    """As of a job in the background, of `nohup`, or of a library that requeues its job."""
    received = []
    own = signal.SIG_IGN if handler == 'ignored' else lambda number, _: received.append(number)
    numbers = {*stop_signals.STOP_SIGNALS}
    if handler == 'of the program':
        numbers -= {signal.SIGINT, signal.SIGTERM}
    before = {number: signal.signal(number, own) for number in numbers}
    try:
        with signals.StopRequest() as stop:
            for number in numbers:
                os.kill(os.getpid(), number)
            assert not stop.reached(1)
    finally:
        for number in numbers:
            signal.signal(number, before[number])
    assert {*received} == (set() if handler == 'ignored' else numbers)


_LEAVING = """
    import signal, time
    from train_lib.lifecycle import signals

    for name in sys.argv[1:]:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    signals.install(75)
    print('installed', flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGUSR1])
def test_before_the_first_step_a_signal_ends_the_process_unless_it_is_ignored(number):
    ignored = signal.SIGINT, signal.SIGHUP if number == signal.SIGUSR1 else signal.SIGTERM
    with children.python(_LEAVING, *(each.name for each in ignored)) as child:
        child.stdout.readline()
        for each in (*ignored, number):
            child.send_signal(each)
        _, errors = child.communicate(timeout=SECONDS)
    expected = f'{number.name}: left at once, there was nothing to save.\n'
    assert (child.returncode, errors) == (REQUEUE, expected)


_WORKER = """
    import os, signal, time
    import jax
    from train_lib.lifecycle import signals

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
    port = runs.free_port()
    with children.python(_WORKER, 0, port) as first, children.python(_WORKER, 1, port) as second:
        outputs = [worker.communicate(timeout=60) for worker in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    lines = [out.strip().splitlines()[-1] for out, _ in outputs]
    assert lines[0] == lines[1]
    step = int(lines[0].removeprefix('stopped at '))
    assert 5 <= step < 499


def leave(host, when, number=signal.SIGINT):
    """Sends a signal as soon as `when` holds for the output; the whole output after the end."""
    children.wait_until(lambda: when(host.output.read_text()), host.process)
    host.process.send_signal(number)
    code = host.process.wait(SECONDS)
    output = host.output.read_text()
    assert code == REQUEUE, output
    for word in ('Traceback', 'KeyboardInterrupt', 'interpreter state'):
        assert word not in output
    return output


def one_host(mini_dataset, workdir, **changes):
    return runs.hosts(mini_dataset, workdir, processes=1, devices=1, **ENDLESS | changes)


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux tells what is loaded')
def test_ctrl_c_while_it_imports(mini_dataset, tmp_path):
    process = runs.start(mini_dataset, tmp_path / 'run', **ENDLESS)
    loaded = pathlib.Path(f'/proc/{process.pid}/maps')
    children.wait_until(lambda: 'jaxlib' in loaded.read_text(), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == REQUEUE
    first, last = output.splitlines()
    assert first.endswith('train_lib.main starts ...')
    assert last == 'Ctrl-C: left at once, there was nothing to save.'
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_an_evaluation_is_broken_off_and_done_by_the_run_that_resumes(
    mini_dataset, tmp_path, monkeypatch
):
    changes = {'eval_every': 3, 'num_steps': 5}
    monkeypatch.setenv('STALLED', 'evaluation')
    with one_host(mini_dataset, tmp_path, **changes) as [host]:
        output = leave(host, lambda output: 'stalled evaluation' in output, signal.SIGTERM)
    assert 'evaluation at step 3 was interrupted' in output
    assert runs.saved_steps(tmp_path) == [3]
    monkeypatch.delenv('STALLED')
    with one_host(mini_dataset, tmp_path, **changes) as [host]:
        assert runs.wait([host]) == [0]
    evaluated = {step for tag, step in runs.losses(tmp_path) if tag == 'eval/loss'}
    assert evaluated == {3, 5}


@pytest.mark.slow
def test_a_checkpoint_is_completed_unless_there_is_a_second_signal(
    mini_dataset, tmp_path, monkeypatch
):
    monkeypatch.setenv('STALLED', 'checkpoint')
    with one_host(mini_dataset, tmp_path, checkpoint_every=3) as [host]:
        children.wait_until(lambda: 'stalled checkpoint' in host.output.read_text(), host.process)
        host.process.send_signal(signal.SIGINT)
        children.wait_until(lambda: 'saving, then leaving' in host.output.read_text(), host.process)
        time.sleep(1.5)  # or it would be taken for the same one
        output = leave(host, lambda _: True)
    assert output.splitlines()[-1].startswith('Ctrl-C again: left at once;')
    assert not runs.saved_steps(tmp_path)


FAILING = {'num_steps': 10_000, 'eval_every': 0, 'checkpoint_every': 3, 'batch_size': 8}
TWO = {'processes': 2, 'devices': 1}


@pytest.mark.parametrize('failing', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_hosts_end_when_one_cannot_read(mini_dataset, tmp_path, monkeypatch, failing):
    monkeypatch.setenv('FAILING', f'{failing}:5')
    with runs.hosts(mini_dataset, tmp_path, forked=True, **TWO, **FAILING) as started:
        codes = runs.wait(started)
        outputs = [host.output.read_text() for host in started]
    assert codes == [1, 1], outputs
    for output in outputs:
        last = output.splitlines()[-1]
        assert last.startswith(f'error: process {failing} on ')
        assert last.endswith('has failed: OSError: the disk is gone')
    assert 'Traceback' in outputs[failing]
    assert 'Traceback' not in outputs[1 - failing]


@pytest.mark.slow
def test_the_host_that_was_killed_is_named_by_the_others(mini_dataset, tmp_path):
    hosts = {'processes': 4, 'devices': 1, 'data.lanes': 4}
    with runs.hosts(mini_dataset, tmp_path, **hosts, **FAILING) as started:
        children.wait_until(lambda: runs.saved_steps(tmp_path), started[0].process)
        started[2].process.send_signal(signal.SIGKILL)
        codes = runs.wait(started)
        outputs = [host.output.read_text().splitlines()[-1] for host in started]
    assert codes == [1, 1, -signal.SIGKILL, 1]
    expected = f'error: process 2 on {socket.gethostname()} does not answer: it was killed'
    for index in (0, 1, 3):
        assert outputs[index].startswith(expected), outputs
