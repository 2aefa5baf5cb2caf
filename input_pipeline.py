"""Records to batches of NumPy in a planned order, and those to sharded jax.Arrays.

    path = 'OUT/coyo11m_tfds/latents/1.0.0'
    batches = input_pipeline.train_batches(path, batch_size=256, seed=0, features=('latents',))
    for batch in input_pipeline.to_device(batches, sharding):
        state = step(state, batch)

Training samples come in the order of `reading.order`, a pure function of `(seed, step)` and
the data set. Process p of P owns the lanes `[p*L/P, (p+1)*L/P)`, so every P that divides L, the
number of lanes, sees the same global batches. A run that resumes at step s, on that or another
number of processes, goes on with exactly what it would have seen: it starts to read there. It needs
to know the step and that data set and settings are the same (`position_settings`), nothing more.

Two engines give the same batches, bit for bit. `rows`, for local files, gathers what is asked for
out of memory-mapped shards; it imports neither TensorFlow nor JAX. `chunks`, for gs://, reads runs
of records through tf.data, and `train_dataset` gives that as a `tf.data.Dataset`. `key`, `latents`,
`text_embedding`, `tokens` and `caption` keep the dtype and the layout of the source. Scaling is the
model's business.
"""

import inspect
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading import (
    column_reader,
    memory,
    process_settings,
    rows,
    stored_dataset,
    verified,
)
from coyo11m_tfds.reading.bad_records import DEFAULT_MAX_FRACTION, SKIP, STOP
from coyo11m_tfds.reading.counter import ReadCounter, ReadCounts
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.mapped_files import MAX_FILES
from coyo11m_tfds.reading.names import DROP_TEXT, EVAL_CROP, MASK
from coyo11m_tfds.reading.order import Order, nearest_shares
from coyo11m_tfds.reading.row_reader import RowChoices, RowReader
from coyo11m_tfds.reading.stored_dataset import StoredDataset
from coyo11m_tfds.storage import json_digest, source_files

if TYPE_CHECKING:
    import tensorflow as tf

    from coyo11m_tfds.reading import dataset
    from coyo11m_tfds.reading.on_device import key_words, to_device

__all__ = [
    'AUTO',
    'CHUNKS',
    'DROP_TEXT',
    'MASK',
    'ROWS',
    'ReadCounter',
    'ReadCounts',
    'check_memory',
    'engine_of',
    'eval_batches',
    'eval_dataset',
    'key_words',
    'position_fingerprint',
    'position_settings',
    'to_device',
    'train_batches',
    'train_dataset',
    'train_order',
]

AUTO, ROWS, CHUNKS = ENGINES = ('auto', 'rows', 'chunks')

_AUTOTUNE = -1  # `tf.data.AUTOTUNE`
_ROW_BATCHES_AHEAD = 2  # of the engine `rows`, unless `prefetch` says otherwise


