"""How well the planned order shuffles, as figures and as a picture; no data set is needed.

    python -m benchmarks.shuffle_quality                       # 7.6 million records, ten seconds
    python -m benchmarks.shuffle_quality --records 1000000 --chunk 128 --window 4096
    python -m benchmarks.shuffle_quality --svg docs/shuffle.svg

Two questions are asked of one epoch. How many pairs of records of a global batch come from the same
chunk? And how far apart in the order are two records that were neighbours in the source? For a
perfect shuffle, one drawn from all permutations of the records with equal probability, formulas
give the answers. With N records, B in a batch, b = B / L of them from each of L lanes, chunks of C
and windows of W records:

    pairs, as planned       L b (b - 1) / 2 (C - 1) / (W - 1), about: some chunks are not full
    pairs, perfect          B (B - 1) / 2 (C - 1) / (N - 1)
    neighbours, perfect     P(distance <= d) = d (2 N - d - 1) / (N (N - 1))
"""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.report import Page, line, markdown_table, text
from coyo11m_tfds import schema
from coyo11m_tfds.reading import shares
from coyo11m_tfds.reading.order import Order, OrderSettings

# Bytes of a record, with a text embedding and a caption of 400 bytes, and of what waits of it in a
# window: one crop, the text embedding and the key.
_RECORD_BYTES = schema.NUM_CROPS * schema.LATENT_NBYTES + 2 * schema.DEFAULT_TEXT_DIM + 450
_WAITING_BYTES = schema.LATENT_NBYTES + 2 * schema.DEFAULT_TEXT_DIM + 8
_SHARD_BYTES = 128 * 2**20
_MB = 10**6

_FAR = 10_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of several settings, and draws the first of them if asked to."""
    flags = parse_flags(arguments)
    try:
        settings = OrderSettings(flags.seed, flags.chunk, flags.lanes, flags.window)
        order, size = Order(shard_lengths(flags.records), settings), flags.batch_size
        shares.check_share(size, 0, 1, flags.lanes)
        ours, best = measure(order, size), perfect(order, size)
    except ValueError as error:
        sys.exit(f'error: {error}')
    if flags.svg:
        flags.svg.write_text(draw(order, size, ours, best), encoding='utf-8')
    rows = [_row(order, ours)]
    rows += [_row(other, measure(other, size)) for other in variants(order, size)]
    print(make_table([*rows, ['perfect', '', '', '', '', *_figures(best)]]))


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--records', type=int, default=7_600_000, help='in the data set')
    parser.add_argument('--batch_size', type=int, default=256)
    parser.add_argument('--seed', type=int, default=0)
    for name in ('chunk', 'window', 'lanes'):
        default = OrderSettings.__dataclass_fields__[name].default
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--svg', type=pathlib.Path, help='file to draw the distances into')
    return parser.parse_args(arguments)


def shard_lengths(num_records: int) -> np.ndarray:
    """Records in each shard of a data set of the usual size of shards; int64 `(num_shards,)`."""
    num_shards = -(-num_records * _RECORD_BYTES // _SHARD_BYTES)
    return np.diff(num_records * np.arange(num_shards + 1) // num_shards)


def variants(order: Order, batch_size: int) -> Iterator[Order]:
    """Other chunks, other windows, and more lanes with windows that take the same memory.

    Those that do not fit the batch or the records are left out.
    """
    settings = order.settings
    changes = [{'chunk': chunk} for chunk in (32, 64, 128, 256)]
    changes += [{'window': window} for window in (256, 1024, 4096)]
    changes += [
        {'lanes': factor * settings.lanes, 'window': settings.window // factor}
        for factor in (4, 16)
        if batch_size % (factor * settings.lanes) == 0
    ]
    seen = {_settings(order)}
    for change in changes:
        with contextlib.suppress(ValueError):
            other = Order(order.shard_lengths, dataclasses.replace(settings, **change))
            # A window longer than a lane is the lane.
            if _settings(other) not in seen:
                seen.add(_settings(other))
                yield other


def _settings(order: Order) -> tuple[int, int, int]:
    return order.settings.chunk, order.window, order.settings.lanes


# --- Figures -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well an order shuffles.

    Attributes:
        pairs: of records of one global batch that come from the same chunk, on average.
        chunks: that have records in one global batch, on average.
        same_batch: share of neighbours of the source that are in the same batch.
        median: distance of neighbours of the source in the order, in records.
        within: share of neighbours whose distance is at most the given one; any shape.
    """

    pairs: float
    chunks: float
    same_batch: float
    median: float
    within: Callable[[np.ndarray], np.ndarray]


