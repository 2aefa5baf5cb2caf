"""Measures how well the planned order shuffles; needs no data set.

    python -m benchmarks.shuffle_quality                       # 7.6 million records, ten seconds
    python -m benchmarks.shuffle_quality --records 1000000 --chunk 128 --window 4096

It answers two questions about one epoch. How many pairs of records of a global batch come from the
same chunk? And how far apart in the order are two records that were neighbours in the source? For a
perfect shuffle, drawn from all permutations with equal probability, formulas give the answers. With
N records, B in a batch, b = B / L of them from each of L lanes, chunks of C and windows of W
records:

    pairs, as planned       L b (b - 1) / 2 (C - 1) / (W - 1), about: some chunks are not full
    pairs, perfect          B (B - 1) / 2 (C - 1) / (N - 1)
    neighbours, perfect     P(distance <= d) = d (2 N - d - 1) / (N (N - 1))
"""

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.runner import markdown_table
from coyo11m_tfds import schema
from coyo11m_tfds.reading.order import Order, OrderSettings, check_share

# Bytes of a record, with a text embedding and a caption of 400 bytes, and of what waits of it in a
# window: one crop, the text embedding and the key.
_RECORD_BYTES = schema.NUM_CROPS * schema.LATENT_NBYTES + 2 * schema.DEFAULT_TEXT_DIM + 450
_WAITING_BYTES = schema.LATENT_NBYTES + 2 * schema.DEFAULT_TEXT_DIM + 8
_SHARD_BYTES = 128 * 2**20
_FAR = 10_000

_COLUMNS = (
    *('chunk', 'window', 'lanes', 'MB a request', 'MB in windows'),
    *('pairs of a batch from one chunk', 'chunks in a batch', 'neighbours in one batch'),
    *(f'within {_FAR:,}', 'median distance'),
)


class Quality(NamedTuple):
    """Measures of how well an order shuffles.

    Attributes:
        pairs: Mean number of pairs of records of one global batch that come from the same chunk.
        chunks: Mean number of chunks with records in one global batch.
        same_batch: Share of neighbours of the source that are in the same batch.
        within: Share of neighbours of the source that are at most 10,000 records apart.
        median: Distance of neighbours of the source in the order, in records.
    """

    pairs: float
    chunks: float
    same_batch: float
    within: float
    median: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of several settings."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    defaults = {field.name: field.default for field in dataclasses.fields(OrderSettings)}
    defaults |= {'records': 7_600_000, 'batch_size': 256, 'seed': 0}
    for name, default in defaults.items():
        parser.add_argument(f'--{name}', type=int, default=default, help='%(default)s')
    flags = parser.parse_args(arguments)
    size = flags.batch_size
    try:
        settings = OrderSettings(flags.seed, flags.chunk, flags.lanes, flags.window)
        order = Order(shard_lengths(flags.records), settings)
        check_share(size, 0, 1, flags.lanes)
        rows = [_row(each, measure(each, size)) for each in variants(order, size)]
    except ValueError as error:
        sys.exit(f'error: {error}')
    print(markdown_table(_COLUMNS, [*rows, ['perfect', *[''] * 4, *_words(perfect(order, size))]]))


