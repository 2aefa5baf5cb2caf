"""Folders in buckets of Google Cloud Storage.

Nothing is cached. `retry.call` repeats requests. After every upload or copy, the size and the
CRC-32C from the storage are compared with those of the original; an object that differs is deleted
and sent again. To import this module takes 0.2 s.
"""

import base64
import contextlib
import functools
import os
import re
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import google.auth.transport.requests
import google_crc32c
import requests
from absl import logging
from google.api_core import exceptions
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage import locks, retry
from coyo11m_tfds.storage.base import THREADS, WritableFolder
from coyo11m_tfds.storage.file_state import FileState, OnBytes, StrPath, compute_state
from coyo11m_tfds.storage.remote import USER_PROJECT, RemoteFolder, json_message
from coyo11m_tfds.storage.stored_file import StoredFile, encoded_error

if TYPE_CHECKING:
    from coyo11m_tfds.storage.scratch import Scratch

T = TypeVar('T')

_CONTENT_TYPE = 'application/octet-stream'
_CHUNK = 32 << 20  # bytes in a request of `_upload_object`: the most that may have to be sent again
# Of each object, only what `_describe_blob` uses: a folder may have many.
_LISTED_FIELDS = 'items(name,size,crc32c,generation,contentEncoding),nextPageToken'
# What says where the storage is, and whose credentials to use.
_ENVIRONMENT = (
    'STORAGE_EMULATOR_HOST',
    'API_ENDPOINT_OVERRIDE',
    'GOOGLE_APPLICATION_CREDENTIALS',
    USER_PROJECT,
)


class _Conflict(OSError):
    """The object has another generation than the one to replace."""


class _Missing(OSError):
    """The object does not exist."""


