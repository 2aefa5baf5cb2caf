"""Copies one file of a source to a destination, in the way that suits the two.

    state = file_copier.copy(file, Destination('gs://bucket/x'), 'a.pt', scratch)
    # FileState(size, crc32c) of what is there now

What comes to a local folder is written where it stays and goes on where it broke off. From the hub
to a bucket a file passes through the scratch folder. Between buckets the storage copies by itself.
The original is checked by its own checksum where it has one, the copy by that of its storage.
"""

import os
import urllib.parse
from collections.abc import Callable

import google_crc32c

from coyo11m_tfds.storage import file_state, remote
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes, naming
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.source_files import SourceFile

_CRC32C = 'crc32c:'


def needs_scratch(file: SourceFile, target: Destination) -> bool:
    """True if the file passes through the scratch folder on its way."""
    return file.is_remote and target.is_remote and not _is_in_bucket(file)


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
        on_bytes: told how many bytes have come further, together about `file.size`; a negative
            number where bytes turned out wrong. What it raises ends the copying.

    Raises:
        PermissionError: credentials are missing or refused.
        OSError: the file cannot be read, has changed, or cannot be stored.
    """
    if not target.is_remote:
        return _to_disk(file, target, name, on_bytes)
    if _is_in_bucket(file):
        return _within_storage(file, target, name, on_bytes)
    if not file.is_remote:
        return _upload(file.path, file, target, name, on_bytes)
    assert scratch is not None
    halves = _Halves(on_bytes)  # every byte comes, and then goes
    with scratch.hold(file, on_bytes=halves.add) as path:
        return _upload(path, file, target, name, halves.add)


def _to_disk(
    file: SourceFile, target: Destination, name: str, on_bytes: Callable[[int], None]
) -> FileState:
    # The same name each time, so that the next call finds what has come.
    path = os.path.join(target.staging(''), urllib.parse.quote(name, safe=''))
    if file.is_remote:
        remote.fetch(file, path, on_bytes)
        state = _stored_state(file) if _is_in_bucket(file) else file_state.of_file(path)
    else:
        state = _copy_local(file.path, path, on_bytes)
        _check_size(file, state)
    target.put(path, name, state.crc32c)
    return state


def _within_storage(
    file: SourceFile, target: Destination, name: str, on_bytes: Callable[[int], None]
) -> FileState:
    from google.cloud import storage  # takes 0.2 s, and only copies to buckets need it

    from coyo11m_tfds.storage import gcs_folder, gcs_objects

    state = _stored_state(file)
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


def _copy_local(path: str, target: str, on_bytes: Callable[[int], None]) -> FileState:
    size, crc32c = 0, 0
    with open(path, 'rb', buffering=0) as source, naming(target), open(target, 'wb') as copy:
        while block := source.read(file_state.BLOCK):
            copy.write(block)
            size, crc32c = size + len(block), google_crc32c.extend(crc32c, block)
            on_bytes(len(block))
    return FileState(size, crc32c)


def _check_size(file: SourceFile, state: FileState) -> None:
    if state.size != file.size:
        raise OSError(
            f'{file.path} has {state.size:,} bytes now, but had {file.size:,} when it was listed. '
            'Run the same command again, when nobody writes to it any more.'
        )


def _is_in_bucket(file: SourceFile) -> bool:
    return file.path.startswith('gs://') and (file.checksum or '').startswith(_CRC32C)


def _stored_state(file: SourceFile) -> FileState:
    return FileState(file.size, int((file.checksum or '').removeprefix(_CRC32C), 16))


class _Halves:
    """Passes on half of what it is told."""

    def __init__(self, on_bytes: Callable[[int], None]):
        self._on_bytes = on_bytes
        self._heard = self._told = 0

    def add(self, num_bytes: int) -> None:
        self._heard += num_bytes
        more = self._heard // 2 - self._told
        self._told += more
        self._on_bytes(more)
