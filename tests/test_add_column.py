"""Columns that are added to a built data set: text in the place of its own, tokens, numbers."""

import functools
import itertools
import json
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import input_pipeline
from coyo11m_tfds import add_column, embed_captions, schema, verify
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.storage import locks
from tests import built, children, damages, made_sources
from tests.reading.batches import assert_same, epoch_steps, wait_until_idle

COLUMNS, CHECKSUMS = 'columns-3f9a1c20.json', 'checksums-3f9a1c20.json'
ORDER = dict(batch_size=16, seed=0, lanes=4, chunk=32, window=64)


@pytest.fixture(scope='module')
def other_embeddings(sample_source, tmp_path_factory) -> pathlib.Path:
    """Of another column of captions."""
    path = tmp_path_factory.mktemp('other') / 'other.parquet'
    settings = embed_captions.EmbedSettings(caption_column='caption')
    embed_captions.embed(sample_source, 'hash', path, settings)
    return path


def embeddings_of(path: pathlib.Path) -> dict[int, np.ndarray]:
    table = pq.read_table(path)
    values = np.array(table.column(1).to_pylist(), np.float16)
    return dict(zip(table['key'].to_pylist(), values, strict=True))


def read_all(path: object, *features: str, split: str = '', **options) -> list[np.ndarray]:
    """The features of all records of a split, or of all splits."""
    batches = [
        batch
        for name in ([split] if split else ['train', 'validation'])
        for batch in input_pipeline.eval_batches(
            path, batch_size=64, features=features, split=name, **options
        )
    ]
    return [np.concatenate([batch[name][batch['mask']] for batch in batches]) for name in features]


def assert_values(values: np.ndarray, keys: np.ndarray, expected: dict[int, np.ndarray]) -> None:
    np.testing.assert_array_equal(values, np.stack([expected[key] for key in keys.tolist()]))


def test_a_second_text_column_is_read_and_nothing_else_changes(
    copy, mini_dataset, other_embeddings
):
    before = built.files_of(mini_dataset)
    column = add_column.add(copy, 'other', other_embeddings)
    expected = embeddings_of(other_embeddings)

    after = built.files_of(copy)
    assert {name for name in after if after[name] != before.get(name)} == {
        *('column_other-train-3f9a1c20.npy', 'column_other-validation-3f9a1c20.npy'),
        *(COLUMNS, CHECKSUMS),
    }
    assert not verify.verify(copy).faults

    steps = epoch_steps(copy, **ORDER)
    arguments = {**ORDER, 'features': stored_dataset.FEATURES, 'caption_dropout': 0.5}
    in_records, in_column = (
        list(itertools.islice(input_pipeline.train_batches(copy, text=text, **arguments), steps))
        for text in ('', 'other')
    )
    for batch, other in zip(in_records, in_column, strict=True):
        for name in batch.keys() - {schema.TEXT_EMBEDDING}:
            np.testing.assert_array_equal(other[name], batch[name])
        assert_values(other[schema.TEXT_EMBEDDING], batch['key'], expected)
        assert not np.array_equal(batch[schema.TEXT_EMBEDDING], other[schema.TEXT_EMBEDDING])
    keys, values = read_all(copy, 'key', schema.TEXT_EMBEDDING, text='other')
    assert_values(values, keys, expected)

    [values] = read_all(copy, schema.TEXT_EMBEDDING, text='other', split='train')
    stats = input_pipeline.open_data(copy).stats('other')
    for moment, name in ((stats.text_mean, 'mean'), (stats.text_std, 'std')):
        exact = getattr(values.astype(np.float64), name)(axis=0)
        np.testing.assert_allclose(moment, exact, rtol=1e-5, atol=1e-7)
    assert column.shape == values.shape[1:] == (stats.text_dim,)
    assert input_pipeline.open_data(copy).stats().text_encoder == stats.text_encoder == 'hash'


def write_column(path: pathlib.Path, name: str, keys: np.ndarray, values: pa.Array) -> pathlib.Path:
    pq.write_table(pa.table({'key': keys, name: values}), path)
    return path


