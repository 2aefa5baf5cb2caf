"""Readers of the same samples: this pipeline, its peers, and bare TFRecord reading.

    stream = readers.rows('/data/builder', state='', engine='rows')
    batch = next(iter(stream.epoch()))    # key int64 (256,), latents float16 (256, 4, 32, 32)
    state = stream.state(1)               # JSON; `rows('/data/builder', state)` resumes from there

All give key and latents of every sample, shuffled, in batches of 256, each set up as its own
documentation advises for speed, with 2 workers where it works with processes. Where a reader hands
samples to Python, that code takes one crop, that of the key modulo 3.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import source
from coyo11m_tfds import schema

BATCH_SIZE = 256
SEED = 0
_WORKERS = 2

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Stream:
    """An opened reader.

    Attributes:
        epoch: the batches of the rest of this epoch, at each later call those of the next one; or
            batches without end.
        state: to the position after so many batches since it was opened.
    """

    epoch: Callable[[], Iterable[Batch]]
    state: Callable[[int], str] = lambda taken: ''


def data_dir(folder: str) -> str:
    """The folder of the data set that the builder has made in this one; of a URL itself."""
    return (
        folder
        if '://' in folder
        else str(next(pathlib.Path(folder).rglob(schema.INFO_FILE)).parent)
    )


def ours(folder: str, state: str, engine: str, **settings: Any) -> Stream:
    """`input_pipeline.train_batches`, or with `engine='tf_data'` `train_dataset`."""
    import input_pipeline
    from coyo11m_tfds.reading import process_settings

    data = data_dir(folder)
    process_settings.keep_freed_memory()  # as every program of this project begins
    settings |= {'batch_size': BATCH_SIZE, 'seed': SEED, 'features': (schema.KEY, schema.LATENTS)}
    if state:
        settings['start_sample'] = json.loads(state)['sample']
    if engine == 'tf_data':
        batches = input_pipeline.train_dataset(data, **settings).as_numpy_iterator()
    else:
        batches = input_pipeline.train_batches(data, engine=engine, **settings)

    def state_after(taken: int) -> str:
        order = input_pipeline.OrderSettings(SEED)
        position = input_pipeline.position_settings(data, order)
        digest = input_pipeline.position_fingerprint(position)
        return json.dumps({'sample': taken * BATCH_SIZE // order.lanes, 'order': digest})

    return Stream(lambda: batches, state_after)


def tfrecord(folder: str, state: str) -> Stream:
    """Records as they are in the files, in batches: nothing that reads these files is faster."""
    import tensorflow as tf

    files = sorted(map(str, pathlib.Path(data_dir(folder)).glob(f'*-{schema.TRAIN}*.tfrecord-*')))
    batches = (
        tf.data.Dataset.from_tensor_slices(files)
        .repeat()
        .interleave(
            lambda file: tf.data.TFRecordDataset(file, buffer_size=1 << 20),
            cycle_length=8,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    )
    # Tensors of strings, which would be copied on the way to numpy.
    return Stream(lambda: batches.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE))


def litdata(folder: str, state: str) -> Stream:
    """litdata `StreamingDataset` and `StreamingDataLoader`."""
    import litdata

    loader = litdata.StreamingDataLoader(
        litdata.StreamingDataset(folder, shuffle=True, seed=SEED, drop_last=True),
        batch_size=BATCH_SIZE,
        num_workers=_WORKERS,
        collate_fn=_collate,
        drop_last=True,
        persistent_workers=True,
    )
    if state:
        loader.load_state_dict(json.loads(state))
    return Stream(lambda: iter(loader), lambda taken: json.dumps(loader.state_dict()))


def grain(folder: str, state: str) -> Stream:
    """Grain over ArrayRecord."""
    import grain
    from absl import flags

    # Grain asks for its flags, which a program without absl's `app.run` leaves unread.
    flags.FLAGS.mark_as_parsed()
    paths = sorted(map(str, pathlib.Path(folder).glob('*.array_record')))
    batches = (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
        .seed(SEED)
        .shuffle()
        .repeat()
        .batch(BATCH_SIZE, batch_fn=_unpack)
        # An element is a batch here; a few keep two workers busy.
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
        .mp_prefetch(grain.MultiprocessingOptions(_WORKERS, per_worker_buffer_size=2))
    )
    iterator = iter(batches)
    if state:
        iterator.set_state(json.loads(state))
    return Stream(lambda: iterator, lambda taken: json.dumps(iterator.get_state()))


def datasets(folder: str, state: str) -> Stream:
    """HF datasets: whole batches from the mapped Arrow files."""
    import datasets

    files = sorted(map(str, pathlib.Path(folder).rglob('*.arrow')))
    stored = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in files])
    stored = stored.select_columns([schema.KEY, schema.LATENTS]).with_format('arrow')

    def read(rows: np.ndarray) -> Batch:
        table = stored[rows]
        latents = [memoryview(row.as_buffer()) for row in table.column(schema.LATENTS)]
        return _in_torch(_batch(table.column(schema.KEY).to_numpy(), latents))

    return _random_access(read, len(stored), state)


def torch(folder: str, state: str) -> Stream:
    """A torch `DataLoader` over memory-mapped `.pt` files."""
    import torch

    paths = source.pt_files(folder)
    files = [torch.load(path, mmap=True, weights_only=True) for path in paths]
    all_keys = torch.cat([file[schema.PT_KEYS] for file in files])
    starts = np.cumsum([0, *(len(file[schema.PT_KEYS]) for file in files)])

    def read(rows: np.ndarray) -> Batch:
        rows = np.sort(rows)  # the rows of a file together; the batch is the same set
        keys, parts = all_keys[rows], []
        file_of = np.searchsorted(starts, rows, side='right') - 1
        for number in np.unique(file_of):
            of_file = file_of == number
            within = torch.from_numpy(rows[of_file] - starts[number])
            latents = files[number][schema.PT_LATENTS]
            parts.append(latents[within, keys[of_file] % schema.NUM_CROPS])
        return {schema.KEY: keys, schema.LATENTS: torch.cat(parts)}

    return _random_access(read, len(all_keys), state)


class _Reads:
    """What a `DataLoader` takes a batch from."""

    def __init__(self, read: Callable[[np.ndarray], Batch]):
        self._read = read

    def __getitem__(self, rows: np.ndarray) -> Batch:
        return self._read(rows)


def _random_access(read: Callable[[np.ndarray], Batch], num_samples: int, state: str) -> Stream:
    """A `DataLoader` of whole batches, by the numbers of their rows; its place is a number."""
    from torch.utils.data import DataLoader

    start = json.loads(state)['batches'] if state else 0
    rows = _row_numbers(num_samples, start)
    # What the sampler gives is a batch.
    batches = iter(DataLoader(_Reads(read), sampler=rows, batch_size=None, num_workers=_WORKERS))
    return Stream(lambda: batches, lambda taken: json.dumps({'batches': start + taken}))


def _row_numbers(num_samples: int, start: int) -> Iterator[np.ndarray]:
    """Numbers of the samples of each batch, epoch after epoch, from batch `start` on."""
    per_epoch = num_samples // BATCH_SIZE
    epoch, first = divmod(start, per_epoch)
    while True:
        order = np.random.default_rng((SEED, epoch)).permutation(num_samples)
        yield from order[: per_epoch * BATCH_SIZE].reshape(-1, BATCH_SIZE)[first:]
        epoch, first = epoch + 1, 0


def _collate(samples: Sequence[dict]) -> Batch:
    keys = [int(sample[schema.KEY]) for sample in samples]
    return _in_torch(_batch(keys, [sample[schema.LATENTS] for sample in samples]))


def _unpack(records: Sequence[bytes]) -> Batch:
    import msgpack

    samples = [msgpack.unpackb(record) for record in records]
    latents = [memoryview(sample[schema.LATENTS]) for sample in samples]
    return _batch([sample[schema.KEY] for sample in samples], latents)


def _batch(keys: Iterable[int], latents: Iterable[bytes | memoryview]) -> Batch:
    """A batch of one crop of each sample, cut out before it is copied."""
    starts = [key % schema.NUM_CROPS * schema.LATENT_NBYTES for key in keys]
    crops = [x[at : at + schema.LATENT_NBYTES] for x, at in zip(latents, starts, strict=True)]
    array = np.frombuffer(b''.join(crops), np.float16).reshape(-1, *schema.LATENT_SHAPE)
    return {schema.KEY: np.array(keys, np.int64), schema.LATENTS: array}


def _in_torch(batch: Batch) -> Batch:
    """Tensors, which go from a worker to the program in shared memory."""
    import torch

    return {name: torch.tensor(array) for name, array in batch.items()}
