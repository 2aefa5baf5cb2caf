"""Plans and reads the training samples of one data set or of a mixture.

Each source is read by rows or by chunks, in its own sequence; a batch joins their shares. A lane is
one of the streams of samples that give each batch an equal share, and each process reads some of
them. A stage is a range of steps in which the sources have constant weights. A mixture may have
latents of several shapes; each batch has one of them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.memory.files import MappedFiles
from coyo11m_tfds.reading import damage
from coyo11m_tfds.reading.batches import ArraySpec, Batch, Batches, MemoryNeed
from coyo11m_tfds.reading.engines import SplitReader, kept_records
from coyo11m_tfds.reading.opened_splits import OpenedSplit, engine_name, open_splits
from coyo11m_tfds.reading.options import MixSource, TrainOptions, check_latents, choose_texts
from coyo11m_tfds.sampling.mixture import BatchShares, Cursor, Position, Stage
from coyo11m_tfds.sampling.order import Order, train_blocks
from coyo11m_tfds.storage import json_digest

# Bytes of a long caption as an object of Python, with its pointer in the array.
_CAPTION_NBYTES = 600


class ReadPlan(NamedTuple):
    """The sequence of batches that training reads from its opened sources."""

    options: TrainOptions
    splits: tuple[OpenedSplit, ...] | None  # None for a single source without a chunk index
    orders: tuple[Order, ...] | None  # None without a chunk index
    cursor: Cursor  # of the first batch
    steps_per_epoch: float  # samples of all sources divided by the batch size; NaN if unknown

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            'a ReadPlan cannot be pickled or copied, because it caches orders of this process: '
            'make it in each process, by train_plan with the same arguments'
        )

    @property
    def sources(self) -> tuple[MixSource, ...]:
        """The opened data sets."""
        return self.options.sources

    @property
    def engine(self) -> str:
        """The engine that reads: 'rows', 'chunks' (also for one of several), or 'tf_data'."""
        return engine_name(self.options, self.splits)


def plan_training(options: TrainOptions) -> ReadPlan:
    """Returns the plan of the training samples from the first batch on.

    Reads the columns of conditions. Raises a ValueError for sources that cannot be mixed.
    """
    sources = options.sources
    splits = open_splits(options, options.lanes)
    per_source = [options.for_source(source) for source in sources]
    orders = None
    if splits:
        orders = tuple(map(_make_order, per_source, splits))
        _check_no_lockstep(sources, orders)
    check_latents(sources)
    shares = _share_batches(options, has_lanes=bool(orders))
    # From the beginning of the data, and then to the first batch.
    beginning = Position(0, (0,) * len(sources))
    digests = tuple(_order_digest(x, has_lanes=bool(orders)) for x in per_source)
    cursor = Cursor(beginning, shares, digests)
    if options.start is not None:
        cursor = cursor.at(options.start)
    # The stride begins with the first batch, and not with the beginning of the data.
    cursor = cursor.after(options.start_step)._replace(stride=options.stride)
    if orders:
        lane_length = sum(order.lane_length for order in orders)
        steps_per_epoch = lane_length / shares.per_lane
    else:
        # Mock data do not say how many records they have.
        split = sources[0].stored.splits.get(options.split)
        steps_per_epoch = math.nan
        if split:
            steps_per_epoch = split.num_records / options.batch_size
    return ReadPlan(options, splits, orders, cursor, steps_per_epoch)


def _share_batches(options: TrainOptions, has_lanes: bool) -> BatchShares:
    """Returns how many samples each source gives to each batch."""
    sources = options.sources
    # Crops have the shape of the latents without the axis of the crops.
    shapes = []
    if len(sources) > 1:
        for source in sources:
            dtype, shape = source.stored.latents
            shapes.append((dtype, shape[1:]))
    # Without a chunk index there are no lanes: a batch is the share of one.
    per_lane = options.batch_size
    if has_lanes:
        per_lane //= options.lanes
    return BatchShares(
        per_lane=per_lane,
        weights=[source.weight for source in sources],
        stages=options.stages,
        shapes=shapes,
        names=[source.name for source in sources],
    )


def _make_order(options: TrainOptions, opened: OpenedSplit) -> Order:
    """Returns the order of a source; its errors name the data set, which `Order` does not know."""
    kept = kept_records(options)
    try:
        return Order(opened.indexed.index.shard_lengths, options.order, kept)
    except ValueError as error:
        raise ValueError(f'{options.stored.folder}: {error}') from error


def _order_digest(options: TrainOptions, has_lanes: bool) -> str:
    """Returns the digest of a source's data and order, under which a state has its position."""
    order = dataclasses.asdict(options.order)
    # An ordinary shuffle is the same with any number of lanes.
    if not has_lanes:
        order['lanes'] = 1
    identity = options.source.identity(options.split)
    return json_digest.sha256(identity | order)[:16]


