"""Finds the files of a sidecar of embeddings: one Parquet file, or the parts in a folder.

    files = part_files.find('gs://bucket/gemma')        # all parts, or an error that names one
    count, parts = part_files.find_parts('gemma')       # those that are finished
    part_files.name(0, 7)                               # 'part-00000-of-00007.parquet'

`coyo11m_tfds.embed_captions` makes them; `embedding_store` reads what is in them.
"""

import os
import re

from coyo11m_tfds.storage import source_files, stored_files
from coyo11m_tfds.storage.source_files import SourceFile

_NAME = re.compile(r'part-(\d{5,})-of-(\d{5,})\.parquet')


def name(number: int, count: int) -> str:
    """The name of part `number` of `count`, from 0."""
    return f'part-{number:05}-of-{count:05}.parquet'


def find_parts(folder: str, missing_ok: bool = False) -> tuple[int, dict[int, SourceFile]]:
    """Finds the parts in a folder, local or remote; with `missing_ok` it need not exist.

    Returns:
        `(count, parts)`: how many there are to be, 0 if there is none; and those that are there.

    Raises:
        ValueError: there is no such folder, or it has parts of different counts.
        OSError: the storage cannot be reached.
    """
    found = {
        (int(match[2]), int(match[1])): file
        for file_name, file in stored_files.list_folder(folder, missing_ok).items()
        if (match := _NAME.fullmatch(file_name))
    }
    counts = sorted({count for count, _ in found})
    if len(counts) > 1:
        first, second = (next(f.path for (n, _), f in found.items() if n == c) for c in counts[:2])
        raise ValueError(
            f'{first} and {second}: parts of {counts[0]} and of {counts[1]}, expected those of one '
            'sidecar. Remove the ones that are not wanted.'
        )
    parts = {number: file for (_, number), file in sorted(found.items(), key=lambda e: e[0])}
    return (counts or [0])[0], parts


def find(place: str | os.PathLike[str]) -> list[SourceFile]:
    """Finds the file of a sidecar, or all parts of one that is a folder, in their order.

    Args:
        place: a Parquet file or a folder of parts; local or remote.

    Raises:
        ValueError: there is no such file or folder, or a part of it is missing.
        PermissionError: credentials are missing or refused.
        OSError: the storage cannot be reached.
    """
    text = os.fspath(place)
    if text.endswith('.parquet') or os.path.isfile(text):
        return [source_files.describe(text)]
    folder = text.rstrip('/')
    count, parts = find_parts(folder)
    if not parts:
        raise ValueError(f'{folder}: holds no part-NNNNN-of-MMMMM.parquet of embeddings.')
    missing = [name(number, count) for number in range(count) if number not in parts]
    if missing:
        raise ValueError(
            f'{folder}/{missing[0]} is missing, {len(missing)} of {count} parts are. Run the same '
            'command of coyo11m_tfds.embed_captions again: it makes what is missing.'
        )
    return list(parts.values())
