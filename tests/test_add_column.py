"""Text vectors that are added to a built data set, and read in the place of its own."""

import itertools
import pathlib
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

import input_pipeline
from coyo11m_tfds import add_column, embed_captions, schema, verify
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
from coyo11m_tfds.reading import dataset
from tests import children, runs
from train_lib import data, sharding

ORDER = dict(batch_size=16, seed=0, lanes=4, chunk=32, window=64)


@pytest.fixture(scope='module')
def other_vectors(sample_source, tmp_path_factory) -> pathlib.Path:
    """Of another column of captions."""
    path = tmp_path_factory.mktemp('other') / 'other.parquet'
    embed_captions.embed(sample_source, 'hash', path, 'caption')
    return path


@pytest.fixture
def copy(mini_dataset, tmp_path) -> pathlib.Path:
    folder = tmp_path / 'coyo11m_tfds' / 'hash' / schema.VERSION
    return pathlib.Path(shutil.copytree(mini_dataset, folder))


def vectors_of(path: pathlib.Path) -> dict[int, np.ndarray]:
    table = pq.read_table(path)
    return dict(
        zip(
            table['key'].to_pylist(),
            np.array(table[schema.TEXT_EMBEDDING].to_pylist(), np.float16),
            strict=True,
        )
    )


def test_a_second_text_column_is_read_and_nothing_else_changes(copy, mini_dataset, other_vectors):
    before = {file.name: file.read_bytes() for file in mini_dataset.iterdir() if file.is_file()}
    column = add_column.add(copy, 'other', other_vectors)
    expected = vectors_of(other_vectors)

    after = {file.name: file.read_bytes() for file in copy.iterdir() if file.is_file()}
    assert {name for name in after if after[name] != before.get(name)} == {
        *('column_other-train.npy', 'column_other-validation.npy'),
        *(schema.COLUMNS_FILE, schema.CHECKSUMS_FILE),
    }
    assert not verify.verify(copy).faults

    steps = input_pipeline.train_order(copy, **ORDER).epoch(0).steps
    arguments = {**ORDER, 'features': dataset.FEATURES, 'caption_dropout': 0.5}
    own, other = (
        list(itertools.islice(input_pipeline.train_batches(copy, text=text, **arguments), steps))
        for text in ('', 'other')
    )
    for batch, with_other in zip(own, other, strict=True):
        for name in batch.keys() - {schema.TEXT_EMBEDDING}:
            np.testing.assert_array_equal(with_other[name], batch[name])
        wanted = [expected[key] for key in batch['key'].tolist()]
        np.testing.assert_array_equal(with_other[schema.TEXT_EMBEDDING], wanted)
        assert not np.array_equal(batch[schema.TEXT_EMBEDDING], wanted)
    held_out = list(input_pipeline.eval_batches(copy, text='other', batch_size=64))
    keys, found, mask = (
        np.concatenate([batch[name] for batch in held_out])
        for name in ('key', schema.TEXT_EMBEDDING, 'mask')
    )
    np.testing.assert_array_equal(found[mask], [expected[key] for key in keys[mask].tolist()])

    trained = input_pipeline.eval_batches(copy, batch_size=64, features=('key',), split='train')
    keys = np.concatenate([batch['key'][batch['mask']] for batch in trained])
    values = np.array([expected[key] for key in keys.tolist()], np.float64)
    stats = dataset.dataset_stats(copy, 'other')
    np.testing.assert_allclose(stats.text_mean, values.mean(axis=0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(stats.text_std, values.std(axis=0), rtol=1e-5, atol=1e-7)
    assert stats.text_dim == column.width == values.shape[1]
    assert dataset.dataset_stats(copy).text_encoder == stats.text_encoder == 'hash'


def test_the_encoder_is_that_of_the_column_in_every_respect(copy, other_vectors, tmp_path):
    table = pq.read_table(other_vectors)
    about = {
        b'text_encoder': b'hf:m',
        b'text_encoder_revision': b'sha256:12',
        b'text_max_tokens': b'77',
    }
    path = tmp_path / 'm.parquet'
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **about}), path)
    add_column.add(copy, 'm', path)
    stats = dataset.dataset_stats(copy, 'm')
    found = stats.text_encoder, stats.text_revision, stats.text_max_tokens
    assert found == ('hf:m', 'sha256:12', 77)


