"""The chunks of a PNG file: which of them decide the pixels, and the profile of its colours.

A PNG may bring texts and profiles of any size, which Pillow reads up to 1 MB, and otherwise takes
for an attack. Apart from an orientation, texts do not decide the pixels.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

SIGNATURE = b'\x89PNG\r\n\x1a\n'

_END = b'IEND'
_PROFILE = b'iCCP'
_TEXTS = b'tEXt', b'zTXt', b'iTXt'
# Transparency, EXIF and the frames of animations.
_OF_PIXELS = b'tRNS', b'eXIf', b'acTL', b'fcTL', b'fdAT'
# Texts in which Pillow looks for an orientation.
_KEYWORDS = b'XML:com.adobe.xmp', b'Raw profile type exif'
_MAX_TEXT = 1 << 20  # bytes, which is Pillow's limit
_MAX_PROFILE = 16 << 20  # those of the largest tables of colours have 4 MB


class _Chunk(NamedTuple):
    """Where a chunk lies, with its length, kind and checksum."""

    kind: bytes
    start: int  # in the file
    end: int


def keep_pixels(data: bytes) -> tuple[bytes, bytes]:
    """Returns a PNG without what does not decide its pixels, and its ICC profile, b'' without one.

    Of a damaged file, the damage stays.
    """
    # Parts of a view are no copies, of a file that may be large.
    view = memoryview(data)
    kept_parts = [view[: len(SIGNATURE)]]
    profile = None
    keywords = set[bytes]()
    for kind, start, end in _list_chunks(data):
        # The name of a kind that the pixels depend on begins with a capital letter.
        is_kept = not kind[:1].islower() or kind in _OF_PIXELS
        # Of many, each of which may be large, the first.
        if kind == _PROFILE and profile is None:
            profile = _read_profile(_content(data, start, end))
        elif kind in _TEXTS:
            # Of each keyword the first, which Pillow reads.
            content = _content(data, start, end)
            keyword, _, _ = content.partition(b'\0')
            is_new = keyword in _KEYWORDS and keyword not in keywords
            is_kept = is_new and _is_short(kind, content)
            keywords.add(keyword)
        if is_kept:
            kept_parts.append(view[start:end])
    return b''.join(kept_parts), profile or b''


def _content(data: bytes, start: int, end: int) -> bytes:
    """Returns a chunk without its length and kind, and without its checksum."""
    return data[start + 8 : end - 4]


def _read_profile(content: bytes) -> bytes:
    """Returns an ICC profile; b'' for one that is damaged or too large."""
    # Behind the name of the profile, and a byte for the method of compression.
    _, _, compressed = content.partition(b'\0')
    return _inflate(compressed[1:], _MAX_PROFILE) or b''


def _list_chunks(data: bytes) -> Iterator[_Chunk]:
    """Yields the chunks up to the end of the image; the last may be cut off."""
    start = len(SIGNATURE)
    kind = b''
    while start < len(data) and kind != _END:
        # Length and kind precede the content, a checksum follows; each has four bytes.
        kind = data[start + 4 : start + 8]
        end = start + 12 + int.from_bytes(data[start : start + 4])
        yield _Chunk(kind, start, end)
        start = end


def _is_short(kind: bytes, content: bytes) -> bool:
    """Whether Pillow takes a text."""
    _, _, text = content.partition(b'\0')
    if kind == b'tEXt' or (kind == b'iTXt' and not text.startswith(b'\1')):
        return len(text) <= _MAX_TEXT
    # In front of the text are the method of compression and, in `iTXt`, a flag and two more texts.
    if kind == b'iTXt':
        *_, compressed = text[2:].split(b'\0', 2)
    else:
        compressed = text[1:]
    return _inflate(compressed, _MAX_TEXT) is not None


def _inflate(data: bytes, max_bytes: int) -> bytes | None:
    """Returns decompressed bytes; None if they are damaged or too many."""
    decompressor = zlib.decompressobj()
    try:
        inflated = decompressor.decompress(data, max_bytes)
    except zlib.error:
        return None
    return None if decompressor.unconsumed_tail else inflated
