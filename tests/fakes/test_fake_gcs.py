"""The stand-in for Google Cloud Storage answers plain HTTP as the JSON interface does."""

import base64
import hashlib
import http.client
import itertools
import pathlib
import urllib.parse
from collections.abc import Iterator
from concurrent import futures

import google_crc32c
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.cloud import Fault, Gcs, fake_gcs
from tests.fakes.fake_client import Client
from tests.fakes.fake_gcs_objects import select_fields

DATA = bytes(range(256)) * 4096  # 1 MB
UNIT = 256 << 10  # of an upload that breaks off, whole units are kept

# One server serves all examples: each has a bucket of its own.
EXAMPLES = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
BUCKETS = map('bucket-{}'.format, itertools.count())


@pytest.fixture
def client(tmp_path: pathlib.Path) -> Iterator[Client]:
    with fake_gcs(tmp_path) as server:
        yield Client(server)
    assert server.errors == []


@pytest.fixture
def server(client: Client) -> Gcs:
    return client.server


# --- Listings and metadata ----------------------------------------------------------------------


@EXAMPLES
@given(
    names=st.sets(st.text('ab/', min_size=1, max_size=5)),
    prefix=st.text('ab/', max_size=2),
    delimiter=st.sampled_from(['', '/']),
    page=st.integers(1, 4),
)
def test_pages_of_a_listing(client, names, prefix, delimiter, page):
    bucket = next(BUCKETS)
    for name in names:
        client.server.put(bucket, name, b'')
    items, folders, token = [], [], ''
    while token is not None:
        query = {'prefix': prefix, 'delimiter': delimiter, 'maxResults': page, 'pageToken': token}
        answer = client('GET', f'/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}').json
        items += [item['name'] for item in answer.get('items', [])]
        folders += answer.get('prefixes', [])
        assert len(answer.get('items', [])) + len(answer.get('prefixes', [])) <= page
        token = answer.get('nextPageToken')
    inside = sorted(name for name in names if name.startswith(prefix))
    below = [name for name in inside if delimiter and delimiter in name[len(prefix) :]]
    assert items == [name for name in inside if name not in below]
    ends = [name.index('/', len(prefix)) + 1 for name in below]
    assert folders == sorted({name[:end] for name, end in zip(below, ends, strict=True)})


@pytest.mark.parametrize(
    ('fields', 'expected'),
    [
        ('', {'items': [{'name': 'a', 'size': '1'}], 'nextPageToken': 't'}),
        ('items/name', {'items': [{'name': 'a'}]}),
        (
            'items(name,size),nextPageToken',
            {'items': [{'name': 'a', 'size': '1'}], 'nextPageToken': 't'},
        ),
        ('items/name,items/size', {'items': [{'name': 'a', 'size': '1'}]}),
        ('prefixes', {}),
    ],
)
def test_only_the_fields_asked_for(fields, expected):
    answer = {'items': [{'name': 'a', 'size': '1'}], 'nextPageToken': 't'}
    assert select_fields(answer, fields) == expected


def test_metadata(client, server):
    server.put('bucket', 'a/ü b.txt', DATA)
    found = client('GET', '/storage/v1/b/bucket/o/a%2F%C3%BC%20b.txt').json
    crc32c = base64.b64encode(google_crc32c.value(DATA).to_bytes(4, 'big')).decode()
    assert found['size'] == str(len(DATA))
    assert found['crc32c'] == crc32c
    assert found['md5Hash'] == base64.b64encode(hashlib.md5(DATA).digest()).decode()
    headers = client('GET', '/bucket/a/%C3%BC%20b.txt').headers
    assert headers['X-Goog-Hash'] == f'crc32c={crc32c},md5={found["md5Hash"]}'
    assert headers['X-Goog-Generation'] == found['generation']
    server.put('bucket', 'a/ü b.txt', DATA)
    again = client('GET', '/storage/v1/b/bucket/o/a%2F%C3%BC%20b.txt').json
    assert int(again['generation']) > int(found['generation'])
    assert again['etag'] != found['etag']


