"""The segments of a JPEG file, listed without its pixels."""

import re
from collections.abc import Iterator
from typing import NamedTuple

SIGNATURE = b'\xff\xd8'
START_OF_SCAN = 0xDA

# A marker is none of the bytes of pixels, where 0xff is stuffed, or restarts them.
_MARKER = re.compile(rb'\xff[^\x00\xd0-\xd7\xff]')
_END_OF_IMAGE = 0xD9
_APP1 = 0xE1  # of application data, such as EXIF
_WITHOUT_LENGTH = {0x01, 0xC8, 0xD8, _END_OF_IMAGE, *range(0xF0, 0xFE)}


class Segment(NamedTuple):
    """A marker, with the contents that follow it."""

    kind: int  # the second byte of the marker
    start: int  # in the file
    end: int
    num_skipped: int  # bytes between it and the segment before, which are none of a scan


def list_segments(data: bytes) -> Iterator[Segment]:
    """Yields the segments up to the end of the image; the last may be cut off."""
    end = len(SIGNATURE)
    has_scans = False
    while marker := _MARKER.search(data, end):
        # The second byte of the marker; the first is 0xff.
        kind = data[marker.end() - 1]
        start = marker.start()
        # What lies behind the end of the image, such as a video, has markers by chance.
        if has_scans and kind == _END_OF_IMAGE:
            break
        # Between segments of scans lie their pixels.
        num_skipped = 0 if has_scans else start - end
        end = marker.end()
        if kind not in _WITHOUT_LENGTH:
            # The length counts its own two bytes.
            end += max(2, int.from_bytes(data[end : end + 2]))
        yield Segment(kind, start, end, num_skipped)
        has_scans = has_scans or kind == START_OF_SCAN


def is_exif(data: bytes, segment: Segment) -> bool:
    """Whether a segment holds EXIF."""
    return segment.kind == _APP1 and data[segment.start + 4 : segment.start + 8] == b'Exif'
