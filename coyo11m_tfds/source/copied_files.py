"""Records of copies of files, in `.mirror/` of the destination.

A file counts as copied if its record names the present version of the original, and has the size
and the CRC-32C of the present copy.
"""

import json
from collections.abc import Mapping

from absl import logging

from coyo11m_tfds import storage
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.base import Storage
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.stored_file import StoredFile

_RECORDS = '.mirror'


class CopiedFiles:
    """The copies in a destination and their records."""

    def __init__(self, target: Storage):
        self._target = target

    def save(self, name: str, file: StoredFile, state: FileState) -> None:
        """Writes the record of a complete copy; `name` is its path relative to the destination."""
        record = {
            'name': name,
            'source': file.path,
            'version': file.version,
            'size': state.size,
            'crc32c': f'{state.crc32c:08x}',
        }
        data = json.dumps(record, indent=1).encode()
        # All records are in one folder, and names of files may be long.
        self._target.write(f'{_RECORDS}/{json_digest.sha256(name)[:32]}.json', data)

    def missing(self, files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
        """Returns the files whose copy is missing, incomplete, or of another version."""
        folder = self._target.folder
        records = dict(map(_parse_copy_record, self._target.read_all(_RECORDS).values()))
        # A build reads all files of latents in the folder, including these.
        orphans = [n for n in records if not n.endswith(('.parquet', '.json')) and n not in files]
        if orphans:
            logging.warning(
                f'{folder} has copies of {len(orphans)} files that the source no longer has, such '
                f'as {min(orphans)}. Delete them, or builds will use them.'
            )
        recorded = {
            name: records[name][1]
            for name, file in files.items()
            if name in records and records[name][0] == file.version
        }
        # A bucket lists checksums; on a disk, all copies have to be read.
        num_bytes = 0 if self._target.keeps_checksums else sum(s.size for s in recorded.values())
        with Progress(f'Checking {folder}', num_bytes, 'B') as progress:
            states = self._target.inventory('', progress.add, recorded, deep=True)
        return {
            name: file
            for name, file in files.items()
            if name not in recorded or states.get(name) != recorded[name]
        }


def recorded_states(folder: str) -> dict[str, FileState]:
    """Returns the recorded state of every copy in a source's folder, by name."""
    records = map(_parse_copy_record, storage.open_folder(folder).read_all(_RECORDS).values())
    return {name: state for name, (version, state) in records if version}


def check_recorded_state(state: FileState, recorded: FileState, path: str) -> None:
    """Raises a ValueError if the state of the file at `path` differs from the recorded one."""
    if state != recorded:
        raise ValueError(
            f'{path}: has {state}, but when it was mirrored it had {recorded}. Mirror the source '
            f'again; if you have replaced the file on purpose, delete its record in {_RECORDS}/.'
        )


def _parse_copy_record(data: bytes) -> tuple[str, tuple[str, FileState]]:
    """Name of a copy; version of the original, and state of the copy; '' if it is damaged."""
    try:
        record = json.loads(data)
        state = FileState(record['size'], int(record['crc32c'], 16))
        return record['name'], (record['version'], state)
    except (KeyError, TypeError, ValueError):
        return '', ('', FileState(-1, -1))
