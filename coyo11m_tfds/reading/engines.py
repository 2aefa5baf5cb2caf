"""The engines `rows` and `chunks` as `input_pipeline` asks for them: opened, checked and read.

    batches = engines.train(Training(data=path, batch_size=256, ...))
    batches = engines.evaluate(Reading(data=path, batch_size=256, ...))

How batches are gathered is in `rows` and `chunk_blocks`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit, StoredDataset
from coyo11m_tfds.reading import (
    chunk_blocks,
    column_reader,
    memory,
    process_settings,
    row_plan,
    rows,
    shares,
    verified,
)
from coyo11m_tfds.reading.bad_records import SKIP, BadRecords, naming_damage
from coyo11m_tfds.reading.batches import ArraySpec, Batches, Place, specs_of
from coyo11m_tfds.reading.column_reader import ColumnReader
from coyo11m_tfds.reading.fetched_files import FetchedFiles
from coyo11m_tfds.reading.mapped_files import MAX_FILES
from coyo11m_tfds.reading.names import AUTO, CHUNKS, EVAL_CROP, ROWS, TF_DATA
from coyo11m_tfds.reading.order import Order, OrderSettings
from coyo11m_tfds.reading.row_reader import RowChoices, RowReader
from coyo11m_tfds.reading.settings import Reading, Training
from coyo11m_tfds.storage import json_digest

_BATCHES_AHEAD = 2  # unless `prefetch` says otherwise

# At least so many samples of a lane are gathered together, so that NumPy's calls cost little.
_LANE_ROWS = 256


# Gives the batches that come after so many samples, or batches.
Read = Callable[[int], Iterator[rows.Batch]]


class Opened(NamedTuple):
    """A split with a chunk index, and the engine that reads it."""

    stored: StoredDataset
    split: IndexedSplit
    engine: str


def open_split(stored: StoredDataset, split: str, engine: str) -> Opened | None:
    """The split that is read by rows or chunks; None without a chunk index.

    Raises:
        ValueError: rows are asked for and cannot be had; or there is no such split.
        OSError: the chunk index cannot be read.
    """
    opened = None if stored.is_remote and engine == ROWS else stored.split(split)
    if opened is None and engine == ROWS:
        raise ValueError(
            f'{stored.folder}: engine={ROWS!r} reads local data sets with a chunk index of split '
            f'{split!r} and no latents on gs://, and this is none; set engine={CHUNKS!r}'
        )
    if opened is None:
        return None
    if engine in (AUTO, TF_DATA):
        by_rows = not stored.is_remote and len(opened.index.shard_lengths) <= MAX_FILES
        engine = ROWS if by_rows else CHUNKS
    return Opened(stored, opened, engine)


def train(asked: Training) -> Batches:
    """`input_pipeline.train_batches`."""
    opened = open_split(asked.stored, asked.split, asked.engine)
    if opened is None or asked.engine == TF_DATA:
        from coyo11m_tfds.reading import tf_data

        return tf_data.train_batches(asked, is_indexed=opened is not None)
    order, lanes = _order(opened, asked), shares.own_lanes(asked.lanes, *asked.process)
    readers = _train_readers(opened, asked)
    in_flight = len(lanes) * asked.parallel_reads
    block_rows = in_flight * asked.chunk if opened.engine == CHUNKS else 0

    def read(start: int) -> Iterator[rows.Batch]:
        blocks = row_plan.train_blocks(
            order, lanes, asked.batch_size, start, asked.stride, block_rows
        )
        return readers.open(in_flight)[1](blocks)

    need = None
    if opened.engine == CHUNKS:
        need = memory.Need(
            batch_size=asked.local_size,
            chunk=asked.chunk,
            lanes=len(lanes),
            window=order.window,
            parallel_reads=asked.parallel_reads,
            prefetch=asked.prefetch,
            parsed_nbytes=readers.parsed_nbytes,
            raw_nbytes=readers.raw_nbytes,
        )
    return train_batches(asked, readers.spec(asked.local_size), read, need)


def train_batches(
    asked: Training,
    spec: Mapping[str, ArraySpec],
    read: Read,
    memory_need: memory.Need | None = None,
) -> Batches:
    """Batches that `read` gives from so many samples of every lane on."""
    digest = order_digest(position(asked.stored, asked.order, asked.split))
    place = Place(asked.start, asked.each, digest, asked.stride)
    split = asked.stored.splits.get(asked.split)
    steps = split.num_records // asked.lanes / asked.each if split else math.nan
    ahead = _batches_ahead(asked)
    return Batches(read, place, spec, steps, asked.process, ahead, memory_need)


def position(stored: StoredDataset, settings: OrderSettings, split: str) -> dict[str, str | int]:
    """`input_pipeline.position_settings`."""
    return {'data_set': stored.identity(split), **dataclasses.asdict(settings)}


def order_digest(position: Mapping[str, str | int]) -> str:
    """Of `position`, 16 hex digits."""
    return json_digest.sha256(dict(position))[:16]


class Lanes(NamedTuple):
    """Lanes of one process, each with an iterator of its own.

    Attributes:
        own: Numbers of the lanes.
        each: Samples of a lane in a batch.
        spec: Shapes and dtypes of one lane's part of a batch.
        read: Function that reads a lane without end, in batches of a multiple of `each`.
    """

    own: range
    each: int
    spec: dict[str, ArraySpec]
    read: Read


def train_lanes(opened: Opened, asked: Training) -> Lanes:
    """Returns the samples of `train`, lane by lane."""
    order, readers = _order(opened, asked), _train_readers(opened, asked)
    rows_at_once = -(-_LANE_ROWS // asked.each) * asked.each

    def read(lane: int) -> Iterator[rows.Batch]:
        # All batch sizes read the same sequence, so a lane may take those of several batches.
        blocks = row_plan.train_blocks(
            order,
            range(lane, lane + 1),
            rows_at_once * asked.lanes,
            asked.start,
            block_rows=asked.parallel_reads * asked.chunk,
        )
        return readers.open(asked.parallel_reads)[1](blocks)

    own = shares.own_lanes(asked.lanes, *asked.process)
    return Lanes(own, asked.each, readers.spec(asked.each), read)


class Evaluation(NamedTuple):
    """What one process evaluates.

    Attributes:
        spec: of every batch.
        num_batches: that it takes.
        read: gives those that come after so many.
    """

    spec: dict[str, ArraySpec]
    num_batches: int
    read: Read


def evaluation(opened: Opened, asked: Reading) -> Evaluation:
    """Each record of a split once, in the order of the shards."""
    shares.check_share(asked.batch_size, *asked.process)
    records, num_batches = shares.eval_share(
        opened.stored.folder, asked.split, opened.split, asked.batch_size, *asked.process
    )
    chosen = opened.stored.choose_texts(asked.text).first
    readers = _Readers(opened, chosen, asked, fixed_crop=EVAL_CROP, with_mask=True)
    blank = readers.open(1)[0].empty()

    def read(start: int) -> Iterator[rows.Batch]:
        begin = min(records.stop, records.start + start * asked.local_size)
        lengths = opened.split.index.shard_lengths
        blocks = row_plan.eval_blocks(lengths, begin, records.stop, asked.local_size)
        batches = readers.open(asked.parallel_reads)[1](blocks)
        return rows.fill_up(batches, blank, asked.local_size, num_batches - start)

    return Evaluation(specs_of(blank, asked.local_size), num_batches, read)


def evaluate(asked: Reading) -> Batches:
    """`input_pipeline.eval_batches`."""
    opened = open_split(asked.stored, asked.split, asked.engine)
    if opened is None or asked.engine == TF_DATA:
        from coyo11m_tfds.reading import tf_data

        return tf_data.eval_batches(asked)
    return eval_batches(asked, evaluation(opened, asked))


def eval_batches(asked: Reading, found: Evaluation) -> Batches:
    """All batches of an evaluation; `samples` of a state are of all processes."""
    parts = [asked.stored.identity(asked.split), asked.batch_size, asked.process_count]
    place = Place(0, asked.batch_size, json_digest.sha256(parts)[:16])
    return Batches(
        lambda samples: found.read(samples // asked.batch_size),
        place,
        found.spec,
        found.num_batches,
        asked.process,
        _batches_ahead(asked),
    )


def _batches_ahead(asked: Reading) -> int:
    """How many are kept ready."""
    return _BATCHES_AHEAD if asked.prefetch < 0 else max(1, asked.prefetch)


def _order(opened: Opened, asked: Training) -> Order:
    """Raises a ValueError for settings that do not fit each other or the data set."""
    shares.check_share(asked.batch_size, *asked.process, asked.lanes)
    order = Order(opened.split.index.shard_lengths, asked.order)
    order.locate(asked.start)  # raises before anything is read
    return order


def _train_readers(opened: Opened, asked: Training) -> '_Readers':
    return _Readers(
        opened,
        opened.stored.choose_texts(asked.text),
        asked,
        seed=asked.seed,
        caption_dropout=asked.caption_dropout,
        with_mask=asked.on_bad_records == SKIP,
    )


class _Readers:
    """Readers of one split, which count bad records together; mapped files they share."""

    def __init__(self, opened: Opened, text: texts.Chosen, asked: Reading, **choices: Any):
        stored, split, engine = opened
        _check_text(stored.folder, text, asked)
        self._choices = RowChoices(
            tuple(asked.features),
            stored.latent_dtype,
            stored.text_dim,
            num_tokens=stored.num_tokens,
            text=text if text.in_columns else None,
            **choices,
        )
        stored.check_features(sorted(self._choices.in_records))
        process_settings.keep_freed_memory()
        self._opened, self._asked = opened, asked
        num_records = int(split.index.shard_lengths.sum())
        self._found = stored.find_columns(asked.features, text)
        where = stored.folder, asked.split, num_records
        with naming_damage():
            self._columns = {
                name: column_reader.open_column(column, *where)
                for name, column in self._found.items()
            }
        self._bad_records = BadRecords(
            asked.on_bad_records, asked.max_bad_fraction, num_records, asked.counter
        )
        self._mapped = self._reader(None) if engine == ROWS else None

    @property
    def parsed_nbytes(self) -> int:
        """Bytes of a sample in a batch."""
        return self._choices.row_nbytes(self._found)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of a sample in the files."""
        of_columns = sum(column.row_nbytes for column in self._found.values())
        return self._opened.split.record_nbytes + of_columns

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Of batches of `size` rows."""
        return specs_of(self.open(1)[0].empty(), size)

    def open(self, in_flight: int) -> tuple[RowReader, rows.Read]:
        """A reader, and what reads blocks of rows with it, so many chunks at a time."""
        split, counter, chunk = self._opened.split, self._asked.counter, self._asked.chunk
        if self._mapped:
            return self._mapped, functools.partial(rows.read_rows, self._mapped, counter=counter)
        at_once = in_flight * (1 + len(self._columns))
        files = FetchedFiles(split.file, split.file_sizes, at_once, counter)
        reader = self._reader(files)
        return reader, chunk_blocks.Chunks(split, reader, files, chunk).read

    def _reader(self, files: FetchedFiles | None) -> RowReader:
        columns = {name: ColumnReader(column, files) for name, column in self._columns.items()}
        return RowReader(
            self._opened.split,
            self._choices,
            self._opened.stored.record_layout,
            verify=self._asked.verify if files is None else verified.ALWAYS,
            bad_records=self._bad_records,
            columns=columns,
            files=files,
        )


def _check_text(folder: str, text: texts.Chosen, asked: Reading) -> None:
    """Raises a ValueError where texts of columns are asked for, and features of the other kind."""
    other = schema.TEXT_DTYPES.keys() & set(asked.features) - {text.feature}
    if text.in_columns and other:
        raise ValueError(
            f'{folder}: features has {min(other)!r}, expected {text.feature!r}, which text='
            f'{text.names[0] or texts.RECORDS!r} is.'
        )
