"""Reads a split with a chunk index: by rows of mapped files, or by chunks that are fetched.

    opened = engines.open_sources(asked)                     # None without a chunk index
    batches = engines.train_batches(Training(data=path, batch_size=256, ...), opened)
    batches = engines.eval_batches(Reading(data=path, batch_size=256, ...), opened)

By rows, memory holds no windows: the plan names the records, and each batch is gathered from the
page cache when it is needed. The reader announces the rows of later batches to the system, so that
the disk reads them in advance.

By chunks, a block of batches is filled chunk by chunk. One request fetches a chunk. Its records are
found, compared with their checksums and gathered as in mapped files, and its bytes are dropped.
While the loop uses one block, the next one is filled.

Each source of a mixture is read in one of these ways, in its own sequence. A batch joins the parts
of its sources: by rows, one call gathers the values of all sources.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit, StoredDataset
from coyo11m_tfds.reading import damage, memory, process_settings
from coyo11m_tfds.reading.batches import MASK, Ahead, ArraySpec, Batch, Batches
from coyo11m_tfds.reading.column_reader import ColumnReader, open_column
from coyo11m_tfds.reading.damage import BadRecords
from coyo11m_tfds.reading.files import MAX_FILES, FetchedFiles, Range, ReadCounter
from coyo11m_tfds.reading.filters import Kept
from coyo11m_tfds.reading.mixture import Place, Position, Rule, Stage
from coyo11m_tfds.reading.order import (
    Block,
    Order,
    OrderSettings,
    check_share,
    eval_blocks,
    own_lanes,
    train_blocks,
)
from coyo11m_tfds.reading.row_reader import (
    InMemory,
    Part,
    RowChoices,
    RowReader,
    gathered,
    join_places,
)
from coyo11m_tfds.reading.settings import AUTO, CHUNKS, ROWS, TF_DATA, Reading, Training
from coyo11m_tfds.reading.sources import Source, check_latents, choose_texts
from coyo11m_tfds.storage import json_digest

# Bytes of a long caption as an object of Python, with its place in the array.
_CAPTION_NBYTES = 600

# How often a chunk with a damaged record is fetched: its bytes may have been changed on the way.
_ATTEMPTS = 3

# At least so many records of chunks are gathered together, so that NumPy's calls cost little.
_GROUP_RECORDS = 1024

# How keys are read that a condition compares.
_KEYS_CHUNK, _KEYS_IN_FLIGHT = 256, 16

# The ranges of files that hold the values of its records; the first one has the records.
_Chunk = tuple[Range, ...]


class Opened(NamedTuple):
    """A split with a chunk index, and the engine that reads it."""

    split: IndexedSplit
    engine: str


def open_sources(asked: Reading) -> list[Opened] | None:
    """Opens the split of each source; None for a single source without a chunk index.

    Raises:
        ValueError: As `open_split`; or a source has no chunk index although it is one of several or
            has a condition.
        OSError: A chunk index cannot be read.
    """
    found = [open_split(x.stored, asked.split, asked.engine) for x in asked.sources]
    if opened := [x for x in found if x]:
        if len(opened) == len(found):
            return opened
    elif len(found) == 1 and not asked.source.where:
        return None
    without = asked.sources[found.index(None)].stored.folder
    raise ValueError(f'{without}: has no chunk index, and so can be neither mixed nor filtered')


def open_split(stored: StoredDataset, name: str, engine: str) -> Opened | None:
    """Opens a split to read it by rows or by chunks; None without a chunk index.

    Raises:
        ValueError: The split does not exist, or `engine` is 'rows' and its files cannot be mapped.
        OSError: The chunk index cannot be read.
    """
    split = None if stored.is_remote and engine == ROWS else stored.split(name)
    if split is None and engine == ROWS:
        raise ValueError(
            f'{stored.folder}: engine={ROWS!r} reads local data sets with a chunk index of split '
            f'{name!r} and no latents on gs://, which this is not: set engine={CHUNKS!r}'
        )
    if split is None:
        return None
    if engine in (AUTO, TF_DATA):
        by_rows = not stored.is_remote and len(split.index.shard_lengths) <= MAX_FILES
        engine = ROWS if by_rows else CHUNKS
    return Opened(split, engine)


def kept_records(source: Source, split: str) -> Kept | None:
    """Returns the records of a split that a source's condition keeps; None for all."""

    def keys(at_once: int) -> Iterator[np.ndarray]:
        asked = Reading(
            data=source.stored,
            batch_size=at_once,
            features=(schema.KEY,),
            process_index=0,
            process_count=1,
            split=split,
            chunk=_KEYS_CHUNK,
            on_bad_records=damage.STOP,
            max_bad_fraction=0.0,
            counter=None,
            parallel_reads=_KEYS_IN_FLIGHT,
            prefetch=1,
            engine=AUTO,
            verify=damage.ALWAYS,
            text='',
        )
        opened = open_sources(asked)
        assert opened, 'a source with a condition has a chunk index'
        for batch in EvalReader(asked, opened[0]).read():
            yield batch[schema.KEY][batch[MASK]]

    return source.kept(split, keys)


