"""TensorFlow's gs:// reaches the stand-in through the proxy, and this is how it takes faults."""

import http.client
import ssl
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.cloud import Fault, Gcs, fake_gcs
from tests.fakes.cloud_gfile import Gfile, GfileError

TEXT = ''.join(map(chr, range(256))) * 4096  # 1 MB, a byte a character
DATA = TEXT.encode('latin-1')


@pytest.fixture(scope='module')
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gcs, Gfile]]:
    with fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        env = {
            **server.env,
            'GCS_READ_CACHE_MAX_SIZE_MB': '0',
            'GCS_STAT_CACHE_MAX_AGE': '0',
        }
        with Gfile(env) as gfile:
            yield server, gfile
    assert server.errors == []


@pytest.fixture
def server(cloud: tuple[Gcs, Gfile]) -> Gcs:
    server = cloud[0]
    server.heal()
    for name in server.objects('bucket'):
        server.remove('bucket', name)
    server.clear()
    return server


@pytest.fixture
def gfile(cloud: tuple[Gcs, Gfile]) -> Gfile:
    return cloud[1]


# --- The proxy by itself --------------------------------------------------------------------------


@pytest.fixture
def tunnel(server: Gcs) -> Iterator[Callable[[str], http.client.HTTPSConnection]]:
    """Connects to a host by way of the proxy, trusting its certificate alone."""
    proxy, port = server.env['https_proxy'].removeprefix('http://').split(':')
    context = ssl.create_default_context(cafile=server.env['CURL_CA_BUNDLE'])
    opened = []

    def connect(host: str) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection(proxy, int(port), timeout=5, context=context)
        connection.set_tunnel(host)
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


def test_requests_go_through(server, tunnel):
    server.put('bucket', 'a', 20 * DATA)
    connection = tunnel('storage.googleapis.com')
    for part in ('0-9', '5-'):
        connection.request('GET', '/bucket/a', headers={'Range': f'bytes={part}'})
        reply = connection.getresponse()
        assert reply.read() == ((20 * DATA)[:10] if part == '0-9' else (20 * DATA)[5:])
    connection.request('POST', '/upload/storage/v1/b/bucket/o?uploadType=media&name=b', 20 * DATA)
    assert connection.getresponse().status == 200
    assert server.objects('bucket')['b'] == 20 * DATA


def test_only_googles_hosts_are_certified(tunnel):
    with pytest.raises(ssl.SSLCertVerificationError, match='Hostname mismatch'):
        tunnel('example.com').request('GET', '/')


def test_upload_addresses_lead_back_through_the_proxy(tunnel):
    connection = tunnel('www.googleapis.com')
    connection.request('POST', '/upload/storage/v1/b/bucket/o?uploadType=resumable&name=b')
    location = connection.getresponse().headers['Location']
    assert location.startswith('https://www.googleapis.com/upload/storage/v1/b/bucket/o?')


def test_an_end_in_the_middle_is_passed_on(server, tunnel):
    server.put('bucket', 'a', DATA)
    server.inject(Fault('cut', after_bytes=1000))
    for expected in (DATA[:1000], DATA):
        connection = tunnel('storage.googleapis.com')
        connection.request('GET', '/bucket/a')
        try:
            found = connection.getresponse().read()
        except http.client.IncompleteRead as error:
            found = error.partial
        assert found == expected


def test_other_requests_are_refused(server):
    proxy, port = server.env['https_proxy'].removeprefix('http://').split(':')
    connection = http.client.HTTPConnection(proxy, int(port), timeout=5)
    connection.request('GET', 'http://example.com/')
    assert connection.getresponse().status == 405
    connection.close()


# --- TensorFlow -----------------------------------------------------------------------------------


def test_tensorflow_writes_and_reads(server, gfile):
    gfile('makedirs', 'gs://bucket/d/e')
    gfile('write', 'gs://bucket/d/e/large', 6 * TEXT)
    gfile('write', 'gs://bucket/d/e/empty', '')
    assert server.objects('bucket') == {
        'd/': b'',
        'd/e/': b'',
        'd/e/empty': b'',
        'd/e/large': 6 * DATA,
    }
    assert gfile('read', 'gs://bucket/d/e/large') == 6 * TEXT
    gfile('append', 'gs://bucket/d/e/empty', 'more')
    assert gfile('read', 'gs://bucket/d/e/empty') == 'more'
    gfile('rename', 'gs://bucket/d/e/large', 'gs://bucket/f ü%2F')
    assert server.objects('bucket')['f ü%2F'] == 6 * DATA
    assert gfile('read', 'gs://bucket/f ü%2F') == 6 * TEXT
    assert {request.client for request in server.requests} == {'tensorflow'}


def test_tensorflow_sees_folders(server, gfile):
    for name in ('a/b', 'a/c/d', 'e'):
        server.put('bucket', name, b'123')
    for number in range(1200):
        server.put('bucket', f'many/{number}', b'')
    assert sorted(gfile('listdir', 'gs://bucket')) == ['a/', 'e', 'many/']
    assert len(gfile('listdir', 'gs://bucket/many')) == 1200
    assert gfile('glob', 'gs://bucket/*/b') == ['gs://bucket/a/b']
    assert gfile('stat', 'gs://bucket/a/b') == [3, False]
    assert gfile('stat', 'gs://bucket/a') == [0, True]
    assert gfile('isdir', 'gs://bucket/a') and not gfile('isdir', 'gs://bucket/e')
    assert gfile('exists', 'gs://bucket/e') and not gfile('exists', 'gs://bucket/nothing')
    gfile('rename', 'gs://bucket/a/c', 'gs://bucket/moved')
    gfile('rmtree', 'gs://bucket/a')
    gfile('remove', 'gs://bucket/e')
    names = [name for name in server.objects('bucket') if not name.startswith('many/')]
    assert names == ['moved/d']
    with pytest.raises(GfileError, match='NotFoundError'):
        gfile('read', 'gs://bucket/nothing')
    with pytest.raises(GfileError, match='NotFoundError'):
        gfile('write', 'gs://no-such-bucket/a', '')


@pytest.mark.parametrize('kind', ['429', '503', 'cut', 'stall', 'slow', 'reset', 'lost'])
def test_tensorflow_gets_over(server, gfile, kind):
    server.put('bucket', 'a', DATA)
    server.inject(Fault(kind, action='read'), Fault(kind, action='upload', after_bytes=600_000))
    assert gfile('read', 'gs://bucket/a') == TEXT
    gfile('write', 'gs://bucket/b', TEXT)
    assert server.objects('bucket')['b'] == DATA
    assert [request.fault for request in server.requests].count(kind) == 2