def __getattr__(name: str) -> Any:
    """What needs JAX is imported when it is asked for."""
    if name in ('to_device', 'key_words'):
        from coyo11m_tfds.reading import on_device

        return getattr(on_device, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


# --- The place in the data ---------------------------------------------------------------------


def train_order(
    data: 'dataset.Data',
    *,
    batch_size: int,
    seed: int,
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    split: str = schema.TRAIN,
) -> Order | None:
    """The order in which `train_dataset` reads; None for a data set without a chunk index.

        order.locate(step)     # (epoch, step in the epoch), for the log
        order.epoch(0).steps   # batches in the first epoch

    Raises:
        ValueError: for settings that do not fit the data set, naming some that do.
    """
    opened = _open_split(data, split)
    if opened is None:
        return None
    return Order(opened.index.shard_lengths, seed, batch_size, chunk, lanes, window)


def position_settings(
    data: 'dataset.Data',
    *,
    batch_size: int,
    seed: int,
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    split: str = schema.TRAIN,
) -> dict[str, str | int]:
    """All that a step number needs beside it to mean one place in the data.

    A checkpoint keeps this; a run that goes on compares it entry by entry, so that it can say
    which one differs. The entry `data_set` is the name, config, version and split, and a digest of
    these, the source's fingerprint and the lengths of the shards.
    """
    full_name, shards, metadata = _describe(data, split)
    name = f'{full_name} {split}'
    source = metadata.get(schema.META_SOURCE_FINGERPRINT)
    return {
        'data_set': f'{name} {json_digest.sha256([name, source, *shards])[:16]}',
        'seed': seed,
        'batch_size': batch_size,
        'chunk': chunk,
        'lanes': lanes,
        'window': window,
    }


def position_fingerprint(settings: Mapping[str, str | int]) -> str:
    """One hex digest of `position_settings(...)`."""
    return json_digest.sha256(dict(settings))


def _describe(data: 'dataset.Data', split: str) -> tuple[str, Sequence[int], Mapping[str, Any]]:
    """The full name of a data set, the lengths of a split's shards, and the metadata."""
    if stored := _read_stored(data):
        found = stored.splits.get(split)
        return stored.full_name, found.shard_lengths if found else [], stored.metadata
    from coyo11m_tfds.reading import dataset

    info = dataset.open_dataset(data).info
    shards = info.splits[split].shard_lengths if split in info.splits else []
    return info.full_name, shards, info.metadata or {}


def _read_stored(data: 'dataset.Data') -> StoredDataset | None:
    """The metadata in a local folder; None for a builder, a URL, and where there is none."""
    if not isinstance(data, str | os.PathLike) or source_files.is_remote(data):
        return None
    return stored_dataset.read(data)


# --- Batches on the host -----------------------------------------------------------------------


def train_batches(
    data: 'dataset.Data',
    *,
    engine: str = AUTO,
    verify: str = verified.ONCE,
    text: str = '',
    **arguments: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of the training batches from `start_step` on, without end.

        batches = input_pipeline.train_batches(path, batch_size=256, seed=0, start_step=1000)
        next(batches)['latents']        # float16 (256, 4, 32, 32)

    Args:
        data: the folder of a data set, or its builder.
        engine: 'rows' gathers out of memory-mapped files, which have to be local and must not be
            changed meanwhile; 'chunks' goes through `train_dataset`; 'auto' takes rows for a local
            data set with a chunk index and chunks for any other. Both give the same batches.
        verify: when `rows` compares records with their CRC-32C: 'once' when this process first
            reads a record, 'always', or 'never'. `chunks` always does.
        text: a column of text vectors that `python -m coyo11m_tfds.add_column` has added; they take
            the place of those in the records. `rows` alone can read it.
        **arguments: as of `train_dataset`. For `rows` nothing depends on `parallel_reads` and
            `private_threads`, and a negative `prefetch` keeps 2 batches ready.

    Returns:
        Batches as of `train_dataset`, of arrays that nobody else uses. With `rows`, the iterator
        raises `ValueError` where a record cannot be read or too many are bad, and `OSError` where
        a file is missing, refused or has changed since it was opened; with `chunks`,
        `tf.errors.OpError`. Dropping the iterator ends its thread.

    Raises:
        ValueError: as of `train_dataset`; or `engine` or `verify` is unknown, or 'rows' is asked
            for where files are not local or have no chunk index.
        OSError: the metadata cannot be read.
    """
    opened = _open_rows(data, arguments.get('split', schema.TRAIN), engine, verify)
    if opened is None:
        _check_no_column(data, text)
        return train_dataset(data, **arguments).as_numpy_iterator()
    return _train_rows(*opened, verify, text, _bind(train_dataset, data, arguments))


def engine_of(data: 'dataset.Data', engine: str = AUTO, split: str = schema.TRAIN) -> str:
    """Returns the engine that `train_batches` uses: 'rows' or 'chunks'; raises as it does."""
    return CHUNKS if _open_rows(data, split, engine) is None else ROWS


def eval_batches(
    data: 'dataset.Data',
    *,
    engine: str = AUTO,
    verify: str = verified.ONCE,
    text: str = '',
    **arguments: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of every record of a split, once, in the order of the shards.

    Args:
        data, engine, verify, text: as of `train_batches`.
        **arguments: as of `eval_dataset`.

    Returns:
        Batches as of `eval_dataset`; errors as of `train_batches`.

    Raises:
        ValueError, OSError: as of `train_batches`; or the split is empty.
    """
    opened = _open_rows(data, arguments.get('split', schema.VALIDATION), engine, verify)
    if opened is None:
        _check_no_column(data, text)
        return eval_dataset(data, **arguments).as_numpy_iterator()
    return _eval_rows(*opened, verify, text, _bind(eval_dataset, data, arguments))


def train_dataset(
    data: 'dataset.Data',
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING),
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    caption_dropout: float = 0.0,
    process_index: int = 0,
    process_count: int = 1,
    split: str = schema.TRAIN,
    on_bad_records: str = STOP,
    max_bad_fraction: float = DEFAULT_MAX_FRACTION,
    counter: ReadCounter | None = None,
    parallel_reads: int = 4,
    prefetch: int = _AUTOTUNE,
    private_threads: int = 0,
) -> 'tf.data.Dataset':
    """This process's part of the training batches from `start_step` on, without end.

    Args:
        data: the folder of a data set, or its builder.
        batch_size: records in a global batch; this process gets `b = batch_size / process_count`.
        seed: decides the order and every choice about a sample.
        start_step: the first batch is what the one after `start_step` batches would have been.
        features: some of `coyo11m_tfds.reading.dataset.FEATURES`, or `tokens`.
        chunk: records read together, a multiple of `schema.CHUNK_STRIDE`.
        lanes: streams that every batch takes an equal part of; a multiple of process_count.
        window: records shuffled together within a lane.
        caption_dropout: share of samples marked in `drop_text`, if vectors or tokens are asked for.
        process_index, process_count: which part of each global batch this process gets.
        split: 'train', or another one that is in the data set.
        on_bad_records: 'stop': a record that is damaged is an error that names its file and
            number. 'skip': it is left out, counted and warned of; in its place are zeros, which
            `mask` tells from records, so that everything else comes when it would have come. A
            file that is missing, refused or out of reach is an error either way.
        max_bad_fraction: with 'skip', share of the split's records, each counted once, that may be
            bad; more of them, and more than 64, are an error.
        counter: is told of every chunk that is read.
        parallel_reads: chunks being read at a time in each lane.
        prefetch: batches kept ready.
        private_threads: threads for this data set alone; 0 uses those that all share, but for a
            data set on gs:// as many as chunks may be waited for.

    Returns:
        Batches `dict(key=int64 (b,), latents=float16|bfloat16 (b,4,32,32),
        text_embedding=float16 (b,D), tokens=int32 (b,T), caption=string (b,))`, of these the
        features asked for; `drop_text=bool (b,)` with caption_dropout > 0 and vectors or tokens;
        `mask=bool (b,)` with on_bad_records='skip'. An iterator over them raises
        `tf.errors.OpError` where a file or a record cannot be read, or too many records are bad.

    Raises:
        ValueError: for settings that do not fit together, naming some that do, or a feature that
            the data set does not have.
    """
    from coyo11m_tfds.reading import dataset, tf_engine

    _check_dropout(caption_dropout)
    builder = dataset.open_dataset(data)
    parser = tf_engine.make_parser(
        builder,
        features,
        seed=seed,
        caption_dropout=caption_dropout,
        with_mask=on_bad_records == SKIP,
    )
    opened = dataset.open_split(builder, split)
    process = process_index, process_count
    _check_share(batch_size, *process, lanes if opened else None)
    reading = tf_engine.Reading(
        on_bad_records, max_bad_fraction, counter, parallel_reads, prefetch, private_threads
    )
    if opened is None:
        return tf_engine.train_ordinary(
            builder, split, parser, batch_size, process, start_step, reading
        )
    order = Order(opened.index.shard_lengths, seed, batch_size, chunk, lanes, window)
    own = _own_lanes(order, *process)
    return tf_engine.train_chunks(opened, parser, order, own, start_step, reading)


def eval_dataset(
    data: 'dataset.Data',
    *,
    batch_size: int,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING),
    process_index: int = 0,
    process_count: int = 1,
    split: str = schema.VALIDATION,
    chunk: int = 64,
    on_bad_records: str = STOP,
    max_bad_fraction: float = DEFAULT_MAX_FRACTION,
    counter: ReadCounter | None = None,
    parallel_reads: int = 16,
    prefetch: int = _AUTOTUNE,
    private_threads: int = 0,
) -> 'tf.data.Dataset':
    """This process's part of every record of a split, once, in the order of the shards.

    The crop is always the middle one. All processes get the same number of batches, which is
    `dataset.cardinality()`, all of them full: `mask` (bool `(b,)`) is False for rows of zeros that
    fill up. Process p gets the p-th of equal runs of consecutive records.

    Args and Returns: as of `train_dataset`, plus `mask`; `parallel_reads` is for all together.

    Raises:
        ValueError: if the split is empty, or as of `train_dataset`.
    """
    from coyo11m_tfds.reading import dataset, tf_engine

    process = process_index, process_count
    _check_share(batch_size, *process)
    builder = dataset.open_dataset(data)
    parser = tf_engine.make_parser(builder, features, fixed_crop=EVAL_CROP, with_mask=True)
    opened = dataset.open_split(builder, split)
    reading = tf_engine.Reading(
        on_bad_records, max_bad_fraction, counter, parallel_reads, prefetch, private_threads
    )
    if opened is None:
        return tf_engine.eval_ordinary(builder, split, parser, batch_size, process, reading)
    records, num_batches = _eval_share(builder.data_dir, split, opened, batch_size, *process)
    local = batch_size // process_count
    return tf_engine.eval_chunks(opened, parser, records, chunk, local, num_batches, reading)


