"""Ctrl-C and SIGTERM end a run within seconds whatever it is doing, with a line and no traceback.

Real processes, started as a user starts them, get real signals.
"""

import pathlib
import signal
import sys
import time

import pytest

from tests import runs

REQUEUE = 75  # of configs/default.py
SECONDS = 45  # that leaving may take here; a stalled hook alone would take longer

ENDLESS = {'num_steps': 10_000, 'eval_every': 0, 'checkpoint_every': 0}


def leave(host, when, number=signal.SIGINT):
    """Sends a signal as soon as `when` holds for the output; the whole output after the end."""
    runs.wait_until(lambda: when(host.output.read_text()), host.process)
    host.process.send_signal(number)
    code = host.process.wait(SECONDS)
    output = host.output.read_text()
    assert code == REQUEUE, output
    for word in ('Traceback', 'KeyboardInterrupt', 'interpreter state'):
        assert word not in output
    return output


def one_host(mini_dataset, workdir, env, **changes):
    return runs.hosts(mini_dataset, workdir, env, processes=1, devices=1, **ENDLESS | changes)


def is_loaded(process, library):
    return library in pathlib.Path(f'/proc/{process.pid}/maps').read_text()


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux tells what is loaded')
def test_while_it_imports(mini_dataset, env, tmp_path):
    process = runs.start(mini_dataset, tmp_path / 'run', env, **ENDLESS)
    runs.wait_until(lambda: is_loaded(process, 'tensorflow'), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == REQUEUE
    assert output.strip() == 'Ctrl-C: left at once, there was nothing to save.'
    assert not (tmp_path / 'run').exists()


def test_while_it_compiles(mini_dataset, tmp_path):
    # Neither compiled before nor quickly: that takes ten seconds, of which Python sees nothing.
    env = {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '2', 'XLA_FLAGS': ''}
    changes = ENDLESS | {'model.name': 'tiny/8'}
    process = runs.start(mini_dataset, tmp_path, env, **changes)
    for line in process.stdout:
        if 'compiling ...' in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    output, _ = process.communicate(timeout=SECONDS)
    assert time.monotonic() - sent < 5
    assert process.returncode == REQUEUE
    assert output.strip() == 'Ctrl-C: left at once, there was nothing to save.'
    assert not runs.saved_steps(tmp_path)


def test_while_it_trains(mini_dataset, env, tmp_path):
    with one_host(mini_dataset, tmp_path, env) as [host]:
        output = leave(host, lambda output: ', step 5 of ' in output)
    assert output.splitlines().count('Ctrl-C: saving, then leaving. Once more leaves at once.') == 1
    (step,) = runs.saved_steps(tmp_path)
    assert f'Stopped at step {step}. To resume: ' in output.splitlines()[-1]


@pytest.mark.slow
def test_an_evaluation_is_broken_off_and_done_by_the_run_that_resumes(mini_dataset, env, tmp_path):
    changes = {'eval_every': 3, 'num_steps': 5}
    stalled = env | {'STALLED': 'evaluation'}
    with one_host(mini_dataset, tmp_path, stalled, **changes) as [host]:
        output = leave(host, lambda output: 'stalled evaluation' in output, signal.SIGTERM)
    assert 'evaluation at step 3 was broken off' in output
    assert runs.saved_steps(tmp_path) == [3]
    with one_host(mini_dataset, tmp_path, env, **changes) as [host]:
        assert runs.wait([host]) == [0]
    evaluated = {step for tag, step in runs.losses(tmp_path) if tag == 'eval/loss'}
    assert evaluated == {3, 5}


@pytest.mark.slow
def test_a_checkpoint_is_completed_unless_there_is_a_second_signal(mini_dataset, env, tmp_path):
    stalled = env | {'STALLED': 'checkpoint'}
    with one_host(mini_dataset, tmp_path, stalled, checkpoint_every=3) as [host]:
        runs.wait_until(lambda: 'stalled checkpoint' in host.output.read_text(), host.process)
        host.process.send_signal(signal.SIGINT)
        runs.wait_until(lambda: 'saving, then leaving' in host.output.read_text(), host.process)
        time.sleep(1.5)  # or it would be taken for the same one
        output = leave(host, lambda _: True)
    assert output.splitlines()[-1].startswith('Ctrl-C again: left at once;')
    assert not runs.saved_steps(tmp_path)


@pytest.mark.slow
def test_ctrl_c_on_one_of_two_hosts_stops_both_at_one_step(mini_dataset, env, tmp_path):
    changes = ENDLESS | {'batch_size': 8, 'log_every': 5}
    hosts = runs.hosts(mini_dataset, tmp_path, env, processes=2, devices=1, **changes)
    with hosts as started:
        first = started[0]
        runs.wait_until(lambda: ', step 5 of ' in first.output.read_text(), first.process)
        started[1].process.send_signal(signal.SIGINT)
        codes = runs.wait(started)
        outputs = [host.output.read_text() for host in started]
    assert codes == [REQUEUE] * 2, outputs
    (step,) = runs.saved_steps(tmp_path)
    for output in outputs:
        assert 'Traceback' not in output
        assert f'Stopped at step {step}.' in output
    # Both read, and one tells of it.
    assert ', step 5 of ' not in outputs[1]
    scalars = runs.read_scalars(tmp_path)
    (least,), (most,) = (scalars[f'input/wait_share_{which}', 5] for which in ('min', 'max'))
    assert 0 <= least <= most <= 1
    keys = runs.keys_of_steps(tmp_path, 2)
    assert max(keys) == step
