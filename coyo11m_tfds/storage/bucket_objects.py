"""Requests about the objects of buckets of Google Cloud Storage, by their URLs.

Nothing is cached. `retry.call` repeats requests. After every upload or copy, the size and the
CRC-32C from the storage are compared with those of the original; an object that differs is deleted
and sent again. To import this module takes 0.2 s.
"""

import base64
import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import google.auth.transport.requests
import google_crc32c
import requests
from google.api_core import exceptions
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.remote import USER_PROJECT, json_message
from coyo11m_tfds.storage.stored_file import StoredFile, encoded_error

T = TypeVar('T')

_CONTENT_TYPE = 'application/octet-stream'
_CHUNK = 32 << 20  # bytes in a request of `upload_object`: the most that may have to be sent again
# What says where the storage is, and whose credentials to use.
_ENVIRONMENT = (
    'STORAGE_EMULATOR_HOST',
    'API_ENDPOINT_OVERRIDE',
    'GOOGLE_APPLICATION_CREDENTIALS',
    USER_PROJECT,
)


class Conflict(OSError):
    """The object has another generation than the one to replace."""


class Missing(OSError):
    """The object does not exist."""


def split_url(url: str) -> tuple[str, str]:
    """Returns bucket and name of `gs://bucket/name`; the name may be empty."""
    bucket, _, name = url.removeprefix('gs://').partition('/')
    if not bucket:
        raise ValueError(f'{url}: expected a local path or gs://bucket/folder.')
    return bucket, name


def list_objects(folder: str, **options: Any) -> dict[str, storage.Blob]:
    """Returns the objects below a folder by relative name; `options` are those of `list_blobs`."""
    bucket, name = split_url(folder)
    # Names may begin with slashes, so only those at the end are removed.
    prefix = f'{name.rstrip("/")}/' if name else ''
    with _plain_errors(folder):
        options |= _patience(f'listing {folder}')
        blobs = bucket_client().list_blobs(_bucket(bucket), prefix=prefix, **options)
        return {blob.name.removeprefix(prefix): blob for blob in blobs}


def look_up(url: str) -> storage.Blob | None:
    """Returns an object with its properties; None if it does not exist."""
    # A bucket is no object.
    _, name = split_url(url)
    if not name:
        return None
    blob = _blob(url)
    with contextlib.suppress(Missing):
        call_storage(url, f'looking for {url}', lambda options: blob.reload(**options))
        return blob
    return None


def read_object(url: str) -> bytes | None:
    """Reads a small object in one request; None if it does not exist."""

    def attempt(options: dict[str, Any]) -> bytes:
        blob = _blob(url)
        try:
            data = blob.download_as_bytes(checksum='crc32c', **options)
        except DataCorruption as error:
            if blob.content_encoding:
                raise encoded_error(url, blob.content_encoding) from error
            raise retry.Corrupted(f'{url}: {error}') from error
        except requests.exceptions.ContentDecodingError as error:
            named = re.search(r'content-encoding: (\S+),', str(error))
            raise encoded_error(url, named[1] if named else 'unknown') from error
        # The client has unpacked gzip; but TensorFlow and TFDS would read what is stored.
        if blob.content_encoding not in (None, '', 'identity'):
            raise encoded_error(url, blob.content_encoding)
        return data

    with contextlib.suppress(Missing):
        return call_storage(url, f'reading {url}', attempt)
    return None


def write_object(url: str, data: bytes, generation: int | None = None) -> storage.Blob:
    """Stores a small object, in place of one of this generation: 0 for none, None for any."""
    sent_state = FileState(len(data), google_crc32c.value(data))

    def attempt(options: dict[str, Any]) -> storage.Blob:
        blob = _blob(url)
        options |= {'checksum': None, 'if_generation_match': generation}
        blob.upload_from_string(data, _CONTENT_TYPE, **options)
        return _check_stored(url, blob, sent_state)

    return call_storage(url, f'writing to {url}', attempt)


def upload_object(url: str, path: str, crc32c: int) -> None:
    """Stores a local file of any size; after an error it repeats only the failed request."""
    state = FileState(os.path.getsize(path), crc32c)

    def attempt(options: dict[str, Any]) -> None:
        blob = _blob(url)
        options |= {'size': state.size, 'content_type': _CONTENT_TYPE, 'checksum': None}
        blob.chunk_size = _CHUNK
        with open(path, 'rb') as file:
            try:
                blob.upload_from_file(file, **options)
            except ValueError as error:
                # The storage may keep less of a chunk than was sent; the library gives up then.
                raise retry.Corrupted(f'{url}: {error}') from error
        _check_stored(url, blob, state)

    call_storage(url, f'storing {url}', attempt)


def copy_object(source: str, url: str, expected: FileState) -> None:
    """Makes the storage copy an object; its bytes do not pass through this machine."""

    def attempt(options: dict[str, Any]) -> None:
        blob = _blob(url)
        original = _blob(source)
        token, _, _ = blob.rewrite(original, **options)
        # Each request copies a part of a large object, until no token is left to go on with.
        while token is not None:
            token, _, _ = blob.rewrite(original, token=token, **options)
        _check_stored(url, blob, expected)

    call_storage(source, f'copying {source} to {url}', attempt)