def shard_lengths(num_records: int) -> np.ndarray:
    """Returns the number of records in each shard of a usual data set; int64 `(num_shards,)`."""
    num_shards = -(-num_records * _RECORD_BYTES // _SHARD_BYTES)
    return np.diff(num_records * np.arange(num_shards + 1) // num_shards)


def variants(order: Order, batch_size: int) -> Iterator[Order]:
    """Yields an order and its variants: other chunks, windows, and lanes with equal memory.

    It leaves out variants that do not fit the batch or the records.
    """
    settings, seen = order.settings, set()
    changes = [{}, *({'chunk': chunk} for chunk in (32, 64, 128, 256))]
    changes += [{'window': window} for window in (256, 1024, 4096)]
    changes += [
        {'lanes': factor * settings.lanes, 'window': settings.window // factor}
        for factor in (4, 16)
        if batch_size % (factor * settings.lanes) == 0
    ]
    for change in changes:
        with contextlib.suppress(ValueError):
            other = Order(order.shard_lengths, dataclasses.replace(settings, **change))
            # A window longer than a lane is the lane.
            if _settings(other) not in seen:
                seen.add(_settings(other))
                yield other


def _settings(order: Order) -> tuple[int, int, int]:
    return order.settings.chunk, order.window, order.settings.lanes


def measure(order: Order, batch_size: int, epoch: int = 0) -> Quality:
    """Measures an order over the whole batches of an epoch.

    Raises:
        ValueError: The epoch has no whole batch.
    """
    lanes, size = order.settings.lanes, order.settings.chunk
    part, begin = batch_size // lanes, epoch * order.lane_length
    steps, pairs, chunks = order.lane_length // part, 0, 0
    if not steps:
        raise ValueError(f'{order.num_records} records are fewer than batch_size={batch_size}')
    record_starts = np.cumsum(order.shard_lengths) - order.shard_lengths
    chunk_counts = -(-order.shard_lengths // size)
    chunk_starts = np.cumsum(chunk_counts) - chunk_counts
    place = np.full(order.num_records, -1)  # in the order, of each record of the source
    for lane in range(lanes):
        found = order.samples(range(lane, lane + 1), begin, begin + steps * part)
        shard, record = found.shard[0], found.record[0]
        step, within = np.divmod(np.arange(len(record)), part)
        place[record_starts[shard] + record] = step * batch_size + lane * part + within
        chunk = np.sort((chunk_starts[shard] + record // size).reshape(steps, part), axis=1)
        pairs += sum(int((chunk[:, i:] == chunk[:, :-i]).sum()) for i in range(1, part))
        chunks += steps + int((np.diff(chunk) != 0).sum())
    seen = (place[:-1] >= 0) & (place[1:] >= 0)
    here, there = place[:-1][seen], place[1:][seen]
    same_batch, apart = here // batch_size == there // batch_size, np.abs(there - here)
    shares_of_neighbours = float(same_batch.mean()), float((apart <= _FAR).mean())
    return Quality(pairs / steps, chunks / steps, *shares_of_neighbours, float(np.median(apart)))


def perfect(order: Order, batch: int) -> Quality:
    """Returns the expectations for a perfect shuffle of the same records, in batches of `batch`."""
    total, drawn, far = order.num_records, np.arange(batch), min(_FAR, order.num_records - 1)
    full, last = np.divmod(order.shard_lengths, order.settings.chunk)
    sizes = np.concatenate([np.full(full.sum(), order.settings.chunk), last])
    missed = {  # probability that a batch has no record of a chunk of this size
        size: math.exp(np.log1p(-size / (total - drawn)).sum()) for size in np.unique(sizes)
    }
    return Quality(
        pairs=math.comb(batch, 2) * (sizes * (sizes - 1)).sum() / (total * (total - 1)),
        chunks=sum((sizes == size).sum() * (1 - share) for size, share in missed.items()),
        same_batch=(batch - 1) / (total - 1),
        within=far * (2 * total - far - 1) / (total * (total - 1)),
        median=total - 0.5 - math.sqrt((total - 0.5) ** 2 - total * (total - 1) / 2),
    )


def _row(order: Order, quality: Quality) -> list[str]:
    chunk, window, lanes = _settings(order)
    request, waiting = chunk * _RECORD_BYTES / 1e6, lanes * window * _WAITING_BYTES / 1e6
    settings = [f'{value:,}' for value in _settings(order)]
    return [*settings, f'{request:.1f}', f'{waiting:,.0f}', *_words(quality)]


def _words(quality: Quality) -> list[str]:
    pairs, chunks, *neighbours, median = quality
    few = '.2f' if pairs < 10 else ',.0f'
    percents = [f'{share:.3%}' if share < 0.1 else f'{share:.0%}' for share in neighbours]
    return [f'{pairs:{few}}', f'{chunks:.1f}', *percents, f'{median:,.0f}']


if __name__ == '__main__':
    main()
