"""The small files beside the shards, and the checksums of all files of a data set, for `verify`."""

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import google_crc32c

from coyo11m_tfds import schema, storage
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.file_state import FileState

T = TypeVar('T')

_FORMAT = 1


class DamagedError(ValueError):
    """A file of a data set differs from what was written; the message names the file."""


def damaged_file(path: str, what: object) -> DamagedError:
    """Returns the error for a damaged small file."""
    return DamagedError(f'{path}: is damaged ({what}). Restore it or build the data set again.')


class SmallFiles:
    """The small files of a build, local or on gs://, compared with the record of checksums.

    Without a record, as in a data set of another program, nothing is compared.
    """

    def __init__(self, folder: str, build: str = ''):
        """Reads the record; raises a DamagedError if it is damaged."""
        self._folder, self._states = folder, dict[str, FileState]()
        self._record = schema.of_build(schema.CHECKSUMS_FILE, build)
        self._states = self.read(self._record, parse_checksums) or {}

    def read(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        """Reads and parses a file; None for a missing one that the record does not name.

        Raises a FileNotFoundError if the record names a missing file, and a DamagedError if the
        file differs from the record, or `parse` raises a ValueError.
        """
        path = f'{self._folder}/{name}'
        data = read_small_file(path)
        if data is None and name in self._states:
            raise FileNotFoundError(
                f'{path}: is missing, and {self._record} names it. Restore it or build the data '
                'set again.'
            )
        try:
            return None if data is None else parse(self.check(name, data))
        except ValueError as error:
            raise damaged_file(path, error) from error

    def check(self, name: str, data: bytes) -> bytes:
        """Returns the content of a file; raises a ValueError if it differs from the record."""
        state = FileState(len(data), google_crc32c.value(data))
        if (expected := self._states.get(name, state)) != state:
            raise ValueError(f'it has {state}, but {self._record} has {expected}')
        return data


def write_checksums(
    folder: str | os.PathLike[str], files: Mapping[str, FileState], build: str = ''
) -> None:
    """Writes `schema.CHECKSUMS_FILE` of a build into a local folder, deterministically."""
    states = {
        name: {'size': state.size, 'crc32c': f'{state.crc32c:08x}'}
        for name, state in sorted(files.items())
    }
    write_sealed(folder, schema.of_build(schema.CHECKSUMS_FILE, build), 'files', states)


def parse_checksums(data: bytes) -> dict[str, FileState]:
    """Returns the states of the files by name, from the content of `schema.CHECKSUMS_FILE`.

    Raises a ValueError if the content is damaged, or in another format.
    """
    try:
        return {name: _state(**state) for name, state in parse_sealed(data, 'files').items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def _state(size: int, crc32c: str) -> FileState:
    if not re.fullmatch('[0-9a-f]{8}', crc32c):
        raise ValueError(f'{crc32c!r} is not a CRC-32C of 8 hex digits')
    return FileState(size, int(crc32c, 16))


def write_sealed(folder: str | os.PathLike[str], name: str, what: str, entries: Any) -> None:
    """Writes a JSON file with a digest of its content; replaces an old one."""
    content = {'format': _FORMAT, what: entries}
    path = os.path.join(folder, name)
    with open(f'{path}.part', 'w') as file:
        json.dump(content | {'digest': json_digest.sha256(content)}, file, indent=1)
        file.write('\n')
    os.replace(f'{path}.part', path)


def parse_sealed(data: bytes, what: str) -> Any:
    """Returns the entries in a file of `write_sealed`; raises a ValueError if it is damaged."""
    try:
        content = json.loads(data)
        if content.pop('digest') != json_digest.sha256(content):
            raise ValueError('its digest is wrong')
        if content['format'] != _FORMAT:
            raise ValueError(f'its format is {content["format"]!r}, expected {_FORMAT}')
        return content[what]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def read_small_file(path: str) -> bytes | None:
    """Reads a small file, local or on gs://; None if it is missing."""
    try:
        file = storage.describe_file(path)
    except ValueError:
        return None
    return file.read()
