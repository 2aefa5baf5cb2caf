"""What strangers may write into the folder of a model: values of fields, and types of weights."""

import json
import math
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

# Each is wrong for most fields, and none may end in anything but a ValueError of one line.
VALUES = (
    *(0, -1, 1.5, 10**9, 10**30, 1e300, math.nan, math.inf, -math.inf),
    *('1', '', 'no\nline', None, [], {}, True, False, [[]], [0], [-1], [1.5], ['1'], [None], [{}]),
    *({'a': []}, [10**9], [1] * 100, 'x' * 100_000),
)
NESTED = b'[' * 10_000 + b']' * 10_000

# Bytes of a number of each type that is no floating point of at least 16 bits.
QUANTIZED = {'F8_E4M3': 1, 'F8_E5M2': 1, 'F8_E8M0': 1, 'F4': 0.5, 'F6_E2M3': 0.75, 'C64': 8}
QUANTIZED |= {'BOOL': 1, 'U8': 1, 'I8': 1, 'I16': 2, 'I32': 4, 'I64': 8, 'U64': 8}


def damage_fields(content: Mapping[str, Any], fields: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the object of a JSON file with each field missing, or of each of `VALUES`."""
    for field in fields:
        without_field = dict(content)
        without_field.pop(field, None)
        yield without_field
        for value in VALUES:
            yield {**content, field: value}


def refusal(load: Callable[[], Any], name: str) -> str:
    """Returns the message of a ValueError, of one short line about `name`; '' if none is raised."""
    try:
        load()
    except ValueError as error:
        message = str(error)
        assert name in message, message
        assert '\n' not in message, message
        # A value of 100,000 characters must not be in it whole.
        assert len(message) < 1000, message
        return message
    return ''


def quantize(path: pathlib.Path, weight: str, dtype: str) -> None:
    """Gives one weight of a safetensors file another type, and zeros of this type."""
    data = path.read_bytes()
    [length] = struct.unpack('<Q', data[:8])
    begin_of_values = 8 + length
    header = json.loads(data[8:begin_of_values])
    values = data[begin_of_values:]
    contents = {}
    for name, fields in header.items():
        if name == '__metadata__':
            continue
        begin, end = fields['data_offsets']
        contents[name] = values[begin:end]
        if name == weight:
            num_bytes = np.prod(fields['shape']) * QUANTIZED[dtype]
            contents[name] = bytes(int(num_bytes))
            fields['dtype'] = dtype
    offset = 0
    for name, content in contents.items():
        header[name]['data_offsets'] = [offset, offset + len(content)]
        offset += len(content)
    text = json.dumps(header).encode()
    path.unlink()
    size_of_header = struct.pack('<Q', len(text))
    path.write_bytes(size_of_header + text + b''.join(contents.values()))
