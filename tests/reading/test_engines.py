"""Rows and chunks: what is damaged, verified, changed and lacking, and what is imported.

`test_properties.py` tests that both give the same batches of any data set, with any settings.
"""

import hashlib
import itertools
import json
import os
import pathlib
import shutil
import time

import numpy as np
import pytest
import tensorflow as tf

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import chunk_index, records, stored_dataset
from coyo11m_tfds.memory import files as files_lib
from coyo11m_tfds.reading import framing
from tests import built, children
from tests.checkout import CHECKOUT
from tests.reading import small_dataset
from tests.reading.batches import epoch_steps
from tests.reading.damaged import LENGTHS, ORDER, damage, shard_path

ENGINES = pytest.mark.parametrize('engine', ['rows', 'chunks'])


def read(path: pathlib.Path, count: int, engine: str = 'rows', **changes) -> list[dict]:
    """The first batches."""
    arguments = {**ORDER, 'features': stored_dataset.FEATURES, 'caption_dropout': 0.3, **changes}
    batches = input_pipeline.train_batches(path, engine=engine, **arguments)
    return list(itertools.islice(batches, count))


@ENGINES
def test_a_short_shard_is_named(copy, engine):
    file = shard_path(copy, 2)
    file.write_bytes(file.read_bytes()[:-1])
    message = r'record (6[4-9]|[789]\d) cannot be read: the file is shorter than its chunk index'
    with pytest.raises(ValueError, match=message):
        read(copy, 4 * epoch_steps(copy, **ORDER), engine)


@ENGINES
@pytest.mark.parametrize('policy', ['stop', 'skip'])
def test_a_file_that_cannot_be_read_is_an_error_under_either_policy(copy, engine, policy):
    file = shard_path(copy, 3)
    file.unlink()
    asked = dict(engine=engine, on_bad_records=policy)
    with pytest.raises(FileNotFoundError) as error:
        read(copy, epoch_steps(copy, **ORDER), **asked)
    assert str(error.value) == f'{file} is missing: restore it.'
    with pytest.raises(FileNotFoundError, match='is missing: restore it'):
        list(input_pipeline.eval_batches(copy, batch_size=8, split=schema.TRAIN, **asked))
    file.mkdir()
    with pytest.raises(OSError, match='cannot be read'):
        read(copy, epoch_steps(copy, **ORDER), **asked)


@pytest.mark.skipif(os.geteuid() == 0, reason='root may read everything')
@ENGINES
def test_a_shard_that_may_not_be_read_is_an_error(copy, engine):
    shard_path(copy, 3).chmod(0)
    with pytest.raises(PermissionError, match='access was refused: let this user read the file'):
        read(copy, epoch_steps(copy, **ORDER), engine, on_bad_records='skip')


def test_each_shard_is_reported_once(copy, caplog):
    for shard in (0, 3):
        shard_path(copy, shard).write_bytes(b'')
    counter = input_pipeline.ReadCounter()
    asked = dict(on_bad_records='skip', max_bad_fraction=1, counter=counter)
    batches = read(copy, 3 * epoch_steps(copy, **ORDER), 'chunks', **asked)
    assert sum((~batch['mask']).sum() for batch in batches) > 200
    reports = [r for r in caplog.records if 'It is left out' in r.getMessage()]
    assert len(reports) == 2
    assert counter.read().bad_records >= sum((~batch['mask']).sum() for batch in batches)


def test_a_bad_record_counts_once_in_all_epochs_and_too_many_stop_it(copy):
    shard_path(copy, 0).write_bytes(b'')  # 70 records
    asked = dict(count=4 * epoch_steps(copy, **ORDER), engine='chunks', on_bad_records='skip')
    batches = read(copy, **asked, max_bad_fraction=70.5 / 362)
    assert sum((~batch['mask']).sum() for batch in batches) > 140
    message = '70 of 362 records are bad, more than max_bad_fraction=0.19.*coyo11m_tfds.verify'
    with pytest.raises(ValueError, match=message):
        read(copy, **asked, max_bad_fraction=69.5 / 362)