class Bucket(RemoteFolder, WritableFolder):
    """A folder in a bucket, or all of it, `gs://bucket[/folder]`."""

    keeps_checksums = True

    def __init__(self, folder: StrPath):
        """Takes the URL; raises a ValueError for one without a bucket."""
        super().__init__(folder)
        _split_url(os.fspath(folder))

    def why_unreadable(self) -> str:
        """Returns why a zonal bucket cannot be read; '' for others, and if that is unknown."""
        bucket, name = _split_url(self.folder)
        prefix = f'{name}/' if name else ''

        # Needs the right to list objects, which readers have; the bucket's properties need more.
        def attempt(options: dict[str, Any]) -> dict[str, str]:
            query = {'prefix': prefix} | _billing()
            return _bucket_client()._get_resource(f'/b/{bucket}/storageLayout', query, **options)

        # What is wrong with credentials or the name of the bucket shows at other requests, too.
        with contextlib.suppress(OSError):
            layout = _call_storage(self.folder, f'the layout of gs://{bucket}', attempt)
            if layout.get('locationType') == 'zone':
                return (
                    f'gs://{bucket} is a zonal (Rapid) bucket, which needs gRPC, expected a bucket '
                    'of a region; there, Rapid Cache needs no change'
                )
        return ''

    # --- Listing and reading ---

    def list(self, sub_folder: str = '', *, deep: bool = False) -> dict[str, StoredFile]:
        """Returns objects with their checksums, listed a thousand a request."""
        url = self.path_of(sub_folder)
        delimiter = None if deep else '/'
        blobs = _list_objects(url, delimiter=delimiter, fields=_LISTED_FIELDS)
        files = {}
        for name, blob in blobs.items():
            # Some tools, TensorFlow among them, make markers so that an empty folder is listed.
            is_marker = not name or name.endswith('/')
            if not is_marker:
                files[name] = _describe_blob(f'{url}/{name}', blob)
        return files

    def exists(self) -> bool:
        """Returns whether there is an object below the folder, be it a marker."""
        return bool(_list_objects(self.folder, max_results=1, fields='items(name)'))

    @classmethod
    def describe(cls, path: str) -> StoredFile:
        """Returns an object with its checksum, by one request."""
        if blob := _look_up(path):
            return _describe_blob(path, blob)
        raise FileNotFoundError(path)

    def read(self, name: str) -> bytes | None:
        """Reads a small object in one request; None if it is missing."""
        return _read_object(self.path_of(name))

    @classmethod
    def _request(cls, path: str) -> tuple[str, dict[str, str]]:
        # In a name, slashes are quoted, too.
        bucket, name = (urllib.parse.quote(part, safe='') for part in _split_url(path))
        query = urllib.parse.urlencode({'alt': 'media'} | _billing())
        client = _bucket_client()
        address = f'{client.api_endpoint}/download/storage/v1/b/{bucket}/o/{name}?{query}'
        headers: dict[str, str] = {}
        # Renews the token if it ends soon.
        client._credentials.before_request(_request_token, 'GET', '', headers)
        return address, headers

    # --- Writing ---

    def check_writable(self) -> None:
        """Stores an object of one byte and deletes it."""
        # Rights in a bucket are known only by their use.
        probe = self.path_of(f'.writable_{uuid.uuid4().hex}')
        _write_object(probe, b'x')
        _delete_object(probe)

    def staging(self, fallback: StrPath) -> str:
        """Makes and returns `fallback`."""
        os.makedirs(fallback, exist_ok=True)
        return os.fspath(fallback)

    def store(self, local_file: StrPath, name: str, crc32c: int) -> None:
        """Uploads a file, compares the checksum of the object, and removes the local file."""
        _upload_object(self.path_of(name), os.fspath(local_file), crc32c)
        os.remove(local_file)

    def write(self, name: str, data: bytes) -> None:
        """Stores a small object in one request, and compares its checksum."""
        _write_object(self.path_of(name), data)

    def copy(self, file: StoredFile, name: str, scratch: 'Scratch', on_bytes: OnBytes) -> FileState:
        """Copies an object within the storage; uploads other files, from `scratch`."""
        # Only objects of buckets have a CRC-32C before they are read, and the storage copies them.
        if file.crc32c is not None:
            _copy_object(file.path, self.path_of(name), file.state)
            return file.state
        with scratch.hold(file, on_bytes=on_bytes) as path:
            state = compute_state(path)
            # A local file is used where it lies, and may have changed since it was listed.
            file.check_size(state)
            _upload_object(self.path_of(name), path, state.crc32c)
        return state

    def remove(self, names: Iterable[str]) -> None:
        """Deletes objects, several at a time; folders need no removal."""
        with ThreadPool(THREADS) as threads:
            list(threads.map(_delete_object, map(self.path_of, names)))

    def lock(self) -> 'BucketLock':
        """Returns the lock of the folder, an object next to it."""
        _, name = _split_url(self.folder)
        # That of a whole bucket lies in it: nobody may make another bucket for it.
        url = self.folder if name else f'{self.folder}/'
        return BucketLock(url + locks.SUFFIX)


