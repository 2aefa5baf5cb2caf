"""The engine `rows` as `input_pipeline` asks for it: a local data set opened, checked and read.

    opened = row_engine.open_split(folder, 'train', 'auto')     # None: read it by chunks
    batches = row_engine.train(*opened, verify='once', text='', stride=1, asked=arguments)

How rows are read is in `rows`.
"""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading import (
    column_reader,
    process_settings,
    rows,
    shares,
    stored_dataset,
    verified,
)
from coyo11m_tfds.reading.bad_records import SKIP
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.mapped_files import MAX_FILES
from coyo11m_tfds.reading.names import CHUNKS, ENGINES, EVAL_CROP, ROWS
from coyo11m_tfds.reading.order import Order
from coyo11m_tfds.reading.record_layout import RecordLayout
from coyo11m_tfds.reading.row_reader import RowChoices, RowReader
from coyo11m_tfds.reading.stored_dataset import StoredDataset
from coyo11m_tfds.storage import source_files

_BATCHES_AHEAD = 2  # unless `prefetch` says otherwise


def open_split(
    folder: str, split: str, engine: str, verify: str = verified.ONCE
) -> tuple[StoredDataset, IndexedSplit] | None:
    """The data set and the split that rows are read of; None where chunks are.

    Raises:
        ValueError: there is no such engine or mode; or rows are asked for and cannot be had.
    """
    if engine not in ENGINES:
        raise ValueError(f'engine={engine!r} is none of {", ".join(map(repr, ENGINES))}')
    if verify not in verified.MODES:
        raise ValueError(f'verify={verify!r} is none of {", ".join(map(repr, verified.MODES))}')
    if engine == CHUNKS:
        return None
    stored = None if source_files.is_remote(folder) else stored_dataset.read(folder)
    opened = stored and stored.open_split(split)
    if opened and (engine == ROWS or len(opened.index.shard_lengths) <= MAX_FILES):
        return stored, opened
    if engine == ROWS:
        raise ValueError(
            f'{folder}: engine={ROWS!r} reads local data sets with a chunk index of split '
            f'{split!r}, and this is none; set engine={CHUNKS!r}'
        )
    return None


def train(
    stored: StoredDataset,
    split: IndexedSplit,
    verify: str,
    text: str,
    stride: int,
    asked: types.SimpleNamespace,
) -> Iterator[dict[str, np.ndarray]]:
    """`input_pipeline.train_batches`; `asked` has the arguments of `train_dataset`."""
    shares.check_dropout(asked.caption_dropout)
    reader = _row_reader(
        stored,
        split,
        verify,
        text,
        asked,
        seed=asked.seed,
        caption_dropout=asked.caption_dropout,
        with_mask=asked.on_bad_records == SKIP,
    )
    process = asked.process_index, asked.process_count
    shares.check_share(asked.batch_size, *process, asked.lanes)
    order = Order(
        split.index.shard_lengths,
        asked.seed,
        asked.batch_size,
        asked.chunk,
        asked.lanes,
        asked.window,
    )
    own = shares.own_lanes(order, *process)
    order.locate(asked.start_step)  # raises before anything is read
    prefetch = _ahead(asked.prefetch)
    return rows.train_batches(reader, order, own, asked.start_step, prefetch, stride)


def evaluate(
    stored: StoredDataset,
    split: IndexedSplit,
    verify: str,
    text: str,
    asked: types.SimpleNamespace,
) -> Iterator[dict[str, np.ndarray]]:
    """`input_pipeline.eval_batches`; `asked` has the arguments of `eval_dataset`."""
    process = asked.process_index, asked.process_count
    shares.check_share(asked.batch_size, *process)
    reader = _row_reader(stored, split, verify, text, asked, fixed_crop=EVAL_CROP, with_mask=True)
    records, num_batches = shares.eval_share(
        stored.folder, asked.split, split, asked.batch_size, *process
    )
    local = asked.batch_size // asked.process_count
    lengths, prefetch = split.index.shard_lengths, _ahead(asked.prefetch)
    return rows.eval_batches(reader, lengths, records, local, num_batches, prefetch)


def _row_reader(
    stored: StoredDataset,
    split: IndexedSplit,
    verify: str,
    text: str,
    asked: types.SimpleNamespace,
    **choices: Any,
) -> RowReader:
    in_records = [f for f in asked.features if f != schema.TEXT_EMBEDDING or not text]
    stored.check_features((schema.KEY, *in_records))
    process_settings.keep_freed_memory()
    num_records = int(split.index.shard_lengths.sum())
    where = stored.folder, asked.split, num_records
    columns = {name: stored.columns[name] for name in asked.features if name in stored.columns}
    if text:
        columns[schema.TEXT_EMBEDDING] = stored.text_column(text)
    found = {name: column_reader.open_column(column, *where) for name, column in columns.items()}
    return RowReader(
        split,
        RowChoices(tuple(asked.features), stored.latent_dtype, stored.text_dim, **choices),
        RecordLayout(stored.text_dim, with_latents=schema.LATENTS not in stored.columns),
        verify=verify,
        on_bad_records=asked.on_bad_records,
        counter=asked.counter,
        max_bad_fraction=asked.max_bad_fraction,
        columns=found,
    )


def _ahead(prefetch: int) -> int:
    return _BATCHES_AHEAD if prefetch < 0 else max(1, prefetch)
