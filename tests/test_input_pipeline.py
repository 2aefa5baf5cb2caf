"""The face of reading: what data sets it opens, what it refuses, and data without a chunk index.

What it promises of batches is tested in `tests/reading`.
"""

import functools
import inspect
import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.sampling import order as order_lib
from tests import damages
from tests.reading import small_dataset
from tests.reading.batches import check_memory

LENGTHS = {schema.TRAIN: (70, 97, 64, 131, 33), schema.VALIDATION: (37, 12)}
COUNT = 395
ORDER = dict(batch_size=16, seed=5, chunk=32, lanes=4, window=24)
ALL = (*stored_dataset.FEATURES, 'crop')


@pytest.fixture(scope='module')
def written(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp('written') / schema.NAME / 'hash' / schema.VERSION
    small_dataset.write(path, LENGTHS)
    return path


@pytest.fixture(scope='module')
def unindexed(written, tmp_path_factory) -> pathlib.Path:
    """A data set made elsewhere, without a chunk index."""
    path = tmp_path_factory.mktemp('foreign') / 'foreign' / '1.0.0'
    shutil.copytree(written, path, ignore=shutil.ignore_patterns('chunk_index-*'))
    return path


def take(dataset: tf.data.Dataset, count: int) -> list[dict[str, np.ndarray]]:
    return list(dataset.take(count).as_numpy_iterator())


def shapes(batch: dict[str, np.ndarray]) -> dict:
    return {name: (x.shape, x.dtype) for name, x in batch.items()}


def plan_of(data, split: str = schema.TRAIN, **changes) -> input_pipeline.ReadPlan:
    """The plan of the settings of `ORDER` and others."""
    return input_pipeline.train_plan(data, split=split, **(ORDER | changes))


def test_the_face_shows_what_is_meant_and_nothing_else():
    names = dir(input_pipeline)
    assert names == sorted(set(input_pipeline.__all__))
    for name in names:
        assert not inspect.ismodule(getattr(input_pipeline, name)), name
    functions = {name for name in names if inspect.isfunction(getattr(input_pipeline, name))}
    assert {'train_batches', 'eval_dataset', 'train_arrays', 'to_device', 'open_mix'} <= functions


def test_without_chunk_index_an_epoch_has_every_record_once(unindexed, caplog):
    settings = dict(batch_size=5, seed=5, features=ALL, caption_dropout=0.4)
    assert plan_of(unindexed).orders is None
    batches = take(input_pipeline.train_dataset(unindexed, **settings), 2 * COUNT // 5)
    assert 'no chunk index' in caplog.text
    key, latents, crop, text, drops = (
        np.concatenate([b[k] for b in batches])
        for k in ('key', 'latents', 'crop', 'text_embedding', 'drop_text')
    )
    epochs = np.repeat([0, 1], COUNT)
    for epoch in (0, 1):
        assert sorted(latents[epochs == epoch, 0, 0, 1]) == list(range(COUNT))
    assert not np.array_equal(key[:COUNT], key[COUNT:])
    np.testing.assert_array_equal(text[:, 0], latents[:, 0, 0, 1])
    np.testing.assert_array_equal(latents[:, 0, 0, 0], order_lib.sample_crops(5, epochs, key, 3))
    np.testing.assert_array_equal(crop + 1, latents[:, 0, 0, 0])
    np.testing.assert_array_equal(drops, order_lib.sample_drops(5, epochs, key, 0.4))


def test_without_chunk_index_processes_get_different_records(unindexed):
    parts = []
    for process in range(2):
        share = dict(process_index=process, process_count=2)
        dataset = input_pipeline.train_dataset(
            unindexed, batch_size=10, seed=5, features=('key',), **share
        )
        parts.append(np.concatenate([batch['key'] for batch in take(dataset, 30)]))
    assert not np.intersect1d(*parts).size


@pytest.mark.parametrize('process_count', [1, 2])
def test_without_chunk_index_evaluation_reads_every_record_once(unindexed, process_count):
    batches = []
    for process in range(process_count):
        share = dict(process_index=process, process_count=process_count)
        asked = dict(batch_size=20, features=ALL, **share)
        batches += input_pipeline.eval_batches(unindexed, **asked)
    assert len(batches) == 3 * process_count
    assert {len(x) for batch in batches for x in batch.values()} == {20 // process_count}
    found = {name: np.concatenate([batch[name] for batch in batches]) for name in (*ALL, 'mask')}
    real = {name: x[found['mask']] for name, x in found.items()}
    record = real['latents'][:, 0, 0, 1]
    assert sorted(record) == list(range(49))
    assert (real['latents'][:, 0, 0, 0] == 1).all(), 'not the middle crop'
    assert not real['crop'].any()
    assert real['caption'].tolist() == [f'record {r:.0f}'.encode() for r in record]
    assert not found['latents'][~found['mask']].any()


def test_without_chunk_index_state_and_stride_go_on_in_the_same_shuffle(unindexed):
    expected = take(input_pipeline.train_dataset(unindexed, **ORDER), 12)
    with input_pipeline.train_batches(unindexed, **ORDER, start_step=1, stride=2) as batches:
        assert batches.steps_per_epoch == COUNT / 16
        got = list(itertools.islice(batches, 2))
        state = batches.get_state()
    assert state == plan_of(unindexed).cursor.after(5).state()
    assert list(state['samples'].values()) == [5 * 16]
    with input_pipeline.train_batches(unindexed, **ORDER) as others:
        others.set_state(state)
        got.append(next(others))
    for batch, step in zip(got, (1, 3, 5), strict=True):
        np.testing.assert_array_equal(batch['key'], expected[step]['key'])


@pytest.mark.parametrize('num_examples', [1, 20])
def test_mocked_data_look_like_real_ones(written, unindexed, num_examples):
    dataset = functools.partial(
        input_pipeline.train_dataset, features=ALL, caption_dropout=0.1, **ORDER
    )
    real = dataset(written)
    builder = tfds.builder_from_directory(unindexed)
    with tfds.testing.mock_data(num_examples=num_examples):
        mocked = dataset(builder)
        assert mocked.element_spec == real.element_spec
        assert shapes(take(mocked, 3)[-1]) == shapes(take(real, 1)[0])
        held_out = input_pipeline.eval_dataset(builder, batch_size=16, features=ALL)
        assert sum(batch['mask'].sum() for batch in take(held_out, -1)) == num_examples


def test_a_mocked_builder_that_was_never_built(tmp_path):
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder

    with tfds.testing.mock_data(num_examples=7):
        builder = Builder(data_dir=tmp_path)
        assert not builder.info.splits
        options = dict(features=('key', 'latents'))
        train = input_pipeline.train_dataset(builder, **ORDER, **options)
        assert shapes(take(train, 2)[1]) == {
            'key': ((16,), np.int64),
            'latents': ((16, 4, 32, 32), np.float16),
        }
        held_out = take(input_pipeline.eval_dataset(builder, batch_size=4, **options), -1)
        assert [batch['mask'].tolist() for batch in held_out] == [[True] * 4, [True] * 3 + [False]]
        stats = input_pipeline.open_data(builder).stats()
        assert stats.latent_mean.tolist() == [0] * 4 and stats.latent_std.tolist() == [1] * 4
        assert plan_of(builder).orders is None


def digest_of(data, split: str = schema.TRAIN, **changes) -> str:
    """What a state calls the only source."""
    (digest,) = plan_of(data, split, **changes).cursor.digests
    return digest


def test_a_state_names_data_set_split_and_order(written, mini_dataset):
    changes = [{}] + [{name: ORDER[name] * 2} for name in ('seed', 'chunk', 'lanes', 'window')]
    digests = {digest_of(written, **change) for change in changes} | {digest_of(mini_dataset)}
    assert len(digests) == 6
    for path in (written, mini_dataset):
        builder = tfds.builder_from_directory(path)
        by_split = {digest_of(path, split) for split in LENGTHS}
        assert by_split == {digest_of(builder, split) for split in LENGTHS}
        assert len(by_split) == len(LENGTHS)
    assert digest_of(written, batch_size=32) in digests


def test_a_state_knows_the_shards_and_the_source(written, tmp_path):
    for number, change in enumerate(['nothing', 'shards', 'source']):
        copy = shutil.copytree(written, tmp_path / str(number) / written.name)
        info = json.loads((written / 'dataset_info.json').read_text())
        if change == 'shards':
            lengths = info['splits'][0]['shardLengths']
            lengths[0], lengths[1] = lengths[1], lengths[0]
            next(copy.glob('chunk_index-train*')).unlink()
        elif change == 'source':
            (copy / 'metadata.json').write_text(json.dumps({schema.META_SOURCE_FINGERPRINT: 'f'}))
        (copy / 'dataset_info.json').write_text(json.dumps(info))
        assert (digest_of(copy) == digest_of(written)) == (change == 'nothing')


def test_the_engine_that_reads_is_told(written, unindexed):
    told = {engine: plan_of(written, engine=engine).engine for engine in input_pipeline.ENGINES}
    assert told == {'auto': 'rows', 'rows': 'rows', 'chunks': 'chunks', 'tf_data': 'tf_data'}
    assert plan_of(unindexed).engine == 'tf_data'
    with pytest.raises(ValueError, match='cannot be mixed or filtered without a chunk index'):
        plan_of([{'dir': written}, {'dir': unindexed}])


def test_an_index_of_other_shards_is_refused(written, tmp_path):
    path = pathlib.Path(shutil.copytree(written, tmp_path / '1.0.0'))
    (path / 'chunk_index-validation.npy').rename(path / 'chunk_index-train.npy')
    with pytest.raises(ValueError, match=r'5 shards of 395 records.* its chunk index 2 of 49'):
        input_pipeline.train_dataset(path, **ORDER)


def test_an_index_that_is_lost_is_refused(copy, gcs):
    """Without it records would come in another order, at the same position."""
    [index] = copy.glob('chunk_index-train*')
    index.unlink()
    gcs.upload_folder(copy, 'gs://bucket/d/1.0.0')
    for place in (copy, 'gs://bucket/d/1.0.0'):
        message = rf'{place}/{index.name}: is missing, and \S*checksums\S* names it'
        for engine in ('auto', 'tf_data'):
            with pytest.raises(FileNotFoundError, match=message):
                plan_of(place, engine=engine)
        next(input_pipeline.eval_batches(place, batch_size=16))  # has its own


@pytest.mark.parametrize(
    'stem', ['metadata', 'features', 'dataset_info', 'chunk_index-train', 'checksums']
)
def test_a_small_file_that_is_damaged_or_lost_is_refused_by_name(copy, stem):
    """A bit in a number of `metadata.json` would change how a model scales latents."""
    [path] = copy.glob(f'{stem}*')
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(damages.flipped(whole, at))
        with pytest.raises((input_pipeline.DamagedError, OSError), match=str(copy)):
            input_pipeline.open_data(copy).split(schema.TRAIN)
    path.unlink()
    if stem != 'checksums':
        with pytest.raises(FileNotFoundError, match=r'is missing|expected the folder'):
            input_pipeline.open_data(copy).split(schema.TRAIN)
    else:
        assert input_pipeline.open_data(copy).split(schema.TRAIN)


def test_what_is_opened_once_is_read_once(mini_dataset, gcs):
    gcs.upload_folder(mini_dataset, 'gs://bucket/d/1.0.0')
    order = dict(batch_size=16, seed=5, chunk=64, lanes=2, window=24)
    data = input_pipeline.open_data('gs://bucket/d/1.0.0')
    assert input_pipeline.open_data(data) is data
    assert plan_of(data, **order).engine == 'chunks'
    check_memory(data, **{n: x for n, x in order.items() if n != 'seed'})
    batch = next(input_pipeline.train_batches(data, **order))
    expected = next(input_pipeline.train_batches(mini_dataset, **order))
    np.testing.assert_array_equal(batch['latents'], expected['latents'])
    reads = [r.path for r in gcs.requests if r.action == 'read' and 'tfrecord' not in r.path]
    # It has no columns, which the request for their description shows.
    stems = ['checksums', 'chunk_index', 'columns', 'dataset_info', 'features', 'metadata']
    names = [path.rpartition('/')[2] for path in reads]
    assert sorted(name.partition('-')[0].partition('.')[0] for name in names) == stems
