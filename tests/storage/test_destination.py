"""Tests of destinations: whole files or none, and what a resumed build can trust."""

import os
import pathlib
import random
import tempfile
import time

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds.storage import held_folder
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.local_folder import LocalFolder
from tests import children

SHARED_MEMORY = pathlib.Path('/dev/shm')  # another file system, on Linux


def _state(data: bytes) -> FileState:
    return FileState(len(data), google_crc32c.value(data))


def _put(destination: Destination, fallback: pathlib.Path, name: str, data: bytes) -> None:
    path = pathlib.Path(destination.staging(fallback)) / name.replace('/', '-')
    path.write_bytes(data)
    destination.put(path, name, google_crc32c.value(data))
    assert not path.exists()


@settings(max_examples=25)  # each waits for the disk
@given(
    files=st.dictionaries(
        st.tuples(
            st.sampled_from(['', 'a', 'a/b']), st.from_regex(r'[a-z0-9]{1,8}\.x', fullmatch=True)
        ),
        st.tuples(st.booleans(), st.binary(max_size=200)),
        max_size=6,
    )
)
def test_what_was_put_is_there(files):
    with tempfile.TemporaryDirectory() as folder:
        destination = Destination(f'{folder}/new')
        for (sub, name), (small, data) in files.items():
            path = f'{sub}/{name}' if sub else name
            if small:
                destination.put_bytes(path, data)
            else:
                _put(destination, pathlib.Path(folder), path, data)
        for sub in ('', 'a', 'a/b', 'missing'):
            of_sub = {name: data for (s, name), (_, data) in files.items() if s == sub}
            assert destination.read_all(sub) == of_sub
            assert destination.inventory(sub) == {n: _state(d) for n, d in of_sub.items()}


def test_names_are_replaced(tmp_path):
    destination = Destination(tmp_path)
    _put(destination, tmp_path, 'x', b'old')
    _put(destination, tmp_path, 'x', b'new')
    destination.put_bytes('y', b'old')
    destination.put_bytes('y', b'new')
    assert destination.read_all('') == {'x': b'new', 'y': b'new'}


def test_put_only_renames_a_staged_file(tmp_path):
    destination = Destination(tmp_path / 'out')
    staged = pathlib.Path(destination.staging('/nowhere')) / 'x'
    staged.write_bytes(b'content')
    inode = staged.stat().st_ino
    destination.put(staged, 'sub/x', google_crc32c.value(b'content'))
    assert (tmp_path / 'out' / 'sub' / 'x').stat().st_ino == inode


@pytest.fixture
def elsewhere(tmp_path):
    """A folder on another file system than `tmp_path`."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip('needs two file systems')
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield pathlib.Path(folder)


def test_put_from_another_file_system(tmp_path, elsewhere):
    data = random.Random(0).randbytes(9_000_000)
    (elsewhere / 'x').write_bytes(data)
    destination = Destination(tmp_path)
    destination.put(elsewhere / 'x', 'x', google_crc32c.value(data))
    assert destination.inventory() == {'x': _state(data)}
    assert list(elsewhere.iterdir()) == []
    assert list((tmp_path / '.staging').iterdir()) == []


def test_a_file_that_changed_is_not_stored(tmp_path, elsewhere):
    (elsewhere / 'x').write_bytes(b'other content')
    destination = Destination(tmp_path)
    with pytest.raises(OSError, match=f'{elsewhere}/x: CRC-32C is .* expected 00000001'):
        destination.put(elsewhere / 'x', 'x', 1)
    assert destination.inventory() == {}
    assert list((tmp_path / '.staging').iterdir()) == []


def test_inventory_tells_every_changed_byte(tmp_path):
    destination = Destination(tmp_path)
    data = random.Random(1).randbytes(5_000_000)
    destination.put_bytes('x', data)
    for position in (0, 4_194_304, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        (tmp_path / 'x').write_bytes(changed)
        assert destination.inventory()['x'].crc32c != google_crc32c.value(data)
    read = []
    (tmp_path / 'x').write_bytes(data[:-1])
    assert destination.inventory(on_bytes=read.append)['x'].size == len(data) - 1 == sum(read)


_LIMITED = """
import resource, signal
from coyo11m_tfds.storage.destination import Destination

# A write beyond this size fails as on a full disk, with OSError instead of a signal.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
destination = Destination(sys.argv[1])
destination.put_bytes('small', bytes(4096))
try:
    destination.put_bytes('large', bytes(1_000_000))
except OSError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with children.python(_LIMITED, tmp_path) as child:
        out, errors = child.communicate(timeout=120)
    assert str(tmp_path) in out and 'too large' in out, errors
    assert Destination(tmp_path).inventory() == {'small': _state(bytes(4096))}
    assert list((tmp_path / '.staging').iterdir()) == []


_ENDLESS = """
import pathlib, random
import google_crc32c
from coyo11m_tfds.storage.destination import Destination

destination = Destination(sys.argv[1])
staging = pathlib.Path(destination.staging('/nowhere'))
print('started', flush=True)
for i in range(1_000_000):
    data = i.to_bytes(4, 'big') * random.randrange(1, 200_000)
    (staging / 'x').write_bytes(data)
    destination.put(staging / 'x', f'parts/x{i % 50}', google_crc32c.value(data))
    destination.put_bytes(f'parts/y{i % 50}', data)
"""


