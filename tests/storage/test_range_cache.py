"""Ranges of files that are kept on a disk, where several threads and processes read and write."""

import pathlib

from coyo11m_tfds.storage.range_cache import RangeCache
from coyo11m_tfds.storage.stored_file import StoredFile


def test_a_file_that_was_just_made_has_nothing_yet(tmp_path):
    """Between its beginning and its first pages another reader may come."""
    cache = RangeCache(str(tmp_path), 1e9)
    file = StoredFile('hf://datasets/owner/name@0/x.pt', 10_000, 'sha256:0', 'sha256:0')
    pathlib.Path(cache.path_of(file)).touch()
    assert cache.read(file, 5, 50) is None
    cache.keep(file, 0, bytes(8192))
    assert cache.read(file, 5, 50) == bytes(45)
    assert cache.read(file, 9_000, 9_050) is None