def _check_no_lockstep(sources: Sequence[MixSource], orders: Sequence[Order]) -> None:
    """Raises a ValueError if two sources would run in lockstep, or have one digest."""
    # Seed and number of records decide the rotation of each epoch. Where both are equal, records
    # at nearly the same positions come together, even if a few shards have other lengths.
    firsts: dict[tuple[int, int], MixSource] = {}
    for source, order in zip(sources, orders, strict=True):
        key = order.num_records, order.settings.seed % 2**64  # as hashes take it
        first = firsts.setdefault(key, source)
        if first is not source:
            pair = ' and '.join(f'{x.name!r} ({x.stored.folder})' for x in (first, source))
            raise ValueError(
                f'mix has {pair} with {order.num_records:,} records each and the same seed: they '
                f"would come in lockstep. Give {source.name!r} a 'seed' of its own, or list a data "
                "set only once, with several texts as its 'text'."
            )


def read_plan(plan: ReadPlan) -> Batches:
    """Reads the batches of a plan whose sources have chunk indexes."""
    reader = TrainReader(plan)
    options = plan.options
    return Batches(
        functools.partial(reader.read, options.own_lanes),
        plan.cursor,
        reader.spec(options.local_batch_size),
        plan.steps_per_epoch,
        options.process,
        options.batches_ahead,
        options.describe(plan.engine),
        reader.memory_need,
    )