def test_a_few_bad_records_never_stop_it(copy):
    damage(copy, 4, 0, at=3)  # a damaged length costs a run of 32 records
    read(copy, 3 * epoch_steps(copy, **ORDER), 'chunks', on_bad_records='skip', max_bad_fraction=0)


def test_one_counter_counts_what_is_read_of_several_data_sets(intact):
    counter = input_pipeline.ReadCounter()
    size = sum(shard_path(intact, s, schema.VALIDATION).stat().st_size for s in range(2))
    for number in (1, 2):
        asked = dict(batch_size=49, chunk=32, counter=counter, engine='chunks')
        assert len(list(input_pipeline.eval_batches(intact, features=('key',), **asked))) == 1
        assert counter.read() == input_pipeline.ReadCounts(number * size, number * 3)


@pytest.mark.parametrize(
    'change',
    [
        lambda file: os.utime(file, ns=(1, 1)),
        lambda file: os.truncate(file, file.stat().st_size + 1),
        lambda file: shutil.copy2(file, f'{file}.new') and os.replace(f'{file}.new', file),
        pathlib.Path.unlink,
    ],
    ids=['time', 'size', 'replaced', 'gone'],
)
def test_a_file_that_changes_while_it_is_read_is_named(copy, monkeypatch, change):
    monkeypatch.setattr(files_lib, '_CHECK_SECONDS', 0)
    batches = input_pipeline.train_batches(copy, engine='rows', **ORDER)
    next(batches)
    change(shard_path(copy, 4))
    message = rf'{shard_path(copy, 4)}:? (has changed while it was|is missing)'
    with pytest.raises(OSError, match=message):
        list(itertools.islice(batches, epoch_steps(copy, **ORDER)))


def test_each_file_is_looked_at_again_when_a_batch_touches_it(tmp_path, monkeypatch):
    """However many others the batches before it have touched meanwhile."""
    monkeypatch.setattr(files_lib, '_CHECK_SECONDS', 60)
    paths = [tmp_path / str(number) for number in range(40)]
    for path in paths:
        path.write_bytes(b'some bytes')
    files = files_lib.MappedFiles()
    files.add_shards(lambda number: str(paths[number]), [10] * 40)
    files.locate(np.arange(40), np.zeros(40, int), 1)
    clock = time.monotonic()
    monkeypatch.setattr(files_lib.time, 'monotonic', lambda: clock + 61)
    files.check_unchanged(np.array([3, 4, 5]))
    os.utime(paths[7], ns=(1, 1))
    files.check_unchanged(np.array([3, 4, 6]))
    with pytest.raises(OSError, match='/7: has changed while it was read'):
        files.check_unchanged(np.array([3, 7]))


def test_located_ranges_end_where_the_file_ends(tmp_path):
    (tmp_path / '0').write_bytes(b'some bytes')
    files = files_lib.MappedFiles()
    files.add_shards(lambda number: str(tmp_path / '0'), [10])
    begin, end = files.locate(np.zeros(4, int), np.array([0, 5, 8, 10**9]), 5)
    found = [x.tobytes() for x in files.views(begin, end)]
    assert found == [b'some ', b'bytes', b'es', b'']


# Those of Python, 20 others, and perhaps some for the moments in which files are opened.
@pytest.mark.parametrize(
    'limit, words', [(40, '256'), (23, 'this process has reached its limit of 23 open files')]
)
def test_mapped_files_take_no_descriptors(tmp_path, limit, words):
    path = tmp_path / schema.VERSION
    small_dataset.write(path, {schema.TRAIN: (8,) * 64})
    program = """
        import numpy.ma, resource, input_pipeline
        path, limit = sys.argv[1], int(sys.argv[2])
        order = dict(batch_size=256, seed=0, lanes=4, chunk=32, window=8)
        batches = input_pipeline.train_batches(path, **order)
        held = [open(path + '/dataset_info.json') for _ in range(20)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            print(len(next(batches)['key']))
        except OSError as error:
            print(error)
    """
    with children.python(program, path, limit) as child:
        output, errors = child.communicate()
    assert words in output and not errors


