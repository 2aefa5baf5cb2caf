"""The data set as TFDS builds and reads it."""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
import torch
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
from coyo11m_tfds.dataset import stored_dataset
from tests import children, made_sources
from tests.built import files_of


def build(folder: pathlib.Path, out: pathlib.Path, options: dict | None = None, **fields):
    """Builds the config `x` and returns the builder that TFDS makes of what is on disk."""
    defaults = {'name': 'x', 'source': str(folder), 'shard_bytes': 500_000, 'num_workers': 1}
    builder = Builder(data_dir=out, config=Coyo11mConfig(**(defaults | fields)))
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(**(options or {})))
    return tfds.builder_from_directory(builder.data_dir)


def read(builder: tfds.core.DatasetBuilder, split: str) -> dict[int, dict]:
    return {int(example['key']): example for example in tfds.as_numpy(builder.as_dataset(split))}


class BuilderTest(tfds.testing.DatasetBuilderTestCase):
    """TFDS' own checks on the four rows of `dummy_data/`."""

    DATASET_CLASS = Builder
    SPLITS = {schema.TRAIN: 2, schema.VALIDATION: 1}  # noqa: RUF012


def test_the_real_sample_is_converted_bit_for_bit(coco_sample, tmp_path, capfd):
    builder = build(coco_sample, tmp_path)

    report = capfd.readouterr().out
    assert '350 records' in report
    assert 'dropped     13 rows (no_row: 7, no_caption: 6)' in report
    dropped = dict.fromkeys(schema.DROP_REASONS, 0) | {'no_row': 7, 'no_caption': 6}
    assert builder.info.metadata['dropped'] == dropped
    examples = read(builder, 'train') | read(builder, 'validation')
    assert len(examples) == builder.info.splits.total_num_examples == 350
    captions = pd.read_parquet(coco_sample / 'coyo11m-meta.parquet')['caption_llava'].fillna('')
    for path in sorted((coco_sample / 'latents-3crop').iterdir()):
        content = torch.load(path, weights_only=True)
        for key, latents in zip(content['keys'].tolist(), content['latents'].numpy(), strict=True):
            if key in examples:
                assert examples[key]['latents'].tobytes() == latents.tobytes()
                assert examples[key]['caption'].decode() == captions[key]
            else:
                assert not captions.get(key, '').strip()


def test_everything_tfds_says_about_the_splits_is_true(mini_dataset):
    builder = tfds.builder_from_directory(mini_dataset)
    for split in builder.info.splits.values():
        files = [mini_dataset / name for name in split.filenames]
        assert split.num_bytes == sum(file.stat().st_size for file in files)
        lengths = [sum(1 for _ in tf.data.TFRecordDataset(str(file))) for file in files]
        assert split.shard_lengths == lengths
    assert builder.info.splits['train'].num_shards == 12
    halves = [read(builder, part) for part in ('train[:50%]', 'train[50%:]')]
    assert not halves[0].keys() & halves[1].keys()
    assert halves[0].keys() | halves[1].keys() == read(builder, 'train').keys()


def test_tfds_load_finds_it_by_name(mini_dataset):
    data_dir = mini_dataset.parents[2]
    data = tfds.load('coyo11m_tfds/hash', split='train', data_dir=data_dir)
    assert data.element_spec == {
        'key': tf.TensorSpec((), tf.int64),
        'latents': tf.TensorSpec((3, 4, 32, 32), tf.float16),
        'caption': tf.TensorSpec((), tf.string),
        'text_embedding': tf.TensorSpec((640,), tf.float16),
    }


