"""A data set is whole at any moment, in its place or in the folder of the build, and gets there."""

import json
import os
import pathlib
import subprocess
import sys

import google_crc32c
import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.build import build_folder
from coyo11m_tfds.build.build_folder import BuildFolder
from coyo11m_tfds.storage import build_lock
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState
from tests.checkout import CHECKOUT
from tests.fakes.cloud import Fault

OLD = {'a': b'old', 'only-old': b'old', schema.INFO_FILE: b'{"old": 1}'}
NEW = {'a': b'new', 'b': b'new', schema.INFO_FILE: b'{"new": 1}'}
# Metadata say nothing of what is in damaged shards.
SAME_INFO = NEW | {'a': b'damaged', 'only-old': b'old'}


def fill(folder: Destination, sub: str, files: dict[str, bytes]) -> dict[str, FileState]:
    for name, data in files.items():
        folder.put_bytes(f'{sub}/{name}' if sub else name, data)
    return {name: FileState(len(data), google_crc32c.value(data)) for name, data in files.items()}


def files_in(final: str) -> dict[str, bytes]:
    return Destination(final).read_all('')


def replace(final: str, digest: str = 'digest') -> None:
    """A whole build, but for the work."""
    folder = BuildFolder(final)
    folder.begin()
    states = fill(folder.work, schema.BUILD_DATA, NEW)
    fill(folder.work, schema.BUILD_DATA, {'of-other-settings': b''})
    folder.commit(states, digest)


