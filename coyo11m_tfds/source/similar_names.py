"""Names of files that differ only in how systems and programs write them, and names in messages."""

import os
import unicodedata
import urllib.parse
from collections.abc import Sequence

_MAX_NAMES = 3


def normalize_path(path: str) -> str:
    """Returns the same for paths that differ in slashes, case, forms of Unicode or URLs' quotes."""
    segments = urllib.parse.unquote(path.replace('\\', '/')).split('/')
    joined = os.path.normpath('/'.join(filter(None, map(str.strip, segments))))
    return unicodedata.normalize('NFC', joined.casefold())


def list_names(names: Sequence[str]) -> str:
    """Returns the first names, for a message."""
    dots = ', ...' if len(names) > _MAX_NAMES else ''
    return ', '.join(names[:_MAX_NAMES]) + dots
