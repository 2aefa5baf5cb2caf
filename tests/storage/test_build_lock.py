"""Tests of the lock of a build: one holder at a time, and none that stays for ever."""

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from coyo11m_tfds.storage import build_lock, lock_holder
from tests import children
from tests.fakes.cloud import Fault

_HOLD = """
from coyo11m_tfds.storage import build_lock

with build_lock.hold(sys.argv[1], wait_seconds=60) as lock:
    print('held', flush=True)
    sys.stdin.readline()
    print('ours' if lock.is_ours() else 'lost', flush=True)
"""

_COUNT = """
import pathlib, time
from coyo11m_tfds.storage import build_lock

place, counter, rounds = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
for _ in range(rounds):
    with build_lock.hold(place, wait_seconds=60):
        count = int(counter.read_text())
        time.sleep(0.01)
        counter.write_text(str(count + 1))
"""


@contextlib.contextmanager
def _holder(place: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it gets a line."""
    with children.python(_HOLD, place) as child:
        assert child.stdout.readline() == 'held\n', child.stderr.read()
        yield child


@pytest.fixture(params=['local', 'bucket'])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A place that does not exist yet."""
    if request.param == 'local':
        return str(tmp_path / 'new' / 'set')
    request.getfixturevalue('gcs')
    return 'gs://bucket/new/set'


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    """Short, but long enough for a holder to renew it on a busy machine."""
    monkeypatch.setenv('COYO11M_LEASE_SECONDS', '1')
    return 1.0


@pytest.fixture
def very_short_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    """For tests in which nobody renews one."""
    monkeypatch.setenv('COYO11M_LEASE_SECONDS', '0.3')
    return 0.3


def test_one_holder_at_a_time(place):
    with _holder(place) as child:
        with (
            pytest.raises(TimeoutError, match=f'process {child.pid} on .* since 20.* UTC is still'),
            build_lock.hold(place, wait_seconds=0),
        ):
            pass
        print('', file=child.stdin, flush=True)
        assert child.stdout.readline() == 'ours\n'
        assert child.wait() == 0
    with build_lock.hold(place, wait_seconds=0) as lock:
        assert lock.is_ours()


def test_no_file_is_left(tmp_path):
    with pytest.raises(KeyError), build_lock.hold(tmp_path / 'set', wait_seconds=0):
        assert (tmp_path / 'set.lock').exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_waiting_one_gets_it_and_says_whom_it_waits_for(place, caplog):
    with _holder(place) as child:
        timer = threading.Timer(0.2, lambda: print('', file=child.stdin, flush=True))
        timer.start()
        with caplog.at_level('INFO', logger='absl'), build_lock.hold(place, wait_seconds=60):
            pass
    assert f'waiting for process {child.pid} on ' in caplog.text
    assert caplog.text.count('waiting for') == 1  # once a minute


def test_a_killed_holder_keeps_nobody_out(place):
    with _holder(place) as child:
        child.send_signal(signal.SIGKILL)
        # Not yet waited for, so that it is a zombie: that is dead enough.
        with build_lock.hold(place, wait_seconds=5):
            pass


def test_many_take_turns(place, tmp_path):
    counter = tmp_path / 'counter'
    counter.write_text('0')
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(children.python(_COUNT, place, counter, 4)) for _ in range(3)
        ]
        assert [child.wait(timeout=60) for child in started] == [0, 0, 0]
    assert counter.read_text() == '12'


def test_threads_of_one_process_keep_each_other_out(place):
    with (
        build_lock.hold(place, wait_seconds=0),
        pytest.raises(TimeoutError, match=f'process {os.getpid()} on'),
        build_lock.hold(place, wait_seconds=0),
    ):
        pass


# --- Local ------------------------------------------------------------------------------------


def test_a_file_that_was_removed_by_hand(tmp_path):
    path = tmp_path / 'set.lock'
    with build_lock.hold(tmp_path / 'set', wait_seconds=0) as first:
        path.unlink()
        with build_lock.hold(tmp_path / 'set', wait_seconds=0) as second:
            assert not first.is_ours()
            assert second.is_ours()
    assert not path.exists()


def test_the_holder_removes_no_lock_of_another(tmp_path):
    path = tmp_path / 'set.lock'
    with build_lock.hold(tmp_path / 'set', wait_seconds=0):
        path.unlink()
        path.write_text('of another')
    assert path.read_text() == 'of another'


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with (
        pytest.raises(OSError, match=r'no locks \(flock\).*local disk.*set\.lock'),
        build_lock.hold(tmp_path / 'set', wait_seconds=0),
    ):
        pass


_FULL_DISK = """
    import resource, signal
    from coyo11m_tfds.storage import build_lock
    # A write beyond this size fails as on a full disk, with OSError instead of a signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    try:
        with build_lock.hold(sys.argv[1], wait_seconds=0):
            pass
    except OSError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with build_lock.hold(sys.argv[1], wait_seconds=0):
        print('held')
"""


