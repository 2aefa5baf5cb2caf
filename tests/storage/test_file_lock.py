"""Locks between threads and processes, killed and forked ones among them."""

import os
import pathlib
import signal
import textwrap
import threading
import time

import pytest

from coyo11m_tfds.storage.file_lock import FileLock
from tests import children

HOLD = """
    from coyo11m_tfds.storage.file_lock import FileLock
    with FileLock(sys.argv[1]):
        print('held', flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / 'lock'


def is_free(path: pathlib.Path, shared: bool = False) -> bool:
    try:
        FileLock(path, shared=shared, wait=False).release()
    except BlockingIOError:
        return False
    return True


def test_one_holds_it_alone(path: pathlib.Path):
    with FileLock(path):
        assert not is_free(path)
        assert not is_free(path, shared=True)
    assert is_free(path)


def test_many_hold_it_shared(path: pathlib.Path):
    with FileLock(path, shared=True), FileLock(path, shared=True):
        assert is_free(path, shared=True)
        assert not is_free(path)
    assert is_free(path)


def test_it_can_be_released_early_and_more_than_once(path: pathlib.Path):
    with FileLock(path) as lock:
        lock.release()
        with FileLock(path):
            lock.release()
            assert not is_free(path)


def test_threads_exclude_each_other(path: pathlib.Path):
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with FileLock(path):
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_killed_process_does_not_hold_it(path: pathlib.Path):
    with children.python(HOLD, path) as child:
        child.stdout.readline()
        assert not is_free(path)
        child.kill()
        child.wait()
        assert is_free(path)


def test_a_lock_whose_file_was_removed_is_another_one(path: pathlib.Path):
    """Who waited for the removed file does not believe to hold the new one."""
    entered = threading.Event()

    def wait() -> None:
        with FileLock(path):
            entered.set()

    waiting = threading.Thread(target=wait)
    with FileLock(path) as first:
        waiting.start()
        time.sleep(0.1)
        path.unlink()
        with FileLock(path):
            first.release()
            assert not entered.wait(0.2)
    assert entered.wait(20)
    waiting.join()


def test_a_forked_child_has_no_part_in_it(path: pathlib.Path):
    code = """
        import os, time
        from coyo11m_tfds.storage.file_lock import FileLock
        lock = FileLock(sys.argv[1])
        child = os.fork()
        if child == 0:
            time.sleep(60)
        print(child, flush=True)
        sys.stdin.readline()
        lock.release()
        print('released', flush=True)
        sys.stdin.readline()
    """
    with children.python(code, path) as parent:
        child = int(parent.stdout.readline())
        try:
            assert not is_free(path)
            print(file=parent.stdin, flush=True)
            assert parent.stdout.readline() == 'released\n'
            assert is_free(path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_outlive_its_killed_parent_as_a_holder(path: pathlib.Path):
    fork = 'import os, time; os.fork() or (print(os.getpid(), flush=True), time.sleep(60))'
    code = textwrap.dedent(HOLD).replace('sys.stdin', f'{fork}\n    sys.stdin')
    with children.python(code, path) as child:
        child.stdout.readline()
        grandchild = int(child.stdout.readline())
        try:
            assert not is_free(path)
            child.kill()
            child.wait()
            assert is_free(path)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_a_forked_child_cannot_release_another_lock_by_an_inherited_one(path: pathlib.Path):
    """The numbers of the descriptors that it closed are used anew."""
    code = """
        import os
        from coyo11m_tfds.storage.file_lock import FileLock
        inherited = FileLock(sys.argv[1])
        if os.fork() == 0:
            own = FileLock(sys.argv[1] + '.own')
            inherited.release()
            print('released', flush=True)
            sys.stdin.readline()
            os._exit(0)
        os.wait()
    """
    with children.python(code, path) as parent:
        assert parent.stdout.readline() == 'released\n'
        assert not is_free(path.with_name('lock.own'))
        assert not is_free(path)
        parent.communicate('end\n')


def test_a_folder_that_is_not_there(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / 'absent' / 'lock')