def delete_object(url: str, generation: int | None = None) -> None:
    """Deletes an object, if it exists; with `generation`, only this version of it."""

    def attempt(options: dict[str, Any]) -> None:
        _blob(url).delete(if_generation_match=generation, **options)

    # Another version is another process's, and stays.
    with contextlib.suppress(Missing, Conflict):
        call_storage(url, f'deleting {url}', attempt)


def bucket_client() -> storage.Client:
    """Returns the client for the present environment."""
    return _make_client(os.getpid(), *map(os.environ.get, _ENVIRONMENT))


@functools.cache
def _make_client(process: int, *environment: str | None) -> storage.Client:
    """Returns the client of a process: a forked one must not share connections with its parent."""
    # They are only here to tell clients apart.
    del process, environment
    # Otherwise each client requests the bucket once, in a thread, for traces that nobody takes.
    os.environ.setdefault('DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA', 'true')
    # Objects belong to a bucket; only what makes or lists buckets needs a project.
    return retry.call(lambda: storage.Client(project=None), 'the client of gs://')


def request_token(*args: Any, **options: Any) -> Any:
    """Sends a request of google-auth for a token; returns the response."""
    # A session for each new token: it takes 1 ms to make, and threads cannot share one.
    return google.auth.transport.requests.Request()(*args, **options)


def billing() -> dict[str, str]:
    """Returns the parameter of a request that names the project to bill, if there is one."""
    project = os.environ.get(USER_PROJECT)
    return {'userProject': project} if project else {}


def _bucket(name: str) -> storage.Bucket:
    """Returns the library's object of a bucket; requests nothing."""
    return bucket_client().bucket(name, billing().get('userProject'))


def _blob(url: str) -> storage.Blob:
    """Returns the library's object of an object, of which nothing is known yet."""
    bucket, name = split_url(url)
    return _bucket(bucket).blob(name)


def describe_blob(url: str, blob: storage.Blob) -> StoredFile:
    """Returns an object that has been listed or looked up as a file of a storage."""
    # An object that is encrypted with a customer's key has no checksum.
    checksum = None
    if blob.crc32c:
        # Base64 of four bytes, most significant first.
        checksum = f'crc32c:{base64.b64decode(blob.crc32c).hex()}'
    # Some servers omit the size 0.
    size = blob.size or 0
    version = checksum or f'{size}-{blob.generation}'
    encoding = blob.content_encoding or ''
    if encoding == 'identity':
        encoding = ''
    return StoredFile(url, size, version, checksum, encoding=encoding)


def _check_stored(url: str, blob: storage.Blob, sent_state: FileState) -> storage.Blob:
    """Compares an object that the storage has described with what was sent; deletes a wrong one."""
    stored_state = describe_blob(url, blob).state
    # Only this version: meanwhile another process may have stored a good one.
    if stored_state != sent_state:
        delete_object(url, blob.generation)
        raise retry.Corrupted(f'{url}: {sent_state} were sent, but {stored_state} stored.')
    return blob


def call_storage(url: str, label: str, attempt: Callable[[dict[str, Any]], T]) -> T:
    """Returns `attempt(options)`, whose requests take these options, as `retry.call` does."""
    with _plain_errors(url):
        return retry.call(lambda: attempt(_patience(label)), label)


def _patience(label: str) -> dict[str, Any]:
    """Returns the options by which the library repeats a request and limits its time."""
    seconds = retry.stall_seconds()

    def repeat(request: Callable[[], T]) -> Callable[[], T]:
        return lambda: retry.call(request, label)

    # The library expects a google.api_core.retry.Retry and calls it like this, to decorate single
    # requests; ours knows more transient errors, and what to do about refused credentials.
    return {'retry': repeat, 'timeout': (seconds, seconds)}


@contextlib.contextmanager
def _plain_errors(url: str) -> Iterator[None]:
    """Turns the library's errors into an OSError with one line that names the URL."""
    try:
        yield
    except exceptions.PreconditionFailed as error:
        raise Conflict(f'{url}: another process has changed it.') from error
    except exceptions.GoogleAPICallError as error:
        message = retry.strip_request(json_message(error.message))
        if error.code == 404 and 'bucket does not exist' in message:
            bucket, _ = split_url(url)
            # Of a copy, it may be the bucket of the other object.
            in_request = re.search(r'/b/([^/?]+)', getattr(error.response, 'url', None) or '')
            if in_request:
                bucket = in_request[1]
            raise OSError(
                f'gs://{bucket}: there is no such bucket. Make it with `gcloud storage buckets '
                f'create gs://{bucket}`, or correct the name.'
            ) from error
        # Callers suppress it where a missing object is no error.
        kind = Missing if error.code == 404 else OSError
        raise kind(f'{url}: {" ".join(message.split())}') from error
