"""Descriptions of columns and their files: what is damaged is refused by name."""

import dataclasses
import os
import pathlib
import shutil

import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from tests.reading import small_dataset

COUNT = 104
LENGTHS = {schema.TRAIN: (70, 34)}
ORDER = {'batch_size': 8, 'seed': 0, 'lanes': 2, 'chunk': 32}


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    """A data set whose latents lie in place, with an added column of numbers."""
    path = tmp_path / schema.VERSION
    small_dataset.write(path, LENGTHS, source=tmp_path / 'source')
    scores = {schema.TRAIN: np.arange(COUNT, dtype=np.float32)}
    small_dataset.add_column(path, 'score', scores)
    return path


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    features = (schema.KEY, schema.LATENTS, 'score')
    return next(input_pipeline.train_batches(path, features=features, **ORDER))


def test_a_place_in_a_file_that_is_not_there_is_named(path):
    file = path / columns.column_file_name(schema.LATENTS, schema.TRAIN)
    places = np.load(file)
    places[:, 0] = 7
    np.save(file, places)
    describe(path, schema.LATENTS, crc32c={schema.TRAIN: columns.array_crc32c(places)})
    message = f"{path}: its column 'latents' names row 0 of a file that is not"
    with pytest.raises(ValueError, match=message):
        read(path)


def describe(path: pathlib.Path, name: str, /, **changes) -> None:
    """Writes fields of a column, or of its files, as somebody may who means harm: all is valid."""
    all_columns = columns.read_columns(path)
    column = all_columns[name]
    of_files = changes.keys() & {'path', 'starts', 'stride'}
    file_changes = {field: changes.pop(field) for field in of_files}
    if file_changes:
        files = tuple(dataclasses.replace(file, **file_changes) for file in column.files)
        column = dataclasses.replace(column, files=files)
    columns.write_columns(path, {**all_columns, name: dataclasses.replace(column, **changes)})


NO_OFFSETS = [-1, -5000, 2**63, 2**70, True, 1.5, '12', None]
IMPOSSIBLE = [
    *(('latents', {'starts': (x,)}, rf'has rows at .*{x!r}') for x in NO_OFFSETS),
    *(('latents', {'starts': (0, x, 0)}, rf'has rows at .*{x!r}') for x in NO_OFFSETS),
    *(('latents', {'stride': x}, rf'has rows at .*{x!r}') for x in NO_OFFSETS),
    *(('latents', {'starts': x}, 'has rows at') for x in [(), (0, 0)]),  # of three crops
    *(('latents', {'path': x}, 'has rows at') for x in ['', 'a.pt', 3]),
    *(('latents', {'shape': (3, 4, *x)}, 'impossible') for x in [(32,), (32, -32), (32, 32.0)]),
    ('latents', {'shape': (3, 4, 4096, 4096)}, 'impossible'),
    *(('latents', {'dtype': x}, 'impossible') for x in ['float64', ['float16']]),
    *(('score', {'shape': x}, "'score'") for x in [(2**70,), (-1,), (1.5,), (20_000,)]),
    *(('score', {'dtype': x}, "'score'") for x in ['object', 'bogus', 7]),
    *(('score', {'files': {'train': x}}, "'score'") for x in ['../x.npy', 3]),
    ('score', {'feature': 'latents'}, "'score'"),
    ('score', {'mean': ['a']}, "'score'"),
    ('score', {'encoder': 3}, "'score'"),
]


def test_an_empty_text_is_no_data_set(path, monkeypatch):
    monkeypatch.chdir(path)
    with pytest.raises(ValueError, match='no folder given, expected one to read'):
        input_pipeline.open_data('')


def test_a_column_that_cannot_be_is_refused(path):
    whole = (path / schema.COLUMNS_FILE).read_bytes()
    for name, changes, message in IMPOSSIBLE:
        (path / schema.COLUMNS_FILE).write_bytes(whole)
        describe(path, name, **changes)
        message = rf'^{path}/columns\.json: is damaged .*{message}'
        with pytest.raises(input_pipeline.DamagedError, match=message):
            input_pipeline.open_data(path)


@pytest.mark.parametrize(
    'where', [{'starts': (n,)} for n in (2**62 - 1, 10**6, 26_000)] + [{'stride': 2**30 - 1}]
)
def test_places_beyond_a_file_are_refused_before_anything_is_read(path, where):
    describe(path, schema.LATENTS, **where)
    message = rf"{path}: its column 'latents' names row \d+ of .*\.pt for record \d+, but the file"
    with pytest.raises(ValueError, match=message):
        input_pipeline.train_batches(path, **ORDER)


def test_a_column_of_latents_is_in_place(path):
    score, latents = map(columns.read_columns(path).get, ('score', 'latents'))
    for name, column in (('latents', score), ('other', latents)):
        columns.write_columns(path, {name: dataclasses.replace(column, name=name)})
        with pytest.raises(ValueError, match=f'is damaged .*column {name!r} is of kind'):
            columns.read_columns(path)


def test_places_of_other_records_are_refused(path):
    file = path / columns.column_file_name(schema.LATENTS, schema.TRAIN)
    places = np.load(file)[:-1]
    np.save(file, places)
    describe(path, schema.LATENTS, crc32c={schema.TRAIN: columns.array_crc32c(places)})
    message = r'is not a column \(it holds \(103, 3\) of uint32, expected \(104, 3\) of uint32'
    with pytest.raises(ValueError, match=f'{file}: {message}'):
        read(path)


@pytest.mark.parametrize('name', [schema.LATENTS, 'score'])
def test_a_file_that_is_no_array_is_named(path, name):
    file = path / columns.column_file_name(name, schema.TRAIN)
    file.write_bytes(b'')
    with pytest.raises(ValueError, match=f'{file}: is not a column'):
        read(path)


def test_a_source_of_the_same_size_and_time_is_told_by_its_outline(path):
    [one, other] = (pathlib.Path(f.path) for f in columns.read_columns(path)[schema.LATENTS].files)
    before = one.stat()
    shutil.copy(other, one)
    os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert one.stat().st_size == before.st_size
    with pytest.raises(input_pipeline.DamagedError, match=f'{one}: .* its outline has digest '):
        read(path)
