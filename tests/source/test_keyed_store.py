"""Stores are built once, and again when they must be, whatever happened to them or to builders."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds.source import caption_store, embedding_store, keyed_store, part_files
from tests import made_sources

ROWS = {7: b'seven', 3: b'three', -5: b''}


class Source:
    """A Parquet file, and how often it had to be read."""

    def __init__(self, folder: pathlib.Path, name: str = 'x.parquet'):
        self.path = folder / name
        self.cache = folder / 'cache'
        self.times_read = 0
        text = pa.array([value.decode() or None for value in ROWS.values()])
        table = pa.table({'key': list(ROWS), 'caption_llava': text, 'tags': text})
        pq.write_table(table, self.path)

    @contextlib.contextmanager
    def local_file(self):
        self.times_read += 1
        yield str(self.path)

    def prepare(self, **changes) -> caption_store.CaptionStore:
        arguments = {
            'name': str(self.path),
            'version': '1',
            'column': 'caption_llava',
            'cache_dir': self.cache,
            'drop_duplicates': False,
        }
        return caption_store.prepare_store(self.local_file, **arguments | changes)

    def folders(self) -> list[str]:
        """What is in the cache, but for lock files."""
        return sorted(path.name for path in self.cache.iterdir() if path.is_dir())


@pytest.fixture
def source(tmp_path: pathlib.Path) -> Source:
    return Source(tmp_path)


def answers(store: caption_store.CaptionStore) -> dict[int, bytes]:
    return dict(zip(ROWS, store.texts(store.find(np.array(list(ROWS)))), strict=True))


# --- Once ---------------------------------------------------------------------------------------


def test_a_store_is_built_once(source: Source):
    first, second = source.prepare(), source.prepare()
    assert source.times_read == 1
    assert first.folder == second.folder
    assert os.path.dirname(first.folder) == str(source.cache)
    assert first.digest == second.digest
    for store in (first, second, caption_store.CaptionStore(first.folder)):
        assert answers(store) == ROWS
    assert source.folders() == [os.path.basename(first.folder)]


def test_a_sidecar_is_read_once(tmp_path: pathlib.Path):
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', {1: np.ones(2)})
    store, same = (
        embedding_store.prepare_store(
            part_files.find(path), cache_dir=tmp_path / 'cache', hold=hold
        )
        for hold in (lambda file: contextlib.nullcontext(file.path), None)
    )
    assert (store.header, store.folder, store.digest) == (same.header, same.folder, same.digest)


def test_duplicate_keys_are_refused_or_dropped_without_reading_again(source: Source):
    keys = [*range(100, 112), *range(115, 99, -1), 100]
    table = pa.table({'key': keys, 'caption_llava': [str(place) for place in range(len(keys))]})
    pq.write_table(table, source.path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r'x\.parquet: 13 rows repeat .* e\.g\. key 100;'):
            source.prepare()
    store = source.prepare(drop_duplicates=True)
    assert source.times_read == 1
    assert (store.num_duplicates, store.duplicate_keys.tolist()) == (13, list(range(100, 110)))
    assert store.duplicate_keys.dtype == np.int64
    assert store.texts(store.find(np.array([100, 111, 112]))) == [b'0', b'11', b'15']


# --- Again --------------------------------------------------------------------------------------


def test_another_version_takes_the_place_of_the_old_one(source: Source):
    old = source.prepare().folder
    table = pa.table({'key': [1], 'caption_llava': ['new']})
    pq.write_table(table, source.path)
    store = source.prepare(version='2')
    assert store.texts(store.find(np.array([1]))) == [b'new']
    assert source.times_read == 2
    assert source.folders() == [os.path.basename(store.folder)] != [os.path.basename(old)]


def test_another_format_takes_the_place_of_the_old_one(source: Source, monkeypatch):
    old = source.prepare().folder
    monkeypatch.setattr(keyed_store, 'FORMAT', keyed_store.FORMAT + 1)
    store = source.prepare()
    assert source.times_read == 2
    assert source.folders() == [os.path.basename(store.folder)] != [os.path.basename(old)]
    monkeypatch.undo()
    with pytest.raises(ValueError, match='another format'):
        caption_store.CaptionStore(store.folder)


def test_a_version_that_somebody_has_open_stays(source: Source):
    old = source.prepare()
    new = source.prepare(version='2')
    assert answers(caption_store.CaptionStore(old.folder)) == answers(old) == ROWS
    folder = old.folder
    del old
    source.prepare(version='3')
    assert not os.path.exists(folder)
    assert answers(new) == ROWS


def test_columns_and_files_do_not_disturb_each_other(source: Source, tmp_path: pathlib.Path):
    other = Source(tmp_path, 'y.parquet')
    names = [source.prepare().folder, source.prepare(column='tags').folder, other.prepare().folder]
    assert len(set(names)) == 3
    for _ in range(2):
        assert source.prepare().folder == names[0]
        assert source.prepare(column='tags').folder == names[1]
        assert other.prepare().folder == names[2]
    assert (source.times_read, other.times_read) == (2, 1)


def test_a_file_of_the_hub_is_the_same_at_another_commit(source: Source):
    place = 'hf://datasets/owner/name@{}/x.parquet'
    first = source.prepare(name=place.format('0' * 40), version='sha256:1').folder
    assert source.prepare(name=place.format('a' * 40), version='sha256:1').folder == first
    second = source.prepare(name=place.format('b' * 40), version='sha256:2').folder
    assert source.times_read == 2
    assert source.folders() == [os.path.basename(second)]


# --- Damage -------------------------------------------------------------------------------------


def truncate(folder: pathlib.Path, name: str) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size - 1)


def lengthen(folder: pathlib.Path, name: str) -> None:
    with open(folder / name, 'ab') as file:
        file.write(b'x')


def remove(folder: pathlib.Path, name: str) -> None:
    (folder / name).unlink()


def replace_by(text: str) -> Callable[[pathlib.Path, str], None]:
    return lambda folder, name: (folder / name).write_text(text)


def change_digest(folder: pathlib.Path, name: str) -> None:
    meta = json.loads((folder / name).read_text())
    meta['facts']['digest'] = 'f' * 64
    (folder / name).write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ('name', 'damage'),
    [(n, d) for n in ('keys', 'starts', 'lengths', 'text') for d in (truncate, lengthen, remove)]
    + [('store.json', d) for d in (truncate, lengthen, remove, change_digest)]
    + [('store.json', replace_by(t)) for t in ('', '\0\0\0', 'null', '[1]', '{}', '"a"', '{"a":')],
)
def test_a_damaged_store_is_noticed_and_built_again(source: Source, name: str, damage):
    folder = source.prepare().folder
    damage(pathlib.Path(folder), name)
    with pytest.raises(keyed_store.UnusableStoreError, match=folder):
        caption_store.CaptionStore(folder)
    store = source.prepare()
    assert (store.folder, source.times_read) == (folder, 2)
    assert answers(store) == ROWS
    assert answers(source.prepare()) == ROWS
    assert source.times_read == 2


def test_a_damaged_store_is_built_again_though_somebody_has_it_open(source: Source):
    opened = source.prepare()
    truncate(pathlib.Path(opened.folder), 'text')
    store = source.prepare()
    assert (store.folder, source.times_read) == (opened.folder, 2)
    assert answers(store) == ROWS


def test_a_store_that_cannot_be_opened_is_not_thrown_away(source: Source):
    folder = pathlib.Path(source.prepare().folder)
    # Links in a circle stand for all that a right or a handle that is missing would do.
    for name in ('store.json', 'keys'):
        (folder / name).rename(folder / 'moved')
        (folder / name).symlink_to(folder / name)
        with pytest.raises(OSError, match='symbolic links'):
            source.prepare()
        (folder / 'moved').rename(folder / name)
    assert answers(source.prepare()) == ROWS
    assert source.times_read == 1


def test_there_may_be_no_store(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match=r'nowhere: holds no usable store'):
        caption_store.CaptionStore(tmp_path / 'nowhere')


def test_a_failed_build_leaves_nothing(source: Source):
    for changes in ({'column': 'x'}, {'column': 'key'}):
        with pytest.raises(ValueError, match='key'):
            source.prepare(**changes)
        assert source.folders() == []
    assert answers(source.prepare()) == ROWS


# --- Several processes --------------------------------------------------------------------------

PROGRAM = """
import contextlib, os, resource, signal, sys
from absl import logging
from coyo11m_tfds.source import caption_store
from coyo11m_tfds.source import keyed_parquet
logging.set_verbosity(logging.INFO)
path, cache, version, mode = sys.argv[1:]

