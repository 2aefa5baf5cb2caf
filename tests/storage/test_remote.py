"""Downloads arrive whole, whatever the network does, or say why they do not and go on later."""

import dataclasses
import gzip
import os
import pathlib
import random
import re
import time

import pytest

from coyo11m_tfds import storage
from coyo11m_tfds.storage import remote
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.stored_file import StoredFile
from tests import children
from tests.fakes.cloud import Fault, through_proxy
from tests.fakes.fake_http import Call, FakeServer, Reply

SIZE = 3_000_003
DATA = random.Random(0).randbytes(SIZE)
NAME = 'latents-3crop/000000-000009.pt'

PASSING = ['429', '503', 'cut', 'flip', 'slow', 'reset', 'lost']


class Cloud:
    """A stand-in for a storage with one file in it."""

    def __init__(self, server: FakeServer, file: StoredFile):
        self.server, self.file = server, file
        server.clear()

    def reads(self) -> list[tuple[int, int | None] | None]:
        """The ranges that were asked for."""
        return [request.range for request in self.server.requests if request.action == 'read']

    def inject(self, kind: str, **details) -> None:
        self.server.inject(Fault(kind, action='read', **details))


@pytest.fixture
def bucket(bucket) -> Cloud:
    """One file of SIZE bytes in a bucket, for what does not depend on the storage."""
    bucket.put('bucket', f'source/{NAME}', DATA)
    return Cloud(bucket, storage.describe_file(f'gs://bucket/source/{NAME}'))


@pytest.fixture
def on_hub(hub, monkeypatch) -> Cloud:
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.002')
    hub.commit({NAME: DATA})
    return Cloud(hub, storage.describe_file(f'hf://datasets/owner/name/{NAME}'))


@pytest.fixture(params=['bucket', 'on_hub'])
def cloud(request) -> Cloud:
    return request.getfixturevalue(request.param)


@pytest.fixture
def target(tmp_path) -> pathlib.Path:
    return tmp_path / 'folder' / 'x.pt'


def fetch(file: StoredFile, target: pathlib.Path) -> list[int]:
    """Fetches; returns what `on_bytes` was told."""
    told: list[int] = []
    target.parent.mkdir(exist_ok=True)
    file.fetch(str(target), told.append)
    return told


def assert_fetched(target: pathlib.Path, data: bytes = DATA) -> None:
    """The file is there, and nothing besides."""
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == [target.name]


def test_a_file_comes_in_one_request(cloud, target):
    told = fetch(cloud.file, target)
    assert_fetched(target)
    assert cloud.reads() == [(0, SIZE - 1)]
    assert sum(told) == SIZE
    assert len(told) > 1


@pytest.mark.parametrize('kind', PASSING)
def test_what_goes_wrong_twice_is_mended(cloud, target, kind):
    cloud.inject(kind, count=2)
    told = fetch(cloud.file, target)
    assert_fetched(target)
    assert sum(told) == SIZE
    if kind != 'flip':  # which nobody can tell in a part
        cloud.inject(kind, count=2)
        assert cloud.file.read_range(10, 1_000_000) == DATA[10:1_000_010]


def test_a_stall_is_noticed(cloud, target, monkeypatch):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.2')
    cloud.inject('stall', after_bytes=2_000_000)
    started = time.monotonic()
    fetch(cloud.file, target)
    assert time.monotonic() - started < 5  # the server would go on stalling for ten
    assert_fetched(target)
    first, second = cloud.reads()
    assert first == (0, SIZE - 1)
    assert second[0] > 1_500_000


def test_after_a_cut_only_the_rest_comes_again(cloud, target):
    for place in (1_000_000, 500_000, 700_000):
        cloud.inject('cut', after_bytes=place)
    fetch(cloud.file, target)
    assert_fetched(target)
    starts = [start for start, _ in cloud.reads()]
    assert starts == sorted(set(starts))
    assert len(starts) == 4
    assert sum(r.nbytes for r in cloud.server.requests if r.action == 'read') < 1.4 * SIZE


