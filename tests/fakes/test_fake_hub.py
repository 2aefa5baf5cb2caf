"""The stand-in for the hub does what huggingface_hub and plain HTTP expect of it."""

import hashlib
import http.client
import os
import pathlib
import random
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator

import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.fakes.cloud import Fault, Hub, fake_hub
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


def download(name: str, **arguments: object) -> bytes:
    path = huggingface_hub.hf_hub_download('owner/name', name, repo_type='dataset', **arguments)
    return pathlib.Path(path).read_bytes()


@pytest.fixture
def filled(hub: Hub) -> Hub:
    """The hub that huggingface_hub in this process reaches, with FILES."""
    hub.commit(FILES)
    return hub


@pytest.fixture
def files(filled: Hub) -> huggingface_hub.HfFileSystem:
    return huggingface_hub.HfFileSystem(skip_instance_cache=True)


def actions(hub: Hub) -> list[str]:
    return [f'{r.method} {r.action}' for r in hub.requests if r.action != 'harnesses']


# --- huggingface_hub ------------------------------------------------------------------------------


def test_listings(filled, files):
    filled.page_size = 2
    assert sorted(files.find(REPO)) == sorted(f'{REPO}/{name}' for name in FILES)
    folder = files.ls(f'{REPO}/latents-3crop', detail=True, expand_info=True)
    assert [entry['size'] for entry in folder] == [len(LATENTS), 1000]
    assert folder[0]['lfs'].sha256 == hashlib.sha256(LATENTS).hexdigest()
    assert folder[0]['last_commit'].oid == huggingface_hub.dataset_info('owner/name').sha
    readme = files.info(f'{REPO}/README.md')
    assert readme['blob_id'] == hashlib.sha1(b'blob 5\0hello').hexdigest()
    assert readme['lfs'] is None
    assert files.exists(f'{REPO}/README.md') and not files.exists(f'{REPO}/nothing')


def test_reads(files):
    assert files.cat(f'{REPO}/{LARGE}') == LATENTS
    assert files.cat_file(f'{REPO}/{LARGE}', start=1000, end=1010) == LATENTS[1000:1010]
    assert files.cat(f'{REPO}/README.md') == b'hello'


def test_downloads_come_from_another_host(filled):
    assert download(LARGE) == LATENTS
    assert actions(filled) == ['HEAD resolve', 'GET read']
    filled.clear()
    assert download('README.md') == b'hello'
    assert actions(filled) == ['HEAD resolve', 'HEAD small', 'GET read']


def test_information_about_paths(filled):
    info = huggingface_hub.dataset_info('owner/name', files_metadata=True)
    assert {s.rfilename: s.size for s in info.siblings} == {k: len(v) for k, v in FILES.items()}
    api = huggingface_hub.HfApi()
    found = api.get_paths_info('owner/name', ['README.md', 'nothing'], repo_type='dataset')
    assert [(entry.path, entry.size) for entry in found] == [('README.md', 5)]
    url = huggingface_hub.hf_hub_url('owner/name', LARGE, repo_type='dataset')
    metadata = huggingface_hub.get_hf_file_metadata(url)
    assert metadata.etag == hashlib.sha256(LATENTS).hexdigest()
    assert (metadata.size, metadata.commit_hash) == (len(LATENTS), info.sha)
    assert metadata.xet_file_data is None


def test_a_revision_stays_what_it_was(filled, files):
    first = huggingface_hub.dataset_info('owner/name').sha
    second = filled.commit({'README.md': b'changed'})
    filled.commit({'README.md': b'another'}, branch='other')
    assert len({first, second, filled.commit(FILES, branch='back')}) == 3
    assert huggingface_hub.dataset_info('owner/name').sha == second
    for revision, expected in [(first, b'hello'), ('main', b'changed'), ('other', b'another')]:
        assert files.cat(f'{REPO}@{revision}/README.md') == expected
        assert download('README.md', revision=revision) == expected


@pytest.mark.parametrize(
    ('ask', 'error'),
    [
        (lambda: huggingface_hub.dataset_info('owner/other'), errors.RepositoryNotFoundError),
        (
            lambda: huggingface_hub.dataset_info('owner/name', revision='other'),
            errors.RevisionNotFoundError,
        ),
        (lambda: download('nothing'), errors.RemoteEntryNotFoundError),
    ],
)
def test_what_is_not_there(filled, ask, error):
    with pytest.raises(error):
        ask()


def test_gated_files_need_a_token(filled, files):
    filled.gated = True
    assert files.exists(f'{REPO}/{LARGE}')  # what there is, everybody may see
    with pytest.raises(errors.GatedRepoError, match='401'):
        download(LARGE)
    with pytest.raises(errors.GatedRepoError, match='403'):
        download(LARGE, token='hf_of_somebody_else')
    assert download(LARGE, token=filled.token) == LATENTS


@pytest.mark.parametrize('kind', ['429', 'cut', 'stall', 'slow'])
def test_downloads_get_over(filled, kind):
    filled.inject(Fault(kind, action='read', after_bytes=1_000_000))
    assert download(LARGE) == LATENTS
    faults = [request.fault for request in filled.requests if request.action == 'read']
    assert faults == ([kind] if kind == 'slow' else [kind, None])


def test_a_reset_in_the_middle_ends_a_download(filled):
    filled.inject(Fault('reset', action='read', after_bytes=1_000_000))
    with pytest.raises(Exception, match='reset by peer'):
        download(LARGE)
    assert download(LARGE) == LATENTS


def test_a_flipped_byte_is_not_noticed(filled):
    """huggingface_hub checks sizes only: whoever downloads has to check the SHA-256."""
    filled.inject(Fault('flip', action='read'))
    assert download(LARGE) != LATENTS


@pytest.mark.parametrize('kind', ['401', '403'])
def test_refusals(filled, kind):
    filled.inject(Fault(kind, count=None))
    with pytest.raises(errors.GatedRepoError, match=kind):
        huggingface_hub.dataset_info('owner/name')
    with pytest.raises(errors.GatedRepoError, match=kind):
        download(LARGE)


def test_a_child_process(tmp_path):
    (tmp_path / 'large').write_bytes(LATENTS)
    program = (
        'import huggingface_hub as h; f = h.HfFileSystem();'
        'print(f.ls("datasets/a/b", detail=False), len(f.cat("datasets/a/b/large.pt")))'
    )
    with fake_hub({'large.pt': tmp_path / 'large'}, repo='a/b') as server:
        done = subprocess.run(
            [sys.executable, '-c', program],
            env={**os.environ, **server.env},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == f"['datasets/a/b/large.pt'] {len(LATENTS)}\n"
    assert server.errors == []


# --- Plain HTTP -----------------------------------------------------------------------------------


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


def test_pages_of_a_listing(client):
    client.server.page_size = 2
    path, pages = f'/api/{REPO}/tree/main?recursive=true', []
    while path:
        answer = client('GET', path)
        pages.append([entry['path'] for entry in answer.json])
        link = answer.headers['Link']
        path = link and link.removeprefix(f'<{client.server.url}').removesuffix('>; rel="next"')
    names = sorted([*FILES, 'latents-3crop'])
    assert pages == [names[:2], names[2:4], names[4:]]


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


def test_a_cut_download(client):
    client.server.inject(Fault('cut', action='read'))
    answer = client('GET', f'/{REPO}/resolve/main/{LARGE}')
    where = urllib.parse.urlsplit(answer.headers['Location'])
    with pytest.raises(http.client.IncompleteRead):
        client('GET', f'{where.path}?{where.query}')
