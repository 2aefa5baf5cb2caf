"""Readers of TFRecord files: this pipeline, TFDS, and `tf.data` without parsing.

    stream = tf_readers.ours(folder_of_the_builder, None)
    batch = next(iter(stream.epoch()))

`readers.READERS` says what each is. TensorFlow is imported when a reader is opened.
"""

import inspect
import io
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.streams import BATCH_SIZE, SEED, Batch, Stream
from coyo11m_tfds import schema


def data_dir(folder: pathlib.Path) -> pathlib.Path:
    """The folder of the data set that the builder has made in this one."""
    return next(folder.rglob(schema.INFO_FILE)).parent


def ours(folder: pathlib.Path, state: bytes | None, **settings: int | str) -> Stream:
    """`input_pipeline.train_batches`; what a checkpoint keeps of it is its state."""
    import input_pipeline

    data, order = data_dir(folder), input_pipeline.OrderSettings(SEED)
    position = input_pipeline.position_settings(data, order)
    digest, start = input_pipeline.position_fingerprint(position), 0
    if state:
        saved = json.loads(state)
        start = saved['sample']
        if saved['order'] != digest:
            raise ValueError(f'{data}: the state is of {saved["order"]}, this is {position}.')
    each = BATCH_SIZE // order.lanes
    arguments = {'batch_size': BATCH_SIZE, 'seed': SEED, 'start_sample': start}
    settings = {'engine': 'chunks', 'features': (schema.KEY, schema.LATENTS), **settings}
    return Stream(
        lambda: input_pipeline.train_batches(data, **arguments, **settings),
        lambda taken: json.dumps({'sample': start + taken * each, 'order': digest}).encode(),
    )


def ours_configured(folder: pathlib.Path, state: bytes | None) -> Stream:
    """With the settings of `configs/default.py` that do not decide the order."""
    import input_pipeline
    from configs import default

    data = default.get_config().data
    ordering = inspect.signature(input_pipeline.OrderSettings).parameters
    names = set(inspect.signature(input_pipeline.train_dataset).parameters) - set(ordering)
    return ours(folder, state, **{name: data[name] for name in sorted(names & set(data))})


def rows(folder: pathlib.Path, state: bytes | None) -> Stream:
    """Rows out of mapped shards; each checksum is compared once."""
    return ours(folder, state, engine='rows')


def rows_always(folder: pathlib.Path, state: bytes | None) -> Stream:
    """The same with every checksum compared every time."""
    return ours(folder, state, engine='rows', verify='always')


def through_tf_data(folder: pathlib.Path, state: bytes | None) -> Stream:
    """The lanes of `rows`, interleaved, batched and prefetched by tf.data."""
    return ours(folder, state, engine='tf_data')


# --- tf.data -----------------------------------------------------------------------------------


def tfds(folder: pathlib.Path, state: bytes | None) -> Stream:
    """TFDS, shuffled and batched as its guide to performance has it."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    batches = (
        tfds.builder_from_directory(str(data_dir(folder)))
        .as_dataset(
            split=schema.TRAIN,
            shuffle_files=True,
            read_config=tfds.ReadConfig(shuffle_seed=SEED, try_autocache=False),
            decoders=tfds.decode.PartialDecoding({schema.KEY: True, schema.LATENTS: True}),
        )
        .shuffle(1024, seed=SEED)
        .repeat()
        .batch(BATCH_SIZE)
        .prefetch(tf.data.AUTOTUNE)
    )
    iterator = iter(batches)
    if state:
        _restore(iterator, state)
    return Stream(lambda: map(tfds.as_numpy, iterator), lambda taken: _save(iterator))


def _save(iterator: Any) -> bytes:
    """The state of an iterator of `tf.data`: the files of its checkpoint."""
    import tensorflow as tf

    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive, 'w') as files:
        tf.train.Checkpoint(iterator=iterator).write(f'{folder}/state')
        for path in pathlib.Path(folder).iterdir():
            files.write(path, path.name)
    return archive.getvalue()


def _restore(iterator: Any, state: bytes) -> None:
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(io.BytesIO(state)).extractall(folder)
        tf.train.Checkpoint(iterator=iterator).read(f'{folder}/state').assert_consumed()


def tfrecord(folder: pathlib.Path) -> Callable[[], Iterable[Batch]]:
    """Records as they are in the files, in batches: nothing that reads these files is faster."""
    import tensorflow as tf

    files = sorted(map(str, data_dir(folder).glob(f'*-{schema.TRAIN}*.tfrecord-*')))
    batches = (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(len(files), seed=SEED)
        .repeat()
        .interleave(
            lambda file: tf.data.TFRecordDataset(file, buffer_size=1 << 20),
            cycle_length=8,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        .batch(BATCH_SIZE)
        .prefetch(tf.data.AUTOTUNE)
    )
    # Tensors of strings, which would be copied on the way to numpy.
    return lambda: ({'record': records} for records in batches)
