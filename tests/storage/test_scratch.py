"""Copies of remote files: bounded, whoever is killed when."""

import contextlib
import logging
import os
import pathlib
import random
import signal
import stat
import tempfile
import threading
import time

import pytest

from coyo11m_tfds.storage import scratch, source_files
from coyo11m_tfds.storage.locks import FileLock
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.source_files import SourceFile
from tests import children
from tests.fakes.cloud import Gcs

SIZE = 100_000


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / 'scratch'


def content(name: str, size: int = SIZE) -> bytes:
    return random.Random(name).randbytes(size)


def put(bucket: Gcs, name: str, size: int = SIZE) -> SourceFile:
    bucket.put('bucket', name, content(name, size))
    return source_files.describe(f'gs://bucket/{name}')


def num_reads(bucket: Gcs, name: str = '') -> int:
    return sum(r.action == 'read' and r.path.endswith(name) for r in bucket.requests)


def copies(folder: pathlib.Path) -> dict[str, int]:
    """Names and sizes of whole copies and parts, and of nothing else that lies there."""
    sizes = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted or renamed just now
                sizes[name] = os.stat(os.path.join(root, name)).st_size
    return {name: size for name, size in sizes.items() if name.endswith(('.pt', '.part'))}


HOLD = """
    from coyo11m_tfds.storage import source_files
    from coyo11m_tfds.storage.scratch import Scratch
    folder, max_bytes, url = sys.argv[1:]
    file = source_files.describe(url)
    with Scratch(folder, int(max_bytes)).hold(file) as path:
        print(path, flush=True)
        sys.stdin.readline()
"""


def test_a_copy_is_there_while_it_is_held(bucket: Gcs, folder: pathlib.Path):
    file = put(bucket, 'source/x.pt')
    told: list[int] = []
    with Scratch(folder, SIZE).hold(file, on_bytes=told.append) as path:
        assert pathlib.Path(path).read_bytes() == content('source/x.pt')
        assert path.endswith('.pt')
        assert sum(told) == SIZE
    assert copies(folder) == {}
    assert os.listdir(folder) == ['.lock']


def test_a_file_that_can_never_fit(bucket: Gcs, folder: pathlib.Path):
    file = put(bucket, 'x.pt')
    with (
        pytest.raises(ValueError, match=r'gs://bucket/x\.pt has 100,000 bytes.*may take 99,999\.'),
        Scratch(folder, SIZE - 1).hold(file),
    ):
        pass
    assert num_reads(bucket) == 0


def test_waiting_for_room(
    bucket: Gcs,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(scratch, '_SECONDS_BETWEEN_MESSAGES', 0.05)
    caplog.set_level(logging.INFO, 'absl')
    held = Scratch(folder, 2 * SIZE)
    first, second, third = (put(bucket, f'{n}.pt') for n in range(3))
    entered = threading.Event()

    def hold_third() -> None:
        with held.hold(third):
            entered.set()

    with held.hold(first):
        with held.hold(second):
            waiting = threading.Thread(target=hold_third)
            waiting.start()
            children.wait_until(lambda: 'Waiting for 100,000 bytes of 200,000' in caplog.text)
            assert 'gs://bucket/2.pt' in caplog.text
            assert num_reads(bucket, '2.pt') == 0
        assert entered.wait(20)
    waiting.join()


def stop(num_bytes: int) -> None:
    assert num_bytes == 0
    raise InterruptedError


# --- Several at once --------------------------------------------------------------------------


def test_several_files_are_there_together(bucket: Gcs, folder: pathlib.Path, tmp_path):
    local = tmp_path / 'local.pt'
    local.write_bytes(b'content')
    remote = [put(bucket, name) for name in ('a/x.pt', 'b/x.pt', 'y.pt')]
    files = [remote[0], source_files.describe(local), *remote[1:]]
    told: list[int] = []
    with Scratch(folder, 3 * SIZE).hold_all(files, on_bytes=told.append) as paths:
        contents = [pathlib.Path(path).read_bytes() for path in paths]
        assert paths[1] == str(local)
    assert contents == [content('a/x.pt'), b'content', content('b/x.pt'), content('y.pt')]
    assert sum(told) == 3 * SIZE
    assert os.listdir(folder) == ['.lock']


# --- Folders ---------------------------------------------------------------------------------


def test_the_folder_that_a_program_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('HOME', '/home')
    monkeypatch.setenv('XDG_CACHE_HOME', '/cache')
    for data_dir, chosen, expected in (
        ('/data', '', '/data/.x'),
        ('/data/x/latents/1.0.0/../../..', '', '/data/.x'),
        ('latents/1.0.0/../../..', '', '../.x'),
        ('', '', '/cache/x'),
        ('gs://bucket/data', '', '/cache/x'),
        ('gs://bucket/x/latents/1.0.0/../../..', '', '/cache/x'),
        ('/data', '~/mine', '/home/mine'),
    ):
        assert scratch.choose_folder('x', data_dir, chosen) == expected


def test_the_folder_for_temporary_files_is_this_user_s_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    folder = pathlib.Path(scratch.user_temp('x'))
    assert folder == tmp_path / f'x-{os.getuid()}'
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert scratch.user_temp('x') == str(folder)
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match=rf'{folder}: .*or others may use it'):
        scratch.user_temp('x')
    folder.chmod(0o700)
    folder.rename(tmp_path / 'elsewhere')
    folder.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(PermissionError, match=rf'{folder}: is a link'):
        scratch.user_temp('x')
    folder.unlink()
    folder.touch(0o700)
    with pytest.raises(PermissionError, match='expected a folder'):
        scratch.user_temp('x')
    monkeypatch.setattr(os, 'getuid', lambda: 12345)
    (tmp_path / 'x-12345').mkdir(0o700)
    with pytest.raises(PermissionError, match='belongs to user 12345'):
        scratch.user_temp('x')


