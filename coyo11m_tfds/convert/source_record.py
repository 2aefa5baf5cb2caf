"""What a data set remembers of its source, and the comparison with a source that is named later.

The record is JSON: the place, and the size and a digest of each file by name. The digest needs no
reading of whole files: it is the checksum of the storage or, on a disk,
`columns.outline_digest`. The place is for people: the same files elsewhere are the same source.
"""

import os
from collections.abc import Iterator
from typing import Any

from coyo11m_tfds.convert.build_settings import WAYS_ON
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.storage import source_files


def record(source: source_folder.SourceFolder) -> dict[str, Any]:
    """Records a source; raises a ValueError or an OSError if a file is damaged or unreadable."""
    files = {
        name: (file.size, file.checksum if file.is_remote else columns.outline_digest(file.path))
        for name, file in source.by_name.items()
    }
    return {'place': _absolute(source.root), 'files': files}


def check(folder: str | os.PathLike[str], recorded: dict[str, Any] | None, root: str) -> None:
    """Raises a ValueError if a data set's source was another one than that in the folder `root`.

    Accepts a data set that records none. Raises an OSError if a file or a bucket is out of reach.
    """
    if not recorded:
        return
    try:
        differing = list(
            _differences(recorded['files'], record(source_folder.find_source(root))['files'])
        )
    except ValueError as error:
        differing = [str(error).rstrip('.')]
    if differing:
        raise ValueError(
            f'{os.fspath(folder)} was built from {recorded["place"]}, not from {_absolute(root)}: '
            f'{"; ".join(differing[:3])}. {WAYS_ON}'
        )


def _absolute(place: str) -> str:
    return place if source_files.is_remote(place) else os.path.abspath(place)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if name not in now or name not in before:
            yield f'{name} is {"new" if name in now else "missing"}'
            continue
        (old_size, old), (size, new) = before[name], now[name]
        # Only digests of one kind, such as `crc32c:...`, can be compared.
        is_other = old and new and old != new and old.split(':')[:-1] == new.split(':')[:-1]
        if size != old_size or is_other:
            yield f'{name} has other contents ({size:,} bytes, had {old_size:,})'
