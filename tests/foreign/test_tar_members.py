"""Tars are listed in time that grows with their size, and what is wrong with a header is named."""

import io
import tarfile

import pytest

from coyo11m_tfds.foreign import tar_members


class CountedBytes(bytes):
    """Counts the bytes that are copied out of it, and out of these copies."""

    num_copied = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        if not isinstance(key, slice):
            return part
        CountedBytes.num_copied += len(part)
        return CountedBytes(part)

    def partition(self, separator):
        return tuple(map(CountedBytes, super().partition(separator)))


@pytest.mark.parametrize('kind', [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_about_a_member_that_is_too_long_is_told_from_a_link(kind):
    header = tarfile.TarInfo('head')
    header.type, header.size = kind, (1 << 20) + 1
    data = header.tobuf(tarfile.USTAR_FORMAT) + bytes(3 << 20)
    members = tar_members.list_members('x.tar', len(data), lambda start, n: data[start : start + n])
    with pytest.raises(ValueError, match=r'^x\.tar: the header at byte 0 has 1,048,577 bytes ab'):
        list(members)


def test_records_of_pax_are_not_copied_again_and_again():
    records = b'6 a=b\n' * 10_000 + b'14 path=new/x\n'
    header = tarfile.TarInfo('pax')
    header.type, header.size = tarfile.XHDTYPE, len(records)
    stream = io.BytesIO()
    with tarfile.TarFile(fileobj=stream, mode='w') as tar:
        tar.addfile(header, io.BytesIO(records))
        tar_members.add_member(tar, 'old', b'content')
    data = stream.getvalue()

    def read(start: int, size: int) -> bytes:
        return CountedBytes(data[start : start + size])

    [(name, start, size)] = tar_members.list_members('x.tar', len(data), read)
    assert (name, data[start : start + size]) == ('new/x', b'content')
    assert CountedBytes.num_copied < 10 * len(data)