class BucketLock(locks.Lock):
    """An object that its holder replaces again and again; see `locks`."""

    def __init__(self, url: str):
        """Takes the URL of the object; requests nothing."""
        self._url = url
        self._seconds = locks.lease_seconds()
        # The second line tells two locks of one process apart.
        self._content = f'{locks.describe_this_process()}\n{uuid.uuid4().hex}'.encode()
        self._seen: int | None = None  # generation that was seen or written last, 0 for none
        # By `time.monotonic()`: when this generation was new, and when another holder renewed it.
        self._changed = float('-inf')
        self._sign = float('-inf')
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=url, daemon=True)

    def acquire(self) -> bool:
        """Tries to take the lock, also over from a dead holder; returns whether it did."""
        self._look()
        # By the clock of this machine: those of two machines differ.
        if self._seen and time.monotonic() - self._changed < self._seconds:
            return False
        if self._seen:
            logging.warning('%s: taking over from %s, which is gone', self._url, self.holder)
        # Two that find the same dead lock both try: the storage lets one of them replace it.
        if not self._replace():
            return False
        self._thread.start()
        return True

    def last_sign_of_life(self) -> float:
        """Returns when a change by another holder was last seen, by `time.monotonic()`."""
        self._look()
        return self._sign

    def is_ours(self) -> bool:
        """Returns False if another process has taken it over."""
        return _read_object(self._url) == self._content

    def release(self) -> None:
        """Ends the renewals and deletes the object; only warns if that fails."""
        # A renewal that is under way would make the lock again after it is deleted.
        self._stop.set()
        self._thread.join()
        try:
            if blob := self._look_up_ours():
                _delete_object(self._url, blob.generation)
        except OSError as error:
            logging.warning('%s: not deleted, it will expire: %s', self._url, error)

    def _look(self) -> None:
        """Looks up the generation of the lock, and notes what is new."""
        blob = _look_up(self._url)
        # Each object that is written has another generation.
        generation = blob.generation if blob else 0
        if blob and generation != self._seen:
            content = _read_object(self._url) or b''
            first_line = content.decode(errors='replace').partition('\n')[0]
            self.holder = first_line[:200] or self.holder
            self._changed = time.monotonic()
            # What is there at the first look may be a dead holder's; a change has a living one.
            if self._seen is not None:
                self._sign = self._changed
        self._seen = generation

    def _look_up_ours(self) -> storage.Blob | None:
        """Returns the object if it is the one that this lock has written."""
        blob = _look_up(self._url)
        return blob if blob and self.is_ours() else None

    def _replace(self) -> bool:
        """Replaces the generation that was seen by our lock; False if another one is there."""
        blob: storage.Blob | None
        try:
            blob = _write_object(self._url, self._content, self._seen)
        except _Conflict:
            # The answer to an earlier attempt may have been lost.
            blob = self._look_up_ours()
        if blob is None:
            return False
        self._seen = blob.generation
        return True

    def _keep(self) -> None:
        """Renews the lock until it is released; run in a thread."""
        while not self._stop.wait(self._seconds / 3):
            # Whatever goes wrong, the next renewal may work: the lease is three times as long.
            try:
                is_ours = self._replace()
            except Exception as error:
                logging.warning('%s: not renewed: %s', self._url, error)
                continue
            if not is_ours:
                logging.warning('%s: another process took over: this one seemed dead', self._url)
                return


# --- Requests about one object, by its URL ---


def _split_url(url: str) -> tuple[str, str]:
    """Returns bucket and name of `gs://bucket/name`; the name may be empty."""
    bucket, _, name = url.removeprefix('gs://').partition('/')
    if not bucket:
        raise ValueError(f'{url}: expected a local path or gs://bucket/folder.')
    return bucket, name


def _list_objects(folder: str, **options: Any) -> dict[str, storage.Blob]:
    """Returns the objects below a folder by relative name; `options` are those of `list_blobs`."""
    bucket, name = _split_url(folder)
    # Names may begin with slashes, so only those at the end are removed.
    prefix = f'{name.rstrip("/")}/' if name else ''
    with _plain_errors(folder):
        options |= _patience(f'listing {folder}')
        blobs = _bucket_client().list_blobs(_bucket(bucket), prefix=prefix, **options)
        return {blob.name.removeprefix(prefix): blob for blob in blobs}


def _look_up(url: str) -> storage.Blob | None:
    """Returns an object with its properties; None if it does not exist."""
    # A bucket is no object.
    _, name = _split_url(url)
    if not name:
        return None
    blob = _blob(url)
    with contextlib.suppress(_Missing):
        _call_storage(url, f'looking for {url}', lambda options: blob.reload(**options))
        return blob
    return None


def _read_object(url: str) -> bytes | None:
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

    with contextlib.suppress(_Missing):
        return _call_storage(url, f'reading {url}', attempt)
    return None


