"""Texts that others wrote, in files, in JSON and in pickles.

A text that is no UTF-8 stays apart from all others until rows are counted: bad bytes become lone
surrogates, and `encode` turns these into bytes that are no UTF-8 either.
"""

import codecs
import json
import math
from typing import Any

# In place of a text of which nothing can be read.
UNREADABLE = b'\xff'

_MAX_DEPTH = 4
_UTF16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


def decode_utf8(data: bytes) -> str:
    """Decodes UTF-8; bytes that are none become lone surrogates."""
    return data.decode('utf-8', 'surrogateescape')


def decode(data: bytes) -> str:
    """Decodes a file: UTF-8 or, after its mark, UTF-16; without the mark."""
    if data.startswith(_UTF16_MARKS):
        try:
            return data.decode('utf-16')
        except UnicodeDecodeError:
            return decode_utf8(data)
    return decode_utf8(data.removeprefix(codecs.BOM_UTF8))


def decode_caption(data: bytes) -> str:
    """Returns the caption in a `.txt`: without a mark, and without line ends around it."""
    text = decode(data)
    # First the pairs, which otherwise would be two line ends each.
    lines = text.replace('\r\n', '\n').replace('\r', '\n')
    return lines.strip('\n')


def parse_json(data: bytes) -> Any:
    """Parses JSON as `decode` reads it; raises a ValueError or RecursionError if it is none."""
    return json.loads(decode(data))


def encode(text: str) -> bytes:
    """Encodes a text; one that cannot be read becomes bytes that are no UTF-8."""
    return text.encode('utf-8', 'surrogatepass')


def is_readable(text: str) -> bool:
    """Whether a text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_text(value: Any, *, depth: int = _MAX_DEPTH) -> str | None:
    """Returns the text that a value is, or the first in a list that is not empty; None without one.

    Numbers and truth values are the texts that JSON has for them. Lists may lie in lists, `depth`
    of them.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return decode_utf8(value)
    if isinstance(value, list | tuple) and depth:
        for entry in value:
            text = find_text(entry, depth=depth - 1)
            if text:
                return text
        return None
    # JSON has no infinity.
    is_finite_float = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, bool | int) or is_finite_float:
        return json.dumps(value)
    return None
