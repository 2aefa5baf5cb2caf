"""Tests of destinations: whole files or none, and what a resumed build can trust."""

import ctypes
import errno
import os
import pathlib
import random
import shutil
import tempfile
import time

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.local_folder import LocalFolder
from tests import children

LAST = 'dataset_info.json'
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


def test_promote(tmp_path):
    destination = Destination(tmp_path)
    for name in ('a', 'sub/b', LAST):
        destination.put_bytes(f'parts/{name}', name.encode())
    for _ in range(2):  # the second time there is nothing to do
        destination.promote('parts', 'final', LAST)
        assert destination.read_all('final') == {'a': b'a', LAST: LAST.encode()}
        assert destination.read_all('final/sub') == {'b': b'sub/b'}
        assert not (tmp_path / 'parts').exists()


def test_promote_takes_the_place_of_an_empty_folder(tmp_path):
    destination = Destination(tmp_path)
    destination.put_bytes(f'parts/{LAST}', b'{}')
    (tmp_path / 'final').mkdir()
    destination.promote('parts', 'final', LAST)
    assert destination.read_all('final') == {LAST: b'{}'}


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
        with pytest.raises(ValueError, match='is no name of a file in'):
            put()
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['.staging', 'out', 'x']


@pytest.mark.parametrize('number', [0, errno.ENOSYS, errno.EINVAL])
def test_promote_replaces_what_is_complete_if_it_is_told_to(tmp_path, monkeypatch, number: int):
    destination = Destination(tmp_path)
    destination.put_bytes(f'work/parts/{LAST}', b'new')
    destination.put_bytes(f'final/{LAST}', b'old')
    destination.put_bytes('final/of-the-old-one', b'')
    parts = destination.identity('work/parts', LAST)
    old = destination.identity('final', LAST)
    if number:  # a system that cannot exchange two folders
        monkeypatch.setattr(ctypes, 'CDLL', lambda *_, **__: _NoExchange(number))
    destination.promote('work/parts', 'final', LAST, replace=True)
    assert destination.read_all('final') == {LAST: b'new'}
    assert destination.identity('final', LAST) == parts
    kept = 'work/parts.old' if number else 'work/parts'
    assert destination.identity(kept, LAST) == old
    assert destination.identity('work/nothing', LAST) == ''


class _NoExchange:
    """A C library whose renameat2 fails."""

    def __init__(self, number: int):
        self._number = number

    def renameat2(self, *_) -> int:
        ctypes.set_errno(self._number)
        return -1


def test_verify_names_the_file_that_differs(tmp_path):
    destination = Destination(tmp_path)
    for name in ('a', 'b'):
        destination.put_bytes(f'sub/{name}', b'12')
    states = destination.inventory('sub')
    destination.verify('sub', states)
    with pytest.raises(OSError, match=r'sub/b: found 2, expected no such file'):
        destination.verify('sub', {'a': states['a']})
    with pytest.raises(OSError, match=r'sub/c: found no such file, expected 2'):
        destination.verify('sub', states | {'c': states['a']})
    (tmp_path / 'sub' / 'a').write_bytes(b'1')
    with pytest.raises(OSError, match=r'sub/a: found 1, expected 2'):
        destination.verify('sub', states)


def test_remove_ends_with_what_says_why_it_is_there(tmp_path, monkeypatch):
    destination = Destination(tmp_path / 'out')
    for name in ('a', 'sub/x', LAST, 'z'):
        destination.put_bytes(name, b'1')
    with monkeypatch.context() as patched:
        patched.setattr(shutil, 'rmtree', _interrupt)
        with pytest.raises(KeyboardInterrupt):
            destination.remove(last=LAST)
    assert LAST in destination.read_all('')
    destination.remove(last=LAST)
    assert not (tmp_path / 'out').exists()
    destination.remove(last=LAST)  # that it is gone is no error


def _interrupt(path: str) -> None:
    raise KeyboardInterrupt


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
    destination.put_bytes(f'work/{LAST}', b'2')
    (_, synced), (_, moved, target), (_, folder) = steps[-3:]
    assert (synced, target, folder) == (moved, f'{out}/work/{LAST}', f'{out}/work')
    (tmp_path / 'out' / 'work' / 'by-others').write_bytes(b'3')
    destination.promote('work', 'final', LAST)
    before = steps.index(('move', f'{out}/work', f'{out}/final'))
    assert ('sync', f'{out}/work/by-others') in steps[:before]
    assert steps[before + 1 :] == [('sync', out)]


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


def work_and_final(destination: Destination) -> tuple[dict[str, bytes], dict[str, bytes]]:
    return destination.read_all('work'), destination.read_all('final')


def test_remove(destination):
    destination.put_bytes('a/b/x', b'1')
    for _ in range(2):
        destination.remove()
        assert destination.inventory('a/b') == destination.inventory() == {}


def test_only_some_names(destination):
    fill(destination, dict.fromkeys(('a', 'b', 'c', 'sub/b'), b'1'))
    assert set(destination.inventory(names=['a', 'c', 'd'])) == {'a', 'c'}
    destination.keep_only('', ['a', 'd'])
    assert set(destination.read_all('')) == {'a'}
    assert set(destination.read_all('sub')) == {'b'}


def test_promote_needs_a_complete_folder(destination):
    destination.put_bytes('work/a', b'')
    with pytest.raises(FileNotFoundError, match=f'work: {LAST} is missing'):
        destination.promote('work', 'final', LAST)
    with pytest.raises(FileNotFoundError, match=f'nothing: {LAST} is missing'):
        destination.promote('nothing', 'final', LAST)
    assert work_and_final(destination) == ({'a': b''}, {})


@pytest.mark.parametrize('replace', [False, True])
@pytest.mark.parametrize('work', [{LAST: b'new'}, {LAST: b'old', 'x': b'1'}, {'x': b'1'}])
def test_promote_replaces_nothing_unless_told_and_nothing_by_what_is_incomplete(
    destination, work: dict[str, bytes], replace: bool
):
    fill(destination, {f'work/{name}': data for name, data in work.items()})
    fill(destination, {f'final/{LAST}': b'old'})
    if replace and LAST in work:
        destination.promote('work', 'final', LAST, replace=True)
        assert destination.read_all('final') == work
        return
    with pytest.raises(FileExistsError, match=f'{destination.folder}/final exists already'):
        destination.promote('work', 'final', LAST, replace=replace)
    assert work_and_final(destination) == (work, {LAST: b'old'})


def test_promote_replaces_what_is_not_complete(destination):
    """As an interrupted build or removal leaves it."""
    fill(destination, {'work/x': b'new', f'work/{LAST}': b'2'})
    fill(destination, {'final/of-another-build': b'1', 'final/x': b'old'})
    destination.promote('work', 'final', LAST)
    assert destination.read_all('final') == {LAST: b'2', 'x': b'new'}


def test_nothing_is_changed_by_who_has_lost_the_place(destination):
    both = {'x': b'1', LAST: b'work'}, {'x': b'2', LAST: b'final'}
    for folder, files in zip(('work', 'final'), both, strict=True):
        fill(destination, {f'{folder}/{name}': data for name, data in files.items()})
    for act in (
        lambda: destination.remove(check=_lost),
        lambda: destination.keep_only('work', [], check=_lost),
        lambda: destination.promote('work', 'final', LAST, replace=True, check=_lost),
    ):
        with pytest.raises(KeyError):
            act()
        assert work_and_final(destination) == both


def _lost() -> None:
    raise KeyError('lost')
