"""A build becomes the data set in one step, and whatever happens one data set is whole."""

import itertools
import json
import os
import pathlib
import tempfile

import google_crc32c
import pytest

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert import data_folder
from coyo11m_tfds.convert.data_folder import DataFolder, FinishedShards, sub_folder
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.file_state import FileState
from tests import children
from tests.fakes.cloud import Fault

OLD, NEW, OTHER = '01d01d01', '2e32e32e', '07e307e3'  # IDs of builds


def shards_of(build: str, count: int = 3) -> dict[str, bytes]:
    names = [schema.shard_filename('train', number, count) for number in range(count)]
    return {schema.of_build(name, build): f'{name} {build}'.encode() for name in names}


def small_files(build: str) -> dict[str, bytes]:
    template = schema.of_build('{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}', build)
    return {
        schema.INFO_FILE: json.dumps({'splits': [{'filepathTemplate': template}]}).encode(),
        schema.FEATURES_FILE: f'{{"of": "{build}"}}'.encode(),
        schema.METADATA_FILE: json.dumps({schema.META_BUILD: build}).encode(),
    }


def expected(build: str, count: int = 3) -> dict[str, bytes]:
    return shards_of(build, count) | small_files(build)


def write(final: str, build: str, count: int = 3) -> dict[str, FileState]:
    """What a build does until it is complete; returns the states of its files."""
    files = storage.open_writable_folder(final)
    FinishedShards(files, build).begin({})
    content = shards_of(build, count)
    for name, data in content.items():
        files.write(name, data)
        files.write(f'{sub_folder(build)}/{name}.json', b'{}')
    content |= small_files(build)
    states = {n: FileState(len(data), google_crc32c.value(data)) for n, data in content.items()}
    with tempfile.TemporaryDirectory() as folder:
        manifest.write_checksums(folder, states, build)
        checksums = schema.of_build(schema.CHECKSUMS_FILE, build)
        data = pathlib.Path(folder, checksums).read_bytes()
    files.write(checksums, data)
    return states


def publish(final: str, build: str, states: dict[str, FileState], overwrite: bool = True) -> None:
    folder = DataFolder(final)
    with tempfile.TemporaryDirectory() as local:
        paths = {name: os.path.join(local, name) for name in small_files(build)}
        for name, data in small_files(build).items():
            pathlib.Path(paths[name]).write_bytes(data)
        folder.publish(build, states, paths, overwrite)
    folder.remove_others(build)


def build_all(final: str, build: str, count: int = 3) -> None:
    publish(final, build, write(final, build, count))


def names_of(build: str, count: int = 3) -> set[str]:
    checksums = schema.of_build(schema.CHECKSUMS_FILE, build)
    return {*expected(build, count), checksums}


@pytest.fixture
def final(place) -> str:
    """Where the data set will be; nothing is there yet."""
    return f'{place}/1.0.0'


def test_a_build_takes_the_place_of_another_of_which_only_its_files_go(final):
    files = storage.open_writable_folder(final)
    build_all(final, OLD, 4)
    files.write('mine.txt', b'of the user')
    files.write(f'column_x-train-{OLD}.npy', b'of the user, too: no record names it')
    kept = {'mine.txt', f'column_x-train-{OLD}.npy'}
    for build in (NEW, NEW):
        build_all(final, build)
        assert DataFolder(final).find_build() == build
        assert set(files.sizes()) == names_of(build) | kept


def test_what_a_killed_build_of_another_plan_left_goes_with_the_next_that_is_completed(final):
    build_all(final, OLD)
    write(final, OTHER)
    build_all(final, NEW)
    assert set(storage.open_writable_folder(final).sizes()) == names_of(NEW)


def test_a_shard_that_is_not_what_was_written_is_no_success(final):
    build_all(final, OLD)
    states = write(final, NEW)
    shard = min(shards_of(NEW))
    storage.open_writable_folder(final).write(shard, b'other')
    with pytest.raises(OSError, match=f'{shard}: has 5 bytes'):
        publish(final, NEW, states)
    assert DataFolder(final).find_build() == OLD


