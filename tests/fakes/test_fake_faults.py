"""Faults hit the requests that they are meant for, and do what their names say."""

import collections
import http.client
import pathlib
import random
import socket
import time
from collections.abc import Iterator

import pytest

from tests.fakes.cloud import Fault, Gcs, fake_gcs
from tests.fakes.fake_client import Client
from tests.fakes.fake_faults import Faults, Request

DATA = random.Random(0).randbytes(1 << 20)
READ = Request('GET', 'read', 'bucket/a.pt', (0, 9), 'gcsfs')
LIST = Request('GET', 'list', 'bucket/', None, 'gcsfs')


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Gcs]:
    with fake_gcs(tmp_path) as server:
        server.put('bucket', 'a', DATA)
        yield server
    assert server.errors == []


@pytest.fixture
def client(server: Gcs) -> Client:
    return Client(server)


# --- Which requests -------------------------------------------------------------------------------


def test_the_first_ones_that_fit():
    faults = Faults()
    faults.inject(Fault('503', count=2, match=r'read .*\.pt$'), Fault('cut', method='PUT'))
    chosen = [faults.choose(request) for request in (LIST, READ, LIST, READ, READ)]
    assert [fault and fault.kind for fault in chosen] == [None, '503', None, '503', None]


def test_every_one_that_fits_until_healed(server, client):
    server.inject(Fault('503', count=None, action='read'))
    server.inject_share(['429'], share=1)
    assert [client('GET', '/bucket/a').status for _ in range(3)] == [503] * 3
    assert client('GET', '/storage/v1/b/bucket/o/a').status == 200
    server.heal()
    assert client('GET', '/bucket/a').status == 200


def test_the_first_fault_that_fits_wins():
    faults = Faults()
    faults.inject(Fault('503'), Fault('429', count=None))
    assert [faults.choose(READ).kind for _ in range(3)] == ['503', '429', '429']


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=r"'504' is none of \['429'"):
        Fault('504')


def test_a_share_of_the_data_requests():
    reads = [Request('GET', 'read', 'bucket/a', (n, n + 9), 'gcsfs') for n in range(4000)]
    lists = [Request('GET', 'list', f'bucket/{n}', None, 'gcsfs') for n in range(100)]

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


def test_a_share_draws_again_when_asked_again():
    faults = Faults()
    faults.inject_share(['cut'], share=0.5)
    answers = {faults.choose(READ) is None for _ in range(50)}
    assert answers == {True, False}


def test_a_share_everywhere_flips_no_metadata():
    faults = Faults()
    faults.inject_share(['flip', '503'], share=1.0, everywhere=True, match='list')
    kinds = {faults.choose(LIST).kind for _ in range(50)}
    assert kinds == {'503'}
    assert faults.choose(READ) is None


# --- What they do ---------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['401', '403', '429', '503'])
def test_refusals(server, client, kind):
    server.inject(Fault(kind))
    answer = client('GET', '/bucket/a')
    assert answer.status == answer.json['error']['code'] == int(kind)
    assert (server.requests[0].fault, server.requests[0].status) == (kind, int(kind))


def test_a_refused_upload_is_not_kept(server, client):
    server.inject(Fault('503'))
    assert client.upload('b', DATA).status == 503
    assert list(server.objects('bucket')) == ['a']
    assert client.upload('b', DATA).status == 200


def test_a_refusal_leaves_the_connection_usable(server):
    server.inject(Fault('503'))
    connection = http.client.HTTPConnection(*server.address, timeout=5)
    path = '/upload/storage/v1/b/bucket/o?uploadType=media&name=b'
    for status in (503, 200):
        connection.request('POST', path, DATA)
        reply = connection.getresponse()
        reply.read()
        assert reply.status == status
        assert not reply.will_close
    connection.close()