@contextlib.contextmanager
def local_file():
    with open(os.path.join(cache, 'reads'), 'a') as file:
        file.write('x')
    if mode == 'slow':
        print('building', flush=True)
        sys.stdin.readline()
    yield path

if mode == 'killed':
    batches = keyed_parquet.batches
    def killed_after_first_batch(*arguments, **options):
        yield next(batches(*arguments, **options))
        os.kill(os.getpid(), signal.SIGKILL)
    keyed_parquet.batches = killed_after_first_batch
if mode.isdecimal():
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(mode), int(mode)))
store = caption_store.prepare_store(
    local_file, name=path, version=version, column='caption_llava', cache_dir=cache,
    drop_duplicates=False,
)
print(store.folder, store.digest, *store.texts(store.find(store.keys[1:])))
"""


@pytest.fixture
def start(source: Source) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts PROGRAM; processes that still run when the test ends are killed."""
    with contextlib.ExitStack() as processes:

        def start_process(version: str = '1', mode: str = '') -> subprocess.Popen:
            source.cache.mkdir(exist_ok=True)
            command = [sys.executable, '-c', PROGRAM, source.path, source.cache, version, mode]
            pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
            process = processes.enter_context(subprocess.Popen(command, text=True, **pipes))
            processes.callback(process.kill)
            return process

        yield start_process


