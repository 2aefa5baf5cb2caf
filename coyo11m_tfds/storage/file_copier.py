"""Copies one file of a source to a destination, in the way that suits the two.

    state = file_copier.copy(file, Destination('gs://bucket/x'), 'a.pt', scratch)
    # FileState(size, crc32c) of what is there now

A download to a local folder is written next to its final place and resumes where it broke off. A
file from the hub to a bucket passes through the scratch folder. Between buckets the storage copies
by itself. The original is checked by its own checksum where it has one, the copy by that of its
storage.
"""

import os
from collections.abc import Callable

from coyo11m_tfds.storage import file_state, remote
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes
from coyo11m_tfds.storage.names import flat
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.source_files import SourceFile


def needs_scratch(file: SourceFile, target: Destination) -> bool:
    """True if the file passes through the scratch folder on its way."""
    return file.is_remote and target.is_remote and file.crc32c is None


def copy(
    file: SourceFile,
    target: Destination,
    name: str,
    scratch: Scratch | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> FileState:
    """Copies a file and returns the state of the copy.

    Args:
        file: what to copy.
        target: where to.
        name: of the copy, relative to `target`.
        scratch: must be given if `needs_scratch`.
        on_bytes: is told how many more bytes are done, together about `file.size`; a negative
            number where bytes turned out wrong. What it raises ends the copying.

    Raises:
        PermissionError: credentials are missing or refused.
        OSError: the file cannot be read, has changed, or cannot be stored.
    """
    if not target.is_remote:
        return _to_disk(file, target, name, on_bytes)
    if file.crc32c is not None:
        return _within_storage(file, FileState(file.size, file.crc32c), target, name, on_bytes)
    if not file.is_remote:
        return _upload(file.path, file, target, name, on_bytes)
    assert scratch is not None
    halves = _Halves(on_bytes)  # every byte is downloaded, then uploaded
    with scratch.hold(file, on_bytes=halves.add) as path:
        return _upload(path, file, target, name, halves.add)


def _to_disk(
    file: SourceFile, target: Destination, name: str, on_bytes: Callable[[int], None]
) -> FileState:
    # The same name each time, so that the next call finds what was downloaded.
    path = os.path.join(target.staging(''), flat(name))
    if file.is_remote:
        remote.fetch(file, path, on_bytes)
        known = file.crc32c  # by which `fetch` has checked it
        state = file_state.of_file(path) if known is None else FileState(file.size, known)
    else:
        state = file_state.copy(file.path, path, on_bytes)
        _check_size(file, state)
    target.put(path, name, state.crc32c)
    return state


def _within_storage(
    file: SourceFile,
    state: FileState,
    target: Destination,
    name: str,
    on_bytes: Callable[[int], None],
) -> FileState:
    from google.cloud import storage  # takes 0.2 s, and only copies to buckets need it

    from coyo11m_tfds.storage import gcs_folder, gcs_objects

    copy = gcs_folder.GcsFolder(target.folder).blob(name)
    with gcs_objects.plain_errors(file.path):
        gcs_objects.copy(storage.Blob.from_uri(file.path, copy.client), copy, state, on_bytes)
    return state


def _upload(
    path: str,
    file: SourceFile,
    target: Destination,
    name: str,
    on_bytes: Callable[[int], None],
) -> FileState:
    from coyo11m_tfds.storage import gcs_folder, gcs_objects

    state = file_state.of_file(path)
    _check_size(file, state)
    blob = gcs_folder.GcsFolder(target.folder).blob(name)
    with gcs_objects.plain_errors(target.folder):
        gcs_objects.upload(blob, path, state.crc32c, on_bytes)
    return state


def _check_size(file: SourceFile, state: FileState) -> None:
    if state.size != file.size:
        raise OSError(
            f'{file.path} has {state.size:,} bytes now, but had {file.size:,} when it was listed. '
            'Run the same command again, when nobody writes to it any more.'
        )


class _Halves:
    """Passes on half of the bytes it is told of."""

    def __init__(self, on_bytes: Callable[[int], None]):
        self._on_bytes = on_bytes
        self._heard = self._told = 0

    def add(self, num_bytes: int) -> None:
        self._heard += num_bytes
        more = self._heard // 2 - self._told
        self._told += more
        self._on_bytes(more)
