"""Batches with latents in place, local or in a bucket, are those of records, whatever the run."""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings

from coyo11m_tfds import columns, schema
from coyo11m_tfds.reading import dataset
from coyo11m_tfds.storage import source_files
from tests.fakes.cloud import fake_gcs
from tests.reading import small_dataset
from tests.reading.batches import assert_same, global_batches
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
def written(tmp_path_factory) -> Iterator[dict[str, dict[str, tuple[str, str]]]]:
    with pytest.MonkeyPatch.context() as patch, fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        for variable, value in server.env.items():
            patch.setenv(variable, value)
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
        yield made


def in_bucket(file: columns.ColumnFile, url: str) -> columns.ColumnFile:
    path = f'{url}/source/{file.path.rpartition("/")[2]}'
    return dataclasses.replace(file, path=path, version=source_files.describe(path).version)


def read(place: tuple[str, str], run: Run) -> list[dict[str, np.ndarray]]:
    """Batches from `run.start` on, put together from those of every process."""
    path, engine = place
    return global_batches(
        path,
        run.processes,
        COUNT,
        engine=engine,
        features=dataset.FEATURES,
        caption_dropout=0.5,
        start_step=run.start,
        **run.order_settings,
    )


@pytest.mark.parametrize('way', WAYS)
@settings(max_examples=12)
@given(run=runs())
@example(run=Run('unequal', 12, lanes=4, chunk=64, processes=4, start=9))
@example(run=Run('even', 64, lanes=2, chunk=64, window=1, processes=2, start=5))
@example(run=Run('one', 3, lanes=3, window=400, start=150))  # several epochs in
def test_batches_are_those_of_records_by_rows(written, way, run):
    forms = written[run.shards]
    assert_same(read(forms[way], run), read(forms['records by rows'], run))
