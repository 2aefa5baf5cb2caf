"""One run on any number of hosts, and on another number after each stop: the same run.

Hosts are real processes that find each other over loopback, started by the command a user types;
there are four devices in all, however many processes hold them.
"""

import re
import signal

import jax
import numpy as np
import pytest

from tests import runs
from train_lib import data, sharding, train

# Lanes for eight processes, a batch that has a record of every lane.
SETTINGS = {'data.lanes': 8, 'batch_size': 8, 'eval_every': 3, 'checkpoint_every': 4}

NO_STOP = {'num_steps': 10_000}  # more than a test waits for

# Sums over a batch are added up in another order where other processes hold its parts.
LOSS_TOLERANCE = 1e-5
EVAL_LOSS_TOLERANCE = 1e-6


def run_to_the_end(data_dir, workdir, env, processes, devices, **changes):
    """Losses and keys of a run, or of its rest, that nothing disturbs."""
    share = {'processes': processes, 'devices': devices}
    with runs.hosts(data_dir, workdir, env, **share, **SETTINGS | changes) as started:
        codes = runs.wait(started)
        assert codes == [0] * processes, started[0].output.read_text()
    return runs.losses(workdir), runs.keys_of_steps(workdir, processes)


def run_until_stopped(data_dir, workdir, env, processes, devices, told, **changes):
    """Sends SIGTERM to the hosts `told` when a few steps are saved; the step that all stop at."""
    share = {'processes': processes, 'devices': devices}
    with runs.hosts(data_dir, workdir, env, **share, **SETTINGS | NO_STOP | changes) as started:
        runs.wait_until(lambda: max(runs.saved_steps(workdir), default=0) >= 4, started[0].process)
        for index in told:
            started[index].process.send_signal(signal.SIGTERM)
        codes = runs.wait(started)
        outputs = [host.output.read_text() for host in started]
        assert codes == [75] * processes, outputs[0]
    stopped = {int(re.search(r'Stopped at step (\d+)', output)[1]) for output in outputs}
    assert stopped == {max(runs.saved_steps(workdir))}, 'hosts stopped at different steps'
    return stopped.pop()


def assert_same_losses(got, expected, ends=()):
    """Of every step, and of every evaluation but those at the `ends` of parts of a run.

    The last step of a part has one that is not due elsewhere.
    """

    def compared(losses):
        return {
            (tag, step): loss
            for (tag, step), loss in losses.items()
            if not (tag.startswith('eval') and step in ends)
        }

    got, expected = compared(got), compared(expected)
    assert got.keys() == expected.keys()
    for (tag, step), loss in got.items():
        tolerance = EVAL_LOSS_TOLERANCE if tag.startswith('eval') else LOSS_TOLERANCE
        np.testing.assert_allclose(loss, expected[tag, step], tolerance, err_msg=f'{tag} {step}')


def assert_same_keys(got, expected):
    assert got.keys() == expected.keys()
    for step, keys in expected.items():
        np.testing.assert_array_equal(got[step], keys, err_msg=f'step {step}')


def check_elastic(data_dir, folder, env, before, after, told, **changes):
    """A run is stopped on one number of hosts, goes on with others, and is as if one had done it.

    Args:
        before, after: pairs of how many processes there are and how many devices each has.
        told: which processes get SIGTERM.
    """
    together = folder / 'together'
    stopped = run_until_stopped(data_dir, together, env, *before, told, **changes)
    keys = runs.keys_of_steps(together, before[0])
    assert max(keys) == stopped
    ends = []
    for hosts in after:
        end = changes | {'num_steps': max(keys) + 8}
        losses, later_keys = run_to_the_end(data_dir, together, env, *hosts, **end)
        assert min(later_keys) == max(keys) + 1
        keys |= later_keys
        ends.append(max(keys))
    alone, alone_keys = run_to_the_end(data_dir, folder / 'alone', env, 1, 4, **end)
    assert len(keys) == stopped + 8 * len(after)
    assert_same_keys(keys, alone_keys)
    assert_same_losses(losses, alone, ends[:-1])


