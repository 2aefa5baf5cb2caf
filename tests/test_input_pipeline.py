"""Reading and parsing batches, on small data sets written here with TFDS' own tools.

That processes share batches, and that any start is the tail of a run, is tested with the properties
of `tests/reading/test_properties.py`.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import chunk_index, stored_dataset
from coyo11m_tfds.reading import order as order_lib
from tests.reading import planned, small_dataset
from tests.reading.batches import assert_same, check_memory

TEXT_DIM = 6
LENGTHS = {schema.TRAIN: (70, 97, 64, 131, 33), schema.VALIDATION: (37, 12)}
ORDER = dict(batch_size=16, seed=5, chunk=32, lanes=4, window=24)
ALL = stored_dataset.FEATURES


@dataclasses.dataclass(frozen=True)
class Written:
    """A data set on disk, and what was written, in the order of the shards."""

    path: pathlib.Path
    key: np.ndarray
    latents: np.ndarray  # (n, 3, 4, 32, 32)
    text_embedding: np.ndarray
    caption: list[bytes]
    shard_lengths: tuple[int, ...]

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        by_key = np.argsort(self.key)
        return by_key[np.searchsorted(self.key, keys, sorter=by_key)]


def write_dataset(path: pathlib.Path, dtype=np.float16) -> dict[str, Written]:
    path.mkdir(parents=True)
    written = {split: write_split(path, split, dtype) for split in LENGTHS}
    small_dataset.write_metadata(path, LENGTHS, dtype, TEXT_DIM)
    return written


def write_split(path: pathlib.Path, split: str, dtype) -> Written:
    lengths = LENGTHS[split]
    rng = np.random.default_rng(len(split))
    count = sum(lengths)
    written = Written(
        path=path,
        key=rng.choice(2**62, count, replace=False) - 2**61,
        latents=rng.normal(0, 6, (count, *schema.LATENTS_SHAPE)).astype(dtype),
        text_embedding=rng.normal(size=(count, TEXT_DIM)).astype(np.float16),
        caption=[f'caption {i}'.encode() for i in range(count)],
        shard_lengths=lengths,
    )
    first, offsets, sizes = 0, [], []
    for shard, length in enumerate(lengths):
        file = small_dataset.template(path, split).sharded_filepath(
            shard_index=shard, num_shards=len(lengths)
        )
        starts = write_shard(file, written, range(first, first + length))
        offsets.append(np.array(starts[:-1][:: schema.CHUNK_STRIDE]))
        sizes.append(starts[-1])
        first += length
    chunk_index.save(path, split, lengths, offsets, sizes)
    return written


def write_shard(file, written: Written, rows: range) -> list[int]:
    """Returns where each record starts, and where the last one ends."""
    starts = [0]
    with tf.io.TFRecordWriter(str(file)) as writer:
        for row in rows:
            example = tf.train.Example()
            feature = example.features.feature
            feature[schema.KEY].int64_list.value.append(written.key[row])
            feature[schema.LATENTS].bytes_list.value.append(written.latents[row].tobytes())
            feature[schema.CAPTION].bytes_list.value.append(written.caption[row])
            text = written.text_embedding[row].tobytes()
            feature[schema.TEXT_EMBEDDING].bytes_list.value.append(text)
            record = example.SerializeToString(deterministic=True)
            writer.write(record)
            starts.append(starts[-1] + len(record) + 16)  # length, and two checksums
    return starts


@pytest.fixture(scope='module')
def written(tmp_path_factory) -> dict[str, Written]:
    folder = tmp_path_factory.mktemp('written')
    return write_dataset(folder / schema.NAME / 'hash' / schema.VERSION)


@pytest.fixture(scope='module')
def unindexed(tmp_path_factory) -> dict[str, Written]:
    """A data set made elsewhere, without a chunk index."""
    written = write_dataset(tmp_path_factory.mktemp('foreign') / 'foreign' / '1.0.0')
    for file in written[schema.TRAIN].path.glob('chunk_index-*'):
        file.unlink()
    return written


@pytest.fixture(scope='module')
def plan(written) -> planned.Planned:
    return planned.of_data(written[schema.TRAIN].path, **ORDER)


def take(dataset: tf.data.Dataset, count: int) -> list[dict[str, np.ndarray]]:
    return list(dataset.take(count).as_numpy_iterator())


def train_batches(written, count: int, **changes) -> list[dict[str, np.ndarray]]:
    """The first batches, which both engines give alike."""
    train, arguments = written[schema.TRAIN], {**ORDER, **changes}
    by_chunks = take(input_pipeline.train_dataset(train.path, **arguments), count)
    rows = input_pipeline.train_batches(train.path, engine='rows', **arguments)
    assert_same(list(itertools.islice(rows, count)), by_chunks)
    return by_chunks


def shapes(batch: dict[str, np.ndarray]) -> dict:
    return {name: (x.shape, x.dtype) for name, x in batch.items()}


# --- The planned path --------------------------------------------------------------------------


def test_batches_are_what_the_plan_says_over_several_epochs(written, plan):
    train = written[schema.TRAIN]
    first_row = np.cumsum([0, *train.shard_lengths])
    batches = train_batches(written, 3 * plan.steps, features=ALL, caption_dropout=0.3)
    for step, batch in enumerate(batches):
        epoch, shard, record = plan.batch(step)
        rows = first_row[shard] + record
        keys = train.key[rows]
        crops = order_lib.sample_crops(ORDER['seed'], epoch, keys)
        np.testing.assert_array_equal(batch['key'], keys)
        np.testing.assert_array_equal(batch['latents'], train.latents[rows, crops])
        np.testing.assert_array_equal(batch['text_embedding'], train.text_embedding[rows])
        assert batch['caption'].tolist() == [train.caption[row] for row in rows]
        drops = order_lib.sample_drops(ORDER['seed'], epoch, keys, 0.3)
        np.testing.assert_array_equal(batch['drop_text'], drops)


def test_reading_options_do_not_change_the_batches(written):
    whole = train_batches(written, 10)
    for options in (dict(parallel_reads=1), dict(parallel_reads=3, prefetch=1)):
        assert_same(train_batches(written, 10, **options), whole)


def test_only_what_is_asked_for_is_in_a_batch(written):
    assert shapes(train_batches(written, 1, features=ALL, caption_dropout=0.1)[0]) == {
        'key': ((16,), np.int64),
        'latents': ((16, 4, 32, 32), np.float16),
        'text_embedding': ((16, TEXT_DIM), np.float16),
        'caption': ((16,), np.object_),
        'drop_text': ((16,), np.bool_),
    }
    latents_only = train_batches(written, 1, features=('latents',), caption_dropout=0.1)[0]
    assert shapes(latents_only) == {'latents': ((16, 4, 32, 32), np.float16)}


def test_bfloat16_latents_stay_bit_for_bit(tmp_path):
    written = write_dataset(tmp_path / 'b' / '1.0.0', ml_dtypes.bfloat16)
    train = written[schema.TRAIN]
    batch = train_batches(written, 1)[0]
    assert batch['latents'].dtype == ml_dtypes.bfloat16
    crops = order_lib.sample_crops(ORDER['seed'], 0, batch['key'])
    expected = train.latents[train.rows_of(batch['key']), crops]
    np.testing.assert_array_equal(batch['latents'].view(np.uint16), expected.view(np.uint16))
    assert input_pipeline.open_data(train.path).stats().latent_dtype == 'bfloat16'


def test_the_builder_makes_data_sets_that_are_read_by_plan(mini_dataset):
    builder = tfds.builder_from_directory(mini_dataset)
    settings = dict(batch_size=16, seed=0, lanes=4, chunk=32, window=64)
    steps = planned.of_data(builder, **settings).steps
    source = {
        int(example['key']): example for example in tfds.as_numpy(builder.as_dataset(split='train'))
    }
    batches = take(input_pipeline.train_dataset(builder, features=ALL, **settings), steps)
    keys = np.concatenate([batch['key'] for batch in batches])
    assert len(np.unique(keys)) == len(keys)
    for batch in batches[:5]:
        crops = order_lib.sample_crops(0, 0, batch['key'])
        for i, key in enumerate(batch['key']):
            example = source[int(key)]
            np.testing.assert_array_equal(batch['latents'][i], example['latents'][crops[i]])
            np.testing.assert_array_equal(batch['text_embedding'][i], example['text_embedding'])
            assert batch['caption'][i] == example['caption']


# --- Evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['written', 'unindexed'])
@pytest.mark.parametrize('batch_size, process_count', [(16, 1), (16, 4), (20, 2), (64, 8)])
def test_evaluation_reads_every_record_once(request, kind, batch_size, process_count):
    validation = request.getfixturevalue(kind)[schema.VALIDATION]
    parts = []
    for process in range(process_count):
        dataset = input_pipeline.eval_dataset(
            validation.path,
            batch_size=batch_size,
            features=ALL,
            process_index=process,
            process_count=process_count,
        )
        parts.append(take(dataset, -1))
        assert len(parts[-1]) == dataset.cardinality() == -(-len(validation.key) // batch_size)
    batches = [batch for part in parts for batch in part]
    assert {len(x) for batch in batches for x in batch.values()} == {batch_size // process_count}
    real = {name: np.concatenate([batch[name][batch['mask']] for batch in batches]) for name in ALL}
    rows = validation.rows_of(real['key'])
    assert sorted(rows) == list(range(len(validation.key)))
    np.testing.assert_array_equal(real['key'], validation.key[rows])
    np.testing.assert_array_equal(real['latents'], validation.latents[rows, 1])
    np.testing.assert_array_equal(real['text_embedding'], validation.text_embedding[rows])
    assert real['caption'].tolist() == [validation.caption[row] for row in rows]
    if kind == 'written':
        assert rows.tolist() == list(range(len(rows)))
    assert not any(batch['latents'][~batch['mask']].any() for batch in batches)


# --- The ordinary path -------------------------------------------------------------------------


def test_without_chunk_index_an_epoch_has_every_record_once(unindexed, caplog):
    train = unindexed[schema.TRAIN]
    count = len(train.key)
    settings = dict(batch_size=5, seed=5, features=ALL, caption_dropout=0.4)
    assert count % 5 == 0
    assert input_pipeline.train_order(train.path, input_pipeline.OrderSettings(seed=5)) is None
    batches = take(input_pipeline.train_dataset(train.path, **settings), 2 * count // 5)
    assert 'no chunk index' in caplog.text
    key, latents, drops = (
        np.concatenate([b[k] for b in batches]) for k in ('key', 'latents', 'drop_text')
    )
    epochs = np.repeat([0, 1], count)
    for epoch in (0, 1):
        assert sorted(key[epochs == epoch]) == sorted(train.key)
    assert not np.array_equal(key[:count], key[count:])
    crops = order_lib.sample_crops(5, epochs, key)
    np.testing.assert_array_equal(latents, train.latents[train.rows_of(key), crops])
    np.testing.assert_array_equal(drops, order_lib.sample_drops(5, epochs, key, 0.4))


def test_without_chunk_index_processes_get_different_records(unindexed):
    train = unindexed[schema.TRAIN]
    parts = []
    for process in range(2):
        share = dict(process_index=process, process_count=2)
        dataset = input_pipeline.train_dataset(
            train.path, batch_size=10, seed=5, features=('key',), **share
        )
        parts.append(np.concatenate([batch['key'] for batch in take(dataset, 30)]))
    assert not np.intersect1d(*parts).size


@pytest.mark.parametrize('num_examples', [1, 20])
def test_mocked_data_look_like_real_ones(written, unindexed, num_examples):
    dataset = functools.partial(
        input_pipeline.train_dataset, features=ALL, caption_dropout=0.1, **ORDER
    )
    real = dataset(written[schema.TRAIN].path)
    builder = tfds.builder_from_directory(unindexed[schema.TRAIN].path)
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
        input_pipeline.position_settings(builder, input_pipeline.OrderSettings(seed=0))


# --- Metadata ----------------------------------------------------------------------------------


def test_stats_come_from_the_metadata(mini_dataset):
    metadata = json.loads((mini_dataset / 'metadata.json').read_text())
    stats = input_pipeline.open_data(mini_dataset).stats()
    np.testing.assert_allclose(stats.latent_mean, metadata[schema.META_LATENT_MEAN], rtol=1e-6)
    np.testing.assert_allclose(stats.latent_std, metadata[schema.META_LATENT_STD], rtol=1e-6)
    np.testing.assert_allclose(stats.text_std, metadata[schema.META_TEXT_STD], rtol=1e-6)
    assert stats.text_mean.shape == (stats.text_dim,) == (schema.DEFAULT_TEXT_DIM,)
    assert stats.text_encoder == 'hash' and stats.latent_dtype == 'float16'
    assert stats.source_fingerprint == metadata[schema.META_SOURCE_FINGERPRINT]


def test_position_settings_tell_what_differs(written, mini_dataset):
    path = written[schema.TRAIN].path
    settings = planned.settings_of(**ORDER)
    saved = input_pipeline.position_settings(path, settings)
    assert input_pipeline.position_settings(path, settings) == saved
    assert json.loads(json.dumps(saved)) == saved
    fingerprints = {input_pipeline.position_fingerprint(saved)}
    for name in ('seed', 'chunk', 'lanes', 'window'):
        changed = dataclasses.replace(settings, **{name: ORDER[name] * 2})
        now = input_pipeline.position_settings(path, changed)
        assert [key for key in saved if saved[key] != now[key]] == [name]
        fingerprints.add(input_pipeline.position_fingerprint(now))
    other = input_pipeline.position_settings(mini_dataset, settings)
    assert [key for key in saved if saved[key] != other[key]] == ['data_set']
    fingerprints.add(input_pipeline.position_fingerprint(other))
    assert len(fingerprints) == 6
    # All that a run has to keep to find its place again.
    state = {'sample': 10**12, 'order': input_pipeline.position_fingerprint(saved)}
    assert len(json.dumps(state)) < 100


def test_position_settings_know_the_shards_and_the_source(written, tmp_path):
    path = written[schema.TRAIN].path
    settings = planned.settings_of(**ORDER)
    saved = input_pipeline.position_settings(path, settings)['data_set']
    for number, change in enumerate(['shards', 'source']):
        copy = tmp_path / str(number)
        copy.mkdir()
        shutil.copy(path / 'features.json', copy)
        info = json.loads((path / 'dataset_info.json').read_text())
        if change == 'shards':
            lengths = info['splits'][0]['shardLengths']
            lengths[0], lengths[1] = lengths[1], lengths[0]
        else:
            (copy / 'metadata.json').write_text(json.dumps({schema.META_SOURCE_FINGERPRINT: 'f'}))
        (copy / 'dataset_info.json').write_text(json.dumps(info))
        now = input_pipeline.position_settings(copy, settings)['data_set']
        assert now.split()[:-1] == saved.split()[:-1] and now != saved


# --- Mistakes and damage -----------------------------------------------------------------------


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(process_count=3), 'batch_size=15 with lanes=3 works'),
        (dict(process_count=8), 'batch_size=16 with lanes=8 works'),
        (dict(process_count=2, process_index=2), r'process_index=2 is not in \[0, 2\)'),
        (dict(lanes=3), 'lanes=2 works'),
        (dict(features=('key', 'tags')), "no feature 'tags'; there are"),
        (dict(split='test'), r"no split 'test', only \['train', 'validation'\]"),
        (dict(caption_dropout=1.5), 'caption_dropout=1.5'),
        (dict(start_step=-1), 'sample=-4 is negative'),
    ],
)
def test_a_mistake_is_named_before_anything_is_read(written, changes, message):
    for engine in input_pipeline.ENGINES:
        with pytest.raises(ValueError, match=message):
            input_pipeline.train_batches(
                written[schema.TRAIN].path, engine=engine, **{**ORDER, **changes}
            )


def test_the_check_of_memory_names_a_feature_that_is_not_there(written):
    arguments = {name: x for name, x in ORDER.items() if name != 'seed'}
    with pytest.raises(ValueError, match="no feature 'tags'; there are"):
        check_memory(written[schema.TRAIN].path, **arguments, features=('key', 'tags'))


def test_an_index_of_other_shards_is_refused(tmp_path):
    path = write_dataset(tmp_path / 'd' / '1.0.0')[schema.TRAIN].path
    (path / 'chunk_index-validation.npy').rename(path / 'chunk_index-train.npy')
    with pytest.raises(ValueError, match=r'5 shards of 395 records.* its chunk index 2 of 49'):
        input_pipeline.train_dataset(path, **ORDER)


@pytest.mark.parametrize('place', ['disk', 'bucket'])
def test_an_index_that_is_lost_is_refused(mini_dataset, tmp_path, gcs, place):
    """Without it records would come in another order, at the same position."""
    path = shutil.copytree(mini_dataset, tmp_path / '1.0.0')
    [index] = path.glob('chunk_index-train*')
    index.unlink()
    if place == 'bucket':
        gcs.upload_folder(path, 'gs://bucket/d/1.0.0')
        path = 'gs://bucket/d/1.0.0'
    message = rf'{path}/{index.name}: is missing, and \S*checksums\S* names it'
    for engine in ('auto', 'tf_data'):
        with pytest.raises(FileNotFoundError, match=message):
            input_pipeline.train_batches(path, engine=engine, **ORDER)
    with pytest.raises(FileNotFoundError, match=message):
        input_pipeline.train_order(path, planned.settings_of(**ORDER))
    next(input_pipeline.eval_batches(path, batch_size=16))  # has its own


def test_a_position_is_the_same_with_tensorflow_and_without(written, mini_dataset):
    for path in (written[schema.TRAIN].path, mini_dataset):
        for split in LENGTHS:
            settings = planned.settings_of(**ORDER)
            by_folder = input_pipeline.position_settings(path, settings, split)
            builder = tfds.builder_from_directory(path)
            assert input_pipeline.position_settings(builder, settings, split) == by_folder


# --- Opening -----------------------------------------------------------------------------------


def test_what_is_opened_once_is_read_once(tmp_path, gcs):
    small_dataset.write(tmp_path / '1.0.0', {schema.TRAIN: (70, 97)})
    gcs.upload_folder(tmp_path / '1.0.0', 'gs://bucket/d/1.0.0')
    order = dict(batch_size=16, seed=5, chunk=64, lanes=2, window=24)
    data = input_pipeline.open_data('gs://bucket/d/1.0.0')
    assert input_pipeline.open_data(data) is data
    input_pipeline.train_order(data, planned.settings_of(**order))
    input_pipeline.position_settings(data, planned.settings_of(**order))
    check_memory(data, **{n: x for n, x in order.items() if n != 'seed'})
    assert input_pipeline.engine_of(data) == 'chunks'
    batch = next(input_pipeline.train_batches(data, **order))
    expected = next(input_pipeline.train_batches(tmp_path / '1.0.0', **order))
    np.testing.assert_array_equal(batch['latents'], expected['latents'])
    reads = [r.path for r in gcs.requests if r.action == 'read' and 'tfrecord' not in r.path]
    names = ['chunk_index-train.npy', 'dataset_info.json', 'features.json']
    assert sorted(path.rpartition('/')[2] for path in reads) == names
