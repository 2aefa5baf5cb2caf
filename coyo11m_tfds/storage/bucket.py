"""Folders in buckets of Google Cloud Storage, and their locks."""

import contextlib
import os
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from absl import logging
from google.cloud import storage

from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage import bucket_objects, locks
from coyo11m_tfds.storage.base import THREADS, WritableFolder
from coyo11m_tfds.storage.file_state import FileState, OnBytes, StrPath, compute_state
from coyo11m_tfds.storage.remote import RemoteFolder
from coyo11m_tfds.storage.stored_file import StoredFile

if TYPE_CHECKING:
    from coyo11m_tfds.storage.scratch import Scratch

# Of each object, only what `describe_blob` uses: a folder may have many.
_LISTED_FIELDS = 'items(name,size,crc32c,generation,contentEncoding),nextPageToken'


class Bucket(RemoteFolder, WritableFolder):
    """A folder in a bucket, or all of it, `gs://bucket[/folder]`."""

    keeps_checksums = True

    def __init__(self, folder: StrPath):
        """Takes the URL; raises a ValueError for one without a bucket."""
        super().__init__(folder)
        bucket_objects.split_url(os.fspath(folder))

    def why_unreadable(self) -> str:
        """Returns why a zonal bucket cannot be read; '' for others, and if that is unknown."""
        bucket, name = bucket_objects.split_url(self.folder)
        prefix = f'{name}/' if name else ''

        # Needs the right to list objects, which readers have; the bucket's properties need more.
        def attempt(options: dict[str, Any]) -> dict[str, str]:
            query = {'prefix': prefix} | bucket_objects.billing()
            return bucket_objects.bucket_client()._get_resource(
                f'/b/{bucket}/storageLayout', query, **options
            )

        # What is wrong with credentials or the name of the bucket shows at other requests, too.
        with contextlib.suppress(OSError):
            layout = bucket_objects.call_storage(
                self.folder, f'the layout of gs://{bucket}', attempt
            )
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
        blobs = bucket_objects.list_objects(url, delimiter=delimiter, fields=_LISTED_FIELDS)
        files = {}
        for name, blob in blobs.items():
            # Some tools, TensorFlow among them, make markers so that an empty folder is listed.
            is_marker = not name or name.endswith('/')
            if not is_marker:
                files[name] = bucket_objects.describe_blob(f'{url}/{name}', blob)
        return files

    def exists(self) -> bool:
        """Returns whether there is an object below the folder, be it a marker."""
        return bool(bucket_objects.list_objects(self.folder, max_results=1, fields='items(name)'))

    @classmethod
    def describe(cls, path: str) -> StoredFile:
        """Returns an object with its checksum, by one request."""
        if blob := bucket_objects.look_up(path):
            return bucket_objects.describe_blob(path, blob)
        raise FileNotFoundError(path)

    def read(self, name: str) -> bytes | None:
        """Reads a small object in one request; None if it is missing."""
        return bucket_objects.read_object(self.path_of(name))

    @classmethod
    def _request(cls, path: str) -> tuple[str, dict[str, str]]:
        # In a name, slashes are quoted, too.
        bucket, name = (
            urllib.parse.quote(part, safe='') for part in bucket_objects.split_url(path)
        )
        query = urllib.parse.urlencode({'alt': 'media'} | bucket_objects.billing())
        client = bucket_objects.bucket_client()
        address = f'{client.api_endpoint}/download/storage/v1/b/{bucket}/o/{name}?{query}'
        headers: dict[str, str] = {}
        # Renews the token if it ends soon.
        client._credentials.before_request(bucket_objects.request_token, 'GET', '', headers)
        return address, headers

    # --- Writing ---

    def check_writable(self) -> None:
        """Stores an object of one byte and deletes it."""
        # Rights in a bucket are known only by their use.
        probe = self.path_of(f'.writable_{uuid.uuid4().hex}')
        bucket_objects.write_object(probe, b'x')
        bucket_objects.delete_object(probe)

    def staging(self, fallback: StrPath) -> str:
        """Makes and returns `fallback`."""
        os.makedirs(fallback, exist_ok=True)
        return os.fspath(fallback)

    def store(self, local_file: StrPath, name: str, crc32c: int) -> None:
        """Uploads a file, compares the checksum of the object, and removes the local file."""
        bucket_objects.upload_object(self.path_of(name), os.fspath(local_file), crc32c)
        os.remove(local_file)

    def write(self, name: str, data: bytes) -> None:
        """Stores a small object in one request, and compares its checksum."""
        bucket_objects.write_object(self.path_of(name), data)

    def copy(self, file: StoredFile, name: str, scratch: 'Scratch', on_bytes: OnBytes) -> FileState:
        """Copies an object within the storage; uploads other files, from `scratch`."""
        # Only objects of buckets have a CRC-32C before they are read, and the storage copies them.
        if file.crc32c is not None:
            bucket_objects.copy_object(file.path, self.path_of(name), file.state)
            return file.state
        with scratch.hold(file, on_bytes=on_bytes) as path:
            state = compute_state(path)
            # A local file is used where it lies, and may have changed since it was listed.
            file.check_size(state)
            bucket_objects.upload_object(self.path_of(name), path, state.crc32c)
        return state

    def remove(self, names: Iterable[str]) -> None:
        """Deletes objects, several at a time; folders need no removal."""
        with ThreadPool(THREADS) as threads:
            list(threads.map(bucket_objects.delete_object, map(self.path_of, names)))

    def lock(self) -> 'BucketLock':
        """Returns the lock of the folder, an object next to it."""
        _, name = bucket_objects.split_url(self.folder)
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
        return bucket_objects.read_object(self._url) == self._content

    def release(self, patience: float) -> None:
        """Ends the renewals and deletes the object; only warns if that fails or takes longer."""
        self._stop.set()
        self._thread.join(patience)
        if self._thread.is_alive():
            logging.warning('%s: not deleted in %g s, it will expire', self._url, patience)

    def _look(self) -> None:
        """Looks up the generation of the lock, and notes what is new."""
        blob = bucket_objects.look_up(self._url)
        # Each object that is written has another generation.
        generation = blob.generation if blob else 0
        if blob and generation != self._seen:
            content = bucket_objects.read_object(self._url) or b''
            first_line = content.decode(errors='replace').partition('\n')[0]
            self.holder = first_line[:200] or self.holder
            self._changed = time.monotonic()
            # What is there at the first look may be a dead holder's; a change has a living one.
            if self._seen is not None:
                self._sign = self._changed
        self._seen = generation

    def _look_up_ours(self) -> storage.Blob | None:
        """Returns the object if it is the one that this lock has written."""
        blob = bucket_objects.look_up(self._url)
        return blob if blob and self.is_ours() else None

    def _replace(self) -> bool:
        """Replaces the generation that was seen by our lock; False if another one is there."""
        blob: storage.Blob | None
        try:
            blob = bucket_objects.write_object(self._url, self._content, self._seen)
        except bucket_objects.Conflict:
            # The answer to an earlier attempt may have been lost.
            blob = self._look_up_ours()
        if blob is None:
            return False
        self._seen = blob.generation
        return True

    def _keep(self) -> None:
        """Renews the lock until it is released, then deletes it; run in a thread."""
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
        # In this thread: a renewal that is under way elsewhere would make the lock again.
        try:
            if blob := self._look_up_ours():
                bucket_objects.delete_object(self._url, blob.generation)
        except Exception as error:
            logging.warning('%s: not deleted, it will expire: %s', self._url, error)
