"""Tests of destinations in a bucket: faults of every kind."""

import json
import pathlib
import pickle
import random

import google_crc32c
import pytest
from google.cloud import storage

from coyo11m_tfds.storage import gcs_folder, gcs_objects
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState
from tests.fakes.cloud import Fault
from tests.fakes.fake_http import Call, FakeServer, Reply

PASSING = ['429', '503', 'cut', 'stall', 'slow', 'reset', 'lost']


def _state(data: bytes) -> FileState:
    return FileState(len(data), google_crc32c.value(data))


def _put(folder: pathlib.Path, name: str, data: bytes, url: str = 'gs://bucket/set') -> None:
    path = folder / 'x'
    path.write_bytes(data)
    Destination(url).put(path, name, google_crc32c.value(data))
    assert not path.exists()


def test_put(gcs, tmp_path):
    large = random.Random(0).randbytes(3_000_000)
    _put(tmp_path, 'a', b'')
    _put(tmp_path, 'sub/b', large)
    assert gcs.objects('bucket') == {'set/a': b'', 'set/sub/b': large}
    _put(tmp_path, 'sub/b', b'replaced')
    assert gcs.objects('bucket') == {'set/a': b'', 'set/sub/b': b'replaced'}


@pytest.mark.parametrize('size', [1_000_000, 9_000_000])  # in one request, and in chunks
@pytest.mark.parametrize('kind', [*PASSING, 'flip'])
def test_put_with_a_fault(bucket, tmp_path, monkeypatch, kind, size):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.5')
    monkeypatch.setattr(gcs_objects, '_CHUNK', 2 << 20)
    data = random.Random(1).randbytes(size)
    for action in ['upload'] if kind == 'flip' else ['start', 'upload']:
        bucket.inject(Fault(kind, action=action, seconds=0.1 if kind == 'slow' else None))
    _put(tmp_path, 'a', data)
    assert bucket.objects('bucket') == {'set/a': data}
    if kind == 'flip':
        assert [r.path for r in bucket.requests if r.action == 'delete'] == ['bucket/set/a']


def test_put_that_is_always_corrupted(bucket, tmp_path):
    bucket.inject(Fault('flip', count=None))
    with pytest.raises(OSError, match=r'^storing gs://bucket/set/a: given up after 8 attempts'):
        _put(tmp_path, 'a', b'content')
    assert bucket.objects('bucket') == {}
    assert (tmp_path / 'x').read_bytes() == b'content'


@pytest.mark.parametrize('kind', ['401', '403'])
@pytest.mark.parametrize('size', [7, 9_000_000])
def test_put_that_is_refused(gcs, tmp_path, kind, size):
    gcs.inject(Fault(kind, count=None))
    with pytest.raises(PermissionError, match=r'gs://bucket/set/a: access was refused') as raised:
        _put(tmp_path, 'a', bytes(size))
    assert 'gcloud auth application-default login' in str(raised.value)
    assert len(gcs.requests) == 1
    gcs.heal()
    _put(tmp_path, 'a', bytes(size))


def test_small_files(gcs):
    destination = Destination('gs://bucket/a/b/')
    assert destination.is_remote and destination.folder == 'gs://bucket/a/b'
    gcs.put('bucket', 'a/b/', b'')  # markers of folders
    gcs.put('bucket', 'a/b/sub/', b'')
    gcs.put('bucket', 'a/bc', b'of another')
    destination.put_bytes('x', b'old')
    destination.put_bytes('x', b'new')
    destination.put_bytes('sub/y', b'1')
    assert destination.read_all('') == {'x': b'new'}
    assert destination.read_all('sub') == {'y': b'1'}
    assert destination.inventory() == {'x': _state(b'new')}
    assert destination.inventory('sub') == {'y': _state(b'1')}
    assert destination.read_all('missing') == destination.inventory('missing') == {}
    assert destination.sizes() == {'x': 3, 'sub/y': 1}
    destination.remove(['sub/y', 'x'])
    assert destination.sizes() == {}
    gcs.remove('bucket', 'a/b/')
    gcs.remove('bucket', 'a/b/sub/')
    assert gcs.objects('bucket') == {'a/bc': b'of another'}


