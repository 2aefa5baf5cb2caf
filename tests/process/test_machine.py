"""Tests of the limits of containers, on made-up trees of control groups."""

import os
import pathlib

import pytest

from coyo11m_tfds import doctor
from coyo11m_tfds.convert import build_settings, local_runner
from coyo11m_tfds.convert.build_settings import BuildSettings, check_build_memory
from coyo11m_tfds.process import machine, workers
from tests import made_sources
from tests.convert import plans

PHYSICAL = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
GB = 1 << 30


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: set(range(64)), raising=False)


@pytest.mark.parametrize(
    ('files', 'kinds'),
    [
        (('nvidia0', 'nvidiactl'), {'gpu'}),
        (('accel0', 'accel1'), {'tpu'}),
        (('vfio/vfio', 'vfio/0'), {'tpu'}),
        (('nvidiactl', 'vfio/vfio'), set()),
    ],
)
def test_accelerators_are_those_with_device_files(tmp_path, files, kinds):
    for name in files:
        (tmp_path / 'dev' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'dev' / name).touch()
    assert machine.accelerators(tmp_path) == kinds


def tree(root: pathlib.Path, groups: str, **files: str) -> pathlib.Path:
    """Makes `proc/self/cgroup`, and files below `sys/fs/cgroup`."""
    in_sys = {f'sys/fs/cgroup/{path}': text for path, text in files.items()}
    for path, text in {'proc/self/cgroup': groups, **in_sys}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + '\n')
    return root


@pytest.mark.parametrize(
    ('quota', 'cpus'),
    [
        ('max 100000', 64),
        ('400000 100000', 4),
        ('150000 100000', 2),  # rounded up
    ],
)
def test_cpu_quota(tmp_path, quota, cpus):
    for mount in ('', 'unified/'):  # beside version 1
        root = tree(tmp_path / mount, '4:memory:/x\n0::/', **{f'{mount}cpu.max': quota})
        assert machine.usable_cpus(root) == cpus


@pytest.mark.parametrize('limited', ['', 'kubepods/pod/'])
def test_every_group_above_counts(tmp_path, limited):
    """Also where the path is that outside of the container, so that only the top is mounted."""
    files = {f'{limited}cpu.max': '300000 100000', f'{limited}memory.max': str(GB)}
    root = tree(tmp_path, '0::/kubepods/pod/main', **files)
    assert (machine.usable_cpus(root), machine.usable_memory(root)) == (3, GB)


def test_the_least_of_the_limits_of_its_own_groups_counts(tmp_path):
    files = {'a/cpu.max': '800000 100000', 'a/b/cpu.max': '200000 100000', 'a/b/c/cpu.max': 'max 1'}
    memory = {'a/memory.max': str(GB), 'a/b/memory.max': str(2 * GB), 'a/b/c/memory.max': 'max'}
    other = {'x/cpu.max': '100000 100000', 'x/memory.max': '1000'}
    root = tree(tmp_path, '0::/a/b/c', **files, **memory, **other)
    assert (machine.usable_cpus(root), machine.usable_memory(root)) == (2, GB)


def test_a_path_that_leaves_the_mount(tmp_path):
    root = tree(tmp_path, '0::/../../outside', **{'cpu.max': '200000 100000'})
    assert machine.usable_cpus(root) == 2


def test_a_system_without_control_groups(tmp_path, monkeypatch):
    assert (machine.usable_cpus(tmp_path), machine.usable_memory(tmp_path)) == (64, PHYSICAL)
    monkeypatch.delattr(os, 'sched_getaffinity')
    assert machine.usable_cpus(tmp_path) == os.cpu_count()


@pytest.mark.parametrize(
    ('usable', 'most', 'remedy'),
    [
        (2 * GB, 6, 'Set num_workers to 6, or raise its limit'),
        (GB, 2, 'Set num_workers to 2, or raise its limit'),
        (GB // 2, 0, 'Use a machine with more, or raise its limit'),
    ],
)
def test_a_build_that_would_run_out_of_memory_is_refused(
    tmp_path, monkeypatch, usable, most, remedy
):
    monkeypatch.delenv(workers.VARIABLE, raising=False)
    monkeypatch.setattr(machine, 'usable_memory', lambda: usable)
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    assert local_runner.choose_workers(0, 10**12) == max(1, most)
    if most:
        plans.make_plan(source, tmp_path / 'plan', num_workers=most)
    assert (doctor.check_machine().status == doctor.FAIL) == (not most)
    for number in (most + 1, 0)[: 2 - bool(most)]:
        with pytest.raises(ValueError, match=remedy):
            plans.make_plan(source, tmp_path / 'plan', num_workers=number)
        with pytest.raises(ValueError, match=remedy):
            doctor.plan_or_estimate(str(source), BuildSettings(num_workers=number))
    with pytest.raises(ValueError, match='of 30,000,000 rows with num_workers=1 takes 4'):
        check_build_memory(30_000_000, 0)


def test_too_many_rows_are_refused_before_they_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, 'usable_memory', lambda: GB)
    monkeypatch.setattr(build_settings, '_JOINED_ROW', GB)
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    with pytest.raises(ValueError, match='the build of 20 rows'):
        plans.make_plan(source, tmp_path / 'plan')
    # As of a source that takes long to plan.
    monkeypatch.setitem(doctor._EXACT_BYTES, False, 0)
    with pytest.raises(ValueError, match='the build of 20 rows'):
        doctor.plan_or_estimate(str(source), BuildSettings())


def test_workers_of_a_build_on_a_system_without_affinity(monkeypatch):
    monkeypatch.delattr(os, 'sched_getaffinity')
    monkeypatch.delenv(workers.VARIABLE, raising=False)
    assert local_runner.choose_workers(0, 10**12) == machine.usable_cpus()
