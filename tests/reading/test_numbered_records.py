"""Records by number and by key: which values they have, from any file, thread and process."""

import gc
import pathlib
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from tests import children
from tests.fakes.cloud import Fault
from tests.reading import damaged, small_dataset
from tests.reading.damaged import LENGTHS

COUNT = sum(LENGTHS[schema.TRAIN])
FEATURES = 'key', 'latents', 'caption', 'text_embedding', 'score'
FORMS = 'records', 'in place', 'in a bucket'
NUMBERS = st.integers(-COUNT, COUNT - 1)


@pytest.fixture(scope='module')
def written(tmp_path_factory) -> dict[str, pathlib.Path]:
    """A data set with latents in its records and one with latents in place, with a column each."""
    paths = {form: tmp_path_factory.mktemp('written') / '1.0.0' for form in FORMS[:2]}
    for form, path in paths.items():
        source = path.parent / 'source' if form == 'in place' else None
        small_dataset.write(path, LENGTHS, source=source)
        scores = {split: np.arange(sum(x), dtype=np.float32) for split, x in LENGTHS.items()}
        small_dataset.add_column(path, 'score', scores)
    return paths


@pytest.fixture
def path(request, written, tmp_path) -> Iterator[str]:
    """The data set in one of the `FORMS`."""
    if request.param != 'in a bucket':
        yield str(written[request.param])
        return
    gcs = request.getfixturevalue('gcs')
    gcs.upload_folder(written['in place'].parent / 'source', 'gs://bucket/source')
    copy = shutil.copytree(written['in place'], tmp_path / '1.0.0')
    small_dataset.redirect(copy, 'gs://bucket/source')
    gcs.upload_folder(copy, 'gs://bucket/d/1.0.0')
    yield 'gs://bucket/d/1.0.0'
    # The records' threads end with their connections, for which the server waits.
    gc.collect()


