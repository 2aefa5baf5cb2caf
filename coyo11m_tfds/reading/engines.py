"""The engines `rows` and `chunks` as `input_pipeline` asks for them: opened, checked and read.

    opened = engines.open_split(open_data(path), 'train', 'auto')     # None: no chunk index
    batches = engines.train(opened, verify='once', text='', stride=1, asked=arguments)

How batches are gathered is in `rows` and `chunk_blocks`.
"""

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from coyo11m_tfds import schema, texts
from coyo11m_tfds.reading import (
    chunk_blocks,
    column_reader,
    process_settings,
    rows,
    shares,
    verified,
)
from coyo11m_tfds.reading.bad_records import SKIP
from coyo11m_tfds.reading.column_reader import ColumnReader, OpenedColumn
from coyo11m_tfds.reading.fetched_files import FetchedFiles
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.mapped_files import MAX_FILES
from coyo11m_tfds.reading.names import AUTO, CHUNKS, ENGINES, EVAL_CROP, ROWS
from coyo11m_tfds.reading.opened_data import OpenedData
from coyo11m_tfds.reading.order import Order, check_chunk
from coyo11m_tfds.reading.row_reader import RowChoices, RowReader
from coyo11m_tfds.reading.stored_dataset import StoredDataset

_BATCHES_AHEAD = 2  # unless `prefetch` says otherwise


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
    if engine == AUTO:
        by_rows = not data.is_remote and len(opened.index.shard_lengths) <= MAX_FILES
        engine = ROWS if by_rows else CHUNKS
    return Opened(data.stored, opened, engine)


def train(
    opened: Opened, verify: str, text: texts.Spec, stride: int, asked: types.SimpleNamespace
) -> Iterator[dict[str, np.ndarray]]:
    """`input_pipeline.train_batches`; `asked` has the arguments of `train_dataset`."""
    shares.check_dropout(asked.caption_dropout)
    process = asked.process_index, asked.process_count
    shares.check_share(asked.batch_size, *process, asked.lanes)
    order = Order(
        opened.split.index.shard_lengths,
        asked.seed,
        asked.batch_size,
        asked.chunk,
        asked.lanes,
        asked.window,
    )
    own = shares.own_lanes(order, *process)
    order.locate(asked.start_step)  # raises before anything is read
    in_flight = len(own) * asked.parallel_reads
    _, read = _reader(
        opened,
        verify,
        opened.stored.choose_texts(text),
        asked,
        in_flight,
        seed=asked.seed,
        caption_dropout=asked.caption_dropout,
        with_mask=asked.on_bad_records == SKIP,
    )
    block_rows = in_flight * asked.chunk if opened.engine == CHUNKS else 0
    prefetch = _ahead(asked.prefetch)
    return rows.train_batches(read, order, own, asked.start_step, prefetch, stride, block_rows)


def evaluate(
    opened: Opened, verify: str, text: texts.Spec, asked: types.SimpleNamespace
) -> Iterator[dict[str, np.ndarray]]:
    """`input_pipeline.eval_batches`; `asked` has the arguments of `eval_dataset`."""
    process = asked.process_index, asked.process_count
    shares.check_share(asked.batch_size, *process)
    check_chunk(asked.chunk)
    records, num_batches = shares.eval_share(
        opened.stored.folder, asked.split, opened.split, asked.batch_size, *process
    )
    chosen = opened.stored.choose_texts(text).first
    reader, read = _reader(
        opened, verify, chosen, asked, asked.parallel_reads, fixed_crop=EVAL_CROP, with_mask=True
    )
    local = asked.batch_size // asked.process_count
    lengths, prefetch = opened.split.index.shard_lengths, _ahead(asked.prefetch)
    return rows.eval_batches(read, reader.empty(), lengths, records, local, num_batches, prefetch)


def _reader(
    opened: Opened,
    verify: str,
    text: texts.Chosen,
    asked: types.SimpleNamespace,
    in_flight: int,
    **choices: Any,
) -> tuple[RowReader, rows.Read]:
    """The reader of rows, and the function that reads blocks of them."""
    stored, split, engine = opened
    _check_text(stored.folder, text, asked.features)
    row_choices = RowChoices(
        tuple(asked.features),
        stored.latent_dtype,
        stored.text_dim,
        num_tokens=stored.num_tokens,
        text=text if text.in_columns else None,
        **choices,
    )
    stored.check_features(sorted(row_choices.in_records))
    process_settings.keep_freed_memory()
    opened_columns = _open_columns(opened, asked.split, asked.features, text)
    files = None
    if engine == CHUNKS:
        if asked.parallel_reads < 1:
            raise ValueError(f'parallel_reads={asked.parallel_reads} is not at least 1')
        at_once = in_flight * (1 + len(opened_columns))
        files = FetchedFiles(split.file, split.file_sizes, at_once, asked.counter)
    columns = {name: ColumnReader(column, files) for name, column in opened_columns.items()}
    reader = RowReader(
        split,
        row_choices,
        stored.record_layout,
        verify=verify if files is None else verified.ALWAYS,
        on_bad_records=asked.on_bad_records,
        counter=asked.counter,
        max_bad_fraction=asked.max_bad_fraction,
        columns=columns,
        files=files,
    )
    if files is None:
        return reader, functools.partial(rows.read_rows, reader, counter=asked.counter)
    return reader, chunk_blocks.Chunks(split, columns.values(), reader, files, asked.chunk).read


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