@pytest.mark.parametrize(('after_bytes', 'expected'), [(None, len(DATA) // 2), (1000, 1000)])
def test_cut(server, client, after_bytes, expected):
    server.inject(Fault('cut', after_bytes=after_bytes))
    with pytest.raises(http.client.IncompleteRead) as error:
        client('GET', '/bucket/a')
    assert error.value.partial == DATA[:expected]
    assert error.value.expected == len(DATA) - expected
    assert server.requests[0].nbytes == expected


def test_cut_before_the_first_byte(server, client):
    server.inject(Fault('cut', after_bytes=0), Fault('cut', method='DELETE'))
    for method, path in (('GET', '/bucket/a'), ('DELETE', '/storage/v1/b/bucket/o/a')):
        with pytest.raises(http.client.RemoteDisconnected):
            client(method, path)
    assert [request.status for request in server.requests] == [None, None]


def test_stall(server):
    server.inject(Fault('stall', after_bytes=1000, seconds=60))
    connection = http.client.HTTPConnection(*server.address, timeout=0.2)
    connection.request('GET', '/bucket/a')
    reply = connection.getresponse()
    assert reply.read(1000) == DATA[:1000]
    with pytest.raises(TimeoutError):
        reply.read(1)
    # The client gives up, and so does the server, long before the minute is over.
    connection.sock.settimeout(5)
    connection.sock.shutdown(socket.SHUT_WR)
    assert connection.sock.recv(1) == b''
    connection.close()


def test_a_stall_ends(server, client):
    server.inject(Fault('stall', seconds=0.1))
    with pytest.raises(http.client.IncompleteRead):
        client('GET', '/bucket/a')


def test_flip_on_a_read(server, client):
    server.inject(Fault('flip', count=2))
    for _ in range(2):
        answer = client('GET', '/bucket/a')
        assert len(answer.body) == len(DATA)
        assert sum(a != b for a, b in zip(answer.body, DATA, strict=True)) == 1
    server.inject(Fault('flip', after_bytes=3))
    flipped = client('GET', '/bucket/a', Range='bytes=10-19').body
    assert [n for n in range(10) if flipped[n] != DATA[10 + n]] == [3]
    assert client('GET', '/bucket/a').body == DATA  # what is kept is whole


def test_flip_on_an_upload(server, client):
    server.inject(Fault('flip', after_bytes=len(DATA) - 1))
    found = client.upload('b', DATA).json
    kept = server.objects('bucket')['b']
    assert kept[:-1] == DATA[:-1]
    assert kept[-1] != DATA[-1]
    assert found['crc32c'] == server.resource('bucket', 'b')['crc32c']
    assert found['crc32c'] != server.resource('bucket', 'a')['crc32c']


def test_metadata_is_never_flipped(server, client):
    server.inject(Fault('flip', count=None))
    assert client('GET', '/storage/v1/b/bucket/o/a').json['size'] == str(len(DATA))
    assert client('GET', '/bucket/missing').json['error']['code'] == 404


def test_slow_and_latency(server, client):
    server.inject(Fault('slow', seconds=0.1))
    server.latency = 0.1
    start = time.monotonic()
    assert client('GET', '/bucket/a').body == DATA
    assert time.monotonic() - start >= 0.2
    server.heal()
    assert server.latency == 0


@pytest.mark.parametrize('after_bytes', [None, 1000])
def test_reset(server, client, after_bytes):
    server.inject(Fault('reset', after_bytes=after_bytes))
    with pytest.raises(ConnectionResetError):
        client('GET', '/bucket/a')
    assert server.requests[0].nbytes == (after_bytes or 0)


def test_lost(server, client):
    server.inject(Fault('lost'))
    with pytest.raises(http.client.RemoteDisconnected):
        client.upload('b', b'1', ifGenerationMatch='0')
    assert server.objects('bucket')['b'] == b'1'
    assert client.upload('b', b'1', ifGenerationMatch='0').status == 412


def test_the_end_of_the_server_ends_connections(tmp_path):
    with fake_gcs(tmp_path) as server:
        connection = http.client.HTTPConnection(*server.address, timeout=5)
        connection.request('GET', '/storage/v1/b/bucket/o')
        connection.getresponse().read()
    assert connection.sock.recv(1) == b''
    connection.close()