def test_what_is_not_there(client):
    assert client('GET', '/storage/v1/b/bucket/o/a').status == 404
    assert client('DELETE', '/storage/v1/b/bucket/o/a').status == 404
    assert client('GET', '/bucket/a').status == 404
    assert client('GET', '/storage/v1/b/no-such-bucket/o').status == 404
    assert client('GET', '/storage/v1/b/no-such-bucket').status == 404
    assert client('GET', '/storage/v1/b/bucket').status == 200


def test_an_unknown_request_is_told(tmp_path):
    with fake_gcs(tmp_path) as server:
        assert Client(server)('PATCH', '/storage/v1/b/bucket').status == 501
    assert [str(error) for error in server.errors] == ['PATCH /storage/v1/b/bucket']


# --- Reads, and what the log says of them ---------------------------------------------------------


@EXAMPLES
@given(size=st.integers(0, 20), first=st.integers(0, 25), length=st.integers(1, 25))
def test_ranges(client, size, first, length):
    bucket = next(BUCKETS)
    client.server.put(bucket, 'a', DATA[:size])
    asked = f'{first}-{first + length - 1}'
    answer = client('GET', f'/{bucket}/a', Range=f'bytes={asked}')
    expected = DATA[:size][first : first + length]
    if expected:
        assert answer.status == 206
        assert answer.body == expected
        last = first + len(expected) - 1
        assert answer.headers['Content-Range'] == f'bytes {first}-{last}/{size}'
    else:
        assert (answer.status, answer.body) == (416, b'')
        assert answer.headers['Content-Range'] == f'bytes */{size}'
    request = client.server.requests[-1]
    assert request.range == (first, first + length - 1)
    assert request.nbytes == len(expected)


def test_open_ranges(client, server):
    server.put('bucket', 'a', DATA)
    assert client('GET', '/bucket/a', Range='bytes=1000000-').body == DATA[1_000_000:]
    assert client('GET', '/bucket/a', Range='bytes=-10').body == DATA[-10:]
    assert [request.range for request in server.requests] == [(1_000_000, None), (-10, None)]


def test_the_log(client, server):
    client('POST', '/upload/storage/v1/b/bucket/o?uploadType=media&name=a%2Fb', DATA)
    client('GET', '/bucket/a/b', Range='bytes=5-9', User_Agent='TSL')
    client('GET', '/storage/v1/b/bucket/o?prefix=a/', User_Agent='python-gcsfs/2026.10.1')
    client('HEAD', '/bucket/a/b')
    lines = [(str(r), r.range, r.client, r.received, r.status) for r in server.requests]
    assert lines == [
        ('POST upload bucket/a/b', None, '', len(DATA), 200),
        ('GET read bucket/a/b', (5, 9), 'tensorflow', 0, 206),
        ('GET list bucket/a/', None, 'gcsfs', 0, 200),
        ('HEAD read bucket/a/b', None, '', 0, 200),
    ]
    assert [r.nbytes for r in server.requests if r.action == 'read'] == [5, 0]
    server.clear()
    assert server.requests == []


def test_an_aborted_read_counts_what_was_sent(client, server):
    server.put('bucket', 'a', bytes(64 << 20))
    connection = http.client.HTTPConnection(*server.address, timeout=5)
    connection.request('GET', '/bucket/a')
    connection.getresponse().read(1000)
    connection.close()
    client('GET', '/bucket/a', Range='bytes=0-0')  # the server has noticed by then, or soon
    assert 1000 <= server.requests[0].nbytes < 64 << 20


# --- Uploads, copies, preconditions ---------------------------------------------------------------