# --- Failures and kills -----------------------------------------------------------------------


def test_the_room_of_who_is_killed_is_free_and_its_copy_gone(bucket: Gcs, folder: pathlib.Path):
    file, other = put(bucket, 'x.pt'), put(bucket, 'y.pt')
    with children.python(HOLD, folder, SIZE, file.path) as child:
        child.stdout.readline()
        with pytest.raises(InterruptedError), Scratch(folder, SIZE).hold(other, on_bytes=stop):
            pass
        child.kill()
    assert copies(folder) == {'0.pt': SIZE}
    with Scratch(folder, SIZE).hold(other):
        assert copies(folder) == {'0.pt': SIZE}


# Starts a worker, which never ends by itself, for each seed that it reads; tells their ids.
WORK = """
    import os, pathlib, random, signal, traceback
    import google_crc32c
    from coyo11m_tfds.storage import gcs  # once for all
    from coyo11m_tfds.storage import source_files
    from coyo11m_tfds.storage.scratch import Scratch
    folder, max_bytes, complaints = sys.argv[1:]

    def work(seed):
        dice, held = random.Random(seed), Scratch(folder, int(max_bytes))
        files = [source_files.describe(f'gs://bucket/{n}.pt') for n in range(6)]
        while True:
            file = dice.choice(files)
            with held.hold(file) as path:
                expected = random.Random(os.path.basename(file.path)).randbytes(file.size)
                assert pathlib.Path(path).read_bytes() == expected

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for seed in sys.stdin:
        worker = os.fork()
        if worker == 0:
            try:
                work(seed)
            except BaseException:
                pathlib.Path(complaints).write_text(traceback.format_exc())
            os._exit(1)
        print(worker, flush=True)
"""


def assert_bounded(folder: pathlib.Path, bound: int) -> None:
    with FileLock(folder / '.lock'):  # nobody takes room while this counts
        assert sum(copies(folder).values()) <= bound


def test_killed_at_random_moments(bucket: Gcs, folder: pathlib.Path, tmp_path: pathlib.Path):
    """The bound is kept, no copy is ever wrong, and in the end all room can be had at once."""
    sizes = [SIZE + 10_000 * n for n in range(6)]
    for number, size in enumerate(sizes):
        put(bucket, f'{number}.pt', size)
    bound = sizes[5] + sizes[4]
    complaints = tmp_path / 'complaints'
    dice = random.Random(0)
    bucket.inject_share(['cut', 'flip', '503'], share=0.1)
    Scratch(folder, bound)
    with (
        children.python(WORK, folder, bound, complaints) as nursery,
        contextlib.ExitStack() as stack,
    ):
        workers: list[int] = []
        stack.callback(lambda: [kill(worker) for worker in workers])
        for number in range(20):
            print(number, file=nursery.stdin, flush=True)
            workers.append(int(nursery.stdout.readline()))
            until = time.monotonic() + dice.uniform(0.02, 0.2)
            while time.monotonic() < until:
                assert_bounded(folder, bound)
                time.sleep(0.005)
            if len(workers) > 4:
                kill(workers.pop(dice.randrange(5)))
    assert not complaints.exists(), complaints.read_text()
    bucket.heal()
    assert num_reads(bucket) > 20
    whole = Scratch(folder, sizes[5])
    with whole.hold(source_files.describe('gs://bucket/5.pt')) as path:
        assert pathlib.Path(path).read_bytes() == content('5.pt', sizes[5])
        assert copies(folder) == {'0.pt': sizes[5]}


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it failed, which `complaints` tells
        os.kill(process, signal.SIGKILL)
