"""Copies of remote files, whoever is killed when."""

import os
import pathlib
import random
import time

import pytest

from coyo11m_tfds import storage
from coyo11m_tfds.storage import scratch
from coyo11m_tfds.storage.file_state import FileState, OnBytes, ignore_bytes
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile
from tests.fakes.cloud import Gcs

SIZE = 100_000


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    return tmp_path / 'scratch'


def content(name: str) -> bytes:
    return random.Random(name).randbytes(SIZE)


def put(bucket: Gcs, name: str) -> StoredFile:
    bucket.put('bucket', name, content(name))
    return storage.describe_file(f'gs://bucket/{name}')


def test_several_files_are_there_together(bucket, folder, tmp_path):
    local = tmp_path / 'local.pt'
    local.write_bytes(b'content')
    remote = [put(bucket, name) for name in ('a/x.pt', 'b/x.pt', 'y.pt')]
    files = [remote[0], storage.describe_file(local), *remote[1:]]
    told: list[int] = []
    with Scratch(folder).hold_all(files, on_bytes=told.append) as paths:
        contents = [pathlib.Path(path).read_bytes() for path in paths]
        assert paths[1] == str(local)
    assert contents == [content('a/x.pt'), b'content', content('b/x.pt'), content('y.pt')]
    assert sum(told) == 3 * SIZE
    assert os.listdir(folder) == []


class Endless(StoredFile):
    """A file whose download ends only when it is ended."""

    def fetch(self, target: str, on_bytes: OnBytes = ignore_bytes) -> FileState:
        for _ in range(2000):
            time.sleep(0.01)
            on_bytes(1)
        raise AssertionError('nobody has ended it')


def test_the_first_error_ends_the_downloads_before_it(bucket, folder):
    endless = Endless('gs://bucket/x.pt', SIZE, '', None)
    absent = StoredFile('gs://bucket/y.pt', SIZE, '', None)
    held = Scratch(folder).hold_all([endless, absent])
    with pytest.raises(FileNotFoundError, match=r'y\.pt is gone'), held:
        pass
    assert os.listdir(folder) == []


def test_the_folder_that_a_program_takes(monkeypatch):
    monkeypatch.setenv('HOME', '/home')
    monkeypatch.setenv('XDG_CACHE_HOME', '/cache')
    for data_dir, chosen, expected in (
        ('/data', '', '/data/.x'),
        ('/data/x/latents/1.0.0/../../..', '', '/data/.x'),
        ('latents/1.0.0/../../..', '', '../.x'),
        ('', '', '/cache/x'),
        ('gs://bucket/data', '', '/cache/x'),
        ('gs://bucket/x/latents/1.0.0/../../..', '', '/cache/x'),
        ('/data', '~/mine', '/home/mine'),
    ):
        assert scratch.choose_folder('x', data_dir, chosen) == expected


def test_the_folder_of_a_run_lies_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    out = tmp_path / 'out'
    with scratch.scratch_folder(str(out), '~/mine') as folder:
        assert pathlib.Path(folder).parent == tmp_path / 'mine'
    with Scratch('~/mine').make_folder() as folder:
        assert pathlib.Path(folder).parent == tmp_path / 'mine'
    # One that the run has made does not stay empty, one of the user does.
    assert not out.exists()
    out.mkdir()
    with scratch.scratch_folder(str(out), ''):
        pass
    assert out.exists()
