"""Verification of built data sets: every kind of damage is told, in a line that names the file."""

import json
import os
import pathlib
import re
import shutil

import pytest
from tensorflow_datasets.core import dataset_info

import input_pipeline
from coyo11m_tfds import schema, verify
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.storage.file_state import compute_state
from tests.damages import flip
from tests.fakes.cloud import Fault

DATA = 'gs://bucket/d/1.0.0'
INDEX = 'chunk_index-train-3f9a1c20.npy'
CHECKSUMS = 'checksums-3f9a1c20.json'


def faults(data_dir: object, **options) -> list[str]:
    return verify.verify(data_dir, **options).faults


def shard(number: int) -> str:
    return f'coyo11m_tfds-train-3f9a1c20.tfrecord-{number:05}-of-00012'


def damage(path: pathlib.Path) -> dict[str, str]:
    """Damages a data set in every way; of each damaged file what is to be told."""
    flip(path / shard(0), 1_000_000)
    flip(path / shard(1), 1)
    sizes = [(path / shard(number)).stat().st_size for number in range(12)]
    os.truncate(path / shard(2), 1000)
    (path / shard(3)).unlink()
    (path / shard(4)).rename(path / 'x')
    (path / shard(5)).rename(path / shard(4))
    (path / 'x').rename(path / shard(5))
    shutil.copy(path / shard(6), path / shard(12))
    shutil.copy(path / INDEX.replace('train', 'validation'), path / INDEX)
    text = (path / schema.INFO_FILE).read_text()
    (path / schema.INFO_FILE).write_text(text.replace('"86"', '"85"', 1))
    return {
        shard(0): 'CRC-32C is [0-9a-f]{8}, expected [0-9a-f]{8}, record 38 has a wrong checksum',
        shard(1): 'CRC-32C is .*, expected .*, record 0 has a damaged length',
        shard(2): f'has 1000 bytes, expected {sizes[2]}',
        shard(3): 'is missing',
        shard(4): f'has {sizes[5]} bytes, expected {sizes[4]}',
        shard(5): f'has {sizes[4]} bytes, expected {sizes[5]}',
        shard(12): 'is unexpected, a file of .* bytes',
        INDEX: 'has 224 bytes, expected 608',
        schema.INFO_FILE: 'CRC-32C is .*, expected .*',
    }


def assert_told(found: list[str], expected: dict[str, str]) -> None:
    assert len(found) == len(expected), found
    for fault in found:
        name, _, said = fault.partition(': ')
        assert re.fullmatch(expected[name], said), fault


def test_a_data_set_that_was_built_has_no_faults(mini_dataset):
    for fast in (False, True):
        found = verify.verify(mini_dataset, fast=fast)
        assert found.faults == []
        assert found.num_files == len(list(mini_dataset.iterdir()))
    recorded = manifest.parse_checksums((mini_dataset / CHECKSUMS).read_bytes())
    paths = [path for path in mini_dataset.iterdir() if path.name != CHECKSUMS]
    assert recorded == {path.name: compute_state(path) for path in paths}


def test_every_damage_is_told_and_sizes_are_compared_without_reading(copy):
    expected = damage(copy)
    assert_told(faults(copy), expected)
    del expected[shard(0)], expected[shard(1)]
    assert_told(faults(copy, fast=True), expected)


def test_what_tfds_converts_in_place_is_readable_and_no_fault(copy):
    """As `tfds convert_format` does, which needs a package for ArrayRecord."""
    info = dataset_info.read_proto_from_builder_dir(copy)
    info.alternative_file_formats.append('array_record')
    dataset_info.write_dataset_info_proto(info, dataset_info_dir=copy)
    for number in range(12):
        (copy / shard(number).replace('tfrecord', 'array_record')).write_bytes(b'converted')
    assert faults(copy) == []
    assert input_pipeline.open_data(copy).split(schema.TRAIN)
    other = 'coyo11m_tfds-train-3f9a1c20.riegeli-00000-of-00012'
    (copy / other).write_bytes(b'converted')
    text = (copy / schema.INFO_FILE).read_text()
    (copy / schema.INFO_FILE).write_text(text.replace('"86"', '"85"', 1))
    expected = {other: 'is unexpected, a file of 9 bytes', schema.INFO_FILE: 'CRC-32C is .*'}
    assert_told([x for x in faults(copy) if 'array_record' not in x], expected)
    with pytest.raises(input_pipeline.DamagedError, match=r'dataset_info\.json: is damaged'):
        input_pipeline.open_data(copy)


