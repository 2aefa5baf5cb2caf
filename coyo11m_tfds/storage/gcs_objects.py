"""Single objects of a bucket: stored, copied and read with retries, and checked.

    blob = gcs_objects.open_bucket('gs://bucket').blob('a/b')
    gcs_objects.write(blob, b'hello')
    gcs_objects.state(blob)               # FileState(size=5, crc32c=...)
    gcs_objects.delete([blob])

After every upload or copy, size and CRC-32C that the storage reports are compared with what was
sent; an object that differs is deleted and sent again.
"""

import base64
import contextlib
import functools
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import google_crc32c
from google.api_core import exceptions
from google.cloud import storage

from coyo11m_tfds.storage import retry, source_files
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes

T = TypeVar('T')

SCHEME = 'gs://'

_CONTENT_TYPE = 'application/octet-stream'
# Threads only wait for the storage; a client keeps no more than ten connections.
_THREADS = 10
_CHUNK = 32 << 20  # bytes in a request of `upload`: the most that may have to be sent again


def split_url(url: str) -> tuple[str, str]:
    """Returns bucket and name of `gs://bucket/name`; the name may be empty.

    Raises:
        ValueError: the URL is of another kind.
    """
    bucket_name, _, name = url.removeprefix(SCHEME).partition('/')
    if not url.startswith(SCHEME) or not bucket_name:
        raise ValueError(f'{url}: expected a local path or {SCHEME}bucket/folder.')
    return bucket_name, name


def open_bucket(url: str) -> storage.Bucket:
    """Returns the bucket of a URL, with the credentials of this machine.

    Raises:
        PermissionError: there are none.
    """
    # Else each client asks once for the bucket, in a thread, to describe traces never taken.
    os.environ.setdefault('DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA', 'true')
    # Objects belong to a bucket; only what makes or lists buckets needs a project.
    client = retry.call(lambda: storage.Client(project=None), url)
    return client.bucket(split_url(url)[0])


def options(what: str, attempts: int = 8, seconds: float | None = None) -> dict[str, Any]:
    """Returns arguments for a request of `google.cloud.storage`: its time limit and its retries.

    Args:
        what: description of the object in messages, with its URL.
        attempts: how often the request is tried.
        seconds: limit for the time without a byte; None for `retry.stall_seconds()`.
    """
    seconds = seconds or retry.stall_seconds()

    def repeat(request: Callable[[], T]) -> Callable[[], T]:
        return lambda: retry.call(request, what, attempts=attempts)

    # The library expects a google.api_core.retry.Retry and calls it like this, to decorate single
    # requests; ours knows more transient errors, and what to do about refused credentials.
    return {'retry': repeat, 'timeout': (seconds, seconds)}


@contextlib.contextmanager
def plain_errors(url: str) -> Iterator[None]:
    """Turns what the library raises into an `OSError` of one line that names the URL.

    For a bucket that does not exist it names the bucket, and how to make it.
    """
    try:
        yield
    except exceptions.GoogleAPICallError as error:
        in_json = re.search(r'"message": *"([^"]*)"', error.message)
        said = in_json[1] if in_json else error.message
        asked = re.search(r'/b/([^/?]+)', getattr(error.response, 'url', None) or '')
        if error.code == 404 and 'bucket does not exist' in said and asked:
            raise source_files.no_bucket(asked[1]) from error
        raise OSError(f'{url}: {" ".join(said.split())}') from error


def url(blob: storage.Blob) -> str:
    """Returns the object's URL."""
    return f'{SCHEME}{blob.bucket.name}/{blob.name}'


def state(blob: storage.Blob) -> FileState:
    """Returns the state of an object that the storage has described."""
    # Base64 of four bytes, most significant first; objects encrypted by customer keys have none.
    crc32c = int.from_bytes(base64.b64decode(blob.crc32c), 'big') if blob.crc32c else -1
    return FileState(blob.size or 0, crc32c)  # some servers report no size of an empty object


