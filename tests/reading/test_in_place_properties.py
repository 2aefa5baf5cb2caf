"""Batches with latents in place, local or in a bucket, are those of records, whatever the run."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.storage import source_files
from tests import built
from tests.fakes.cloud import Gcs, fake_gcs
from tests.reading import small_dataset
from tests.reading.batches import assert_same
from tests.reading.test_properties import SHARDS, Run, runs

COUNT = 7
WAYS = ('records by chunks', 'in place by rows', 'in place by chunks', 'in place in a bucket')


def write(folder: pathlib.Path, name: str, lengths: tuple[int, ...]) -> dict[str, tuple[str, str]]:
    """A data set in all its forms: of each its folder and the engine that reads it."""
    converted, here, there = (folder / way / name / schema.VERSION for way in ('r', 'p', 'b'))
    small_dataset.write(converted, {schema.TRAIN: lengths})
    for path in (here, there):
        small_dataset.write(path, {schema.TRAIN: lengths}, source=path.parent / 'source')
    return {
        'records by rows': (str(converted), 'rows'),
        'records by chunks': (str(converted), 'chunks'),
        'in place by rows': (str(here), 'rows'),
        'in place by chunks': (str(here), 'chunks'),
        'in place in a bucket': (f'gs://data/{name}/{schema.VERSION}', 'chunks'),
    }


@pytest.fixture(scope='module')
def server(tmp_path_factory) -> Iterator[Gcs]:
    with pytest.MonkeyPatch.context() as patch, fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        for variable, value in server.env.items():
            patch.setenv(variable, value)
        yield server


@pytest.fixture(scope='module')
def written(server, tmp_path_factory) -> dict[str, dict[str, tuple[str, str]]]:
    made, folder = {}, tmp_path_factory.mktemp('written')
    for name, lengths in SHARDS.items():
        made[name] = write(folder, name.replace(' ', '_'), lengths)
        here = folder / 'b' / name.replace(' ', '_')
        url = made[name]['in place in a bucket'][0].rpartition('/')[0]
        server.upload_folder(here / 'source', f'{url}/source')
        column = columns.read(here / schema.VERSION)[schema.LATENTS]
        moved = [in_bucket(file, url) for file in column.files]
        column = dataclasses.replace(column, files=tuple(moved))
        columns.write(here / schema.VERSION, {schema.LATENTS: column})
        server.upload_folder(here / schema.VERSION, f'{url}/{schema.VERSION}')
    return made


def in_bucket(file: columns.ColumnFile, url: str) -> columns.ColumnFile:
    path = f'{url}/source/{file.path.rpartition("/")[2]}'
    return dataclasses.replace(file, path=path, version=source_files.describe(path).version)


def read(place: tuple[str, str], run: Run, **changes) -> list[dict[str, np.ndarray]]:
    path, engine = place
    return run.batches(path, COUNT, engine=engine, **changes)


@pytest.mark.parametrize('way', WAYS)
@settings(max_examples=8)
@given(run=runs())
@example(run=Run('unequal', 12, lanes=4, chunk=64, processes=4, start=9))
@example(run=Run('even', 64, lanes=2, chunk=64, window=1, processes=2, start=5))
@example(run=Run('one', 3, lanes=3, window=400, start=150))  # several epochs in
def test_batches_are_those_of_records_by_rows(written, way, run):
    forms = written[run.shards]
    assert_same(read(forms[way], run), read(forms['records by rows'], run))


# --- Damaged records ---------------------------------------------------------------------------

# What one byte that is changed belongs to; or the file ends there.
KINDS = ('length', 'value', 'checksum', 'end')


def damaged(data: bytes, record: int, kind: str) -> bytes:
    """A shard, of which a record, or what follows it, cannot be read."""
    sizes = [16 + len(x) for x in built.split_records(data)]
    begin, end = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))[record]
    if kind == 'end':
        return data[: end - 1]
    at = {'length': begin, 'value': end - 5, 'checksum': end - 1}[kind]
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@contextlib.contextmanager
def all_damaged(
    server: Gcs, forms: dict[str, tuple[str, str]], damages: dict[int, tuple[int, str]]
) -> Iterator[None]:
    """In its `with` block records are damaged in all forms: by shards a number and a kind."""
    with contextlib.ExitStack() as stack:
        for folder in {path for path, _ in forms.values()}:
            for shard, (record, kind) in damages.items():
                data, put = open_shard(server, folder, f'.tfrecord-{shard:05}-of-')
                stack.callback(put, data)
                put(damaged(data, record, kind))
        yield


def open_shard(server: Gcs, folder: str, name: str) -> tuple[bytes, Callable[[bytes], None]]:
    """The content of a file, and what puts another one in its place."""
    if folder.startswith('gs://'):
        bucket, _, prefix = folder.removeprefix('gs://').partition('/')
        objects = server.objects(bucket)
        [found] = [x for x in objects if x.startswith(prefix) and name in x]
        return objects[found], functools.partial(server.put, bucket, found)
    [file] = pathlib.Path(folder).glob(f'*{name}*')
    return file.read_bytes(), functools.partial(replace, file)


def replace(file: pathlib.Path, data: bytes) -> None:
    """By another file: what is mapped must not be truncated."""
    new = file.with_suffix('.new')
    new.write_bytes(data)
    os.replace(new, file)


@pytest.mark.parametrize('processes', [1, 2, 4])
@settings(max_examples=5)
@given(
    run=st.builds(
        Run,
        shards=st.sampled_from(['unequal', 'with empty ones', 'even']),
        batch_size=st.integers(1, 9).map(lambda n: 4 * n),
        seed=st.integers(0, 2**64 - 1),
        chunk=st.sampled_from([32, 64]),
        lanes=st.just(4),
        window=st.integers(1, 200),
        start=st.integers(0, 60),
    ),
    places=st.lists(
        st.tuples(st.integers(0, COUNT - 1), st.integers(0, 35), st.sampled_from(KINDS)),
        min_size=1,
        max_size=4,
    ),
)
def test_what_is_damaged_is_left_out_alike(server, written, processes, run, places):
    """Each place is one of a record in a batch that is read."""
    run = dataclasses.replace(run, processes=processes)
    damages = {}
    for step, place, kind in places:
        _, shard, record = (x[place % run.batch_size] for x in run.plan.batch(run.start + step))
        damages[int(shard)] = int(record), kind
    forms, skip = written[run.shards], {'on_bad_records': 'skip', 'max_bad_fraction': 1}
    with all_damaged(server, forms, damages):
        expected = read(forms['in place by rows'], run, **skip)
        for way in ('in place in a bucket', 'in place by chunks', 'records by rows'):
            assert_same(read(forms[way], run, **skip), expected)
    assert not all(batch['mask'].all() for batch in expected)
    whole = read(forms['in place by rows'], run, **skip)
    for batch, before in zip(expected, whole, strict=True):
        for name in batch.keys() - {'mask'}:
            np.testing.assert_array_equal(batch[name][batch['mask']], before[name][batch['mask']])