def test_a_lock_that_cannot_be_written_is_not_held(tmp_path):
    with children.python(_FULL_DISK, tmp_path / 'set') as child:
        out, errors = child.communicate(timeout=60)
    assert out == f"[Errno 27] File too large: '{tmp_path}/set.lock'\nheld\n", errors
    assert list(tmp_path.iterdir()) == []


# --- In a bucket ------------------------------------------------------------------------------

_ELSEWHERE = lock_holder.LockHolder(
    host='elsewhere',
    pid=7,
    since='long ago',
    token='x',
    lease_seconds=0.3,
    machine='m',
    started='s',
)


def test_a_lease_that_is_not_renewed_expires(gcs, very_short_lease):
    gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())
    start = time.monotonic()
    with build_lock.hold('gs://bucket/set', wait_seconds=20) as lock:
        assert lock.is_ours()
        assert time.monotonic() - start >= very_short_lease
        assert gcs.objects('bucket')['set.lock'] != _ELSEWHERE.to_json()
    assert gcs.objects('bucket') == {}


def test_the_longer_lease_counts(gcs, very_short_lease):
    longer = lock_holder.LockHolder(host='elsewhere', pid=7, since='then', lease_seconds=1000)
    gcs.put('bucket', 'set.lock', longer.to_json())
    with (
        pytest.raises(TimeoutError, match='process 7 on elsewhere, since then is still'),
        build_lock.hold('gs://bucket/set', wait_seconds=0.6),
    ):
        pass


def test_a_renewed_lease_does_not_expire(gcs, short_lease):
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.3):
            gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())

    gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with (
            pytest.raises(TimeoutError, match='process 7 on elsewhere, since long ago'),
            build_lock.hold('gs://bucket/set', wait_seconds=1.6),
        ):
            pass
    finally:
        stop.set()
        thread.join()


def test_a_holder_renews_its_lease(gcs, short_lease):
    with build_lock.hold('gs://bucket/set', wait_seconds=0) as lock:
        first = gcs.resource('bucket', 'set.lock')['generation']
        with (
            pytest.raises(TimeoutError, match=f'process {os.getpid()} on'),
            build_lock.hold('gs://bucket/set', wait_seconds=1.6),
        ):
            pass
        assert gcs.resource('bucket', 'set.lock')['generation'] != first
        assert lock.is_ours()


def test_a_holder_that_slept_too_long_has_lost_it(gcs, short_lease):
    with _holder('gs://bucket/set') as child:
        child.send_signal(signal.SIGSTOP)
        # A real stopped process, but one that must not be seen to be alive or dead from here.
        with build_lock.hold('gs://bucket/set', wait_seconds=20) as lock:
            child.send_signal(signal.SIGCONT)
            print('', file=child.stdin, flush=True)
            assert child.stdout.readline() == 'lost\n'
            assert child.wait() == 0
            assert lock.is_ours()  # the loser did not delete it


def test_the_holder_deletes_no_lease_of_another(gcs):
    with build_lock.hold('gs://bucket/set', wait_seconds=0):
        gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())
    assert gcs.objects('bucket') == {'set.lock': _ELSEWHERE.to_json()}


def test_a_damaged_lease_expires(gcs, very_short_lease):
    damaged = [b'', b'{', b'[1]', b'{"host": 1, "more": 2}', lock_holder.LockHolder().to_json()]

    def take(number: int) -> None:
        with build_lock.hold(f'gs://bucket/{number}', wait_seconds=20) as lock:
            assert lock.is_ours()

    for number, data in enumerate(damaged):
        gcs.put('bucket', f'{number}.lock', data)
    with concurrent.futures.ThreadPoolExecutor(len(damaged)) as pool:
        list(pool.map(take, range(len(damaged))))


def test_of_two_who_take_over_one_gets_it(gcs, short_lease):
    gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())
    inside, most = [], []

    def take() -> None:
        with build_lock.hold('gs://bucket/set', wait_seconds=30):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


@pytest.mark.parametrize('kind', ['429', '503', 'cut', 'stall', 'slow', 'reset', 'lost'])
def test_faults(gcs, kind, monkeypatch):
    monkeypatch.setenv('COYO11M_LEASE_SECONDS', '30')
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '0.3')
    for action in ('upload', 'stat', 'read', 'delete'):
        gcs.inject(Fault(kind, action=action, seconds=0.1 if kind == 'slow' else None))
    with (
        build_lock.hold('gs://bucket/set', wait_seconds=0) as lock,
        pytest.raises(TimeoutError, match=f'process {os.getpid()} on'),
        build_lock.hold('gs://bucket/set', wait_seconds=0),
    ):
        assert lock.is_ours()
    assert gcs.objects('bucket') == {}


