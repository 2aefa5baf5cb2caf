"""Training data on gs://: how much is asked for, how many requests wait at once, what faults do."""

import itertools
import pathlib

import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import schema
from tests import children
from tests.fakes.cloud import Fault, Gcs
from tests.reading import small_dataset
from tests.reading.batches import wait_until_idle

LENGTHS = {schema.TRAIN: (400, 131, 700, 64, 500, 205)}
ORDER = dict(batch_size=32, seed=5, chunk=64, lanes=4, window=128, parallel_reads=4)
STEPS_OF_AN_EPOCH = 55  # of at least 1,760 records out of 2,000
DATA = 'gs://bucket/d/1.0.0'


@pytest.fixture(scope='module')
def local(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp('local') / '1.0.0'
    small_dataset.write(path, LENGTHS)
    return path


@pytest.fixture
def bucket(local, gcs) -> Gcs:
    gcs.upload_folder(local, DATA)
    return gcs


def read(
    path: object, steps: int = STEPS_OF_AN_EPOCH, **changes
) -> tuple[np.ndarray, input_pipeline.ReadCounter]:
    """The keys of the first batches, and what was counted until nothing more is read ahead."""
    counter = input_pipeline.ReadCounter()
    asked = dict(ORDER, engine='chunks', features=['key'], counter=counter) | changes
    with input_pipeline.train_batches(path, **asked) as batches:
        keys = [batch['key'] for batch in itertools.islice(batches, steps)]
        wait_until_idle(counter)
    return np.array(keys), counter


def shard_reads(gcs: Gcs) -> list:
    return [r for r in gcs.requests if r.action == 'read' and '.tfrecord' in r.path]


def asked_bytes(gcs: Gcs) -> int:
    """Bytes that all reads of shards asked for, as far as there are so many."""
    total = 0
    for request in shard_reads(gcs):
        bucket, _, name = request.path.partition('/')
        first, last = request.range
        size = len(gcs.objects(bucket)[name])
        total += min(size, last + 1) - first
    return total


def most_at_once(requests: list) -> int:
    return max(sum(r.began <= begun.began < r.ended for r in requests) for begun in requests)


def test_a_chunk_is_asked_for_once_and_nothing_besides(gcs, tmp_path, monkeypatch):
    """Of lanes that are even, so that no tail of an epoch is left out."""
    monkeypatch.setenv('COYO11M_STALL_SECONDS', '60')  # a busy machine is no reason to ask again
    path = tmp_path / '1.0.0'
    small_dataset.write(path, {schema.TRAIN: (512,) * 4})
    gcs.upload_folder(path, DATA)
    asked, requests = [], []
    for epochs in (1, 3):
        _, counter = read(DATA, epochs * 2048 // ORDER['batch_size'], window=32)
        num_bytes, num_chunks, in_flight, *_ = counter.read()
        assert in_flight == 0
        requests.append(len(shard_reads(gcs)))
        assert requests[-1] == num_chunks
        asked.append(asked_bytes(gcs))
        assert num_bytes <= asked[-1]
        gcs.clear()
    # What is read ahead is the same in both; a chunk that the next epoch begins with is kept.
    chunks, num_bytes = requests[1] - requests[0], asked[1] - asked[0]
    assert chunks <= 2 * 2048 // ORDER['chunk']
    size = sum(path.stat().st_size for path in path.glob('*tfrecord*'))
    assert num_bytes <= 1.05 * size * chunks * ORDER['chunk'] / 2048


def test_all_reads_that_the_settings_allow_wait_at_once(bucket):
    bucket.latency = 0.3
    read(DATA, 8)
    assert most_at_once(shard_reads(bucket)) >= 0.75 * ORDER['lanes'] * ORDER['parallel_reads']


def test_a_shard_that_is_gone_is_named(bucket):
    name = next(name for name in bucket.objects('bucket') if '00002-of' in name)
    bucket.remove('bucket', name)
    with pytest.raises(FileNotFoundError, match=rf'{name} is missing: restore it'):
        read(DATA, on_bad_records='skip')


@pytest.mark.parametrize(
    ('kind', 'advice'),
    [('403', 'gcloud auth application-default login'), ('503', 'Run the same command again later')],
)
def test_an_outage_is_an_error_even_where_bad_records_are_skipped(bucket, kind, advice):
    bucket.inject(Fault(kind, count=None, match=r'read bucket/.*\.tfrecord'))
    with pytest.raises(OSError, match=rf'\.tfrecord.*{advice}') as error:
        read(DATA, on_bad_records='skip')
    assert 'build the data set again' not in str(error.value)


def test_whoever_closes_batches_does_not_wait_for_a_bucket_out_of_reach(bucket, monkeypatch):
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '600')
    counter = input_pipeline.ReadCounter()
    asked = ORDER | {'engine': 'chunks', 'features': ['key'], 'counter': counter}
    with input_pipeline.train_batches(DATA, **asked) as batches:
        next(batches)
        bucket.inject(Fault('503', count=None, match=r'read bucket/.*\.tfrecord'))
        children.wait_until(lambda: any(request.fault for request in bucket.requests))
    wait_until_idle(counter)
