"""What is joined is made once, and again when it must be, whatever happened to it or its maker."""

import errno
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest

from coyo11m_tfds.source import keyed_values
from tests import damages

VALUES = {7: b'seven', 3: b'three', 20_000: b'many', -5: None}


class Maker:
    """Makes the values above in a cache, and counts how often."""

    def __init__(self, cache: pathlib.Path):
        self.cache, self.times = cache, 0
        cache.mkdir(exist_ok=True)

    def make(self, folder: str) -> None:
        self.times += 1
        write(folder, rows(), {'digest': '12'})

    def kept(self, origin: str = 'one') -> keyed_values.KeyedValues:
        return keyed_values.open_or_make(str(self.cache), origin, self.make)

    def folders(self) -> list[str]:
        return sorted(str(path) for path in self.cache.iterdir())


@pytest.fixture
def maker(tmp_path) -> Maker:
    return Maker(tmp_path / 'cache')


Batch = tuple[np.ndarray, np.ndarray, pa.Array]


def write(folder: str, batches: Iterable[Batch], facts: dict, **options) -> None:
    writer = keyed_values.KeyedValuesWriter(folder, **options)
    for batch in batches:
        writer.add(*batch)
    writer.finish(facts)


def rows() -> Iterator[Batch]:
    for place, value in VALUES.items():
        size = len(value or b'')
        yield np.array([place]), np.array([size], np.int32), pa.array([value], pa.binary())


def answers(found: keyed_values.KeyedValues) -> dict[int, bytes]:
    assert found.facts == {'digest': '12'}
    return dict(zip(found.places.tolist(), found.read(found.places), strict=True))


def test_it_is_made_once_and_opened_by_others(maker):
    first = maker.kept()
    assert answers(first) == answers(keyed_values.KeyedValues(first.folder)) == VALUES
    assert first.places.tolist() == sorted(VALUES)
    assert first.read(np.array([3, 20_000])) == [b'three', b'many']
    del first
    assert answers(maker.kept()) == VALUES
    assert maker.times == 1
    assert maker.kept('two').folder != maker.kept().folder
    assert maker.times == 2