def test_the_builders_own_class_reads_what_is_on_disk(tmp_path):
    """It cannot know dtype and width from its config, so it must take them from the files."""
    embeddings = torch.randn(20, 9).bfloat16()
    source = made_sources.write_source(
        tmp_path / 'source', [range(20)], 'bfloat16', {'embeddings': embeddings}
    )
    config = Coyo11mConfig(name='x', source=str(source), text_embeddings='pt', num_workers=1)
    first = Builder(data_dir=tmp_path / 'out', config=config)
    first.download_and_prepare()
    again = Builder(data_dir=tmp_path / 'out', config=config)
    for builder in (first, again):
        spec = builder.as_dataset('train').element_spec
        assert spec['latents'].dtype == tf.bfloat16
        assert spec['text_embedding'].shape == (9,)
        assert builder.info.metadata['text_embedding_dim'] == 9
        assert builder.info.metadata['text_encoder'] == 'pt'
        for key, example in read(builder, 'train').items():
            np.testing.assert_array_equal(example['text_embedding'], embeddings[key].half().numpy())


def test_a_built_data_set_is_reused_unless_it_is_to_be_overwritten(tmp_path):
    embeddings = {'embeddings': torch.ones(20, 4)}
    source = made_sources.write_source(tmp_path / 'source', [range(20)], replace=embeddings)
    build(source, tmp_path / 'out', text_embeddings='pt')
    again = build(source, tmp_path / 'out', text_embeddings='pt')
    assert again.info.splits.total_num_examples == 20

    made_sources.write_source(source, [range(30)], 'bfloat16')
    config = Coyo11mConfig(name='x', source=str(source), num_workers=1)
    again = Builder(data_dir=tmp_path / 'out', config=config)
    assert again.info.metadata['text_encoder'] == 'pt'
    mode = tfds.GenerateMode.REUSE_CACHE_IF_EXISTS
    again.download_and_prepare(download_config=tfds.download.DownloadConfig(download_mode=mode))
    assert again.info.splits.total_num_examples == 30
    assert again.info.metadata['latent_dtype'] == 'bfloat16'
    assert 'text_encoder' not in again.info.metadata
    assert len(read(again, 'train')) == again.info.splits['train'].num_examples


def test_to_remove_the_folder_is_to_have_it_replaced(tmp_path):
    """So `tfds build --overwrite` begins, whatever may go wrong afterwards."""
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    build(source, tmp_path / 'out')
    config = Coyo11mConfig(name='x', source=str(source), shard_bytes=500_000, num_workers=1)
    builder = Builder(data_dir=tmp_path / 'out', config=config)
    builder.data_path.rmtree()
    assert builder.is_prepared()
    made_sources.write_source(source, [range(30)])
    Builder(data_dir=tmp_path / 'out', config=config).download_and_prepare()
    again = tfds.builder_from_directory(builder.data_dir)
    assert again.info.splits.total_num_examples == 30
    (builder.data_path / 'sub').mkdir()
    (builder.data_path / 'sub').rmtree()  # of others nothing is changed
    assert not (builder.data_path / 'sub').exists()


DAMAGED = {
    'dataset_info.json is cut': ('dataset_info.json', b'{"name": ', 'is damaged (Expecting value'),
    'dataset_info.json is of nothing': (
        'dataset_info.json',
        b'{}',
        "is damaged (it lacks 'splits')",
    ),
    'features.json is cut': ('features.json', b'{"name": ', 'is damaged (Expecting value'),
    'features.json is of nothing': ('features.json', b'{}', 'is damaged (it names no features)'),
    'features.json is gone': ('features.json', None, 'is missing'),
    'metadata.json is compressed': (
        'metadata.json',
        b'\x1f\x8b',
        "is damaged ('utf-8' codec can't decode",
    ),
}


@pytest.mark.parametrize(('name', 'content', 'problem'), DAMAGED.values(), ids=DAMAGED)
def test_a_small_file_that_cannot_be_read_is_named_before_a_build(copy, name, content, problem):
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    config = Coyo11mConfig(name='hash')
    with pytest.raises(ValueError, match=f'^{re.escape(f"{copy}/{name}: {problem}")}') as refused:
        Builder(data_dir=copy.parents[2], config=config)
    assert str(refused.value).endswith(f'remove {copy}/dataset_info.json.')
    # As it says, the name is then free for a build.
    (copy / 'dataset_info.json').unlink(missing_ok=True)
    assert not Builder(data_dir=copy.parents[2], config=config).is_prepared()


