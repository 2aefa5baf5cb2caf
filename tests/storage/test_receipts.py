"""Receipts of finished files: of all that may lie there, only what was written is believed."""

import pathlib

import pytest

from coyo11m_tfds import storage
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.receipts import Receipt, Receipts
from tests import damages

ORIGIN, FACTS = {'settings': [1, 'x\ud800']}, {'count': 12}


@pytest.fixture
def receipts(place) -> Receipts:
    return Receipts(storage.open_writable_folder(place), 'receipts', dict)


def finish(receipts: Receipts, name: str) -> Receipt:
    files = {f'{name}.tar': FileState(4, 0x1234ABCD), f'deep/{name}.tar': FileState(0, 0)}
    receipts.write(name, ORIGIN, files, FACTS)
    return Receipt(ORIGIN, files, FACTS)


def test_what_was_written_is_read(receipts):
    expected = {name: finish(receipts, name) for name in ('a', 'b', 'c')}
    assert receipts.read() == expected
    assert receipts.read(['c', 'none']) == {'c': expected['c']}


def test_what_cannot_be_read_does_not_count(receipts, caplog):
    expected = {name: finish(receipts, name) for name in ('a', 'b')}
    path = receipts.path_of('b').removeprefix(f'{receipts.folder.folder}/')
    intact = receipts.folder.read(path)
    copy = receipts.folder.read(path.replace('b', 'a'))
    for content in [*damages.record_damages(intact), copy, intact.replace(b'1234', b'1235')]:
        receipts.folder.write(path, content)
        assert receipts.read() == {'a': expected['a']}, content
    assert f'{receipts.path_of("b")}: damaged, so it does not count' in caplog.text
    receipts.folder.write(path.replace('b', 'c'), b'')
    assert receipts.read() == {'a': expected['a']}
    assert f'{receipts.path_of("b")} and 1 more: damaged' in caplog.text


def test_facts_that_cannot_be_used_are_damage(receipts):
    receipts.write('a', ORIGIN, {}, ['no', 'pairs'])
    assert receipts.read() == {}


def test_a_folder_is_no_receipt_and_makes_way_only_if_it_is_empty(tmp_path):
    receipts = Receipts(storage.open_writable_folder(tmp_path), 'receipts')
    path = pathlib.Path(receipts.path_of('a'))
    (path / 'x').mkdir(parents=True)
    assert receipts.read() == receipts.read(['a']) == {}
    with pytest.raises(OSError, match=f'Directory not empty: .{path}'):
        finish(receipts, 'a')
    (path / 'x').rmdir()
    assert receipts.read() == receipts.read(['a']) == {}
    assert finish(receipts, 'a') == receipts.read()['a']


def test_files_must_be_in_place_and_unchanged(place):
    receipts = Receipts(storage.open_writable_folder(place), 'receipts')
    for name in ('a', 'b', 'c'):
        receipts.folder.write(name, name.encode())
        states = receipts.folder.inventory()
        receipts.write(name, '', {name: states[name]}, None)
    receipts.folder.write('b', b'x')
    receipts.folder.remove(['c'])
    read = receipts.read()
    assert len(read) == 3
    assert receipts.check_files(read, 'Checking').keys() == {'a'}
    assert receipts.check_files({}, 'Checking') == {}


def test_what_is_nested_so_deeply_that_it_is_only_just_read():
    for depth in range(300, 1100):
        nested = b'[' * depth + b']' * depth
        with pytest.raises(ValueError, match=r'^its digest is wrong$|^it is nested too deeply$'):
            json_digest.unseal(b'{"digest": "x", "a": ' + nested + b'}')
