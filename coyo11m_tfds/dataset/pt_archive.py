"""The zip archive of a `.pt` file: the offsets and the checksums of its members.

Only archives in torch's form are accepted: uncompressed members without gaps, from the first byte
on. In any other zip archive, two readers could find different contents.
"""

import dataclasses
import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator

from coyo11m_tfds.storage import json_digest

# The directory of a .pt with keys, latents and embeddings takes half a KB. In a damaged file,
# `zipfile` looks for the end of the archive in so many bytes.
TAIL_BYTES = (64 << 10) + 22
# That of a .pt with 200,000 tensors.
_MAX_DIRECTORY = 16 << 20

_LOCAL_HEADER = struct.Struct('<4s5H3I2H')
_LOCAL_MAGIC = b'PK\x03\x04'
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1 << 0, 1 << 3, 1 << 11  # flags
_IN_64_BITS = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class ArchiveMember:
    """A member of the archive, as the directory describes it."""

    name: str  # with the folder that all names begin with
    begin: int  # offset of its local header
    end: int  # offset of the next member or the directory
    size: int  # in bytes
    crc32: int  # recorded checksum of its contents
    flags: int  # flags of the zip format

    @property
    def header_bytes(self) -> int:
        """Size of the local header, without padding."""
        return _LOCAL_HEADER.size + len(self.raw_name)

    @property
    def raw_name(self) -> bytes:
        """The name as it stands in the archive."""
        # The two that the zip format knows.
        encoding = 'utf-8' if self.flags & _UTF8 else 'cp437'
        return self.name.encode(encoding)


# Reads so many bytes at the end of a file.
ReadTail = Callable[[int], bytes]


class _Tail(io.BytesIO):
    """The end of a file, with positions as in the whole file, which `zipfile` compares."""

    def __init__(self, read_tail: ReadTail, file_size: int):
        self._read_tail = read_tail
        self._file_size = file_size
        self._begin = max(0, file_size - TAIL_BYTES)
        super().__init__(read_tail(file_size - self._begin))

    def tell(self) -> int:
        """Returns the position in the file."""
        return self._begin + super().tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position; reads more of the file for one that lies before its end."""
        # From the end or from here: inside of what has been read.
        if whence != os.SEEK_SET:
            return self._begin + super().seek(offset, whence)
        # A directory that is longer than usual begins before what has been read.
        if 0 <= offset < self._begin:
            nbytes = self._file_size - offset
            # A damaged offset would fetch the whole file.
            if nbytes > _MAX_DIRECTORY:
                raise ValueError(f'its directory would take {nbytes:,} bytes')
            self._begin = offset
            super().__init__(self._read_tail(nbytes))
        return self._begin + super().seek(offset - self._begin, whence)


def max_small_bytes(file_size: int) -> int:
    """Returns the largest size in bytes of a member that may be read at once, such as the keys."""
    # Keys take 1/3000 of a file.
    return max(1 << 20, file_size // 100)


def read_directory(read_tail: ReadTail, file_size: int, name: str) -> tuple[ArchiveMember, ...]:
    """Reads the directory at the end of a file of torch, called `name` in errors.

    Most are in the last `TAIL_BYTES`; for a longer one `read_tail` is called again, for more bytes.
    Returns the members in the order of their offsets; raises a ValueError for a file that is
    damaged, or that torch does not write like this.
    """
    end_of_file = _Tail(read_tail, file_size)
    try:
        with zipfile.ZipFile(end_of_file) as archive:
            infos = archive.infolist()
            directory = archive.start_dir
    # The file could not be read, which says nothing about its content.
    except OSError:
        raise
    except Exception as error:  # of many types, depending on which byte is damaged
        raise ValueError(
            f'{name}: is truncated or not a .pt file ({file_size:,} bytes, {error}): expected a '
            'zip archive as torch.save writes it since torch 1.6. Copy, download or save it again.'
        ) from None
    if not infos:
        raise _damaged_archive(name, 'it has no members')
    # The directory may name members in any order, but each must end where the next one begins.
    infos.sort(key=lambda info: info.header_offset)
    ends = [info.header_offset for info in infos[1:]]
    ends.append(directory)
    members = tuple(_parse_member(info, end, name) for info, end in zip(infos, ends, strict=True))
    # torch looks names up without regard to case.
    names = {member.name.lower() for member in members}
    if len(names) < len(members):
        raise _damaged_archive(name, 'two members have the same name')
    # Something before the first member may be another archive, which other readers would find.
    if members[0].begin:
        raise _damaged_archive(name, 'its first member does not begin at its first byte')
    return members


def _parse_member(info: zipfile.ZipInfo, end: int, name: str) -> ArchiveMember:
    """Returns a member that ends before `end`; raises a ValueError unless it is plain and fits."""
    member = ArchiveMember(
        name=info.orig_filename,
        begin=info.header_offset,
        end=end,
        size=info.file_size,
        crc32=info.CRC,
        flags=info.flag_bits,
    )
    is_stored = info.compress_type == zipfile.ZIP_STORED and not member.flags & _ENCRYPTED
    if not is_stored or info.file_size != info.compress_size:
        raise ValueError(
            f'{name}: {member.name!r} is compressed or encrypted, expected it as torch.save '
            'writes it, plain. Save it again.'
        )
    if member.begin < 0 or member.begin + member.header_bytes + member.size > end:
        extent = f'{member.name!r} of {member.size:,} bytes at {member.begin:,}'
        raise _damaged_archive(name, f'{extent} does not fit before {end:,}')
    return member


@dataclasses.dataclass(frozen=True)
class Archive:
    """A `.pt` file with a valid directory and valid local headers."""

    name: str
    size: int
    members: tuple[ArchiveMember, ...]
    starts: tuple[int, ...]  # offset of the contents of each member

    @property
    def digest(self) -> str:
        """Hex digest of the members' names, sizes and checksums."""
        members = []
        for member in self.members:
            # The first folder of every name is the name under which the file was first saved: equal
            # tensors are equal, whatever they were called.
            _, _, name = member.name.partition('/')
            members.append((name, member.size, member.crc32))
        return json_digest.sha256(sorted(members))

    def check(self, member: ArchiveMember, crc32: int) -> None:
        """Compares the CRC-32 of what a member holds with the recorded one.

        Raises:
            ValueError: They differ.
        """
        if crc32 != member.crc32:
            raise ValueError(
                f'{self.name}: {member.name!r} has CRC-32 {crc32:08x}, but {member.crc32:08x} is '
                'recorded: it is damaged or still being copied. Copy or download it again; if it '
                'was saved with torch.serialization.set_crc32_options(False), set check_crc to '
                'false in the config.'
            )

    def sections(self) -> Iterator[tuple[int, ArchiveMember | None]]:
        """Yields the end of each section of the file, and the member that it is; None for a gap."""
        for member, start in zip(self.members, self.starts, strict=True):
            # In front of the contents stand the local header and torch's padding.
            yield start, None
            yield start + member.size, member
        # Behind all members stands the directory.
        yield self.size, None


