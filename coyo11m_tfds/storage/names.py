"""Names of files, relative to a folder, that a storage has listed: checked, and made flat.

stays_inside('sub/x.md')          # True
stays_inside('sub//../x.md')      # False
flat('sub/x.md')                  # 'sub%2Fx.md'
"""

import hashlib
import urllib.parse

# A disk takes names of 255 bytes, and others put something before and behind it.
_LONGEST = 200


def stays_inside(name: str) -> bool:
    """True if a file of this name, relative to a folder, is below it on every kind of system.

    Objects of a bucket may have any name. As a path, one that is absolute, or has an empty part,
    `.`, `..`, a backslash or a NUL, may lead elsewhere.
    """
    return {'', '.', '..'}.isdisjoint(name.split('/')) and '\\' not in name and '\0' not in name


def flat(name: str) -> str:
    """Returns a name without slashes, another for every path; long ones end in a digest."""
    quoted = urllib.parse.quote(name, safe='')
    if len(quoted) <= _LONGEST:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f'{quoted[: _LONGEST - len(digest) - 1]}-{digest}'