def measure(order: Order, batch_size: int, epoch: int = 0) -> Quality:
    """Counts in the batches that begin with an epoch and are whole within it.

    Raises:
        ValueError: there is none.
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
    here, there = place[:-1], place[1:]
    seen = (here >= 0) & (there >= 0)
    distance = np.sort(np.abs(there - here)[seen])
    same_batch = (here // batch_size == there // batch_size)[seen].mean()
    return Quality(
        pairs / steps,
        chunks / steps,
        float(same_batch),
        float(np.median(distance)),
        lambda d: np.searchsorted(distance, d, side='right') / len(distance),
    )


def perfect(order: Order, batch: int) -> Quality:
    """Expectations for a perfect shuffle of the same records, for batches of a size."""
    total = order.num_records
    full, last = np.divmod(order.shard_lengths, order.settings.chunk)
    sizes = np.concatenate([np.full(full.sum(), order.settings.chunk), last])
    pair_share = (sizes * (sizes - 1)).sum() / (total * (total - 1))
    drawn = np.arange(batch)
    missed = {  # probability that a batch has no record of a chunk of this size
        size: math.exp(np.log1p(-size / (total - drawn)).sum()) for size in np.unique(sizes)
    }
    return Quality(
        pairs=math.comb(batch, 2) * pair_share,
        chunks=sum((sizes == size).sum() * (1 - share) for size, share in missed.items()),
        same_batch=(batch - 1) / (total - 1),
        median=total - 0.5 - math.sqrt((total - 0.5) ** 2 - total * (total - 1) / 2),
        within=lambda d: _share_within(np.minimum(d, total - 1), total),
    )


def _share_within(distance: np.ndarray, total: int) -> np.ndarray:
    return distance * (2 * total - distance - 1) / (total * (total - 1))


# --- The table ---------------------------------------------------------------------------------

_COLUMNS = (
    'chunk',
    'window',
    'lanes',
    'MB a request',
    'MB in windows',
    'pairs of a batch from one chunk',
    'chunks in a batch',
    'neighbours in one batch',
    f'within {_FAR:,}',
    'median distance',
)


def _row(order: Order, quality: Quality) -> list[str]:
    chunk, window, lanes = _settings(order)
    waiting = lanes * window * _WAITING_BYTES / _MB
    settings = [f'{value:,}' for value in _settings(order)]
    megabytes = [f'{chunk * _RECORD_BYTES / _MB:.1f}', f'{waiting:,.0f}']
    return [*settings, *megabytes, *_figures(quality)]


def _figures(quality: Quality) -> list[str]:
    return [
        f'{quality.pairs:.2f}' if quality.pairs < 10 else f'{quality.pairs:,.0f}',
        f'{quality.chunks:.1f}',
        _percent(quality.same_batch),
        _percent(quality.within(_FAR)),
        f'{quality.median:,.0f}',
    ]


def _percent(share: float) -> str:
    return f'{share:.3%}' if share < 0.1 else f'{share:.0%}'


def make_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of `_COLUMNS` as Markdown."""
    return markdown_table(_COLUMNS, rows)


# --- The picture -------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 736, 104, 372  # of the plot


def draw(order: Order, batch_size: int, ours: Quality, best: Quality) -> str:
    """Returns an SVG file: which share of neighbours is at most how far apart."""
    total = order.num_records
    chunk, window, lanes = _settings(order)
    settings = (
        f'{total:,} records, batches of {batch_size:,}, chunks of {chunk:,}, '
        f'windows of {window:,}, {lanes:,} lanes'
    )
    x = _log_axis(total)
    batch, windows = x(batch_size), x(min(lanes * window, total))
    label = 'Share of neighbours by distance, planned order and perfect shuffle'
    page = Page(_WIDTH, _HEIGHT, label)
    shapes = [
        page.title('How far apart neighbours of the source end up'),
        text(settings, 24, 60),
        *_grid(x, total),
        *_mark(batch, 'a batch'),
        *_mark(windows, 'all windows'),
        _curve(x, total, ours, 'ours'),
        text('planned order', windows + 12, _y(0.82), 'ours'),
        text(f'median {ours.median:,.0f}', windows + 12, _y(0.82) + 20),
        _curve(x, total, best, 'best'),
        text('perfect shuffle', x(best.median) - 20, _y(0.6), 'best', 'end'),
        text(f'median {best.median:,.0f}', x(best.median) - 20, _y(0.6) + 20, anchor='end'),
        text('share of neighbours', _LEFT, _TOP - 8),
        text('at most so many records apart', _RIGHT, _HEIGHT - 20, anchor='end'),
    ]
    return page.svg(shapes)


def _log_axis(total: int) -> Callable[[float], float]:
    return lambda d: _LEFT + (_RIGHT - _LEFT) * math.log(d) / math.log(total)


def _y(share: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * share


def _grid(x: Callable[[float], float], total: int) -> Iterator[str]:
    for share in (0, 0.25, 0.5, 0.75, 1):
        yield line(_LEFT, _y(share), _RIGHT, _y(share))
        yield text(f'{share:.0%}', _LEFT - 12, _y(share) + 5, anchor='end')
    for power in range(int(math.log10(total)) + 1):
        yield line(x(10**power), _BOTTOM, x(10**power), _BOTTOM + 6)
        yield text(f'{10**power:,}', x(10**power), _BOTTOM + 24, anchor='middle')


def _mark(x: float, words: str) -> Iterator[str]:
    yield line(x, _TOP, x, _BOTTOM, 'mark')
    yield text(words, x, _TOP - 8, anchor='middle')


def _curve(x: Callable[[float], float], total: int, quality: Quality, kind: str) -> str:
    distances = np.unique(np.geomspace(1, total - 1, 300).astype(int))
    shares = quality.within(distances)
    points = (f'{x(d):.1f} {_y(s):.1f}' for d, s in zip(distances, shares, strict=True))
    return f'<path class="{kind}" d="M{" L".join(points)}"/>'


if __name__ == '__main__':
    main()
