"""`destination.Destination` in a bucket, `gs://bucket/folder`.

    folder = GcsFolder('gs://bucket/folder')
    folder.put('/tmp/x', 'sub/x', crc32c)
    folder.read_all('sub')                       # {'x': b'...'}

The storage is asked every time; no answer is cached.
"""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.cloud import storage

from coyo11m_tfds.storage import file_state, gcs_objects
from coyo11m_tfds.storage.file_state import FileState

P = ParamSpec('P')
T = TypeVar('T')


def _plain_errors(
    method: Callable[Concatenate['GcsFolder', P], T],
) -> Callable[Concatenate['GcsFolder', P], T]:
    @functools.wraps(method)
    def wrapped(self: 'GcsFolder', *args: P.args, **kwargs: P.kwargs) -> T:
        with gcs_objects.plain_errors(self.url('')):
            return method(self, *args, **kwargs)

    return wrapped


class GcsFolder:
    """A folder in a bucket; methods without a docstring are documented in `Destination`."""

    def __init__(self, url: str):
        """Does not touch the storage.

        Raises:
            ValueError: the URL is not of the kind `gs://bucket/folder`.
        """
        self._bucket_name, folder = gcs_objects.split_url(url)
        self._prefix = f'{folder.rstrip("/")}/'.lstrip('/')

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != '_bucket'}

    def url(self, name: str) -> str:
        """Returns the URL of a name in the folder."""
        return f'{gcs_objects.SCHEME}{self._bucket_name}/{self._prefix}{name}'.rstrip('/')

    def blob(self, name: str) -> storage.Blob:
        """Returns the object of this name, whether or not it exists."""
        return self._bucket.blob(self._prefix + name)

    def staging(self, fallback: str) -> str:
        os.makedirs(fallback, exist_ok=True)
        return fallback

    @_plain_errors
    def put(self, local_file: str, name: str, crc32c: int) -> None:
        gcs_objects.upload(self.blob(name), local_file, crc32c)
        os.remove(local_file)

    @_plain_errors
    def put_bytes(self, name: str, data: bytes) -> None:
        gcs_objects.write(self.blob(name), data)

    @_plain_errors
    def read_all(self, folder: str, names: Collection[str] | None) -> dict[str, bytes]:
        files = self._files(folder)
        if names is not None:
            files = {name: blob for name, blob in files.items() if name in names}
        contents = gcs_objects.in_parallel(gcs_objects.read, files.values())
        found = zip(files, contents, strict=True)
        return {name: data for name, data in found if data is not None}

    @_plain_errors
    def inventory(
        self, folder: str, on_bytes: Callable[[int], None], names: Collection[str] | None
    ) -> dict[str, FileState]:
        del on_bytes
        states = _states(self._files(folder))
        return {n: state for n, state in states.items() if names is None or n in names}

    @_plain_errors
    def read(self, name: str) -> bytes | None:
        blob = self._bucket.get_blob(self._prefix + name, **gcs_objects.options(self.url(name)))
        return gcs_objects.read(blob) if blob else None

    @_plain_errors
    def sizes(self) -> dict[str, int]:
        return {name: state.size for name, state in _states(self._tree()).items()}

    @_plain_errors
    def verify(self, states: Mapping[str, FileState]) -> None:
        there = _states(self._tree())
        found = {name: there[name] for name in states.keys() & there.keys()}
        file_state.compare(self.url(''), found, states)

    def sweep(self) -> None:
        """Does nothing: nothing is staged in a bucket."""

    @_plain_errors
    def remove(self, names: Iterable[str]) -> None:
        gcs_objects.delete(self.blob(name) for name in names)

    @functools.cached_property
    def _bucket(self) -> storage.Bucket:
        return gcs_objects.open_bucket(self.url(''))

    def _files(self, folder: str) -> dict[str, storage.Blob]:
        """The objects directly in a sub-folder, by name, without markers of folders."""
        found = self._list(folder, '/')
        return {name: blob for name, blob in found.items() if not _is_marker(name)}

    def _tree(self) -> dict[str, storage.Blob]:
        """All objects below the folder, by name relative to it, with markers of folders."""
        return self._list('', None)

    def _list(self, folder: str, delimiter: str | None) -> dict[str, storage.Blob]:
        prefix = self._prefix + (f'{folder}/' if folder else '')
        blobs = self._bucket.client.list_blobs(
            self._bucket,
            prefix=prefix,
            delimiter=delimiter,
            fields='items(name,size,crc32c,generation),nextPageToken',
            **gcs_objects.options(self.url(folder)),
        )
        return {blob.name.removeprefix(prefix): blob for blob in blobs}


def _is_marker(name: str) -> bool:
    # Some tools, TensorFlow among them, make these so that an empty folder is listed.
    return not name or name.endswith('/')


def _states(blobs: Mapping[str, storage.Blob]) -> dict[str, FileState]:
    return {n: gcs_objects.state(blob) for n, blob in blobs.items() if not _is_marker(n)}
