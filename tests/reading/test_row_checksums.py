"""Each value has a checksum: one byte that has changed is found, wherever it lies."""

import itertools
import os
import pathlib
import shutil

import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.dataset.columns import AddedColumn
from tests import built
from tests.fakes.cloud import Fault, Gcs
from tests.reading import small_dataset
from tests.reading.batches import assert_same

COUNT = 104
ORDER = {'batch_size': 8, 'seed': 0, 'lanes': 2, 'chunk': 32, 'window': 32}
FEATURES = (schema.KEY, schema.LATENTS, 'score')
STEPS = 2 * COUNT // 8 + 1  # of two epochs
SHARD, COLUMN, SOURCE = 'tfrecord-00000-of-00002', 'column_score', 'train-0.pt'


def add(path: pathlib.Path, name: str, values: np.ndarray) -> AddedColumn:
    return small_dataset.add_column(path, name, {schema.TRAIN: values})


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> pathlib.Path:
    """Latents in place, in a folder beside it, and an added column."""
    path = tmp_path_factory.mktemp('whole') / 'data' / schema.VERSION
    small_dataset.write(path, {schema.TRAIN: (70, 34)}, source=path.parent / 'source')
    add(path, 'score', np.arange(COUNT, dtype=np.float32))
    return path


@pytest.fixture
def path(whole, tmp_path) -> pathlib.Path:
    """A copy of it that a test may damage."""
    folder = pathlib.Path(shutil.copytree(whole.parent, tmp_path / 'data'))
    small_dataset.redirect(folder / schema.VERSION, str(folder / 'source'))
    return folder / schema.VERSION


def place(path: pathlib.Path, kind: str) -> tuple[pathlib.Path, int, str]:
    """A file, a byte of its row or record 17, and what an error calls that."""
    if kind == SHARD:
        [file] = path.glob(f'*{SHARD}')
        sizes = [16 + len(x) for x in built.split_records(file.read_bytes())]
        return file, sum(sizes[:17]) + 40, 'record 17'
    latents = columns.read_columns(path)[schema.LATENTS]
    if kind == SOURCE:
        file, row = np.load(path / columns.column_file_name(schema.LATENTS, schema.TRAIN))[17, :2]
        found = latents.files[file]
        # Of the last crop, which few of the first samples take.
        return pathlib.Path(found.path), found.starts[0] + int(row) * 24_576 + 20_000, f'row {row}'
    file = path / columns.column_file_name('score', schema.TRAIN)
    return file, file.stat().st_size - 8 * (COUNT - 17) + 1, 'row 17'


def flip(file: pathlib.Path, at: int) -> None:
    """As a disk does it: the file system knows nothing of it."""
    before = file.stat()
    with open(file, 'r+b') as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 4]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def read(path: object, **changes) -> list[dict]:
    arguments = {**ORDER, 'features': FEATURES, **changes}
    return list(itertools.islice(input_pipeline.train_batches(path, **arguments), STEPS))


def upload(server: Gcs, path: pathlib.Path) -> str:
    """The data set as it is now, in a bucket."""
    server.upload_folder(path.parent / 'source', 'gs://data/source')
    small_dataset.redirect(path, 'gs://data/source')
    server.upload_folder(path, f'gs://data/{schema.VERSION}')
    return f'gs://data/{schema.VERSION}'


@pytest.fixture(params=['rows', 'chunks', 'gs'])
def reader(request, path):
    """Reads batches of the data set as it is now, from a disk or a bucket."""
    if request.param != 'gs':
        return lambda **changes: read(path, engine=request.param, **changes)
    server = request.getfixturevalue('bucket')
    return lambda **changes: read(upload(server, path), **changes)


@pytest.mark.parametrize('kind', [SHARD, SOURCE, COLUMN])
def test_a_flipped_byte_is_named_with_its_file_and_row_or_left_out(path, whole, reader, kind):
    expected = read(whole)
    [batch] = input_pipeline.eval_batches(whole, batch_size=COUNT, split=schema.TRAIN)
    key = batch[schema.KEY][17]
    file, at, row = place(path, kind)
    flip(file, at)
    with pytest.raises(ValueError, match=f'{file.name}: {row} cannot be read: its checksum is'):
        reader()
    found = reader(on_bad_records='skip')
    for batch, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(batch['mask'], wanted[schema.KEY] != key)
        for name in FEATURES:
            np.testing.assert_array_equal(batch[name][batch['mask']], wanted[name][batch['mask']])
    assert sum((~batch['mask']).sum() for batch in found) >= 1


def test_what_is_whole_is_read(whole, reader):
    assert_same(reader(), read(whole, verify='never'))


@pytest.mark.parametrize('verify, fails', [('once', False), ('never', False), ('always', True)])
@pytest.mark.parametrize('kind', [SHARD, SOURCE, COLUMN])
def test_once_is_the_first_time_that_a_row_is_read(path, kind, verify, fails):
    batches = input_pipeline.train_batches(path, **ORDER, features=FEATURES, verify=verify)
    for _ in range(COUNT // 8 + 4):  # what an epoch leaves out comes early in the next
        next(batches)
    flip(*place(path, kind)[:2])
    if fails:
        with pytest.raises(ValueError, match='its checksum is wrong'):
            list(itertools.islice(batches, 2 * STEPS))
    else:
        list(itertools.islice(batches, 2 * STEPS))


def test_bytes_that_are_changed_on_their_way_are_read_again(path, whole, bucket):
    batches = input_pipeline.train_batches(upload(bucket, path), **ORDER, features=FEATURES)
    for name in (SHARD, SOURCE, COLUMN):
        bucket.inject(Fault('flip', count=2, match=name, action='read'))
    assert_same(list(itertools.islice(batches, STEPS)), read(whole))
    flipped = [request.path for request in bucket.requests if request.fault]
    assert any(SOURCE in name for name in flipped) and any(COLUMN in name for name in flipped)


def test_the_file_of_another_column_is_refused(path):
    """Of the same dtype and shape, whose rows have the right checksums."""
    other = add(path, 'other', np.arange(COUNT, dtype=np.float32)[::-1])
    shutil.copy(
        path / other.files[schema.TRAIN], path / columns.column_file_name('score', schema.TRAIN)
    )
    message = r'column_score-train\.npy: holds .*, expected .* Add the column again'
    with pytest.raises(ValueError, match=message):
        read(path)


def test_places_of_another_order_are_refused(path):
    """All of which lie in their files."""
    file = path / columns.column_file_name(schema.LATENTS, schema.TRAIN)
    np.save(file, np.load(file)[::-1])
    with pytest.raises(ValueError, match=f'{file}: is not a column .its CRC-32C is'):
        read(path)
