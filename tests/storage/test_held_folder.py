"""Tests of temporary folders: those of killed processes are swept, those of living ones are not."""

import os
import pathlib
import time

import pytest

from coyo11m_tfds.storage import held_folder
from coyo11m_tfds.storage.file_lock import FileLock
from tests import children

HOLD = """
    import pathlib
    from coyo11m_tfds.storage import held_folder
    with held_folder.make(sys.argv[1], 'x-') as folder:
        (pathlib.Path(folder) / 'sub').mkdir()
        (pathlib.Path(folder) / 'sub' / 'large').write_bytes(bytes(1000))
        print(folder, flush=True)
        sys.stdin.readline()
"""


def test_it_is_there_within_the_block_only(tmp_path):
    with held_folder.make(tmp_path, 'x-') as folder:
        assert pathlib.Path(folder).parent == tmp_path and os.listdir(folder) == []
        pathlib.Path(folder, 'a').write_text('1')
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), held_folder.make(tmp_path, 'x-'):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_holds_is_not(tmp_path):
    with children.python(HOLD, tmp_path) as dead, children.python(HOLD, tmp_path) as alive:
        left, held = (pathlib.Path(child.stdout.readline().strip()) for child in (dead, alive))
        dead.kill()
        dead.wait()
        assert (left / 'sub' / 'large').exists()  # nobody cleaned up
        with held_folder.make(tmp_path, 'x-') as mine:
            assert not left.exists()
            assert (held / 'sub' / 'large').exists()
            assert len(list(tmp_path.iterdir())) == 4  # the two folders and their locks
        assert not os.path.exists(mine)
        alive.communicate('\n')
        assert alive.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_others_are_left_alone(tmp_path):
    number = '0' * 32
    for name in (f'y-{number}', f'x-{number}', 'x-more', 'x-'):
        (tmp_path / name).mkdir()
    for name in (f'y-{number}.lock', 'x-more.lock', f'x-{number[1:]}.lock', f'x-{number}.lock.md'):
        (tmp_path / name).write_text('1')
    before = set(tmp_path.iterdir())
    with held_folder.make(tmp_path, 'x-'):
        pass
    assert set(tmp_path.iterdir()) == before  # x-000 has no lock, so it is not one of these


def test_a_process_that_died_before_it_had_made_its_folder(tmp_path):
    """Another one sweeps between its lock and its folder."""
    lock = tmp_path / f'x-{"0" * 32}.lock'
    with FileLock(lock), held_folder.make(tmp_path, 'x-'):
        assert lock.exists()
    with held_folder.make(tmp_path, 'x-'):
        assert not lock.exists()


MANY = """
    import os, random
    from coyo11m_tfds.storage import held_folder
    print('started', flush=True)
    while True:
        with held_folder.make(sys.argv[1], 'x-') as folder:
            for number in range(random.randrange(5)):
                open(os.path.join(folder, str(number)), 'w').close()
            if not os.path.exists(folder + '.lock'):
                sys.exit('swept while it was held')
"""


def test_many_at_once_of_which_some_are_killed(tmp_path):
    deadline = time.monotonic() + 3
    with children.python(MANY, tmp_path) as first, children.python(MANY, tmp_path) as second:
        for child in (first, second):
            assert child.stdout.readline() == 'started\n'
        while time.monotonic() < deadline:
            with children.python(MANY, tmp_path) as third:
                third.stdout.readline()
                time.sleep(0.01)
        for child in (first, second):
            assert child.poll() is None, child.stderr.read()
    with held_folder.make(tmp_path, 'x-') as mine:
        assert {path.name.removesuffix('.lock') for path in tmp_path.iterdir()} == {
            os.path.basename(mine)
        }