def test_a_folder_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for data_dir, folder in (('~/x', 'x'), ('./~', '~')):
        data_path = Builder(data_dir=data_dir).data_path
        assert os.fspath(data_path) == f'{tmp_path}/{folder}/coyo11m_tfds/latents/1.0.0'


def test_a_folder_that_tfds_would_rename_is_refused():
    with pytest.raises(ValueError, match=r'^gs://b//x: has several .* one\. Name gs://b/x, or '):
        Builder(data_dir='gs://b//x')
    with pytest.raises(ValueError, match=r'^hf://datasets/a/b: expected a local path or gs://'):
        Builder(data_dir='hf://datasets/a/b')


# Of a data set that was built with max_examples_per_split=10.
OTHER_SETTINGS = {
    'another caption': (
        {'caption_column': 'caption'},
        10,
        "caption_column is 'caption_llava' there, 'caption' ",
    ),
    'smaller shards': ({'shard_bytes': 1000}, 10, 'shard_bytes is 500000 there, 1000 is requested'),
    'latents in place': (
        {'latents': 'in_place'},
        10,
        "latents is 'records' there, 'in_place' is requested",
    ),
    'another VAE': ({'vae': 'flux'}, 10, "vae is '' there, 'flux' is requested"),
    'the embeddings of the source': (
        {'text_embeddings': 'pt'},
        10,
        "text_embeddings is '' there, 'pt' is requested",
    ),
    'embeddings of a file': (
        {'text_embeddings': 'a.parquet'},
        10,
        "text_embeddings is '' there, 'a.parquet' is req",
    ),
    'no limit': ({}, None, 'max_examples_per_split is 10 there, None is requested'),
    'three at once': (
        {'validation_fraction': 0.5, 'bad_data': 'stop', 'caption_column': 'caption'},
        10,
        'settings: bad_data is .*; caption_column is .*; validation_fraction is ',
    ),
}


@pytest.fixture(scope='module')
def source_of_20(tmp_path_factory) -> pathlib.Path:
    return made_sources.write_source(tmp_path_factory.mktemp('of_20') / 'source', [range(20)])


@pytest.fixture(scope='module')
def first_ten(source_of_20) -> pathlib.Path:
    """A folder with a data set of the first ten examples."""
    build(source_of_20, source_of_20.parent / 'out', {'max_examples_per_split': 10})
    return source_of_20.parent / 'out'


@pytest.mark.parametrize(
    ('fields', 'limit', 'message'), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS
)
def test_a_data_set_of_other_settings_is_refused(source_of_20, first_ten, fields, limit, message):
    before = files_of(first_ten)
    with pytest.raises(ValueError, match=f'x/1.0.0 was built with .*{message}') as refused:
        build(source_of_20, first_ten, {'max_examples_per_split': limit}, **fields)
    assert 'another name, or replace the data set with --overwrite' in str(refused.value)
    assert files_of(first_ten) == before


def test_what_does_not_change_the_records_may_differ(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    final = pathlib.Path(build(source, tmp_path / 'out').data_dir)
    other = {'max_bad_fraction': 0.5, 'num_workers': 2}
    build(source, tmp_path / 'out', **other)

    metadata = json.loads((final / 'metadata.json').read_text())
    metadata['settings'] |= {'package_version': '0.0.1', 'of_a_later_version': 1}
    (final / 'metadata.json').write_text(json.dumps(metadata))
    build(source, tmp_path / 'out')
    metadata['settings']['record_format'] += 1
    (final / 'metadata.json').write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match='record_format is 3 there, 2 is requested'):
        build(source, tmp_path / 'out')
    del metadata['settings']  # an earlier version of this package
    (final / 'metadata.json').write_text(json.dumps(metadata))
    build(source, tmp_path / 'out', validation_fraction=0.5)