def test_the_root_of_a_bucket(gcs):
    destination = Destination('gs://bucket')
    destination.put_bytes('x', b'1')
    destination.put_bytes('a/y', b'2')
    assert destination.read_all('') == {'x': b'1'}
    assert destination.read_all('a') == {'y': b'2'}
    assert gcs.objects('bucket') == {'x': b'1', 'a/y': b'2'}


def test_more_files_than_a_page_of_a_listing(gcs):
    files = {f'{i:04d}': str(i).encode() for i in range(1_050)}
    for name, data in files.items():
        gcs.put('bucket', f'a/{name}', data)
    assert Destination('gs://bucket/a').inventory() == {n: _state(d) for n, d in files.items()}
    assert sum(request.action == 'list' for request in gcs.requests) == 2


def test_what_others_wrote_is_seen(gcs):
    destination = Destination('gs://bucket/a')
    for data in (b'1', b'22'):
        gcs.put('bucket', 'a/x', data)
        assert destination.inventory() == {'x': _state(data)}
        assert destination.read_all('') == {'x': data}


@pytest.mark.parametrize('then', [b'new', None])
def test_what_others_replace_or_delete_while_it_is_read(gcs, monkeypatch, then: bytes | None):
    """As a process of a job that stores the same shard, or the one that has finished the build."""
    for name in ('x', 'y'):
        gcs.put('bucket', f'a/{name}', b'old')
    answer = gcs._on_read

    def change(call: Call, *names: str) -> Reply:
        monkeypatch.setattr(gcs, '_on_read', answer)
        gcs.remove('bucket', 'a/x')
        if then:
            gcs.put('bucket', 'a/x', then)
        return answer(call, *names)

    monkeypatch.setattr(gcs, '_on_read', change)
    found = Destination('gs://bucket/a').read_all('', ['x'])
    assert found == ({'x': then} if then else {})


def test_staging(gcs, tmp_path):
    assert Destination('gs://bucket/a').staging(tmp_path / 'new') == str(tmp_path / 'new')
    assert (tmp_path / 'new').is_dir()
    Destination('gs://bucket/a').sweep()


def test_a_destination_goes_to_other_processes(gcs):
    destination = Destination('gs://bucket/a')
    destination.put_bytes('x', b'1')
    assert pickle.loads(pickle.dumps(destination)).read_all('') == {'x': b'1'}


@pytest.mark.parametrize('url', ['gs://', 's3://bucket/x', 'hf://datasets/a/b', 'gs:///x'])
def test_other_places(url):
    with pytest.raises(ValueError, match=f'{url}: expected a local path or gs://bucket/folder'):
        Destination(url)


def test_no_bucket(gcs, tmp_path):
    destination = Destination('gs://no-such-bucket/a')
    line = (
        r'^gs://no-such-bucket: there is no such bucket\. Make it with `gcloud storage buckets '
        r'create gs://no-such-bucket`, or correct the name\.$'
    )
    for act in (
        destination.inventory,
        destination.sizes,
        lambda: destination.read_all('x'),
        lambda: destination.put_bytes('x', b''),
        lambda: _put(tmp_path, 'x', b'', destination.folder),
        lambda: _put(tmp_path, 'x', bytes(9_000_000), destination.folder),
    ):
        gcs.clear()
        with pytest.raises(OSError, match=line):
            act()
        assert len(gcs.requests) == 1


def test_another_refusal_is_one_line_that_names_the_url(gcs):
    gcs.put('bucket', 'a/x', b'1')
    gone = gcs_folder.GcsFolder('gs://bucket/a').blob('gone')
    with (
        pytest.raises(OSError, match=r'^gs://bucket/a/gone: No such object: bucket/a/gone$'),
        gcs_objects.plain_errors(gcs_objects.url(gone)),
    ):
        gone.download_as_bytes()


