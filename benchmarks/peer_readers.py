"""Readers of other formats: MosaicML, WebDataset, litdata, HF datasets, Grain, and `.pt` files.

    stream = peer_readers.webdataset(folder_of_tar_files, None)
    batch = next(iter(stream.epoch()))

`readers.READERS` says what each is. Workers cut one crop out of a sample before they copy or send
it, and give batches to the loader rather than samples. Packages are imported when they are used, so
that missing ones do no harm.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.streams import (
    BATCH_SIZE,
    NUM_WORKERS,
    SEED,
    Batch,
    Stream,
    cut,
    numpy_batch,
    shuffled_batches,
)
from benchmarks.writers import import_streaming_base
from coyo11m_tfds import schema


def mds(folder: pathlib.Path, state: bytes | None) -> Stream:
    """MosaicML `StreamingDataset` and `StreamingDataLoader`."""
    base = import_streaming_base()
    # What a process that was killed has left behind would keep this one waiting.
    base.util.clean_stale_shared_memory()
    dataset = base.StreamingDataset(
        local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=BATCH_SIZE
    )
    return _stateful(base.StreamingDataLoader(dataset, **_loader_settings()), state)


def litdata(folder: pathlib.Path, state: bytes | None) -> Stream:
    """litdata `StreamingDataset` and `StreamingDataLoader`."""
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=True, seed=SEED, drop_last=True)
    return _stateful(litdata.StreamingDataLoader(dataset, **_loader_settings()), state)


def _loader_settings() -> dict[str, Any]:
    return {
        'batch_size': BATCH_SIZE,
        'num_workers': NUM_WORKERS,
        'collate_fn': _collate,
        'drop_last': True,
        'persistent_workers': True,
    }


def _stateful(loader: Any, state: bytes | None) -> Stream:
    if state:
        loader.load_state_dict(json.loads(state))
    return Stream(lambda: iter(loader), lambda taken: json.dumps(loader.state_dict()).encode())


def _collate(samples: Sequence[dict]) -> Batch:
    keys = [int(sample[schema.KEY]) for sample in samples]
    crops = [cut(sample[schema.LATENTS], key) for sample, key in zip(samples, keys, strict=True)]
    return _torch_batch(numpy_batch(keys, crops))


def _torch_batch(batch: Batch) -> Batch:
    """Tensors, which go from a worker to the program in shared memory."""
    import torch

    return {name: torch.tensor(array) for name, array in batch.items()}


def grain(folder: pathlib.Path, state: bytes | None) -> Stream:
    """Grain over ArrayRecord."""
    import grain

    paths = sorted(map(str, folder.glob('*.array_record')))
    batches = (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
        .seed(SEED)
        .shuffle()
        .repeat()
        .batch(BATCH_SIZE, batch_fn=_unpack)
        # An element is a batch here; a few keep two workers busy.
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
        .mp_prefetch(grain.MultiprocessingOptions(NUM_WORKERS, per_worker_buffer_size=2))
    )
    iterator = iter(batches)
    if state:
        iterator.set_state(json.loads(state))
    return Stream(lambda: iterator, lambda taken: json.dumps(iterator.get_state()).encode())


def _unpack(records: Sequence[bytes]) -> Batch:
    import msgpack

    samples = [msgpack.unpackb(record) for record in records]
    keys = [sample[schema.KEY] for sample in samples]
    crops = [cut(memoryview(sample[schema.LATENTS]), sample[schema.KEY]) for sample in samples]
    return numpy_batch(keys, crops)


# --- Random access -----------------------------------------------------------------------------


def datasets(folder: pathlib.Path, state: bytes | None) -> Stream:
    """HF datasets: whole batches from the mapped Arrow files."""
    return _random_access(_ArrowBatches(_arrow(folder)), state)


def torch(folder: pathlib.Path, state: bytes | None) -> Stream:
    """A torch `DataLoader` over memory-mapped `.pt` files."""
    return _random_access(_PtBatches(folder), state)


class _ArrowBatches:
    """Batches by the numbers of their rows."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: np.ndarray) -> Batch:
        return _from_arrow(self._dataset[rows])