def test_killed_while_putting(tmp_path):
    for seed in range(4):
        with children.python(_ENDLESS, tmp_path) as child:
            assert child.stdout.readline() == 'started\n'
            time.sleep(random.Random(seed).uniform(0.02, 0.15))
            child.kill()
        files = Destination(tmp_path).read_all('parts')
        assert files
        for name, data in files.items():
            number = int.from_bytes(data[:4], 'big')
            assert data == data[:4] * (len(data) // 4)
            assert int(name[1:]) == number % 50
    Destination(tmp_path).sweep()
    assert [p.name for p in tmp_path.iterdir()] == ['parts']


@pytest.mark.parametrize('name', ['{abs}/x', '../x', 'a/../../x', 'a//x', './x', 'a\\x', 'a\0x'])
def test_names_that_lead_elsewhere(tmp_path, name):
    name = name.format(abs=tmp_path)
    destination = Destination(tmp_path / 'out')
    staged = pathlib.Path(destination.staging('/nowhere')) / 'x'
    staged.write_bytes(b'1')
    for put in (
        lambda: destination.put_bytes(name, b'1'),
        lambda: destination.put(staged, name, google_crc32c.value(b'1')),
    ):
        with pytest.raises(ValueError, match='is not the name of a file in'):
            put()
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['.staging', 'out', 'x']


def test_verify_names_the_file_that_differs(tmp_path):
    destination = Destination(tmp_path)
    for name in ('a', 'sub/b', 'other'):
        destination.put_bytes(name, b'12')
    states = {'a': _state(b'12'), 'sub/b': _state(b'12')}
    destination.verify(states)
    with pytest.raises(OSError, match=r'/c: found no such file, expected 2'):
        destination.verify(states | {'c': states['a']})
    (tmp_path / 'sub' / 'b').write_bytes(b'1')
    with pytest.raises(OSError, match=r'sub/b: found 1, expected 2'):
        destination.verify(states)


def test_a_sweep_leaves_what_a_living_process_writes(tmp_path):
    destination = Destination(tmp_path)
    destination.put_bytes('x', b'1')
    staging = pathlib.Path(destination.staging(''))
    (staging / 'of-a-killed-one').write_bytes(b'1')
    (staging / 'held-1').mkdir()
    (staging / 'held-1.lock').touch()
    (tmp_path / 'empty').mkdir()
    with held_folder.make(staging, 'other-') as held:
        (pathlib.Path(held) / 'y').write_bytes(b'1')
        destination.sweep()
        assert {path.name for path in staging.iterdir()} == {*_with_lock(held)}
        assert os.listdir(held) == ['y']
    destination.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ['x']


def _with_lock(path: str) -> tuple[str, str]:
    name = os.path.basename(path)
    return name, f'{name}.lock'


def test_what_is_there_survives_a_loss_of_power(tmp_path, monkeypatch):
    steps: list[tuple[str, ...]] = []

    def note_sync(handle: int, sync=os.fsync) -> None:
        steps.append(('sync', os.readlink(f'/proc/self/fd/{handle}')))
        sync(handle)

    def note_move(path: str, target: str, move=os.replace) -> None:
        steps.append(('move', path, target))
        move(path, target)

    monkeypatch.setattr(os, 'fsync', note_sync)
    monkeypatch.setattr(os, 'replace', note_move)
    monkeypatch.setattr(os, 'rename', note_move)
    out = f'{tmp_path}/out'
    destination = Destination(out)
    _put(destination, tmp_path, 'work/x', b'1')
    assert ('sync', out) in steps  # knows the name of its new sub-folder
    assert steps[-3:] == [
        ('sync', f'{out}/.staging/work-x'),
        ('move', f'{out}/.staging/work-x', f'{out}/work/x'),
        ('sync', f'{out}/work'),
    ]
    destination.put_bytes('work/y', b'2')
    (_, synced), (_, moved, target), (_, folder) = steps[-3:]
    assert (synced, target, folder) == (moved, f'{out}/work/y', f'{out}/work')


def test_what_others_remove_while_it_is_read(tmp_path, monkeypatch):
    destination = Destination(tmp_path)
    fill(destination, {'x': b'1', 'y': b'2'})
    listed = LocalFolder._files

    def list_and_remove(folder: LocalFolder, *args) -> dict[str, str]:
        files = listed(folder, *args)
        (tmp_path / 'x').unlink(missing_ok=True)
        return files

    monkeypatch.setattr(LocalFolder, '_files', list_and_remove)
    assert destination.read_all('') == {'y': b'2'}
    destination.put_bytes('x', b'1')
    assert destination.inventory() == {'y': _state(b'2')}


# --- On a disk and in a bucket ----------------------------------------------------------------


@pytest.fixture(params=['local', 'bucket'])
def destination(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Destination:
    """A folder that does not exist yet."""
    if request.param == 'local':
        return Destination(tmp_path / 'a')
    request.getfixturevalue('gcs')
    return Destination('gs://bucket/a')


def fill(destination: Destination, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        destination.put_bytes(name, data)


def test_removing(destination):
    fill(destination, dict.fromkeys(('a', 'sub/b', 'sub/deep/c', 'sub/deep/d'), b'12'))
    assert destination.sizes() == dict.fromkeys(('a', 'sub/b', 'sub/deep/c', 'sub/deep/d'), 2)
    for _ in range(2):
        destination.remove(['sub/b', 'sub/deep/c', 'nothing', 'no/folder'])
        assert destination.sizes() == {'a': 2, 'sub/deep/d': 2}
    destination.remove(['sub/deep/d'])
    assert destination.sizes() == {'a': 2}
    assert destination.read('a') == b'12'
    assert destination.read('sub/b') is None


def test_only_some_names(destination):
    fill(destination, dict.fromkeys(('a', 'b', 'c', 'sub/b'), b'1'))
    assert set(destination.inventory(names=['a', 'c', 'd'])) == {'a', 'c'}
    assert set(destination.read_all('', ['a', 'd'])) == {'a'}
    assert set(destination.read_all('sub')) == {'b'}
