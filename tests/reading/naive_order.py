"""The order of the samples written out as the contract says: slow, obvious, all in memory.

batches = naive_order.batches((130, 97), OrderSettings(seed=3, lanes=4), sizes=[8, 8, 24], start=5)
next(batches)   # [(epoch, shard, record), ...] of the first global batch
"""

import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from coyo11m_tfds.dataset.keyed_random import Permutation, derive, splitmix64
from coyo11m_tfds.reading.order import CHUNKS, ROTATION, WINDOWS, OrderSettings

Record = tuple[int, int]  # shard, number


def batches(
    lengths: Sequence[int], settings: OrderSettings, sizes: Iterable[int], start: int = 0
) -> Iterator[list[tuple[int, int, int]]]:
    """Global batches of these sizes, after `start` samples of every lane."""

    @functools.cache
    def lanes_of(epoch: int) -> list[list[Record]]:
        return lanes(lengths, settings, epoch)

    length = sum(lengths) // settings.lanes
    for size in sizes:
        stop = start + size // settings.lanes
        yield [
            (k // length, *lanes_of(k // length)[lane][k % length])
            for lane in range(settings.lanes)
            for k in range(start, stop)
        ]
        start = stop


def lanes(lengths: Sequence[int], settings: OrderSettings, epoch: int) -> list[list[Record]]:
    """The records of every lane in an epoch."""
    chunks = [
        [(shard, record) for record in range(first, min(first + settings.chunk, length))]
        for shard, length in enumerate(lengths)
        for first in range(0, length, settings.chunk)
    ]
    key = int(derive(settings.seed, CHUNKS, epoch))
    visited = Permutation(len(chunks), key).apply(np.arange(len(chunks)))
    stream = [record for chunk in visited for record in chunks[chunk]]
    offset = int(derive(settings.seed, ROTATION, epoch)) % len(stream)
    stream = stream[offset:] + stream[:offset]
    length = len(stream) // settings.lanes
    return [
        _shuffled(stream[lane * length : (lane + 1) * length], settings, epoch, lane)
        for lane in range(settings.lanes)
    ]


def _shuffled(
    records: list[Record], settings: OrderSettings, epoch: int, lane: int
) -> list[Record]:
    shuffled = []
    for window, start in enumerate(range(0, len(records), settings.window)):
        inside = records[start : start + settings.window]
        key = derive(settings.seed, WINDOWS, epoch, lane, window)
        hashes = [int(splitmix64(key ^ np.uint64(i))) for i in range(len(inside))]
        shuffled += [inside[i] for i in sorted(range(len(inside)), key=hashes.__getitem__)]
    return shuffled
