"""How much a host reads.

counter = ReadCounter()
batches = input_pipeline.train_dataset(path, batch_size=256, seed=0, counter=counter)
...
counter.read().num_bytes
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple


class ReadCounts(NamedTuple):
    """Sums since the counter was made.

    Attributes:
        num_bytes: of all chunks that have been read, with their rows of columns, or of all batches
            of rows.
        num_chunks: runs of records that have been read.
        chunks_in_flight: those whose records are being read now.
        bad_records: that could not be read and were left out; one is counted in every epoch.
    """

    num_bytes: int
    num_chunks: int
    chunks_in_flight: int
    bad_records: int


class ReadCounter:
    """Counts what is read; one counter may serve several data sets."""

    def __init__(self):
        self._bytes = self._begun = self._done = self._bad = 0
        self._lock = threading.Lock()  # chunks are read by several threads

    def read(self) -> ReadCounts:
        """The sums until now."""
        with self._lock:
            in_flight = self._begun - self._done
            return ReadCounts(self._bytes, self._done, in_flight, self._bad)

    @contextlib.contextmanager
    def chunk(self) -> Iterator[None]:
        """Counts a chunk, whose records are read in the `with` block."""
        self._count(begun=1)
        try:
            yield
        except BaseException:
            self._count(begun=-1)
            raise
        self._count(done=1)

    def add_bytes(self, num_bytes: int) -> None:
        """Counts bytes that have been read."""
        with self._lock:
            self._bytes += num_bytes

    def add_bad(self, num_records: int) -> None:
        """Counts records that could not be read."""
        with self._lock:
            self._bad += num_records

    def _count(self, begun: int = 0, done: int = 0) -> None:
        with self._lock:
            self._begun += begun
            self._done += done