def test_preconditions(client, server):
    first = client.upload('a', b'1', ifGenerationMatch='0').json['generation']
    assert client.upload('a', b'2', ifGenerationMatch='0').status == 412
    second = client.upload('a', b'2', ifGenerationMatch=first).json['generation']
    path = '/storage/v1/b/bucket/o/a'
    assert client('DELETE', f'{path}?ifGenerationMatch={first}').status == 412
    unchanged = client('GET', f'/bucket/a?ifGenerationNotMatch={second}')
    assert (unchanged.status, unchanged.body) == (304, b'')
    assert client('GET', f'/bucket/a?ifGenerationNotMatch={first}').status == 200
    assert client('DELETE', f'{path}?ifGenerationNotMatch={second}').status == 412
    assert client('GET', f'{path}?generation={first}').status == 404
    copy = f'{path}/rewriteTo/b/bucket/o/b'
    assert client('POST', f'{copy}?ifSourceGenerationMatch={first}').status == 412
    assert client('POST', f'{copy}?ifGenerationMatch=0').json['done']
    assert client('POST', f'{copy}?ifGenerationMatch=0').status == 412
    assert client('DELETE', f'{path}?ifGenerationMatch={second}').status == 204
    assert server.objects('bucket') == {'b': b'2'}


def test_of_many_who_create_an_object_one_succeeds(client):
    with futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: client.upload('a', b'1', ifGenerationMatch='0'), range(16))
    assert sorted(answer.status for answer in answers) == [200] + [412] * 15


def test_a_resumable_upload_in_parts(client, server):
    path = client.start_upload('a')
    assert 'Range' not in client.send_part(path, b'', 0, len(DATA)).headers
    answer = client.send_part(path, DATA[:UNIT], 0, len(DATA))
    assert (answer.status, answer.headers['Range']) == (308, f'bytes=0-{UNIT - 1}')
    assert client.send_part(path, DATA[3 * UNIT :], 3 * UNIT, len(DATA)).status == 503  # a gap
    overlapping = client.send_part(path, DATA[UNIT // 2 :], UNIT // 2, len(DATA))
    assert (overlapping.status, overlapping.json['size']) == (200, str(len(DATA)))
    for data in (b'', DATA):  # the answer was lost
        assert client.send_part(path, data, 0, len(DATA)).status == 200
    assert server.objects('bucket') == {'a': DATA}


@pytest.mark.parametrize('kind', ['cut', 'reset', 'stall'])
def test_an_upload_that_breaks_off_goes_on_at_a_whole_unit(client, server, kind):
    path = client.start_upload('a')
    server.inject(Fault(kind, after_bytes=UNIT + 1000, seconds=0.01))
    with pytest.raises(OSError):  # reset, broken pipe or closed without an answer
        client.send_part(path, DATA, 0, len(DATA))
    answer = client.send_part(path, b'', 0, len(DATA))
    assert (answer.status, answer.headers['Range']) == (308, f'bytes=0-{UNIT - 1}')
    assert server.objects('bucket') == {}
    assert client.send_part(path, DATA[UNIT:], UNIT, len(DATA)).status == 200
    assert server.objects('bucket') == {'a': DATA}


def test_folders_and_large_objects(server, tmp_path):
    source = tmp_path / 'source'
    (source / 'deep').mkdir(parents=True)
    (source / 'deep' / 'large').write_bytes(10 * DATA)
    (source / 'empty').write_bytes(b'')
    server.upload_folder(source, 'gs://bucket/there')
    (source / 'deep' / 'large').unlink()
    assert server.objects('bucket') == {'there/deep/large': 10 * DATA, 'there/empty': b''}
    server.put('bucket', 'thereafter', b'')
    server.download_folder('gs://bucket/there', tmp_path / 'target')
    found = [path.name for path in (tmp_path / 'target').rglob('*')]
    assert sorted(found) == ['deep', 'empty', 'large']
    assert (tmp_path / 'target' / 'deep' / 'large').read_bytes() == 10 * DATA
    assert (tmp_path / 'target' / 'empty').read_bytes() == b''
    server.remove('bucket', 'there/empty')
    assert list(server.objects('bucket')) == ['there/deep/large', 'thereafter']