def test_a_storage_that_is_down_for_a_while(gcs, short_lease):
    with build_lock.hold('gs://bucket/set', wait_seconds=0) as lock:
        gcs.inject(Fault('503', count=6, action='upload'))
        time.sleep(0.8)  # two renewals fail
        assert lock.is_ours()
    assert gcs.objects('bucket') == {}


def test_refused_credentials(gcs):
    gcs.inject(Fault('403', count=None))
    with (
        pytest.raises(PermissionError, match='gcloud auth application-default login'),
        build_lock.hold('gs://bucket/set', wait_seconds=0),
    ):
        pass


def test_a_bucket_that_does_not_exist(gcs):
    with (
        pytest.raises(OSError, match=r'^gs://no-such-bucket: there is no such bucket'),
        build_lock.hold('gs://no-such-bucket/set', wait_seconds=0),
    ):
        pass


@pytest.mark.parametrize('text', ['0', '-1', 'soon', 'inf', 'nan'])
def test_lease_seconds_must_be_positive(monkeypatch, text):
    monkeypatch.setenv('COYO11M_LEASE_SECONDS', text)
    with pytest.raises(ValueError, match=f"COYO11M_LEASE_SECONDS is '{text}', expected a positive"):
        lock_holder.lease_seconds()


def test_a_lock_of_another_kind_of_place():
    with (
        pytest.raises(ValueError, match='hf://x: expected a local path or gs://bucket/folder'),
        build_lock.hold('hf://x', wait_seconds=0),
    ):
        pass


# --- Who holds it -----------------------------------------------------------------------------


def test_holders():
    this = lock_holder.this_process(5)
    assert lock_holder.from_json(this.to_json()) == this
    assert not this.is_dead()
    assert str(this).startswith(f'process {os.getpid()} on ')
    assert not lock_holder.LockHolder().is_dead()
    with subprocess.Popen(['sleep', '60']) as child:
        of_child = lock_holder.LockHolder(
            **{**vars(this), 'pid': child.pid, 'started': lock_holder.started(child.pid)}
        )
        assert not of_child.is_dead()
        child.kill()
    assert of_child.is_dead()


# --- Waiting for others -----------------------------------------------------------------------


def test_wait_for_what_comes(place):
    begin = time.monotonic()
    build_lock.wait_for(place, lambda: time.monotonic() - begin > 0.3, wait_seconds=30)
    assert time.monotonic() - begin > 0.3


def test_wait_for_what_does_not_come(place, caplog):
    with (
        caplog.at_level('INFO', logger='absl'),
        pytest.raises(TimeoutError, match=f'{place} is not there after 0 s. Look into'),
    ):
        build_lock.wait_for(place, lambda: False, wait_seconds=0.3)
    assert caplog.text.count(f'waiting for {place}') == 1


def test_who_waits_learns_that_the_holder_was_killed(place, short_lease):
    looks = []

    def is_there() -> bool:
        looks.append(1)
        if len(looks) == 2:
            child.kill()
        return False

    with (
        _holder(place) as child,
        pytest.raises(RuntimeError, match=r'the first process of the job, .* or was killed'),
    ):
        build_lock.wait_for(place, is_there, wait_seconds=60)


def test_who_waits_believes_in_a_holder_as_long_as_it_lives(place, short_lease):
    with _holder(place), pytest.raises(TimeoutError):
        build_lock.wait_for(place, lambda: False, 2.5)


@pytest.mark.parametrize('left', [False, True])
def test_who_begins_to_wait_when_nobody_is_there_any_more_learns_it(gcs, short_lease, left: bool):
    """Also if the lease of one that was killed on another machine is there."""
    if left:
        gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r'nothing has been heard of it for 1 s'):
        build_lock.wait_for('gs://bucket/set', lambda: False, wait_seconds=60)
    assert time.monotonic() - begin > 0.6 * short_lease  # the first one may be about to begin


def test_who_waits_sees_a_lease_of_another_machine_end(gcs, short_lease):
    renewals = iter(range(6))

    def is_there() -> bool:
        if next(renewals, None) is not None:
            gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())
        return False

    with pytest.raises(RuntimeError, match='nothing has been heard'):
        build_lock.wait_for('gs://bucket/set', is_there, wait_seconds=60)
    assert next(renewals, None) is None


def test_nobody_waits_for_a_living_holder_who_need_not(place, short_lease):
    with (
        _holder(place) as child,
        pytest.raises(TimeoutError, match=f'process {child.pid} on .* is working there'),
        build_lock.hold(place, wait_seconds=None),
    ):
        pass


def test_a_lease_is_looked_at_until_it_is_known_to_be_dead(gcs, very_short_lease):
    gcs.put('bucket', 'set.lock', _ELSEWHERE.to_json())
    with build_lock.hold('gs://bucket/set', wait_seconds=None) as lock:
        assert lock.is_ours()
