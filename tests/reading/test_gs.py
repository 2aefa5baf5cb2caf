"""Training data on gs://: how much is asked for, how many requests wait at once, what faults do."""

import json
import pathlib

import pytest

from coyo11m_tfds import schema
from tests import children
from tests.fakes.cloud import Fault, Gcs
from tests.reading import small_dataset

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


PROGRAM = """
import itertools, json
import input_pipeline
from tests.reading.batches import wait_until_idle
path, steps, settle, settings = json.loads(sys.argv[1])
counter = input_pipeline.ReadCounter()
batches = input_pipeline.train_batches(path, engine='chunks', counter=counter, **settings)
keys, most_in_flight = [], 0
for batch in itertools.islice(batches, steps):
    keys.append(batch['key'].tolist())
    most_in_flight = max(most_in_flight, counter.read().chunks_in_flight)
if settle:
    wait_until_idle(counter)
found = {'keys': keys, 'most_in_flight': most_in_flight, 'counts': counter.read()}
print(json.dumps(found | {'with_tensorflow': 'tensorflow' in sys.modules}))
"""


def read(path: object, steps: int, settle: bool = False, **changes) -> dict:
    """What a process reads that does nothing else."""
    settings = ORDER | {'features': ['key']} | changes
    with children.python(PROGRAM, json.dumps([str(path), steps, settle, settings])) as child:
        output, errors = child.communicate(timeout=300)
    if child.returncode:
        raise RuntimeError(errors[-3000:])
    return json.loads(output)


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


def test_a_chunk_is_asked_for_once_and_nothing_besides(bucket, tmp_path):
    """Of lanes that are even, so that no tail of an epoch is left out."""
    path = tmp_path / '1.0.0'
    small_dataset.write(path, {schema.TRAIN: (512,) * 4})
    bucket.upload_folder(path, DATA)
    asked, requests = [], []
    for epochs in (1, 3):
        found = read(DATA, epochs * 2048 // ORDER['batch_size'], window=32, settle=True)
        num_bytes, num_chunks, in_flight, _ = found['counts']
        assert in_flight == 0
        assert not found['with_tensorflow']
        requests.append(len(shard_reads(bucket)))
        assert requests[-1] == num_chunks
        asked.append(asked_bytes(bucket))
        assert num_bytes <= asked[-1]
        bucket.clear()
    # What is read ahead is the same in both; a chunk that the next epoch begins with is kept.
    chunks, num_bytes = requests[1] - requests[0], asked[1] - asked[0]
    assert chunks <= 2 * 2048 // ORDER['chunk']
    size = sum(path.stat().st_size for path in path.glob('*tfrecord*'))
    assert num_bytes <= 1.05 * size * chunks * ORDER['chunk'] / 2048


def test_all_reads_that_the_settings_allow_wait_at_once(bucket):
    bucket.latency = 0.3
    found = read(DATA, 8)
    assert found['most_in_flight']  # as seen at each batch, when most may have come
    assert most_at_once(shard_reads(bucket)) >= 0.75 * ORDER['lanes'] * ORDER['parallel_reads']


def test_faults_that_pass_change_nothing(local, bucket):
    bucket.inject_share(['503', '429', 'cut', 'flip', 'reset', 'stall'], share=0.1, seed=3)
    found = read(DATA, STEPS_OF_AN_EPOCH)
    assert any(r.fault for r in shard_reads(bucket))
    assert found['keys'] == read(local, STEPS_OF_AN_EPOCH)['keys']
    assert found['counts'][3] == 0


def test_a_shard_that_is_gone_is_named(bucket):
    name = next(name for name in bucket.objects('bucket') if '00002-of' in name)
    bucket.remove('bucket', name)
    with pytest.raises(RuntimeError, match=rf'{name} is missing: restore it'):
        read(DATA, STEPS_OF_AN_EPOCH, on_bad_records='skip')


@pytest.mark.parametrize(
    ('kind', 'advice'),
    [('403', 'gcloud auth application-default login'), ('503', 'Run the same command again later')],
)
def test_an_outage_is_an_error_even_where_bad_records_are_skipped(bucket, kind, advice):
    bucket.inject(Fault(kind, count=None, match=r'read bucket/.*\.tfrecord'))
    with pytest.raises(RuntimeError) as error:
        read(DATA, STEPS_OF_AN_EPOCH, on_bad_records='skip')
    lines = [line for line in str(error.value).splitlines() if '.tfrecord' in line]
    assert any(advice in line for line in lines), error.value
    assert 'build the data set again' not in str(error.value)
