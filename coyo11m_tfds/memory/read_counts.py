"""Sums over what a process reads, for its log: bytes, chunks, requests, and what a cache held."""

import threading
from typing import NamedTuple, NoReturn


class ReadCounts(NamedTuple):
    """Sums over the reads since a counter was made."""

    num_bytes: int = 0  # of all chunks, with rows of columns, or of all batches read by rows
    num_chunks: int = 0  # runs of records that were read
    chunks_in_flight: int = 0  # runs of records that are being read now
    bad_records: int = 0  # that could not be read and were left out, again in every epoch
    num_requests: int = 0  # ranges of files that were fetched from gs:// or hf://
    request_seconds: float = 0.0  # that these took, together, with all attempts
    num_retries: int = 0  # attempts after the first one of each
    cache_hits: int = 0  # ranges that `cache_dir` held, or batches that were read there by rows
    cache_misses: int = 0  # ranges that it did not hold
    cache_bytes: int = 0  # of `num_bytes`, those that came from it


class ReadCounter:
    """Counts what is read, as `ReadCounts`; one counter may serve several data sets."""

    def __init__(self) -> None:
        self._counts = ReadCounts()
        self._lock = threading.Lock()  # chunks are read by several threads

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            'a ReadCounter cannot be pickled or copied, because threads of this process add to it: '
            'make one in each process, and send what `read` returns'
        )

    def read(self) -> ReadCounts:
        """Returns the sums so far."""
        return self._counts

    def add(self, **amounts: float) -> None:
        """Adds to the named sums."""
        with self._lock:
            # A new tuple, so that `read` never sees one sum raised and another not yet.
            sums = {name: getattr(self._counts, name) + n for name, n in amounts.items()}
            self._counts = self._counts._replace(**sums)