def test_progress_makes_up_for_many_breaks(bucket, target, monkeypatch):
    monkeypatch.setattr(remote, '_PROGRESS', 1_000_000)
    bucket.inject('cut', count=10, after_bytes=280_000)
    fetch(bucket.file, target)
    assert_fetched(target)
    assert len(bucket.reads()) == 11


def test_parts_that_a_proxy_passes_on_as_wholes(cloud, target, monkeypatch):
    read = cloud.server._on_read
    most = 1_000_000

    def send_part(call: Call, *names: str) -> Reply:
        reply = read(call, *names)
        return dataclasses.replace(reply, body=reply.body[:most])

    monkeypatch.setattr(cloud.server, '_on_read', send_part)
    fetch(cloud.file, target)
    assert_fetched(target)
    cloud.server.clear()
    most = 0
    with pytest.raises(OSError, match=r'given up after 8 attempts; .* received 0 bytes, expected'):
        fetch(cloud.file, target)
    assert len(cloud.reads()) == 8


@pytest.mark.parametrize('kind', ['503', 'reset', 'cut'])
def test_what_stays_wrong_ends_in_one_error(cloud, target, kind):
    cloud.inject('cut', after_bytes=2_000_000)
    cloud.inject(kind, count=7, after_bytes=0 if kind == 'cut' else None)
    with pytest.raises(OSError, match=f'{cloud.file.path}: given up after 8 attempts'):
        fetch(cloud.file, target)


def test_a_checksum_that_stays_wrong_is_told_with_the_right_one(cloud, target):
    cloud.inject('flip', count=None)
    with pytest.raises(OSError) as raised:
        fetch(cloud.file, target)
    assert cloud.file.path in str(raised.value)
    assert f'expected {cloud.file.checksum}' in str(raised.value)
    assert f'{SIZE} bytes is {cloud.file.checksum.partition(":")[0]}:' in str(raised.value)
    assert len(cloud.reads()) == 8
    cloud.server.heal()
    fetch(cloud.file, target)
    assert_fetched(target)


@pytest.mark.parametrize('kind', ['401', '403'])
@pytest.mark.parametrize('operation', ['fetch', 'read_range'])
def test_missing_access_is_told_at_once(cloud, target, kind, operation):
    cloud.inject(kind, count=None)
    with pytest.raises(PermissionError, match=r'`(gcloud|hf) auth .*login`') as raised:
        if operation == 'fetch':
            fetch(cloud.file, target)
        else:
            cloud.file.read_range(0, 4)
    assert cloud.file.path in str(raised.value)
    assert str(raised.value).count('access was refused') == 1
    assert re.search('storage.objects.get access|is restricted|not in the auth', str(raised.value))
    # On the hub, the signed address might have ended, but another one helps no more.
    assert len(cloud.reads()) == (3 if kind == '403' and 'hf://' in cloud.file.path else 1)
    cloud.server.heal()
    fetch(cloud.file, target)
    assert_fetched(target)


def test_a_stored_file_that_is_flipped_on_its_way_is_read_again(bucket):
    for place in (0, SIZE - 1):
        bucket.inject('flip', after_bytes=place)
        assert bucket.file.read() == DATA
    assert len(bucket.reads()) == 4
    bucket.inject('flip', count=None)
    message = rf'{bucket.file.path}: given up .* the storage has crc32c:'
    with pytest.raises(OSError, match=message):
        bucket.file.read()


def test_an_empty_file(bucket, target):
    bucket.server.put('bucket', 'empty', b'')
    assert fetch(storage.describe_file('gs://bucket/empty'), target) == []
    assert_fetched(target, b'')


def test_a_small_file_of_the_hub(hub, target):
    """It is known by git's checksum, and comes from another place than the large ones."""
    hub.commit({'README.md': b'A data set.'})
    file = storage.describe_file('hf://datasets/owner/name/README.md')
    assert file.checksum.startswith('git-sha1:')
    hub.inject(Fault('flip', action='read'))
    fetch(file, target)
    assert_fetched(target, b'A data set.')


