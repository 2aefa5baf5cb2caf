"""The record of checksums that every build leaves."""

import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.storage.file_state import FileState
from tests import damages


def test_the_bytes_do_not_depend_on_the_order_of_the_files(tmp_path):
    files = {'b': FileState(3, 0), 'a': FileState(0, 0xFFFFFFFF)}
    contents = []
    for order in (files, dict(reversed(files.items()))):
        manifest.write_checksums(tmp_path, order)
        contents.append((tmp_path / schema.CHECKSUMS_FILE).read_bytes())
    assert contents[0] == contents[1]
    assert manifest.parse_checksums(contents[0]) == files


def test_every_changed_byte_is_noticed(tmp_path):
    manifest.write_checksums(tmp_path, {'a': FileState(12, 0x1F2E3D4C), 'b': FileState(345, 7)})
    whole = (tmp_path / schema.CHECKSUMS_FILE).read_bytes()
    contents = [b'', b'3', b'[]', b'{}', b'{"digest": 1}', b'\xff']
    contents += [damages.flipped(whole, at) for at in range(len(whole))]
    for damaged in contents:
        with pytest.raises(ValueError):
            manifest.parse_checksums(damaged)
