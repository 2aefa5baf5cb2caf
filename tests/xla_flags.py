"""Flags of XLA that the installed jaxlib knows."""

import importlib.util
import mmap
import pathlib


def join_known(**flags: object) -> str:
    """Returns the text for `XLA_FLAGS` of those flags that jaxlib knows.

    XLA has no way to ask, and ends a process without a word for a flag that it does not know.
    """
    spec = importlib.util.find_spec('jaxlib')
    assert spec is not None and spec.submodule_search_locations
    files = pathlib.Path(spec.submodule_search_locations[0]).iterdir()
    library = max(files, key=lambda path: path.stat().st_size)
    known = []
    with library.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        for name, value in flags.items():
            # The name alone also stands in the message type of all options, past ones too.
            if code.find(b'\0%s\0' % name.encode()) >= 0:
                known.append(f'--{name}={value}')
    return ' '.join(known)
