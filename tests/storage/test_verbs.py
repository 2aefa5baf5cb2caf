"""The verbs of a storage: whole files or none, on a disk and in a bucket, whatever goes wrong."""

import os
import pathlib
import random
import tempfile

import google.auth
import google.auth.credentials
import google_crc32c
import pytest
from google.cloud import storage as google_storage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coyo11m_tfds import storage
from coyo11m_tfds.storage import bucket_objects, locks, model_files
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import RangeReader
from tests import children
from tests.fakes.cloud import Fault
from tests.fakes.fake_http import Call, Reply

SHARED_MEMORY = pathlib.Path('/dev/shm')  # another file system, on Linux
PASSING = ['429', '503', 'cut', 'stall', 'slow', 'reset', 'lost']
LARGE = random.Random(0).randbytes(9_000_000)


def _state(data: bytes) -> FileState:
    return FileState(len(data), google_crc32c.value(data))


def _store(folder: WritableFolder, fallback: pathlib.Path, name: str, data: bytes) -> None:
    path = pathlib.Path(folder.staging(fallback)) / name.replace('/', '-')
    path.write_bytes(data)
    folder.store(path, name, google_crc32c.value(data))
    assert not path.exists()


# --- On a disk and in a bucket ----------------------------------------------------------------


@pytest.fixture
def folder(place) -> WritableFolder:
    """A folder that does not exist yet."""
    return storage.open_writable_folder(f'{place}/')


@pytest.fixture
def disk(tmp_path) -> WritableFolder:
    return storage.open_writable_folder(tmp_path)


@pytest.fixture
def in_bucket(bucket) -> WritableFolder:
    return storage.open_writable_folder('gs://bucket/set/')


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.dictionaries(
        st.tuples(
            st.sampled_from(['', 'a', 'a/b']), st.from_regex(r'[a-z0-9]{1,8}\.x', fullmatch=True)
        ),
        st.tuples(st.booleans(), st.binary(max_size=200)),
        max_size=5,
    )
)
def test_what_was_stored_is_there(folder, tmp_path, files):
    folder.remove(folder.sizes())
    assert folder.sizes() == {}
    for _ in range(2):  # the second time it is replaced
        for (sub, name), (small, data) in files.items():
            path = f'{sub}/{name}' if sub else name
            if small:
                folder.write(path, data)
            else:
                _store(folder, tmp_path, path, data)
    for sub in ('', 'a', 'a/b', 'missing'):
        of_sub = {name: data for (s, name), (_, data) in files.items() if s == sub}
        assert folder.read_all(sub) == of_sub
        read: list[int] = []
        assert folder.inventory(sub, read.append) == {n: _state(d) for n, d in of_sub.items()}
        assert sum(read) == (0 if folder.keeps_checksums else sum(map(len, of_sub.values())))
        some = [*sorted(of_sub)[1:], 'missing']
        assert list(folder.read_all(sub, some)) == some[:-1]
        assert list(folder.inventory(sub, names=some)) == some[:-1]


def test_removing(folder):
    for name in ('a', 'sub/b', 'sub/deep/c', 'sub/deep/d'):
        folder.write(name, b'12')
    for _ in range(2):
        folder.remove(['sub/b', 'sub/deep/c', 'nothing', 'no/folder'])
        assert folder.sizes() == {'a': 2, 'sub/deep/d': 2}
    folder.remove(['sub/deep/d'])
    assert folder.sizes() == {'a': 2}
    assert folder.read('a') == b'12'
    assert folder.read('sub/b') is None


def test_visible_files_of_a_folder_and_one_below_it(folder):
    for name in ('a.pt', '.b.pt', 'c.txt', 'sub/a.pt', 'sub/.b.pt', 'other/a.pt'):
        folder.write(name, b'12')
    for sub_folder, names in (('sub', ['a.pt', 'sub/a.pt']), ('', ['a.pt']), ('no', ['a.pt'])):
        assert sorted(folder.list_visible(sub_folder, '.pt')) == names


def test_a_stored_file_in_the_form_of_pythons_files(folder):
    folder.write('a', b'123456')
    reader = RangeReader(folder.list()['a'])
    assert reader.read(2) == b'12'
    assert reader.seek(-2, os.SEEK_END) == 4
    assert reader.read() == b'56' and reader.read() == b''
    assert reader.seek(9) == reader.tell() == 9
    assert reader.read(3) == b''


