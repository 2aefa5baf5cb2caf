"""Stored files are read whole and right."""

import pytest

from coyo11m_tfds.storage import stored_files
from tests.fakes.cloud import Fault

DATA = 'gs://bucket/d/1.0.0'


def test_what_is_flipped_on_its_way_is_read_again(bucket):
    bucket.put('bucket', 'd/1.0.0/x', b'12345')
    [file] = stored_files.list_folder(DATA).values()
    for place in (0, 4):
        bucket.inject(Fault('flip', after_bytes=place))
        assert stored_files.read(file, stored_files.Content).data == b'12345'
    assert [request.fault for request in bucket.requests].count('flip') == 2
    bucket.inject(Fault('flip', count=None))
    with pytest.raises(OSError, match=rf'{DATA}/x: given up .* the storage has crc32c:'):
        stored_files.read(file, stored_files.Content)
