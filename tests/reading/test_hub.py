"""Training from the hub: the batches of a local data set, whatever the hub and the network do."""

import contextlib
import itertools
import logging
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

import input_pipeline
from tests import built, children
from tests.fakes.cloud import Hub
from tests.reading.batches import assert_same, joined

DATA = 'hf://datasets/owner/name/data'
ORDER = dict(batch_size=16, seed=0, lanes=4, chunk=32, window=64)


def files_on_hub(folder: pathlib.Path) -> dict[str, bytes]:
    return {f'data/{name}': content for name, content in built.files_of(folder).items()}


@pytest.fixture
def hub(hub: Hub, mini_dataset) -> Hub:
    hub.commit(files_on_hub(mini_dataset))
    hub.clear()
    return hub


@pytest.fixture
def restless(hub: Hub, monkeypatch) -> Iterator[Hub]:
    """A hub with quotas, addresses that end soon, delays, resets, and a push in the middle."""
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.002')
    hub.make_restless(after_reads=40)
    yield hub
    assert hub.was_restless


def take(data: object, count: int, **arguments) -> list[dict]:
    with input_pipeline.train_batches(data, **ORDER | arguments) as batches:
        return list(itertools.islice(batches, count))


def test_a_data_set_is_read_at_the_commit_at_which_it_was_opened(hub, mini_dataset):
    data = input_pipeline.open_data(DATA)
    commit = hub.commit({'README.md': b'All was moved.'})
    assert commit not in data.folder
    assert data.folder.startswith(DATA.removesuffix('/data') + '@')
    assert_same(take(data, 5), take(mini_dataset, 5))
    assert_same(take(data.folder, 5), take(mini_dataset, 5))
    with pytest.raises(FileNotFoundError, match=f'{DATA}: there is no such folder'):
        input_pipeline.open_data(DATA)


def test_a_run_takes_few_of_the_requests_that_are_counted(hub, mini_dataset):
    num_files = len(built.files_of(mini_dataset))
    take(DATA, 200)
    assert hub.count('read') > 3 * num_files
    assert hub.count('resolve') <= num_files
    # One lists the commit, and one may be the client's own, for its name.
    assert hub.num_api_calls <= 2


def test_batches_of_a_restless_hub_are_those_of_a_disk(restless, mini_dataset, caplog):
    caplog.set_level(logging.WARNING, 'absl')
    expected = take(mini_dataset, 400)
    data = input_pipeline.open_data(DATA)
    with input_pipeline.train_batches(data, **ORDER) as batches:
        assert_same(list(itertools.islice(batches, 200)), expected[:200])
        state = batches.get_state()
    # Another process goes on, by the commit that the first one has named.
    assert_same(take(data.folder, 200, start=state), expected[200:])
    assert 'quota of resolvers of 12 in 1 s is used up' in caplog.text


_PROCESS = """
    import itertools
    import numpy as np
    import input_pipeline

    folder, file, index, count, order = sys.argv[1:]
    batches = input_pipeline.train_batches(
        folder, process_index=int(index), process_count=2, **eval(order)
    )
    with batches:
        arrays = {}
        for step, batch in enumerate(itertools.islice(batches, int(count))):
            arrays |= {f'{name} {step}': x for name, x in batch.items()}
    np.savez(file, **arrays)
"""


def test_two_processes_read_a_restless_hub(restless, mini_dataset, tmp_path):
    count = 200
    folder = input_pipeline.open_data(DATA).folder
    files = [tmp_path / f'{index}.npz' for index in range(2)]
    with contextlib.ExitStack() as stack:
        processes = []
        for index, file in enumerate(files):
            process = children.python(_PROCESS, folder, file, index, count, ORDER)
            processes.append(stack.enter_context(process))
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    parts = []
    for file in files:
        with np.load(file) as arrays:
            names = {name.partition(' ')[0] for name in arrays}
            parts.append(
                [{name: arrays[f'{name} {step}'] for name in names} for step in range(count)]
            )
    assert_same(joined(parts), take(mini_dataset, count))
