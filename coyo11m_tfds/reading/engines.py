"""The engines `rows` and `chunks` as `input_pipeline` asks for them: opened, checked and read.

    opened = engines.open_split(open_data(path), 'train', 'auto')     # None: no chunk index
    batches = engines.train(opened, verify='once', text='', stride=1, asked=arguments)

How batches are gathered is in `rows` and `chunk_blocks`.
"""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from coyo11m_tfds import schema, texts
from coyo11m_tfds.reading import (
    chunk_blocks,
    column_reader,
    process_settings,
    row_plan,
    rows,
    shares,
    verified,
)
from coyo11m_tfds.reading.bad_records import SKIP, BadRecords
from coyo11m_tfds.reading.column_reader import ColumnReader, OpenedColumn
from coyo11m_tfds.reading.fetched_files import FetchedFiles
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.mapped_files import MAX_FILES
from coyo11m_tfds.reading.names import AUTO, CHUNKS, ENGINES, EVAL_CROP, ROWS, TF_DATA
from coyo11m_tfds.reading.opened_data import OpenedData
from coyo11m_tfds.reading.order import Order, OrderSettings, check_chunk
from coyo11m_tfds.reading.row_reader import RowChoices, RowReader
from coyo11m_tfds.reading.stored_dataset import StoredDataset

_BATCHES_AHEAD = 2  # unless `prefetch` says otherwise

# At least so many samples of a lane are gathered together, so that NumPy's calls cost little.
_LANE_ROWS = 256


class Opened(NamedTuple):
    """A split with a chunk index, and the engine that reads it."""

    stored: StoredDataset
    split: IndexedSplit
    engine: str


def open_split(
    data: OpenedData, split: str, engine: str, verify: str = verified.ONCE
) -> Opened | None:
    """The split that is read by rows or chunks; None without a chunk index.

    Raises:
        ValueError: there is no such engine or mode; or rows are asked for and cannot be had.
        OSError: the metadata cannot be read.
    """
    if engine not in ENGINES:
        raise ValueError(f'engine={engine!r} is none of {", ".join(map(repr, ENGINES))}')
    if verify not in verified.MODES:
        raise ValueError(f'verify={verify!r} is none of {", ".join(map(repr, verified.MODES))}')
    opened = None if data.is_remote and engine == ROWS else data.split(split)
    if opened is None and engine == ROWS:
        raise ValueError(
            f'{data.folder}: engine={ROWS!r} reads local data sets with a chunk index of split '
            f'{split!r} and no latents on gs://, and this is none; set engine={CHUNKS!r}'
        )
    if opened is None or data.stored is None:
        return None
    if engine in (AUTO, TF_DATA):
        by_rows = not data.is_remote and len(opened.index.shard_lengths) <= MAX_FILES
        engine = ROWS if by_rows else CHUNKS
    return Opened(data.stored, opened, engine)


class Share(NamedTuple):
    """What one process reads for training.

    Attributes:
        order: of the samples.
        lanes: of this process.
        each: samples of every lane in a batch.
        start: samples of every lane before the first batch.
    """

    order: Order
    lanes: range
    each: int
    start: int


def train(
    opened: Opened, verify: str, text: texts.Spec, stride: int, asked: types.SimpleNamespace
) -> Iterator[dict[str, np.ndarray]]:
    """`input_pipeline.train_batches`; `asked` has its other arguments."""
    share = _share(opened, asked)
    readers = _train_readers(opened, verify, text, asked)
    in_flight = len(share.lanes) * asked.parallel_reads
    blocks = row_plan.train_blocks(
        share.order,
        share.lanes,
        asked.batch_size,
        share.start,
        stride,
        in_flight * asked.chunk if opened.engine == CHUNKS else 0,
    )
    return rows.train_batches(readers.open(in_flight)[1], blocks, _ahead(asked.prefetch))


class Lanes(NamedTuple):
    """Lanes of one process, each with an iterator of its own.

    Attributes:
        share: of the process.
        blank: a batch without rows.
        read: gives the samples of a lane, in batches of a multiple of `share.each`, without end.
    """

    share: Share
    blank: rows.Batch
    read: Callable[[int], Iterator[rows.Batch]]


