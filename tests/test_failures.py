"""A host that fails takes the others with it: all end soon, with status 1, and say who and why.

Hosts are real processes that find each other over loopback.
"""

import signal

import pytest

from tests import runs

SETTINGS = {'num_steps': 10_000, 'eval_every': 0, 'checkpoint_every': 3, 'batch_size': 8}
HOSTS = {'processes': 2, 'devices': 1}


@pytest.fixture(scope='module')
def env(tmp_path_factory):
    with runs.shared_compilations(tmp_path_factory.mktemp('compiled')) as env:
        yield env


@pytest.mark.parametrize('failing', [0, 1])
def test_all_hosts_end_when_one_cannot_read(mini_dataset, env, tmp_path, failing):
    env = env | {'FAILING': f'{failing}:5'}
    with runs.hosts(mini_dataset, tmp_path, env, **HOSTS, **SETTINGS) as started:
        codes = runs.wait(started)
        outputs = [host.output.read_text() for host in started]
    assert codes == [1, 1], outputs
    for output in outputs:
        last = output.splitlines()[-1]
        assert last.startswith(f'ERROR: process {failing} on ')
        assert last.endswith('has failed: OSError: the disk is gone')
    assert 'Traceback' in outputs[failing]
    assert 'Traceback' not in outputs[1 - failing]


@pytest.mark.slow
@pytest.mark.parametrize(('killed', 'code'), [(0, None), (1, 1)])
def test_all_hosts_end_when_one_is_killed(mini_dataset, env, tmp_path, killed, code):
    with runs.hosts(mini_dataset, tmp_path, env, **HOSTS, **SETTINGS) as started:
        other = started[1 - killed]
        runs.wait_until(lambda: runs.saved_steps(tmp_path), other.process)
        started[killed].process.send_signal(signal.SIGKILL)
        codes = runs.wait(started)
        output = other.output.read_text()
    if code is None:  # JAX itself aborts a process whose coordinator is gone
        assert codes[1 - killed] != 0
    else:
        assert codes[1 - killed] == code
        assert output.splitlines()[-1].startswith('ERROR: process 0 on ')