class _PtBatches:
    """Batches by the numbers of their rows, counted through all files."""

    def __init__(self, folder: pathlib.Path):
        import torch

        paths = sorted((folder / schema.LATENTS_FOLDER).iterdir())
        files = [torch.load(path, mmap=True, weights_only=True) for path in paths]
        self._keys = torch.cat([file[schema.PT_KEYS] for file in files])
        self._latents = [file[schema.PT_LATENTS] for file in files]
        self._starts = np.cumsum([0, *map(len, self._latents)])

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, rows: np.ndarray) -> Batch:
        import torch

        rows = np.sort(rows)  # the rows of a file together; the batch is the same set
        keys = self._keys[rows]
        file_of = np.searchsorted(self._starts, rows, side='right') - 1
        parts = []
        for number in np.unique(file_of):
            of_file = file_of == number
            within = torch.from_numpy(rows[of_file] - self._starts[number])
            crops = keys[of_file] % schema.NUM_CROPS
            parts.append(self._latents[number][within, crops])
        return {schema.KEY: keys, schema.LATENTS: torch.cat(parts)}


def _random_access(batches: _ArrowBatches | _PtBatches, state: bytes | None) -> Stream:
    """A `DataLoader` of whole batches; its place is a number, which needs no facility."""
    from torch.utils.data import DataLoader

    start = json.loads(state)['batches'] if state else 0
    sampler = _Sampler(len(batches), start)
    loader = DataLoader(
        batches,
        sampler=sampler,
        batch_size=None,  # what the sampler gives is a batch
        num_workers=NUM_WORKERS,
        persistent_workers=True,
    )
    return Stream(
        lambda: iter(loader), lambda taken: json.dumps({'batches': start + taken}).encode()
    )


class _Sampler:
    """Numbers of the samples of each batch, of another epoch each time; the first from `start`."""

    def __init__(self, num_samples: int, start: int):
        self._num_samples, self._start, self._epoch = num_samples, start, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from shuffled_batches(self._num_samples, self._epoch)[self._start :]
        self._start, self._epoch = 0, self._epoch + 1


def _arrow(folder: pathlib.Path) -> Any:
    """The data set that `Dataset.from_generator` has written, in Arrow's own format."""
    import datasets

    files = sorted(folder.rglob('*.arrow'))
    parts = [datasets.Dataset.from_file(str(path)) for path in files]
    columns = [schema.KEY, schema.LATENTS]
    return datasets.concatenate_datasets(parts).select_columns(columns).with_format('arrow')


def _from_arrow(table: Any) -> Batch:
    keys = table.column(schema.KEY).to_numpy()
    rows = table.column(schema.LATENTS)
    crops = [cut(memoryview(row.as_buffer()), key) for row, key in zip(rows, keys, strict=True)]
    return _torch_batch(numpy_batch(keys, crops))


# --- Loaders that read from the start ----------------------------------------------------------


def webdataset(folder: pathlib.Path) -> Callable[[], Iterable[Batch]]:
    """WebDataset with a buffer of 1,000 samples in each worker."""
    import webdataset

    batches = (
        webdataset.WebDataset(
            sorted(map(str, folder.glob('*.tar'))),
            shardshuffle=100,
            detshuffle=True,
            seed=SEED,
            select_files=_holds_latents,
        )
        .shuffle(1000, seed=SEED)
        .batched(BATCH_SIZE, collation_fn=_collate_files, partial=False)
    )
    loader = webdataset.WebLoader(
        batches, batch_size=None, num_workers=NUM_WORKERS, persistent_workers=True
    )
    return lambda: iter(loader)


def _holds_latents(name: str) -> bool:
    return name.endswith('.bin')


def _collate_files(samples: Sequence[dict]) -> Batch:
    keys = [int(sample['__key__']) for sample in samples]
    crops = [cut(sample['latents.bin'], key) for sample, key in zip(samples, keys, strict=True)]
    return _torch_batch(numpy_batch(keys, crops))


def datasets_streamed(folder: pathlib.Path) -> Callable[[], Iterable[Batch]]:
    """HF `IterableDataset` with a buffer of 1,000 samples in each worker.

    Its own state does not reach through a `DataLoader` with workers.
    """
    from torch.utils.data import DataLoader

    streamed = _arrow(folder).with_format(None).to_iterable_dataset(num_shards=16)
    streamed = streamed.shuffle(seed=SEED, buffer_size=1000)
    loader = DataLoader(
        streamed,
        batch_size=BATCH_SIZE,
        num_workers=NUM_WORKERS,
        collate_fn=_collate,
        drop_last=True,
        persistent_workers=True,
    )
    return lambda: iter(loader)
