"""All operations on objects of Google Cloud Storage that this package needs.

Nothing is cached. `retry.call` repeats requests. After every upload or copy, the size and the
CRC-32C from the storage are compared with those of the original; an object that differs is deleted
and sent again. `remote` reads whole files and ranges. All functions raise PermissionError if
credentials are missing or refused, and OSError with one line that names the URL if the bucket does
not exist or cannot be reached. To import this module takes 0.2 s.
"""

import base64
import contextlib
import functools
import os
import re
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import google.auth.transport.requests
import google_crc32c
from google.api_core import exceptions
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.file_state import FileState

T = TypeVar('T')

_CONTENT_TYPE = 'application/octet-stream'
_CHUNK = 32 << 20  # bytes in a request of `upload`: the most that may have to be sent again
# What says where the storage is and who asks.
_ENVIRONMENT = ('STORAGE_EMULATOR_HOST', 'API_ENDPOINT_OVERRIDE', 'GOOGLE_APPLICATION_CREDENTIALS')


class Stat(NamedTuple):
    """The properties of an object, as the storage reports them."""

    size: int  # in bytes
    crc32c: int  # -1 for an object that is encrypted with a customer's key
    generation: int  # number of this version of the object

    @property
    def state(self) -> FileState:
        """The size and the checksum."""
        return FileState(self.size, self.crc32c)


class Conflict(OSError):
    """The object has another generation than the one to replace."""


class _Missing(OSError):
    """The object does not exist."""


def split_url(url: str) -> tuple[str, str]:
    """Returns bucket and name of `gs://bucket/name`; the name may be empty."""
    bucket, _, name = url.removeprefix('gs://').partition('/')
    if not url.startswith('gs://') or not bucket:
        raise ValueError(f'{url}: expected a local path or gs://bucket/folder.')
    return bucket, name


def list_objects(folder: str, deep: bool = False) -> dict[str, Stat]:
    """Lists the objects in a folder by relative name, without the markers of folders.

    Args:
        folder: `gs://bucket/folder`, or a bucket.
        deep: Whether to list the objects in sub-folders too.
    """
    fields = 'items(name,size,crc32c,generation),nextPageToken'
    found = _list(folder, delimiter=None if deep else '/', fields=fields)
    # Some tools, TensorFlow among them, make markers so that an empty folder is listed.
    return {name: _stat(blob) for name, blob in found.items() if name and name[-1] != '/'}


def is_folder(folder: str) -> bool:
    """Whether a folder, or a folder below it, has any object or marker."""
    return bool(_list(folder, max_results=1, fields='items(name)'))


def _list(folder: str, **options: Any) -> dict[str, storage.Blob]:
    bucket, name = split_url(folder)
    prefix = f'{name.rstrip("/")}/'.lstrip('/')
    with _plain_errors(folder):
        options |= _patience(f'listing {folder}')
        blobs = _client().list_blobs(bucket, prefix=prefix, **options)
        return {blob.name.removeprefix(prefix): blob for blob in blobs}


def stat(url: str) -> Stat | None:
    """Returns the properties of an object; None if it does not exist."""
    if not split_url(url)[1]:
        return None

    def look(options: dict[str, Any]) -> Stat:
        blob = _blob(url)
        blob.reload(**options)
        return _stat(blob)

    with contextlib.suppress(_Missing):
        return _call(url, f'looking for {url}', look)
    return None


def read(url: str) -> bytes | None:
    """Reads a small object; None if it does not exist."""

    def attempt(options: dict[str, Any]) -> bytes:
        try:
            return _blob(url).download_as_bytes(checksum='crc32c', **options)
        except DataCorruption as error:
            raise retry.Corrupted(f'{url}: {error}') from error

    with contextlib.suppress(_Missing):
        return _call(url, f'reading {url}', attempt)
    return None


def write(url: str, data: bytes, generation: int | None = None) -> Stat:
    """Stores a small object.

    Args:
        url: URL of the object, which is replaced if it exists.
        data: New content of the object.
        generation: The only generation that may be replaced; 0 for none, None for any.
    """
    sent = FileState(len(data), google_crc32c.value(data))

    def attempt(options: dict[str, Any]) -> Stat:
        blob = _blob(url)
        options |= {'checksum': None, 'if_generation_match': generation}
        blob.upload_from_string(data, _CONTENT_TYPE, **options)
        return _check(blob, sent)

    return _call(url, f'writing to {url}', attempt)


def upload(url: str, path: str, crc32c: int) -> None:
    """Stores a local file of any size, and replaces the object if it exists.

    After an error it repeats only the failed request.
    """
    sent = FileState(os.path.getsize(path), crc32c)

    def attempt(options: dict[str, Any]) -> None:
        blob = _blob(url)
        options |= {'size': sent.size, 'content_type': _CONTENT_TYPE, 'checksum': None}
        blob.chunk_size = _CHUNK
        with open(path, 'rb') as file:
            try:
                blob.upload_from_file(file, **options)
            except ValueError as error:
                # The storage may keep less of a chunk than was sent; the library gives up then.
                raise retry.Corrupted(f'{url}: {error}') from error
        _check(blob, sent)

    _call(url, f'storing {url}', attempt)