def test_the_command_adds_a_column_once(copy, other_vectors):
    program = """
        import runpy
        sys.argv = ['add_column', *sys.argv[1:]]
        runpy.run_module('coyo11m_tfds.add_column', run_name='__main__')
    """
    flags = [f'--data_dir={copy}', '--name=other', f'--embeddings={other_vectors}']
    for status in (0, 1):
        with children.python(program, *flags) as child:
            output, errors = child.communicate()
        assert child.returncode == status, errors
        if status:
            assert "a new column cannot be called 'other'" in errors
        else:
            assert "text='other' has 640 numbers a record" in output
    assert not verify.verify(copy).faults


def test_records_without_a_vector_are_an_error_and_leave_nothing(copy, other_vectors, tmp_path):
    table = pq.read_table(other_vectors)
    pq.write_table(table.slice(0, len(table) // 2), tmp_path / 'half.parquet')
    before = sorted(path.name for path in copy.iterdir())
    with pytest.raises(ValueError, match=r'half.parquet: has no vector for \d+ of \d+ records of'):
        add_column.add(copy, 'other', tmp_path / 'half.parquet')
    assert sorted(path.name for path in copy.iterdir()) == before


@pytest.mark.parametrize('name', ['text_embedding', 'latents', 'Other', '../x', ''])
def test_a_name_that_cannot_be_is_refused(copy, other_vectors, name):
    with pytest.raises(ValueError, match='a new column cannot be called'):
        add_column.add(copy, name, other_vectors)


def test_what_is_no_local_data_set_is_refused(tmp_path, other_vectors):
    for folder in (tmp_path, 'gs://bucket/d'):
        with pytest.raises(ValueError, match=f'{folder}: is no local data set'):
            add_column.add(folder, 'other', other_vectors)


def test_a_column_that_is_not_there_is_named(copy, other_vectors):
    for read in (input_pipeline.train_batches, input_pipeline.eval_batches):
        order = ORDER if read is input_pipeline.train_batches else {'batch_size': 16}
        with pytest.raises(ValueError, match=r"no text vectors 'other'; besides those .* are \[\]"):
            read(copy, text='other', **order)
    with pytest.raises(ValueError, match="no text vectors 'other'"):
        dataset.dataset_stats(copy, 'other')
    add_column.add(copy, 'other', other_vectors)
    with pytest.raises(ValueError, match="'other' is a column, which engine='rows' alone can read"):
        input_pipeline.train_batches(copy, engine='chunks', text='other', **ORDER)
    shutil.copy(copy / 'column_other-validation.npy', copy / 'column_other-train.npy')
    with pytest.raises(ValueError, match=r'column_other-train.npy: holds float16 .*, expected'):
        input_pipeline.train_batches(copy, text='other', **ORDER)


def test_the_trainer_names_what_was_added_where_records_hold_no_text(
    sample_source, other_vectors, tmp_path
):
    config = Coyo11mConfig(
        name='bare', source=str(sample_source), validation_fraction=0.1, num_workers=1
    )
    builder = Builder(data_dir=tmp_path, config=config)
    builder.download_and_prepare()
    add_column.add(builder.data_dir, 'other', other_vectors)
    with pytest.raises(ValueError, match=r'no text vectors.* --config\.data\.text: other$'):
        data.TrainingData(runs.small_config(builder.data_dir), sharding.make_mesh())


def test_the_trainer_takes_either_text(copy, other_vectors):
    add_column.add(copy, 'other', other_vectors)
    batches = []
    for text in ('', 'other'):
        config = runs.small_config(copy, **{'data.text': text})
        opened = data.TrainingData(config, sharding.make_mesh())
        assert opened.preview_samples.text.shape == (3, 640)
        batches.append(next(opened.train_batches(0)))
        assert opened.facts.stats.text_mean.shape == (640,)
    first, second = batches
    np.testing.assert_array_equal(first['key'], second['key'])
    np.testing.assert_array_equal(first['latents'], second['latents'])
    assert not np.array_equal(first[schema.TEXT_EMBEDDING], second[schema.TEXT_EMBEDDING])
