"""Readers of the benchmark: an opened `Stream`, and what all of them share.

stream = readers.READERS['ours'].open(folder_of_its_format, None)
for batch in stream.epoch():          # key int64 (256,), latents float16 (256, 4, 32, 32)
    ...
state = stream.state(batches_taken)   # bytes; `open(folder, state)` resumes from there
"""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import measure
from coyo11m_tfds import schema

BATCH_SIZE = 256
NUM_WORKERS = 2
SEED = 0

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Stream:
    """An opened reader.

    Attributes:
        epoch: the batches of the rest of this epoch, at each later call those of the next one; or
            batches without end.
        state: to the position after so many batches of the first `epoch()`.
    """

    epoch: Callable[[], Iterable[Batch]]
    state: Callable[[int], bytes]


Open = Callable[[pathlib.Path, bytes | None], Stream]
OpenFresh = Callable[[pathlib.Path], Callable[[], Iterable[Batch]]]


def from_the_start(open_fresh: OpenFresh) -> Open:
    """Makes `open` of a reader that forgets its place: it reads from the start until it is there.

    Args:
        open_fresh: from a folder to `Stream.epoch` of a stream at the start.
    """

    def open_at(folder: pathlib.Path, state: bytes | None) -> Stream:
        epochs, before = open_fresh(folder), json.loads(state)['batches'] if state else 0
        to_skip = [before]

        def epoch() -> Iterable[Batch]:
            return itertools.islice(epochs(), to_skip.pop() if to_skip else 0, None)

        return Stream(epoch, lambda taken: json.dumps({'batches': before + taken}).encode())

    return open_at


def shuffled_batches(num_samples: int, epoch: int) -> np.ndarray:
    """Numbers of the samples of each full batch of an epoch; int64 `(batches, BATCH_SIZE)`."""
    order = np.random.default_rng((SEED, epoch)).permutation(num_samples)
    return order[: num_samples // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)


def cut(latents: bytes | memoryview, key: int) -> bytes | memoryview:
    """One of the three crops of a sample."""
    start = key % schema.NUM_CROPS * schema.LATENT_NBYTES
    return latents[start : start + schema.LATENT_NBYTES]


def numpy_batch(keys: Iterable[int], crops: Iterable[bytes | memoryview]) -> Batch:
    """A batch from keys and crops."""
    latents = np.frombuffer(b''.join(crops), np.float16).reshape(-1, *schema.LATENT_SHAPE)
    return {schema.KEY: np.array(keys, np.int64), schema.LATENTS: latents}


# --- How fast a stream is ----------------------------------------------------------------------

# A reader is steady when its buffers are full and what it has imported late is there.
_WARM_SECONDS = 1.0
_WARM_BATCHES = 8

_NO_BATCH = 'an epoch has no full batch; take more samples.'


@dataclasses.dataclass(frozen=True)
class Rate:
    """So many batches came in so many seconds, for which all processes together took CPU time."""

    batches: int
    seconds: float
    cpu_seconds: float


def read_for(stream: Stream, seconds: float, on_first: Callable[[], None] = lambda: None) -> Rate:
    """Reads for so many seconds; the warm-up and the gaps between epochs are not among them.

    Args:
        stream: freshly opened.
        seconds: to count.
        on_first: called when the first batch is there.

    Raises:
        RuntimeError: an epoch has no batch.
    """
    batches, elapsed, cpu, warm_batches = 0, 0.0, 0.0, _WARM_BATCHES
    begin = time.monotonic()
    while elapsed < seconds:
        of_epoch = iter(stream.epoch())
        if next(of_epoch, None) is None:
            raise RuntimeError(_NO_BATCH)
        on_first()
        skipped = 1 + sum(1 for _ in itertools.islice(of_epoch, warm_batches))
        while time.monotonic() - begin < _WARM_SECONDS and next(of_epoch, None) is not None:
            skipped += 1
        part = _time(of_epoch, seconds - elapsed)
        batches += part.batches
        elapsed += part.seconds
        cpu += part.cpu_seconds
        # An epoch may be shorter than the warm-up that was meant for it.
        warm_batches = min(warm_batches, (skipped + part.batches) // 4)
    return Rate(batches, elapsed, cpu)


def read_once(stream: Stream, num_batches: int, on_first: Callable[[], None]) -> Rate:
    """Reads one epoch from its first batch to its last, so that no byte is read twice.

    Args:
        stream: freshly opened.
        num_batches: of an epoch.
        on_first: called when the first batch is there.

    Raises:
        RuntimeError: no batch came.
    """
    count, cpu, begin = 0, measure.cpu_seconds(), time.monotonic()
    for count, _ in enumerate(itertools.islice(stream.epoch(), num_batches), start=1):
        if count == 1:
            on_first()
    if not count:
        raise RuntimeError(_NO_BATCH)
    return Rate(count, time.monotonic() - begin, measure.cpu_seconds() - cpu)


def _time(batches: Iterator[Batch], seconds: float) -> Rate:
    """Reads until so many seconds have passed or the epoch ends."""
    count, cpu, begin = 0, measure.cpu_seconds(), time.monotonic()
    end = begin
    for _ in batches:
        count, end = count + 1, time.monotonic()
        if end - begin >= seconds:
            break
    return Rate(count, end - begin, measure.cpu_seconds() - cpu)
