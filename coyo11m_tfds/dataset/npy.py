"""The header of a `.npy` file, https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.

dtype, shape, start = npy.parse_header(head, num_bytes)      # the numbers follow, from `start` on
"""

import io
import math
import tokenize

import numpy as np

HEADER_BYTES = 4096  # in which a header ends

# What NumPy raises for a damaged header: its own errors and those of Python's parser.
_OF_DAMAGE = (ValueError, TypeError, SyntaxError, tokenize.TokenError)


def parse_header(head: bytes, num_bytes: int) -> tuple[np.dtype, tuple[int, ...], int]:
    """Returns dtype, shape and offset of the array from the beginning of a file of version 1.0.

    Raises a ValueError if the header is damaged, the array is not in C order, or the size of the
    file is not `num_bytes`.
    """
    stream = io.BytesIO(head)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError('expected version 1.0 of the .npy format')
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except _OF_DAMAGE as error:
        raise ValueError(str(error)) from error
    if is_fortran:
        raise ValueError('its array is in Fortran order, expected C order')
    expected = stream.tell() + dtype.itemsize * math.prod(shape)
    if num_bytes != expected:
        raise ValueError(f'it has {num_bytes:,} bytes, expected {expected:,}')
    return dtype, shape, stream.tell()
