"""Tests of the limits of containers, on made-up trees of control groups."""

import os

import pytest

from coyo11m_tfds import doctor, dry_run
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


QUOTA = '{}00000 100000'.format


@pytest.mark.parametrize(
    ('group', 'files', 'cpus', 'memory'),
    [
        ('/', {'cpu.max': 'max 100000'}, 64, PHYSICAL),
        ('/', {'cpu.max': '400000 100000'}, 4, PHYSICAL),
        ('/', {'cpu.max': '150000 100000'}, 2, PHYSICAL),  # rounded up
        ('/', {'unified/cpu.max': QUOTA(4)}, 4, PHYSICAL),  # beside version 1
        ('/pods/pod/main', {'pods/pod/cpu.max': QUOTA(3), 'pods/pod/memory.max': GB}, 3, GB),
        # The path is that outside of the container, so that only the top is mounted.
        ('/pods/pod/main', {'cpu.max': QUOTA(3), 'memory.max': GB}, 3, GB),
        ('/../../outside', {'cpu.max': QUOTA(2)}, 2, PHYSICAL),
        # The least counts, and that of another group does not.
        ('/a/b', {'cpu.max': QUOTA(8), 'a/cpu.max': QUOTA(2), 'a/b/cpu.max': 'max 1'}, 2, PHYSICAL),
        ('/a/b', {'memory.max': GB, 'a/memory.max': 2 * GB, 'a/b/memory.max': 'max'}, 64, GB),
        ('/a', {'x/cpu.max': QUOTA(1), 'x/memory.max': 1000}, 64, PHYSICAL),
    ],
)
def test_the_limits_of_its_own_group_and_those_above_count(tmp_path, group, files, cpus, memory):
    written = {f'sys/fs/cgroup/{name}': text for name, text in files.items()}
    for name, text in {'proc/self/cgroup': f'4:memory:/x\n0::{group}', **written}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'{text}\n')
    assert machine.usable_cpus(tmp_path) == cpus
    assert machine.usable_memory(tmp_path) == memory


def test_a_system_without_control_groups(tmp_path, monkeypatch):
    assert (machine.usable_cpus(tmp_path), machine.usable_memory(tmp_path)) == (64, PHYSICAL)
    monkeypatch.delattr(os, 'sched_getaffinity')
    assert machine.usable_cpus(tmp_path) == os.cpu_count()


TOO_LITTLE = {
    'enough for six workers': (2 * GB, 6, 'Set num_workers to 6, or raise its limit'),
    'enough for two workers': (GB, 2, 'Set num_workers to 2, or raise its limit'),
    'enough for none': (GB // 2, 0, 'Use a machine with more, or raise its limit'),
}


@pytest.mark.parametrize(('usable', 'most', 'remedy'), TOO_LITTLE.values(), ids=TOO_LITTLE)
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
            dry_run.plan_or_estimate(str(source), BuildSettings(num_workers=number))
    with pytest.raises(ValueError, match='of 30,000,000 rows with num_workers=1 takes 4'):
        check_build_memory(30_000_000, 0)


def test_too_many_rows_are_refused_before_they_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, 'usable_memory', lambda: GB)
    monkeypatch.setattr(build_settings, '_JOINED_ROW', GB)
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    with pytest.raises(ValueError, match='the build of 20 rows'):
        plans.make_plan(source, tmp_path / 'plan')
    # As of a source that takes long to plan.
    monkeypatch.setitem(dry_run._EXACT_BYTES, False, 0)
    with pytest.raises(ValueError, match='the build of 20 rows'):
        dry_run.plan_or_estimate(str(source), BuildSettings())


WORK = {
    'two threads, which need no start': (1_000_000, 40, 2),
    'processes that repay their start': (6_000_000_000, 240_000, 3),
    'few small records': (1_000_000, 2_000, 1),
    'many small records': (500_000_000, 1_200_000, 3),
}


@pytest.mark.parametrize(('num_bytes', 'num_rows', 'num_workers'), WORK.values(), ids=WORK)
def test_as_many_workers_write_as_there_is_work_for(monkeypatch, num_bytes, num_rows, num_workers):
    monkeypatch.delenv(workers.VARIABLE, raising=False)
    monkeypatch.setattr(machine, 'usable_cpus', lambda: 64)
    assert local_runner.choose_workers(0, num_bytes, num_rows) == num_workers
    assert local_runner.choose_workers(2, num_bytes, num_rows) == 2
    monkeypatch.setattr(machine, 'usable_cpus', lambda: 1)
    assert local_runner.choose_workers(0, num_bytes, num_rows) == 1


def test_workers_of_a_build_on_a_system_without_affinity(monkeypatch):
    monkeypatch.delattr(os, 'sched_getaffinity')
    monkeypatch.delenv(workers.VARIABLE, raising=False)
    assert local_runner.choose_workers(0, 10**12) == machine.usable_cpus()