def test_empty_objects_of_which_no_size_is_told(gcs):
    gcs.tells_size_of_empty = False
    destination = Destination('gs://bucket/a')
    destination.put_bytes('work/x', b'')
    destination.put_bytes('work/y', b'{}')
    assert destination.inventory('work') == {'x': _state(b''), 'y': _state(b'{}')}
    assert destination.read_all('work') == {'x': b'', 'y': b'{}'}
    destination.verify({'work/x': _state(b''), 'work/y': _state(b'{}')})


def test_no_credentials(gcs, monkeypatch):
    monkeypatch.delenv('STORAGE_EMULATOR_HOST')
    with pytest.raises(PermissionError, match=r'gs://bucket/a.*gcloud auth application-default'):
        Destination('gs://bucket/a').inventory()


class _TokenServer(FakeServer):
    """Exchanges any token for one of Google's."""

    def describe(self, call: Call) -> tuple[str, str]:
        return 'token', call.path

    def answer(self, call: Call) -> Reply:
        answer = {
            'access_token': 'token-for-tests',
            'issued_token_type': 'urn:ietf:params:oauth:token-type:access_token',
            'token_type': 'Bearer',
            'expires_in': 3600,
        }
        return Reply(200, json.dumps(answer).encode(), {'Content-Type': 'application/json'})


def test_federated_credentials_without_a_project(gcs, tmp_path, monkeypatch):
    """As of a workforce pool: no file of Google's, and nothing names a default project."""
    (tmp_path / 'subject').write_text('a token of somebody else')
    with _TokenServer() as tokens:
        credentials = {
            'type': 'external_account',
            'audience': '//iam.googleapis.com/locations/global/workforcePools/p/providers/x',
            'subject_token_type': 'urn:ietf:params:oauth:token-type:jwt',
            'token_url': f'{tokens.url}/v1/token',
            'credential_source': {'file': str(tmp_path / 'subject')},
        }
        (tmp_path / 'credentials').write_text(json.dumps(credentials))
        for name in ('GOOGLE_CLOUD_PROJECT', 'GCLOUD_PROJECT', 'STORAGE_EMULATOR_HOST'):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(tmp_path / 'credentials'))
        monkeypatch.setenv('API_ENDPOINT_OVERRIDE', gcs.url)
        _put(tmp_path, 'a', b'content')
        assert tokens.requests
    assert gcs.objects('bucket') == {'set/a': b'content'}


def _complete(destination: Destination, tmp_path: pathlib.Path) -> None:
    """Does everything once that changes or reads a bucket."""
    (tmp_path / 'large').write_bytes(bytes(9_000_000))
    destination.put_bytes('x', b'1' * 1000)
    destination.put_bytes('y', b'2' * 1000)
    large = str(tmp_path / 'large')
    folder = gcs_folder.GcsFolder(destination.folder)
    gcs_objects.upload(folder.blob('large'), large, _state(bytes(9_000_000)).crc32c)
    wanted = {'x': b'1' * 1000, 'y': b'2' * 1000, 'large': bytes(9_000_000)}
    states = {name: _state(data) for name, data in wanted.items()}
    assert destination.read_all('') == wanted
    assert destination.inventory() == states
    assert destination.sizes() == {name: len(data) for name, data in wanted.items()}
    assert destination.read('x') == wanted['x']
    assert destination.read('z') is None
    destination.verify(states)
    gcs_objects.copy(folder.blob('x'), folder.blob('z'), states['x'])
    destination.remove(['x', 'not there'])


@pytest.mark.parametrize('kind', PASSING)
def test_a_fault_of_every_request(gcs, tmp_path, kind, monkeypatch):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.3')
    for action in ['upload', 'start', 'list', 'read', 'copy', 'delete']:
        gcs.inject(Fault(kind, action=action, seconds=0.1 if kind == 'slow' else None))
    _complete(Destination('gs://bucket/a'), tmp_path)
    sizes = {name: len(data) for name, data in gcs.objects('bucket').items()}
    assert sizes == {'a/y': 1000, 'a/large': 9_000_000, 'a/z': 1000}


