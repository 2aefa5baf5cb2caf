"""Records to batches of NumPy in a planned order, and those to sharded jax.Arrays.

    path = 'OUT/coyo11m_tfds/latents/1.0.0'
    batches = input_pipeline.train_batches(path, batch_size=256, seed=0, features=('latents',))
    for batch in input_pipeline.to_device(batches, sharding):
        state = step(state, batch)

Training samples come in the order of `reading.order`: of each of L lanes a sequence that is a pure
function of seed and data set. A batch takes the next B/L samples of every lane, and process p of P
owns the lanes `[p*L/P, (p+1)*L/P)`. So every P that divides L sees the same global batches, and
every B that L divides reads the same sequence. A run that resumes, on that or another number of
processes and with that or another batch size, continues with exactly what comes next: it starts to
read there. All it needs to know is a number, samples of every lane, and that data set and settings
are the same (`position_settings`).

Two engines give the same batches, bit for bit, and import neither TensorFlow nor JAX. `rows`, for
local files, gathers what is asked for out of memory-mapped shards; `chunks`, for gs://, out of runs
of records that it fetches. `train_dataset` gives them as a `tf.data.Dataset`. `key`, `latents`,
`text_embedding`, `tokens` and `caption` keep the dtype and the layout of the source. Scaling is the
model's business.
"""

import dataclasses
import importlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coyo11m_tfds import schema, texts
from coyo11m_tfds.reading import (
    engines,
    memory,
    process_settings,
    shares,
    verified,
)
from coyo11m_tfds.reading.bad_records import DEFAULT_MAX_FRACTION, SKIP, STOP
from coyo11m_tfds.reading.counter import ReadCounter, ReadCounts
from coyo11m_tfds.reading.names import AUTO, CHUNKS, DROP_TEXT, ENGINES, MASK, ROWS, TF_DATA
from coyo11m_tfds.reading.opened_data import OpenedData, open_data
from coyo11m_tfds.reading.order import Order, OrderSettings
from coyo11m_tfds.reading.row_reader import RowChoices
from coyo11m_tfds.reading.shares import nearest_shares
from coyo11m_tfds.storage import json_digest, stored_files

if TYPE_CHECKING:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    from coyo11m_tfds.reading import dataset
    from coyo11m_tfds.reading.dataset import (
        DatasetStats,
        dataset_stats,
        open_dataset,
        text_columns,
    )
    from coyo11m_tfds.reading.on_device import key_words, to_device

    Data = dataset.Data | OpenedData

__all__ = [
    'AUTO',
    'CHUNKS',
    'DROP_TEXT',
    'ENGINES',
    'MASK',
    'ROWS',
    'TF_DATA',
    'DatasetStats',
    'Order',
    'OrderSettings',
    'ReadCounter',
    'ReadCounts',
    'check_memory',
    'data_sets_below',
    'dataset_stats',
    'engine_of',
    'eval_batches',
    'eval_dataset',
    'key_words',
    'nearest_shares',
    'open_data',
    'open_dataset',
    'position_fingerprint',
    'position_settings',
    'prepare_process',
    'quiet_tensorflow',
    'text_columns',
    'to_device',
    'train_batches',
    'train_dataset',
    'train_order',
]

prepare_process = process_settings.apply
quiet_tensorflow = process_settings.quiet_tensorflow

_AUTOTUNE = -1  # `tf.data.AUTOTUNE`

# What needs JAX or TensorFlow, by the modules of `reading` that have it.
_LATER = {
    'on_device': ('key_words', 'to_device'),
    'dataset': ('DatasetStats', 'dataset_stats', 'open_dataset', 'text_columns'),
}


