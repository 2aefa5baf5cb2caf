"""What all benchmarks share: fresh processes in turns, what they take, and the table."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from benchmarks import runner
from benchmarks.runner import Side

# Functions of a side that a fresh process finds: in this module.


def answer(**settings):
    return settings | {'rate': 2.0, 'cpu_per_sample': 1e-6}


def fail():
    raise ValueError('no\nand more')


def lack():
    raise ModuleNotFoundError('no peer here')


def die():
    os._exit(3)


def where():
    import configs

    return {'where': list(configs.__path__)}


def take_memory(size: int):
    """Two processes share `size` bytes and map a file of as many."""
    path = pathlib.Path('mapped')
    path.write_bytes(b'x' * size)
    own = bytearray(size)
    own[::4096] = bytes(size // 4096)  # so that all of it is there
    program = f"""
import mmap, os, time
own = bytearray({size})
own[::4096] = bytes({size} // 4096)
with open('mapped', 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(mapped[::4096])
if os.fork():
    os.wait()
else:
    time.sleep(1.5)
    os._exit(0)
"""
    subprocess.run([sys.executable, '-c', program], check=True)
    return {}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder to work in, from which the checkout is found."""
    monkeypatch.setenv('PYTHONPATH', os.getcwd())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def main(folder: pathlib.Path, sides: dict[str, Side], *arguments: str) -> int:
    columns = {**runner.RATE, 'x': runner.column('x', '.1f', 10), 'none': runner.column('none')}
    flags = {'number': (7, 'a number'), 'quick': (False, 'or not')}

    def begin(flags, data, stack):
        (data / 'made').touch()
        assert (flags.number, flags.quick) == (8, True)
        return runner.run

    given = [f'--dir={folder}', '--number=8', '--quick', *arguments]
    return runner.main('A test.', sides, columns, flags, begin, given)


def test_sides_run_in_fresh_processes_and_make_a_table(here: pathlib.Path, capfd):
    sides = {'a': Side('side a', answer, {'x': 1}), 'b': Side('side b', answer, {'x': 2})}

    assert main(here, sides, '--repeats=2') == 0

    printed, said = capfd.readouterr()
    machine, _, header, _, *rows = printed.splitlines()
    assert 'cores (' in machine and 'torch 2' in machine
    assert (
        header == '| side | samples/s | all runs | CPU us a sample | x | none | peak MB | others |'
    )
    assert rows[0].startswith('| side a | 2 | 2 to 2 | 1.0 | 10.0 |  | ')
    assert rows[1].startswith('| side b | 2 | 2 to 2 | 1.0 | 20.0 |  | ')
    assert said.split('\n')[:4] == ['1 of 2: a', '1 of 2: b', '2 of 2: b', '2 of 2: a']
    assert list(here.iterdir()) == []


def test_what_cannot_run_is_named_and_tried_once(here: pathlib.Path, capfd):
    sides = {
        'a': Side('a', answer),
        'f': Side('f', fail),
        'd': Side('d', die),
        'l': Side('l', lack),
    }

    assert main(here, sides, '--keep', '--repeats=2') == 1

    printed, said = capfd.readouterr()
    for words in ('f, failed: ValueError: no\n', 'd, failed: its process', 'l, left out: no peer'):
        assert words in printed
    assert '| f |' not in printed and said.count(': f') == 1
    assert 'in fail' in said
    assert [path.name for path in here.glob('*/*')] == ['made']
    assert main(here, {'l': Side('l', lack)}) == 1, 'nothing was measured'
    assert main(here, sides, '--only=a,l') == 0
    with pytest.raises(SystemExit):
        main(here, sides, '--only=a,mdz')
    assert "--only: 'mdz' is none of a, f, d, l." in capfd.readouterr().err


def test_ours_is_measured_as_before_too(here: pathlib.Path):
    before = here / 'before'
    (before / 'configs').mkdir(parents=True)
    (before / 'configs' / '__init__.py').touch()
    side = Side('ours', where, ours=True)
    found = {}

    def begin(flags, folder, stack):
        def once(each):
            found[each.title] = runner.run(each)['where']
            return answer()

        return once

    sides = {'o': side, 'p': Side('peer', where)}
    arguments = [f'--dir={here}', '--before=before', '--repeats=1']
    assert runner.main('A test.', sides, {}, {}, begin, arguments) == 0
    checkout = [str(pathlib.Path(runner.__file__).parents[1] / 'configs')]
    expected = {'ours': checkout, 'peer': checkout, 'ours, before': [str(before / 'configs')]}
    assert found == expected


def test_memory_that_processes_share_counts_once_and_mapped_files_do_not(here: pathlib.Path):
    size = 64 << 20
    found = runner.run(Side('', take_memory), size=size)
    assert 2 * size < found['peak'] < 2.8 * size
    assert 0 <= found['others'] <= 1


def test_a_meter_counts_processes_that_still_run_and_what_comes_from_the_disk(tmp_path):
    (tmp_path / 'x').write_bytes(bytes(1 << 20))
    runner.prepare_cache([tmp_path], cold=True)
    own, meter = time.process_time(), runner.Meter()
    code = 'import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()'
    with subprocess.Popen(
        [sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()  # it has used its half second, and waits
        running = meter.read()
        process.communicate(b'\n')
    assert running['cpu'] > 0.45 > time.process_time() - own
    assert meter.read()['cpu'] >= running['cpu']
    assert running['disk'] < 1 << 20
    (tmp_path / 'x').read_bytes()
    found = meter.read()
    assert found['disk'] - running['disk'] >= 1 << 20
    assert running['seconds'] < found['seconds'] <= meter.seconds()
    runner.prepare_cache([tmp_path], cold=False)
    warm = runner.Meter()
    (tmp_path / 'x').read_bytes()
    assert warm.read()['disk'] == 0
