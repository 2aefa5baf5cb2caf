"""Data sets on the hub cost few of the requests that the hub counts."""

import logging
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coyo11m_tfds import storage
from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.stored_file import StoredFile
from tests.fakes.cloud import Fault, Hub
from tests.fakes.fake_http import Call, Reply, select_range

ROOT = 'hf://datasets/owner/name'
DATA = random.Random(0).randbytes(200_000)
FILES = {'folder/a.pt': DATA, 'folder/b.pt': DATA[::-1], 'small.json': b'{}'}


@pytest.fixture
def hub(hub, monkeypatch) -> Iterator[Hub]:
    """A hub with two large files and a small one."""
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.002')
    hub.commit(FILES)
    yield hub


def describe(name: str = 'folder/a.pt') -> StoredFile:
    return storage.describe_file(f'{ROOT}/{name}')


def read_ranges(file: StoredFile, count: int, data: bytes = DATA) -> None:
    """Reads so many ranges at once."""
    starts = [start % 190_000 for start in range(0, 997 * count, 997)]
    with ThreadPoolExecutor(8) as threads:
        ranges = list(threads.map(lambda start: file.read_range(start, 1000), starts))
    assert ranges == [data[start : start + 1000] for start in starts]


def test_all_ranges_of_a_file_take_one_resolve(hub):
    read_ranges(describe(), 50)
    assert (hub.count('resolve'), hub.count('read')) == (1, 50)
    read_ranges(describe('folder/b.pt'), 10, FILES['folder/b.pt'])
    assert hub.count('resolve') == 2


def test_a_small_file_takes_one_resolve(hub):
    file = describe('small.json')
    for _ in range(3):
        assert file.read() == b'{}'
    assert hub.count('resolve') == 1


def test_an_address_that_ends_early_is_renewed(hub, caplog):
    # Many uses, so that no read meets the end of three addresses in a row, which ends it.
    hub.address_uses = 60
    read_ranges(describe(), 300)
    # Each address was refused once or, by reads at the same time, a few times.
    assert 5 <= hub.count('resolve') <= 6
    assert sum(request.status == 403 for request in hub.requests) <= 5 * 8
    assert not caplog.text


@pytest.mark.parametrize('seconds', [3600, 600])
def test_an_address_is_renewed_before_its_end(hub, monkeypatch, seconds):
    monotonic = time.monotonic
    hub.address_seconds = seconds
    file = describe()
    for elapsed, num_resolves in ((0, 1), (0.9, 1), (0.97, 2), (1.8, 2), (1.97, 3)):
        monkeypatch.setattr(time, 'monotonic', lambda now=elapsed * seconds: monotonic() + now)
        read_ranges(file, 8)
        assert hub.count('resolve') == num_resolves


def test_a_forked_process_asks_for_itself(hub):
    file = describe()
    read_ranges(file, 8)
    child = os.fork()
    if not child:
        is_right = file.read_range(5, 10) == DATA[5:15]
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_that_is_gone_is_named(hub):
    file = StoredFile(f'{ROOT}/folder/absent.pt', 9, '', None)
    with pytest.raises(FileNotFoundError, match=f'{file.path} is gone'):
        file.read_range(0, 4)


def test_a_mirror_that_serves_files_itself_is_read(hub, monkeypatch):
    """Some mirrors, and proxies with a cache, redirect nobody."""
    monkeypatch.setattr(hub, '_on_resolve', lambda call, *names: select_range(call, DATA))
    read_ranges(describe(), 5)


def test_a_signature_with_an_end_that_is_no_number_is_used(hub, monkeypatch):
    resolve = hub._on_resolve

    def sign(call: Call, *names: str) -> Reply:
        location = resolve(call, *names).headers['Location']
        return Reply(302, headers={'Location': re.sub(r'Expires=\d+', 'Expires=%C2%B2', location)})

    monkeypatch.setattr(hub, '_on_resolve', sign)
    read_ranges(describe(), 5)


def test_a_commit_is_listed_once(hub):
    folder = storage.open_folder(ROOT).pin()
    assert folder.list() == {'small.json': describe('small.json')}
    hub.clear()
    assert set(folder.list('folder')) == {'a.pt', 'b.pt'}
    assert set(folder.list(deep=True)) == set(FILES)
    assert storage.open_folder(f'{folder.folder}/folder').pin().exists()
    assert not storage.open_folder(f'{folder.folder}/fold').exists()
    assert storage.describe_file(folder.path_of('folder/a.pt')).size == len(DATA)
    assert folder.read('small.json') == b'{}'
    assert hub.num_api_calls == 0


def test_a_pinned_folder_outlives_a_push(hub):
    folder = storage.open_folder(ROOT).pin()
    hub.commit({'other.pt': b'1'})
    assert set(folder.list(deep=True)) == set(FILES)
    read_ranges(folder.list('folder')['a.pt'], 3)
    assert set(storage.open_folder(ROOT).list()) == {'other.pt'}


@pytest.mark.parametrize('kind', ['resolvers', 'api'])
def test_a_used_up_quota_is_waited_for_with_one_line(hub, caplog, kind):
    caplog.set_level(logging.WARNING, 'absl')
    hub.set_quota(kind, 1, window=1.0)
    begin = time.monotonic()
    if kind == 'resolvers':
        files = [describe('folder/a.pt'), describe('folder/b.pt')]
        with ThreadPoolExecutor(8) as threads:
            heads = list(threads.map(lambda file: file.read_range(0, 9), files * 4))
        assert heads == [DATA[:9], DATA[::-1][:9]] * 4
    else:
        for _ in range(2):
            storage.open_folder(ROOT).pin()
    assert time.monotonic() - begin > 1
    lines = [record.getMessage() for record in caplog.records]
    assert (
        f"the hub's quota of {kind} of 1 in 1 s is used up; waiting 2 s for the next." in lines[0]
    )
    assert len(lines) <= 2


def test_a_quota_that_is_not_used_up_is_not_blamed(hub, caplog):
    caplog.set_level(logging.WARNING, 'absl')
    hub.inject(Fault('503', action='resolve'))
    read_ranges(describe(), 1)
    [record] = caplog.records
    assert '503' in record.getMessage() and 'quota' not in record.getMessage()


def test_warnings_name_no_address_with_its_signature(hub, caplog):
    caplog.set_level(logging.WARNING, 'absl')
    hub.inject(Fault('reset', action='read'))
    read_ranges(describe(), 1)
    [record] = caplog.records
    assert 'MaxRetryError' in record.getMessage() and 'trying again' in record.getMessage()
    assert 'signature' not in record.getMessage() and '/storage/' not in record.getMessage()


def test_what_stays_used_up_is_told(hub, monkeypatch):
    monkeypatch.setattr(retry, '_MAX_SERVER_SECONDS', 0.01)
    hub.set_quota('resolvers', 0)
    with pytest.raises(OSError, match=f'{ROOT}@.*given up after 8 attempts.* 429'):
        describe().read_range(0, 9)