def test_a_file_that_is_gone(bucket, target):
    bucket.server.remove('bucket', f'source/{NAME}')
    with pytest.raises(FileNotFoundError, match=rf'{bucket.file.path} is gone'):
        fetch(bucket.file, target)
    assert len(bucket.reads()) == 1


@pytest.mark.parametrize('encoding', ['gzip', 'deflate', 'br'])
def test_objects_that_are_stored_compressed_are_named_at_once(bucket, target, encoding):
    data = gzip.compress(DATA[:100_000], mtime=0)
    bucket.server.put('bucket', 'packed/x.pt', data, encoding=encoding)
    described = storage.describe_file('gs://bucket/packed/x.pt')
    listed = storage.open_folder('gs://bucket/packed').list()['x.pt']
    # Of a file of which only its size is known, the first response says it.
    unlisted = dataclasses.replace(described, encoding='')
    message = rf'packed/x\.pt: has Content-Encoding: {encoding}, expected none\. .* --clear-content'
    for file, num_reads in ((described, 0), (listed, 0), (unlisted, 1)):
        for read in (lambda file: file.read_range(0, 9), lambda file: fetch(file, target)):
            bucket.server.clear()
            with pytest.raises(OSError, match=message):
                read(file)
            assert len(bucket.reads()) == num_reads
    with pytest.raises(OSError, match=message):
        storage.open_folder('gs://bucket/packed').read('x.pt')


def test_what_a_proxy_compresses_is_named_at_once(on_hub, target):
    on_hub.server.content_encoding = 'gzip'
    with pytest.raises(OSError, match=r'\.pt: has Content-Encoding: gzip, .* A proxy between here'):
        fetch(on_hub.file, target)
    assert len(on_hub.reads()) == 1


SOURCE = 'gs://bucket/source'


def open_source() -> WritableFolder:
    return storage.open_writable_folder(SOURCE)


REQUESTS = {
    'a list': lambda file, target: open_source().list(deep=True),
    'a read of a small file': lambda file, target: open_source().read('small.json'),
    'a write': lambda file, target: open_source().write('small.json', b'{}'),
    'a removal': lambda file, target: open_source().remove(['small.json']),
    'a description': lambda file, target: storage.describe_file(f'{SOURCE}/small.json'),
    'a read of a range': lambda file, target: file.read_range(0, 9),
    'a download': lambda file, target: fetch(file, target),
}


@pytest.mark.parametrize('request_', REQUESTS.values(), ids=REQUESTS)
def test_a_refusal_names_the_object_and_no_request(bucket, target, request_):
    bucket.server.inject(Fault('403', count=None))
    with pytest.raises(PermissionError, match=rf' {SOURCE}.*: access was ') as refused:
        request_(bucket.file, target)
    assert 'someone@example.com does not have storage.objects.get access' in str(refused.value)
    assert 'http' not in str(refused.value) and 'status code' not in str(refused.value)


@pytest.mark.parametrize('request_', REQUESTS.values(), ids=REQUESTS)
def test_a_bucket_of_which_the_requester_pays_asks_for_a_project(bucket, target, request_):
    bucket.server.requester_pays.add('bucket')
    message = r'requester pays .* Set GOOGLE_CLOUD_QUOTA_PROJECT to the project'
    with pytest.raises(OSError, match=rf'^{SOURCE}.*{message}') as refused:
        request_(bucket.file, target)
    assert 'http' not in str(refused.value)