@pytest.mark.parametrize('name', ['caption', 'latents', 'key'])
def test_a_record_of_another_layout_is_named(tmp_path, monkeypatch, name):
    make_columns = small_dataset._columns

    def rename_one(*arguments) -> dict:
        columns = make_columns(*arguments).items()
        return {f'{x[:-1]}x' if x == name else x: values for x, values in columns}  # as sorted

    monkeypatch.setattr(small_dataset, '_columns', rename_one)
    small_dataset.write(tmp_path / schema.VERSION, LENGTHS)
    with pytest.raises(ValueError, match=r'-of-00005: record \d+ is not of this data set'):
        read(tmp_path / schema.VERSION, 1, on_bad_records='skip')


@ENGINES
@pytest.mark.parametrize('changed, num_bad', [(range(131), 131), ([40], 32)], ids=['all', 'one'])
def test_records_of_another_data_set_are_refused(copy, intact, engine, changed, num_bad):
    """They are whole, have the sizes of those that the build wrote, and are not checked."""
    file = shard_path(copy, 4)
    found = [bytearray(record) for record in built.split_records(file.read_bytes())]
    for number in changed:
        found[number][-2] ^= 1  # of the text embedding
    size = file.stat().st_size
    with tf.io.TFRecordWriter(str(file)) as writer:
        for record in found:
            writer.write(bytes(record))
    assert file.stat().st_size == size
    with pytest.raises(input_pipeline.DamagedError, match='has other records than its chunk index'):
        read(copy, epoch_steps(copy, **ORDER), engine, verify='never')
    asked = dict(batch_size=362, split=schema.TRAIN, engine=engine, verify='never')
    [batch] = input_pipeline.eval_batches(copy, on_bad_records='skip', max_bad_fraction=1, **asked)
    [expected] = input_pipeline.eval_batches(intact, **asked)
    assert (~batch['mask']).sum() == num_bad
    for name, values in batch.items():
        np.testing.assert_array_equal(values[batch['mask']], expected[name][batch['mask']])


def test_keys_and_captions_of_every_length_are_found(tmp_path):
    keys = [0, 1, -1, 127, 128, 2**62, -(2**63), 2**63 - 1, 300, 2**35]
    captions = [b'x' * n for n in (0, 1, 90, 100, 120, 127, 128, 200, 16_300, 70_000)]
    file = tmp_path / 'some.tfrecord'
    columns = {
        schema.KEY: np.array(keys),
        schema.CAPTION: captions,
        schema.LATENTS: np.zeros((10, 3 * schema.LATENT_NBYTES), np.uint8),
        schema.TEXT_EMBEDDING: np.ones((10, 10), np.uint8),
    }
    with open(file, 'wb') as opened, records.RecordWriter(opened) as writer:
        writer.write(columns)
    files = files_lib.MappedFiles()
    files.add_shards(lambda number: str(file), [file.stat().st_size])
    start, limit = files.locate(np.array([0]), np.array([0]), 10**9)
    begin, end = framing.locate_records(files, start, np.array([10]), limit)
    begin, end = begin[0, :10], end[0, :10]
    assert end[-1] + 4 == start[0] + files.size[0]
    layouts = [records.RecordLayout(3 * schema.LATENT_NBYTES, text_dim=n) for n in (5, 6)]
    found, other = (layout.find(files.gather, begin, end) for layout in layouts)
    assert found.regular.all() and not other.regular.any()
    assert found.keys.tolist() == keys
    for row, caption in enumerate(captions):
        before, whole = int(found.captions_end[row] - begin[row]), int(end[row] - begin[row])
        head = records.caption_head(before, whole)
        record = files.views(begin[[row]], end[[row]])[0].tobytes()
        assert record.startswith(head) and record[len(head) : before] == caption


@pytest.mark.parametrize('num_shards', [12, 100_000])
def test_paths_of_shards_are_those_of_tfds(tmp_path, num_shards):
    path = tmp_path / schema.NAME / '00000-of-00012' / '1.0.0'
    path.mkdir(parents=True)
    template = small_dataset.template(path, schema.TRAIN)
    # Shards without records. TFDS wants to see one file.
    template.sharded_filepath(shard_index=0, num_shards=num_shards).touch()
    chunk_index.write_chunk_index(
        path, schema.TRAIN, [0] * num_shards, [[]] * num_shards, [0] * num_shards
    )
    small_dataset.write_metadata(path, {schema.TRAIN: [0] * num_shards})
    opened = input_pipeline.open_data(path).split(schema.TRAIN)
    for shard in (0, 7, num_shards - 1):
        expected = template.sharded_filepath(shard_index=shard, num_shards=num_shards)
        assert opened.file(shard) == str(expected)