def write_tokens(
    path: pathlib.Path, keys: np.ndarray, tokens: np.ndarray, vocabulary: int
) -> pathlib.Path:
    metadata = {
        schema.META_TEXT_ENCODER: 'words',
        schema.META_TEXT_REVISION: '1',
        schema.META_TEXT_MAX_TOKENS: str(tokens.shape[1]),
        schema.META_TEXT_VOCABULARY: str(vocabulary),
        schema.META_CAPTION_COLUMN: 'caption',
        schema.META_CAPTIONS_DIGEST: '12',
    }
    table = pa.table({'key': keys, 'tokens': as_lists(tokens)})
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def as_lists(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


@pytest.mark.parametrize(('dtype', 'width'), [('float64', None), ('uint8', 3), ('float16', 3)])
def test_numbers_come_under_their_own_name_as_they_are(copy, tmp_path, dtype, width):
    keys = read_all(copy, 'key')[0][::-1]
    shape = (len(keys),) if width is None else (len(keys), width)
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    column = pa.array(values) if width is None else as_lists(values)
    path = write_column(tmp_path / 'x.parquet', 'score', keys, column)
    expected = dict(zip(keys.tolist(), values, strict=True))

    add_column.add(copy, 'aesthetic', parquet=path, column='score')
    assert not verify.verify(copy).faults
    features = ('key', 'aesthetic')
    batches = input_pipeline.train_batches(copy, **ORDER, features=features)
    for batch in itertools.islice(batches, 20):
        assert batch.keys() == {'key', 'aesthetic'}
        assert batch['aesthetic'].dtype == dtype
        assert_values(batch['aesthetic'], batch['key'], expected)
    keys, values = read_all(copy, *features)
    assert_values(values, keys, expected)
    *_, padded = input_pipeline.eval_batches(copy, batch_size=50, features=features)
    assert not padded['mask'].all() and not padded['aesthetic'][~padded['mask']].any()


def test_tokens_and_embeddings_come_side_by_side(copy, other_embeddings, tmp_path):
    [keys] = read_all(copy, 'key')
    tokens = np.random.default_rng(0).integers(-1, 1000, (len(keys), 7)).astype(np.int32)
    path = write_tokens(tmp_path / 't.parquet', keys, tokens, vocabulary=1000)
    column = add_column.add(copy, 'words', text=path)
    assert (column.dtype, column.shape, column.feature) == ('int32', (7,), 'tokens')
    add_column.add(copy, 'other', other_embeddings)
    features = ('key', 'text_embedding', 'words', 'other')
    batch = next(input_pipeline.train_batches(copy, **ORDER, features=features))
    assert_values(batch['words'], batch['key'], dict(zip(keys.tolist(), tokens, strict=True)))
    assert_values(batch['other'], batch['key'], embeddings_of(other_embeddings))
    as_text = next(input_pipeline.train_batches(copy, **ORDER, text='words', features=('tokens',)))
    np.testing.assert_array_equal(as_text['tokens'], batch['words'])
    stats = input_pipeline.open_data(copy).stats('words')
    sizes = stats.num_tokens, stats.vocabulary, stats.text_max_tokens, stats.text_dim
    assert sizes == (7, 1000, 7, 0)


def test_a_data_set_on_the_hub_is_refused_without_a_request(hub):
    with pytest.raises(ValueError, match=r'^hf://datasets/a/b: expected a local path or gs://'):
        add_column.remove_column('hf://datasets/a/b', 'x')
    assert not hub.requests


BAD = {
    'texts': (
        pa.array(['a', 'b', 'c']),
        r"column 'x' is string, expected integers, floats, or lists",
    ),
    'lists of several lengths': (
        pa.array([[1], [2, 3], [4]]),
        r"column 'x' is list<.*>, expected integers, floats, or lists",
    ),
    'rows of 40,000 bytes': (
        as_lists(np.zeros((3, 5000))),
        r'is fixed_size_list<.*>\[5000\], .* at most 32,768 bytes a row',
    ),
    'nulls alone': (pa.nulls(3, pa.float32()), r"x.parquet: column 'x' is null in every row"),
    'a null among lists': (
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)),
        r'x.parquet: has nulls among lists of a fixed size, which Arrow does not read',
    ),
    'no value for any key of the data set': (
        as_lists(np.zeros((3, 2), np.float32)),
        r'x.parquet: has no value for 1,173 of 1,173 records of',
    ),
}


