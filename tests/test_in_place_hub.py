"""Latents that stay on the hub, at one commit: the same batches, whatever is pushed later."""

import pathlib
import re
import shutil

import pytest

import input_pipeline
from coyo11m_tfds import add_column, schema, verify
from coyo11m_tfds.convert import tasks
from coyo11m_tfds.source import source_folder
from tests import built
from tests.fakes.cloud import Fault, Hub, fake_hub
from tests.reading.batches import assert_same
from tests.test_in_place import read

REPO = 'hf://datasets/owner/name'


def files_below(folder: pathlib.Path, prefix: str = '') -> dict[str, bytes | pathlib.Path]:
    """The files of a folder by their paths in a repository."""
    files: dict[str, bytes | pathlib.Path] = {}
    for path in folder.rglob('*'):
        if path.is_file():
            files[f'{prefix}{path.relative_to(folder).as_posix()}'] = path
    return files


@pytest.fixture(scope='module')
def described(sample_source, hash_sidecar, tmp_path_factory) -> pathlib.Path:
    """A local data set in place whose source is a commit on the hub."""
    with pytest.MonkeyPatch.context() as patch, fake_hub({}) as server:
        for name, value in server.env.items():
            patch.setenv(name, value)
        server.commit(files_below(sample_source))
        out = tmp_path_factory.mktemp('described')
        return built.build(REPO, hash_sidecar, out, name='here', latents='in_place')


@pytest.fixture
def source(hub: Hub, sample_source) -> str:
    """The commit of the source, after which the repository went on without it."""
    commit = hub.commit(files_below(sample_source))
    hub.commit({'README.md': b'All was moved.'})
    return commit


def test_latents_stay_on_the_hub_at_their_commit(source, described, mini_dataset):
    [column] = input_pipeline.open_data(described).columns.values()
    assert {file.path.partition('@')[2].split('/')[0] for file in column.files} == {source}
    assert_same(read(described, 20), read(mini_dataset, 20))
    for fast in (True, False):
        assert verify.verify(described, fast=fast).faults == []


def test_records_may_lie_in_one_place_of_the_hub_and_latents_in_another(
    source, hub, described, mini_dataset
):
    data = 'coyo11m_tfds/here/1.0.0'
    hub.commit(files_below(described, f'{data}/'), branch='records')
    assert_same(read(f'{REPO}@records/{data}', 20), read(mini_dataset, 20))


def test_both_are_read_from_two_restless_repositories(
    source, hub, described, mini_dataset, monkeypatch
):
    """With quotas, addresses that end, faults, and a push in the middle."""
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.002')
    hub.commit(files_below(described), repo='other/records')
    data = input_pipeline.open_data('hf://datasets/other/records')
    hub.commit({'README.md': b'All was moved.'}, repo='other/records')
    hub.clear()
    hub.make_restless(after_reads=40)
    expected = read(mini_dataset, 120)
    assert_same(read(data, 120), expected)
    assert hub.was_restless
    # One listing of each repository, one for the name of the client, and those that were refused.
    assert sum(r.action == 'info' and r.status == 200 for r in hub.requests) <= 2
    for process in range(2):
        own_rows = slice(8 * process, 8 * process + 8)
        parts = [{name: x[own_rows] for name, x in batch.items()} for batch in expected[:60]]
        assert_same(read(data, 60, process_index=process, process_count=2), parts)


def test_damage_on_the_way_is_read_again(source, hub, described, mini_dataset):
    expected = read(mini_dataset, 20)
    hub.inject(Fault('flip', 2, match='.pt', action='read'))
    assert_same(read(described, 20), expected)
    hub.inject(Fault('flip', match='.pt', action='read'))
    assert verify.verify(described).faults == []


def test_a_file_that_the_hub_no_longer_has_is_named(hub, described):
    hub.commit({'README.md': b'The history was rewritten.'})
    with pytest.raises(ValueError, match=rf'^{REPO}@\w+/.*\.pt: is missing, but holds latents'):
        read(described, 1)
    fault, *_ = verify.verify(described, fast=True).faults
    assert re.match(rf'{REPO}@\w+/.*\.pt: is missing', fault)


def test_what_is_local_cannot_be_read_from_afar(source, sample_source):
    local = source_folder.find_source(sample_source).latent_files[0]
    remote = source_folder.find_source(f'{REPO}@{source}').latent_files[0]
    assert remote.path.startswith(f'{REPO}@{source}/{schema.LATENTS_FOLDER}/')
    for final in ('gs://bucket/data', '/data'):
        tasks.check_within_reach(remote, final)
    with pytest.raises(ValueError, match=r'a file on gs:// or hf://, as the data set is not local'):
        tasks.check_within_reach(local, 'gs://bucket/data')


@pytest.fixture
def from_copy(sample_source, hash_sidecar, tmp_path) -> tuple[pathlib.Path, pathlib.Path]:
    """A data set in place and the copy of the hub's files that it was built from."""
    copied = shutil.copytree(sample_source, tmp_path / 'copy')
    return built.build(copied, hash_sidecar, tmp_path / 'out', latents='in_place'), copied


def test_a_set_of_a_copy_is_moved_to_the_hub(
    source, hub, sample_source, from_copy, mini_dataset, command
):
    path, copied = from_copy
    arguments = f'--data_dir={path}', '--name=latents', f'--source={REPO}@{source}'
    assert command(add_column, *arguments)[0] == 0
    shutil.rmtree(copied)
    [column] = input_pipeline.open_data(path).columns.values()
    assert all(file.path.startswith(f'{REPO}@{source}/') for file in column.files)
    assert_same(read(path, 20), read(mini_dataset, 20))
    assert verify.verify(path).faults == []
    # A later commit has the same files.
    later = hub.commit({**files_below(sample_source), 'README.md': b'New.'}, branch='later')
    add_column.move_latents(path, f'{REPO}@later')
    [column] = input_pipeline.open_data(path).columns.values()
    assert all(file.path.startswith(f'{REPO}@{later}/') for file in column.files)


def test_a_copy_is_compared_with_the_hub_to_its_last_byte(source, hub, from_copy):
    """Also where the directory of the zip says that both are equal."""
    path, copied = from_copy
    files = files_below(copied)
    name = min(name for name in files if name.endswith('.pt'))
    whole = bytearray(files[name].read_bytes())
    whole[len(whole) // 2] ^= 1
    hub.commit({**files, name: bytes(whole)}, branch='other')
    with pytest.raises(
        ValueError, match=rf'{name}: is another file than {copied}/{name}, on which'
    ):
        add_column.move_latents(path, f'{REPO}@other')
    add_column.move_latents(path, f'{REPO}@{source}')
    with pytest.raises(ValueError, match=rf'{name}: has changed .* its SHA-256 is'):
        add_column.move_latents(path, f'{REPO}@other')
    hub.commit({name: files[name]}, branch='fewer')
    with pytest.raises(ValueError, match=r'\.pt is missing, but holds latents'):
        add_column.move_latents(path, f'{REPO}@fewer')