# --- Batches that know their place ---------------------------------------------------------------


class Plan(NamedTuple):
    """The sequence of batches that training reads from its sources.

    Attributes:
        sources: The sources.
        orders: Order of each source's samples; None for a single source without a chunk index.
        place: Place of the first batch.
        steps_per_epoch: Number of samples of all sources divided by the batch size; NaN if unknown.
    """

    sources: tuple[Source, ...]
    orders: tuple[Order, ...] | None
    place: Place
    steps_per_epoch: float


def plan(
    sources: tuple[Source, ...],
    settings: OrderSettings,
    batch_size: int,
    split: str,
    stages: Sequence[Mapping[str, Any]] = (),
) -> Plan:
    """Plans the training samples; reads the columns that conditions compare.

    Raises:
        ValueError: Settings do not fit each other or the data sets.
        OSError: A chunk index or a column cannot be read.
    """
    found = [x.stored.split(split) for x in sources]
    orders = None
    if all(found):
        orders = tuple(
            _order(source, split, of_source.index.shard_lengths, settings)
            for source, of_source in zip(sources, found, strict=True)
            if of_source
        )
    check_latents(sources)
    rule = Rule(
        max(1, batch_size // settings.lanes),
        [x.weight for x in sources],
        stages,
        [_shape_and_dtype(x) for x in sources] if len(sources) > 1 else [()],
        [x.name for x in sources],
    )
    told = dataclasses.asdict(settings)
    digests = tuple(json_digest.sha256({**x.identity(split), **told})[:16] for x in sources)
    place = Place(Position(0, (0,) * len(sources)), rule, digests)
    alone = sources[0].stored.splits.get(split)
    samples = alone.num_records // settings.lanes if alone else math.nan
    if orders:
        samples = sum(x.lane_length for x in orders)
    return Plan(sources, orders, place, samples / rule.each)


def _shape_and_dtype(source: Source) -> tuple[str, tuple[int, ...]]:
    """Those of one crop."""
    dtype, shape = source.stored.latents
    return dtype, shape[1:]


def _order(source: Source, split: str, shard_lengths: np.ndarray, settings: OrderSettings) -> Order:
    kept = kept_records(source, split)
    try:
        return Order(shard_lengths, settings, kept)
    except ValueError as error:
        raise ValueError(f'{source.stored.folder}: {error}') from error


def plan_training(asked: Training) -> Plan:
    """Returns the plan that begins at the first batch of `asked`."""
    found = plan(asked.sources, asked.order, asked.batch_size, asked.split, asked.stages)
    place = found.place if asked.start is None else found.place.at(asked.start)
    place = place.after(asked.start_step)._replace(stride=asked.stride)
    return found._replace(place=place)


def train_batches(asked: Training, opened: Sequence[Opened]) -> Batches:
    """Implements `input_pipeline.train_batches`."""
    reader = TrainReader(asked, opened)
    lanes = own_lanes(asked.lanes, *asked.process)

    def read(place: Place) -> Iterator[Batch]:
        return reader.read(lanes, place)

    return training(asked, reader.plan, reader.spec(asked.local_size), read, reader.memory_need)


def training(
    asked: Training,
    plan: Plan,
    spec: Mapping[str, ArraySpec],
    read: Callable[[Place], Iterator[Batch]],
    need: memory.Need | None = None,
) -> Batches:
    """Returns the training batches that `read` yields from a place on."""
    return Batches(
        read,
        plan.place,
        spec,
        plan.steps_per_epoch,
        asked.process,
        asked.batches_ahead,
        need,
    )


def eval_batches(asked: Reading, opened: Opened) -> Batches:
    """Implements `input_pipeline.eval_batches`."""
    reader = EvalReader(asked, opened)
    return evaluation(asked, reader.spec(asked.local_size), reader.num_batches, reader.read)


def evaluation(
    asked: Reading,
    spec: Mapping[str, ArraySpec],
    num_batches: int,
    read: Callable[[int], Iterator[Batch]],
) -> Batches:
    """Returns all batches of an evaluation; `read(n)` yields those after the first n.

    The samples in a state count those of all processes.
    """
    parts = [asked.source.identity(asked.split), asked.batch_size, asked.process_count]
    digest = json_digest.sha256(parts)[:16]
    place = Place(Position(0, (0,)), Rule(asked.batch_size), (digest,))
    return Batches(
        lambda place: read(place.position.step),
        place,
        spec,
        num_batches,
        asked.process,
        asked.batches_ahead,
    )


# --- Readers of a split --------------------------------------------------------------------------


class _SplitReader:
    """Reads blocks of rows of one split; counts bad records of all of them together."""

    def __init__(self, asked: Reading, opened: Opened, text: texts.Chosen, **choices: Any):
        self._split, self._asked, stored = opened.split, asked, asked.stored
        _check_text(stored.folder, text, asked)
        num_records = int(self._split.index.shard_lengths.sum())
        found = stored.find_columns(asked.features, text)
        where = stored.folder, asked.split, num_records
        try:
            self._columns = {name: open_column(found[name], *where) for name in found}
        except ValueError as error:
            raise DamagedError(*error.args) from error
        of_columns = {x: ArraySpec(c.shape, c.dtype) for x, c in self._columns.items()}
        self._choices = RowChoices(
            tuple(asked.features),
            stored_rows(stored) | of_columns,
            text=text if text.in_columns or text.size > text.texts[0].size else None,
            **choices,
        )
        stored.check_features(sorted(self._choices.in_records))
        process_settings.keep_freed_memory()
        self._bad_records = BadRecords(
            asked.on_bad_records, asked.max_bad_fraction, num_records, asked.counter
        )
        self._mapped = self._row_reader(None) if opened.engine == ROWS else None

    @property
    def raw_nbytes(self) -> int:
        """Bytes of a sample in the files."""
        of_columns = sum(column.row_nbytes for column in self._columns.values())
        return self._split.record_nbytes + of_columns

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Shape and dtype of each array in batches of `size` rows."""
        return self._choices.spec(size)

    def _read(self, blocks: Iterator[Block], in_flight: int) -> Iterator[Part]:
        """The batches of all blocks, one after the other; so many chunks come at a time."""
        split, counter = self._split, self._asked.counter
        if self._mapped:
            return _read_rows(self._mapped, blocks, counter)
        at_once = in_flight * (1 + len(self._columns))
        files = FetchedFiles(split.file, split.file_sizes, at_once, counter)
        reader = self._row_reader(files)
        return _ChunkReader(split, reader, files, self._asked.chunk).read(blocks)

    def _row_reader(self, files: FetchedFiles | None) -> RowReader:
        return RowReader(
            self._split,
            self._choices,
            self._asked.stored.record_layout,
            verify=damage.ALWAYS if files else self._asked.verify,
            bad_records=self._bad_records,
            columns={name: ColumnReader(opened, files) for name, opened in self._columns.items()},
            files=files,
        )


class _SourceReader(_SplitReader):
    """Reads samples of lanes of one source in the planned order.

    Attributes:
        order: Order of the samples.
    """

    def __init__(self, asked: Training, opened: Opened, order: Order, text: texts.Chosen):
        """Raises a ValueError for settings that do not fit each other or the data set."""
        self.order = order
        super().__init__(
            asked,
            opened,
            text,
            seed=asked.seed,
            caption_dropout=asked.caption_dropout,
            with_mask=asked.on_bad_records == damage.SKIP,
        )

    @property
    def is_mapped(self) -> bool:
        """True if it needs no memory for windows."""
        return self._mapped is not None

    def read(
        self, lanes: range, each: int, start: int, stride: int, parallel_reads: int
    ) -> Iterator[Part]:
        """Some lanes' part of every `stride`-th batch, without end.

        A batch takes `each` samples of every lane; there are `start` samples before the first.
        """
        asked = self._asked
        in_flight = len(lanes) * parallel_reads
        # Lanes that are read apart all plan a block before the first batch.
        is_whole = len(lanes) == self.order.settings.lanes // asked.process_count
        block_rows = 0 if self._mapped and is_whole else in_flight * asked.chunk
        blocks = train_blocks(self.order, lanes, each, start, stride, block_rows)
        return self._read(blocks, in_flight)


class TrainReader:
    """Reads the samples of some lanes of all sources.

    Attributes:
        plan: The sequence of batches.
    """

    def __init__(self, asked: Training, opened: Sequence[Opened]):
        """Raises a ValueError for settings that do not fit each other or the data sets."""
        check_share(asked.batch_size, *asked.process, asked.lanes)
        self.plan, self._asked = plan_training(asked), asked
        orders = self.plan.orders
        assert orders is not None, 'what is opened has a chunk index'
        chosen = choose_texts(asked.sources, asked.text, asked.features)
        self._readers = [
            _SourceReader(asked.alone(source), *reads)
            for source, reads in zip(
                asked.sources, zip(opened, orders, chosen, strict=True), strict=True
            )
        ]
        self._check_specs()
        for line in self.plan.place.rule.told if len(chosen) > 1 else ():
            logging.info('mixture: %s', line)

    @property
    def has_one_shape(self) -> bool:
        """Whether all batches have the same shapes and dtypes."""
        specs = [x.spec(1) for x in self._readers]
        return all(x == specs[0] for x in specs)

    @property
    def memory_need(self) -> memory.Need | None:
        """The memory that reading takes; None if it takes little."""
        asked, readers = self._asked, [x for x in self._readers if not x.is_mapped]
        if not readers:
            return None
        of_rows = [_row_nbytes(*x) for reader in readers for x in reader.spec(1).values()]
        return memory.Need(
            lanes=asked.lanes // asked.process_count,
            window=max(x.order.window for x in readers),
            in_flight=asked.parallel_reads * asked.chunk,
            rows_ready=(asked.batches_ahead + 1) * asked.local_size,
            row_nbytes=sum(of_rows),
            raw_nbytes=sum(x.raw_nbytes for x in readers),
        )

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Shape and dtype of each array in batches of `size` rows, of the first source's shape."""
        return self._readers[0].spec(size)

    def read(self, lanes: range, place: Place, together: int = 0) -> Iterator[Batch]:
        """Some lanes' part of the batches from a place on, without end.

        With `together`, the samples that one lane gives to that many steps come as one batch.
        """
        while True:
            stage = place.rule.stage(place.position.step)
            yield from self._read_stage(lanes, place, stage, together)
            place = place.after(int(-(-(stage.end - place.position.step) // place.stride)))

    def _read_stage(
        self, lanes: range, place: Place, stage: Stage, together: int
    ) -> Iterator[Batch]:
        """The batches up to the end of the stage."""
        shapes = sorted(set(stage.cycle.tolist()))
        stride = place.stride if len(shapes) == 1 else 1
        steps = {x: self._steps(lanes, place, stage, x, stride, together) for x in shapes}
        first = at = place.position.step
        while at < stage.end:
            batch = next(steps[stage.shape(at)])
            # Of several shapes, batches that are not wanted are found, but not gathered.
            if stride == place.stride or (at - first) % place.stride == 0:
                yield batch(stage.end - at)
            at += stride * max(1, together)

    def _steps(
        self, lanes: range, place: Place, stage: Stage, shape: int, stride: int, together: int
    ) -> Iterator[Callable[[float], Batch]]:
        """What gives the batches of a shape, in turn, for so many steps at most."""
        members = stage.members(shape)
        # Several steps of a source are found at once, so that NumPy's calls cost as little as in
        # batches of one source.
        at_once = together or (len(members) if stride == 1 else 1)
        samples = place.position.samples
        parallel = self._asked.parallel_reads
        streams = [
            self._readers[i].read(
                lanes,
                stage.counts[i] * at_once,
                samples[i],
                stride,
                -(-parallel * stage.counts[i] // place.rule.each),
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
    """Some steps of all sources; a part is `(lanes, steps, samples, ...)`.

    In a batch come lane after lane and, of a lane, source after source.
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


class EvalReader(_SplitReader):
    """Reads one process's part of all records once, in the order of the shards.

    Attributes:
        num_batches: Number of batches that every process reads.
    """

    def __init__(self, asked: Reading, opened: Opened):
        """Raises a ValueError for settings that do not fit each other, and for an empty split."""
        asked = asked.alone(asked.source)
        check_share(asked.batch_size, *asked.process)
        self._kept = kept_records(asked.source, asked.split)
        lengths = opened.split.index.shard_lengths
        self._lengths = lengths if self._kept is None else self._kept.lengths
        size = int(self._lengths.sum())
        if not size:
            raise ValueError(f'{asked.stored.folder}: split {asked.split!r} is empty')
        self.num_batches = -(-size // asked.batch_size)
        each = self.num_batches * asked.local_size
        self._own = range(size)[asked.process_index * each :][:each]
        text = asked.stored.choose_texts(asked.text).first
        super().__init__(asked, opened, text, middle_crop=True, with_mask=True)

    def read(self, start: int = 0) -> Iterator[Batch]:
        """Returns the batches after the first `start`, with rows of zeros to fill the last ones."""
        size = self._asked.local_size
        own = self._own[start * size :]
        blocks = eval_blocks(self._lengths, own.start, own.stop, size, self._kept)
        blank = {name: np.zeros(*spec) for name, spec in self.spec(0).items()}
        batches = itertools.chain(
            self._read(blocks, self._asked.parallel_reads), itertools.repeat(blank)
        )
        for batch in itertools.islice(batches, self.num_batches - start):
            yield {name: _filled_up(gathered(x), size) for name, x in batch.items()}


def stored_rows(stored: StoredDataset) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of the large features in the records of a data set.

    Raises:
        ValueError: The data set has no latents, or a feature of another shape or dtype.
    """
    dtype, shape = stored.latents
    known: dict[str, ArraySpec] = {
        schema.LATENTS: ArraySpec(shape, np.dtype(getattr(ml_dtypes, dtype, dtype))),
        schema.TEXT_EMBEDDING: ArraySpec((stored.text_dim,), np.dtype(np.float16)),
        schema.TOKENS: ArraySpec((stored.num_tokens,), np.dtype(np.int32)),
    }
    return {n: x for n, x in known.items() if n not in stored.columns and all(x.shape)}


def _row_nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return (_CAPTION_NBYTES if dtype.hasobject else dtype.itemsize) * math.prod(shape)


def _filled_up(x: np.ndarray, size: int) -> np.ndarray:
    """Puts rows of zeros, or of empty strings, after those of an array."""
    if len(x) == size:
        return x
    shape = (size - len(x), *x.shape[1:])
    pad = np.full(shape, b'', object) if x.dtype == object else np.zeros(shape, x.dtype)
    return np.concatenate([x, pad])


def _check_text(folder: str, text: texts.Chosen, asked: Reading) -> None:
    """Raises a ValueError where texts of columns are asked for, and features of the other kind."""
    other = schema.TEXT_DTYPES.keys() & set(asked.features) - {text.feature}
    if text.in_columns and other:
        raise ValueError(
            f'{folder}: features has {min(other)!r}, expected {text.feature!r}, which text='
            f'{text.names[0] or texts.RECORDS!r} is.'
        )


# --- By rows -------------------------------------------------------------------------------------


def _read_rows(
    reader: RowReader, blocks: Iterator[Block], counter: ReadCounter | None
) -> Iterator[Part]:
    block = next(blocks, None)
    if block is not None:
        for run in reader.prefetch(block.shard.ravel(), block.record.ravel()):
            reader.will_need(run)
    while block is not None:
        steps, size = block.shard.shape
        rows = reader.find(*(x.ravel() for x in block))
        block = next(blocks, None)
        runs = [] if block is None else reader.prefetch(block.shard.ravel(), block.record.ravel())
        for step in range(steps):
            for run in runs[step::steps]:
                reader.will_need(run)
            some = rows.part(slice(step * size, (step + 1) * size))
            batch = reader.read(some, reader.check(some))
            if counter:
                counter.add(num_bytes=sum(x.nbytes for x in batch.values()))
            yield batch


# --- By chunks -----------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """A block of rows, and the chunks that they are in.

    Attributes:
        block: The rows.
        chunks: All chunks that hold any of the rows.
        rows: Places in the block, ordered by their chunks.
        ends: For each chunk one past its last place in `rows`.
    """

    block: Block
    chunks: list[_Chunk]
    rows: np.ndarray
    ends: np.ndarray


class _ChunkReader:
    """Reads blocks of rows with a reader of fetched files, so many records at a time."""

    def __init__(self, split: IndexedSplit, reader: RowReader, files: FetchedFiles, chunk: int):
        self._split = split
        self._reader, self._files, self._chunk = reader, files, chunk

    def read(self, blocks: Iterator[Block]) -> Iterator[Batch]:
        for (steps, size), values in Ahead(self._fill(blocks), 1, 'chunks'):
            for step in range(steps):
                part = slice(step * size, (step + 1) * size)
                # A batch that is kept must not keep its block.
                yield {name: x[part].copy() for name, x in values.items()}

    def _fill(self, blocks: Iterator[Block]) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """Yields for each block its batches and their rows, and all values one after the other."""
        try:
            plans = itertools.chain(map(self._plan, blocks), [None])
            plan = next(plans)
            self._files.ask(_ranges(plan.chunks if plan else []))
            while plan:
                following = next(plans)
                both = set(following.chunks).intersection(plan.chunks) if following else set()
                if following:
                    self._files.ask(_ranges(x for x in following.chunks if x not in both))
                yield plan.block.shard.shape, self._gather(plan, both)
                plan = following
        finally:
            self._files.close()

    def _plan(self, block: Block) -> _Plan:
        shard, record = block.shard.ravel(), block.record.ravel()
        chunks, of_chunk = np.unique((shard << 32) + record // self._chunk, return_inverse=True)
        rows = np.argsort(of_chunk, kind='stable')
        ends = np.cumsum(np.bincount(of_chunk))
        found = self._find_chunks(chunks >> 32, (chunks & 0xFFFFFFFF) * self._chunk)
        return _Plan(block, found, rows, ends)

    def _find_chunks(self, shard: np.ndarray, first: np.ndarray) -> list[_Chunk]:
        """What the chunks that begin with some records need of the files."""
        count = np.minimum(self._split.index.shard_lengths[shard] - first, self._chunk)
        begin, nbytes = self._split.index.byte_range(shard, first, count)
        records = zip(shard.tolist(), begin.tolist(), (begin + nbytes).tolist(), strict=True)
        number = self._split.first_numbers[shard] + first
        of_columns = [column.ranges(number, count) for column in self._reader.columns.values()]
        return [
            (record, *itertools.chain(*rows))
            for record, *rows in zip(records, *of_columns, strict=True)
        ]

    def _gather(self, plan: _Plan, kept: set[_Chunk]) -> Batch:
        """The values of a block; forgets its chunks but for those that are kept."""
        values: Batch = {}
        each = -(-_GROUP_RECORDS // self._chunk)
        for first in range(0, len(plan.chunks), each):
            chunks = plan.chunks[first : first + each]
            start = plan.ends[first - 1] if first else 0
            rows = plan.rows[start : plan.ends[first + len(chunks) - 1]]
            self._files.take(_ranges(chunks))
            for name, x in self._gather_some(plan.block, rows).items():
                if name not in values:
                    values[name] = np.empty((len(plan.rows), *x.shape[1:]), x.dtype)
                values[name][rows] = x
            self._files.drop(_ranges(chunk for chunk in chunks if chunk not in kept))
        return values

    def _gather_some(self, block: Block, rows: np.ndarray) -> Batch:
        """The values of some rows; those of damaged records come from the last attempt."""
        where = Block(*(x.ravel()[rows] for x in block))
        found = self._reader.find(*where)
        good = self._reader.check(found)
        for _ in range(_ATTEMPTS - 1):
            if good.all():
                break
            damaged = self._plan(Block(*(x[~good] for x in where))).chunks
            self._files.take_again(_ranges(damaged))
            found = self._reader.find(*where)
            good = self._reader.check(found)
            if good.all():
                path = self._files.path_of(damaged[0][0][0])
                logging.warning('%s: a read failed and succeeded when tried again.', path)
        return {name: gathered(x) for name, x in self._reader.read(found, good).items()}


def _ranges(chunks: Iterable[_Chunk]) -> Iterator[Range]:
    return itertools.chain.from_iterable(chunks)
