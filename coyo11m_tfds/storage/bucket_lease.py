"""A lock in a bucket: a lease that is valid as long as its holder renews it.

    lease = BucketLease('gs://bucket/folder')   # the object gs://bucket/folder.lock
    if not lease.try_acquire():                 # '' is success, else the holder's name
        lease.release()

The object is created only where there is none, and replaced or deleted only in the generation that
was seen, so that of two processes that try one fails. The holder replaces it three times in
`COYO11M_LEASE_SECONDS` (60). A process that sees the same generation for that long, by its own
clock, takes the lease over; at once, if it names a dead process of this machine. A holder that was
taken for dead says so in its log and goes on: see `build_lock`.
"""

import threading
import time
from typing import Any

from absl import logging
from google.api_core import exceptions

from coyo11m_tfds.storage import gcs_objects, lock_holder
from coyo11m_tfds.storage.lock_holder import LockHolder


class BucketLease:
    """The lease of a place; to be held once."""

    def __init__(self, place: str):
        """Does not look at the place yet.

        Raises:
            ValueError: the place is not of the kind `gs://bucket/folder`.
            PermissionError: there are no credentials.
        """
        self._url = f'{place}.lock'
        self._name = f'{gcs_objects.split_url(place)[1]}.lock'
        self._bucket = gcs_objects.open_bucket(place)
        self._seconds = lock_holder.lease_seconds()
        self.longest_pause = min(10.0, self._seconds / 4)
        self._holder = lock_holder.this_process(self._seconds)
        self._generation = 0  # of our lease
        self._other = LockHolder()
        self._other_generation, self._other_seen = 0, 0.0  # the latest one seen, and since when
        self._mutex = threading.Lock()  # one renewal at a time
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=self._url, daemon=True)

    def try_acquire(self) -> str:
        """Returns '' if the lease is ours now, else who has it."""
        with gcs_objects.plain_errors(self._url):
            if not self._write(0) and not self._take_over():
                return str(self._other)
        self._thread.start()
        return ''

    def is_alive(self) -> bool | None:
        """See `build_lock.Lock`; a renewal since the last look is a sign of life."""
        before = self._other_generation
        with gcs_objects.plain_errors(self._url):
            self._note(*self._look())
        if not self._other_generation or self._is_over():
            return False
        is_renewed = before not in (0, self._other_generation)
        return True if is_renewed or self._other.is_running() else None

    def is_ours(self) -> bool:
        """See `build_lock.Lock`."""
        with self._mutex, gcs_objects.plain_errors(self._url):
            return self._write(self._generation)

    def release(self) -> None:
        """Deletes the lease if it is still ours; if that fails, it expires."""
        self._stop.set()
        self._thread.join()
        try:
            self._bucket.blob(self._name).delete(
                if_generation_match=self._generation, **gcs_objects.options(self._url)
            )
        except (exceptions.NotFound, exceptions.PreconditionFailed):
            pass  # deleted by an attempt whose answer was lost, or taken over
        except (OSError, exceptions.GoogleAPICallError) as error:
            logging.warning('%s: not deleted, it will expire: %s', self._url, error)

    def _keep(self) -> None:
        """Renews the lease until it is released; runs in a thread."""
        while not self._stop.wait(self._seconds / 3):
            try:
                with self._mutex:
                    is_ours = self._write(self._generation, attempts=1, seconds=self._seconds / 3)
            except Exception as error:  # whatever it is, the next renewal may work
                logging.warning('%s: not renewed: %s', self._url, error)
                continue
            if not is_ours:
                logging.warning('%s: %s took over, as we seemed to be dead', self._url, self._other)
                return

    def _take_over(self) -> bool:
        """Takes over the lease that `_write` has just seen, if its holder is gone."""
        if not self._other_generation or not self._is_over():
            return False
        logging.warning('%s: taking over from %s, which is gone', self._url, self._other)
        return self._write(self._other_generation)

    def _is_over(self) -> bool:
        """True if the other holder is dead, or has not renewed its lease in time."""
        unchanged = time.monotonic() - self._other_seen
        longest = max(self._seconds, self._other.lease_seconds)
        return self._other.is_dead() or unchanged >= longest

    def _write(self, generation: int, **patience: Any) -> bool:
        """Replaces this generation, 0 for none, by our lease; False if another one is there."""
        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(
                self._holder.to_json(),
                'application/json',
                if_generation_match=generation,
                checksum=None,
                **gcs_objects.options(self._url, **patience),
            )
            written = blob.generation
        except exceptions.PreconditionFailed:
            written, holder = self._look(**patience)
            if holder.token != self._holder.token:
                self._note(written, holder)
                return False
            # It is ours: the answer to an earlier attempt was lost.
        self._generation = written
        return True

    def _look(self, **patience: Any) -> tuple[int, LockHolder]:
        """Returns generation and holder of the current lease; generation 0 for none."""
        blob = self._bucket.blob(self._name)
        options = gcs_objects.options(self._url, **patience)
        try:
            blob.reload(**options)
            data = blob.download_as_bytes(checksum=None, **options)  # of that generation
        except exceptions.NotFound:
            return 0, LockHolder()
        return blob.generation, lock_holder.from_json(data)

    def _note(self, generation: int, holder: LockHolder) -> None:
        if generation != self._other_generation:
            self._other_seen = time.monotonic()
        self._other_generation, self._other = generation, holder