def test_verify_names_the_file_that_differs(folder):
    for name in ('a', 'sub/b', 'other'):
        folder.write(name, b'12')
    states = {'a': _state(b'12'), 'sub/b': _state(b'12')}
    folder.verify(states)
    with pytest.raises(OSError, match=r'/c: is missing, expected .*2'):
        folder.verify(states | {'c': states['a']})
    folder.write('sub/b', b'1')
    with pytest.raises(
        OSError, match=r'sub/b: has 1 byte( with CRC-32C 90f599e3)?, expected 2 bytes with'
    ):
        folder.verify(states)


@pytest.mark.parametrize('url', ['gs:/bucket/x', 'hf:/datasets/a/b'])
def test_a_url_that_was_made_a_path_is_told_from_a_local_folder(url):
    with pytest.raises(ValueError, match=f'^{url}: expected two slashes, as in ...//'):
        storage.open_folder(url)
    storage.open_folder(f'./{url}')


def test_the_home_folder_and_another_of_its_name(monkeypatch, tmp_path):
    home = tmp_path / 'home'
    here = tmp_path / 'here'
    here.mkdir()
    monkeypatch.setenv('HOME', str(home))
    monkeypatch.chdir(here)
    storage.open_writable_folder('~/data').write('a', b'at home')
    storage.write_file('~/b', b'at home')
    assert storage.open_folder('~').sizes() == {'b': 7, 'data/a': 7}
    assert storage.describe_file('~/data/a').path == storage.make_absolute('~/data/a')
    with pytest.raises(ValueError, match=f'^{home}: is a folder; expected the path of a file'):
        storage.check_writable_file('~')
    assert model_files.local_folder('~/data') == home / 'data'
    assert model_files.public_name('~/data') == 'data'
    assert os.listdir() == []
    storage.open_writable_folder('./~').write('c', b'here')
    # Also with what the storage itself makes of the name.
    opened = storage.open_folder(storage.open_folder('./~/').folder)
    [file] = storage.open_folder('.').list('~').values()
    assert opened.read('c') == file.read() == storage.describe_file(file.path).read() == b'here'


@pytest.mark.parametrize('path', ['', 'new/', 'new/sub/', 'gs://bucket/new/', 'gs://bucket'])
def test_the_path_of_a_file_that_names_a_folder(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f'^{path}: is a folder; expected the path of a file'):
        storage.check_writable_file(path)
    storage.check_writable_file('new/file')


@pytest.mark.parametrize('url', ['gs://', 's3://bucket/x', 'hf://datasets/a/b', 'gs:///x'])
def test_other_places(url):
    with pytest.raises(ValueError, match=f'{url}: expected a local path(,| or) gs://bucket'):
        storage.open_writable_folder(url)


# --- On a disk --------------------------------------------------------------------------------


def test_put_from_another_file_system(tmp_path, disk):
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip('needs two file systems')
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        path = pathlib.Path(folder, 'x')
        path.write_bytes(b'other content')
        with pytest.raises(OSError, match=f'{path}: CRC-32C is .* expected 00000001'):
            disk.store(path, 'x', 1)
        assert disk.inventory() == {}
        disk.store(path, 'x', google_crc32c.value(b'other content'))
        assert not path.exists()
    assert disk.inventory() == {'x': _state(b'other content')}
    assert list((tmp_path / '.staging').iterdir()) == []


