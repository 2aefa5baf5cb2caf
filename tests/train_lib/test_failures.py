"""A host that fails takes the others with it: all end soon, with status 1, and say who and why.

Hosts are real processes that find each other over loopback.
"""

import signal
import socket

import pytest
import tensorflow as tf

import input_pipeline
from tests import runs
from train_lib import failures

SETTINGS = {'num_steps': 10_000, 'eval_every': 0, 'checkpoint_every': 3, 'batch_size': 8}
HOSTS = {'processes': 2, 'devices': 1}


@pytest.mark.parametrize('kind', [ValueError, input_pipeline.DamagedError])
def test_the_summary_of_an_error_is_a_line_that_says_what_happened(kind):
    def fail(_):
        raise kind('file.tfrecord: record 7 cannot be read')

    def read(x):
        return tf.numpy_function(fail, [x], tf.int64)

    with pytest.raises(tf.errors.OpError) as error:
        list(tf.data.Dataset.range(4).map(read, num_parallel_calls=2))
    said = f'{kind.__name__}: file.tfrecord: record 7 cannot be read'
    assert failures.summary(error.value) == said
    assert failures.summary(kind('file.tfrecord: record 7 cannot be read')) == said
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
def test_all_hosts_end_when_the_first_is_killed(mini_dataset, env, tmp_path):
    with runs.hosts(mini_dataset, tmp_path, env, **HOSTS, **SETTINGS) as started:
        runs.wait_until(lambda: runs.saved_steps(tmp_path), started[1].process)
        started[0].process.send_signal(signal.SIGKILL)
        # JAX itself aborts a process whose coordinator is gone.
        assert 0 not in runs.wait(started)


@pytest.mark.slow
def test_the_host_that_was_killed_is_named_by_the_others(mini_dataset, env, tmp_path):
    hosts = {'processes': 4, 'devices': 1, 'data.lanes': 4}
    with runs.hosts(mini_dataset, tmp_path, env, **hosts, **SETTINGS) as started:
        runs.wait_until(lambda: runs.saved_steps(tmp_path), started[0].process)
        started[2].process.send_signal(signal.SIGKILL)
        codes = runs.wait(started)
        outputs = [host.output.read_text().splitlines()[-1] for host in started]
    assert codes == [1, 1, -signal.SIGKILL, 1]
    expected = f'error: process 2 on {socket.gethostname()} does not answer: it was killed'
    for index in (0, 1, 3):
        assert outputs[index].startswith(expected), outputs