class TrainReader:
    """Reads the batches of a plan, or the share of some lanes in them."""

    def __init__(self, plan: ReadPlan):
        """Raises a ValueError for options that do not fit each other or the data sets."""
        self.plan = plan
        self._options = plan.options
        assert plan.splits is not None and plan.orders is not None, 'there is a chunk index'
        self._orders = plan.orders
        # Padded to the longest text of all sources, so that their rows fit into one batch.
        mixtures = choose_texts(plan.sources, plan.options.text, plan.options.feature_names)
        self._readers = []
        # One range of memory for all sources, so that a batch has places of them together.
        mapped_files = MappedFiles()
        for source, split, text in zip(plan.sources, plan.splits, mixtures, strict=True):
            options = plan.options.for_source(source)
            reader = SplitReader(
                options,
                split,
                text,
                seed=options.seed,
                caption_dropout=options.caption_dropout,
                with_mask=options.on_bad_records == damage.SKIP,
                mapped_files=mapped_files,
            )
            self._readers.append(reader)
        self._check_specs()
        if len(mixtures) > 1:
            for line in plan.cursor.shares.summary:
                logging.info('mixture: %s', line)

    @property
    def memory_need(self) -> MemoryNeed | None:
        """The memory that reading takes; None if it takes little."""
        options = self._options
        windows = []
        row_nbytes = 0
        raw_nbytes = 0
        # Of all sources together, as each keeps a block of its own.
        for order, reader in zip(self._orders, self._readers, strict=True):
            # Rows of mapped files take the memory of the batches alone.
            if reader.is_mapped:
                continue
            windows.append(order.window)
            raw_nbytes += reader.raw_nbytes
            for shape, dtype in reader.spec(1).values():
                itemsize = _CAPTION_NBYTES if dtype.hasobject else dtype.itemsize
                row_nbytes += itemsize * math.prod(shape)
        if not windows:
            return None
        return MemoryNeed(
            lanes=len(options.own_lanes),
            window=max(windows),
            in_flight=options.parallel_reads * options.chunk,
            # The batches that are ready, and the one that is in use.
            rows_ready=(options.batches_ahead + 1) * options.local_batch_size,
            row_nbytes=row_nbytes,
            raw_nbytes=raw_nbytes,
        )

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Returns shape and dtype of each array in batches of `size` rows.

        Latents have the shape of the first source.
        """
        return self._readers[0].spec(size)

    def read(self, lanes: range, cursor: Cursor, steps_per_item: int = 0) -> Iterator[Batch]:
        """Yields the share of some lanes in the batches from a cursor on, without end.

        With `steps_per_item`, the samples of one lane for so many steps come as one batch.
        """
        while True:
            step = cursor.position.step
            stage = cursor.shares.stage_at(step)
            yield from self._read_stage(lanes, cursor, stage, steps_per_item)
            # The next step of the stride may come some steps after the end of the stage.
            num_steps = int(stage.end) - step
            cursor = cursor.after(-(-num_steps // cursor.stride))

    def _read_stage(
        self, lanes: range, cursor: Cursor, stage: Stage, steps_per_item: int
    ) -> Iterator[Batch]:
        """Yields the share of some lanes in the batches from a cursor to the end of its stage."""
        # A shape's batches are read when the first of them comes.
        iterators: dict[int, Iterator[Batch]] = {}
        step = cursor.position.step
        while step < stage.end:
            shape = stage.shape(step)
            if shape not in iterators:
                iterators[shape] = self._read_shape(lanes, cursor, stage, shape, steps_per_item)
            batch = next(iterators[shape])
            # The last item of a lane may have more steps than the stage.
            if step + steps_per_item > stage.end:
                size = int(stage.end - step) * cursor.shares.per_lane
                batch = {name: x[:size] for name, x in batch.items()}
            yield batch
            # 0 stands for batches of one step.
            step += cursor.stride * max(1, steps_per_item)

    def _read_shape(
        self, lanes: range, cursor: Cursor, stage: Stage, shape: int, steps_per_item: int
    ) -> Iterator[Batch]:
        """Returns the batches of a shape, each joined of the sources that have latents of it."""
        members = stage.members(shape)
        steps_per_batch = max(1, steps_per_item)
        steps = steps_per_batch
        # Several steps of a source are read at once, so that the cost of NumPy's calls is as small
        # as in batches of one source.
        if not steps_per_item and cursor.stride == 1:
            steps = len(members)
        # Where all files are mapped, the places of latents are joined, and latents copied once.
        has_places = all(self._readers[number].is_mapped for number in members)
        shares = []
        for number in members:
            share = self._read_source(number, lanes, cursor, stage, steps, has_places)
            shares.append(share)
        batches = _join_sources(shares, len(lanes), steps, steps_per_batch)
        # Any of them: places are numbers in the one range that all sources share.
        reader = self._readers[members[0]].mapped_reader
        if reader and has_places:
            return map(reader.gather_latents, batches)
        return batches

    def _read_source(
        self,
        number: int,
        lanes: range,
        cursor: Cursor,
        stage: Stage,
        steps: int,
        has_places: bool,
    ) -> Iterator[Batch]:
        """Returns the share of a source in the batches of the stride, or in `steps` at once.

        With `has_places`, batches have the places of latents in mapped files.
        """
        options = self._options
        reader = self._readers[number]
        # The sources of a batch share the reads that a lane may have in flight. Rounded up, so that
        # each has at least one.
        count = stage.counts[number]
        in_flight_per_lane = -(-options.parallel_reads * count // cursor.shares.per_lane)
        in_flight = len(lanes) * in_flight_per_lane
        # Fetched blocks take memory. And readers of single lanes all plan a block before the
        # first batch.
        is_small = not reader.is_mapped or len(lanes) < len(options.own_lanes)
        # With a stride of 1, all batches of the shape are read, some `steps` together.
        numbers: Iterator[int] = itertools.count()
        if cursor.stride > 1:
            shape = stage.shapes[number]
            numbers = _batches_of_shape(stage, shape, cursor.position.step, cursor.stride)
        # 0 for as many rows as cost little to plan.
        block_rows = 0
        if is_small:
            block_rows = in_flight * options.chunk
        blocks = train_blocks(
            self._orders[number],
            lanes,
            count * steps,
            cursor.position.samples[number],
            numbers,
            block_rows=block_rows,
        )
        if has_places:
            return reader.read_mapped(blocks)
        return reader.read_blocks(blocks, in_flight)

    def _check_specs(self) -> None:
        """Raises a ValueError if sources have columns of other shapes or dtypes."""
        specs = [reader.spec(1) for reader in self._readers]
        first_source = self.plan.sources[0]
        for source, source_specs in zip(self.plan.sources, specs, strict=True):
            for name, spec in source_specs.items():
                expected = specs[0][name]
                # Latents of another shape come in batches of their own.
                if name == schema.LATENTS or spec == expected:
                    continue
                raise ValueError(
                    f'{source.stored.folder}: {name!r} is {spec.dtype} {spec.shape[1:]}, expected '
                    f'{expected.dtype} {expected.shape[1:]} as in {first_source.stored.folder}'
                )


def _batches_of_shape(stage: Stage, shape: int, first: int, stride: int) -> Iterator[int]:
    """Yields the numbers of the batches of a shape that come at every `stride`-th step.

    Batches are numbered among those of the shape, from step `first` on.
    """
    number = 0
    for step in itertools.count(first):
        if stage.shape(step) == shape:
            if (step - first) % stride == 0:
                yield number
            number += 1


def _join_sources(
    sources: Sequence[Iterator[Batch]], lanes: int, steps: int, steps_per_batch: int
) -> Iterator[Batch]:
    """Yields batches of `steps_per_batch` steps that join the shares of all sources.

    Each source yields its share of `steps` steps at once.
    """
    for shares in zip(*sources, strict=True):
        # Nothing to join: the batch is not copied.
        if len(sources) == steps == 1:
            yield shares[0]
            continue
        # The axis of the rows becomes three: lanes, steps, and samples of a lane in a step.
        by_lane = []
        for share in shares:
            arrays = {}
            for name, x in share.items():
                arrays[name] = x.reshape(lanes, steps, -1, *x.shape[1:])
            by_lane.append(arrays)
        for first in range(0, steps, steps_per_batch):
            yield _join_shares(by_lane, slice(first, first + steps_per_batch))


def _join_shares(shares: list[Batch], steps: slice) -> Batch:
    """Returns some steps of all sources, with arrays `(lanes, steps, samples, ...)`, as a batch."""
    batch = {}
    for name in shares[0]:
        # A batch is in the order of the lanes and, within a lane, of the sources.
        by_source = [share[name][:, steps] for share in shares]
        values = np.concatenate(by_source, axis=2)
        batch[name] = values.reshape(-1, *values.shape[3:])
    return batch