def check_memory(
    data: 'dataset.Data',
    *,
    batch_size: int,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING),
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    caption_dropout: float = 0.0,
    process_count: int = 1,
    split: str = schema.TRAIN,
    on_bad_records: str = STOP,
    parallel_reads: int = 4,
    prefetch: int = _AUTOTUNE,
    ram_budget_gb: float = 0.0,
    processes_on_host: int = 1,
    engine: str = CHUNKS,
) -> None:
    """Checks that `train_dataset` with these arguments fits into the memory of this host.

    See `coyo11m_tfds.reading.memory` for what is counted. Rows, and a data set without a chunk
    index, are read without windows and always fit.

    Args:
        data and all others: as of `train_dataset`.
        ram_budget_gb: 10^9 bytes that reading may take on this host; 0 for half of the memory that
            this machine or container has.
        processes_on_host: how many processes of the run share this host.
        engine: as of `train_batches`.

    Raises:
        ValueError: it takes more; the message says how much, and what would fit.
    """
    if _open_rows(data, split, engine):
        return
    from coyo11m_tfds.reading import dataset, tf_engine

    builder = dataset.open_dataset(data)
    opened = dataset.open_split(builder, split)
    if opened is None:
        return
    parser = tf_engine.make_parser(
        builder, features, caption_dropout=caption_dropout, with_mask=on_bad_records == SKIP
    )
    order = Order(opened.index.shard_lengths, 0, batch_size, chunk, lanes, window)
    need = memory.Need(
        batch_size=batch_size // process_count,
        chunk=chunk,
        lanes=-(-lanes // process_count),
        window=order.window,
        parallel_reads=parallel_reads,
        prefetch=prefetch,
        parsed_nbytes=parser.record_nbytes,
        raw_nbytes=opened.record_nbytes,
    )
    memory.check(need, budget_gb=ram_budget_gb, processes_on_host=processes_on_host)


# --- The engine `rows` -------------------------------------------------------------------------


def _open_rows(
    data: 'dataset.Data', split: str, engine: str, verify: str = verified.ONCE
) -> tuple[StoredDataset, IndexedSplit] | None:
    """The data set and the split that rows are read of; None where chunks are."""
    if engine not in ENGINES:
        raise ValueError(f'engine={engine!r} is none of {", ".join(map(repr, ENGINES))}')
    if verify not in verified.MODES:
        raise ValueError(f'verify={verify!r} is none of {", ".join(map(repr, verified.MODES))}')
    if engine == CHUNKS:
        return None
    folder = os.fspath(data if isinstance(data, str | os.PathLike) else data.data_dir)
    stored = _read_stored(folder)
    opened = stored and stored.open_split(split)
    if opened and (engine == ROWS or len(opened.index.shard_lengths) <= MAX_FILES):
        return stored, opened
    if engine == ROWS:
        raise ValueError(
            f'{folder}: engine={ROWS!r} reads local data sets with a chunk index of split '
            f'{split!r}, and this is none; set engine={CHUNKS!r}'
        )
    return None


def _train_rows(
    stored: StoredDataset,
    split: IndexedSplit,
    verify: str,
    text: str,
    asked: types.SimpleNamespace,
) -> Iterator[dict[str, np.ndarray]]:
    """`train_batches` by rows; `asked` has the arguments of `train_dataset`."""
    _check_dropout(asked.caption_dropout)
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
    _check_share(asked.batch_size, *process, asked.lanes)
    order = Order(
        split.index.shard_lengths,
        asked.seed,
        asked.batch_size,
        asked.chunk,
        asked.lanes,
        asked.window,
    )
    own = _own_lanes(order, *process)
    order.locate(asked.start_step)  # raises before anything is read
    return rows.train_batches(reader, order, own, asked.start_step, _ahead(asked.prefetch))


def _eval_rows(
    stored: StoredDataset,
    split: IndexedSplit,
    verify: str,
    text: str,
    asked: types.SimpleNamespace,
) -> Iterator[dict[str, np.ndarray]]:
    """`eval_batches` by rows; `asked` has the arguments of `eval_dataset`."""
    process = asked.process_index, asked.process_count
    _check_share(asked.batch_size, *process)
    reader = _row_reader(stored, split, verify, text, asked, fixed_crop=EVAL_CROP, with_mask=True)
    records, num_batches = _eval_share(
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
    found, text_dim = {}, stored.text_dim
    if schema.LATENTS in stored.columns and schema.LATENTS in asked.features:
        latents = stored.columns[schema.LATENTS]
        found[schema.LATENTS] = column_reader.open_in_place(latents, *where)
    if text:
        vectors = stored.text_column(text)
        found[schema.TEXT_EMBEDDING] = column_reader.open_beside(vectors, *where)
        text_dim = vectors.width
    return RowReader(
        split,
        RowChoices(
            tuple(asked.features),
            stored.latent_dtype,
            text_dim,
            num_tokens=stored.num_tokens,
            **choices,
        ),
        stored.record_layout,
        verify=verify,
        on_bad_records=asked.on_bad_records,
        counter=asked.counter,
        max_bad_fraction=asked.max_bad_fraction,
        columns=found,
    )


def _check_no_column(data: 'dataset.Data', text: str) -> None:
    if text:
        raise ValueError(f"{data}: text={text!r} is a column, which engine='rows' alone can read")


def _bind(
    function: Callable, data: 'dataset.Data', arguments: Mapping[str, Any]
) -> types.SimpleNamespace:
    """The arguments of a call with its defaults."""
    bound = inspect.signature(function).bind(data, **arguments)
    bound.apply_defaults()
    return types.SimpleNamespace(**bound.arguments)


def _ahead(prefetch: int) -> int:
    return _ROW_BATCHES_AHEAD if prefetch < 0 else max(1, prefetch)


# --- Shares of processes -----------------------------------------------------------------------


def _check_dropout(caption_dropout: float) -> None:
    if not 0 <= caption_dropout <= 1:
        raise ValueError(f'caption_dropout={caption_dropout} is not in [0, 1]')


def _check_share(
    batch_size: int, process_index: int, process_count: int, lanes: int | None = None
) -> None:
    """Raises unless processes get equal parts of a batch, and of its lanes if it has any."""
    if not 0 <= process_index < process_count:
        raise ValueError(f'process_index={process_index} is not in [0, {process_count})')
    if batch_size > 0 and not batch_size % process_count and not (lanes or 0) % process_count:
        return
    working, working_lanes = nearest_shares(batch_size, lanes or 1, process_count)
    asked, advice = f'batch_size={batch_size}', f'batch_size={working}'
    if lanes is not None:
        asked, advice = f'{asked} with lanes={lanes}', f'{advice} with lanes={working_lanes}'
    raise ValueError(
        f'{asked} cannot be shared by {process_count} processes equally; {advice} works'
    )


def _own_lanes(order: Order, process_index: int, process_count: int) -> range:
    each = order.lanes // process_count
    return range(process_index * each, (process_index + 1) * each)


def _eval_share(
    data_dir: str | os.PathLike[str],
    name: str,
    split: IndexedSplit,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> tuple[range, int]:
    """The records of a split that one process evaluates, and how many batches all of them have."""
    size = int(split.index.shard_lengths.sum())
    if not size:
        raise ValueError(f'{data_dir}: split {name!r} is empty')
    num_batches = -(-size // batch_size)
    each = num_batches * (batch_size // process_count)
    begin = min(size, process_index * each)
    return range(begin, min(size, begin + each)), num_batches


def _open_split(data: 'dataset.Data', split: str) -> IndexedSplit | None:
    """A split with a chunk index, wherever it lies; None where there is none."""
    if opened := _open_rows(data, split, AUTO):
        return opened[1]
    from coyo11m_tfds.reading import dataset

    return dataset.open_split(dataset.open_dataset(data), split)
