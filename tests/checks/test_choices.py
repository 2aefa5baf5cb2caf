"""Tests of the variables of the environment, and of the settings that suit a machine."""

import json
import shlex

import pytest

from coyo11m_tfds.checks import choices, finding, hardware
from coyo11m_tfds.convert.settings import BuildSettings
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Coyo11mConfig
from coyo11m_tfds.process import machine

GB = 10**9


def check(monkeypatch, **environment: str) -> list[tuple[str, str]]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return [(found.status, found.text) for found in choices.check_environment(environment)]


def test_variables_that_count(monkeypatch):
    monkeypatch.delenv('COYO11M_NUM_PROC', raising=False)
    assert check(monkeypatch) == [('pass', 'nothing is set')]
    assert check(monkeypatch, COYO11M_NUM_PROC='4') == [('pass', 'COYO11M_NUM_PROC=4')]


@pytest.mark.parametrize(
    ('name', 'value', 'status'),
    [
        ('COYO11M_NUM_PROC', 'many', 'fail'),
        ('COYO11M_STALL_SECONDS', '-1', 'fail'),
        ('COYO11M_RETRY_SECONDS', 'soon', 'fail'),
        ('COYO11M_LEASE_SECONDS', '0', 'fail'),
        ('RANK', 'first', 'fail'),
        ('RANK', '1', 'fail'),  # of how many, nothing says
        ('COYO11M_NUM_PROCS', '4', 'warn'),
    ],
)
def test_variables_that_do_not(monkeypatch, name, value, status):
    ((found, text),) = check(monkeypatch, **{name: value})
    assert (found, name in text) == (status, True)


@pytest.fixture
def disks(monkeypatch) -> dict[str, hardware.Disk]:
    """Disks by their folders; tests say what there is."""
    there: dict[str, hardware.Disk] = {}
    monkeypatch.setattr(hardware, 'look_at_disk', lambda folder, root: there[folder])
    monkeypatch.setattr(machine, 'usable_cpus', lambda: 16)
    monkeypatch.setattr(machine, 'free_memory', lambda root: 64 * GB)
    monkeypatch.delenv('COYO11M_NUM_PROC', raising=False)
    return there


def disk(free: int, kind: str = hardware.SSD) -> hardware.Disk:
    return hardware.Disk('/', 1, free, 'ext4', kind)


def choose(**options) -> finding.Finding:
    options = {'settings': BuildSettings(), 'fields': {}, 'data_dir': '/out'} | options
    return choices.choose(
        **options, num_bytes=300 * GB, scratch_bytes=40 * GB, candidates=['/fast', '/large']
    )


def test_the_usual_scratch_folder_where_it_suits(disks):
    disks['/out/.coyo11m_tfds'] = disk(100 * GB)
    found = choose()
    assert found.facts['config'] == {'num_workers': 16}
    assert found.facts['scratch_dir'] == '/out/.coyo11m_tfds'


@pytest.mark.parametrize('usual', [disk(10 * GB), disk(100 * GB, hardware.NETWORK)])
def test_another_scratch_folder_where_it_does_not(disks, usual):
    disks |= {'/out/.coyo11m_tfds': usual, '/fast': disk(10 * GB), '/large': disk(100 * GB)}
    assert choose().facts['config'] == {'num_workers': 16, 'scratch_dir': '/large'}


def test_less_scratch_where_no_folder_has_the_room(disks):
    disks |= {'/out/.coyo11m_tfds': disk(30 * GB), '/fast': disk(10 * GB), '/large': disk(0)}
    assert choose().facts['config'] == {'num_workers': 16, 'scratch_gb': 15.0}


def test_memory_bounds_the_processes(disks, monkeypatch):
    disks['/out/.coyo11m_tfds'] = disk(100 * GB)
    monkeypatch.setattr(machine, 'free_memory', lambda root: 2 * GB)
    assert choose().facts['config'] == {'num_workers': 4}


@pytest.mark.parametrize('chosen', ['/home/mine', '~/mine'])
def test_what_the_user_has_chosen_stays(disks, monkeypatch, chosen):
    monkeypatch.setenv('HOME', '/home')
    disks['/home/mine'] = disk(100 * GB)
    settings = BuildSettings(num_workers=3, scratch_dir=chosen)
    expected = {'num_workers': 3, 'scratch_dir': '/home/mine'}
    assert choose(settings=settings).facts['config'] == expected


@pytest.mark.parametrize(
    'fields', [{}, {'name': 'long', 'caption_column': "it's long", 'num_workers': 99}]
)
def test_the_command_that_is_shown_can_be_given(disks, fields):
    disks['/out/.coyo11m_tfds'] = disk(100 * GB)
    said = choose(fields=fields).text.partition(', scratch in ')[0]
    flag = shlex.split(said)[-1]
    config = Coyo11mConfig(**json.loads(flag.removeprefix('--config=')))
    assert (config.name, config.num_workers) == (fields.get('name', 'NAME'), 16)
    assert config.caption_column == fields.get('caption_column', 'caption_llava')
