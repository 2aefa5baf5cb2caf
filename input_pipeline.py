"""Reads data sets in a planned order, as NumPy batches or as sharded `jax.Array`s.

    path = 'OUT/coyo11m_tfds/latents/1.0.0'
    batches = input_pipeline.train_batches(path, batch_size=256, seed=0, features=('latents',))
    next(batches)['latents']                  # float16 (256, 4, 32, 32)
    state = batches.get_state()    # {'step': 1, 'samples': {'9f3a...': 16}}, for set_state

    for batch in input_pipeline.train_arrays(path, sharding, batch_size=256, seed=0):
        state = step(state, batch)

docs/reading.md says what the order of the samples promises, and describes mixtures of data sets,
which can replace a data set. Two engines give the same batches, bit for bit, and import neither
TensorFlow nor JAX. Features keep the dtype and the layout of the source. The model scales them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.stored_dataset import Data, DatasetStats, StoredDataset, open_data
from coyo11m_tfds.dataset.texts import TextSpec
from coyo11m_tfds.memory.read_counts import ReadCounter, ReadCounts
from coyo11m_tfds.process.preparation import prepare_process, quiet_tensorflow
from coyo11m_tfds.process.takes import takes
from coyo11m_tfds.reading import damage, engines, opened_splits, training
from coyo11m_tfds.reading.batches import (
    CROP,
    DROP_TEXT,
    MASK,
    NOISE_SEED,
    ArraySpec,
    Batch,
    Batches,
)
from coyo11m_tfds.reading.numbered_records import Records
from coyo11m_tfds.reading.options import (
    AUTO,
    CHUNKS,
    ENGINES,
    ROWS,
    TF_DATA,
    ArrayOptions,
    Mix,
    MixSource,
    ReadOptions,
    TrainOptions,
    mix_stats,
    open_mix,
)
from coyo11m_tfds.reading.training import ReadPlan
from coyo11m_tfds.sampling.mixture import Cursor
from coyo11m_tfds.sampling.order import Order, OrderSettings

if TYPE_CHECKING:
    import jax
    import tensorflow as tf

    from coyo11m_tfds.reading.to_device import Arrays, key_words, process_share, to_device

__all__ = ['train_batches']
__all__ += ['train_arrays', 'train_dataset']
__all__ += ['eval_batches', 'eval_dataset']
__all__ += ['Records', 'records']
__all__ += ['DamagedError']
__all__ += ['Arrays', 'key_words', 'process_share', 'to_device']
__all__ += ['Data', 'DatasetStats', 'StoredDataset', 'open_data']
__all__ += ['Mix', 'MixSource', 'mix_stats', 'open_mix']
__all__ += ['Cursor', 'ReadPlan', 'planned_batches', 'train_plan']
__all__ += ['Order', 'OrderSettings', 'ReadCounter', 'ReadCounts']
__all__ += ['ArraySpec', 'Batch', 'Batches']
__all__ += ['ArrayOptions', 'ReadOptions', 'TrainOptions']
__all__ += ['CROP', 'DROP_TEXT', 'MASK', 'NOISE_SEED']
__all__ += ['AUTO', 'CHUNKS', 'ENGINES', 'ROWS', 'TF_DATA']
__all__ += ['prepare_process', 'quiet_tensorflow']


def __dir__() -> list[str]:
    """Returns the public names, without those of imported modules."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Returns the names that need JAX, which is imported only when they are used."""
    if name in ('Arrays', 'key_words', 'process_share', 'to_device'):
        from coyo11m_tfds.reading import to_device

        return getattr(to_device, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


@takes(TrainOptions)
def train_batches(options: TrainOptions) -> Batches:
    """Reads this process's share of the training batches, from `start_step` on, without end.

        batches = input_pipeline.train_batches(path, batch_size=256, seed=0, start_step=1000)
        next(batches)['latents']        # float16 (256, 4, 32, 32)

    Args:
        data: Folder of a data set, its builder, or the result of `open_data`, which reads metadata
            and chunk index once for several functions. Or a mixture: a sequence of dicts with `dir`
            (one of these) and perhaps `weight`, `where`, `text`, `name`, `seed` and `same_vae`, see
            docs/reading.md; or the result of `open_mix`.
        batch_size: Records in a global batch; this process gets `b = batch_size / process_count`.
        seed: Seed of the order and of every choice about a sample.
        start_step: Batches of this size before the first one.
        start: State (`get_state`) to continue from, also one of another batch size; None for the
            beginning.
        stages: Stages of a mixture: dicts with the first step of the stage, `from`, and the
            `weights` of the sources from this step on, which may be 0.
        features: Some of `key`, `latents`, `crop`, `text_embedding`, `tokens`, `caption`, or names
            of columns of `python -m coyo11m_tfds.add_column`. By default `key`, `latents`, `crop`
            and the text that the data set has, `text_embedding` or `tokens`.
        chunk: Records read together, a multiple of `schema.CHUNK_STRIDE`.
        lanes: Number of streams; every batch takes an equal share of each. A multiple of
            process_count.
        window: Records shuffled together within a lane.
        caption_dropout: Share of samples marked in `drop_text`, if a feature is text.
        process_index: Number of this process, which decides its share of each global batch.
        process_count: Number of processes.
        split: 'train', or another split of the data set.
        on_bad_records: 'stop': a damaged record is an error that names its file and number.
            'skip': a damaged record is left out and counted, with a warning. Zeros take its place,
            where `mask` is False, so all other records come in the same order. A file that is
            missing, forbidden or unreachable is always an error.
        max_bad_fraction: With 'skip', the share of the split's records that may be bad, each record
            counted once. More bad records than this share and than 64 are an error.
        counter: Counter of what is read.
        parallel_reads: Chunks in flight in each lane; not used by 'rows'.
        prefetch: Number of batches to keep ready; a negative number means 2.
        engine: 'rows' gathers values from memory-mapped files, which must be local and must not
            change; 'chunks' fetches runs of records, each with one request; 'auto' chooses rows for
            a local data set of at most 60,000 shards, and chunks for others; 'tf_data' reads
            through `train_dataset`. These return the same batches. A data set without a chunk
            index is also read through `train_dataset`, in an ordinary shuffled order.
        verify: When 'rows' compares a record with its CRC-32C: 'once', at the first read in this
            process, 'always', or 'never'. 'chunks' always compares.
        text: Source of `text_embedding` or `tokens`: '' for the records, the name of an added
            column, or several with weights: `{'': 2, 'short': 1}`, or as a string
            `'records:2,short:1'`. A hash of seed, epoch and key then chooses one for each sample.
            All must be embeddings of one encoder, or tokens of one vocabulary, which are padded
            with -1 to the longest text. See `texts.parse_text_weights`.
        cache_dir: Folder on a local disk that keeps what comes from `gs://` or `hf://` for the next
            epoch, other runs and other processes of this host; '' for none. A data set that is all
            there is read by rows.
        cache_gb: Size to which this folder may grow, in 1e9 bytes. What came first stays.
        stride: Reads only every `stride`-th batch. W workers with a stride of W, which start at
            `start_step + w`, read in turn the batches of one reader.

    Returns:
        An iterator with `step`, `steps_per_epoch`, `spec`, `get_state`, `set_state`, `close` and
        `check_memory`. Its threads end at `close` or when it is garbage-collected. A batch is a
        dict of new arrays with the chosen features: key=int64 `(b,)`, latents `(b, C, H, W)` in the
        dtype of the source, one of `schema.LATENT_DTYPES`, crop=int32 `(b,)` (which crop of the
        image the latents are, counted from the middle one: 0 is the middle one, or the first of
        two), noise_seed=uint32 `(b,)` (a hash of seed, epoch and key, to draw latents from recorded
        moments, which have twice the channels), text_embedding=float16 `(b, D)`, tokens=int32
        `(b, T)`, caption=bytes objects `(b,)`, a column in its own dtype and shape; drop_text=bool
        `(b,)` with caption_dropout > 0 and embeddings or tokens; mask=bool `(b,)` with
        on_bad_records='skip'. The iterator raises `DamagedError` if a record cannot be read or too
        many are bad, and `OSError` if a file is missing, forbidden or unreachable or, with 'rows',
        has changed since it was opened. With 'tf_data' it raises `tf.errors.OpError`.

    Raises:
        ValueError: Settings do not fit together (the message names some that do), a feature is not
            in the data set, 'rows' is chosen for files that are not local or have no chunk index,
            or sources have texts or latents of different encoders.
        OSError: There is no data set, or its metadata cannot be read.
    """
    return planned_batches(training.plan_training(options))


@takes(ReadOptions)
def eval_batches(options: ReadOptions) -> Batches:
    """Reads this process's share of all records of a split, once, in the order of the shards.

    A mixture must have only one source; its condition chooses the records.

    The crop is always the middle one, `crop` is 0. All processes get `steps_per_epoch` full
    batches: `mask` (bool `(b,)`) is False for the rows of zeros that fill the last ones. Process p
    gets the p-th of equal runs of consecutive records.

    Args:
        split: 'validation', or another split of the data set.
        text: As for `train_batches`; with several texts, every record has the first one.
        parallel_reads: Chunks in flight.
        data and all others: As for `train_batches`.

    Returns:
        An iterator like that of `train_batches`; `set_state` accepts states of the same batch size
        and number of processes.

    Raises:
        ValueError, OSError: As `train_batches`; or the split is empty.
    """
    splits = opened_splits.open_splits(options)
    # TensorFlow takes seconds to import, and the other engines do without.
    if splits is None or options.engine == TF_DATA:
        from coyo11m_tfds.reading import tf_data

        return tf_data.read_eval_dataset(options)
    return engines.read_split(options, splits[0])


def records(
    data: Data,
    split: str = schema.TRAIN,
    features: Sequence[str] = (schema.KEY, schema.LATENTS, schema.CAPTION),
    *,
    crop: int | None = None,
    text: TextSpec = '',
    chunk: int = schema.CHUNK_STRIDE,
    parallel_reads: int = 16,
    engine: str = AUTO,
    verify: str = damage.ONCE,
    cache_dir: str = '',
    cache_gb: float = 0.0,
) -> Records:
    """Returns the records of a split by number and by key, for a reader with an order of its own.

        records = input_pipeline.records(path)
        records[5]['latents']                       # float16 (3, 4, 32, 32)
        records[[3, 5, -1]]['latents']              # float16 (3, 3, 4, 32, 32)
        records[records.find(4827155631)]           # the record with this key

        torch.utils.data.DataLoader(records, batch_size=256, shuffle=True, num_workers=4)
        grain.MapDataset.source(records).shuffle(seed=0).batch(256)

    Records are numbered in the order of the shards, as `eval_batches` reads them. From the page
    cache, a record takes 11 us in a list of 256 numbers, and alone 200 us at the first time and 60
    us later. The first read from a run of `schema.CHUNK_STRIDE` records also reads their lengths,
    so a record that is not in the page cache takes the time that the disk takes for a run.

    Args:
        features: Some of `key`, `latents`, `text_embedding`, `tokens`, `caption`, or names of
            columns.
        crop: The crop of each record, counted from the middle one as the feature `crop` of batches:
            0 is the middle one. None for all crops.
        text: As for `train_batches`; with several texts, every record has the first one.
        chunk: Records of a chunk, which one request fetches by 'chunks', with one more for each
            column. The last 64 chunks are kept.
        parallel_reads: Chunks in flight.
        engine: 'rows', 'chunks' or 'auto', as for `train_batches`.
        data, split, verify, cache_dir and cache_gb: As for `train_batches`.

    Returns:
        An object with a length. `records[number]` is a dict of the values of one record, of the
        dtypes that batches have: key=int64, latents `(crops, C, H, W)`, or `(C, H, W)` with a
        `crop`, text_embedding=float16 `(D,)`, tokens=int32 `(T,)`, caption=bytes. A sequence of
        numbers or a slice gives a dict of arrays, each with one more axis in front. Negative
        numbers count from the end. `records.find(key)` returns the number of a record; the first
        call reads all records for their keys and keeps 16 bytes for each. `records.spec` has the
        shapes and dtypes. Threads can share the object. It can be pickled and be used after a fork.

        It raises an `IndexError` or a `KeyError` for what is not there, `DamagedError`, with the
        names of file and record, if a record cannot be read, and `OSError` as `train_batches`.

    Raises:
        ValueError: A feature is not in the data set, the data set has no chunk index or no such
            crop, or 'rows' is chosen for files that are not local.
        OSError: There is no data set, or its metadata cannot be read.
    """
    options = ReadOptions(
        data=data,
        batch_size=1,
        features=features,
        split=split,
        text=text,
        chunk=chunk,
        parallel_reads=parallel_reads,
        engine=engine,
        verify=verify,
        cache_dir=cache_dir,
        cache_gb=cache_gb,
    )
    return Records(options, crop)


@takes(TrainOptions)
def train_dataset(options: TrainOptions) -> 'tf.data.Dataset':
    """Returns the batches of `train_batches` as a `tf.data.Dataset`, with lanes interleaved.

    Takes the arguments of `train_batches`, of which `stride` must be 1. With a negative `prefetch`
    TensorFlow decides how many batches to keep ready.

    Returns:
        Batches as from `train_batches`, captions as strings. An iterator over them raises
        `tf.errors.OpError` if a file or a record cannot be read, or too many records are bad.

    Raises:
        ValueError, OSError: As `train_batches`.
    """
    # tf.data would read the batches between, and then drop them.
    if options.stride != 1:
        raise ValueError(
            f'stride={options.stride}: expected 1; only train_batches can leave out batches'
        )
    from coyo11m_tfds.reading import tf_data

    return tf_data.make_train_dataset(training.plan_training(options))


@takes(ReadOptions)
def eval_dataset(options: ReadOptions) -> 'tf.data.Dataset':
    """Returns the batches of `eval_batches` as a `tf.data.Dataset` with a known `cardinality()`.

    Takes the arguments of `eval_batches`. Batches, captions and errors are as in `train_dataset`.
    """
    from coyo11m_tfds.reading import tf_data

    return tf_data.make_eval_dataset(options)


@takes(ArrayOptions)
def train_arrays(options: ArrayOptions) -> 'Arrays':
    """Returns the batches of `train_batches` as global `jax.Array`s with a sharding.

    Args:
        sharding: Sharding of the leading axis of every feature, which decides this process's share
            of each batch.
        ahead: Number of batches that are sent to the devices before they are needed.
        process_index: -1 for that of the sharding.
        process_count: -1 for that of the sharding.
        data and all others: As for `train_batches`.

    Returns:
        An iterator like that of `to_device`, with `step`, `steps_per_epoch`, `spec`, `get_state`,
        `set_state` and `close`.

    Raises:
        ValueError, OSError: As `train_batches` and `to_device`.
    """
    from coyo11m_tfds.reading import to_device

    # Before the plan, which needs to know the lanes of this process.
    # A caller's own values stay; `to_device` raises an error if they do not fit.
    index, count = to_device.process_share(options.sharding)
    if options.process_index < 0:
        options = dataclasses.replace(options, process_index=index)
    if options.process_count < 0:
        options = dataclasses.replace(options, process_count=count)
    batches = planned_batches(training.plan_training(options))
    return to_device.to_device(batches, options.sharding, options.ahead)


@takes(TrainOptions)
def train_plan(options: TrainOptions) -> ReadPlan:
    """Returns the plan of `train_batches`: the sources, their orders, and the first position.

        plan = train_plan(mix, batch_size=256, seed=0)
        plan.orders[0].locate(sample)     # (epoch, position in the epoch) of every lane's sample
        plan.cursor.after(1000).state()   # the state after 1000 batches
        plan.engine                       # 'rows', 'chunks' or 'tf_data'

    Takes the arguments of `train_batches`, and raises its errors, except those of features and
    texts.
    """
    return training.plan_training(options)


def planned_batches(plan: ReadPlan, start: Mapping[str, Any] | None = None) -> Batches:
    """Reads the batches of a plan, as `train_batches` does.

    Args:
        plan: A result of `train_plan`, which opened and ordered the sources once.
        start: State (`get_state`) to continue from; None for the first batch of the plan.

    Raises:
        ValueError, OSError: As `train_batches`.
    """
    # The plan of another position needs no other order.
    if start is not None:
        plan = plan._replace(cursor=plan.cursor.at(start))
    if plan.engine == TF_DATA:
        # TensorFlow takes seconds to import, and the other engines do without.
        from coyo11m_tfds.reading import tf_data

        return tf_data.read_train_dataset(plan)
    return training.read_plan(plan)
