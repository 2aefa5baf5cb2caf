"""The members of a tar, listed without a look at their contents; only headers have checksums."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator

from coyo11m_tfds.process.errors import damaged_file_error

ReadRange = Callable[[int, int], bytes]  # so many bytes from an offset on

_BLOCK = tarfile.BLOCKSIZE
# Of a header of pax, and of what may follow the last member.
_MAX_TEXT = 1 << 20
_OF_NEXT_MEMBER = tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME
_MAX_DIGITS = 8  # of the length of a record of pax, with its space


def list_members(path: str, size: int, read: ReadRange) -> Iterator[tuple[str, int, int]]:
    """Yields name, offset of the contents and their size of each file, in the tar's order.

    Raises a ValueError for a header that is damaged or too long, a missing end, and a member that
    is no plain file.
    """
    offset = 0
    # Of the next member: what does not fit into its own header.
    pax_fields = dict[str, str]()
    # By hand, because each task of a build lists the whole tar: `tarfile` takes 2.4 times as
    # long (2.3 s for 100,000 members), and takes a damaged header for the end.
    while any(header := read(offset, max(0, min(_BLOCK, size - offset)))):
        start = offset + _BLOCK
        rest = size - start
        try:
            _check_checksum(header)
            nbytes = int(pax_fields.get('size', _parse_size(header)))
            if not 0 <= nbytes <= rest:
                raise ValueError(f'its member has {nbytes:,} bytes, of which {rest:,} follow')
        except ValueError as error:
            problem = f'its header at byte {offset:,} cannot be read ({error})'
            raise _damaged(path, problem) from None
        kind = header[156:157]
        name = pax_fields.get('path') or _parse_name(header)
        if kind in _OF_NEXT_MEMBER and nbytes > _MAX_TEXT:
            raise ValueError(
                f'{path}: the header at byte {offset:,} has {nbytes:,} bytes about the next '
                f'member, expected at most {_MAX_TEXT:,}. Write the tar again without attributes '
                'of files, e.g. by tar --no-xattrs.'
            )
        if kind == tarfile.XHDTYPE:
            pax_fields |= _parse_pax(path, start, read(start, nbytes))
        elif kind == tarfile.GNUTYPE_LONGNAME:
            pax_fields |= {'path': _decode_field(read(start, nbytes))}
        elif kind in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield name, start, nbytes
            pax_fields = {}
        elif kind not in (tarfile.XGLTYPE, tarfile.DIRTYPE):
            raise ValueError(
                f'{path}: {name!r} is a link, a device or a sparse file, expected whole files. '
                'Write the tar again, e.g. by tar --dereference --hard-dereference.'
            )
        # Members begin at whole blocks.
        num_blocks = -(-nbytes // _BLOCK)  # rounded up
        offset = start + num_blocks * _BLOCK
    # Else a tar that was cut off between two members would only have fewer samples.
    padding = size - offset
    if not _BLOCK <= padding <= _MAX_TEXT or any(read(offset, padding)):
        raise _damaged(path, 'its end mark is not at its end')


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Appends a file without a time or an owner, so that equal contents make equal tars."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


# --- Fields of a header, in the format ustar of POSIX.1-1988 -------------------------------------


def _check_checksum(header: bytes) -> None:
    """Raises a ValueError unless the sum of a header's bytes is the one that it holds."""
    stored = header[148:156]
    # The sum counts its own field as blanks.
    blanks = len(stored) * ord(' ')
    checksum = sum(header) - sum(stored) + blanks
    # A short one is the rest of a file that was cut off.
    if len(header) < _BLOCK or int(_decode_field(stored), 8) != checksum:
        raise ValueError('its checksum is wrong')


def _parse_size(header: bytes) -> int:
    """Returns the size of a member: in octal digits or, of more than 8 GB as by GNU, in binary."""
    if header[124] & 0x80:
        return int.from_bytes(header[125:136])
    # Some writers pad with blanks.
    digits = _decode_field(header[124:136]).strip()
    return int(digits or '0', 8)


def _parse_name(header: bytes) -> str:
    """Returns the name of a member, of which a long one has its folders in another field."""
    prefix = ''
    if header[257:263] == b'ustar\0':
        prefix = _decode_field(header[345:500])
    return os.path.join(prefix, _decode_field(header[:100]))


def _parse_pax(path: str, start: int, data: bytes) -> dict[str, str]:
    """Parses the needed records `LENGTH NAME=VALUE` about the next member."""
    fields = dict[str, str]()
    offset = 0
    while offset < len(data):
        # By places, because to cut off each record would copy all that follow it.
        digits, _, _ = data[offset : offset + _MAX_DIGITS].partition(b' ')
        begin = offset + len(digits) + 1
        end = 0
        # The length counts its own digits and the line end.
        if digits.isdigit():
            end = offset + int(digits)
        if not begin < end <= len(data):
            raise _damaged(path, f'its header of pax at byte {start:,} cannot be read')
        name, _, value = data[begin : end - 1].partition(b'=')
        if name in (b'path', b'size'):
            fields[name.decode()] = _decode_field(value)
        offset = end
    return fields


def _decode_field(field: bytes) -> str:
    """Returns the text of a field, up to the first zero byte."""
    text, _, _ = field.partition(b'\0')
    # With blanks around it: they tell names from each other.
    return text.decode('utf-8', 'surrogateescape')


def _damaged(path: str, problem: str) -> ValueError:
    """Returns the error for a damaged tar."""
    return damaged_file_error(path, 'a tar', problem)
