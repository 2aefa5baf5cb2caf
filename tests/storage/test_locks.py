"""Locks and temporary folders: one holder at a time, and none that a killed process leaves."""

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from coyo11m_tfds.storage import locks
from coyo11m_tfds.storage.locks import FileLock
from tests import children
from tests.fakes.cloud import Fault

# --- Files ------------------------------------------------------------------------------------

HOLD_FILE = """
    from coyo11m_tfds.storage.locks import FileLock
    with FileLock(sys.argv[1]):
        print('held', flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / 'lock'


def is_free(path: pathlib.Path, shared: bool = False) -> bool:
    try:
        FileLock(path, shared=shared, wait=False).release()
    except BlockingIOError:
        return False
    return True


def test_one_holds_a_file_alone_or_many_hold_it_shared(path):
    with FileLock(path) as lock:
        assert not is_free(path) and not is_free(path, shared=True)
        lock.release()
        with FileLock(path, shared=True), FileLock(path, shared=True):
            lock.release()  # once more, which does nothing
            assert is_free(path, shared=True) and not is_free(path)
    assert is_free(path)
    with pytest.raises(FileNotFoundError):
        FileLock(path.parent / 'absent' / 'lock')


def test_a_lock_whose_file_was_removed_is_another_one(path):
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


def test_a_forked_child_does_not_outlive_its_killed_parent_as_a_holder(path):
    fork = 'import os, time; os.fork() or (print(os.getpid(), flush=True), time.sleep(60))'
    code = textwrap.dedent(HOLD_FILE).replace('sys.stdin', f'{fork}\n    sys.stdin')
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


def test_a_forked_child_cannot_release_another_lock_by_an_inherited_one(path):
    """The numbers of the descriptors that it closed are used anew."""
    code = """
        import os
        from coyo11m_tfds.storage.locks import FileLock
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


# --- Temporary folders ------------------------------------------------------------------------

HOLD_FOLDER = """
    import pathlib
    from coyo11m_tfds.storage import locks
    with locks.temporary_folder(sys.argv[1], 'x-') as folder:
        (pathlib.Path(folder) / 'sub').mkdir()
        (pathlib.Path(folder) / 'sub' / 'large').write_bytes(bytes(1000))
        print(folder, flush=True)
        sys.stdin.readline()
"""


def test_what_a_killed_process_left_is_swept_and_what_others_hold_is_not(tmp_path):
    number = '0' * 32
    names = [f'y-{number}', 'x-more', f'x-{number}', f'y-{number}.lock', f'x-{number}.lock.md']
    for name in names:  # none of them is a folder of this prefix with a lock
        (tmp_path / name).mkdir()
    others = set(tmp_path.iterdir())
    with (
        children.python(HOLD_FOLDER, tmp_path) as dead,
        children.python(HOLD_FOLDER, tmp_path) as alive,
    ):
        left, held = (pathlib.Path(child.stdout.readline().strip()) for child in (dead, alive))
        dead.kill()
        dead.wait()
        assert (left / 'sub' / 'large').exists()  # nobody cleaned up
        with locks.temporary_folder(tmp_path, 'x-'):
            assert not left.exists()
            assert (held / 'sub' / 'large').exists()
        alive.communicate('\n')
        assert alive.returncode == 0
    assert set(tmp_path.iterdir()) == others


def test_a_process_that_died_before_it_had_made_its_folder(tmp_path):
    """Another one sweeps between its lock and its folder."""
    lock = tmp_path / f'x-{"0" * 32}.lock'
    with FileLock(lock), locks.temporary_folder(tmp_path, 'x-'):
        assert lock.exists()
    with locks.temporary_folder(tmp_path, 'x-'):
        assert not lock.exists()


# --- Places -----------------------------------------------------------------------------------

HOLD = """
from coyo11m_tfds.storage import locks

with locks.hold(sys.argv[1]) as lock:
    print('held', flush=True)
    sys.stdin.readline()
    print('ours' if lock.is_ours() else 'lost', flush=True)
"""

ELSEWHERE = b'process 7 on elsewhere, since long ago\nx'


