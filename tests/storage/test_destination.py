"""Destinations: whole files or none, on a disk and in a bucket, whatever goes wrong."""

import functools
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
from coyo11m_tfds.storage import bucket as bucket_module
from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.base import Storage
from coyo11m_tfds.storage.file_state import FileState
from tests import children
from tests.fakes.cloud import Fault
from tests.fakes.fake_http import Call, Reply

SHARED_MEMORY = pathlib.Path('/dev/shm')  # another file system, on Linux
PASSING = ['429', '503', 'cut', 'stall', 'slow', 'reset', 'lost']
LARGE = bytes(9_000_000)


def _state(data: bytes) -> FileState:
    return FileState(len(data), google_crc32c.value(data))


def _put(destination: Storage, fallback: pathlib.Path, name: str, data: bytes) -> None:
    path = pathlib.Path(destination.staging(fallback)) / name.replace('/', '-')
    path.write_bytes(data)
    destination.store(path, name, google_crc32c.value(data))
    assert not path.exists()


# --- On a disk and in a bucket ----------------------------------------------------------------


@pytest.fixture
def destination(place) -> Storage:
    """A folder that does not exist yet."""
    return storage.open_folder(f'{place}/', to_write=True)


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
def test_what_was_put_is_there(destination, tmp_path, files):
    destination.remove(destination.sizes())
    assert destination.sizes() == {}
    for _ in range(2):  # the second time it is replaced
        for (sub, name), (small, data) in files.items():
            path = f'{sub}/{name}' if sub else name
            if small:
                destination.write(path, data)
            else:
                _put(destination, tmp_path, path, data)
    for sub in ('', 'a', 'a/b', 'missing'):
        of_sub = {name: data for (s, name), (_, data) in files.items() if s == sub}
        assert destination.read_all(sub) == of_sub
        assert destination.inventory(sub) == {n: _state(d) for n, d in of_sub.items()}
        some = [*sorted(of_sub)[1:], 'missing']
        assert list(destination.read_all(sub, some)) == some[:-1]
        assert list(destination.inventory(sub, names=some)) == some[:-1]


def test_removing(destination):
    for name in ('a', 'sub/b', 'sub/deep/c', 'sub/deep/d'):
        destination.write(name, b'12')
    for _ in range(2):
        destination.remove(['sub/b', 'sub/deep/c', 'nothing', 'no/folder'])
        assert destination.sizes() == {'a': 2, 'sub/deep/d': 2}
    destination.remove(['sub/deep/d'])
    assert destination.sizes() == {'a': 2}
    assert destination.read('a') == b'12'
    assert destination.read('sub/b') is None


def test_verify_names_the_file_that_differs(destination):
    for name in ('a', 'sub/b', 'other'):
        destination.write(name, b'12')
    states = {'a': _state(b'12'), 'sub/b': _state(b'12')}
    destination.verify(states)
    with pytest.raises(OSError, match=r'/c: is missing, expected .*2'):
        destination.verify(states | {'c': states['a']})
    destination.write('sub/b', b'1')
    with pytest.raises(
        OSError, match=r'sub/b: has 1 bytes( with CRC-32C 90f599e3)?, expected 2 bytes with'
    ):
        destination.verify(states)


@pytest.mark.parametrize('url', ['gs://', 's3://bucket/x', 'hf://datasets/a/b', 'gs:///x'])
def test_other_places(url):
    with pytest.raises(ValueError, match=f'{url}: expected a local path(,| or) gs://bucket'):
        storage.open_folder(url, to_write=True)


# --- On a disk --------------------------------------------------------------------------------


def test_put_from_another_file_system(tmp_path):
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip('needs two file systems')
    destination = storage.open_folder(tmp_path, to_write=True)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        path = pathlib.Path(folder, 'x')
        path.write_bytes(b'other content')
        with pytest.raises(OSError, match=f'{path}: CRC-32C is .* expected 00000001'):
            destination.store(path, 'x', 1)
        assert destination.inventory() == {}
        destination.store(path, 'x', google_crc32c.value(b'other content'))
        assert not path.exists()
    assert destination.inventory() == {'x': _state(b'other content')}
    assert list((tmp_path / '.staging').iterdir()) == []