def train_lanes(
    opened: Opened, verify: str, text: texts.Spec, asked: types.SimpleNamespace
) -> Lanes:
    """The same samples as of `train`, lane by lane."""
    share = _share(opened, asked)
    readers = _train_readers(opened, verify, text, asked)
    rows_at_once = -(-_LANE_ROWS // share.each) * share.each

    def read(lane: int) -> Iterator[rows.Batch]:
        # All batch sizes read the same sequence, so a lane may take those of several batches.
        blocks = row_plan.train_blocks(
            share.order,
            range(lane, lane + 1),
            rows_at_once * asked.lanes,
            share.start,
            block_rows=asked.parallel_reads * asked.chunk,
        )
        return rows.train_batches(readers.open(asked.parallel_reads)[1], blocks, 1)

    return Lanes(share, readers.open(1)[0].empty(), read)


class Evaluation(NamedTuple):
    """What one process evaluates.

    Attributes:
        blank: a batch without rows.
        size: rows of every batch.
        num_batches: that it takes.
        read: gives them.
    """

    blank: rows.Batch
    size: int
    num_batches: int
    read: Callable[[], Iterator[rows.Batch]]


def evaluate(
    opened: Opened, verify: str, text: texts.Spec, asked: types.SimpleNamespace
) -> Evaluation:
    """`input_pipeline.eval_batches`; `asked` has its other arguments."""
    process = asked.process_index, asked.process_count
    shares.check_share(asked.batch_size, *process)
    check_chunk(asked.chunk)
    records, num_batches = shares.eval_share(
        opened.stored.folder, asked.split, opened.split, asked.batch_size, *process
    )
    chosen = opened.stored.choose_texts(text).first
    readers = _Readers(opened, verify, chosen, asked, fixed_crop=EVAL_CROP, with_mask=True)
    blank, local = readers.open(1)[0].empty(), asked.batch_size // asked.process_count

    def read() -> Iterator[rows.Batch]:
        lengths = opened.split.index.shard_lengths
        blocks = row_plan.eval_blocks(lengths, records.start, records.stop, local)
        batches = readers.open(asked.parallel_reads)[1](blocks)
        return rows.eval_batches(batches, blank, local, num_batches, _ahead(asked.prefetch))

    return Evaluation(blank, local, num_batches, read)


def _share(opened: Opened, asked: types.SimpleNamespace) -> Share:
    """Raises a ValueError for settings that do not fit each other or the data set."""
    process = asked.process_index, asked.process_count
    shares.check_share(asked.batch_size, *process, asked.lanes)
    settings = OrderSettings(asked.seed, asked.chunk, asked.lanes, asked.window)
    order = Order(opened.split.index.shard_lengths, settings)
    each = asked.batch_size // asked.lanes
    start = asked.start_sample + asked.start_step * each
    order.locate(start)  # raises before anything is read
    return Share(order, shares.own_lanes(asked.lanes, *process), each, start)


def _train_readers(
    opened: Opened, verify: str, text: texts.Spec, asked: types.SimpleNamespace
) -> '_Readers':
    shares.check_dropout(asked.caption_dropout)
    return _Readers(
        opened,
        verify,
        opened.stored.choose_texts(text),
        asked,
        seed=asked.seed,
        caption_dropout=asked.caption_dropout,
        with_mask=asked.on_bad_records == SKIP,
    )


class _Readers:
    """Readers of one split, which count bad records together; mapped files they share."""

    def __init__(
        self,
        opened: Opened,
        verify: str,
        text: texts.Chosen,
        asked: types.SimpleNamespace,
        **choices: Any,
    ):
        stored, split, engine = opened
        _check_text(stored.folder, text, asked.features)
        self._choices = RowChoices(
            tuple(asked.features),
            stored.latent_dtype,
            stored.text_dim,
            num_tokens=stored.num_tokens,
            text=text if text.in_columns else None,
            **choices,
        )
        stored.check_features(sorted(self._choices.in_records))
        if engine == CHUNKS and asked.parallel_reads < 1:
            raise ValueError(f'parallel_reads={asked.parallel_reads} is not at least 1')
        process_settings.keep_freed_memory()
        self._opened, self._asked = opened, asked
        self._verify = verify if engine == ROWS else verified.ALWAYS
        self._columns = _open_columns(opened, asked.split, asked.features, text)
        num_records = int(split.index.shard_lengths.sum())
        self._bad_records = BadRecords(
            asked.on_bad_records, asked.max_bad_fraction, num_records, asked.counter
        )
        self._mapped = self._reader(None) if engine == ROWS else None

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
            verify=self._verify,
            bad_records=self._bad_records,
            columns=columns,
            files=files,
        )


def _open_columns(
    opened: Opened, split: str, features: Sequence[str], text: texts.Chosen
) -> dict[str, OpenedColumn]:
    where = opened.stored.folder, split, int(opened.split.index.shard_lengths.sum())
    found = opened.stored.find_columns(features, text)
    return {name: column_reader.open_column(column, *where) for name, column in found.items()}


def _check_text(folder: str, text: texts.Chosen, features: Sequence[str]) -> None:
    """Raises a ValueError where texts of columns are asked for, and features of the other kind."""
    other = schema.TEXT_DTYPES.keys() & set(features) - {text.feature}
    if text.in_columns and other:
        raise ValueError(
            f'{folder}: features has {min(other)!r}, expected {text.feature!r}, which text='
            f'{text.names[0] or texts.RECORDS!r} is.'
        )


def _ahead(prefetch: int) -> int:
    return _BATCHES_AHEAD if prefetch < 0 else max(1, prefetch)
