"""What all benchmarks share: fresh processes in turns, what they take, and the table."""

import os
import pathlib

import pytest

from benchmarks import runner
from benchmarks.runner import Side
from tests import children, small_vae
from tests.benchmarks.sides import answer, die, fail, lack


@pytest.fixture
def here(monkeypatch, tmp_path) -> pathlib.Path:
    """A folder to work in, from which the checkout is found."""
    monkeypatch.setenv('PYTHONPATH', os.getcwd())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def main(folder: pathlib.Path, sides: dict[str, Side], *arguments: str) -> int:
    columns = {**runner.RATE, 'x': runner.column('x', '.1f', 10), 'none': runner.column('none')}
    flags = {'number': (7, 'a number'), 'quick': (False, 'or not')}

    def prepare(flags, data, stack):
        (data / 'made').touch()
        assert (flags.number, flags.quick) == (8, True)
        return runner.run

    arguments = [f'--dir={folder}', '--number=8', '--quick', *arguments]
    return runner.main('A test.', sides, columns, flags, prepare, arguments)


def test_sides_run_in_fresh_processes_and_make_a_table(here, capfd):
    sides = {
        'a': Side('side a', answer, {'x': 1}),
        'b': Side('side b', answer, {'x': 2}),
    }

    assert main(here, sides, '--repeats=2') == 0

    out, err = capfd.readouterr()
    machine, _, header, _, *rows = out.splitlines()
    assert 'cores (' in machine and 'torch 2' in machine
    assert (
        header == '| side | samples/s | all runs | CPU us a sample | x | none | peak MB | others |'
    )
    assert rows[0].startswith('| side a | 2 | 2 to 2 | 1.0 | 10.0 |  | ')
    assert rows[1].startswith('| side b | 2 | 2 to 2 | 1.0 | 20.0 |  | ')
    names, figures = err.splitlines()[::2], err.splitlines()[1::2]
    assert names == ['1 of 2: a', '1 of 2: b', '2 of 2: b', '2 of 2: a']
    assert all(line.startswith('  rate 2, cpu_per_sample 1e-06, ') for line in figures)
    assert list(here.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'flags', 'titles'),
    [
        ('convert', '--gb=0.001 --only=cp,in_place --cold', ['`cp` of ', 'latents in place']),
        ('images', '--vae=VAE --images=9 --only=encode_images,parts', ['`encode_i', 'Pillow and']),
        ('remote', '--gb=0.02 --steps=4 --only=far,kept', ['`train_batches`, 100', 'the same']),
    ],
)
def test_a_command_prints_a_table_and_leaves_nothing(tmp_path, name, flags, titles):
    (tmp_path / 'vae').mkdir()
    flags = flags.replace('VAE', str(small_vae.make(tmp_path / 'vae'))).split()
    ended = children.program(f'benchmarks.{name}', f'--dir={tmp_path}/work', '--repeats=1', *flags)
    assert ended.returncode == 0, ended.stderr
    header, _, *rows = [line for line in ended.stdout.splitlines() if line.startswith('|')]
    for row, title in zip(rows, titles, strict=True):
        assert row.startswith(f'| {title}') and row.count('|') == header.count('|')
    assert list((tmp_path / 'work').iterdir()) == []


def test_what_cannot_run_is_named_and_tried_once(here, capfd):
    functions = {'a': answer, 'f': fail, 'd': die, 'l': lack}
    sides = {name: Side(name, function) for name, function in functions.items()}

    assert main(here, sides, '--keep', '--repeats=2') == 1

    out, err = capfd.readouterr()
    for words in ('f, failed: ValueError: no\n', 'd, failed: its process', 'l, left out: no peer'):
        assert words in out
    assert '| f |' not in out and err.count(': f') == 1
    assert 'in fail' in err
    assert [path.name for path in here.glob('*/*')] == ['made']
    assert main(here, {'l': Side('l', lack)}) == 1, 'nothing was measured'
    assert main(here, sides, '--only=a,l') == 0
    with pytest.raises(SystemExit):
        main(here, sides, '--only=a,mdz')
    assert "--only: 'mdz' is none of a, f, d, l." in capfd.readouterr().err
