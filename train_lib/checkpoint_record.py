"""The record of a checkpoint's files, which tells a damaged one before anything is restored.

    checkpoint_record.write(folder)   # when all files are there
    checkpoint_record.check(folder)   # an OSError names the first file that differs

It has the size and CRC-32C of each file, and a checksum of its own. Local files are read through;
of objects on `gs://` the storage knows both.
"""

import json
import os
import pathlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import jax
from etils import epath

from coyo11m_tfds.storage import file_state, source_files

FILE = 'checksums.json'

# At the top of the folder, and not needed to restore: Orbax writes them after the record.
_LATER = ('_CHECKPOINT_METADATA', 'commit_success.txt')

_THREADS = 8


def write(folder: epath.Path) -> None:
    """Records the files in a folder and in those below it."""
    if source_files.is_remote(os.fspath(folder)):
        files = _objects(folder)
    else:
        paths = [path for path in pathlib.Path(folder).rglob('*') if path.is_file()]
        files = _local(folder, [path.relative_to(folder).as_posix() for path in paths])
    files = {name: state for name, state in files.items() if name not in _LATER}
    (folder / FILE).write_text(json.dumps({'files': files, 'crc32c': _checksum(files)}))


def check(folder: epath.Path) -> None:
    """Compares this process's share of the files with the record.

    Without the others no process of a run can take a step, so that each need not read all.

    Raises:
        OSError: a file is missing or differs, or cannot be read; the message names it.
    """
    files = _read(folder)
    share = sorted(files)[jax.process_index() :: jax.process_count()]
    is_remote = source_files.is_remote(os.fspath(folder))
    found = _objects(folder) if is_remote else _local(folder, share)
    for name in share:
        if found.get(name) != files[name]:
            raise _damaged(folder, name)


def _read(folder: epath.Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / FILE).read_bytes())
        if record['crc32c'] == _checksum(record['files']):
            return record['files']
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    raise _damaged(folder, FILE)


def _damaged(folder: epath.Path, name: str) -> OSError:
    return OSError(
        f'{folder / name}: this file of a checkpoint is missing or damaged: remove the folder '
        f'{folder} to use the checkpoint before it.'
    )


def _checksum(files: dict[str, Any]) -> int:
    return google_crc32c.value(json.dumps(files, sort_keys=True).encode())


def _local(folder: epath.Path, names: Collection[str]) -> dict[str, Any]:
    def state(name: str) -> list[Any] | None:
        try:
            size, crc32c = file_state.of_file(folder / name)
        except FileNotFoundError:
            return None
        return [size, f'crc32c:{crc32c:08x}']

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(state, names), strict=True))


def _objects(folder: epath.Path) -> dict[str, Any]:
    files = source_files.list_tree(os.fspath(folder))
    return {name: [file.size, file.checksum] for name, file in files.items()}