@pytest.mark.slow
def test_two_hosts_stop_as_one_and_this_process_goes_on(mini_dataset, env, tmp_path):
    """On its one device; what it would have computed alone is known from it as well."""
    stopped = run_until_stopped(mini_dataset, tmp_path / 'together', env, 2, 2, told=[1])
    keys = runs.keys_of_steps(tmp_path / 'together', 2)
    assert max(keys) == stopped
    config = runs.small_config(mini_dataset, **SETTINGS | {'num_steps': stopped + 8})
    for folder in ('together', 'alone'):
        train.train_and_evaluate(config, tmp_path / folder, accept_changes=['num_steps'])
    together, alone = (runs.losses(tmp_path / folder) for folder in ('together', 'alone'))
    assert_same_losses(together, alone)
    batches = data.TrainingData(config, sharding.make_mesh()).train_batches(0)
    expected = {step: runs.own_keys(next(batches)) for step in range(1, stopped + 1)}
    assert_same_keys(keys, expected)


@pytest.mark.slow
def test_four_hosts_stop_as_one_and_two_go_on_as_if_one_had_done_it_all(
    mini_dataset, env, tmp_path
):
    check_elastic(mini_dataset, tmp_path, env, (4, 1), [(2, 2)], told=[2])


@pytest.mark.slow
def test_a_run_that_moves_from_two_hosts_to_four_and_to_one(mini_dataset, env, tmp_path):
    """Weights are split over pairs of devices, on one host and then on two; all get SIGTERM."""
    changes = {'mesh.fsdp': 2, 'preview_every': 8}
    after = [(4, 1), (1, 4)]
    check_elastic(mini_dataset, tmp_path, env, (2, 2), after, told=[0, 1], **changes)


@pytest.mark.slow
def test_any_number_of_hosts_computes_the_same(mini_dataset, env, tmp_path):
    end = {'num_steps': 12, 'eval_every': 6}
    alone, alone_keys = run_to_the_end(mini_dataset, tmp_path / '1', env, 1, 4, **end)
    assert {step for tag, step in alone if tag == 'train/loss'} == set(range(1, 13))
    assert {step for tag, step in alone if tag == 'eval/loss'} == {6, 12}
    for processes in (2, 4):
        devices = 4 // processes
        losses, keys = run_to_the_end(
            mini_dataset, tmp_path / str(processes), env, processes, devices, **end
        )
        assert_same_keys(keys, alone_keys)
        assert_same_losses(losses, alone)


@pytest.mark.parametrize(
    ('processes', 'changes', 'lanes'),
    [
        (3, {'batch_size': 48, 'data.lanes': 16}, 12),
        (6, {'batch_size': 48, 'data.lanes': 8}, 6),
        (16, {'batch_size': 64, 'data.lanes': 8}, 16),
    ],
)
def test_hosts_that_lanes_cannot_be_shared_by_are_refused_at_once(
    mini_dataset, tmp_path, monkeypatch, processes, changes, lanes
):
    monkeypatch.setattr(jax, 'process_count', lambda: processes)
    mesh = sharding.make_mesh()
    with pytest.raises(ValueError) as error:
        data.TrainingData(runs.small_config(mini_dataset, **changes), mesh)
    message = str(error.value)
    assert f'data.lanes={changes["data.lanes"]} cannot be shared equally' in message
    assert f'by {processes} processes with 1 devices in all' in message
    assert f'batch_size={changes["batch_size"]} with data.lanes={lanes} works' in message
    config = runs.small_config(mini_dataset, **changes | {'data.lanes': lanes})
    data.TrainingData(config, mesh)


def test_a_batch_that_devices_cannot_share_is_refused(mini_dataset):
    config = runs.small_config(mini_dataset, **{'batch_size': 10, 'data.lanes': 2})
    mesh = jax.sharding.AbstractMesh((4, 1), (sharding.DATA_AXIS, sharding.FSDP_AXIS))
    with pytest.raises(ValueError, match=r'by 1 processes with 4 devices.*batch_size=8 with data'):
        data.TrainingData(config, mesh)