@contextlib.contextmanager
def holder(place: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it gets a line."""
    with children.python(HOLD, place) as child:
        assert child.stdout.readline() == 'held\n', child.stderr.read()
        yield child


def assert_held(place: str, pid: int) -> None:
    """Who does not wait is told which process is working there."""
    message = f'process {pid} on .* since 20.* UTC is working there'
    with pytest.raises(TimeoutError, match=message), locks.hold(place, wait=False):
        pass


@pytest.fixture
def lease(monkeypatch) -> float:
    """Short, but long enough for a holder to renew it on a busy machine."""
    monkeypatch.setenv('COYO11M_LEASE_SECONDS', '1')
    return 1.0


def test_one_holder_at_a_time_and_a_waiting_one_says_whom_it_waits_for(place, lease, caplog):
    with holder(place) as child:
        assert_held(place, child.pid)
        timer = threading.Timer(0.3, lambda: print('', file=child.stdin, flush=True))
        timer.start()
        with caplog.at_level('INFO', logger='absl'), locks.hold(place) as lock:
            assert lock.is_ours()
        assert child.stdout.readline() == 'ours\n'
    assert caplog.text.count(f'waiting for process {child.pid} on ') == 1  # once a minute


def test_nothing_is_left(tmp_path, gcs):
    for place in (tmp_path / 'set', 'gs://bucket/set', 'gs://bucket'):
        with pytest.raises(KeyError), locks.hold(place):
            assert (tmp_path / 'set.lock').exists() or gcs.objects('bucket')
            raise KeyError
    assert list(tmp_path.iterdir()) == []
    assert gcs.objects('bucket') == {}


def test_a_killed_holder_keeps_nobody_out(place, lease):
    with holder(place) as child:
        child.kill()
        child.wait()
        with locks.hold(place, wait=False) as lock:
            assert lock.is_ours()


def test_a_file_that_was_removed_by_hand(tmp_path):
    path = tmp_path / 'set.lock'
    with locks.hold(tmp_path / 'set') as first:
        path.unlink()
        with locks.hold(tmp_path / 'set') as second:
            assert not first.is_ours()
            assert second.is_ours()
        path.write_text('of another')
    assert path.read_text() == 'of another'


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with (
        pytest.raises(OSError, match=r'no locks \(flock\).*local disk.*set\.lock'),
        locks.hold(tmp_path / 'set'),
    ):
        pass


def test_a_lease_that_is_not_renewed_expires_for_one_of_those_who_wait(gcs, lease):
    gcs.put('bucket', 'set.lock', b'\xff')  # not even text
    inside, most, start = [], [], time.monotonic()

    def take(_: int) -> None:
        with locks.hold('gs://bucket/set'):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(3)))
    assert most == [1] * 3
    assert time.monotonic() - start >= lease
    assert gcs.objects('bucket') == {}


def test_a_holder_renews_its_lease_though_the_storage_is_down_for_a_while(gcs, lease):
    with locks.hold('gs://bucket/set') as lock:
        first = gcs.resource('bucket', 'set.lock')['generation']
        gcs.inject(Fault('503', action='upload'))
        assert_held('gs://bucket/set', os.getpid())
        assert gcs.resource('bucket', 'set.lock')['generation'] != first
        assert lock.is_ours()
    assert gcs.objects('bucket') == {}


def test_a_holder_that_slept_too_long_has_lost_it(gcs, lease):
    with holder('gs://bucket/set') as child:
        child.send_signal(signal.SIGSTOP)
        with locks.hold('gs://bucket/set') as lock:
            child.send_signal(signal.SIGCONT)
            print('', file=child.stdin, flush=True)
            assert child.stdout.readline() == 'lost\n'
            assert child.wait() == 0
            assert lock.is_ours()  # the loser did not delete it


@pytest.mark.parametrize('kind', ['429', '503', 'cut', 'stall', 'slow', 'reset', 'lost'])
def test_faults(gcs, kind, monkeypatch):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.3')
    monkeypatch.setenv('COYO11M_LEASE_SECONDS', '6')
    for action in ('upload', 'stat', 'read', 'delete'):
        gcs.inject(Fault(kind, action=action))
    with locks.hold('gs://bucket/set') as lock:
        assert_held('gs://bucket/set', os.getpid())
        assert lock.is_ours()
    assert gcs.objects('bucket') == {}


def test_an_interruption_does_not_wait_for_a_storage_that_is_out_of_reach(
    gcs, lease, monkeypatch, caplog
):
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.5')
    with pytest.raises(KeyboardInterrupt), locks.hold('gs://bucket/set'):
        gcs.inject(Fault('stall', action='stat'))
        raise KeyboardInterrupt
    assert 'gs://bucket/set.lock: not deleted in 0.125 s, it will expire' in caplog.text
    # As long as this process lives, it tries on.
    assert list(gcs.objects('bucket')) == ['set.lock']
    while gcs.objects('bucket'):
        time.sleep(0.01)


# --- Waiting for others -----------------------------------------------------------------------


def test_wait_for_what_comes(place, caplog):
    begin = time.monotonic()
    with caplog.at_level('INFO', logger='absl'):
        locks.wait_for(place, lambda: time.monotonic() - begin > 0.3)
    assert time.monotonic() - begin > 0.3
    assert caplog.text.count(f'waiting for {place}') == 1


def test_who_waits_believes_in_a_holder_until_it_is_killed(place, lease):
    begin = time.monotonic()

    def is_there() -> bool:
        if time.monotonic() - begin > 2 * lease:
            child.kill()
        return False

    with (
        holder(place) as child,
        pytest.raises(RuntimeError, match=r'the first process of the job, .* or was killed'),
    ):
        locks.wait_for(place, is_there)
    assert time.monotonic() - begin > 2 * lease


@pytest.mark.parametrize('left', [False, True])
def test_who_begins_to_wait_when_nobody_is_there_any_more_learns_it(gcs, lease, left):
    """Also if the lease of a killed process is there."""
    if left:
        gcs.put('bucket', 'set.lock', ELSEWHERE)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r'it has given no sign of life for 1 s'):
        locks.wait_for('gs://bucket/set', lambda: False)
    assert time.monotonic() - begin > lease  # the first one may be about to begin


def test_who_waits_for_a_job_that_was_started_again_believes_in_its_first_process(gcs, monkeypatch):
    """It has to wait until the lease of the process that was killed has expired."""
    monkeypatch.setenv('COYO11M_LEASE_SECONDS', '3')  # it is given up only 1.2 s later
    gcs.put('bucket', 'set.lock', ELSEWHERE)
    made = threading.Event()

    def first() -> None:
        with locks.hold('gs://bucket/set'):
            made.set()

    thread = threading.Thread(target=first)
    begin = time.monotonic()
    thread.start()
    locks.wait_for('gs://bucket/set', made.is_set)
    thread.join()
    assert time.monotonic() - begin > 3