LIMITED = """
import resource, signal
from coyo11m_tfds import storage

# A write beyond this size fails as on a full disk, with OSError instead of a signal.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
folder = storage.open_writable_folder(sys.argv[1])
folder.write('small', bytes(4096))
try:
    folder.write('large', bytes(1_000_000))
except OSError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_nothing(tmp_path, disk):
    with children.python(LIMITED, tmp_path) as child:
        out, errors = child.communicate(timeout=120)
    assert str(tmp_path) in out and 'too large' in out, errors
    assert disk.inventory() == {'small': _state(bytes(4096))}
    assert list((tmp_path / '.staging').iterdir()) == []


def test_a_name_of_a_disk_may_hold_backslashes(tmp_path, disk):
    (tmp_path / 'latents\\a.pt').touch()
    [file] = disk.list_visible('', '.pt').values()
    assert storage.describe_file(file.path) == file


@pytest.mark.parametrize('name', ['{abs}/x', '../x', 'a/../../x', 'a//x', './x', 'a\\x', 'a\0x'])
def test_names_that_lead_elsewhere(tmp_path, name):
    name = name.format(abs=tmp_path)
    folder = storage.open_writable_folder(tmp_path / 'out')
    staged = pathlib.Path(folder.staging('/nowhere')) / 'x'
    staged.write_bytes(b'1')
    for put in (
        lambda: folder.write(name, b'1'),
        lambda: folder.store(staged, name, google_crc32c.value(b'1')),
    ):
        with pytest.raises(ValueError, match='is not the name of a file in'):
            put()
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['.staging', 'out', 'x']


def test_a_sweep_leaves_what_a_living_process_writes(tmp_path, disk):
    disk.write('x', b'1')
    staging = pathlib.Path(disk.staging(''))
    (staging / 'left-by-a-killed-one').write_bytes(b'1')
    (staging / 'held-1').mkdir()
    (staging / 'held-1.lock').touch()
    for name in ('empty', 'building-1'):
        (tmp_path / name).mkdir()
    with locks.temporary_folder(staging, 'other-') as held:
        (pathlib.Path(held) / 'y').write_bytes(b'1')
        disk.sweep()
        name = os.path.basename(held)
        assert {path.name for path in staging.iterdir()} == {name, f'{name}.lock'}
        assert os.listdir(held) == ['y']
    disk.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {'x', 'empty', 'building-1'}
    disk.sweep('building-')
    assert {path.name for path in tmp_path.iterdir()} == {'x', 'empty'}  # of a user


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
    out = f'{tmp_path}/out'
    folder = storage.open_writable_folder(out)
    _store(folder, tmp_path, 'work/x', b'1')
    assert ('sync', out) in steps  # knows the name of its new sub-folder
    assert steps[-3:] == [
        ('sync', f'{out}/.staging/work-x'),
        ('move', f'{out}/.staging/work-x', f'{out}/work/x'),
        ('sync', f'{out}/work'),
    ]
    folder.write('work/y', b'2')
    (_, synced), (_, moved, target), (_, folder) = steps[-3:]
    assert (synced, target, folder) == (moved, f'{out}/work/y', f'{out}/work')


# --- In a bucket ------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', [*PASSING, 'flip'])
def test_a_fault_of_every_request(bucket, in_bucket, tmp_path, monkeypatch, kind):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.3')
    monkeypatch.setattr(bucket_objects, '_CHUNK', 2 << 20)
    small, large = b'1' * 1000, LARGE
    for name, data, actions in (('x', small, ['upload']), ('y', large, ['start', 'upload'])):
        for action in actions:
            bucket.inject(Fault(kind, action=action))
        _store(in_bucket, tmp_path, name, data)
    if kind == 'flip':  # of nothing but data
        bucket.heal()
        deleted = [r.path for r in bucket.requests if r.action == 'delete']
        assert deleted == ['bucket/set/x', 'bucket/set/y']
    for action in ['list', 'stat', 'read', 'copy', 'delete']:
        bucket.inject(Fault(kind, action=action))
    assert in_bucket.sizes() == {'x': 1000, 'y': 9_000_000}
    assert in_bucket.read('x') == small
    file = in_bucket.describe('gs://bucket/set/x')
    assert in_bucket.copy(file, 'z', Scratch(tmp_path), ignore_bytes) == _state(small)
    in_bucket.remove(['x', 'not there'])
    assert in_bucket.read_all('') == {'y': large, 'z': small}


def test_a_file_that_is_always_corrupted(bucket, in_bucket, tmp_path):
    bucket.inject(Fault('flip', count=None))
    with pytest.raises(OSError, match=r'^storing gs://bucket/set/a: given up after 8 attempts'):
        _store(in_bucket, tmp_path, 'a', b'content')
    assert bucket.objects('bucket') == {}
    assert (tmp_path / 'a').read_bytes() == b'content'


def test_markers_of_folders_and_objects_beside_are_left_alone(gcs):
    folder = storage.open_writable_folder('gs://bucket/a/b/')
    assert folder.folder == 'gs://bucket/a/b'
    others = {'a/b/': b'', 'a/b/sub/': b'', 'a/bc': b'of another'}
    for name, data in others.items():
        gcs.put('bucket', name, data)
    folder.write('x', b'new')
    folder.write('sub/y', b'1')
    assert folder.read_all('') == {'x': b'new'}
    assert folder.inventory('sub') == {'y': _state(b'1')}
    assert folder.sizes() == {'x': 3, 'sub/y': 1}
    folder.remove(['sub/y', 'x'])
    assert gcs.objects('bucket') == others
    assert storage.open_folder('gs://bucket').sizes() == {'a/bc': 10}


@pytest.mark.parametrize('then', [b'new', None])
def test_what_others_replace_or_delete_while_it_is_read(gcs, monkeypatch, then):
    gcs.put('bucket', 'a/x', b'old')
    answer = gcs._on_read

    def change(call: Call, *names: str) -> Reply:
        monkeypatch.setattr(gcs, '_on_read', answer)
        gcs.remove('bucket', 'a/x')
        if then:
            gcs.put('bucket', 'a/x', then)
        return answer(call, *names)

    monkeypatch.setattr(gcs, '_on_read', change)
    found = storage.open_folder('gs://bucket/a').read_all('', ['x'])
    assert found == ({'x': then} if then else {})


VERBS = {
    'an inventory': lambda folder, place: folder.inventory(),
    'sizes': lambda folder, place: folder.sizes(),
    'a read': lambda folder, place: folder.read('x'),
    'a write': lambda folder, place: folder.write('x', b''),
    'a file that is stored': lambda folder, place: _store(folder, place, 'x', b''),
    'a large file that is stored': lambda folder, place: _store(folder, place, 'x', LARGE),
}


@pytest.mark.parametrize('verb', VERBS.values(), ids=VERBS)
def test_no_bucket(gcs, tmp_path, verb):
    folder = storage.open_writable_folder('gs://no-such-bucket/a')
    line = r'^gs://no-such-bucket: there is no such bucket\. Make it with `gcloud storage .*name\.$'
    gcs.clear()
    with pytest.raises(OSError, match=line):
        verb(folder, tmp_path)
    assert len(gcs.requests) == 1


def test_empty_objects_of_which_no_size_is_told(gcs):
    gcs.tells_size_of_empty = False
    folder = storage.open_writable_folder('gs://bucket/a')
    folder.write('x', b'')
    assert folder.inventory() == {'x': _state(b'')}
    assert folder.read_all('') == {'x': b''}


def test_no_credentials(gcs, monkeypatch):
    monkeypatch.delenv('STORAGE_EMULATOR_HOST')
    with pytest.raises(PermissionError, match=r'gs://.*gcloud auth application-default'):
        storage.open_folder('gs://bucket/a').inventory()


def test_credentials_without_a_project(gcs, tmp_path, monkeypatch):
    """As of a workforce pool: nothing names a default project."""
    anonymous = google.auth.credentials.AnonymousCredentials()
    monkeypatch.setattr(google.auth, 'default', lambda **_: (anonymous, None))
    for name in ('GOOGLE_CLOUD_PROJECT', 'GCLOUD_PROJECT', 'STORAGE_EMULATOR_HOST'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('API_ENDPOINT_OVERRIDE', gcs.url)
    _store(storage.open_writable_folder('gs://bucket/set'), tmp_path, 'a', b'content')
    assert gcs.objects('bucket') == {'set/a': b'content'}


def test_an_upload_goes_on_where_it_broke_off(bucket, in_bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_objects, '_CHUNK', 1 << 20)
    bucket.inject(Fault('cut', match='upload', after_bytes=300_000))
    bucket.inject(Fault('503', count=2, match='uplo'))
    _store(in_bucket, tmp_path, 'a', LARGE)
    assert bucket.objects('bucket') == {'set/a': LARGE}
    assert sum(request.received for request in bucket.requests) < len(LARGE) + (4 << 20)


def test_an_upload_of_which_less_was_kept_than_sent(bucket, in_bucket, tmp_path, monkeypatch):
    upload_from_file = google_storage.Blob.upload_from_file
    attempts = []

    def upload(blob: google_storage.Blob, *args: object, **options: object) -> None:
        attempts.append(blob)
        upload_from_file(blob, *args, **options)
        if len(attempts) == 1:
            raise ValueError('Bytes stream is in unexpected state.')  # the library's

    monkeypatch.setattr(google_storage.Blob, 'upload_from_file', upload)
    _store(in_bucket, tmp_path, 'x', LARGE)
    assert bucket.objects('bucket') == {'set/x': LARGE} and len(attempts) == 2


@pytest.mark.parametrize('kind', ['503', 'lost'])
def test_a_copy_that_takes_several_requests(bucket, in_bucket, tmp_path, kind):
    """As between places far apart."""
    bucket.copied_at_once = 400
    bucket.put('bucket', 'x', LARGE[:1000])
    file = storage.describe_file('gs://bucket/x')
    bucket.clear()
    bucket.inject(Fault(kind, action='copy', count=2))
    in_bucket.copy(file, 'y', Scratch(tmp_path), ignore_bytes)
    assert bucket.objects('bucket') == {'x': LARGE[:1000], 'set/y': LARGE[:1000]}
    assert len(bucket.requests) == 5
