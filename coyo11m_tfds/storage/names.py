"""Checks names of files, relative to a folder, that a storage has listed.

stays_inside('sub/x.md')          # True
stays_inside('sub//../x.md')      # False
"""


def stays_inside(name: str) -> bool:
    """True if a file of this name, relative to a folder, is below it on every kind of system.

    Objects of a bucket may have any name. As a path, one that is absolute, or has an empty part,
    `.`, `..`, a backslash or a NUL, may lead elsewhere.
    """
    return {'', '.', '..'}.isdisjoint(name.split('/')) and '\\' not in name and '\0' not in name