def test_another_build_that_was_completed_meanwhile_is_replaced_only_if_that_is_asked(
    final, monkeypatch
):
    states = write(final, NEW)
    with monkeypatch.context() as patched:
        patched.setattr(DataFolder, 'remove_others', lambda *_: None)
        build_all(final, OTHER)
    with pytest.raises(FileExistsError, match=f'build {OTHER} was completed here while {NEW}'):
        publish(final, NEW, states, overwrite=False)
    assert DataFolder(final).find_build() == OTHER
    publish(final, NEW, states)
    assert set(storage.open_writable_folder(final).sizes()) == names_of(NEW)


def test_no_byte_is_moved_twice(gcs):
    """Every byte of a build is sent once, and none copied within the bucket."""
    build_all('gs://bucket/x/1.0.0', OLD)
    gcs.clear()
    build_all('gs://bucket/x/1.0.0', NEW)
    sent = [r.path for r in gcs.requests if r.action == 'upload']
    assert len(sent) == len(set(sent))
    assert not [r for r in gcs.requests if r.action == 'copy']


_KILLED = """
import itertools, os
from tests import children
from tests.convert import test_data_folder as test

os.fsync = int  # it takes long
for moment in itertools.count():
    place = f'{sys.argv[1]}-{moment}/1.0.0'
    test.build_all(place, test.OLD)
    states = test.write(place, test.NEW)
    is_killed = children.killed_at(moment, lambda: test.publish(place, test.NEW, states))
    print(place, flush=True)
    if not is_killed:
        break
"""


def check_and_mend(final: str) -> str:
    """After a kill: what is there is whole, and the next build ends with the new one alone."""
    files, folder = storage.open_writable_folder(final), DataFolder(final)
    found = folder.find_build()
    content = files.read_all('')
    if found:
        assert expected(found).items() <= content.items()
    assert shards_of(NEW).items() <= content.items()
    if found == NEW:
        folder.remove_others(NEW, resumable_too=False)  # as a plain build does
    else:
        build_all(final, NEW)
    assert files.read_all('').items() >= expected(NEW).items()
    assert set(files.sizes()) == names_of(NEW)
    return found or ''


def test_killed_before_any_step(tmp_path, monkeypatch):
    with children.python(_KILLED, tmp_path / 'x') as child:
        out, errors = child.communicate(timeout=120)
    places = out.split()
    assert child.returncode == 0 and len(places) > 15, errors
    monkeypatch.setattr(os, 'fsync', lambda handle: None)
    states = [check_and_mend(place) for place in places]
    assert [state for state, _ in itertools.groupby(states)] == [OLD, '', NEW]
    assert states.count('') <= 3  # one for each of the files that say that it is complete


def test_nothing_but_a_look_where_nothing_is_left(final, monkeypatch):
    build_all(final, OLD)

    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(locks, 'hold', refuse)
    data_folder.tidy(final)


def leave_records(final: str) -> set[str]:
    """What a kill right after the last step but one leaves."""
    build_all(final, NEW)
    FinishedShards(storage.open_writable_folder(final), NEW).begin({})
    return set(storage.open_writable_folder(final).sizes())


def test_what_only_its_build_needed_is_removed(final):
    leave_records(final)
    data_folder.tidy(final)
    assert set(storage.open_writable_folder(final).sizes()) == names_of(NEW)


def test_what_a_living_process_does_is_left_alone(final, caplog):
    left = leave_records(final)
    with caplog.at_level('INFO', logger='absl'), locks.hold(final):
        data_folder.tidy(final)
    assert set(storage.open_writable_folder(final).sizes()) == left
    assert 'is working there' in caplog.text


def test_only_the_first_process_of_a_job_cleans_up(final, monkeypatch):
    left = leave_records(final)
    monkeypatch.setenv('RANK', '1')
    data_folder.tidy(final)
    assert set(storage.open_writable_folder(final).sizes()) == left


def test_who_may_only_read_is_warned(gcs, caplog):
    final = 'gs://bucket/x/1.0.0'
    leave_records(final)
    gcs.inject(Fault('403', count=None, match='^(POST|DELETE)'))
    data_folder.tidy(final)
    assert 'cannot remove what an interrupted build left' in caplog.text