def check(blob: storage.Blob, sent: FileState) -> None:
    """Compares an object that the storage has described with what was sent; deletes a wrong one.

    Raises:
        retry.Corrupted: it is not what was sent.
    """
    stored = state(blob)
    if stored != sent:
        with contextlib.suppress(exceptions.NotFound, exceptions.PreconditionFailed):
            blob.delete(if_generation_match=blob.generation, **options(url(blob)))
        raise retry.Corrupted(
            f'{url(blob)}: {sent.size} bytes with CRC-32C {sent.crc32c:08x} were sent, but '
            f'{stored.size} bytes with {stored.crc32c:08x} stored.'
        )


def write(blob: storage.Blob, data: bytes) -> None:
    """Stores a small object."""
    sent = FileState(len(data), google_crc32c.value(data))

    def attempt() -> None:
        blob.upload_from_string(data, _CONTENT_TYPE, checksum=None, **options(url(blob)))
        check(blob, sent)

    retry.call(attempt, f'storing {url(blob)}')


def upload(
    blob: storage.Blob,
    path: str,
    crc32c: int,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> None:
    """Stores a local file of any size; only a request that breaks off is sent again.

    Args:
        blob: the object.
        path: of the file.
        crc32c: of the file.
        on_bytes: is told how many bytes are read to be sent; what it raises ends the upload.
    """
    sent = FileState(os.path.getsize(path), crc32c)
    blob.chunk_size = _CHUNK

    def attempt() -> None:
        with _CountingReader(path, on_bytes) as file:
            try:
                blob.upload_from_file(
                    file,
                    size=sent.size,
                    content_type=_CONTENT_TYPE,
                    checksum=None,
                    **options(url(blob)),
                )
            except ValueError as error:
                # The storage may keep less of a chunk than was sent; the library gives up then.
                raise retry.Corrupted(f'{url(blob)}: {error}') from error
        check(blob, sent)

    retry.call(attempt, f'storing {url(blob)}')


def copy(
    source: storage.Blob,
    target: storage.Blob,
    expected: FileState,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> None:
    """Has the storage copy an object; no byte of it passes through this machine.

    Args:
        source: in any bucket.
        target: in any bucket; replaced if it exists.
        expected: state of the source; another is not accepted.
        on_bytes: is told how many more bytes are copied; what it raises ends the copy.
    """

    def attempt() -> None:
        token, before = None, 0
        while True:
            token, copied, _ = target.rewrite(source, token=token, **options(url(target)))
            on_bytes(copied - before)
            before = copied
            if token is None:
                break
        check(target, expected)

    retry.call(attempt, f'copying {url(source)} to {url(target)}')


def read(blob: storage.Blob) -> bytes | None:
    """Reads a small object that was listed, or what replaced it; None if it is gone."""
    found: storage.Blob | None = blob
    while found is not None:
        try:
            return retry.call(functools.partial(_read_once, found), f'reading {url(found)}')
        except exceptions.NotFound:  # this generation
            found = found.bucket.get_blob(found.name, **options(url(found)))
    return None


def _read_once(blob: storage.Blob) -> bytes:
    data = blob.download_as_bytes(checksum=None, **options(url(blob)))
    if FileState(len(data), google_crc32c.value(data)) != state(blob):
        raise retry.Corrupted(f'{url(blob)}: what was read does not have its checksum.')
    return data


def delete(blobs: Iterable[storage.Blob]) -> None:
    """Deletes objects, in the generation that the storage has described if it has.

    An object that is gone or has been replaced is not an error.
    """

    def delete_one(blob: storage.Blob) -> None:
        with contextlib.suppress(exceptions.NotFound, exceptions.PreconditionFailed):
            blob.delete(if_generation_match=blob.generation, **options(url(blob)))

    in_parallel(delete_one, blobs)


def in_parallel(function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
    """As `map`, with threads; after an error no more items are begun."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


class _CountingReader(io.BufferedReader):
    """A file that reports how much of it is read."""

    def __init__(self, path: str, on_bytes: Callable[[int], None]):
        super().__init__(io.FileIO(path))
        self._on_bytes = on_bytes

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._on_bytes(len(data))
        return data