def test_a_bucket_of_which_the_requester_pays_takes_a_project(bucket, target, monkeypatch):
    bucket.server.requester_pays.add('bucket')
    folder = open_source()
    monkeypatch.setenv('GOOGLE_CLOUD_QUOTA_PROJECT', 'my-project')
    folder.write('small.json', b'{}')
    assert folder.read('small.json') == b'{}' and NAME in folder.list(deep=True)
    assert not folder.why_unreadable()
    assert bucket.file.read_range(0, 9) == DATA[:9]
    fetch(bucket.file, target)
    assert_fetched(target)
    folder.remove(['small.json'])


@pytest.mark.parametrize(
    'data', [DATA[:-1] + b'x', DATA + b'x', DATA[:-1], DATA[:1_000_000]], ids=len
)
def test_a_file_that_has_changed_is_not_mixed(bucket, target, data):
    bucket.server.put('bucket', f'source/{NAME}', data)
    with pytest.raises(OSError, match='has changed since it was listed'):
        fetch(bucket.file, target)
    assert len(bucket.reads()) == 1
    bucket.server.clear()
    fetch(storage.describe_file(bucket.file.path), target)
    assert_fetched(target, data)
    assert bucket.reads() == [(0, len(data) - 1)]


@pytest.mark.parametrize(
    ('start', 'length'), [(0, 1), (0, SIZE), (SIZE - 1, 1), (1000, 2_000_000), (7, 0)]
)
def test_a_range(cloud, tmp_path, start, length):
    local = tmp_path / 'x.pt'
    local.write_bytes(DATA)
    for file in (cloud.file, storage.describe_file(local)):
        assert file.read_range(start, length) == DATA[start : start + length]
    assert len(cloud.reads()) == (1 if length else 0)


def test_a_range_that_is_not_in_the_file_or_not_any_more(bucket, tmp_path):
    local = tmp_path / 'x.pt'
    local.write_bytes(DATA)
    files = bucket.file, storage.describe_file(local)
    for start, length in ((-1, 1), (0, SIZE + 1), (SIZE, 1), (1, -1)):
        for file in files:
            message = rf'{file.path}: has .* expected {length} from byte {start} '
            with pytest.raises(ValueError, match=message):
                file.read_range(start, length)
    assert bucket.reads() == []
    bucket.server.put('bucket', f'source/{NAME}', bytes(SIZE))
    local.write_bytes(DATA[:500])
    for file, how in zip(files, ('its checksum is', 'it ends at byte 500'), strict=True):
        with pytest.raises(OSError, match=rf'pt has changed since it was listed \({how}'):
            file.read_range(10, 1000)


def test_a_range_through_a_proxy(bucket, monkeypatch):
    for name, value in through_proxy(bucket.server.env).items():
        monkeypatch.setenv(name, value)
    for start in (0, 5):
        assert bucket.file.read_range(start, 10) == DATA[start : start + 10]
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:1')
    with pytest.raises(OSError, match='given up after 8 attempts'):
        bucket.file.read_range(0, 10)


def test_a_full_disk_is_reported(bucket, target):
    target.parent.mkdir()
    code = f"""
        import resource
        from coyo11m_tfds import storage
        resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 20}, {1 << 20}))
        storage.describe_file(sys.argv[1]).fetch(sys.argv[2])
    """
    with children.python(code, bucket.file.path, target) as child:
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"OSError: [Errno 27] File too large: '{target}'" in errors
    assert 'trying again' not in errors


def test_a_forked_process_has_connections_of_its_own(bucket):
    """Else both would read answers to the other from one connection."""
    code = """
        import os
        from coyo11m_tfds import storage
        file = storage.describe_file(sys.argv[1])
        file.read_range(0, 4)
        forked = os.fork() == 0
        got = b''.join(file.read_range(1000 * n + forked, 1) for n in range(50))
        os.write(1, got.hex().encode() + b'\\n')
        if forked:
            os._exit(0)
        os.wait()
    """
    with children.python(code, bucket.file.path) as child:
        out, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    expected = [bytes(DATA[1000 * n + shift] for n in range(50)).hex() for shift in (0, 1)]
    assert sorted(out.split()) == sorted(expected)
    assert 'trying again' not in errors
