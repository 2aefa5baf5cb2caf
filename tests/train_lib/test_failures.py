"""A host that fails takes the others with it: all end soon, with status 1, and say who and why.

Hosts are real processes that find each other over loopback.
"""

import signal

import pytest
import tensorflow as tf

from tests import runs
from train_lib import failures

SETTINGS = {'num_steps': 10_000, 'eval_every': 0, 'checkpoint_every': 3, 'batch_size': 8}
HOSTS = {'processes': 2, 'devices': 1}


def test_the_summary_of_an_error_is_a_line_that_says_what_happened():
    def fail(_):
        raise ValueError('file.tfrecord: record 7 cannot be read')

    def read(x):
        return tf.numpy_function(fail, [x], tf.int64)

    with pytest.raises(tf.errors.OpError) as error:
        list(tf.data.Dataset.range(4).map(read, num_parallel_calls=2))
    said = 'ValueError: file.tfrecord: record 7 cannot be read'
    assert failures.summary(error.value) == said
    assert failures.summary(ValueError('file.tfrecord: record 7 cannot be read')) == said
    assert failures.summary(RuntimeError()) == 'RuntimeError: '


@pytest.mark.parametrize('failing', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_hosts_end_when_one_cannot_read(mini_dataset, env, tmp_path, failing):
    env = env | {'FAILING': f'{failing}:5'}
    with runs.hosts(mini_dataset, tmp_path, env, **HOSTS, **SETTINGS) as started:
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
        assert output.splitlines()[-1].startswith('error: process 0 on ')