DAMAGED = {
    'features.json without the kind of latents': (
        'features.json',
        b'"tensor":',
        b'"tensor": null, "x":',
        r"\(feature '\w+': ",
    ),
    'features.json that is cut': ('features.json', None, b'{', ''),
    'dataset_info.json with a number as its name': (
        'dataset_info.json',
        b'"name": "coyo11m_tfds"',
        b'"name": 3',
        '',
    ),
}


@pytest.mark.parametrize(('name', 'old', 'new', 'words'), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_description_is_refused_by_name(copy, name, old, new, words):
    whole = (copy / name).read_bytes()
    damaged = whole.replace(old, new) if old else new
    assert damaged != whole
    (copy / name).write_bytes(damaged)
    with pytest.raises(input_pipeline.DamagedError, match=rf'{name}: is damaged.*{words}'):
        input_pipeline.train_batches(copy, **ORDER)


def test_latents_of_another_encoding_are_refused(copy):
    features = json.loads((copy / 'features.json').read_text())
    features['featuresDict']['features']['latents']['tensor']['encoding'] = 'zlib'
    (copy / 'features.json').write_text(json.dumps(features))
    with pytest.raises(ValueError, match=f"{copy}: feature 'latents' is .*, expected the bytes"):
        input_pipeline.train_batches(copy, engine='rows', **ORDER)


@pytest.mark.parametrize('place', ['local', 'bucket'])
def test_reading_needs_neither_tensorflow_nor_torch_nor_jax(intact, request, place):
    path = intact
    if place == 'bucket':
        path = 'gs://bucket/d/1.0.0'
        request.getfixturevalue('gcs').upload_folder(intact, path)
    program = """
        import input_pipeline, json
        path = sys.argv[1]
        settings = dict(batch_size=16, seed=5, chunk=64, lanes=4, window=24)
        batches = input_pipeline.train_batches(path, **settings)
        keys = [next(batches)['key'].tolist() for _ in range(3)]
        held_out = list(input_pipeline.eval_batches(path, batch_size=16))
        input_pipeline.train_plan(path, batch_size=16, seed=5, lanes=4).orders[0].locate(7)
        heavy = {'tensorflow', 'tensorflow_datasets', 'torch', 'jax', 'pyarrow', 'gcsfs', 'tqdm'}
        print(json.dumps([keys, len(held_out), sorted(heavy & sys.modules.keys())]))
    """
    with children.python(program, path) as child:
        output, errors = child.communicate()
    assert not errors
    keys, num_batches, heavy = json.loads(output)
    assert heavy == []
    assert num_batches == 4
    assert keys == [batch['key'].tolist() for batch in read(intact, 3, 'chunks')]


def test_torch_reads_what_jax_gets_with_any_number_of_workers(intact):
    pytest.importorskip('torch')
    text = (CHECKOUT / 'docs' / 'pytorch.md').read_text()
    example = text.partition('```python\n')[2].partition('```')[0]
    program = """
        import hashlib, itertools, json
        exec(sys.argv[2])
        settings = json.loads(sys.argv[3])
        data = Batches(sys.argv[1], start_step=2, features=('key', 'latents'), **settings)
        found = {}
        for num_workers in (0, 3):
            loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=num_workers)
            found[num_workers] = [
                [batch['key'].tolist(), hashlib.sha256(batch['latents'].numpy()).hexdigest()]
                for batch in itertools.islice(loader, 50)
            ]
        print(json.dumps(found))
    """
    with children.python(program, intact, example, json.dumps(ORDER), forked=True) as child:
        output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    batches = read(intact, 52, 'chunks', features=('key', 'latents'), caption_dropout=0)[2:]
    expected = [
        [batch['key'].tolist(), hashlib.sha256(batch['latents']).hexdigest()] for batch in batches
    ]
    assert json.loads(output) == {'0': expected, '3': expected}
