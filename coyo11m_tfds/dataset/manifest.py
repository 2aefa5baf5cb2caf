"""The small files of a data set, and the checksums of all its files, for `verify`."""

import io
import math
import os
import tokenize
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import google_crc32c
import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.file_state import FileState, naming

T = TypeVar('T')

NPY_HEADER_BYTES = 4096  # in which the header of a `.npy` file ends

_FORMAT = 1

# What NumPy raises for a damaged header: its own errors and those of Python's parser.
_NPY_ERRORS = (ValueError, TypeError, SyntaxError, tokenize.TokenError)


class DamagedError(ValueError):
    """A file of a data set differs from what was written; the message names the file."""


def damaged_file(path: str, reason: object) -> DamagedError:
    """Makes the error for the file at a path or URL; `reason` says what is wrong with it."""
    return DamagedError(f'{path}: is damaged ({reason}). Restore it or build the data set again.')


def read_small_file(path: str) -> bytes | None:
    """Reads a small file, local or on gs://; None if it is missing."""
    # By its folder, because each storage has one class, which reads by names.
    folder, name = os.path.split(path)
    return storage.open_folder(folder).read(name)


def read_parsed(path: str, parse: Callable[[bytes], T]) -> T | None:
    """Reads and parses a small file; None if it is missing.

    Raises:
        DamagedError: `parse` has raised a ValueError.
    """
    data = read_small_file(path)
    if data is None:
        return None
    try:
        return parse(data)
    except ValueError as error:
        raise damaged_file(path, error) from error


class SmallFiles:
    """The small files of a build, local or on gs://, compared with the record of checksums."""

    def __init__(self, folder: str, build: str = ''):
        """Reads the record of the checksums of a build; DamagedError if it is damaged."""
        self._folder = folder
        self._record = schema.of_build(schema.CHECKSUMS_FILE, build)
        # Without a record, as in a data set of another program, nothing is compared.
        self._states = read_parsed(f'{folder}/{self._record}', parse_checksums) or {}

    def read(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        """Reads and parses a file; None for a missing one that the record does not name.

        Raises:
            FileNotFoundError: It is missing, and the record names it.
            DamagedError: It differs from the record, or `parse` has raised a ValueError.
        """
        path = f'{self._folder}/{name}'

        def parse_checked(data: bytes) -> T:
            """Parses what agrees with the record."""
            # Compared first: damage is named as such, and not as what JSON makes of it.
            return parse(self.check(name, data))

        content = read_parsed(path, parse_checked)
        if content is None and name in self._states:
            raise FileNotFoundError(
                f'{path}: is missing, and {self._record} names it. Restore it or build the data '
                'set again.'
            )
        return content

    def check(self, name: str, data: bytes) -> bytes:
        """Returns the content of a file; raises a ValueError if it differs from the record."""
        state = FileState(len(data), google_crc32c.value(data))
        # What the record does not name may have any content: it equals itself.
        expected = self._states.get(name, state)
        if state != expected:
            raise ValueError(f'it has {state}, but {self._record} has {expected}')
        return data


def write_checksums(
    folder: str | os.PathLike[str], files: Mapping[str, FileState], build: str = ''
) -> None:
    """Writes the record of the states of a build's files, by name, into a local folder."""
    # Sorted, so that equal files give equal bytes, in whatever order they were written.
    states = {name: state.to_json() for name, state in sorted(files.items())}
    file_name = schema.of_build(schema.CHECKSUMS_FILE, build)
    write_sealed(folder, file_name, 'files', states)


def parse_checksums(data: bytes) -> dict[str, FileState]:
    """Returns the states of files by name, from `schema.CHECKSUMS_FILE`; ValueError if damaged."""
    try:
        states = parse_sealed(data, 'files')
        return {name: FileState.from_json(state) for name, state in states.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def write_sealed(folder: str | os.PathLike[str], name: str, kind: str, entries: Any) -> None:
    """Writes a JSON file with a digest of its content into a local folder; replaces an old one.

    `kind` is the key of the entries in the file, by which `parse_sealed` finds them.
    """
    content = {'format': _FORMAT, kind: entries}
    path = os.path.join(folder, name)
    # Readers of a folder in use see the old file or the new one, never a part of it.
    with naming(path), open(f'{path}.part', 'wb') as file:
        file.write(json_digest.seal(content) + b'\n')
    os.replace(f'{path}.part', path)


def parse_sealed(data: bytes, kind: str) -> Any:
    """Returns the entries in a file of `write_sealed`; raises a ValueError if it is damaged."""
    try:
        content = json_digest.unseal(data)
        if content['format'] != _FORMAT:
            raise ValueError(f'its format is {content["format"]!r}, expected {_FORMAT}')
        return content[kind]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'it lacks {error}') from error


def parse_npy_header(head: bytes, num_bytes: int) -> tuple[np.dtype, tuple[int, ...], int]:
    """Returns dtype, shape and offset of the array in a `.npy` file of `num_bytes` bytes.

    `head` is its beginning, of at most `NPY_HEADER_BYTES`. Raises a ValueError if the file is
    damaged, cut off, or not in C order.
    """
    stream = io.BytesIO(head)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError('expected version 1.0 of the .npy format')
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except _NPY_ERRORS as error:
        raise ValueError(str(error)) from error
    if is_fortran:
        raise ValueError('its array is in Fortran order, expected C order')
    start = stream.tell()
    # The size tells a file that was cut off from a whole one before anything of it is read.
    expected = start + dtype.itemsize * math.prod(shape)
    if num_bytes != expected:
        raise ValueError(f'it has {num_bytes:,} bytes, expected {expected:,}')
    return dtype, shape, start