@hypothesis.given(
    values=st.dictionaries(
        st.integers(-(2**63), 2**63 - 1), st.none() | st.binary(max_size=40), max_size=200
    ),
    order=st.randoms(use_true_random=False),
    batch_rows=st.integers(1, 80),
    run_bytes=st.integers(1, 5000),
)
def test_any_values_are_sorted_in_any_number_of_runs(
    tmp_path_factory, values, order, batch_rows, run_bytes
):
    places, batches = order.sample(list(values), len(values)), [empty_batch()]
    for first in range(0, len(places), batch_rows):
        some = places[first : first + batch_rows]
        array = pa.array([values[place] for place in some], pa.binary())
        sizes = np.array([len(values[place] or b'') for place in some], np.int32)
        array = array.dictionary_encode() if order.random() < 0.5 else array
        batches.append((np.array(some, np.int64), sizes, array))
    folder = str(tmp_path_factory.mktemp('made') / 'joined')
    write(folder, batches, {}, run_bytes=run_bytes)
    found, expected = keyed_values.KeyedValues(folder), sorted(values)
    assert found.places.tolist() == expected
    assert found.sizes.tolist() == [len(values[place] or b'') for place in expected]
    for part in (slice(None), slice(0, None, 7), slice(len(values) // 2, None), slice(3, 3)):
        wanted = np.array(expected[part], np.int64)
        assert found.read(wanted) == [values[place] for place in expected[part]]
    assert sorted(os.listdir(folder)) == ['record.json', 'rows.parquet']


def empty_batch() -> Batch:
    return np.empty(0, np.int64), np.empty(0, np.int32), pa.array([], pa.binary())


def test_what_nobody_has_open_is_swept(maker):
    first, second = maker.kept('one'), maker.kept('two')
    keyed_values.remove_unused(str(maker.cache))
    assert maker.folders() == sorted([first.folder, second.folder])
    folder = second.folder
    del second
    keyed_values.remove_unused(str(maker.cache))
    assert maker.folders() == [first.folder]
    assert folder != first.folder
    assert answers(first) == VALUES


@pytest.mark.parametrize(
    ('name', 'damage'),
    [
        ('rows.parquet', pathlib.Path.unlink),
        ('record.json', pathlib.Path.unlink),
        ('record.json', lambda path: path.write_text(path.read_text().replace('"12"', '"13"'))),
        ('rows.parquet', lambda path: replace_by_folder(path)),
        ('record.json', lambda path: replace_by_folder(path)),
        ('', lambda path: replace_by_file(path)),
    ],
)
def test_damage_to_it_is_noticed_and_it_is_made_again(maker, name, damage):
    damage(pathlib.Path(maker.kept().folder) / name)
    for _ in range(2):
        assert answers(maker.kept()) == VALUES
    assert maker.times == 2


def replace_by_folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b'')


def test_a_record_that_cannot_be_read_has_the_values_made_again(maker):
    path = pathlib.Path(maker.kept().folder, 'record.json')
    contents = damages.record_damages(path.read_bytes())
    for content in contents:
        path.write_bytes(content)
        assert answers(maker.kept()) == VALUES
    assert maker.times == 1 + len(contents)


@pytest.mark.parametrize('replace', [replace_by_folder, lambda path: replace_by_file(path.parent)])
def test_what_is_of_the_wrong_kind_stops_no_sweep(maker, replace):
    replace(pathlib.Path(maker.kept().folder, 'record.json'))
    keyed_values.remove_unused(str(maker.cache))
    assert answers(maker.kept()) == VALUES


def test_every_flipped_bit_is_noticed(maker):
    path = pathlib.Path(maker.kept().folder) / 'rows.parquet'
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        assert answers(maker.kept()) == VALUES
    assert maker.times == 1 + len(range(0, len(whole), 97))


def test_what_cannot_be_opened_is_not_thrown_away(maker):
    path = pathlib.Path(maker.kept().folder) / 'record.json'
    # Links in a circle stand for all that a right or a handle that is missing would do.
    path.rename(path.with_name('moved'))
    path.symlink_to(path)
    with pytest.raises(OSError, match='symbolic links'):
        maker.kept()
    path.with_name('moved').rename(path)
    assert answers(maker.kept()) == VALUES
    assert maker.times == 1


def test_another_process_may_be_faster(maker):
    def make(folder: str) -> None:
        maker.kept()
        maker.make(folder)

    assert answers(keyed_values.open_or_make(str(maker.cache), 'one', make)) == VALUES
    assert len(maker.folders()) == 1


@pytest.mark.parametrize('number', [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_the_last_step_is_not_tried_for_ever(maker, monkeypatch, number):
    def refuse(made: str, folder: str) -> None:
        assert maker.times == 1
        raise OSError(number, os.strerror(number), folder)

    monkeypatch.setattr(os, 'rename', refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        maker.kept()
    assert maker.folders() == []


PROGRAM = """
import os, signal, resource, sys
import numpy as np
import pyarrow as pa
from coyo11m_tfds.source import keyed_values
cache, mode = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

def rows():
    for n in range(40):
        places = np.arange(n, 40_000, 40)
        values = [bytes(np.random.default_rng(n).integers(0, 99, 160)) for n in range(1000)]
        yield places, np.full(1000, 160, np.int32), pa.array(values)
        if mode == 'killed' and n == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == 'interrupted' and n == 20:
            os.kill(os.getpid(), signal.SIGINT)

if mode == 'full':
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

def make(folder):
    writer = keyed_values.KeyedValuesWriter(folder)
    for batch in rows():
        writer.add(*batch)
    writer.finish({})

keyed_values.open_or_make(cache, 'one', make)
"""


def run(maker: Maker, mode: str) -> subprocess.CompletedProcess:
    command = [sys.executable, '-c', PROGRAM, maker.cache, mode]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_what_a_killed_maker_leaves_is_removed_and_an_interrupt_leaves_nothing(maker):
    assert run(maker, 'killed').returncode == -signal.SIGKILL
    assert maker.folders() != []
    found = maker.kept()
    assert answers(found) == VALUES
    assert maker.folders() == [found.folder]
    shutil.rmtree(found.folder)
    ended = run(maker, 'interrupted')
    assert ended.stderr.splitlines()[-1].startswith('KeyboardInterrupt'), ended.stderr
    assert maker.folders() == []


def test_a_disk_that_is_full_is_named(maker):
    """A limit of the size of files stands for it."""
    ended = run(maker, 'full')
    assert ended.returncode == 1
    last_line = ended.stderr.splitlines()[-1]
    assert re.match(rf"OSError: .*File too large.*: '{maker.cache}/joining-", last_line)
    assert maker.folders() == []
