"""Reads training samples of one data set or of a mixture, in the planned order.

Each source of a mixture is read by rows or by chunks, in its own sequence. A batch joins the parts
of its sources: by rows, one call gathers the values of all sources.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit
from coyo11m_tfds.reading import damage, memory
from coyo11m_tfds.reading.batches import ArraySpec, Batch, Batches
from coyo11m_tfds.reading.engines import Opened, SplitReader
from coyo11m_tfds.reading.evaluation import kept_records
from coyo11m_tfds.reading.mixture import BatchShares, Cursor, Position, Stage
from coyo11m_tfds.reading.options import TrainOptions
from coyo11m_tfds.reading.order import Order, check_share, own_lanes, train_blocks
from coyo11m_tfds.reading.row_reader import InMemory, Part, gathered, join_places
from coyo11m_tfds.reading.sources import MixSource, check_latents, choose_texts
from coyo11m_tfds.storage import json_digest

# Bytes of a long caption as an object of Python, with its place in the array.
_CAPTION_NBYTES = 600


class ReadPlan(NamedTuple):
    """The sequence of batches that training reads from its sources."""

    sources: tuple[MixSource, ...]
    orders: tuple[Order, ...] | None  # None for a single source without a chunk index
    cursor: Cursor  # of the first batch
    steps_per_epoch: float  # samples of all sources divided by the batch size; NaN if unknown


def plan(options: TrainOptions) -> ReadPlan:
    """Plans the training samples from the first batch on; reads the columns of conditions.

    Raises the errors of `input_pipeline.train_batches`.
    """
    sources = options.sources
    splits = [source.stored.split(options.split) for source in sources]
    check_share(options.batch_size, *options.process, options.lanes if all(splits) else None)
    if not all(splits):  # there are no lanes
        options = dataclasses.replace(options, lanes=1)
    each = [options.alone(source) for source in sources]
    orders = tuple(_order(*x) for x in zip(each, filter(None, splits), strict=False))
    _check_apart(sources, orders)
    check_latents(sources)
    of_latents = [x.stored.latents for x in sources] if len(sources) > 1 else []
    shares = BatchShares(
        options.batch_size // options.lanes,
        [x.weight for x in sources],
        options.stages,
        [(dtype, shape[1:]) for dtype, shape in of_latents],
        [x.name for x in sources],
    )
    digests = tuple(
        json_digest.sha256({**x.source.identity(x.split), **dataclasses.asdict(x.order)})[:16]
        for x in each
    )
    start = Cursor(Position(0, (0,) * len(sources)), shares, digests)
    cursor = start if options.start is None else start.at(options.start)
    cursor = cursor.after(options.start_step)._replace(stride=options.stride)
    alone = sources[0].stored.splits.get(options.split)
    if not all(splits):
        return ReadPlan(
            sources, None, cursor, alone.num_records / shares.each if alone else math.nan
        )
    return ReadPlan(sources, orders, cursor, sum(x.lane_length for x in orders) / shares.each)


def _order(options: TrainOptions, split: IndexedSplit) -> Order:
    """The order of a source alone."""
    kept = kept_records(options)
    try:
        return Order(split.index.shard_lengths, options.order, kept)
    except ValueError as error:
        raise ValueError(f'{options.stored.folder}: {error}') from error


def _check_apart(sources: Sequence[MixSource], orders: Sequence[Order]) -> None:
    """Raises a ValueError if two sources would run in lockstep, or have one digest."""
    # Seed and number of records decide the rotation of each epoch. Where both are equal, records of
    # nearly the same places come together, even if a few shards have other lengths.
    first: dict[tuple[int, int], MixSource] = {}
    for source, order in zip(sources, orders, strict=False):
        key = order.num_records, order.settings.seed % 2**64  # as hashes take it
        if (other := first.setdefault(key, source)) is not source:
            places = ' and '.join(f'{x.name!r} ({x.stored.folder})' for x in (other, source))
            raise ValueError(
                f'mix has {places} with {order.num_records:,} records each and one seed: they '
                f"would come in lockstep. Give {source.name!r} a 'seed' of its own, or one data "
                "set only once, with several texts as its 'text'."
            )


def train_batches(options: TrainOptions, opened: Sequence[Opened]) -> Batches:
    """Implements `input_pipeline.train_batches`."""
    reader = TrainReader(options, opened)
    return Batches(
        functools.partial(reader.read, own_lanes(options.lanes, *options.process)),
        reader.plan.cursor,
        reader.spec(options.local_size),
        reader.plan.steps_per_epoch,
        options.process,
        options.batches_ahead,
        reader.memory_need,
    )


class _SourceReader(SplitReader):
    """Reads samples of lanes of one source in the planned order."""

    def __init__(
        self, options: TrainOptions, opened: Opened, order: Order, text: texts.TextMixture
    ):
        self.order = order
        super().__init__(
            options,
            opened,
            text,
            seed=options.seed,
            caption_dropout=options.caption_dropout,
            with_mask=options.on_bad_records == damage.SKIP,
        )

    def read(
        self, lanes: range, each: int, start: int, stride: int, parallel_reads: int
    ) -> Iterator[Part]:
        """Yields some lanes' part of every `stride`-th batch, without end.

        A batch takes `each` samples of every lane; there are `start` samples before the first.
        """
        options = self.options
        in_flight = len(lanes) * parallel_reads
        # Lanes that are read apart all plan a block before the first batch.
        is_whole = len(lanes) == self.order.settings.lanes // options.process_count
        block_rows = 0 if self.is_mapped and is_whole else in_flight * options.chunk
        blocks = train_blocks(self.order, lanes, each, start, stride, block_rows)
        return self.read_blocks(blocks, in_flight)


class TrainReader:
    """Reads the samples of some lanes of all sources.

    Attributes:
        plan: The sequence of batches.
    """

    def __init__(self, options: TrainOptions, opened: Sequence[Opened]):
        """Raises a ValueError for settings that do not fit each other or the data sets."""
        self.plan, self._options = plan(options), options
        orders = self.plan.orders
        assert orders is not None, 'what is opened has a chunk index'
        chosen = choose_texts(options.sources, options.text, options.features)
        self._readers = [
            _SourceReader(options.alone(source), *reads)
            for source, reads in zip(
                options.sources, zip(opened, orders, chosen, strict=True), strict=True
            )
        ]
        self._check_specs()
        for line in self.plan.cursor.shares.summary if len(chosen) > 1 else ():
            logging.info('mixture: %s', line)

    @property
    def memory_need(self) -> memory.Need | None:
        """The memory that reading takes; None if it takes little."""
        options, readers = self._options, [x for x in self._readers if not x.is_mapped]
        if not readers:
            return None
        of_rows = [
            (_CAPTION_NBYTES if dtype.hasobject else dtype.itemsize) * math.prod(shape)
            for reader in readers
            for shape, dtype in reader.spec(1).values()
        ]
        return memory.Need(
            lanes=options.lanes // options.process_count,
            window=max(x.order.window for x in readers),
            in_flight=options.parallel_reads * options.chunk,
            rows_ready=(options.batches_ahead + 1) * options.local_size,
            row_nbytes=sum(of_rows),
            raw_nbytes=sum(x.raw_nbytes for x in readers),
        )

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Shape and dtype of each array in batches of `size` rows, of the first source's shape."""
        return self._readers[0].spec(size)

    def read(self, lanes: range, cursor: Cursor, together: int = 0) -> Iterator[Batch]:
        """Yields some lanes' part of the batches from a cursor on, without end.

        With `together`, the samples that one lane gives to that many steps come as one batch.
        """
        while True:
            stage = cursor.shares.stage(cursor.position.step)
            yield from self._read_stage(lanes, cursor, stage, together)
            cursor = cursor.after(int(-(-(stage.end - cursor.position.step) // cursor.stride)))

    def _read_stage(
        self, lanes: range, cursor: Cursor, stage: Stage, together: int
    ) -> Iterator[Batch]:
        """Yields the batches up to the end of the stage."""
        shapes = sorted(set(stage.cycle.tolist()))
        stride = cursor.stride if len(shapes) == 1 else 1
        steps = {x: self._steps(lanes, cursor, stage, x, stride, together) for x in shapes}
        first = at = cursor.position.step
        while at < stage.end:
            batch = next(steps[stage.shape(at)])
            # Of several shapes, batches that are not wanted are found, but not gathered.
            if stride == cursor.stride or (at - first) % cursor.stride == 0:
                yield batch(stage.end - at)
            at += stride * max(1, together)

    def _steps(
        self, lanes: range, cursor: Cursor, stage: Stage, shape: int, stride: int, together: int
    ) -> Iterator[Callable[[float], Batch]]:
        """Returns an iterator over the batches of a shape, for a limited number of steps."""
        members = stage.members(shape)
        # Several steps of a source are found at once, so that NumPy's calls cost as little as in
        # batches of one source.
        at_once = together or (len(members) if stride == 1 else 1)
        samples = cursor.position.samples
        parallel = self._options.parallel_reads
        streams = [
            self._readers[i].read(
                lanes,
                stage.counts[i] * at_once,
                samples[i],
                stride,
                -(-parallel * stage.counts[i] // cursor.shares.each),
            )
            for i in members
        ]
        for parts in zip(*streams, strict=True):
            if len(members) == at_once == 1:
                yield functools.partial(_whole, parts[0])
                continue
            split: list[Part] = [
                {name: x.reshape(len(lanes), at_once, -1, *x.shape[1:]) for name, x in part.items()}
                for part in parts
            ]
            for first in range(0, at_once, together or 1):
                yield functools.partial(_join, split, first, together or 1)

    def _check_specs(self) -> None:
        """Raises a ValueError if sources have columns of other shapes or dtypes."""
        specs = [reader.spec(1) for reader in self._readers]
        for source, spec in zip(self.plan.sources, specs, strict=True):
            for name, found in spec.items():
                if name != schema.LATENTS and found != specs[0][name]:
                    raise ValueError(
                        f'{source.stored.folder}: {name!r} is {found.dtype} {found.shape[1:]}, '
                        f'expected {specs[0][name].dtype} {specs[0][name].shape[1:]} as in '
                        f'{self.plan.sources[0].stored.folder}'
                    )


def _whole(part: Part, limit: float) -> Batch:
    return {name: gathered(x) for name, x in part.items()}


def _join(parts: list[Part], first: int, count: int, limit: float) -> Batch:
    """Joins some steps of all sources; a part is `(lanes, steps, samples, ...)`.

    A batch is in the order of the lanes and, within a lane, of the sources.
    """
    some = slice(first, first + int(min(count, limit)))
    batch = {}
    for name in parts[0]:
        values = [part[name][:, some] for part in parts]
        places = [x for x in values if isinstance(x, InMemory)]
        if len(places) == len(values):
            joined: np.ndarray | InMemory = join_places(places)
        else:
            joined = np.concatenate([gathered(x) for x in values], axis=2)
        batch[name] = gathered(joined.reshape(-1, *joined.shape[3:]))
    return batch
