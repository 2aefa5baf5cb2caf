"""Batches of NumPy in a planned order, and those as sharded jax.Arrays.

    path = 'OUT/coyo11m_tfds/latents/1.0.0'
    batches = input_pipeline.train_batches(path, batch_size=256, seed=0, features=('latents',))
    next(batches)['latents']                  # float16 (256, 4, 32, 32)
    state = batches.get_state()               # {'samples': 16, 'order': '9f3a...'}, for set_state

    for batch in input_pipeline.train_arrays(path, sharding, batch_size=256, seed=0):
        state = step(state, batch)

Training samples come in the order of `reading.order`. Every number of processes that divides the
lanes sees the same global batches, and every batch size that the lanes divide reads the same
sequence. A run that resumes, with these or others, starts to read at what comes next: it needs a
number, samples of every lane, and the same data set and settings (`position_settings`).

Two engines give the same batches, bit for bit, and import neither TensorFlow nor JAX. `rows`
gathers local data out of memory-mapped shards; `chunks` fetches runs of records from gs://.
Features keep the dtype and the layout of the source. Scaling is the model's business.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.stored_dataset import Data, DatasetStats, StoredDataset, open_data
from coyo11m_tfds.reading import engines, process_settings
from coyo11m_tfds.reading.batches import DROP_TEXT, MASK, ArraySpec, Batch, Batches
from coyo11m_tfds.reading.damage import DEFAULT_MAX_FRACTION, ONCE, STOP
from coyo11m_tfds.reading.files import ReadCounter, ReadCounts
from coyo11m_tfds.reading.order import Order, OrderSettings, nearest_shares
from coyo11m_tfds.reading.settings import AUTO, CHUNKS, ENGINES, ROWS, TF_DATA, Reading, Training

if TYPE_CHECKING:
    import jax
    import tensorflow as tf

    from coyo11m_tfds.reading.to_device import Arrays, key_words, process_share, to_device

__all__ = [
    'AUTO',
    'CHUNKS',
    'DROP_TEXT',
    'ENGINES',
    'MASK',
    'ROWS',
    'TF_DATA',
    'ArraySpec',
    'Arrays',
    'Batch',
    'Batches',
    'DamagedError',
    'DatasetStats',
    'Order',
    'OrderSettings',
    'ReadCounter',
    'ReadCounts',
    'StoredDataset',
    'engine_of',
    'eval_batches',
    'eval_dataset',
    'key_words',
    'nearest_shares',
    'open_data',
    'position_fingerprint',
    'position_settings',
    'prepare_process',
    'process_share',
    'quiet_tensorflow',
    'to_device',
    'train_arrays',
    'train_batches',
    'train_dataset',
    'train_order',
]

prepare_process = process_settings.apply
quiet_tensorflow = process_settings.quiet_tensorflow

_AUTOTUNE = -1  # as `tf.data.AUTOTUNE`
_DEFAULT_FEATURES = (schema.KEY, schema.LATENTS, schema.TEXT_EMBEDDING)
_NEED_JAX = ('Arrays', 'key_words', 'process_share', 'to_device')


def __getattr__(name: str) -> Any:
    """Imports what needs JAX when it is asked for."""
    if name in _NEED_JAX:
        return getattr(importlib.import_module('coyo11m_tfds.reading.to_device'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def train_order(data: Data, settings: OrderSettings, split: str = schema.TRAIN) -> Order | None:
    """The order in which `train_batches` reads; None for a data set without a chunk index.

        order = train_order(path, OrderSettings(seed=0))
        order.locate(sample)     # (epoch, place in the epoch) of every lane's sample

    Raises:
        ValueError: the data set has fewer records than lanes, or no such split.
    """
    found = open_data(data).split(split)
    return Order(found.index.shard_lengths, settings) if found else None


def position_settings(
    data: Data, settings: OrderSettings, split: str = schema.TRAIN
) -> dict[str, str | int]:
    """What decides, with a number of samples a lane, a place in the data.

    A checkpoint keeps it, and a resumed run compares it entry by entry. The entry `data_set` is the
    name, config, version and split, and a digest of these, the source's fingerprint and the lengths
    of the shards; the others are the settings.
    """
    return engines.position(open_data(data), settings, split)


def position_fingerprint(settings: Mapping[str, str | int]) -> str:
    """One digest of `position_settings(...)`, 16 hex digits: `order` in the state of batches."""
    return engines.order_digest(settings)


def engine_of(data: Data, engine: str = AUTO, split: str = schema.TRAIN) -> str:
    """Returns what reads the files for `train_batches`: 'rows' or 'chunks'; raises as it does."""
    opened = engines.open_split(open_data(data), split, engine)
    return opened.engine if opened else CHUNKS


def _opened(asked: Reading) -> engines.Opened | None:
    return engines.open_split(asked.stored, asked.split, asked.engine)


def train_batches(
    data: Data,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    start_sample: int = 0,
    features: Sequence[str] = _DEFAULT_FEATURES,
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
    verify: str = ONCE,
    text: texts.Spec = '',
    stride: int = 1,
) -> Batches:
    """This process's part of the training batches from `start_step` on, without end.

        batches = input_pipeline.train_batches(path, batch_size=256, seed=0, start_step=1000)
        next(batches)['latents']        # float16 (256, 4, 32, 32)

    Args:
        data: Folder of a data set, its builder, or what `open_data` gives for one of these: then
            several functions read its metadata and chunk index once.
        batch_size: Records in a global batch; this process gets `b = batch_size / process_count`.
        seed: Seed of the order and of every choice about a sample.
        start_step: Batches of this size that come before the first one.
        start_sample: Samples of every lane that come before those; not 0 after batches of another
            size, which took so many.
        features: Some of `key`, `latents`, `text_embedding`, `tokens`, `caption`, or names of
            columns that `python -m coyo11m_tfds.add_column` has added.
        chunk: Records read together, a multiple of `schema.CHUNK_STRIDE`.
        lanes: Streams that every batch takes an equal part of; a multiple of process_count.
        window: Records shuffled together within a lane.
        caption_dropout: Share of samples marked in `drop_text`, if a feature asked for is text.
        process_index, process_count: Which part of each global batch this process gets.
        split: 'train', or another split of the data set.
        on_bad_records: 'stop': a damaged record is an error that names its file and number.
            'skip': it is left out, counted and warned of; in its place are zeros, which `mask`
            tells from records, so that everything else comes when it would have come. A file that
            is missing, refused or out of reach is an error either way.
        max_bad_fraction: With 'skip', share of the split's records, each counted once, that may be
            bad; more of them, and more than 64, are an error.
        counter: Counts what is read.
        parallel_reads: Chunks being read at a time in each lane; rows have no use for it.
        prefetch: Batches kept ready; a negative number keeps 2.
        engine: 'rows' gathers out of memory-mapped files, which have to be local and must not be
            changed meanwhile; 'chunks' fetches runs of records, each with one request; 'auto' takes
            rows for a local data set and chunks for one on gs://; 'tf_data' reads through
            `train_dataset`, as does a data set without a chunk index. All give the same batches.
        verify: When `rows` compares records with their CRC-32C: 'once' when this process first
            reads a record, 'always', or 'never'. `chunks` always does.
        text: Source of `text_embedding` or `tokens`: '' for the records, the name of an added
            column, or several with weights, of which a hash of seed, epoch and key chooses one a
            sample: `{'': 2, 'short': 1}`, or as a string `'records:2,short:1'`. They have to be of
            one kind: embeddings of one encoder, or tokens of one vocabulary, which are padded with
            -1 to the longest. See `texts.parse`.
        stride: Only every `stride`-th batch is read. W workers that begin at `start_step + w` with
            a stride of W read together, in turns, the batches of a single one.

    Returns:
        An iterator with `step`, `steps_per_epoch`, `spec`, `get_state`, `set_state`, `close` and
        `check_memory`; dropping it ends its threads, too. A batch is a dict of arrays that nothing
        else uses, of the features asked for: key=int64 `(b,)`, latents=float16|bfloat16
        `(b, 4, 32, 32)`, text_embedding=float16 `(b, D)`, tokens=int32 `(b, T)`, caption=bytes
        `(b,)`, a column in its own dtype and shape; drop_text=bool `(b,)` with caption_dropout > 0
        and embeddings or tokens; mask=bool `(b,)` with on_bad_records='skip'. It raises
        `DamagedError` where a record cannot be read or too many are bad, and `OSError` where a file
        is missing, refused, out of reach or, of `rows`, has changed since it was opened; what
        TensorFlow reads `tf.errors.OpError`.

    Raises:
        ValueError: settings do not fit together (the message names some that do), a feature is not
            in the data set, or 'rows' is asked for files that are not local or have no chunk index.
        OSError: there is no data set, or its metadata cannot be read.
    """
    return _train_batches(Training(**locals()))


def _train_batches(asked: Training) -> Batches:
    opened = _opened(asked)
    if opened is None or asked.engine == TF_DATA:
        from coyo11m_tfds.reading import tf_data

        return tf_data.train_batches(asked, opened)
    return engines.train_batches(asked, opened)


def eval_batches(
    data: Data,
    *,
    batch_size: int,
    features: Sequence[str] = _DEFAULT_FEATURES,
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
    verify: str = ONCE,
    text: texts.Spec = '',
) -> Batches:
    """This process's part of every record of a split, once, in the order of the shards.

    The crop is always the middle one. All processes get `steps_per_epoch` batches, all of them
    full: `mask` (bool `(b,)`) is False for rows of zeros that fill up. Process p gets the p-th of
    equal runs of consecutive records.

    Args:
        text: as of `train_batches`; of several the first is taken for every record.
        parallel_reads: chunks being read at a time.
        data and all others: as of `train_batches`.

    Returns:
        An iterator as of `train_batches`; `set_state` takes states of the same batch size and
        number of processes.

    Raises:
        ValueError, OSError: as of `train_batches`; or the split is empty.
    """
    asked = Reading(**locals())
    opened = _opened(asked)
    if opened is None or asked.engine == TF_DATA:
        from coyo11m_tfds.reading import tf_data

        return tf_data.eval_batches(asked, opened)
    return engines.eval_batches(asked, opened)


def train_dataset(
    data: Data,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    start_sample: int = 0,
    features: Sequence[str] = _DEFAULT_FEATURES,
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
    verify: str = ONCE,
    text: texts.Spec = '',
) -> 'tf.data.Dataset':
    """The batches of `train_batches` as a `tf.data.Dataset` that interleaves this host's lanes.

    Args:
        prefetch: batches kept ready; a negative number leaves it to TensorFlow.
        engine: what reads the lanes.
        data and all others: as of `train_batches`.

    Returns:
        Batches as of `train_batches`, captions as strings. An iterator over them raises
        `tf.errors.OpError` where a file or a record cannot be read, or too many records are bad.

    Raises:
        ValueError, OSError: as of `train_batches`.
    """
    asked = Training(**locals())
    from coyo11m_tfds.reading import tf_data

    return tf_data.train(asked, _opened(asked))


def eval_dataset(
    data: Data,
    *,
    batch_size: int,
    features: Sequence[str] = _DEFAULT_FEATURES,
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
    verify: str = ONCE,
    text: texts.Spec = '',
) -> 'tf.data.Dataset':
    """The batches of `eval_batches` as a `tf.data.Dataset`, whose `cardinality()` is their number.

    Args, Returns and Raises: as of `eval_batches` and `train_dataset`.
    """
    asked = Reading(**locals())
    from coyo11m_tfds.reading import tf_data

    return tf_data.evaluate(asked, _opened(asked))


def train_arrays(
    data: Data,
    sharding: 'jax.sharding.Sharding',
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    start_sample: int = 0,
    features: Sequence[str] = _DEFAULT_FEATURES,
    chunk: int = 64,
    lanes: int = 16,
    window: int = 1024,
    caption_dropout: float = 0.0,
    split: str = schema.TRAIN,
    on_bad_records: str = STOP,
    max_bad_fraction: float = DEFAULT_MAX_FRACTION,
    counter: ReadCounter | None = None,
    parallel_reads: int = 4,
    prefetch: int = _AUTOTUNE,
    engine: str = AUTO,
    verify: str = ONCE,
    text: texts.Spec = '',
    ahead: int = 2,
) -> 'Arrays':
    """The batches of `train_batches` as global `jax.Array`s; JAX says which part is this process's.

    Args:
        sharding: of the leading axis; it is applied to every feature.
        ahead: batches that are on the devices, or on their way, before they are asked for.
        data and all others: as of `train_batches`.

    Returns:
        An iterator as of `to_device`, with `step`, `steps_per_epoch`, `spec`, `get_state`,
        `set_state` and `close`.

    Raises:
        ValueError, OSError: as of `train_batches` and `to_device`.
    """
    asked = dict(locals())
    from coyo11m_tfds.reading import to_device

    del asked['sharding'], asked['ahead']
    index, count = to_device.process_share(sharding)
    batches = _train_batches(Training(**asked, process_index=index, process_count=count))
    return to_device.to_device(batches, sharding, ahead)
