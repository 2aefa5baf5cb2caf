"""Names of files and columns: hidden ones, the first that exists, two spellings, a few to show."""

import os
import unicodedata
import urllib.parse
from collections.abc import Collection, Iterable, Sequence

MAX_NAMES = 3  # in a message


def find_first(names: Iterable[str], existing: Collection[str]) -> str:
    """Returns the first of some names that is among the existing ones; '' if none is."""
    for name in names:
        if name in existing:
            return name
    return ''


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder that it is in, is one that tools make for themselves."""
    segments = [x for x in name.split('/') if x not in ('.', '..')]
    # The folder is one that macOS adds to the archives that it makes.
    return any(x.startswith('.') or x == '__MACOSX' for x in segments)


def normalize_path(path: str) -> str:
    """Returns the same for paths that differ in slashes, case, forms of Unicode or URLs' quotes."""
    segments = urllib.parse.unquote(path.replace('\\', '/')).split('/')
    # Without empty ones, as between two slashes.
    segments = list(filter(None, map(str.strip, segments)))
    joined = os.path.normpath('/'.join(segments))
    return unicodedata.normalize('NFC', joined.casefold())


def list_names(names: Sequence[str], count: int = 0) -> str:
    """Returns the first of the names, for a message; there are `count`, if `names` are a part."""
    dots = ', ...' if max(count, len(names)) > MAX_NAMES else ''
    return ', '.join(names[:MAX_NAMES]) + dots
