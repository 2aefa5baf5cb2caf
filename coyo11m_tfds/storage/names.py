"""Names of files relative to a folder, as storages tell them: whether one stays in the folder.

stays_inside('sub/x.md')          # True
stays_inside('sub//../x.md')      # False
"""


def stays_inside(name: str) -> bool:
    """True if a file of this name, relative to a folder, is below it on every kind of system.

    Objects of a bucket may have any name. One that is absolute, or has an empty part, `.`, `..`, a
    backslash or a NUL, may lead elsewhere as a path.
    """
    return {'', '.', '..'}.isdisjoint(name.split('/')) and '\\' not in name and '\0' not in name