TEMPLATES = ['{}', '{0}', '{SPLIT:>99999999}', '{SPLIT.__class__}', '{X', '{SPLIT}.{FILEFORMAT}']


@pytest.mark.parametrize('template', TEMPLATES)
def test_a_template_of_file_names_is_no_program_and_tells_shards_apart(older, template):
    info = json.loads((older / schema.INFO_FILE).read_text())
    info['splits'][0]['filepathTemplate'] = template
    (older / schema.INFO_FILE).write_text(json.dumps(info))
    assert any(x.startswith(f'{schema.INFO_FILE}: cannot be used (') for x in faults(older))
    with pytest.raises(input_pipeline.DamagedError, match=r'dataset_info\.json: is damaged'):
        input_pipeline.open_data(older)


@pytest.fixture
def older(copy) -> pathlib.Path:
    (copy / CHECKSUMS).unlink()
    return copy


def test_records_have_checksums_of_their_own(older):
    flip(older / shard(0), 1_000_000)
    flip(older / shard(1), 1)
    os.truncate(older / shard(2), 1000)
    (older / shard(3)).unlink()
    shutil.copy(older / INDEX, older / INDEX.replace('train', 'validation'))
    expected = {
        CHECKSUMS: 'is missing',
        shard(0): 'record 38 has a wrong checksum',
        shard(1): 'record 0 has a damaged length',
        shard(2): 'record 0 is not whole',
        shard(3): 'is missing',
    }
    assert_told(faults(older), expected)


def test_metadata_that_make_no_sense_are_told(older):
    for name in (INDEX, schema.INFO_FILE):
        for content in (b'\xff\xfe', b'{"splits": [{}]}'):
            (older / name).write_bytes(content)
            assert any(fault.startswith(f'{name}: cannot be used (') for fault in faults(older))


def test_a_damaged_record_of_checksums_is_told(copy):
    path = copy / CHECKSUMS
    path.write_text(path.read_text().replace('"size": 608', '"size": 609'))
    assert_told(faults(copy), {CHECKSUMS: r'cannot be used \(its digest is wrong\).*'})
    path.write_bytes(b'{}')
    assert_told(faults(copy), {CHECKSUMS: 'cannot be used .*'})


def test_damage_in_a_bucket_is_told_by_the_checksums_of_the_storage(bucket, copy):
    expected = damage(copy)
    bucket.upload_folder(copy, DATA)
    for name in (shard(0), shard(1)):
        expected[name] = 'CRC-32C is .*, expected .*'
    assert_told(faults(DATA, fast=True), expected)
    assert not [r for r in bucket.requests if r.action == 'read' and '.tfrecord' in r.path]
    assert_told(faults(DATA), expected)


@pytest.mark.parametrize(
    ('kind', 'error', 'message'),
    [('403', PermissionError, 'gcloud auth'), ('503', OSError, 'given up after')],
)
def test_a_storage_out_of_reach_is_no_fault_of_the_data_set(
    bucket, mini_dataset, kind, error, message
):
    bucket.upload_folder(mini_dataset, DATA)
    bucket.inject(Fault(kind, count=None, match=rf'read bucket/.*{shard(3)}'))
    with pytest.raises(error, match=message):
        verify.verify(DATA)


def test_the_command_says_it_in_lines_and_in_its_exit_status(command, copy):
    status, said, _ = command(verify, copy)
    assert status == 0 and said.startswith(f'{copy}: no faults in ')
    flip(copy / shard(3), 5000)
    (copy / shard(5)).unlink()
    status, said, _ = command(verify, copy)
    assert status == 1
    *lines, last, advice = said.splitlines()
    assert [line.partition(':')[0] for line in lines] == [shard(5), shard(3)]
    assert last.startswith(f'{copy}: 2 faults in ')
    assert last.endswith(', all of them read.')
    assert advice.startswith('To fix this, copy')
