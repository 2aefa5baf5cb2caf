"""Readers of the same samples: this pipeline and its peers.

A reader takes the folder of its format and the state in which it resumes, '' for the start. It
gives key and latents of every sample, one crop where Python code handles samples.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import source
from coyo11m_tfds import schema

BATCH_SIZE = 256
SEED = 0
_WORKERS = 2

Batch = Mapping[str, Any]


class BatchStream(NamedTuple):
    """What a reader gives."""

    epoch: Callable[[], Iterable[Batch]]  # the rest of this epoch, then those of the next ones
    state: Callable[[int], str]  # after so many batches


def count_batches(batches: Iterable[Batch]) -> int:
    """Reads batches, and returns their number."""
    return sum(1 for _ in batches)


def data_dir(folder: str) -> str:
    """Returns the folder of the data set that the builder made in `folder`, or the URL."""
    if '://' in folder:
        return folder
    info = next(pathlib.Path(folder).rglob(schema.INFO_FILE))
    return str(info.parent)


def ours(
    folder: str, state: str, engine: str, where: str | None = None, **options: Any
) -> BatchStream:
    """This pipeline; with `where`, a mixture of all data sets in the folder."""
    import input_pipeline

    data: Any = data_dir(folder)
    if where is not None:
        infos = sorted(pathlib.Path(folder).rglob(schema.INFO_FILE))
        mix = []
        for number, info in enumerate(infos):
            # Sources with equally many records would come in lockstep with one seed.
            part = {'dir': info.parent, 'seed': SEED + number}
            if where:
                part['where'] = where
            mix.append(part)
        data = input_pipeline.open_mix(mix)
    input_pipeline.prepare_process()  # as every program of this project begins
    options |= {'batch_size': BATCH_SIZE, 'seed': SEED, 'features': (schema.KEY, schema.LATENTS)}
    if state:
        options['start'] = json.loads(state)
    if engine == 'tf_data':
        batches = input_pipeline.train_dataset(data, **options).as_numpy_iterator()
    else:
        batches = input_pipeline.train_batches(data, engine=engine, **options)

    def state_after(num_batches: int) -> str:
        """Returns the state after so many batches, which is computed and not read."""
        plan = input_pipeline.train_plan(data, batch_size=BATCH_SIZE, seed=SEED)
        return json.dumps(plan.cursor.after(num_batches).state())

    return BatchStream(lambda: batches, state_after)


def by_number(folder: str, state: str, alone: bool = False) -> BatchStream:
    """Records of this pipeline in random order, with all crops: a batch at once, or one by one."""
    records = _records(folder)
    start = _parse_count(state)

    def read_one_by_one(numbers: np.ndarray) -> Batch:
        """Reads the records of a batch as programs do that ask for single ones."""
        singles = [records[number] for number in numbers.tolist()]
        return {name: [record[name] for record in singles] for name in records.spec}

    read = read_one_by_one if alone else records.__getitem__
    batches = map(read, _row_numbers(len(records), start))
    return BatchStream(lambda: batches, lambda count: _format_count(start + count))


def _parse_count(state: str) -> int:
    """Returns the number of batches in a state of `_format_count`; 0 for the start."""
    if not state:
        return 0
    return json.loads(state)['batches']


def _format_count(num_batches: int) -> str:
    """Returns the state of a reader that needs nothing but the number of batches before."""
    return json.dumps({'batches': num_batches})


def _records(folder: str, **options: Any) -> Any:
    """Returns the records of the data set in a folder, by their numbers."""
    import input_pipeline

    features = schema.KEY, schema.LATENTS
    return input_pipeline.records(data_dir(folder), features=features, **options)


def litdata(folder: str, state: str) -> BatchStream:
    """litdata's loader of its own format."""
    import litdata

    # Its own loader, which has a state, unlike that of torch.
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
    return BatchStream(lambda: iter(loader), lambda _: json.dumps(loader.state_dict()))


def grain(folder: str, state: str, ours: str = '') -> BatchStream:
    """Grain over ArrayRecord, or over the records of this pipeline, one by one or in batches."""
    import grain
    from absl import flags

    # Grain asks for its flags, which a program without absl's `app.run` leaves unread.
    flags.FLAGS.mark_as_parsed()
    if ours:
        records = _records(folder, crop=0)
    else:
        paths = sorted(map(str, pathlib.Path(folder).glob('*.array_record')))
        records = grain.sources.ArrayRecordDataSource(paths)
    samples = grain.MapDataset.source(records)
    # For batches, Grain shuffles the numbers of records, which are then read at once.
    by_batch = ours == 'batches'
    if by_batch:
        samples = grain.MapDataset.range(len(records))
    shuffled = samples.seed(SEED).shuffle().repeat()
    batches = shuffled.batch(BATCH_SIZE, batch_fn=None if ours else _unpack)
    if by_batch:
        batches = batches.map(records.__getitem__)
    # An element is a batch here; a few keep two workers busy.
    reading = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    working = grain.MultiprocessingOptions(_WORKERS, per_worker_buffer_size=2)
    iterator = iter(batches.to_iter_dataset(reading).mp_prefetch(working))
    if state:
        iterator.set_state(json.loads(state))
    return BatchStream(lambda: iterator, lambda _: json.dumps(iterator.get_state()))


