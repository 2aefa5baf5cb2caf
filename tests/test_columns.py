"""Descriptions of columns and their files: what is damaged is refused by name."""

import json
import os
import pathlib
import shutil

import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import columns, schema
from coyo11m_tfds.columns import AddedColumn
from tests.reading import small_dataset

COUNT = 104
LENGTHS = {schema.TRAIN: (70, 34)}
ORDER = {'batch_size': 8, 'seed': 0, 'lanes': 2, 'chunk': 32}


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A data set whose latents lie in place, with an added column of numbers."""
    path = tmp_path / schema.VERSION
    small_dataset.write(path, LENGTHS, source=tmp_path / 'source')
    name = columns.file_name('score', schema.TRAIN)
    np.save(path / name, np.arange(COUNT, dtype=np.float32))
    score = AddedColumn('score', 'float32', (), {schema.TRAIN: name})
    columns.write(path, {**columns.read(path), 'score': score})
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
    file = path / columns.file_name(name, schema.TRAIN)
    column, whole, refused = columns.read(path)[name], file.read_bytes(), 0

    def locate() -> list:
        found = column.locate(path, schema.TRAIN, COUNT)
        return found.tolist() if name == schema.LATENTS else [found[0].path, found[1]]

    expected = locate()
    for bit in range(8 * 128):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert locate() == expected
        except ValueError as error:
            assert str(error).startswith(f'{path}') and name in str(error)
            refused += 1
    assert refused > 8 * 40


def test_a_place_in_a_file_that_is_not_there_is_named(path):
    file = path / columns.file_name(schema.LATENTS, schema.TRAIN)
    places = np.load(file)
    places[:, 0] = 7
    np.save(file, places)
    with pytest.raises(ValueError, match=f"{path}: its column 'latents' names file 7, expected"):
        read(path)


def test_places_of_other_records_are_refused(path):
    file = path / columns.file_name(schema.LATENTS, schema.TRAIN)
    np.save(file, np.load(file)[:-1])
    message = "its column 'latents' has 103 rows for split 'train' of 104 records"
    with pytest.raises(ValueError, match=f'{path}: {message}'):
        read(path)
    file.write_bytes(b'')
    with pytest.raises(ValueError, match=f'{file}: is no column'):
        read(path)


def test_a_source_of_the_same_size_and_time_is_told_by_its_directory(path):
    [one, other] = (pathlib.Path(f.path) for f in columns.read(path)[schema.LATENTS].files)
    before = one.stat()
    shutil.copy(other, one)
    os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert one.stat().st_size == before.st_size
    with pytest.raises(ValueError, match=f'{one}: .* its directory has digest '):
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
    with pytest.raises(ValueError, match=f'{file}: is damaged \\({message}'):
        read(path)