def test_the_license_is_on_record_and_refuses_no_data_set(tmp_path, caplog):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    rights = {'license': 'cc0-1.0', 'citation': '@misc{a}'}
    final = pathlib.Path(build(source, tmp_path / 'out', **rights).data_dir)
    before = files_of(final)
    assert 'LICENSE' not in before
    stats = stored_dataset.open_data(final).stats()
    assert {'license': stats.license, 'citation': stats.citation} == rights
    for fields, warnings in ({}, 0), ({'license': 'mit'}, 1):
        info = build(source, tmp_path / 'out', **fields).info
        assert (info.redistribution_info.license, info.citation) == ('cc0-1.0', '@misc{a}')
        assert caplog.text.count("license stays 'cc0-1.0', not 'mit', until --over") == warnings
    assert files_of(final) == before


def more(source: pathlib.Path) -> None:
    made_sources.write_pt(made_sources.latents_file(source, 2), range(40, 50))


def fewer(source: pathlib.Path) -> None:
    made_sources.latents_file(source, 1).unlink()


def other_captions(source: pathlib.Path) -> None:
    made_sources.write_captions(source, {key: f'No {key}.' for key in range(40)})


def other_latents(source: pathlib.Path) -> None:
    """Of the same size, as of another VAE."""
    latents = {'latents': made_sources.make_latents(20, seed=9)}
    made_sources.write_pt(made_sources.latents_file(source, 0), range(20), replace=latents)


OTHER_SOURCES = {
    'a file more': (more, '000020-000029.pt is new'),
    'a file less': (fewer, '000010-000019.pt is missing'),
    'other captions': (
        other_captions,
        r'coyo11m-meta.parquet has other contents \([\d,]+ bytes, had',
    ),
    'other latents': (
        other_latents,
        r'000000-000009.pt has other contents \(([\d,]+) bytes, had \1\)',
    ),
    'no source at all': (shutil.rmtree, 'other is not a folder'),
}