def test_flipped_bytes(gcs, tmp_path):
    gcs.inject(Fault('flip', count=4, match='upload'), Fault('flip', count=2, action='read'))
    _complete(Destination('gs://bucket/a'), tmp_path)
    wanted = {'a/y': b'2' * 1000, 'a/large': bytes(9_000_000), 'a/z': b'1' * 1000}
    assert gcs.objects('bucket') == wanted


def test_mixed_faults(gcs, tmp_path):
    gcs.inject_share([*PASSING[:3], 'reset', 'lost'], share=0.2, everywhere=True)
    for number in range(10):
        destination = Destination(f'gs://bucket/{number}')
        destination.put_bytes('work/x', b'1')
        destination.put_bytes('work/y', b'2')
        destination.put_bytes('z', b'3')
        assert destination.read_all('work') == {'x': b'1', 'y': b'2'}
        destination.remove(['work/x', 'work/y'])
        assert destination.read_all('work') == {}
    assert len(gcs.objects('bucket')) == 10


def test_an_upload_goes_on_where_it_broke_off(gcs, tmp_path, monkeypatch):
    monkeypatch.setattr(gcs_objects, '_CHUNK', 1 << 20)
    data = random.Random(0).randbytes(10_000_000)
    (tmp_path / 'large').write_bytes(data)
    gcs.inject(
        Fault('cut', match='upload', after_bytes=300_000), Fault('503', count=2, match='uplo')
    )
    counted: list[int] = []
    blob = gcs_folder.GcsFolder('gs://bucket/a').blob('large')
    gcs_objects.upload(blob, str(tmp_path / 'large'), _state(data).crc32c, counted.append)
    assert gcs.objects('bucket') == {'a/large': data}
    assert sum(counted) == len(data)
    received = sum(request.received for request in gcs.requests)
    assert received < len(data) + (4 << 20)


def test_an_upload_of_which_less_was_kept_than_sent(gcs, tmp_path, monkeypatch):
    (tmp_path / 'large').write_bytes(bytes(9_000_000))
    upload_from_file = storage.Blob.upload_from_file
    attempts = []

    def upload(blob: storage.Blob, *args: object, **options: object) -> None:
        attempts.append(blob)
        upload_from_file(blob, *args, **options)
        if len(attempts) == 1:
            raise ValueError('Bytes stream is in unexpected state.')  # the library's

    monkeypatch.setattr(storage.Blob, 'upload_from_file', upload)
    blob = gcs_folder.GcsFolder('gs://bucket/a').blob('x')
    gcs_objects.upload(blob, str(tmp_path / 'large'), _state(bytes(9_000_000)).crc32c)
    assert gcs.objects('bucket') == {'a/x': bytes(9_000_000)} and len(attempts) == 2


@pytest.mark.parametrize('kind', ['503', 'lost'])
def test_a_copy_that_takes_several_requests(gcs, kind: str):
    """As between places far apart."""
    gcs.copied_at_once = 400
    data = random.Random(2).randbytes(1000)
    gcs.put('bucket', 'a/x', data)
    gcs.clear()
    gcs.inject(Fault(kind, action='copy', count=2))
    folder = gcs_folder.GcsFolder('gs://bucket/a')
    counted: list[int] = []
    gcs_objects.copy(folder.blob('x'), folder.blob('y'), _state(data), counted.append)
    assert gcs.objects('bucket') == {'a/x': data, 'a/y': data}
    assert counted == [400, 400, 200]
    assert len(gcs.requests) == 5


def test_verify_compares_checksums(gcs):
    destination = Destination('gs://bucket/a')
    destination.put_bytes('sub/x', b'12')
    destination.put_bytes('other', b'')
    destination.verify({'sub/x': _state(b'12')})
    with pytest.raises(OSError, match=r'gs://bucket/a/sub/x: found .*, expected .*crc32c'):
        destination.verify({'sub/x': _state(b'21')})