def num_reads(source: Source) -> int:
    return len((source.cache / 'reads').read_text())


def test_several_processes_build_it_once(source: Source, start):
    builder = start(mode='slow')
    assert builder.stdout.readline() == 'building\n'
    others = [start() for _ in range(2)]
    for other in others:
        assert any('waiting for it' in line for line in other.stderr)
    outputs = [builder.communicate('\n', timeout=60)[0]]
    outputs += [other.communicate(timeout=60)[0] for other in others]
    assert [builder.returncode, *(other.returncode for other in others)] == [0, 0, 0]
    assert outputs[0].endswith("b'three' b'seven'\n")
    assert set(outputs) == {outputs[0]}
    assert num_reads(source) == 1
    assert len(source.folders()) == 1


def test_a_store_is_opened_while_another_version_is_built(source: Source, start):
    store = source.prepare()
    builder = start('2', mode='slow')
    assert builder.stdout.readline() == 'building\n'
    output, errors = start('1').communicate(timeout=60)
    assert output.startswith(store.folder), errors
    builder.communicate('\n', timeout=60)
    assert builder.returncode == 0


def test_processes_with_different_versions_do_not_harm_each_other(start):
    """Each takes the other's store for an old one."""
    processes = [start(version) for version in ('1', '2', '1', '2')]
    outputs = [process.communicate(timeout=60) for process in processes]
    for process, (output, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
        assert output.endswith("b'three' b'seven'\n")


def test_what_a_killed_builder_leaves_is_removed(source: Source, start):
    for version in ('1', '2'):
        builder = start(version, mode='killed')
        builder.communicate(timeout=60)
        assert builder.returncode == -signal.SIGKILL
        assert source.folders() != []
    store = source.prepare(version='2')
    assert answers(store) == ROWS
    assert source.folders() == [os.path.basename(store.folder)]


@pytest.mark.parametrize(('max_bytes', 'name'), [(5, 'text'), (15, 'keys')])
def test_a_disk_that_is_full_is_named(source: Source, start, max_bytes: int, name: str):
    """A limit of the size of files stands for it."""
    builder = start(mode=str(max_bytes))
    _, errors = builder.communicate(timeout=60)
    assert builder.returncode == 1
    last_line = errors.splitlines()[-1]
    assert f"File too large: '{source.cache}/" in last_line
    assert last_line.endswith(f"/{name}'")
    assert source.folders() == []
    assert answers(source.prepare()) == ROWS