def copy(source: str, url: str, expected: FileState) -> None:
    """Makes the storage copy an object; its bytes do not pass through this machine.

    Args:
        source: URL of an object in any bucket, which must have the state `expected`.
        url: URL of the copy, which is replaced if it exists.
    """

    def attempt(options: dict[str, Any]) -> None:
        blob = _blob(url)
        token, _, _ = blob.rewrite(_blob(source), **options)
        while token is not None:
            token, _, _ = blob.rewrite(_blob(source), token=token, **options)
        _check(blob, expected)

    _call(source, f'copying {source} to {url}', attempt)


def delete(url: str, generation: int | None = None) -> None:
    """Deletes an object, if it exists; with `generation`, only this version of it."""
    options = {'if_generation_match': generation}
    with contextlib.suppress(_Missing, Conflict):
        _call(url, f'deleting {url}', lambda patience: _blob(url).delete(**options, **patience))


def check_writable(folder: str) -> None:
    """Stores an object of one byte in a folder and deletes it again."""
    probe = f'{folder.rstrip("/")}/.writable_{uuid.uuid4().hex}'
    write(probe, b'x')
    delete(probe)


def download_address(url: str) -> str:
    """Returns the address from which to download an object."""
    bucket, name = (urllib.parse.quote(part, safe='') for part in split_url(url))
    return f'{_client().api_endpoint}/download/storage/v1/b/{bucket}/o/{name}?alt=media'


def credentials() -> dict[str, str]:
    """Returns the headers that give a request the credentials of this process."""

    def ask(*args: Any, **options: Any) -> Any:  # for a new token; making a session takes 1 ms
        return google.auth.transport.requests.Request()(*args, **options)

    headers: dict[str, str] = {}
    _client()._credentials.before_request(ask, 'GET', '', headers)
    return headers


def _client() -> storage.Client:
    return _make_client(os.getpid(), *map(os.environ.get, _ENVIRONMENT))


@functools.cache
def _make_client(process: int, *environment: str | None) -> storage.Client:
    """The client of a process: a forked one must not share connections with its parent."""
    del process, environment
    # Else each client asks once for the bucket, in a thread, to describe traces never taken.
    os.environ.setdefault('DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA', 'true')
    # Objects belong to a bucket; only what makes or lists buckets needs a project.
    return retry.call(lambda: storage.Client(project=None), 'the client of gs://')


def _blob(url: str) -> storage.Blob:
    bucket, name = split_url(url)
    return _client().bucket(bucket).blob(name)


def _stat(blob: storage.Blob) -> Stat:
    # Base64 of four bytes, most significant first.
    crc32c = int.from_bytes(base64.b64decode(blob.crc32c), 'big') if blob.crc32c else -1
    return Stat(blob.size or 0, crc32c, blob.generation)  # some servers omit the size 0


def _call(url: str, what: str, attempt: Callable[[dict[str, Any]], T]) -> T:
    """Calls `attempt(options)`, whose requests get these options, with the patience of `retry`."""
    with _plain_errors(url):
        return retry.call(lambda: attempt(_patience(what)), what)


def _patience(what: str) -> dict[str, Any]:
    """Arguments that give a request of the library the patience of `retry`."""
    seconds = retry.stall_seconds()

    def repeat(request: Callable[[], T]) -> Callable[[], T]:
        return lambda: retry.call(request, what)

    # The library expects a google.api_core.retry.Retry and calls it like this, to decorate single
    # requests; ours knows more transient errors, and what to do about refused credentials.
    return {'retry': repeat, 'timeout': (seconds, seconds)}


@contextlib.contextmanager
def _plain_errors(url: str) -> Iterator[None]:
    """Turns what the library raises into the errors that this module promises."""
    try:
        yield
    except exceptions.PreconditionFailed as error:
        raise Conflict(f'{url}: another process has changed it.') from error
    except exceptions.GoogleAPICallError as error:
        in_json = re.search(r'"message": *"([^"]*)"', error.message)
        said = in_json[1] if in_json else error.message
        if error.code == 404 and 'bucket does not exist' in said:
            asked = re.search(r'/b/([^/?]+)', getattr(error.response, 'url', None) or '')
            bucket = f'gs://{asked[1] if asked else split_url(url)[0]}'
            raise OSError(
                f'{bucket}: there is no such bucket. Make it with `gcloud storage buckets create '
                f'{bucket}`, or correct the name.'
            ) from error
        kind = _Missing if error.code == 404 else OSError
        raise kind(f'{url}: {" ".join(said.split())}') from error


def _check(blob: storage.Blob, sent: FileState) -> Stat:
    """Compares an object that the storage has described with what was sent; deletes a wrong one."""
    stored, url = _stat(blob), f'gs://{blob.bucket.name}/{blob.name}'
    if stored.state != sent:
        delete(url, stored.generation)
        raise retry.Corrupted(f'{url}: {sent} were sent, but {stored.state} stored.')
    return stored