def open_archive(path: str | os.PathLike[str], name: str = '') -> Archive:
    """Reads the directory and the local headers of a local file, called `name` in errors.

    Raises:
        ValueError: It is no archive in torch's form, or damaged.
    """
    with open(path, 'rb', buffering=0) as file:
        return read_archive(file.fileno(), name or os.fspath(path))


def read_archive(file: int, name: str) -> Archive:
    """Returns what `open_archive` returns, for the descriptor of an open file."""
    size = os.fstat(file).st_size

    def read_tail(nbytes: int) -> bytes:
        """Reads so many bytes at the end of the file."""
        return os.pread(file, nbytes, size - nbytes)

    members = read_directory(read_tail, size, name)
    starts = tuple(_find_start(file, member, name) for member in members)
    return Archive(name, size, members, starts)


def _find_start(file: int, member: ArchiveMember, name: str) -> int:
    """Returns where the contents begin: behind the local header, which must be that of `member`."""
    header = os.pread(file, member.header_bytes, member.begin)
    # A file that has been cut may end within the header; with zeros, it contradicts the directory.
    fields = _LOCAL_HEADER.unpack_from(header.ljust(_LOCAL_HEADER.size, b'\0'))
    magic, _, flags, method, _, _, crc32, _, size, name_bytes, extra_bytes = fields
    # torch pads the extra field, so that contents begin at multiples of 64.
    start = member.begin + _LOCAL_HEADER.size + name_bytes + extra_bytes
    raw_name = member.raw_name
    has_name = name_bytes == len(raw_name) and header[_LOCAL_HEADER.size :] == raw_name
    has_room = start + member.size <= member.end
    has_form = (magic, flags, method) == (_LOCAL_MAGIC, member.flags, zipfile.ZIP_STORED)
    agrees = has_form and has_name and has_room
    # torch writes sizes and checksums behind the contents, other writers of the format into the
    # header; in archives of more than 4 GB the header refers to a longer field.
    if not flags & _SIZES_FOLLOW:
        agrees = agrees and crc32 == member.crc32 and size in (member.size, _IN_64_BITS)
    if not agrees:
        raise _damaged_archive(
            name, f'the header of {member.name!r} at {member.begin:,} contradicts the directory'
        )
    return start


def _damaged_archive(name: str, problem: str) -> ValueError:
    return ValueError(f'{name}: is damaged, {problem}. Copy, download or save it again.')
