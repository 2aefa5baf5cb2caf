"""What comes from a bucket or the hub and is kept on a disk: no request twice, no wrong value."""

import itertools
import json
import logging
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.storage import range_cache
from coyo11m_tfds.storage.stored_file import StoredFile
from tests import children
from tests.fakes.cloud import Fault, Gcs, Hub
from tests.reading import cache_reader, small_dataset
from tests.reading.batches import assert_same, wait_until_idle

LENGTHS = {schema.TRAIN: (160, 96, 256), schema.VALIDATION: (70, 30)}
ORDER = dict(batch_size=32, seed=5, chunk=32, lanes=4, window=32, parallel_reads=4)
STEPS = 512 // 32
DATA = 'gs://bucket/d/1.0.0'


@pytest.fixture(scope='module')
def local(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp('local') / '1.0.0'
    small_dataset.write(path, LENGTHS)
    return path


@pytest.fixture(scope='module')
def other(tmp_path_factory) -> pathlib.Path:
    """Shards of the same names and sizes, with other bytes."""
    path = tmp_path_factory.mktemp('other') / '1.0.0'
    small_dataset.write(path, LENGTHS, dtype=ml_dtypes.bfloat16)
    return path


@pytest.fixture(scope='module')
def expected(local) -> list[float]:
    return cache_reader.digests(local, STEPS, **ORDER)


@pytest.fixture
def bucket(local, gcs) -> Gcs:
    gcs.upload_folder(local, DATA)
    return gcs


@pytest.fixture
def cache(tmp_path) -> dict:
    return {'cache_dir': str(tmp_path / 'cache'), 'cache_gb': 1}


def read(data: object, first: int, stop: int, **options) -> list[input_pipeline.Batch]:
    """Some batches, and all that is read ahead."""
    counter = options.setdefault('counter', input_pipeline.ReadCounter())
    with input_pipeline.train_batches(data, start_step=first, **(ORDER | options)) as batches:
        result = list(itertools.islice(batches, stop - first))
        wait_until_idle(counter)
    return result


def counted(data: object, **options) -> input_pipeline.ReadCounts:
    """What an epoch counts."""
    counter = input_pipeline.ReadCounter()
    read(data, 0, STEPS, counter=counter, **options)
    return counter.read()


def data_requests(gcs: Gcs) -> list:
    return [x for x in gcs.requests if x.action == 'read' and x.range]


def kept_files(cache: dict) -> list[pathlib.Path]:
    return sorted(pathlib.Path(cache['cache_dir']).iterdir())


# --- What is kept is not requested again ----------------------------------------------------------


def test_a_second_epoch_makes_no_request_and_the_same_batches(bucket, local, cache, caplog):
    caplog.set_level(logging.INFO)
    counter = input_pipeline.ReadCounter()
    first = read(DATA, 0, STEPS, counter=counter, **cache)
    counts = counter.read()
    assert counts.cache_misses == counts.num_requests == len(data_requests(bucket)) == STEPS
    assert counts.request_seconds > 0 and counts.num_retries == 0
    bucket.clear()
    second = read(DATA, STEPS, 3 * STEPS, counter=counter, **cache)
    assert data_requests(bucket) == []
    assert counter.read().num_requests == counts.num_requests
    # By rows: no more than the batches have.
    nbytes = sum(x.nbytes for batch in second for x in batch.values())
    assert nbytes <= counter.read().cache_bytes < 2 * nbytes
    assert counter.read().cache_hits > 0
    assert_same(first + second, read(local, 0, 3 * STEPS))
    assert f'{DATA}: all that is read of it is in cache_dir: by rows from here on' in caplog.text


def test_a_process_goes_on_by_rows_when_all_is_there(bucket, local, cache):
    counter = input_pipeline.ReadCounter()
    batches = read(DATA, 0, 6 * STEPS, counter=counter, **cache)
    assert_same(batches, read(local, 0, 6 * STEPS))
    assert len(data_requests(bucket)) == STEPS
    chunks = sum(x.stat().st_size for x in local.glob('*train*tfrecord*'))
    assert counter.read().num_bytes < 3.5 * chunks


@pytest.mark.parametrize('verify', ['once', 'always', 'never'])
@pytest.mark.parametrize('engine', ['chunks', 'tf_data'])
def test_every_way_of_reading_shares_it(bucket, local, cache, engine, verify):
    options = cache | {'engine': engine, 'verify': verify}
    expected = read(local, 0, STEPS)
    for _ in range(2):
        bucket.clear()
        assert_same(read(DATA, 0, STEPS, **options), expected)
    assert data_requests(bucket) == []
    validation = dict(batch_size=10, features=('key', 'latents'))
    for _ in range(2):
        got = list(input_pipeline.eval_batches(DATA, **validation, **options))
        assert_same(got, list(input_pipeline.eval_batches(local, **validation)))
    bucket.clear()
    records = input_pipeline.records(DATA, features=('key',), **cache)
    keys = input_pipeline.records(local)[[0, 511]]['key']
    np.testing.assert_array_equal(records[[0, 511]]['key'], keys)
    assert data_requests(bucket) == []


def test_a_condition_and_columns_are_kept_too(local, gcs, cache, tmp_path):
    path = pathlib.Path(shutil.copytree(local, tmp_path / '1.0.0'))
    scores = {x: np.arange(sum(n), dtype=np.float32) % 5 for x, n in LENGTHS.items()}
    small_dataset.add_column(path, 'score', scores)
    gcs.upload_folder(path, DATA)
    features = ('key', 'latents', 'score')

    def read_kept(data: object, first: int, **options) -> list[input_pipeline.Batch]:
        mix = ({'dir': data, 'where': 'score > 1'},)
        return read(mix, first, first + 18, features=features, **options)

    got = read_kept(DATA, 0, **cache)
    gcs.clear()
    got += read_kept(DATA, 18, **cache)
    # The condition reads its column at each start.
    assert [x for x in data_requests(gcs) if 'tfrecord' in x.path] == []
    assert_same(got, read_kept(path, 0) + read_kept(path, 18))


def test_a_shard_of_which_a_condition_keeps_nothing(local, gcs, cache, tmp_path):
    path = pathlib.Path(shutil.copytree(local, tmp_path / '1.0.0'))
    scores = {x: np.ones(sum(n), np.float32) for x, n in LENGTHS.items()}
    scores[schema.TRAIN][160 : 160 + 96] = 0
    small_dataset.add_column(path, 'score', scores)
    gcs.upload_folder(path, DATA)
    got, expected = [
        read(({'dir': data, 'where': 'score > 0'},), 0, 2 * STEPS, **options)
        for data, options in ((DATA, cache), (path, {}))
    ]
    assert_same(got, expected)


def test_latents_in_place_are_kept_and_local_shards_are_not(gcs, cache, tmp_path):
    path, source = tmp_path / '1.0.0', tmp_path / 'source'
    small_dataset.write(path, LENGTHS, source=source)
    expected = read(path, 0, 2 * STEPS)
    gcs.upload_folder(source, 'gs://source/x')
    small_dataset.redirect(path, 'gs://source/x')
    got = read(path, 0, STEPS, **cache)
    requests = len(data_requests(gcs))
    assert requests > 0 and len(kept_files(cache)) == 2
    got += read(path, STEPS, 2 * STEPS, **cache)
    assert len(data_requests(gcs)) == requests
    assert_same(got, expected)


def test_two_processes_share_it(bucket, expected, cache, tmp_path):
    halves = []
    for process in range(2):
        out = tmp_path / f'{process}.json'
        options = ORDER | cache | {'process_index': process, 'process_count': 2}
        child = children.fork(cache_reader.run, str(out), bucket.env, DATA, STEPS, options)
        halves.append((child, out))
    for child, out in halves:
        child.join(120)
        assert child.exitcode == 0 and len(json.loads(out.read_text())) == STEPS
    bucket.clear()
    assert cache_reader.digests(DATA, STEPS, **ORDER, **cache) == expected
    assert data_requests(bucket) == []


# --- What may be wrong with it --------------------------------------------------------------------


def test_another_data_set_of_the_same_names_and_sizes_never_mixes(bucket, local, other, cache):
    for path in (local, other, local):
        bucket.upload_folder(path, DATA)
        for _ in range(2):
            assert_same(read(DATA, 0, STEPS, **cache), read(path, 0, STEPS))


def test_another_commit_never_mixes_and_the_same_files_stay(hub: Hub, local, other, cache):
    def files_in(path: pathlib.Path) -> dict[str, pathlib.Path]:
        return {x.name: x for x in path.iterdir()}

    first = hub.commit(files_in(local))
    second = hub.commit(files_in(other))
    third = hub.commit({**files_in(local), 'README.md': b'# Card'})
    for commit, path in ((first, local), (second, other), (third, local)):
        data = f'hf://datasets/{hub.repo}@{commit}'
        hub.clear()
        assert_same(read(data, 0, STEPS, **cache), read(path, 0, STEPS))
        reads = [x for x in hub.requests if x.action == 'read' and 'tfrecord' in x.path]
        assert bool(reads) == (commit != third)


def test_of_a_file_that_is_cut_anywhere_nothing_is_returned(tmp_path):
    cache = range_cache.open_cache(str(tmp_path / 'cache'), 1e6)
    file = StoredFile('gs://bucket/x', 10_000, 'a', None)
    data = random.Random(0).randbytes(10_000)
    assert cache.read(file, 0, 10_000) is None
    cache.keep(file, 0, data)
    assert cache.read(file, 5_000, 10_000) == data[5_000:]
    for size in (12_299, 12_290, 12_288, 9_999, 5_000, 1, 0):
        os.truncate(cache.path_of(file), size)
        assert cache.read(file, 0, 10_000) is None
        assert not cache.holds(file, np.array([[0, 10_000]]))
    # Pages that were kept one by one are there together.
    for begin in (4_096, 8_192, 0):
        end = min(begin + 4_096, 10_000)
        assert cache.read(file, 0, 10_000) is None
        cache.keep(file, begin, data[begin:end])
    assert cache.read(file, 0, 10_000) == data


KINDS = ('flip', 'zeros', 'cut', 'longer', 'empty', 'marks', 'gone', 'foreign', 'swapped', 'noise')


def damage(files: list[pathlib.Path], kind: str, chance: random.Random) -> None:
    """Does something to one of the kept files."""
    file = chance.choice(files)
    data = bytearray(file.read_bytes())
    place = chance.randrange(len(data)) if data else 0
    if kind == 'gone':
        file.unlink()
        return
    if kind == 'swapped':
        data = bytearray(chance.choice(files).read_bytes())
    elif kind == 'flip' and data:
        data[place] ^= 1 << chance.randrange(8)
    elif kind == 'zeros':
        stop = min(len(data), place + chance.randrange(1, 200_000))
        data[place:stop] = bytes(stop - place)
    elif kind == 'cut':
        del data[place:]
    elif kind == 'longer':
        data += chance.randbytes(5000)
    elif kind == 'empty':
        data.clear()
    elif kind == 'marks':
        # As if the machine had crashed before the pages were on the disk.
        pages = len(data) // 4100
        data[: 4096 * pages] = bytes(4096 * pages)
    elif kind == 'foreign':
        data = bytearray(b'\1' * len(data))
    elif kind == 'noise':
        data = bytearray(chance.randbytes(len(data)))
    if len(data) == file.stat().st_size:
        # In its place: others have it open.
        with open(file, 'r+b') as stream:
            stream.write(data)
    else:
        # To cut a file that is mapped ends the process, as with local data.
        new = file.with_name('new')
        new.write_bytes(data)
        new.replace(file)


@pytest.mark.parametrize('verify', ['once', 'never'])
def test_what_is_damaged_is_fetched_again(bucket, expected, cache, verify):
    options = ORDER | cache | {'verify': verify}
    chance = random.Random(7)
    cache_reader.digests(DATA, STEPS, **options)
    num_fetched = 0
    for number in range(30):
        files = kept_files(cache)
        damage(files, KINDS[number % len(KINDS)], chance)
        bucket.clear()
        assert cache_reader.digests(DATA, STEPS, **options) == expected
        num_fetched += len(data_requests(bucket))
    assert num_fetched > 30
    bucket.clear()
    assert cache_reader.digests(DATA, STEPS, **options) == expected
    assert data_requests(bucket) == []


def test_damage_while_it_is_mapped_is_fetched_into_the_memory(bucket, local, cache):
    """Also where nothing can be written any more, and the files are gone for others."""
    read(DATA, 0, STEPS, **cache)
    counter = input_pipeline.ReadCounter()
    options = ORDER | cache | {'features': ('key', 'latents'), 'counter': counter}
    batches = input_pipeline.train_batches(DATA, verify='always', **options)
    got = [next(batches)]
    # What has been compared, and is gathered now, must not change.
    wait_until_idle(counter)
    for file in kept_files(cache):
        with open(file, 'r+b') as damaged:
            for place in range(1000, os.path.getsize(file) * 4096 // 4100, 100_000):
                damaged.seek(place)
                damaged.write(b'\xa5' * 9)
        file.unlink()
    got += itertools.islice(batches, 4 * STEPS - 1)
    batches.close()
    assert_same(got, read(local, 0, 4 * STEPS, features=('key', 'latents')))


def test_threads_replace_bytes_of_one_page(tmp_path):
    """A page is read-only again when one thread has written to it, perhaps too early for others."""
    path = tmp_path / 'mapped'
    path.write_bytes(bytes(4096))
    program = """
    import os
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np
    from coyo11m_tfds.memory.fetched_files import FetchedFiles, SplitCache
    from coyo11m_tfds.reading.cached_files import CachedFiles
    from coyo11m_tfds.storage import range_cache

    path, folder = sys.argv[1:]
    cache = SplitCache(range_cache.open_cache(folder, 1e6), lambda number: '')
    with ThreadPoolExecutor(1) as pool:
        files = CachedFiles(FetchedFiles(1, pool=pool, cache=cache), cache)
        files.add_shards(lambda number: path, [4096])
        files.open_all(np.array([0]))
        files._fetched.fetch_anew = lambda file_range: b'new' * 16
        with ThreadPoolExecutor(4) as threads:
            ranges = [[(0, 100 * number, 100 * number + 48)] for number in range(4)] * 5000
            list(threads.map(files.take_again, ranges))
        places = files.locate(np.zeros(4, int), 100 * np.arange(4), 48)
        print({view.tobytes() for view in files.views(*places)} == {b'new' * 16})
    """
    assert children.output(program, path, tmp_path / 'cache').split() == ['True']


def test_damage_at_its_source_is_damage(bucket, local, cache):
    name = next(x for x in bucket.objects('bucket') if '-train' in x and '00001-of' in x)
    data = bytearray(bucket.objects('bucket')[name])
    data[30_000] ^= 1
    bucket.put('bucket', name, bytes(data))
    for _ in range(2):
        with pytest.raises(input_pipeline.DamagedError, match=f'{name}: record 1 cannot be read'):
            read(DATA, 0, STEPS, **cache)
    options = cache | {'on_bad_records': 'skip'}
    for _ in range(2):
        batches = read(DATA, 0, STEPS, **options)
        assert sum((~x['mask']).sum() for x in batches) == 1


def kill_readers(count: int, bucket: Gcs, expected: list[float], cache: dict, out: str) -> None:
    """Kills readers that share a cache at random moments, and reads it after each kill."""
    chance = random.Random(3)
    bucket.latency = 0.02
    num_killed = 0
    for _ in range(count):
        if chance.random() < 0.4:
            shutil.rmtree(cache['cache_dir'], ignore_errors=True)
        options = ORDER | cache
        child = children.fork(cache_reader.run, out, bucket.env, DATA, STEPS, options)
        children.wait_until(pathlib.Path(cache['cache_dir']).exists)
        time.sleep(chance.uniform(0, 0.3))
        num_killed += child.is_alive()
        child.kill()
        child.join()
        assert cache_reader.digests(DATA, STEPS, **options) == expected
    assert num_killed >= count / 2


def test_a_kill_costs_nothing(bucket, expected, cache, tmp_path):
    kill_readers(6, bucket, expected, cache, str(tmp_path / 'out'))


@pytest.mark.slow
def test_thirty_kills_cost_nothing(bucket, expected, cache, tmp_path, caplog):
    kill_readers(30, bucket, expected, cache, str(tmp_path / 'out'))
    assert 'succeeded when tried again' not in caplog.text


# --- No room --------------------------------------------------------------------------------------


def test_a_full_cache_keeps_what_came_first(bucket, local, cache, caplog):
    caplog.set_level(logging.INFO)
    size = sum(x.stat().st_size for x in local.glob('*train*tfrecord*'))
    options = cache | {'cache_gb': size / 2 / 1e9}
    expected = read(local, 0, STEPS)
    for _ in range(3):
        bucket.clear()
        assert_same(read(DATA, 0, STEPS, **options), expected)
        kept = sum(x.stat().st_blocks * 512 for x in kept_files(cache))
        assert 0.4 * size < kept <= size / 2
    assert STEPS / 3 < len(data_requests(bucket)) < STEPS
    assert caplog.text.count('is full, with') == 1


@pytest.fixture
def small_files():
    """Writing beyond 5 MB of a file fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_refuses_is_told_once(bucket, local, cache, caplog, small_files):
    expected = read(local, 0, STEPS)
    for _ in range(2):
        assert_same(read(DATA, 0, STEPS, **cache), expected)
    line = 'nothing more is kept there in this process, which reads on without: '
    assert caplog.text.count(line) == 1


_ON_A_SMALL_DISK = 'mount -t tmpfs -o size=6m none "$1"; shift; exec "$@"'


def test_a_full_disk_ends_nothing(bucket, expected, cache):
    folder = pathlib.Path(cache['cache_dir'])
    folder.mkdir()
    unshare = ['unshare', '-rm', 'sh', '-ec', _ON_A_SMALL_DISK, 'sh', str(folder)]
    if subprocess.run([*unshare, 'true'], capture_output=True).returncode:
        pytest.skip('this user may not mount')
    options = json.dumps(ORDER | cache)
    program = [sys.executable, '-m', 'tests.reading.cache_reader', DATA, str(STEPS), options]
    run = subprocess.run([*unshare, *program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == expected
    assert run.stderr.count('No space left on device') == 1


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'cache_dir': 'c', 'cache_gb': 1}, "cache_dir='c': expected none for a local data set"),
        ({'cache_dir': 'c'}, 'cache_gb=0.0: expected the GB that cache_dir may take, such as 100'),
        ({'cache_gb': 1}, 'cache_gb=1.0: expected 0 without cache_dir'),
        ({'cache_dir': 'gs://b/c', 'cache_gb': 1}, 'expected a folder on a local disk'),
    ],
)
def test_what_cannot_be_kept_is_refused(local, options, message):
    with pytest.raises(ValueError, match=message):
        input_pipeline.train_batches(local, **ORDER, **options)


def test_a_folder_that_cannot_be_made_is_refused(bucket, tmp_path):
    (tmp_path / 'file').write_text('x')
    with pytest.raises(ValueError, match=r'cache_dir=.*file/cache.*a part of this path is a file'):
        read(DATA, 0, 1, cache_dir=str(tmp_path / 'file' / 'cache'), cache_gb=1)


def test_retries_are_counted(bucket, cache):
    bucket.inject(Fault('503', count=2, match=r'read bucket/.*\.tfrecord'))
    assert counted(DATA, **cache).num_retries == 2
