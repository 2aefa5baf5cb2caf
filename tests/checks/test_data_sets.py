"""Tests of the health of data sets: each kind of damage is found in seconds, by name."""

import os
import pathlib
import shutil

import numpy as np
import pytest

from coyo11m_tfds import schema, verify
from coyo11m_tfds.checks import data_sets

CHECKSUMS = 'checksums-3f9a1c20.json'
SHARD = 'coyo11m_tfds-train-3f9a1c20.tfrecord-00003-of-00012'
OTHER = 'coyo11m_tfds-train-3f9a1c20.tfrecord-00005-of-00012'


@pytest.fixture
def copy(mini_dataset, tmp_path) -> pathlib.Path:
    """A built data set that a test may damage."""
    target = tmp_path / schema.NAME / 'hash' / '1.0.0'
    return pathlib.Path(shutil.copytree(mini_dataset, target))


def missing(folder: pathlib.Path) -> str:
    (folder / SHARD).unlink()
    return f'{SHARD}: is missing'


def truncated(folder: pathlib.Path) -> str:
    os.truncate(folder / SHARD, 1000)
    return f'{SHARD}: has 1000 bytes'


def swapped(folder: pathlib.Path) -> str:
    (folder / SHARD).rename(folder / 'x')
    (folder / OTHER).rename(folder / SHARD)
    (folder / 'x').rename(folder / OTHER)
    return f'{SHARD}: '


def other_index(folder: pathlib.Path) -> str:
    shutil.copy(
        folder / 'chunk_index-validation-3f9a1c20.npy', folder / 'chunk_index-train-3f9a1c20.npy'
    )
    return 'chunk_index-train-3f9a1c20.npy: '


def no_metadata(folder: pathlib.Path) -> str:
    (folder / schema.INFO_FILE).unlink()
    return f'{schema.INFO_FILE}: is missing'


@pytest.mark.parametrize('read_through', [None, 0])
@pytest.mark.parametrize('damage', [missing, truncated, swapped, other_index, no_metadata])
def test_damage_is_told_by_name(copy, damage, read_through):
    (found,) = data_sets.check_health(str(copy), read_through)
    assert found.status == 'pass', found
    told = damage(copy)
    found = data_sets.check_health(str(copy), read_through)
    assert {one.status for one in found} == {'fail'}
    assert any(one.text.startswith(told) for one in found), found
    assert all('--overwrite' in one.mend for one in found)


def test_swapped_shards_of_one_size_are_found_without_reading_them_through(copy):
    """Sizes tell nothing then, and no storage keeps a checksum of a local file."""
    first, second = (copy / SHARD).read_bytes(), (copy / OTHER).read_bytes()
    (copy / SHARD).write_bytes(second[: len(first)].ljust(len(first), b'x'))
    (copy / OTHER).write_bytes(first[: len(second)].ljust(len(second), b'x'))
    assert verify.verify(copy, fast=True).faults == []
    found = data_sets.check_health(str(copy), read_through=0)
    assert [one.text.partition(': ')[0] for one in found] == [SHARD, OTHER]
    assert all('are not the' in one.text for one in found)


def test_an_index_of_other_places_is_found_without_checksums(copy):
    """As sizes and counts are right, only the records tell."""
    (copy / CHECKSUMS).unlink()
    (found,) = data_sets.check_health(str(copy), read_through=0)
    assert (found.status, 'were compared only with each other' in found.text) == ('warn', True)
    index = np.load(copy / 'chunk_index-train-3f9a1c20.npy')
    last = index.shape[0] - 2  # offset of the last chunk of the last shard
    index[last] += 1
    np.save(copy / 'chunk_index-train-3f9a1c20.npy', index)
    assert verify.verify(copy, fast=True).faults == []
    (found,) = data_sets.check_health(str(copy), read_through=0)
    assert found.status == 'fail'
    assert 'chunk_index-train-3f9a1c20.npy tells of' in found.text


def test_data_sets_are_found_below_a_data_dir(copy, tmp_path):
    assert data_sets.find(str(copy)) == [str(copy)]
    assert data_sets.find(f'{tmp_path}/') == [str(copy)]
    (copy / 'building-01234567').mkdir()
    (copy / 'coyo11m_tfds-train-01234567.tfrecord-00000-of-00001').touch()
    no_metadata(copy)
    (copy / CHECKSUMS).unlink()
    assert data_sets.find(str(tmp_path)) == [str(copy)]  # shards are enough
    with pytest.raises(ValueError, match=schema.INFO_FILE):
        data_sets.check_health(str(copy))
    assert data_sets.find(str(tmp_path / 'nothing')) == []
    with pytest.raises(ValueError, match=r's3://bucket/d.*: expected a local path or gs://'):
        data_sets.find('s3://bucket/d')


def test_many_faults_are_counted(copy):
    for shard in copy.glob('*.tfrecord-*'):
        shard.unlink()
    found = data_sets.check_health(str(copy))
    assert len(found) == 9
    assert 'more faults' in found[-1].text
    assert 'coyo11m_tfds.verify' in found[-1].mend


def test_in_a_bucket(gcs, copy, tmp_path):
    gcs.upload_folder(tmp_path, 'gs://bucket/out')
    url = f'gs://bucket/out/{schema.NAME}/hash/1.0.0'
    assert data_sets.find('gs://bucket/out') == [url]
    assert data_sets.find('gs://bucket/other') == []
    assert data_sets.find(url) == [url]
    gcs.clear()
    (found,) = data_sets.check_health(url, read_through=0)
    assert found.status == 'pass'
    read = sum(request.nbytes for request in gcs.requests)
    assert read < sum(path.stat().st_size for path in copy.iterdir()) / 2
    gcs.remove('bucket', f'out/{schema.NAME}/hash/1.0.0/{SHARD}')
    (found,) = data_sets.check_health(url)
    assert (found.status, found.text) == ('fail', f'{SHARD}: is missing')