def _write_object(url: str, data: bytes, generation: int | None = None) -> storage.Blob:
    """Stores a small object, in place of one of this generation: 0 for none, None for any."""
    sent_state = FileState(len(data), google_crc32c.value(data))

    def attempt(options: dict[str, Any]) -> storage.Blob:
        blob = _blob(url)
        options |= {'checksum': None, 'if_generation_match': generation}
        blob.upload_from_string(data, _CONTENT_TYPE, **options)
        return _check_stored(url, blob, sent_state)

    return _call_storage(url, f'writing to {url}', attempt)


def _upload_object(url: str, path: str, crc32c: int) -> None:
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

    _call_storage(url, f'storing {url}', attempt)


def _copy_object(source: str, url: str, expected: FileState) -> None:
    """Makes the storage copy an object; its bytes do not pass through this machine."""

    def attempt(options: dict[str, Any]) -> None:
        blob = _blob(url)
        original = _blob(source)
        token, _, _ = blob.rewrite(original, **options)
        # Each request copies a part of a large object, until no token is left to go on with.
        while token is not None:
            token, _, _ = blob.rewrite(original, token=token, **options)
        _check_stored(url, blob, expected)

    _call_storage(source, f'copying {source} to {url}', attempt)


def _delete_object(url: str, generation: int | None = None) -> None:
    """Deletes an object, if it exists; with `generation`, only this version of it."""

    def attempt(options: dict[str, Any]) -> None:
        _blob(url).delete(if_generation_match=generation, **options)

    # Another version is another process's, and stays.
    with contextlib.suppress(_Missing, _Conflict):
        _call_storage(url, f'deleting {url}', attempt)


def _bucket_client() -> storage.Client:
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


def _request_token(*args: Any, **options: Any) -> Any:
    """Sends a request of google-auth for a token; returns the response."""
    # A session for each new token: it takes 1 ms to make, and threads cannot share one.
    return google.auth.transport.requests.Request()(*args, **options)


def _billing() -> dict[str, str]:
    """Returns the parameter of a request that names the project to bill, if there is one."""
    project = os.environ.get(USER_PROJECT)
    return {'userProject': project} if project else {}


def _bucket(name: str) -> storage.Bucket:
    """Returns the library's object of a bucket; requests nothing."""
    return _bucket_client().bucket(name, _billing().get('userProject'))


def _blob(url: str) -> storage.Blob:
    """Returns the library's object of an object, of which nothing is known yet."""
    bucket, name = _split_url(url)
    return _bucket(bucket).blob(name)


def _describe_blob(url: str, blob: storage.Blob) -> StoredFile:
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
    stored_state = _describe_blob(url, blob).state
    # Only this version: meanwhile another process may have stored a good one.
    if stored_state != sent_state:
        _delete_object(url, blob.generation)
        raise retry.Corrupted(f'{url}: {sent_state} were sent, but {stored_state} stored.')
    return blob


def _call_storage(url: str, label: str, attempt: Callable[[dict[str, Any]], T]) -> T:
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
        raise _Conflict(f'{url}: another process has changed it.') from error
    except exceptions.GoogleAPICallError as error:
        message = retry.strip_request(json_message(error.message))
        if error.code == 404 and 'bucket does not exist' in message:
            bucket, _ = _split_url(url)
            # Of a copy, it may be the bucket of the other object.
            in_request = re.search(r'/b/([^/?]+)', getattr(error.response, 'url', None) or '')
            if in_request:
                bucket = in_request[1]
            raise OSError(
                f'gs://{bucket}: there is no such bucket. Make it with `gcloud storage buckets '
                f'create gs://{bucket}`, or correct the name.'
            ) from error
        # Callers suppress it where a missing object is no error.
        kind = _Missing if error.code == 404 else OSError
        raise kind(f'{url}: {" ".join(message.split())}') from error