def datasets(folder: str, state: str) -> BatchStream:
    """HF datasets: reads whole batches from mapped Arrow files."""
    import datasets

    paths = sorted(map(str, pathlib.Path(folder).rglob('*.arrow')))
    files = [datasets.Dataset.from_file(path) for path in paths]
    stored = datasets.concatenate_datasets(files)
    stored = stored.select_columns([schema.KEY, schema.LATENTS]).with_format('arrow')

    def read_rows(rows: np.ndarray) -> Batch:
        """Reads a batch by the numbers of its rows."""
        table = stored[rows]
        keys = table.column(schema.KEY).to_numpy()
        # Of Arrow's memory, which is not copied before the crop is chosen.
        latents = [memoryview(row.as_buffer()) for row in table.column(schema.LATENTS)]
        return _in_torch(_batch(keys, latents))

    return _random_access(read_rows, len(stored), state)


def torch(folder: str, state: str) -> BatchStream:
    """A torch loader that reads whole batches from mapped `.pt` files, in the source itself."""
    import torch

    paths = source.pt_files(folder)
    files = [torch.load(path, mmap=True, weights_only=True) for path in paths]
    keys_of_files = [file[schema.PT_KEYS] for file in files]
    all_keys = torch.cat(keys_of_files)
    lengths = [len(keys) for keys in keys_of_files]
    starts = np.cumsum(lengths) - lengths

    def read_rows(rows: np.ndarray) -> Batch:
        """Reads a batch by the numbers of its rows, file by file."""
        rows = np.sort(rows)  # the rows of a file together; the batch is the same set
        keys = all_keys[rows]
        latents = []
        file_numbers = np.searchsorted(starts, rows, side='right') - 1
        for number in np.unique(file_numbers):
            in_file = file_numbers == number
            rows_in_file = torch.from_numpy(rows[in_file] - starts[number])
            crops = keys[in_file] % schema.NUM_CROPS
            latents.append(files[number][schema.PT_LATENTS][rows_in_file, crops])
        return {schema.KEY: keys, schema.LATENTS: torch.cat(latents)}

    return _random_access(read_rows, len(all_keys), state)


def _random_access(
    read_rows: Callable[[np.ndarray], Batch], num_samples: int, state: str
) -> BatchStream:
    """Returns a `DataLoader` of whole batches, which are read by the numbers of their rows.

    Its state is the number of the next batch.
    """
    from torch.utils.data import DataLoader

    start = _parse_count(state)
    # Without a batch size, an index of the sampler is a whole batch's: workers read its rows.
    loader = DataLoader(
        np.arange(num_samples),
        batch_size=None,
        sampler=_row_numbers(num_samples, start),
        num_workers=_WORKERS,
        collate_fn=read_rows,
    )
    batches = iter(loader)
    return BatchStream(lambda: batches, lambda count: _format_count(start + count))


def _row_numbers(num_samples: int, start: int) -> Iterator[np.ndarray]:
    """Yields the numbers of the samples of each batch, epoch after epoch, from `start` on."""
    per_epoch = num_samples // BATCH_SIZE
    epoch, first = divmod(start, per_epoch)
    while True:
        order = np.random.default_rng((SEED, epoch)).permutation(num_samples)
        # Without the samples that do not fill a batch; the first epoch may begin within.
        full_batches = order[: per_epoch * BATCH_SIZE].reshape(-1, BATCH_SIZE)
        yield from full_batches[first:]
        epoch += 1
        first = 0


def _collate(samples: Sequence[dict]) -> Batch:
    """Returns a batch of tensors from samples as litdata gives them."""
    keys = [int(sample[schema.KEY]) for sample in samples]
    latents = [sample[schema.LATENTS] for sample in samples]
    return _in_torch(_batch(keys, latents))


def _unpack(records: Sequence[bytes]) -> Batch:
    """Returns a batch from records of MessagePack, as Grain gives them."""
    import msgpack

    samples = [msgpack.unpackb(record) for record in records]
    keys = [sample[schema.KEY] for sample in samples]
    latents = [memoryview(sample[schema.LATENTS]) for sample in samples]
    return _batch(keys, latents)


def _batch(keys: Iterable[int], latents: Iterable[bytes | memoryview]) -> Batch:
    """Returns a batch of one crop of each sample, cut out before it is copied."""
    crops = []
    for key, data in zip(keys, latents, strict=True):
        start = key % schema.NUM_CROPS * schema.LATENT_NBYTES
        crops.append(data[start : start + schema.LATENT_NBYTES])
    numbers = np.frombuffer(b''.join(crops), np.float16)
    return {
        schema.KEY: np.array(keys, np.int64),
        schema.LATENTS: numbers.reshape(-1, *schema.LATENT_SHAPE),
    }


def _in_torch(batch: Batch) -> Batch:
    """Returns a batch of tensors, which go from a worker to the program in shared memory."""
    import torch

    return {name: torch.tensor(array) for name, array in batch.items()}
