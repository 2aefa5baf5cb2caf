"""Digests of plain Python values that are equal on every machine, and JSON that carries its own."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from coyo11m_tfds.process.errors import describe_type

_DIGEST = 'digest'  # the entry of the digest of all others


def sha256(value: object) -> str:
    """Returns the hex SHA-256 of the value as JSON; the order of a dict does not matter."""
    # Sorted, because equal dicts may have been filled in another order.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns entries and their digest as a JSON file; `content` has no entry named `digest`."""
    # Indented, because people read these files, too.
    return json.dumps({**content, _DIGEST: sha256(content)}, indent=1).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Returns the entries in a result of `seal`; raises a ValueError for anything else."""
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise ValueError(f'it holds {describe_type(content)}, expected an object')
        # Removed first: the digest is that of all other entries.
        digest = content.pop(_DIGEST, None)
        is_intact = digest == sha256(content)
    # What could just be read may be nested too deeply to be written for its digest.
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    if not is_intact:
        raise ValueError('its digest is wrong')
    return content
