"""The stand-in for the hub sends files as the hub does."""

import hashlib
import random
import urllib.parse
from collections.abc import Iterator

import pytest

from tests.fakes.cloud import Fault, fake_hub
from tests.fakes.fake_client import Client

LATENTS = random.Random(0).randbytes(3_000_000)
FILES = {
    'README.md': b'hello',
    'coyo11m-meta.parquet': b'a small one',
    'latents-3crop/000000-000009.pt': LATENTS,
    'latents-3crop/000010-000019.pt': LATENTS[:1000],
}
REPO = 'datasets/owner/name'
LARGE = 'latents-3crop/000000-000009.pt'


@pytest.fixture
def client() -> Iterator[Client]:
    with fake_hub(FILES) as server:
        yield Client(server)
    assert server.errors == []


def test_large_files_are_sent_on(client):
    answer = client('GET', f'/{REPO}/resolve/main/{LARGE}')
    assert answer.status == 302
    digest = hashlib.sha256(LATENTS).hexdigest()
    assert answer.headers['X-Linked-Size'] == str(len(LATENTS))
    assert answer.headers['X-Linked-ETag'] == f'"{digest}"'
    where = urllib.parse.urlsplit(answer.headers['Location'])
    assert where.hostname == 'localhost'
    path = f'{where.path}?{where.query}'
    assert client('GET', path, Range='bytes=5-9').body == LATENTS[5:10]
    assert client('GET', where.path).status == 403  # not signed
    assert client('GET', path, Authorization='Bearer token').status == 400  # it leaked


def test_small_files_are_sent_on_by_commit(client):
    answer = client('GET', f'/{REPO}/resolve/main/README.md')
    assert answer.status == 307
    assert answer.headers['Location'].startswith(f'/api/resolve-cache/{REPO}/')
    found = client('GET', answer.headers['Location'], Range='bytes=1-2')
    assert (found.status, found.body) == (206, b'el')
    assert answer.headers['X-Repo-Commit'] == found.headers['X-Repo-Commit']


def test_the_log_names_files(client):
    client.server.inject(Fault('503', match=r'read .*\.pt$'))
    answer = client('GET', f'/{REPO}/resolve/main/{LARGE}')
    where = urllib.parse.urlsplit(answer.headers['Location'])
    assert client('GET', f'{where.path}?{where.query}').status == 503
    client('GET', f'{where.path}?{where.query}', Range='bytes=0-99')
    lines = [(str(r), r.range, r.status, r.fault) for r in client.server.requests]
    assert lines == [
        (f'GET resolve owner/name/{LARGE}', None, 302, None),
        (f'GET read owner/name/{LARGE}', None, 503, '503'),
        (f'GET read owner/name/{LARGE}', (0, 99), 206, None),
    ]
    assert client.server.requests[-1].nbytes == 100
