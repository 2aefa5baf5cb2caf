"""The stand-ins answer as the services do, and their faults are what their names say."""

import collections
import http.client
import json
import pathlib
import random
from collections.abc import Iterator

import pytest

from tests import children
from tests.fakes.cloud import Fault, Gcs, fake_gcs
from tests.fakes.fake_http import Faults, Request

DATA = random.Random(0).randbytes(1 << 20)
UPLOAD = '/upload/storage/v1/b/bucket/o?uploadType=media&name='
OBJECT = '/storage/v1/b/bucket/o/a'


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Gcs]:
    with fake_gcs(tmp_path) as server:
        server.put('bucket', 'a', DATA)
        yield server


def ask(server: Gcs, method: str, path: str, body: bytes = b'') -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=0.5)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ('kind', 'read', 'stored'),
    [
        ('429', 429, False),
        ('503', 503, False),
        ('401', 401, False),
        ('403', 403, False),
        ('cut', http.client.IncompleteRead, False),
        ('stall', TimeoutError, False),
        ('reset', ConnectionResetError, False),
        ('lost', http.client.RemoteDisconnected, True),
        ('flip', 200, True),
        ('slow', 200, True),
    ],
)
def test_a_fault_hits_the_first_requests_that_fit(server, kind, read, stored):
    server.inject(
        Fault(kind, count=2, match=r'bucket/[ab]$', seconds=0.6 if kind == 'stall' else 0)
    )
    assert ask(server, 'GET', '/storage/v1/b/bucket/o')[0] == 200  # does not fit
    if isinstance(read, int):
        status, data = ask(server, 'GET', '/bucket/a')
        assert (status, kind == 'flip' or data == DATA or status != 200) == (read, True)
        assert sum(a != b for a, b in zip(data, DATA, strict=False)) == 1 or kind != 'flip'
    else:
        with pytest.raises(read):
            ask(server, 'GET', '/bucket/a')
    try:
        ask(server, 'POST', f'{UPLOAD}b', DATA)
    except (OSError, http.client.HTTPException):
        assert not isinstance(read, int)
    assert ('b' in server.objects('bucket')) == stored
    assert [request.fault for request in server.requests] == [None, kind, kind]
    assert ask(server, 'GET', '/bucket/a') == (200, DATA)
    assert server.errors == []


def test_a_share_of_the_data_requests():
    reads = [Request('GET', 'read', 'bucket/a', (n, n + 9)) for n in range(4000)]
    lists = [Request('GET', 'list', f'bucket/{n}', None) for n in range(100)]

    def chosen(order: list[Request], seed: int) -> dict[int, str]:
        faults = Faults()
        faults.inject_share(['cut', 'flip', '503'], share=0.05, seed=seed)
        found = {id(request): faults.choose(request) for request in order}
        return {number: fault.kind for number, fault in found.items() if fault}

    hit = chosen(reads + lists, seed=1)
    kinds = collections.Counter(hit.values())
    assert 140 <= len(hit) <= 260  # 200 expected; beyond four standard deviations
    assert min(kinds['cut'], kinds['flip'], kinds['503']) > 30
    assert not any(id(request) in hit for request in lists)
    shuffled = random.Random(1).sample(reads + lists, len(reads + lists))
    assert chosen(shuffled, seed=1) == hit
    assert chosen(reads, seed=2) != hit


def test_preconditions(server):
    first = server.resource('bucket', 'a')['generation']
    assert ask(server, 'POST', f'{UPLOAD}a&ifGenerationMatch=0', b'2')[0] == 412
    status, body = ask(server, 'POST', f'{UPLOAD}a&ifGenerationMatch={first}', b'2')
    assert status == 200 and json.loads(body)['generation'] != first
    assert ask(server, 'DELETE', f'{OBJECT}?ifGenerationMatch={first}')[0] == 412
    assert ask(server, 'GET', f'{OBJECT}?generation={first}')[0] == 404
    assert server.objects('bucket') == {'a': b'2'}


def test_an_unknown_request_is_told(server):
    assert ask(server, 'PATCH', '/storage/v1/b/bucket')[0] == 501
    assert [str(error) for error in server.errors] == ['PATCH /storage/v1/b/bucket']


@pytest.mark.slow
def test_tensorflow_gets_over_faults_through_the_proxy(server, monkeypatch):
    for name, value in {**server.env, 'TF_CPP_MIN_LOG_LEVEL': '3'}.items():
        monkeypatch.setenv(name, value)
    server.put('bucket', 'c', DATA)
    for name, kinds in (('a', ('503', 'cut')), ('c', ('reset', 'lost'))):
        for kind in kinds:
            server.inject(*(Fault(kind, match=f'{x} bucket/{name}') for x in ('read', 'upload')))
    code = """
        import tensorflow as tf
        for name in 'ac':
            with tf.io.gfile.GFile(f'gs://bucket/{name}', 'rb') as file:
                data = file.read()
            with tf.io.gfile.GFile(f'gs://bucket/{name}', 'wb') as file:
                file.write(data)
        tf.io.gfile.rename('gs://bucket/c', 'gs://bucket/d/e')
        print(sorted(tf.io.gfile.listdir('gs://bucket')), tf.io.gfile.exists('gs://bucket/c'))
    """
    with children.python(code) as child:
        out, errors = child.communicate(timeout=100)
    assert out == "['a', 'd/'] False\n", errors
    assert server.objects('bucket') == {'a': DATA, 'd/e': DATA}