@pytest.fixture(params=['local', 'bucket'])
def final(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """Where the data set will be; nothing is there yet."""
    if request.param == 'local':
        return str(tmp_path / 'x' / '1.0.0')
    request.getfixturevalue('gcs')
    return 'gs://bucket/x/1.0.0'


# Whether it is there is asked in this process by another client, which the server cannot lead here.
@pytest.fixture(autouse=True)
def plain_exists(monkeypatch: pytest.MonkeyPatch):
    def is_complete(folder: BuildFolder) -> bool:
        return schema.INFO_FILE in Destination(folder.final).read_all('')

    monkeypatch.setattr(BuildFolder, 'is_complete', is_complete)


def beside(final: str) -> dict[str, bytes]:
    return Destination(final + schema.BUILD_SUFFIX).read_all('')


@pytest.mark.parametrize('old', [{}, OLD, SAME_INFO])
def test_a_build_takes_the_place_of_what_is_there(final: str, old: dict):
    fill(Destination(final), '', old)
    replace(final)
    assert files_in(final) == NEW
    assert beside(final) == {}
    assert BuildFolder(final).finish() == ''


def test_what_is_not_complete_is_replaced(final: str):
    """As an interrupted removal leaves it."""
    fill(Destination(final), '', {'only-old': b'old'})
    replace(final)
    assert files_in(final) == NEW


def test_a_shard_that_is_not_what_was_written_is_no_success(final: str):
    folder = BuildFolder(final)
    folder.begin()
    states = fill(folder.work, schema.BUILD_DATA, NEW)
    folder.work.put_bytes(f'{schema.BUILD_DATA}/b', b'other')
    with pytest.raises(OSError, match='data/b: found'):
        folder.commit(states, 'digest')
    assert files_in(final) == {}


@pytest.mark.parametrize('state', ['replacing', 'late'])
def test_tidying_keeps_what_can_be_resumed_and_nothing_else(final: str, state: str):
    fill(Destination(final), '', OLD)
    folder = BuildFolder(final)
    if state == 'replacing':
        folder.begin()
    fill(folder.work, schema.BUILD_DATA, {'a': b'new'})  # also what a builder does that wakes late
    BuildFolder(final).tidy()
    kept = folder.work.read_all(schema.BUILD_DATA)
    assert kept == ({'a': b'new'} if state == 'replacing' else {})
    assert files_in(final) == OLD


# --- Killed -----------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from tests.build import test_build_folder
from coyo11m_tfds import schema
from coyo11m_tfds.build.build_folder import BuildFolder
from coyo11m_tfds.storage.destination import Destination

final, old = sys.argv[1], getattr(test_build_folder, sys.argv[2], {})
count = 0

def dying(function):
    def step(*args, **kwargs):
        global count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return step

os.fsync = lambda handle: None  # it takes long, and a kill loses nothing that was written
for die_at in range(1, 200):
    place = f'{final}-{die_at}/1.0.0'
    BuildFolder.is_complete = lambda folder: os.path.exists(f'{place}/{schema.INFO_FILE}')
    test_build_folder.fill(Destination(place), '', old)
    child = os.fork()
    if not child:
        for name in ('replace', 'rename', 'remove', 'unlink', 'rmdir', 'mkdir', 'open', 'stat'):
            setattr(os, name, dying(getattr(os, name)))
        if len(sys.argv) > 3:
            import ctypes
            ctypes.CDLL = lambda *_, **__: None
        test_build_folder.replace(place)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(place, status == 0, flush=True)
    if status == 0:
        break
"""


@pytest.mark.parametrize(
    ('old', 'exchange'), [('', True), ('OLD', True), ('SAME_INFO', True), ('OLD', False)]
)
def test_killed_before_any_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, old: str, exchange: bool
):
    """Before every call that changes something on the disk: 80 or so."""
    command = [sys.executable, '-c', _KILLED, str(tmp_path / 'x'), old]
    command += [] if exchange else ['without']
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    places = [line.split()[0] for line in ended.stdout.splitlines()]
    assert ended.stdout.endswith('True\n') and len(places) > 30, ended.stderr
    monkeypatch.setattr(os, 'fsync', lambda handle: None)
    outcomes = set()
    before = globals()[old] if old else {}
    for place in places:
        found = files_in(place)
        # For a moment, and only where two folders cannot be exchanged, it has to be moved in first.
        assert found in (before, NEW) or (found == {} and not exchange)
        left = [p for p in pathlib.Path(f'{place}.building').rglob('*') if p.is_file()]
        folder = BuildFolder(place)
        digest = folder.finish()  # as the next build does, with `--overwrite` or without
        # Whoever finds the new one in its place, and what a kill left, knows that it was built.
        assert digest or found != NEW or not left
        found = files_in(place)
        assert found == (NEW if digest else found) and found in (before, NEW)
        outcomes.add((bool(digest), found == NEW))
        if found == before and not digest:
            replace(place)
            found = files_in(place)
        elif not digest:
            folder.tidy()
        assert found == NEW
        left = {path.name for path in pathlib.Path(place).parent.iterdir()}
        assert left == {'1.0.0'}
    assert {(False, False), (True, True)} <= outcomes


_KILLED_IN_BUCKET = """
import os, signal, sys, threading
import requests
from tests.build import test_build_folder
from coyo11m_tfds import schema
from coyo11m_tfds.build.build_folder import BuildFolder
from coyo11m_tfds.storage.destination import Destination

place, die_at = sys.argv[1], int(sys.argv[2])
BuildFolder.is_complete = lambda folder: True
send, mutex, count = requests.Session.request, threading.Lock(), 0

def request(session, method, url, *args, **kwargs):
    global count
    if method != 'GET':
        with mutex:
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return send(session, method, url, *args, **kwargs)

requests.Session.request = request
test_build_folder.replace(place)
print('done')
"""


def test_killed_before_any_request_that_changes_the_bucket(gcs):
    done = False
    for die_at in range(2, 40, 3):
        place = f'gs://bucket/{die_at}/1.0.0'
        fill(Destination(place), '', OLD)
        command = [sys.executable, '-c', _KILLED_IN_BUCKET, place, str(die_at)]
        ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
        done = ended.stdout == 'done\n'
        data = Destination(place + schema.BUILD_SUFFIX).read_all(schema.BUILD_DATA)
        whole = [files for files in (files_in(place), data) if files in (OLD, NEW)]
        assert whole, die_at
        BuildFolder(place).finish()
        assert files_in(place) in (OLD, NEW)
        if files_in(place) == OLD:
            replace(place)
        assert files_in(place) == NEW
        names = [name for name in gcs.objects('bucket') if name.startswith(f'{die_at}/')]
        assert all(name.startswith(f'{die_at}/1.0.0/') for name in names)
        if done:
            break
    assert done


def test_who_lost_the_lease_changes_nothing(gcs):
    """A listed the objects and fell asleep; B finished; A wakes up before the check or after it."""
    place = 'gs://bucket/x/1.0.0'
    fill(Destination(place), '', OLD)
    first = True

    def sleep() -> None:
        nonlocal first
        if first and gcs.objects('bucket').get('x/1.0.0.building/journal.json', b'').count(
            b'complete'
        ):
            first = False
            other = BuildFolder(place)
            other.finish()
            assert files_in(place) == NEW

    folder = BuildFolder(place, sleep)
    folder.begin()
    states = fill(folder.work, schema.BUILD_DATA, NEW)
    with pytest.raises(OSError, match=r'changed it|No such object'):
        folder.commit(states, 'digest')
    assert not first
    assert files_in(place) == NEW


# --- What is left beside a data set -----------------------------------------------------------


def test_nothing_but_a_listing_where_nothing_is_left(tmp_path, monkeypatch):
    final = tmp_path / '1.0.0'
    fill(Destination(final), '', NEW)

    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(build_lock, 'hold', refuse)
    build_folder.settle(str(final))


def test_leftovers_are_removed_and_a_dead_lock_too(tmp_path):
    final = tmp_path / '1.0.0'
    fill(Destination(final), '', NEW)
    fill(Destination(f'{final}.building'), 'finished', {'a': b''})
    (tmp_path / '1.0.0.lock').write_text('{}')
    build_folder.settle(str(final))
    assert [path.name for path in tmp_path.iterdir()] == ['1.0.0']
    (tmp_path / '1.0.0.lock').write_text('{}')
    build_folder.settle(str(final))
    assert [path.name for path in tmp_path.iterdir()] == ['1.0.0']


def test_what_a_living_process_does_is_left_alone(tmp_path, caplog):
    final = tmp_path / '1.0.0'
    fill(Destination(final), '', NEW)
    fill(Destination(f'{final}.building'), 'finished', {'a': b''})
    with caplog.at_level('INFO', logger='absl'), build_lock.hold(final, 0):
        build_folder.settle(str(final))
    assert (tmp_path / '1.0.0.building' / 'finished' / 'a').exists()
    assert 'is working there' in caplog.text


def test_only_the_first_process_of_a_job_cleans_up(tmp_path, monkeypatch):
    final = tmp_path / '1.0.0'
    fill(Destination(final), '', NEW)
    fill(Destination(f'{final}.building'), 'finished', {'a': b''})
    monkeypatch.setenv('RANK', '1')
    build_folder.settle(str(final))
    assert (tmp_path / '1.0.0.building').exists()


def test_who_may_only_read_is_warned(gcs, monkeypatch, caplog):
    final = 'gs://bucket/x/1.0.0'
    fill(Destination(final), '', NEW)
    names = [pathlib.PurePosixPath('1.0.0'), pathlib.PurePosixPath('1.0.0.lock')]
    path = type('Path', (), {'__init__': lambda *_: None, 'iterdir': lambda _: names})
    monkeypatch.setattr(build_folder.epath, 'Path', path)
    gcs.inject(Fault('403', count=None, method='POST'), Fault('403', count=None, method='DELETE'))
    build_folder.settle(final)
    assert 'cannot remove what an interrupted build left' in caplog.text


# --- Failures that others read ----------------------------------------------------------------


def test_a_failure_is_told_to_the_other_processes_of_a_job(final: str, monkeypatch):
    monkeypatch.setenv('RANK', '0')
    folder = BuildFolder(final)
    with pytest.raises(ValueError, match='bad'), folder.telling_failure():
        raise ValueError('bad source')
    assert BuildFolder(final).failure() == 'ValueError: bad source'
    with folder.telling_failure():  # the next attempt
        assert BuildFolder(final).failure() == ''


def test_a_process_that_is_alone_tells_nobody(final: str):
    with pytest.raises(ValueError, match='bad'), BuildFolder(final).telling_failure():
        raise ValueError('bad source')
    assert beside(final) == {}


def test_a_failure_that_cannot_be_told_does_not_hide_the_first_one(tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', '0')
    folder = BuildFolder(str(tmp_path / '1.0.0'))
    with pytest.raises(ValueError, match='bad'), folder.telling_failure():
        (tmp_path / '1.0.0.building').write_text('no folder')
        raise ValueError('bad source')


def test_the_journal_is_json(tmp_path):
    folder = BuildFolder(str(tmp_path / '1.0.0'))
    folder.begin()
    assert json.loads((tmp_path / '1.0.0.building' / 'journal.json').read_text()) == {
        'state': 'building'
    }
