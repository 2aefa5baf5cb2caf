"""`destination.Destination` in a bucket, `gs://bucket/folder`.

    folder = GcsFolder('gs://bucket/folder')
    folder.put('/tmp/x', 'sub/x', crc32c)
    folder.read_all('sub')                       # {'x': b'...'}

The storage is asked every time; nothing that it says is cached.
"""

import functools
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from google.cloud import storage

from coyo11m_tfds.storage import gcs_objects
from coyo11m_tfds.storage.file_state import FileState

P = ParamSpec('P')
T = TypeVar('T')


def _plain_errors(method: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(method)
    def wrapped(self: 'GcsFolder', *args: P.args, **kwargs: P.kwargs) -> T:
        with gcs_objects.plain_errors(self.url('')):
            return method(self, *args, **kwargs)

    return wrapped


class GcsFolder:
    """A folder in a bucket; the methods without a docstring are those of `Destination`."""

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
        """Returns the URL of what has this name in the folder."""
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
    def read_all(self, folder: str) -> dict[str, bytes]:
        files = self._files(folder)
        contents = gcs_objects.in_parallel(gcs_objects.read, files.values())
        return dict(zip(files, contents, strict=True))

    @_plain_errors
    def inventory(
        self, folder: str, on_bytes: Callable[[int], None], names: Collection[str] | None
    ) -> dict[str, FileState]:
        del on_bytes
        states = _states(self._files(folder))
        return {n: state for n, state in states.items() if names is None or n in names}

    @_plain_errors
    def promote(self, folder: str, final: str, last: str) -> None:
        source, target = self._tree(folder), self._tree(final)
        wanted, there = _states(source), _states(target)
        if last in there:
            if wanted and any(wanted.get(name) != there.get(name) for name in [last, *wanted]):
                raise FileExistsError(
                    f'{self.url(final)} exists already, so that {self.url(folder)} cannot take its '
                    'place. Remove one of the two.'
                )
        elif last not in wanted:
            raise FileNotFoundError(
                f'{self.url(folder)}: {last} is missing, so the folder is not complete.'
            )
        else:
            # Without `last` they are left from a copy that was broken off, of another build.
            gcs_objects.delete(target[name] for name in there.keys() - wanted.keys())
            missing = [name for name in wanted if wanted[name] != there.get(name) and name != last]
            for names in (missing, [last]):
                self._copy({f'{final}/{name}': source[name] for name in names})
        # Here too `last` goes last: as long as it is there, this can be taken up again.
        gcs_objects.delete(source[name] for name in source.keys() - {last})
        gcs_objects.delete(source[name] for name in source.keys() & {last})

    def sweep(self) -> None:
        """Does nothing, as nothing is staged in a bucket."""

    @_plain_errors
    def keep_only(self, folder: str, names: Collection[str]) -> None:
        files = self._files(folder)
        gcs_objects.delete(blob for name, blob in files.items() if name not in names)

    @_plain_errors
    def remove(self, first: str) -> None:
        found = self._tree('')
        gcs_objects.delete(found[name] for name in found.keys() & {first})
        gcs_objects.delete(found[name] for name in found.keys() - {first})

    @functools.cached_property
    def _bucket(self) -> storage.Bucket:
        return gcs_objects.open_bucket(self.url(''))

    def _files(self, folder: str) -> dict[str, storage.Blob]:
        """The objects directly in a sub-folder, by name, without markers of folders."""
        found = self._list(folder, '/')
        return {name: blob for name, blob in found.items() if not _is_marker(name)}

    def _tree(self, folder: str) -> dict[str, storage.Blob]:
        """All objects below a sub-folder, by name relative to it, with markers of folders."""
        return self._list(folder, None)

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

    def _copy(self, blobs: Mapping[str, storage.Blob]) -> None:
        """Copies objects to the names in this folder that are given."""

        def copy(name: str) -> None:
            gcs_objects.copy(blobs[name], self.blob(name), gcs_objects.state(blobs[name]))

        gcs_objects.in_parallel(copy, blobs)


@functools.cache
def _is_marker(name: str) -> bool:
    # What some tools, TensorFlow among them, make so that an empty folder can be seen.
    return not name or name.endswith('/')


def _states(blobs: Mapping[str, storage.Blob]) -> dict[str, FileState]:
    return {n: gcs_objects.state(blob) for n, blob in blobs.items() if not _is_marker(n)}
