"""A digest of plain Python values that is equal on every machine."""

import hashlib
import json


def sha256(value: object) -> str:
    """Returns the hex SHA-256 of the value as JSON; the order of a dict does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
