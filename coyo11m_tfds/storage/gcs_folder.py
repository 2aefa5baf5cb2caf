"""`destination.Destination` in a bucket, `gs://bucket/folder`.

    folder = GcsFolder('gs://bucket/folder')
    folder.put('/tmp/x', 'sub/x', crc32c)
    folder.read_all('sub')                       # {'x': b'...'}

The storage is asked every time; no answer is cached.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
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
    def identity(self, folder: str, last: str) -> str:
        states = _states(self._tree(folder))
        if last not in states:
            return ''
        return hashlib.sha256(repr(sorted(states.items())).encode()).hexdigest()

    @_plain_errors
    def verify(self, folder: str, states: Mapping[str, FileState]) -> None:
        file_state.compare(self.url(folder), _states(self._tree(folder)), states)

    @_plain_errors
    def promote(
        self, folder: str, final: str, last: str, replace: bool, check: Callable[[], None]
    ) -> None:
        source, target = self._tree(folder), self._tree(final)
        wanted, there = _states(source), _states(target)
        is_complete = last in there
        if not is_complete and last not in wanted:
            raise FileNotFoundError(
                f'{self.url(folder)}: {last} is missing, so the folder is not complete.'
            )
        is_copied = is_complete and all(
            wanted.get(name) == there.get(name) for name in [last, *wanted]
        )
        if wanted and not (is_copied and (not replace or wanted == there)):
            if is_complete and (not replace or last not in wanted):
                raise FileExistsError(
                    f'{self.url(final)} exists already, so that {self.url(folder)} cannot take its '
                    'place. Remove one of the two.'
                )
            self._copy_over(source, target, final, last, check)
            self.verify(final, wanted)
        self._delete(source, last, check)

    def sweep(self) -> None:
        """Does nothing: nothing is staged in a bucket."""

    @_plain_errors
    def keep_only(self, folder: str, names: Collection[str], check: Callable[[], None]) -> None:
        files = self._files(folder)
        gcs_objects.delete((blob for name, blob in files.items() if name not in names), check)

    @_plain_errors
    def remove(self, last: str, check: Callable[[], None]) -> None:
        self._delete(self._tree(''), last, check)

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

    def _copy_over(
        self,
        source: Mapping[str, storage.Blob],
        target: Mapping[str, storage.Blob],
        final: str,
        last: str,
        check: Callable[[], None],
    ) -> None:
        """Replaces the objects of `target` in `final`; `last` is deleted first and copied last.

        Each is replaced only in the generation that was seen: a process that slept while another
        one took over must do no harm when it continues.
        """
        wanted, there = _states(source), _states(target)
        gcs_objects.delete([target[last]] if last in there else [], check)
        gcs_objects.delete((target[name] for name in there.keys() - wanted.keys() - {last}), check)

        def copy(name: str) -> None:
            check()
            replaces = target[name].generation if name in there and name != last else 0
            blob = self.blob(f'{final}/{name}')
            gcs_objects.copy(source[name], blob, wanted[name], replaces=replaces)

        gcs_objects.in_parallel(
            copy, [n for n in wanted if wanted[n] != there.get(n) and n != last]
        )
        copy(last)

    def _delete(
        self, blobs: Mapping[str, storage.Blob], last: str, check: Callable[[], None]
    ) -> None:
        for names in (blobs.keys() - {last}, blobs.keys() & {last}):
            gcs_objects.delete((blobs[name] for name in names), check)


def _is_marker(name: str) -> bool:
    # Some tools, TensorFlow among them, make these so that an empty folder is listed.
    return not name or name.endswith('/')


def _states(blobs: Mapping[str, storage.Blob]) -> dict[str, FileState]:
    return {n: gcs_objects.state(blob) for n, blob in blobs.items() if not _is_marker(n)}
