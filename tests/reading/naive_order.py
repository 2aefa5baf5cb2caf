"""The order of the samples written out as the contract says: slow, obvious, all in memory.

batches = naive_order.mixture(sources, settings, weights, sizes=[8, 8, 24])
next(batches)   # [(source, epoch, shard, record), ...] of the first global batch
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from coyo11m_tfds.dataset.keyed_random import Permutation, derive, splitmix64
from coyo11m_tfds.sampling.order import CHUNKS, ROTATION, WINDOWS, OrderSettings

Record = tuple[int, int]  # shard, number


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


def kept(lengths: Sequence[int], keeps: Sequence[bool]) -> list[list[int]]:
    """The records of each shard that are kept, of what is said of all records in a row."""
    told = iter(keeps)
    return [[record for record in range(length) if next(told)] for length in lengths]


def shares(weights: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers in shares by weight, rounded so that they add up to a total."""
    exact = [weight * total / sum(weights) for weight in weights]
    found = [int(x) for x in exact]
    for _ in range(total - sum(found)):
        rests = [x - n for x, n in zip(exact, found, strict=True)]
        found[rests.index(max(rests))] += 1
    return found


def counts(weights: Sequence[Fraction], shapes: Sequence[str], each: int, step: int) -> list[int]:
    """Samples that each source gives of every lane to a batch: all are of one shape."""
    names = list(dict.fromkeys(shapes))
    of_shapes = [
        sum((w for w, x in zip(weights, shapes, strict=True) if x == name), Fraction(0))
        for name in names
    ]
    unit = next(n for n in itertools.count(1) if all((x * n).denominator == 1 for x in of_shapes))
    steps = [int(x * unit) for x in of_shapes]
    steps = [x // math.gcd(*steps) for x in steps]
    middles = [
        (Fraction(2 * k + 1, 2 * count), name)
        for name, count in zip(range(len(names)), steps, strict=True)
        for k in range(count)
    ]
    shape = names[sorted(middles)[step % len(middles)][1]]
    return shares(
        [w if x == shape else Fraction(0) for w, x in zip(weights, shapes, strict=True)], each
    )


def mixture(
    sources: Sequence[list[list[int]]],
    settings: Sequence[OrderSettings],
    weights: Callable[[int], Sequence[Fraction]],
    sizes: Iterable[int],
    shapes: Sequence[str] = (),
    start: int = 0,
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Global batches of these sizes: source, epoch, shard and record of each sample.

    `sources` are the kept records of the shards of each, `settings` the settings of each, which
    differ in the seed; `weights` gives those of a step, `start` the samples of lanes before.
    """
    num_lanes = settings[0].lanes

    @functools.cache
    def lanes_of(source: int, epoch: int) -> list[list[Record]]:
        records = sources[source]
        ordered = lanes([len(x) for x in records], settings[source], epoch)
        return [[(shard, records[shard][number]) for shard, number in lane] for lane in ordered]

    taken = [start] * len(sources)
    for step, size in enumerate(sizes):
        each = size // num_lanes
        found = counts(weights(step), shapes or [''] * len(sources), each, step)
        batch = []
        for lane in range(num_lanes):
            for source, count in enumerate(found):
                length = sum(map(len, sources[source])) // num_lanes
                for k in range(taken[source], taken[source] + count):
                    record = lanes_of(source, k // length)[lane][k % length]
                    batch.append((source, k // length, *record))
        yield batch
        taken = [k + count for k, count in zip(taken, found, strict=True)]
