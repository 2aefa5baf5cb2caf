"""Tests of the checks of cores, memory and disks, on made-up trees of `/proc` and `/sys`."""

import os
import pathlib
import shutil

import pytest

from coyo11m_tfds.checks import hardware

GB = 10**9


def tree(root: pathlib.Path, **files: str) -> pathlib.Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + '\n')
    return root


def has_free(num_bytes: int):
    return lambda folder: (2 * num_bytes, num_bytes, num_bytes)


def test_one_core_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    root = tree(tmp_path, **{'proc/self/cgroup': '0::/', 'sys/fs/cgroup/cpu.max': '90000 100000'})
    (found,) = hardware.check_cores(root)
    assert (found.status, found.facts) == ('warn', {'usable': 1, 'there': 8})
    (root / 'sys/fs/cgroup/cpu.max').write_text('400000 100000\n')
    (found,) = hardware.check_cores(root)
    assert found.status == 'pass'
    assert found.text.startswith('4 usable of 8')


@pytest.mark.parametrize(
    ('available', 'status'), [(4 * GB, 'pass'), (1 * GB, 'warn'), (GB // 4, 'fail')]
)
def test_little_memory(tmp_path, available, status):
    root = tree(tmp_path, **{'proc/meminfo': f'MemAvailable: {available // 1024} kB'})
    (found,) = hardware.check_memory(root)
    assert (found.status, bool(found.mend)) == (status, status != 'pass')


def test_too_little_disk_is_a_failure_with_both_figures(tmp_path):
    places = {'data_dir': (str(tmp_path / 'not' / 'yet'), 310 * GB)}
    (found,) = hardware.check_disks(places, usage=has_free(400 * GB))
    assert found.status == 'pass'
    (found,) = hardware.check_disks(places, usage=has_free(20 * GB))
    assert found.status == 'fail'
    assert 'has 20.0 GB free' in found.text
    assert 'expected 310.0 GB' in found.text
    assert 'another --data_dir' in found.mend


def test_what_is_only_read_needs_no_room(tmp_path):
    (found,) = hardware.check_disks({'data_dir': (str(tmp_path), None)}, usage=has_free(0))
    assert found.status == 'pass'


def test_places_on_one_disk_share_its_room(tmp_path):
    places = {'data_dir': (str(tmp_path), 30 * GB), 'scratch': (str(tmp_path / 's'), 32 * GB)}
    found = hardware.check_disks(places, usage=has_free(40 * GB))
    assert [one.status for one in found] == ['pass', 'fail']
    assert 'expected 62.0 GB' in found[1].text


def test_a_small_file_system_is_too_little(tmp_path):
    """`/dev/shm` is a tmpfs on every Linux; more than it has is asked for."""
    if not os.path.ismount('/dev/shm'):
        pytest.skip('/dev/shm is not mounted')
    free = shutil.disk_usage('/dev/shm').free
    (found,) = hardware.check_disks({'scratch': ('/dev/shm/x', 2 * free + GB)})
    assert (found.status, found.facts['file_system']) == ('fail', 'tmpfs')
    if free > GB:
        (found,) = hardware.check_disks({'scratch': ('/dev/shm/x', 0)})
        assert found.status == 'warn'
        assert 'counts as memory' in found.text


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / 'file').touch()
    (found,) = hardware.check_disks({'data_dir': (str(tmp_path / 'file' / 'x'), 0)})
    assert found.status == 'fail'
    assert 'is a file' in found.text


@pytest.mark.parametrize(
    ('system', 'rotational', 'kind', 'status'),
    [
        ('ext4', '0', hardware.SSD, 'pass'),
        ('ext4', '1', hardware.ROTATING, 'pass'),
        ('overlay', None, hardware.DISK, 'pass'),
        ('tmpfs', None, hardware.MEMORY, 'warn'),
        ('nfs4', None, hardware.NETWORK, 'warn'),
        ('fuse.gcsfuse', None, hardware.NETWORK, 'warn'),
    ],
)
def test_kinds_of_disks(tmp_path, system, rotational, kind, status):
    device = tmp_path.stat().st_dev
    number = f'{os.major(device)}:{os.minor(device)}'
    mounts = f'1 0 0:1 / / rw - ext2 x rw\n2 1 {number} / /data rw,relatime - {system} dev rw'
    root = tree(tmp_path, **{'proc/self/mountinfo': mounts})
    if rotational:  # of a partition
        tree(tmp_path, **{'sys/devices/sda/queue/rotational': rotational})
        (tmp_path / 'sys/devices/sda/sda1').mkdir()
        (tmp_path / 'sys/dev/block').mkdir(parents=True)
        (tmp_path / 'sys/dev/block' / number).symlink_to('../../devices/sda/sda1')
    places = {'data_dir': (str(tmp_path), 0)}
    (found,) = hardware.check_disks(places, root, has_free(10 * GB))
    assert (found.facts['file_system'], found.facts['kind']) == (system, kind)
    assert (found.status, bool(found.mend)) == (status, status != 'pass')