@pytest.mark.parametrize(('values', 'message'), BAD.values(), ids=BAD)
def test_other_columns_are_refused_and_leave_nothing(copy, tmp_path, values, message):
    before = sorted(copy.iterdir())
    path = write_column(tmp_path / 'x.parquet', 'x', np.array([4, 5, 6]), values)
    with pytest.raises(ValueError, match=message):
        add_column.add(copy, 'y', parquet=path, column='x')
    assert sorted(copy.iterdir()) == before


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
    """Files of columns: with a key twice, of tokens that are one number, and of an unknown word."""
    folder = tmp_path_factory.mktemp('columns')
    write_column(folder / 'twice', 'x', np.array([4, 5, 4]), pa.array([1, 2, 3]))
    write_column(folder / 'single', 'tokens', np.array([4]), pa.array([1]))
    beyond = np.array([[3, 1000]], np.int32)
    write_tokens(folder / 'beyond', np.array([4]), beyond, vocabulary=1000)
    return folder


ONE_ORIGIN = 'expected either text, or parquet or source'
NO_NAME = 'a new column cannot be called'
MISTAKES = {
    'a key that comes twice': (
        {'parquet': 'twice', 'column': 'x'},
        r'1 row repeats the key of another, e\.g\. key 4',
    ),
    'a column that the file lacks': (
        {'parquet': 'twice', 'column': 'z'},
        "has no column 'z'; its columns are key, x",
    ),
    'a file without texts as text': ({'text': 'twice'}, 'has no column'),
    'tokens that are single numbers': (
        {'text': 'single'},
        r"'tokens' is int64, expected a fixed-size list of int32",
    ),
    'a token beyond the vocabulary': (
        {'text': 'beyond'},
        r'has tokens \[3, 1000\], expected ids from 0 to 999',
    ),
    'no origin': ({}, ONE_ORIGIN),
    'a table without a column': ({'parquet': 'twice'}, ONE_ORIGIN),
    'a text with a column': ({'text': 'twice', 'column': 'x'}, ONE_ORIGIN),
    'a column of nothing': ({'column': 'x'}, ONE_ORIGIN),
    'two origins': ({'text': 'twice', 'parquet': 'twice', 'column': 'x'}, ONE_ORIGIN),
    'the name of tokens': ({'name': 'tokens', 'text': 'twice'}, NO_NAME),
    'the name of the mask': ({'name': 'mask', 'text': 'twice'}, NO_NAME),
    'the name of the crop': ({'name': 'crop', 'text': 'twice'}, NO_NAME),
    'the name of the texts in records': ({'name': 'records', 'text': 'twice'}, NO_NAME),
    'a name that leads elsewhere': ({'name': '../x', 'text': 'twice'}, NO_NAME),
    'an empty name': ({'name': '', 'text': 'twice'}, NO_NAME),
    'a name that conditions cannot hold': (
        {'name': 'class', 'parquet': 'twice', 'column': 'x'},
        f"{NO_NAME} 'class', which no condition could name",
    ),
    'a scratch folder in a bucket': (
        {'text': 'twice', 'scratch_dir': 'gs://b/s'},
        "scratch_dir is 'gs://b/s', expected a local folder",
    ),
}


