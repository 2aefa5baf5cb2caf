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
    for segment in name.split('/'):
        is_relative = segment in ('.', '..')
        # The folder is one that macOS adds to the archives that it makes.
        is_of_tools = segment.startswith('.') or segment == '__MACOSX'
        if is_of_tools and not is_relative:
            return True
    return False


def normalize_path(path: str) -> str:
    """Returns the same for paths that differ in slashes, case, forms of Unicode or URLs' quotes."""
    slashed = path.replace('\\', '/')
    segments = []
    for segment in urllib.parse.unquote(slashed).split('/'):
        name = segment.strip()
        # Between two slashes is nothing.
        if name:
            segments.append(name)
    joined = os.path.normpath('/'.join(segments))
    return unicodedata.normalize('NFC', joined.casefold())


def list_names(names: Sequence[str], count: int = 0) -> str:
    """Returns the first of the names, for a message; there are `count`, if `names` are a part."""
    dots = ', ...' if max(count, len(names)) > MAX_NAMES else ''
    return ', '.join(names[:MAX_NAMES]) + dots
