"""Descriptions of columns and their files: what is damaged is refused by name."""

import dataclasses
import json
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


def test_a_row_has_the_values_of_its_record(path):
    batch = read(path)
    np.testing.assert_array_equal(batch['score'], batch[schema.LATENTS][:, 0, 0, 1])


@pytest.mark.filterwarnings('ignore')  # NumPy warns of some headers that it then refuses
@pytest.mark.parametrize('name', [schema.LATENTS, 'score'])
def test_a_flipped_bit_of_a_header_is_refused_by_name_or_does_no_harm(path, name):
    file = path / columns.column_file_name(name, schema.TRAIN)
    column, whole, refused = columns.read_columns(path)[name], file.read_bytes(), 0

    def locate() -> list:
        found = column.locate(path, schema.TRAIN, COUNT)
        return found.tolist() if name == schema.LATENTS else [found[0].path, found[1]]

    expected = locate()
    for bit in range(0, 8 * 128, 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert locate() == expected
        except ValueError as error:
            assert str(error).startswith(f'{path}') and name in str(error)
            refused += 1
    assert refused > 8 * 13


def test_a_place_in_a_file_that_is_not_there_is_named(path):
    file = path / columns.column_file_name(schema.LATENTS, schema.TRAIN)
    places = np.load(file)
    places[:, 0] = 7
    np.save(file, places)
    describe(path, schema.LATENTS, crc32c={schema.TRAIN: columns.array_crc32c(places)})
    message = f"{path}: its column 'latents' names row 0 of a file that is not"
    with pytest.raises(ValueError, match=message):
        read(path)


def describe(path: pathlib.Path, name: str, **changes) -> None:
    """Writes fields of a column, or of its files, as somebody may who means harm: all is valid."""
    found = columns.read_columns(path)
    column = found[name]
    of_files = {field: x for field, x in changes.items() if field in ('starts', 'stride', 'path')}
    if of_files:
        files = tuple(dataclasses.replace(file, **of_files) for file in column.files)
        column = dataclasses.replace(column, files=files)
    others = {field: x for field, x in changes.items() if field not in of_files}
    columns.write_columns(path, {**found, name: dataclasses.replace(column, **others)})


@pytest.mark.parametrize('start', [-1, -5000, 2**63, 2**70, True, 1.5, '12', None])
def test_a_beginning_that_is_none_is_refused(path, start):
    before = (path / schema.COLUMNS_FILE).read_bytes()
    for places in ({'starts': (start,)}, {'starts': (0, start, 0)}, {'stride': start}):
        (path / schema.COLUMNS_FILE).write_bytes(before)
        describe(path, schema.LATENTS, **places)
        message = rf'{path}/columns\.json: is damaged .* has rows at .*{start!r}'
        with pytest.raises(ValueError, match=message):
            read(path)


@pytest.mark.parametrize(
    ('latents', 'message'),
    [
        *(({'starts': starts}, 'has rows at') for starts in [(), (0, 0)]),  # of three crops
        *(
            ({'shape': (3, 4, *x)}, 'impossible')
            for x in [(32,), (32, -32), (32, 32.0), (4096, 4096)]
        ),
        *(({'dtype': dtype}, 'impossible') for dtype in ['float64', ['float16']]),
    ],
)
def test_latents_that_are_none_are_refused(path, latents, message):
    describe(path, schema.LATENTS, **latents)
    with pytest.raises(ValueError, match=rf'{path}/columns\.json: is damaged .* {message}'):
        read(path)


@pytest.mark.parametrize(
    'where', [{'starts': (n,)} for n in (2**62 - 1, 10**6, 26_000)] + [{'stride': 2**30 - 1}]
)
def test_places_beyond_a_file_are_refused_before_anything_is_read(path, where):
    describe(path, schema.LATENTS, **where)
    message = rf"{path}: its column 'latents' names row \d+ of .*\.pt for record \d+, but the file"
    with pytest.raises(ValueError, match=message):
        input_pipeline.train_batches(path, **ORDER)


@pytest.mark.parametrize(
    'changes',
    [
        {'shape': (2**70,)},
        {'shape': (-1,)},
        {'shape': (1.5,)},
        {'shape': (20_000,)},
        {'dtype': 'object'},
        {'dtype': 'bogus'},
        {'dtype': 7},
        {'files': {'train': '../x.npy'}},
        {'files': {'train': 3}},
        {'feature': 'latents'},
        {'mean': ['a']},
        {'encoder': 3},
    ],
)
def test_a_column_that_cannot_be_is_refused(path, changes):
    describe(path, 'score', **changes)
    with pytest.raises(ValueError, match=rf"{path}/columns\.json: is damaged \(.*'score'"):
        read(path)


def test_a_column_of_latents_is_in_place(path):
    found = columns.read_columns(path)
    for name, column in (('latents', found['score']), ('other', found['latents'])):
        columns.write_columns(path, {name: dataclasses.replace(column, name=name)})
        with pytest.raises(ValueError, match=f'is damaged .*column {name!r} is of kind'):
            columns.read_columns(path)


def test_places_of_other_records_are_refused(path):
    file = path / columns.column_file_name(schema.LATENTS, schema.TRAIN)
    places = np.load(file)[:-1]
    np.save(file, places)
    describe(path, schema.LATENTS, crc32c={schema.TRAIN: columns.array_crc32c(places)})
    message = "its column 'latents' has 103 rows for split 'train' of 104 records"
    with pytest.raises(ValueError, match=f'{path}: {message}'):
        read(path)
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


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'digest': 'x'}, 'its digest is wrong'),
        ({'columns': {}}, 'its digest is wrong'),
        (None, r"it lacks 'digest'"),
    ],
)
def test_a_damaged_description_is_named(path, change, message):
    file = path / schema.COLUMNS_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change} if change else {}))
    with pytest.raises(input_pipeline.DamagedError, match=f'{file}: is damaged \\({message}'):
        read(path)