def assert_equal(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert (np.shape(got[name]), type(got[name])) == (np.shape(x), type(x))
        assert getattr(got[name], 'dtype', None) == getattr(x, 'dtype', None)
        np.testing.assert_array_equal(got[name], x)


@pytest.mark.parametrize('path', FORMS, indirect=True)
def test_records_are_those_that_batches_have(path):
    """Whatever is asked for, in whatever order, once or again."""
    options = dict(split='train', features=FEATURES)
    opened = input_pipeline.records(path, **options)
    with input_pipeline.eval_batches(path, batch_size=COUNT, **options) as batches:
        expected = next(batches)
    del expected[input_pipeline.MASK]
    middle = input_pipeline.records(path, **options, crop=0)
    assert len(opened) == len(middle) == COUNT

    @settings(max_examples=20)
    @given(st.lists(NUMBERS, max_size=40), NUMBERS, st.builds(slice, NUMBERS, NUMBERS))
    def check(numbers: list[int], number: int, run: slice) -> None:
        for chosen in (numbers, run):
            rows = np.array(chosen, int) if chosen is numbers else chosen
            assert_equal(middle[chosen], {name: x[rows] for name, x in expected.items()})
        batch = opened[numbers]
        crops, middle_crop = batch.pop('latents'), middle[numbers].pop('latents')
        assert crops.shape == (len(numbers), *schema.LATENTS_SHAPE)
        np.testing.assert_array_equal(crops[:, 1], middle_crop)
        assert crops[:, :, 0, 0, 0].tolist() == [[0, 1, 2]] * len(numbers)
        assert_equal(batch, {x: middle[numbers][x] for x in batch})
        assert_equal(middle[number], {name: x[number] for name, x in expected.items()})
        assert_equal(middle[np.int64(number)], middle[number])
        assert opened[number]['latents'].shape == schema.LATENTS_SHAPE
        assert opened.find(int(expected['key'][number])) == number % COUNT
        for values, one in zip(middle.__getitems__(numbers), numbers, strict=True):
            assert_equal(values, middle[one])

    check()


def test_records_are_those_that_tfds_reads(written):
    data = tfds.builder_from_directory(str(written['records'])).as_dataset(split='train')
    records = input_pipeline.records(written['records'])
    examples = list(data.as_numpy_iterator())
    assert len(examples) == COUNT
    for example in examples[::40]:
        del example['text_embedding']
        assert_equal(records[records.find(example['key'])], example)


def test_every_crop_can_be_chosen(written):
    for crop in (-1, 0, 1):
        record = input_pipeline.records(written['in place'], crop=crop)[7]
        assert record['latents'].shape == schema.LATENT_SHAPE
        assert record['latents'][0, 0, :2].tolist() == [crop + 1, 7]


LACKED = {
    'a crop beyond the last': ({'crop': 2}, 'crop=2: expected -1 to 1, or None for all crops'),
    'the number of the crop': (
        {'features': ('key', 'crop')},
        "features has 'crop', which only samples",
    ),
    'records that meet a condition': ({'where': 'score > 3'}, "leave out 'where'"),
}


@pytest.mark.parametrize(('options', 'message'), LACKED.values(), ids=LACKED)
def test_what_records_lack_is_named(written, options, message):
    path, options = written['in place'], dict(options)
    if 'where' in options:
        path = [{'dir': path, 'where': options.pop('where')}]
    with pytest.raises(ValueError, match=message):
        input_pipeline.records(path, **options)


def test_records_without_a_chunk_index_are_refused(written, tmp_path):
    ignored = shutil.ignore_patterns('chunk_index-*')
    unindexed = shutil.copytree(written['in place'], tmp_path / '1.0.0', ignore=ignored)
    with pytest.raises(ValueError, match='only records of a whole data set with a chunk index'):
        input_pipeline.records(unindexed)


NOT_THERE = {
    'the number after the last': (COUNT, IndexError, f'362 records, and none with number {COUNT}'),
    'the number before the first': (-COUNT - 1, IndexError, f'none with number {-COUNT - 1}'),
    'a list with the number after the last': ([0, COUNT], IndexError, f'with number {COUNT}'),
    'a list with the number before the first': ([0, -COUNT - 1], IndexError, 'number -363'),
    'a name': ('key', TypeError, r"records\['key'\]: expected whole numbers"),
    'a fraction': (1.5, TypeError, r'records\[1\.5\]: expected whole numbers'),
    'lists of lists': ([[1, 2]], TypeError, r'records\[int64, shape \(1, 2\)\]: expected whole'),
    'a list of fractions': ([1.5], TypeError, r'records\[float64, shape \(1,\)\]: expected whole'),
    'a mask': (np.ones(COUNT, bool), TypeError, r'records\[bool, shape \(362,\)\]: expected whole'),
}


@pytest.fixture(scope='module')
def opened(written) -> input_pipeline.Records:
    return input_pipeline.records(written['records'], features=FEATURES)


@pytest.mark.parametrize(('chosen', 'kind', 'message'), NOT_THERE.values(), ids=NOT_THERE)
def test_what_is_not_there_is_an_error_and_not_another_record(opened, chosen, kind, message):
    with pytest.raises(kind, match=message):
        opened[chosen]


NO_KEYS = {
    'a text': ('12', TypeError, "key='12': expected a whole number"),
    'a fraction': (1.5, TypeError, 'key=1.5: expected a whole number'),
    'nothing': (None, TypeError, 'key=None: expected a whole number'),
    'of no record': (12345, KeyError, "no record of split 'train' has key 12345"),
    'beyond int64': (2**64, KeyError, f"no record of split 'train' has key {2**64}"),
}


@pytest.mark.parametrize(('key', 'kind', 'message'), NO_KEYS.values(), ids=NO_KEYS)
def test_a_key_that_no_record_has_is_named(opened, key, kind, message):
    with pytest.raises(kind, match=message):
        opened.find(key)


def test_a_split_without_records_has_no_key(tmp_path):
    path = tmp_path / 'd' / '1.0.0'
    small_dataset.write(path, {'train': (3,), 'validation': (0,)})
    with pytest.raises(KeyError, match="no record of split 'validation' has key 5"):
        input_pipeline.records(path, 'validation').find(5)


def test_records_are_all_there_and_say_what_they_are(opened):
    assert sum(1 for _ in opened) == COUNT
    assert repr(opened).endswith(
        "/1.0.0, 'train': 362 records of key int64[], latents float16[3, 4, 32, 32], "
        'caption object[], text_embedding float16[2], score float32[])'
    )


@pytest.mark.parametrize('path', FORMS, indirect=True)
def test_threads_and_copies_share_records(path):
    opened = input_pipeline.records(path, features=FEATURES)
    copy = pickle.loads(pickle.dumps(opened))
    numbers = np.random.default_rng(0).permutation(COUNT)[:150].tolist()
    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(opened.__getitem__, numbers))
        batches = list(pool.map(copy.__getitem__, [numbers] * 4))
    for row, number in enumerate(numbers):
        assert records[row]['score'] == number
        assert {batch['caption'][row] for batch in batches} == {f'record {number}'.encode()}


