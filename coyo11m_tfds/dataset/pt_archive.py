"""The zip archive of a `.pt` file: the offsets and the checksums of its members.

Only archives in torch's form are accepted: uncompressed members without gaps, from the first byte
on. In any other zip archive, two readers could find different contents.
"""

import dataclasses
import io
import os
import struct
import zipfile
from collections.abc import Iterator

from coyo11m_tfds.storage import json_digest

# The directory of a .pt with keys, latents and embeddings takes half a KB. In a damaged file,
# `zipfile` looks for the end of the archive in so many bytes.
TAIL_BYTES = (64 << 10) + 22

_LOCAL_HEADER = struct.Struct('<4s5H3I2H')
_LOCAL_MAGIC = b'PK\x03\x04'
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1 << 0, 1 << 3, 1 << 11  # flags
_IN_64_BITS = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of the archive, as the directory describes it."""

    name: str  # with the folder that all names begin with
    begin: int  # offset of its local header
    end: int  # offset of the next member or the directory
    size: int  # in bytes
    crc32: int  # recorded checksum of its contents
    flags: int  # flags of the zip format

    @property
    def header_bytes(self) -> int:
        """Size of the local header in bytes, without padding."""
        return _LOCAL_HEADER.size + len(self.raw_name)

    @property
    def raw_name(self) -> bytes:
        """The name as bytes, as in the file."""
        return self.name.encode('utf-8' if self.flags & _UTF8 else 'cp437')


class _Tail(io.BytesIO):
    """The end of a file, with positions as in the whole file, which `zipfile` compares."""

    def __init__(self, tail: bytes, file_size: int):
        super().__init__(tail)
        self._begin = file_size - len(tail)

    def tell(self) -> int:
        return self._begin + super().tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Raises a ValueError for an offset from the first byte that lies before the tail."""
        if whence == os.SEEK_SET:
            offset -= self._begin
        return self._begin + super().seek(offset, whence)


def max_small_bytes(file_size: int) -> int:
    """Returns the largest size of a *small* member; keys take 1/3000 of a file."""
    return max(1 << 20, file_size // 100)


def read_directory(tail: bytes, file_size: int, name: str) -> tuple[Member, ...]:
    """Reads and checks the directory at the end of a file; returns the members in its order.

    `tail` holds the last `TAIL_BYTES` of the file, or all of a smaller one. Raises a ValueError if
    there is no directory, or torch cannot have written it.
    """
    try:
        with zipfile.ZipFile(_Tail(tail, file_size)) as archive:
            infos, directory = archive.infolist(), archive.start_dir
    except Exception as error:  # of many types, depending on which byte is damaged
        raise ValueError(
            f'{name}: is truncated or not a .pt file ({file_size:,} bytes, {error}): expected a '
            'zip archive as torch.save writes it since torch 1.6. Copy, download or save it again.'
        ) from None
    if not infos:
        raise _damaged(name, 'it has no members')
    infos.sort(key=lambda info: info.header_offset)
    ends = [info.header_offset for info in infos[1:]] + [directory]
    members = tuple(
        Member(
            name=info.orig_filename,
            begin=info.header_offset,
            end=end,
            size=info.file_size,
            crc32=info.CRC,
            flags=info.flag_bits,
        )
        for info, end in zip(infos, ends, strict=True)
    )
    for member, info in zip(members, infos, strict=True):
        is_stored = info.compress_type == zipfile.ZIP_STORED and not member.flags & _ENCRYPTED
        if not is_stored or info.file_size != info.compress_size:
            raise ValueError(
                f'{name}: {member.name!r} is compressed or encrypted, expected it as torch.save '
                'writes it, plain. Save it again.'
            )
        if member.begin < 0 or member.begin + member.header_bytes + member.size > member.end:
            what = f'{member.name!r} of {member.size:,} bytes at {member.begin:,}'
            raise _damaged(name, f'{what} does not fit before {member.end:,}')
    # torch looks names up without regard to case.
    if len({member.name.lower() for member in members}) < len(members):
        raise _damaged(name, 'two members have the same name')
    if members[0].begin:
        raise _damaged(name, 'its first member does not begin at its first byte')
    return members


@dataclasses.dataclass(frozen=True)
class Archive:
    """A `.pt` file with a valid directory and valid local headers.

    `starts` holds the offset of the contents of each member.
    """

    name: str
    size: int
    members: tuple[Member, ...]
    starts: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Hex digest of the members' names, sizes and checksums.

        It differs between versions of a file if the members have checksums.
        """
        # The first folder of every name is the name under which the file was first saved.
        return json_digest.sha256(
            sorted((m.name.partition('/')[2], m.size, m.crc32) for m in self.members)
        )

    def check(self, member: Member, crc32: int) -> None:
        """Raises a ValueError if `crc32` differs from the member's CRC-32."""
        if crc32 != member.crc32:
            raise ValueError(
                f'{self.name}: {member.name!r} has CRC-32 {crc32:08x}, but {member.crc32:08x} is '
                'recorded: it is damaged or still being copied. Copy or download it again; if it '
                'was saved with torch.serialization.set_crc32_options(False), set check_crc to '
                'false in the config.'
            )

    def parts(self) -> Iterator[tuple[int, Member | None]]:
        """Divides the file into members and gaps; yields the end of each part."""
        for member, start in zip(self.members, self.starts, strict=True):
            yield start, None
            yield start + member.size, member
        yield self.size, None


def open_archive(path: str | os.PathLike[str], name: str = '') -> Archive:
    """Reads the directory and the local headers of a local file, called `name` in errors.

    Raises a ValueError if the file is damaged, or not a `.pt` file.
    """
    with open(path, 'rb', buffering=0) as file:
        return read_archive(file.fileno(), name or os.fspath(path))


def read_archive(file: int, name: str) -> Archive:
    """Like `open_archive`, for the descriptor of an open file."""
    size = os.fstat(file).st_size
    tail_bytes = min(TAIL_BYTES, size)
    members = read_directory(os.pread(file, tail_bytes, size - tail_bytes), size, name)
    return Archive(name, size, members, tuple(_find_start(file, m, name) for m in members))


def _find_start(file: int, member: Member, name: str) -> int:
    """Returns where the contents begin, after the local header, which must be that of `member`."""
    header = os.pread(file, member.header_bytes, member.begin)
    fields = _LOCAL_HEADER.unpack_from(header.ljust(_LOCAL_HEADER.size, b'\0'))
    magic, _, flags, method, _, _, crc32, _, size, name_bytes, extra_bytes = fields
    start = member.begin + _LOCAL_HEADER.size + name_bytes + extra_bytes
    agrees = (
        (magic, flags, method) == (_LOCAL_MAGIC, member.flags, zipfile.ZIP_STORED)
        and name_bytes == len(member.raw_name)
        and header[_LOCAL_HEADER.size :] == member.raw_name
        and start + member.size <= member.end
    )
    if not flags & _SIZES_FOLLOW:
        agrees = agrees and crc32 == member.crc32 and size in (member.size, _IN_64_BITS)
    if not agrees:
        raise _damaged(
            name, f'the header of {member.name!r} at {member.begin:,} contradicts the directory'
        )
    return start


def _damaged(name: str, what: str) -> ValueError:
    return ValueError(f'{name}: is damaged, {what}. Copy, download or save it again.')