def __getattr__(name: str) -> Any:
    """Imports what needs JAX or TensorFlow when it is asked for."""
    for module, there in _LATER.items():
        if name in there:
            return getattr(importlib.import_module(f'coyo11m_tfds.reading.{module}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def data_sets_below(folder: str) -> list[str]:
    """The folders of data sets at or below one, local or `gs://`; see `stored_files`."""
    return stored_files.folders_with(folder, schema.INFO_FILE)


# --- The place in the data ---------------------------------------------------------------------


def train_order(data: 'Data', settings: OrderSettings, split: str = schema.TRAIN) -> Order | None:
    """The order in which `train_batches` reads; None for a data set without a chunk index.

        order = train_order(path, OrderSettings(seed=0))
        order.locate(sample)     # (epoch, place in the epoch) of every lane's sample, for the log
        order.lane_length        # samples of a lane in an epoch

    Raises:
        ValueError: the data set has fewer records than lanes.
    """
    opened = _open_split(data, split)
    return Order(opened.split.index.shard_lengths, settings) if opened else None


def position_settings(
    data: 'Data', settings: OrderSettings, split: str = schema.TRAIN
) -> dict[str, str | int]:
    """All that a number of samples a lane needs beside it to mean one place in the data.

    A checkpoint keeps this; a resumed run compares it entry by entry, so that it can say
    which one differs. The entry `data_set` is the name, config, version and split, and a digest of
    these, the source's fingerprint and the lengths of the shards; the others are the settings.
    """
    full_name, shards, metadata = _describe(data, split)
    name = f'{full_name} {split}'
    source = metadata.get(schema.META_SOURCE_FINGERPRINT)
    data_set = f'{name} {json_digest.sha256([name, source, *shards])[:16]}'
    return {'data_set': data_set, **dataclasses.asdict(settings)}


def position_fingerprint(settings: Mapping[str, str | int]) -> str:
    """One digest of `position_settings(...)`, 16 hex digits."""
    return json_digest.sha256(dict(settings))[:16]


def _describe(data: 'Data', split: str) -> tuple[str, Sequence[int], Mapping[str, Any]]:
    """The full name of a data set, the lengths of a split's shards, and the metadata."""
    data = open_data(data)
    if stored := data.stored:
        found = stored.splits.get(split)
        return stored.full_name, found.shard_lengths if found else [], stored.metadata
    from coyo11m_tfds.reading import dataset

    info = dataset.open_dataset(data.source).info
    shards = info.splits[split].shard_lengths if split in info.splits else []
    return info.full_name, shards, info.metadata or {}


# --- Batches on the host -----------------------------------------------------------------------


def train_batches(
    data: 'Data',
    *,
    engine: str = AUTO,
    verify: str = verified.ONCE,
    text: texts.Spec = '',
    stride: int = 1,
    **arguments: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of the training batches from `start_step` on, without end.

        batches = input_pipeline.train_batches(path, batch_size=256, seed=0, start_step=1000)
        next(batches)['latents']        # float16 (256, 4, 32, 32)

    Args:
        data: the folder of a data set, its builder, or what `open_data` gives for one of these, so
            that several functions read its metadata and chunk index once.
        engine: 'rows' gathers out of memory-mapped files, which have to be local and must not be
            changed meanwhile; 'chunks' fetches runs of records, each with one request; 'auto' takes
            rows for a local data set and chunks for one on gs://. Both give the same batches. A
            data set without a chunk index goes through `train_dataset`.
        verify: when `rows` compares records with their CRC-32C: 'once' when this process first
            reads a record, 'always', or 'never'. `chunks` always does.
        text: where `text_embedding` or `tokens` comes from: '' for the records, the name of a
            column that `python -m coyo11m_tfds.add_column` has added, or several with weights, of
            which a hash of seed, epoch and key chooses one a sample: `{'': 2, 'short': 1}`, or as
            a string `'records:2,short:1'`. They have to be of one kind: embeddings of one encoder,
            or tokens of one vocabulary, which are padded with -1 to the longest. See `texts.parse`.
        stride: only every `stride`-th batch is read. W workers that begin at `start_step + w` with
            a stride of W read together, in turns, the batches of a single one.
        **arguments: as of `train_dataset`. `features` may name added columns, too.
            `private_threads` has no effect, nor has `parallel_reads` for `rows`; a negative
            `prefetch` keeps 2 batches ready.

    Returns:
        Batches as of `train_dataset`, of arrays that nothing else uses; an added column as
        `(b, n)` or `(b,)` in its own dtype. The iterator raises `ValueError` where a record cannot
        be read or too many are bad, and `OSError` where a file is missing, refused, out of reach
        or, of `rows`, has changed since it was opened; without a chunk index `tf.errors.OpError`.
        Dropping the iterator ends its threads.

    Raises:
        ValueError: as of `train_dataset`; or `engine` or `verify` is unknown, or 'rows' is asked
            for where files are not local or have no chunk index.
        OSError: the metadata cannot be read.
    """
    if stride < 1:
        raise ValueError(f'stride={stride} is not at least 1')
    opened = engines.open_split(
        open_data(data), arguments.get('split', schema.TRAIN), engine, verify
    )
    if opened is None or engine == TF_DATA:
        batches = train_dataset(data, verify=verify, text=text, **arguments).as_numpy_iterator()
        return itertools.islice(batches, 0, None, stride)
    return engines.train(opened, verify, text, stride, _bind(train_dataset, data, arguments))


def engine_of(data: 'Data', engine: str = AUTO, split: str = schema.TRAIN) -> str:
    """Returns what reads the files for `train_batches`: 'rows' or 'chunks'; raises as it does."""
    opened = engines.open_split(open_data(data), split, engine)
    return opened.engine if opened else CHUNKS


def eval_batches(
    data: 'Data',
    *,
    engine: str = AUTO,
    verify: str = verified.ONCE,
    text: texts.Spec = '',
    **arguments: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of every record of a split, once, in the order of the shards.

    Args:
        data, engine, verify: as of `train_batches`.
        text: as of `train_batches`; of several the first is taken for every record.
        **arguments: as of `eval_dataset`.

    Returns:
        Batches as of `eval_dataset`; errors as of `train_batches`.

    Raises:
        ValueError, OSError: as of `train_batches`; or the split is empty.
    """
    opened = engines.open_split(
        open_data(data), arguments.get('split', schema.VALIDATION), engine, verify
    )
    if opened is None or engine == TF_DATA:
        return eval_dataset(data, verify=verify, text=text, **arguments).as_numpy_iterator()
    return engines.evaluate(opened, verify, text, _bind(eval_dataset, data, arguments)).read()


def train_dataset(
    data: 'Data',
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    start_sample: int = 0,
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
    engine: str = AUTO,
    verify: str = verified.ONCE,
    text: texts.Spec = '',
) -> 'tf.data.Dataset':
    """The batches of `train_batches` as a `tf.data.Dataset` that interleaves this host's lanes.

    Args:
        data: the folder of a data set, or its builder.
        batch_size: records in a global batch; this process gets `b = batch_size / process_count`.
        seed: decides the order and every choice about a sample.
        start_step: the first batch is what the one after `start_step` batches would have been.
        start_sample: samples of every lane that come before those; not 0 after batches of another
            size, which took so many.
        features: some of `coyo11m_tfds.reading.dataset.FEATURES`, `tokens`, or names of columns.
        chunk: records read together, a multiple of `schema.CHUNK_STRIDE`.
        lanes: streams that every batch takes an equal part of; a multiple of process_count.
        window: records shuffled together within a lane.
        caption_dropout: share of samples marked in `drop_text`, if a feature asked for is text.
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
        prefetch: batches kept ready; a negative number leaves it to TensorFlow.
        engine, verify, text: as of `train_batches`; the engine reads the lanes.

    Returns:
        Batches `dict(key=int64 (b,), latents=float16|bfloat16 (b,4,32,32),
        text_embedding=float16 (b,D), tokens=int32 (b,T), caption=string (b,))`, of these the
        features asked for; `drop_text=bool (b,)` with caption_dropout > 0 and embeddings or tokens;
        `mask=bool (b,)` with on_bad_records='skip'. An iterator over them raises
        `tf.errors.OpError` where a file or a record cannot be read, or too many records are bad.

    Raises:
        ValueError: for settings that do not fit together, naming some that do, or a feature that
            the data set does not have.
    """
    asked = types.SimpleNamespace(**locals())
    from coyo11m_tfds.reading import tf_data

    opened = engines.open_split(open_data(data), split, engine, verify)
    if opened:
        return tf_data.train(engines.train_lanes(opened, verify, text, asked), prefetch)
    shares.check_dropout(caption_dropout)
    shares.check_share(batch_size, process_index, process_count)
    _check_no_column(data, text)
    return tf_data.train_ordinary(_without_index(data, split), asked)


def eval_dataset(
    data: 'Data',
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
    engine: str = AUTO,
    verify: str = verified.ONCE,
    text: texts.Spec = '',
) -> 'tf.data.Dataset':
    """This process's part of every record of a split, once, in the order of the shards.

    The crop is always the middle one. All processes get the same number of batches, which is
    `dataset.cardinality()`, all of them full: `mask` (bool `(b,)`) is False for rows of zeros that
    fill up. Process p gets the p-th of equal runs of consecutive records.

    Args and Returns: as of `train_dataset`, plus `mask`; `parallel_reads` is for all together.

    Raises:
        ValueError: if the split is empty, or as of `train_dataset`.
    """
    asked = types.SimpleNamespace(**locals())
    from coyo11m_tfds.reading import tf_data

    opened = engines.open_split(open_data(data), split, engine, verify)
    if opened:
        return tf_data.evaluate(engines.evaluate(opened, verify, text, asked), prefetch)
    shares.check_share(batch_size, process_index, process_count)
    _check_no_column(data, text)
    return tf_data.evaluate_ordinary(_without_index(data, split), asked)


def check_memory(
    data: 'Data',
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
    text: texts.Spec = '',
) -> None:
    """Checks that `train_batches` with these arguments fits into the memory of this host.

    See `coyo11m_tfds.reading.memory` for what is counted. Rows, and a data set without a chunk
    index, always fit.

    Args:
        data and all others: as of `train_dataset`.
        ram_budget_gb: 10^9 bytes that reading may take on this host; 0 for half of the memory that
            this machine or container has.
        processes_on_host: how many processes of the run share this host.
        engine, text: as of `train_batches`.

    Raises:
        ValueError: it takes more; the message says how much, and what would fit.
    """
    opened = engines.open_split(open_data(data), split, engine)
    if opened is None or opened.engine == ROWS:
        return
    stored, split_, _ = opened
    chosen = stored.choose_texts(text)
    columns = stored.find_columns(features, chosen)
    choices = RowChoices(
        tuple(features),
        stored.latent_dtype,
        stored.text_dim,
        caption_dropout=caption_dropout,
        with_mask=on_bad_records == SKIP,
        num_tokens=stored.num_tokens,
        text=chosen if chosen.in_columns else None,
    )
    stored.check_features(sorted(choices.in_records))
    order = Order(split_.index.shard_lengths, OrderSettings(0, chunk, lanes, window))
    need = memory.Need(
        batch_size=batch_size // process_count,
        chunk=chunk,
        lanes=-(-lanes // process_count),
        window=order.window,
        parallel_reads=parallel_reads,
        prefetch=prefetch,
        parsed_nbytes=choices.row_nbytes(columns),
        raw_nbytes=split_.record_nbytes + sum(c.row_nbytes for c in columns.values()),
    )
    memory.check(need, budget_gb=ram_budget_gb, processes_on_host=processes_on_host)


# --- What they share -----------------------------------------------------------------------------


def _check_no_column(data: 'Data', text: texts.Spec) -> None:
    if any(texts.parse(text)):
        raise ValueError(
            f'{data}: text={text!r} is a column, and without a chunk index it cannot be read'
        )


def _bind(function: Callable, data: 'Data', arguments: Mapping[str, Any]) -> types.SimpleNamespace:
    """The arguments of a call with its defaults."""
    bound = inspect.signature(function).bind(data, **arguments)
    bound.apply_defaults()
    return types.SimpleNamespace(**bound.arguments)


def _open_split(data: 'Data', split: str) -> engines.Opened | None:
    """A split with a chunk index, wherever it lies; None where there is none.

    Raises:
        ValueError, OSError: there is no such data set or split, or it cannot be read.
    """
    opened = engines.open_split(open_data(data), split, AUTO)
    if opened is None:
        _without_index(data, split)
    return opened


def _without_index(data: 'Data', split: str) -> 'tfds.core.DatasetBuilder':
    """The builder of a data set that TFDS reads; raises a ValueError if it has no such split."""
    from coyo11m_tfds.reading import dataset

    builder = dataset.open_dataset(open_data(data).source)
    dataset.open_split(builder, split)
    return builder
