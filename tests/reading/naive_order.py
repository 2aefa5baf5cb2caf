"""The order of the samples written out as the contract says: slow, obvious, all in memory.

batches = naive_order.mixture(sources, settings, weights, sizes=[8, 8, 24])
next(batches)   # [(source, epoch, shard, record), ...] of the first global batch
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from coyo11m_tfds.dataset.keyed_random import Permutation, derive, splitmix64
from coyo11m_tfds.sampling.order import CHUNKS, ROTATION, WINDOWS, OrderSettings

Record = tuple[int, int]  # shard, number


def lanes(lengths: Sequence[int], settings: OrderSettings, epoch: int) -> list[list[Record]]:
    """The records of every lane in an epoch."""
    chunks = []
    for shard, length in enumerate(lengths):
        for first in range(0, length, settings.chunk):
            # The last chunk of a shard may be shorter.
            stop = min(first + settings.chunk, length)
            chunks.append([(shard, record) for record in range(first, stop)])
    key = int(derive(settings.seed, CHUNKS, epoch))
    visited = Permutation(len(chunks), key).apply(np.arange(len(chunks)))
    stream = [record for chunk in visited for record in chunks[chunk]]
    offset = int(derive(settings.seed, ROTATION, epoch)) % len(stream)
    stream = stream[offset:] + stream[:offset]
    # What is left over belongs to no lane in this epoch.
    length = len(stream) // settings.lanes
    shuffled_lanes = []
    for lane in range(settings.lanes):
        begin = lane * length
        records = stream[begin : begin + length]
        shuffled_lanes.append(_shuffled(records, settings, epoch, lane))
    return shuffled_lanes


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
    remaining = iter(keeps)
    kept_of_shards = []
    for length in lengths:
        kept_of_shards.append([record for record in range(length) if next(remaining)])
    return kept_of_shards


def shares(weights: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers in shares by weight, rounded so that they add up to a total."""
    exact = [weight * total / sum(weights) for weight in weights]
    rounded = [int(share) for share in exact]
    for _ in range(total - sum(rounded)):
        rests = [share - number for share, number in zip(exact, rounded, strict=True)]
        # The first of equals.
        largest = rests.index(max(rests))
        rounded[largest] += 1
    return rounded


def counts(weights: Sequence[Fraction], shapes: Sequence[str], each: int, step: int) -> list[int]:
    """Samples that each source gives of every lane to a batch: all are of one shape."""
    names = list(dict.fromkeys(shapes))
    weights_of_shapes = dict.fromkeys(names, Fraction(0))
    for weight, shape in zip(weights, shapes, strict=True):
        weights_of_shapes[shape] += weight
    # The fewest steps in which each shape has a whole number of them, by its weight.
    unit = math.lcm(*(weight.denominator for weight in weights_of_shapes.values()))
    steps = [int(weight * unit) for weight in weights_of_shapes.values()]
    divisor = math.gcd(*steps)
    # The steps of each shape, evenly spaced from 0 to 1; of equal places, earlier shapes first.
    places = []
    for number, num_steps in enumerate(steps):
        count = num_steps // divisor
        for k in range(count):
            places.append((Fraction(2 * k + 1, 2 * count), number))
    _, number = sorted(places)[step % len(places)]
    weights_in_step = []
    for weight, shape in zip(weights, shapes, strict=True):
        weights_in_step.append(weight if shape == names[number] else Fraction(0))
    return shares(weights_in_step, each)


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
        lengths = [len(of_shard) for of_shard in records]
        ordered_lanes = []
        # The order is that of the kept records alone, counted from 0 in each shard.
        for lane in lanes(lengths, settings[source], epoch):
            ordered_lanes.append([(shard, records[shard][number]) for shard, number in lane])
        return ordered_lanes

    taken = [start] * len(sources)
    for step, size in enumerate(sizes):
        each = size // num_lanes
        shape_of_sources = shapes or [''] * len(sources)
        counts_of_step = counts(weights(step), shape_of_sources, each, step)
        batch = []
        for lane in range(num_lanes):
            for source, count in enumerate(counts_of_step):
                length = sum(map(len, sources[source])) // num_lanes  # of a lane in an epoch
                for k in range(taken[source], taken[source] + count):
                    epoch, place = divmod(k, length)
                    shard, record = lanes_of(source, epoch)[lane][place]
                    batch.append((source, epoch, shard, record))
        yield batch
        taken = [before + count for before, count in zip(taken, counts_of_step, strict=True)]