@pytest.fixture(scope='module')
def built_of_two(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """A source of two files, and the folder with its data set."""
    folder = tmp_path_factory.mktemp('of_two')
    source = made_sources.write_source(folder / 'source', [range(20), range(20, 40)])
    build(source, folder / 'out')
    return source, folder / 'out'


@pytest.mark.parametrize(('change', 'message'), OTHER_SOURCES.values(), ids=OTHER_SOURCES)
def test_a_data_set_of_another_source_is_refused(built_of_two, tmp_path, change, message):
    source, out = built_of_two
    before = files_of(out)
    place = shutil.copytree(source, tmp_path / 'other')
    change(place)
    with pytest.raises(ValueError, match=f'x/1.0.0 was built from {source}.*{message}') as no:
        build(place, out)
    assert str(place) in str(no.value)
    assert 'another name, or replace the data set with --overwrite' in str(no.value)
    with pytest.raises(ValueError, match=message):
        build(place, out, {'manual_dir': place}, source='')
    assert files_of(out) == before


def test_a_data_set_of_a_source_elsewhere_or_gone_is_taken(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    final = pathlib.Path(build(source, tmp_path / 'out').data_dir)
    before = files_of(final)
    build(shutil.copytree(source, tmp_path / 'copy'), tmp_path / 'out')
    shutil.rmtree(source)
    build(source, tmp_path / 'out', source='')
    assert files_of(final) == before


def test_a_source_in_a_bucket_is_compared_by_its_listing(bucket, tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    bucket.upload_folder(source, 'gs://source/a')
    build('gs://source/a', tmp_path / 'out')
    build(source, tmp_path / 'out')  # the storage's checksums are of another kind
    latents = {'latents': made_sources.make_latents(20, seed=9)}
    made_sources.write_pt(made_sources.latents_file(source, 0), range(20), replace=latents)
    bucket.upload_folder(source, 'gs://source/b')
    with pytest.raises(
        ValueError, match=r'from gs://source/a, not from gs://source/b: .*other con'
    ):
        build('gs://source/b', tmp_path / 'out')


def test_a_sidecar_is_compared_by_what_it_says_about_itself(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    embeddings = {key: np.full(5, key) for key in range(20)}
    sidecar = made_sources.write_sidecar(tmp_path / 'a.parquet', embeddings, source)
    built = build(source, tmp_path / 'out', text_embeddings=str(sidecar))
    assert built.info.metadata['settings']['text_vectors']['encoder'] == 'made-up'
    assert str(tmp_path) not in json.dumps(built.info.metadata['settings'])
    moved = sidecar.rename(tmp_path / 'b.parquet')
    build(source, tmp_path / 'out', text_embeddings=str(moved))
    build(source, tmp_path / 'out', text_embeddings=str(sidecar))  # it is gone
    build(source, tmp_path / 'out', text_embeddings='gs://bucket/a.parquet')  # not asked for
    made_sources.write_sidecar(sidecar, embeddings, source, text_encoder='another')
    with pytest.raises(
        ValueError, match="text_embeddings: encoder is 'made-up' there, 'another' is"
    ):
        build(source, tmp_path / 'out', text_embeddings=str(sidecar))
    with pytest.raises(
        ValueError, match=r"text_embeddings is {.*'made-up'.*} there, '' is requested"
    ):
        build(source, tmp_path / 'out')


def test_a_data_set_that_is_there_needs_no_torch(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    embeddings = {key: np.full(5, key) for key in range(20)}
    sidecar = made_sources.write_sidecar(tmp_path / 'a.parquet', embeddings, source)
    build(source, tmp_path / 'out', text_embeddings=str(sidecar))
    final = tmp_path / 'out' / 'coyo11m_tfds' / 'x' / '1.0.0'
    build_id = json.loads((final / 'metadata.json').read_text())['build']
    left = final / f'building-{build_id}' / 'settings.json'
    left.parent.mkdir()
    left.touch()
    program = """
        sys.modules['torch'] = None
        from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
        config = Coyo11mConfig(name='x', text_embeddings=sys.argv[1], shard_bytes=500_000)
        Builder(data_dir=sys.argv[2], config=config).download_and_prepare()
    """
    with children.python(program, sidecar, tmp_path / 'out') as child:
        _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert not left.parent.exists()


@pytest.mark.parametrize(
    ('fraction', 'expected'), [(0.5, {'train': 3, 'validation': 3}), (0, {'train': 3})]
)
def test_a_limit_of_examples_is_that_of_each_split(tmp_path, fraction, expected):
    """The source is `manual_dir` by default."""
    source = made_sources.write_source(tmp_path / 'source', [range(40)])
    options = {'max_examples_per_split': 3, 'manual_dir': source}
    builder = build(source, tmp_path / 'out', options, source='', validation_fraction=fraction)
    assert {name: s.num_examples for name, s in builder.info.splits.items()} == expected


def test_a_build_in_a_program_shows_its_progress(tmp_path, caplog):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    build(source, tmp_path / 'out')
    assert 'Writing shards: 100%, 1 of 1 shard' in caplog.text
    caplog.clear()
    level = logging.get_absl_logger().level
    logging.set_verbosity(logging.ERROR)
    build(source, tmp_path / 'out', name='y')
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_logger().setLevel(level)
    assert 'Writing shards' not in caplog.text


OPTIONS = {
    'a number of shards': ({'num_shards': 4}, 'num_shards=4 is not supported; set shard_bytes'),
    'duplicates that are ignored': (
        {'ignore_duplicates': True},
        'ignore_duplicates=True is not supported',
    ),
    'no examples': (
        {'max_examples_per_split': 0},
        'max_examples_per_split=0: expected at least 1',
    ),
}


@pytest.mark.parametrize(('options', 'message'), OPTIONS.values(), ids=OPTIONS)
def test_options_without_effect_are_refused(source_of_20, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build(source_of_20, tmp_path / 'out', options)


def test_another_format_of_files_is_refused(source_of_20, tmp_path):
    config = Coyo11mConfig(name='x', source=str(source_of_20))
    builder = Builder(data_dir=tmp_path / 'out', config=config, file_format='array_record')
    with pytest.raises(ValueError, match='file_format=array_record is not supported'):
        builder.download_and_prepare()