def test_inventory_tells_every_changed_byte(tmp_path):
    destination = storage.open_folder(tmp_path, to_write=True)
    data = random.Random(1).randbytes(5_000_000)
    destination.write('x', data)
    for position in (0, 4_194_304, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        (tmp_path / 'x').write_bytes(changed)
        assert destination.inventory()['x'].crc32c != google_crc32c.value(data)
    read = []
    (tmp_path / 'x').write_bytes(data[:-1])
    assert destination.inventory(on_bytes=read.append)['x'].size == len(data) - 1 == sum(read)


LIMITED = """
import resource, signal
from coyo11m_tfds import storage

# A write beyond this size fails as on a full disk, with OSError instead of a signal.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
destination = storage.open_folder(sys.argv[1], to_write=True)
destination.write('small', bytes(4096))
try:
    destination.write('large', bytes(1_000_000))
except OSError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with children.python(LIMITED, tmp_path) as child:
        out, errors = child.communicate(timeout=120)
    assert str(tmp_path) in out and 'too large' in out, errors
    assert storage.open_folder(tmp_path, to_write=True).inventory() == {
        'small': _state(bytes(4096))
    }
    assert list((tmp_path / '.staging').iterdir()) == []


@pytest.mark.parametrize('name', ['{abs}/x', '../x', 'a/../../x', 'a//x', './x', 'a\\x', 'a\0x'])
def test_names_that_lead_elsewhere(tmp_path, name):
    name = name.format(abs=tmp_path)
    destination = storage.open_folder(tmp_path / 'out', to_write=True)
    staged = pathlib.Path(destination.staging('/nowhere')) / 'x'
    staged.write_bytes(b'1')
    for put in (
        lambda: destination.write(name, b'1'),
        lambda: destination.store(staged, name, google_crc32c.value(b'1')),
    ):
        with pytest.raises(ValueError, match='is not the name of a file in'):
            put()
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['.staging', 'out', 'x']


def test_a_sweep_leaves_what_a_living_process_writes(tmp_path):
    destination = storage.open_folder(tmp_path, to_write=True)
    destination.write('x', b'1')
    staging = pathlib.Path(destination.staging(''))
    (staging / 'left-by-a-killed-one').write_bytes(b'1')
    (staging / 'held-1').mkdir()
    (staging / 'held-1.lock').touch()
    for name in ('empty', 'building-1'):
        (tmp_path / name).mkdir()
    with locks.temporary_folder(staging, 'other-') as held:
        (pathlib.Path(held) / 'y').write_bytes(b'1')
        destination.sweep()
        name = os.path.basename(held)
        assert {path.name for path in staging.iterdir()} == {name, f'{name}.lock'}
        assert os.listdir(held) == ['y']
    destination.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {'x', 'empty', 'building-1'}
    destination.sweep('building-')
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
    destination = storage.open_folder(out, to_write=True)
    _put(destination, tmp_path, 'work/x', b'1')
    assert ('sync', out) in steps  # knows the name of its new sub-folder
    assert steps[-3:] == [
        ('sync', f'{out}/.staging/work-x'),
        ('move', f'{out}/.staging/work-x', f'{out}/work/x'),
        ('sync', f'{out}/work'),
    ]
    destination.write('work/y', b'2')
    (_, synced), (_, moved, target), (_, folder) = steps[-3:]
    assert (synced, target, folder) == (moved, f'{out}/work/y', f'{out}/work')


# --- In a bucket ------------------------------------------------------------------------------

URL = 'gs://bucket/set'


@pytest.mark.parametrize('size', [1_000_000, 9_000_000])  # in one request, and in chunks
@pytest.mark.parametrize('kind', [*PASSING, 'flip'])
def test_put_with_a_fault(bucket, tmp_path, monkeypatch, kind, size):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.5')
    monkeypatch.setattr(bucket_module, '_CHUNK', 2 << 20)
    data = random.Random(1).randbytes(size)
    for action in ['upload'] if kind == 'flip' else ['start', 'upload']:
        bucket.inject(Fault(kind, action=action))
    _put(storage.open_folder(URL, to_write=True), tmp_path, 'a', data)
    assert bucket.objects('bucket') == {'set/a': data}
    if kind == 'flip':
        assert [r.path for r in bucket.requests if r.action == 'delete'] == ['bucket/set/a']


@pytest.mark.parametrize('kind', [*PASSING, 'flip'])
def test_a_fault_of_every_other_request(bucket, kind, monkeypatch):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.3')
    destination = storage.open_folder(URL, to_write=True)
    for name in ('x', 'y'):
        destination.write(name, b'1' * 1000)
    for action in ['list', 'read', 'copy', 'delete']:
        bucket.inject(Fault(kind, action=action))
    assert destination.sizes() == {'x': 1000, 'y': 1000}
    assert destination.read('x') == b'1' * 1000
    bucket_module._copy_object(f'{URL}/x', f'{URL}/z', _state(b'1' * 1000))
    destination.remove(['x', 'not there'])
    assert destination.read_all('') == {'y': b'1' * 1000, 'z': b'1' * 1000}


def test_put_that_is_always_corrupted(bucket, tmp_path):
    bucket.inject(Fault('flip', count=None))
    with pytest.raises(OSError, match=r'^storing gs://bucket/set/a: given up after 8 attempts'):
        _put(storage.open_folder(URL, to_write=True), tmp_path, 'a', b'content')
    assert bucket.objects('bucket') == {}
    assert (tmp_path / 'a').read_bytes() == b'content'


@pytest.mark.parametrize('kind', ['401', '403'])
@pytest.mark.parametrize('size', [7, 9_000_000])
def test_put_that_is_refused(gcs, tmp_path, kind, size):
    gcs.inject(Fault(kind, count=None))
    with pytest.raises(PermissionError, match=r'gs://bucket/set/a: access was refused') as raised:
        _put(storage.open_folder(URL, to_write=True), tmp_path, 'a', bytes(size))
    assert 'gcloud auth application-default login' in str(raised.value)
    assert len(gcs.requests) == 1


def test_markers_of_folders_and_objects_beside_are_left_alone(gcs):
    destination = storage.open_folder('gs://bucket/a/b/', to_write=True)
    assert destination.folder == 'gs://bucket/a/b'
    others = {'a/b/': b'', 'a/b/sub/': b'', 'a/bc': b'of another'}
    for name, data in others.items():
        gcs.put('bucket', name, data)
    destination.write('x', b'new')
    destination.write('sub/y', b'1')
    assert destination.read_all('') == {'x': b'new'}
    assert destination.inventory('sub') == {'y': _state(b'1')}
    assert destination.sizes() == {'x': 3, 'sub/y': 1}
    destination.remove(['sub/y', 'x'])
    assert gcs.objects('bucket') == others
    assert storage.open_folder('gs://bucket', to_write=True).sizes() == {'a/bc': 10}


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
    found = storage.open_folder('gs://bucket/a', to_write=True).read_all('', ['x'])
    assert found == ({'x': then} if then else {})


def test_no_bucket(gcs, tmp_path):
    destination = storage.open_folder('gs://no-such-bucket/a', to_write=True)
    line = r'^gs://no-such-bucket: there is no such bucket\. Make it with `gcloud storage .*name\.$'
    for act in (
        destination.inventory,
        destination.sizes,
        functools.partial(destination.read, 'x'),
        functools.partial(destination.write, 'x', b''),
        functools.partial(_put, destination, tmp_path, 'x', b''),
        functools.partial(_put, destination, tmp_path, 'x', LARGE),
    ):
        gcs.clear()
        with pytest.raises(OSError, match=line):
            act()
        assert len(gcs.requests) == 1


def test_empty_objects_of_which_no_size_is_told(gcs):
    gcs.tells_size_of_empty = False
    destination = storage.open_folder('gs://bucket/a', to_write=True)
    destination.write('x', b'')
    assert destination.inventory() == {'x': _state(b'')}
    assert destination.read_all('') == {'x': b''}


def test_no_credentials(gcs, monkeypatch):
    monkeypatch.delenv('STORAGE_EMULATOR_HOST')
    with pytest.raises(PermissionError, match=r'gs://.*gcloud auth application-default'):
        storage.open_folder('gs://bucket/a', to_write=True).inventory()


def test_credentials_without_a_project(gcs, tmp_path, monkeypatch):
    """As of a workforce pool: nothing names a default project."""
    anonymous = google.auth.credentials.AnonymousCredentials()
    monkeypatch.setattr(google.auth, 'default', lambda **_: (anonymous, None))
    for name in ('GOOGLE_CLOUD_PROJECT', 'GCLOUD_PROJECT', 'STORAGE_EMULATOR_HOST'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('API_ENDPOINT_OVERRIDE', gcs.url)
    _put(storage.open_folder(URL, to_write=True), tmp_path, 'a', b'content')
    assert gcs.objects('bucket') == {'set/a': b'content'}


def test_an_upload_goes_on_where_it_broke_off(gcs, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_module, '_CHUNK', 1 << 20)
    data = random.Random(0).randbytes(10_000_000)
    (tmp_path / 'large').write_bytes(data)
    gcs.inject(Fault('cut', match='upload', after_bytes=300_000))
    gcs.inject(Fault('503', count=2, match='uplo'))
    bucket_module._upload_object(
        'gs://bucket/a', str(tmp_path / 'large'), google_crc32c.value(data)
    )
    assert gcs.objects('bucket') == {'a': data}
    received = sum(request.received for request in gcs.requests)
    assert received < len(data) + (4 << 20)


def test_an_upload_of_which_less_was_kept_than_sent(gcs, tmp_path, monkeypatch):
    upload_from_file = google_storage.Blob.upload_from_file
    attempts = []

    def upload(blob: google_storage.Blob, *args: object, **options: object) -> None:
        attempts.append(blob)
        upload_from_file(blob, *args, **options)
        if len(attempts) == 1:
            raise ValueError('Bytes stream is in unexpected state.')  # the library's

    monkeypatch.setattr(google_storage.Blob, 'upload_from_file', upload)
    _put(storage.open_folder(URL, to_write=True), tmp_path, 'x', LARGE)
    assert gcs.objects('bucket') == {'set/x': LARGE} and len(attempts) == 2


@pytest.mark.parametrize('kind', ['503', 'lost'])
def test_a_copy_that_takes_several_requests(gcs, kind):
    """As between places far apart."""
    gcs.copied_at_once = 400
    data = random.Random(2).randbytes(1000)
    gcs.put('bucket', 'x', data)
    gcs.clear()
    gcs.inject(Fault(kind, action='copy', count=2))
    bucket_module._copy_object('gs://bucket/x', 'gs://bucket/y', _state(data))
    assert gcs.objects('bucket') == {'x': data, 'y': data}
    assert len(gcs.requests) == 5