def damage(path: pathlib.Path, shard: int, record: int) -> str:
    """Damages a record, and returns what an error about it says."""
    damaged.damage(path, shard, record)
    return rf'{damaged.shard_path(path, shard).name}: record {record} cannot be read: its checksum'


@pytest.mark.parametrize('engine', ['rows', 'chunks'])
def test_a_damaged_record_is_named_and_its_neighbours_are_read(copy, engine):
    records = input_pipeline.records(copy, engine=engine)
    key = int(records[70 + 7]['key'])
    message = damage(copy, 2, 7)
    records = input_pipeline.records(copy, engine=engine)
    for number in (77, [3, 77]):
        with pytest.raises(input_pipeline.DamagedError, match=message):
            records[number]
    assert [x['caption'] for x in (records[76], records[78])] == [b'record 76', b'record 78']
    assert records[[76, 5]]['caption'].tolist() == [b'record 76', b'record 5']
    assert records.find(int(records[300]['key'])) == 300
    with pytest.raises(KeyError):
        records.find(key)


@pytest.mark.parametrize('path', ['in a bucket'], indirect=True)
def test_a_chunk_is_one_request_for_all_its_records(path, gcs):
    opened = input_pipeline.records(path, features=FEATURES)
    gcs.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(opened.__getitem__, range(64)))
    opened[0:64], opened[20]
    reads = [x for x in gcs.requests if x.action == 'read']
    assert sum('.tfrecord' in x.path for x in reads) == 2
    assert len({(x.path, x.range) for x in reads}) == len(reads)
    name = next(x for x in gcs.objects('bucket') if '00002-of' in x)
    gcs.inject(Fault('403', count=1, match=f'read bucket/{name}'))
    with pytest.raises(OSError, match=name):
        opened[100]
    assert opened[100]['score'] == 100


@pytest.mark.slow
def test_a_fork_reads_with_files_of_its_own(written):
    """Also if a thread was reading, and held locks, at that moment."""
    code = """
    import itertools, os, threading, input_pipeline
    records = [input_pipeline.records(sys.argv[1], engine=x) for x in ('rows', 'chunks')]
    read = lambda: any(not x[n % 300] for n in itertools.count() for x in records)
    threading.Thread(target=read, daemon=True).start()
    for number in range(8):
        if not (child := os.fork()):
            captions = [x[k]['caption'] for x in records for k in (number, 17 * number)]
            good = captions == [b'record %d' % k for _ in records for k in (number, 17 * number)]
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
    os._exit(0)
    """
    children.output(code, written['records'])


WORKERS = """
import torch, input_pipeline

if __name__ == '__main__':
    path, context = sys.argv[1:]
    records = input_pipeline.records(path, features=('key', 'latents', 'caption', 'score'))
    loader = torch.utils.data.DataLoader(
        records, batch_size=25, shuffle=True, num_workers=4, multiprocessing_context=context
    )
    scores = []
    for batch in loader:
        numbers = batch['score'].tolist()
        assert batch['latents'].shape == (len(numbers), 3, 4, 32, 32)
        assert batch['latents'][:, 2, 0, 0].tolist() == [[2, n] + [0] * 30 for n in numbers]
        assert batch['caption'] == [f'record {n:.0f}'.encode() for n in numbers]
        scores += numbers
    assert scores != sorted(scores) == list(range(362))
"""


@pytest.mark.slow
@pytest.mark.parametrize('context', ['fork', 'spawn'])
@pytest.mark.parametrize('path', FORMS, indirect=True)
def test_workers_of_torch_read_every_record_once(path, context):
    pytest.importorskip('torch')
    children.output(WORKERS, path, context)


@pytest.mark.slow
def test_grain_reads_in_its_order_and_resumes_from_its_state(written):
    grain = pytest.importorskip('grain')
    records = input_pipeline.records(written['in place'], features=('key', 'score'))
    numbers = grain.MapDataset.range(len(records)).shuffle(seed=0).batch(25)
    one_by_one = grain.MapDataset.source(records).shuffle(seed=0).batch(25)
    for batches in (one_by_one, numbers.map(records.__getitem__)):
        iterator = iter(batches.repeat().to_iter_dataset())
        before = [next(iterator) for _ in range(9)]
        state = iterator.get_state()
        after = [next(iterator) for _ in range(20)]
        resumed = iter(batches.repeat().to_iter_dataset())
        resumed.set_state(state)
        for batch in after:
            assert_equal(next(resumed), batch)
        epoch = np.concatenate([x['score'] for x in before + after[:6]])
        assert epoch.tolist() != sorted(epoch.tolist()) == list(range(COUNT))
