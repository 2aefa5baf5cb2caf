"""The header of a `.npy` file, https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.

dtype, shape = npy.read_header(stream, num_bytes)      # the numbers follow, from `stream.tell()` on
"""

import math
import tokenize
from typing import BinaryIO

import numpy as np

# What NumPy raises for a damaged header: its own errors and those of Python's parser.
_OF_DAMAGE = (ValueError, TypeError, SyntaxError, tokenize.TokenError)


def read_header(stream: BinaryIO, num_bytes: int) -> tuple[np.dtype, tuple[int, ...]]:
    """Reads the header of a file of version 1.0; returns dtype and shape of its array.

    Raises:
        ValueError: The header is damaged, the array is not in C order, or the size of the file is
            not `num_bytes`.
    """
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
    return dtype, shape
