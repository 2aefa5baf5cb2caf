"""Verification of built data sets: every kind of damage is told, in a line that names the file."""

import itertools
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from coyo11m_tfds import schema, verify
from coyo11m_tfds.dataset import manifest
from coyo11m_tfds.storage import stored_files
from coyo11m_tfds.storage.file_state import of_file
from tests import built
from tests.fakes.cloud import Fault

DATA = 'gs://bucket/d/1.0.0'
INDEX = 'chunk_index-train-3f9a1c20.npy'
CHECKSUMS = 'checksums-3f9a1c20.json'
SHARD = 'coyo11m_tfds-train-3f9a1c20.tfrecord-00003-of-00012'
OTHER = 'coyo11m_tfds-train-3f9a1c20.tfrecord-00005-of-00012'


@pytest.fixture
def copy(mini_dataset, tmp_path) -> pathlib.Path:
    """A built data set that a test may damage."""
    return pathlib.Path(shutil.copytree(mini_dataset, tmp_path / '1.0.0'))


def faults(data_dir: object, **options) -> list[str]:
    return verify.verify(data_dir, **options).faults


def flip(path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# --- Damage ------------------------------------------------------------------------------------


def flip_a_byte(path: pathlib.Path) -> list[str]:
    flip(path / SHARD, 1_000_000)
    return [
        rf'{SHARD}: CRC-32C is [0-9a-f]{{8}}, expected [0-9a-f]{{8}}, '
        r'record 38 has a wrong checksum'
    ]


def flip_a_length(path: pathlib.Path) -> list[str]:
    flip(path / SHARD, 1)
    return [rf'{SHARD}: CRC-32C is .*, expected .*, record 0 has a damaged length']


def truncate(path: pathlib.Path) -> list[str]:
    size = (path / SHARD).stat().st_size
    os.truncate(path / SHARD, 1000)
    return [f'{SHARD}: has 1000 bytes, expected {size}']


def remove(path: pathlib.Path) -> list[str]:
    (path / SHARD).unlink()
    return [f'{SHARD}: is missing']


def swap(path: pathlib.Path) -> list[str]:
    first, second = (path / SHARD).read_bytes(), (path / OTHER).read_bytes()
    assert len(first) != len(second)
    (path / SHARD).write_bytes(second)
    (path / OTHER).write_bytes(first)
    return [
        f'{SHARD}: has {len(second)} bytes, expected {len(first)}',
        f'{OTHER}: has {len(first)} bytes, expected {len(second)}',
    ]


def add_a_shard(path: pathlib.Path) -> list[str]:
    name = SHARD.replace('00003', '00012')
    shutil.copy(path / SHARD, path / name)
    return [f'{name}: is unexpected, a file of .* bytes']


def exchange_the_index(path: pathlib.Path) -> list[str]:
    shutil.copy(path / 'chunk_index-validation-3f9a1c20.npy', path / INDEX)
    return ['chunk_index-train-3f9a1c20.npy: has 224 bytes, expected 608']


def edit_the_info(path: pathlib.Path) -> list[str]:
    text = (path / schema.INFO_FILE).read_text()
    (path / schema.INFO_FILE).write_text(text.replace('"86"', '"85"', 1))
    return [f'{schema.INFO_FILE}: CRC-32C is .*, expected .*']


DAMAGES = [
    flip_a_byte,
    flip_a_length,
    truncate,
    remove,
    swap,
    add_a_shard,
    exchange_the_index,
    edit_the_info,
]


def assert_told(found: list[str], expected: list[str]) -> None:
    assert len(found) == len(expected), found
    for fault, pattern in zip(sorted(found), sorted(expected), strict=True):
        assert re.fullmatch(pattern, fault), (fault, pattern)


def test_a_data_set_that_was_built_has_no_faults(mini_dataset):
    for fast in (False, True):
        found = verify.verify(mini_dataset, fast=fast)
        assert found.faults == []
        assert found.num_files == len(list(mini_dataset.iterdir()))
    recorded = manifest.parse((mini_dataset / CHECKSUMS).read_bytes())
    paths = [path for path in mini_dataset.iterdir() if path.name != CHECKSUMS]
    assert recorded == {path.name: of_file(path) for path in paths}


@pytest.mark.parametrize('damage', DAMAGES)
def test_every_damage_is_told(copy, damage):
    expected = damage(copy)
    assert_told(faults(copy), expected)


def test_many_damages_are_all_told(copy):
    flip(copy / OTHER, 5000)
    expected = [rf'{OTHER}: CRC-32C .*', *truncate(copy), *edit_the_info(copy)]
    assert_told(faults(copy), expected)


def test_sizes_are_compared_without_reading(copy):
    expected = [*truncate(copy), *add_a_shard(copy), *edit_the_info(copy)]
    assert_told(faults(copy, fast=True), expected)


def test_shards_that_are_of_one_size_are_told_apart(copy):
    """Records of equal sizes in another order: only the checksum differs."""
    data = (copy / SHARD).read_bytes()
    offsets = np.cumsum([0] + [16 + len(record) for record in built.split_records(data)])
    pieces = [data[a:b] for a, b in itertools.pairwise(offsets)]
    sizes = [len(piece) for piece in pieces]
    first = next(i for i, size in enumerate(sizes) if size in sizes[i + 1 :])
    second = sizes.index(sizes[first], first + 1)
    pieces[first], pieces[second] = pieces[second], pieces[first]
    (copy / SHARD).write_bytes(b''.join(pieces))
    assert_told(faults(copy), [rf'{SHARD}: CRC-32C is .*, expected [0-9a-f]{{8}}'])


# --- Data sets whose record of checksums was lost ----------------------------------------------


@pytest.fixture
def older(copy) -> pathlib.Path:
    (copy / CHECKSUMS).unlink()
    return copy


def test_records_have_checksums_of_their_own(older):
    names = [SHARD.replace('00003', f'{number:05d}') for number in range(4)]
    flip(older / names[0], 1_000_000)
    flip(older / names[1], 1)
    os.truncate(older / names[2], 1000)
    (older / names[3]).unlink()
    shutil.copy(older / INDEX, older / INDEX.replace('train', 'validation'))
    expected = [
        f'{CHECKSUMS}: is missing',
        f'{names[0]}: record 38 has a wrong checksum',
        f'{names[1]}: record 0 has a damaged length',
        f'{names[2]}: record 0 is not whole',
        f'{names[3]}: is missing',
    ]
    assert_told(faults(older), expected)


def test_metadata_that_make_no_sense_are_told(older):
    for name in (INDEX, schema.INFO_FILE):
        for content in (b'\xff\xfe', b'{"splits": [{}]}'):
            (older / name).write_bytes(content)
            assert any(fault.startswith(f'{name}: cannot be used (') for fault in faults(older))


def test_a_damaged_record_of_checksums_is_told(copy):
    path = copy / CHECKSUMS
    path.write_text(path.read_text().replace('"size": 608', '"size": 609'))
    assert_told(faults(copy), [rf'{CHECKSUMS}: cannot be used \(its digest is wrong\).*'])
    path.write_bytes(b'{}')
    assert_told(faults(copy), [f'{CHECKSUMS}: cannot be used .*'])


# --- In a bucket -------------------------------------------------------------------------------


@pytest.fixture
def cloud(bucket, mini_dataset):
    bucket.upload_folder(mini_dataset, DATA)
    return bucket


def upload(cloud, path: pathlib.Path) -> None:
    for name in list(cloud.objects('bucket')):
        cloud.remove('bucket', name)
    cloud.upload_folder(path, DATA)


def test_a_data_set_in_a_bucket_is_found_from_above(cloud):
    cloud.put('bucket', 'd/1.0.0/building-01234567/dataset_info.json', b'')
    cloud.put('bucket', 'd/1.0.0.old/dataset_info.json', b'')
    for folder in ('gs://bucket', 'gs://bucket/d/', DATA):
        assert stored_files.folders_with(folder, schema.INFO_FILE) == [DATA]
    assert stored_files.folders_with('gs://bucket/no', schema.INFO_FILE) == []
    cloud.put('bucket', 'a[1]/d/1.0.0/dataset_info.json', b'')
    assert stored_files.folders_with('gs://bucket/a[1]', schema.INFO_FILE) == [
        'gs://bucket/a[1]/d/1.0.0'
    ]


def test_damage_in_a_bucket_is_told(cloud, copy):
    expected = [pattern.partition(', record')[0] for pattern in flip_a_byte(copy)]
    (copy / OTHER).unlink()
    upload(cloud, copy)
    assert_told(faults(DATA), [*expected, f'{OTHER}: is missing'])


def test_the_checksums_of_the_storage_do_without_reading(cloud, copy):
    flip_a_byte(copy)
    upload(cloud, copy)
    cloud.clear()
    assert_told(faults(DATA, fast=True), [f'{SHARD}: CRC-32C is .*, expected .*'])
    assert not [r for r in cloud.requests if r.action == 'read' and '.tfrecord' in r.path]


def test_what_is_changed_on_its_way_is_no_fault(cloud):
    cloud.inject(Fault('flip', count=3, match=r'read bucket/.*\.tfrecord'))
    cloud.inject(Fault('flip', count=2, match=r'read bucket/.*\.json'))
    cloud.inject_share(['503', '429', 'cut', 'reset'], share=0.1, seed=1)
    assert faults(DATA) == []
    assert any(request.fault == 'flip' for request in cloud.requests)


@pytest.mark.parametrize(
    ('kind', 'error', 'message'),
    [('403', PermissionError, 'gcloud auth'), ('503', OSError, 'given up after')],
)
def test_a_storage_out_of_reach_is_no_fault_of_the_data_set(cloud, kind, error, message):
    cloud.inject(Fault(kind, count=None, match=rf'read bucket/.*{SHARD}'))
    with pytest.raises(error, match=message):
        verify.verify(DATA)


# --- The command -------------------------------------------------------------------------------


def test_the_command_says_it_in_lines_and_in_its_exit_status(command, copy):
    status, said, _ = command(verify, copy)
    assert status == 0 and said.startswith(f'{copy}: no faults in ')
    flip(copy / SHARD, 5000)
    (copy / OTHER).unlink()
    status, said, _ = command(verify, copy)
    assert status == 1
    *lines, last, advice = said.splitlines()
    assert [line.partition(':')[0] for line in lines] == [OTHER, SHARD]
    assert last.startswith(f'{copy}: 2 faults in ')
    assert last.endswith(', all of them read.')
    assert advice.startswith('To mend it copy')


def test_a_folder_above_the_only_data_set_will_do(command, mini_dataset, tmp_path):
    for above in ('', 'hash', 'hash/1.0.0'):
        status, said, errors = command(verify, '--fast', mini_dataset.parents[1] / above)
        assert status == 0, errors
        assert said.startswith(f'{mini_dataset}: ')
    for name in ('a', 'b'):
        (tmp_path / name).mkdir()
        (tmp_path / name / '1.0.0').symlink_to(mini_dataset)
    status, _, errors = command(verify, tmp_path)
    assert status == 2
    assert errors == (
        f'error: {tmp_path}: holds 2 data sets. Name one of them: {tmp_path}/a/1.0.0, '
        f'{tmp_path}/b/1.0.0\n'
    )


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ([], 'required: data_dir'),
        (['no/such/folder'], 'no/such/folder: there is no such folder'),
        (['.'], r'.: there is no dataset_info.json'),
        ([''], 'no folder given'),
        (['gs://'], 'gs://: expected a local path or gs://bucket/folder'),
        (['hf://datasets/a/b'], 'hf://datasets/a/b.*: expected a local path or gs://'),
        (['--parallel=0', '.'], 'parallel is 0'),
    ],
)
def test_unusable_arguments_end_it_with_status_2(command, arguments, words):
    status, _, errors = command(verify, *arguments)
    assert status == 2
    assert re.fullmatch(rf'error: .*{words}.*\n', errors)
