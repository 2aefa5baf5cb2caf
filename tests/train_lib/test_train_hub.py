"""Runs on a data set on the hub read one commit from the first step to the last, in all processes.

The hub is a stand-in on loopback.
"""

import logging

import pytest

from tests import built, runs
from tests.fakes.cloud import Hub
from train_lib.lifecycle import checkpoint, versions

DATA = 'hf://datasets/owner/name/data'
SETTINGS = {'eval_every': 0, 'checkpoint_every': 0}


@pytest.fixture
def hub(hub: Hub, mini_dataset) -> Hub:
    hub.files = {f'data/{name}': x for name, x in built.files_of(mini_dataset).items()}
    hub.first = hub.commit(hub.files)
    hub.clear()
    return hub


def place(commit: str) -> str:
    return f'hf://datasets/owner/name@{commit}/data'


def test_a_resumed_run_reads_the_commit_that_it_began_with(hub, mini_dataset, tmp_path, caplog):
    caplog.set_level(logging.INFO, 'absl')

    def train(data_dir: object, folder: str, num_steps: int) -> str:
        """Trains up to a step; returns what was logged."""
        caplog.clear()
        changes = SETTINGS | {'num_steps': num_steps}
        runs.train(data_dir, tmp_path / folder, accept=['num_steps'], **changes)
        return caplog.text

    log = train(DATA, 'run', 2)
    assert f'{place(hub.first)}, ' in log and 'has changed' not in log
    second = hub.commit({**hub.files, 'README.md': b'New.'})
    log = train(DATA, 'run', 4)
    assert f'{place(hub.first)}, ' in log
    message = f'{DATA} has changed since this run began: the run goes on with {place(hub.first)}.'
    assert log.count(message) == 1
    assert f'To read the new version, name it: {place(second)}.' in log
    saved = checkpoint.open_run(tmp_path / 'run')
    assert versions.list_versions(saved.description.config) == [place(hub.first)]
    # Whoever names a commit gets it. A branch without the data set is of no matter later.
    train(place(second), 'run', 5)
    hub.commit({'README.md': b'All was moved.'})
    assert f'{place(second)}, ' in train(DATA, 'run', 6)
    train(mini_dataset, 'local', 6)
    assert runs.losses(tmp_path / 'run') == runs.losses(tmp_path / 'local')


def test_all_sources_of_a_mixture_are_read_at_their_commits(hub, mini_dataset):
    mix = ({'dir': DATA, 'weight': 2}, {'dir': str(mini_dataset)}, 'no source')
    config = runs.small_config('', **{'data.mix': mix})
    pinned = versions.pin_data_sets(config, None)
    assert pinned.data.mix == ({'dir': place(hub.first), 'weight': 2}, *mix[1:])
    second = hub.commit({**hub.files, 'README.md': b'New.'})
    assert versions.pin_data_sets(config, pinned.to_dict()).data.mix == pinned.data.mix
    assert versions.pin_data_sets(config, None).data.mix[0]['dir'] == place(second)
    assert config.data.mix == mix


@pytest.mark.slow
def test_two_processes_read_one_commit(hub, mini_dataset, tmp_path):
    # As soon as one process has read a file, a branch no longer leads to the data set.
    hub.push_after(1, {'README.md': b'All was moved.'})
    share = {'processes': 2, 'devices': 1}
    settings = SETTINGS | {'num_steps': 4}
    with runs.hosts(DATA, tmp_path / 'hub', **share, **settings) as started:
        codes = runs.wait(started)
        outputs = [host.output.read_text() for host in started]
    assert codes == [0, 0], outputs
    assert place(hub.first) in outputs[0]
    assert hub.num_api_calls <= 2 * 4
    with runs.hosts(mini_dataset, tmp_path / 'local', **share, **settings) as started:
        assert runs.wait(started) == [0, 0]
    assert runs.losses(tmp_path / 'hub') == runs.losses(tmp_path / 'local')
