"""The checksums of all files of a data set, in a file beside them, for `verify`.

manifest.write(folder, {'features.json': FileState(2048, 0x1f2e3d4c), ...})
manifest.parse(data)['features.json'].size     # 2048
"""

import json
import os
import re
from collections.abc import Mapping

from coyo11m_tfds import schema
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.file_state import FileState

_FORMAT = 1


def write(folder: str | os.PathLike[str], files: Mapping[str, FileState], build: str = '') -> None:
    """Writes `schema.CHECKSUMS_FILE` of a build into a local folder, the same bytes always."""
    states = {
        name: {'size': state.size, 'crc32c': f'{state.crc32c:08x}'}
        for name, state in sorted(files.items())
    }
    content = {'format': _FORMAT, 'files': states}
    name = schema.of_build(schema.CHECKSUMS_FILE, build)
    with open(os.path.join(folder, name), 'w') as file:
        json.dump(content | {'digest': json_digest.sha256(content)}, file, indent=1)
        file.write('\n')


def parse(data: bytes) -> dict[str, FileState]:
    """The states of the files by name, from the content of `schema.CHECKSUMS_FILE`.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    try:
        content = json.loads(data)
        found = content.pop('digest')
        if found != json_digest.sha256(content):
            raise ValueError('its digest is wrong')
        if content['format'] != _FORMAT:
            raise ValueError(f'its format is {content["format"]!r}, expected {_FORMAT}')
        return {name: _state(**state) for name, state in content['files'].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def _state(size: int, crc32c: str) -> FileState:
    if not re.fullmatch('[0-9a-f]{8}', crc32c):
        raise ValueError(f'{crc32c!r} is no CRC-32C')
    return FileState(size, int(crc32c, 16))