@pytest.mark.parametrize(('arguments', 'message'), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_of_a_command_are_named(mini_dataset, folder, arguments, message):
    arguments = {'name': 'y'} | arguments
    for origin in {'text', 'parquet'} & arguments.keys():
        arguments[origin] = folder / arguments[origin]
    with pytest.raises(ValueError, match=message):
        add_column.add(mini_dataset, **arguments)


def test_a_data_set_in_the_hands_of_another_is_named(copy, tmp_path):
    path = write_column(tmp_path / 'x.parquet', 'x', np.array([4]), pa.array([1]))
    with locks.hold(copy), pytest.raises(TimeoutError, match=f'{copy}: .* is working there'):
        add_column.add(copy, 'y', parquet=path, column='x')


def test_a_command_that_was_killed_is_given_again(tmp_path):
    """At each moment at which a file gets its name, or is removed.

    To replace a column is to remove one and to add one.
    """
    source = made_sources.write_source(tmp_path / 's', [range(40)])
    first, other = (
        made_sources.write_sidecar(
            tmp_path / f'{value}.parquet', {key: np.full(8, value) for key in range(40)}, source
        )
        for value in (1, 2)
    )
    folder = built.build(source, first, tmp_path / 'data')
    add_column.add(folder, 'other', first)
    build = json.loads((folder / schema.METADATA_FILE).read_text())[schema.META_BUILD]
    program = """
        import itertools, os, shutil
        from coyo11m_tfds import add_column, verify
        from coyo11m_tfds.dataset import columns
        from tests import children
        built, copy, embeddings, build = sys.argv[1:]
        os.fsync = int  # it takes long

        def run():
            add_column.add(copy, 'other', embeddings, replace=True)

        for moment in itertools.count():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(built, copy)
            is_killed = children.killed_at(moment, run)
            assert not verify.verify(copy).faults
            column = columns.read_columns(copy, build).get('other')
            print(column and column.mean[0], flush=True)
            if not is_killed:
                break
            run()
            assert not [name for name in os.listdir(copy) if name.startswith('.')]
            checked = verify.verify(copy)
            assert not checked.faults and not checked.unused_files
    """
    arguments = folder, tmp_path / '1.0.0', other, build
    with children.python(program, *arguments, forked=True) as child:
        output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    assert len(output.split()) > 5
    # There is never none, and never one of two in part.
    assert [state for state, _ in itertools.groupby(output.split())] == ['1.0', '2.0']


def test_a_column_is_replaced_and_removed(copy, mini_dataset, hash_sidecar, other_embeddings):
    before = built.files_of(mini_dataset)
    for embeddings in (hash_sidecar, other_embeddings):
        add_column.add(copy, 'other', embeddings, replace=True)
    once = built.files_of(copy)
    add_column.add(copy, 'other', hash_sidecar, replace=True)
    assert not verify.verify(copy).faults
    batch = next(input_pipeline.train_batches(copy, **ORDER, text='other'))
    assert_values(batch[schema.TEXT_EMBEDDING], batch['key'], embeddings_of(hash_sidecar))
    add_column.add(copy, 'other', other_embeddings, replace=True)
    assert built.files_of(copy) == once
    add_column.remove_column(copy, 'other')
    assert not verify.verify(copy).faults
    after = built.files_of(copy)
    assert {name for name in after if after[name] != before.get(name)} <= {*(COLUMNS, CHECKSUMS)}
    for name in ('other', 'latents'):
        with pytest.raises(ValueError, match=rf'{copy}: no column {name!r} was added; there are'):
            add_column.remove_column(copy, name)


def test_a_column_is_verified_with_the_shards(copy, other_embeddings):
    add_column.add(copy, 'other', other_embeddings)
    path = copy / 'column_other-train-3f9a1c20.npy'
    damages.flip(path, 5000)
    assert verify.verify(copy, fast=True).faults == []
    [fault] = verify.verify(copy).faults
    assert 'column_other-train-3f9a1c20.npy: CRC-32C ' in fault and ', row 3 has CRC-32C ' in fault
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    for fast in (False, True):
        [fault] = verify.verify(copy, fast=fast).faults
        assert (
            fault
            == f'column_other-train-3f9a1c20.npy: has {len(data) - 2} bytes, expected {len(data)}'
        )
    shutil.copy(copy / 'column_other-validation-3f9a1c20.npy', path)
    (copy / CHECKSUMS).unlink()
    assert 'column_other-train-3f9a1c20.npy: holds (120,) of ' in verify.verify(copy).faults[-1]


def test_the_command_adds_a_column_once(command, copy, other_embeddings, tmp_path):
    flags = [f'--data_dir={copy}', '--name=other', f'--text={other_embeddings}']
    status, output, errors = command(add_column, *flags)
    assert status == 0, errors
    assert output == f"{copy}: text='other' has float16 (640,) for each record.\n"
    status, _, errors = command(add_column, *flags)
    assert status == 1 and "a new column cannot be called 'other'" in errors
    assert command(add_column, *flags[:2], '--remove')[1] == f"{copy}: column 'other' is removed.\n"
    [keys] = read_all(copy, 'key')
    flags = [f'--data_dir={copy}', f'--parquet={tmp_path}/x.parquet', '--column=x']
    for dtype, is_warned in (('int64', True), ('int32', False)):
        write_column(tmp_path / 'x.parquet', 'x', keys, pa.array(keys.astype(dtype)))
        _, output, errors = command(add_column, *flags, f'--name={dtype}')
        assert f'has {dtype} () for each record' in output, errors
        assert ('hold numbers of at most 32 bits' in output) == is_warned


def test_a_null_is_no_value(copy, tmp_path):
    [keys] = read_all(copy, 'key')
    expected, null = np.arange(2 * len(keys)).reshape(-1, 2), [1, None]
    values = expected.tolist()
    values[7] = values[-1] = null  # one of each split
    kind = pa.list_(pa.int64(), 2)

    def write(values: list, keys: list) -> pathlib.Path:
        path = tmp_path / f'{len(keys)}.parquet'
        return write_column(path, 'x', keys, pa.array(values, kind))

    before = sorted(path.name for path in copy.iterdir())
    with_nulls = write(values, keys.tolist())
    message = rf'for 2 of 1,173 records .* key {keys[7]}, .* Add rows for their keys'
    with pytest.raises(ValueError, match=message):
        add_column.add(copy, 'y', parquet=with_nulls, column='x')
    assert sorted(path.name for path in copy.iterdir()) == before
    # Of keys that the data set does not have nothing is needed.
    whole = write([null, *expected.tolist()], [1, *keys.tolist()])
    add_column.add(copy, 'y', parquet=whole, column='x')
    np.testing.assert_array_equal(read_all(copy, 'y')[0], expected)


DATA = 'gs://data/coyo11m_tfds/hash/1.0.0'


@pytest.fixture
def storage(bucket, mini_dataset):
    bucket.upload_folder(mini_dataset, DATA)
    return bucket


def objects(storage) -> dict[str, bytes]:
    """Of the data set, by name."""
    return {name.rpartition('/')[2]: data for name, data in storage.objects('data').items()}


def test_a_bucket_gets_the_same_files_as_a_disk(storage, copy, other_embeddings, tmp_path):
    before = objects(storage)
    add_column.add(copy, 'other', other_embeddings)
    [part] = other_embeddings.iterdir()
    storage.put('data', 'other.parquet', part.read_bytes())
    storage.clear()
    scratch = str(tmp_path / 'scratch')
    add_column.add(DATA, 'other', 'gs://data/other.parquet', scratch_dir=scratch)
    storage.remove('data', 'other.parquet')
    assert objects(storage) == built.files_of(copy)
    assert objects(storage).keys() - before.keys() == {
        *('column_other-train-3f9a1c20.npy', 'column_other-validation-3f9a1c20.npy', COLUMNS)
    }
    written = [r.path for r in storage.requests if r.action == 'upload' and 'lock' not in r.path]
    assert [path.rpartition('/')[2] for path in written][-2:] == [*(CHECKSUMS, COLUMNS)]
    assert not verify.verify(DATA).faults
    assert not list((tmp_path / 'scratch').glob('column-*'))


def test_a_column_in_a_bucket_is_read_as_from_a_disk(storage, copy, other_embeddings, tmp_path):
    [keys] = read_all(copy, 'key')
    scores = write_column(tmp_path / 'x.parquet', 'x', keys, pa.array(keys // 2))
    for place in (copy, DATA):
        scratch = str(tmp_path / 'scratch')
        add_column.add(place, 'other', other_embeddings, scratch_dir=scratch)
        add_column.add(place, 'half', parquet=scores, column='x', scratch_dir=scratch)
    options = {'features': ('key', 'latents', 'text_embedding', 'half'), 'text': 'other'}
    read = functools.partial(input_pipeline.train_batches, **ORDER, **options, start_step=3)
    storage.clear()
    counter = input_pipeline.ReadCounter()
    batches = read(DATA, counter=counter)
    assert_same(list(itertools.islice(batches, 60)), list(itertools.islice(read(copy), 60)))
    wait_until_idle(counter)
    reads = [request.path for request in storage.requests if request.action == 'read']
    for name in ('other', 'half'):  # at most a request for its header, and one for each chunk
        of_column = sum(f'column_{name}-train' in path for path in reads)
        assert 1 < of_column <= 1 + sum('.tfrecord' in path for path in reads)
    evaluate = functools.partial(input_pipeline.eval_batches, batch_size=32, **options)
    assert_same(list(evaluate(DATA)), list(evaluate(copy)))
    storage.clear()
    next(read(DATA, features=('key',)))
    assert sum('column_' in r.path and r.action == 'read' for r in storage.requests) == 0
