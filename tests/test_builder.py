"""The data set as TFDS builds and reads it."""

import pathlib

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
from tests import made_sources


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


def test_the_real_sample_is_converted_bit_for_bit(coco_sample: pathlib.Path, tmp_path, capfd):
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


@pytest.mark.parametrize('dtype', schema.LATENT_DTYPES)
def test_latents_keep_the_dtype_of_the_source(tmp_path: pathlib.Path, dtype: str):
    source = made_sources.write_source(tmp_path / 'source', [range(20)], dtype)
    builder = build(source, tmp_path / 'out', validation_fraction=0.2)

    assert builder.info.features['latents'].np_dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert builder.info.metadata['latent_dtype'] == dtype
    content = torch.load(made_sources.latents_file(source, 0), weights_only=True)
    examples = read(builder, 'train') | read(builder, 'validation')
    assert len(examples) == 20
    for key, latents in zip(content['keys'].tolist(), content['latents'], strict=True):
        assert examples[key]['latents'].tobytes() == latents.view(torch.uint8).numpy().tobytes()


def test_text_vectors_of_a_sidecar_are_joined_by_key(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(20), range(20, 30)])
    rng = np.random.default_rng(0)
    vectors = {int(key): rng.normal(size=7).astype(np.float16) for key in rng.permutation(30)}
    sidecar = made_sources.write_sidecar(tmp_path / 'x.parquet', vectors)

    builder = build(source, tmp_path / 'out', text_vectors=str(sidecar))

    assert builder.info.features['text_embedding'].shape == (7,)
    for key, example in read(builder, 'train').items():
        np.testing.assert_array_equal(example['text_embedding'], vectors[key])
        assert example['caption'] == f'Caption of {key}.'.encode()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_text_vectors_inside_the_pt_files_are_used_if_asked_for(tmp_path, dtype: torch.dtype):
    embeddings = torch.randn(20, 9).to(dtype)
    source = made_sources.write_source(
        tmp_path / 'source', [range(20)], replace={'embeddings': embeddings}
    )
    made = build(source, tmp_path / 'out', name='with', text_vectors='pt')
    assert made.info.metadata['text_encoder'] == 'pt'
    for key, example in read(made, 'train').items():
        np.testing.assert_array_equal(example['text_embedding'], embeddings[key].half().numpy())

    assert 'text_embedding' not in build(source, tmp_path / 'out', name='without').info.features


def test_everything_tfds_says_about_the_splits_is_true(mini_dataset: pathlib.Path):
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


def test_tfds_load_finds_it_by_name(mini_dataset: pathlib.Path):
    data_dir = mini_dataset.parents[2]
    data = tfds.load('coyo11m_tfds/hash', split='train', data_dir=data_dir)
    assert data.element_spec == {
        'key': tf.TensorSpec((), tf.int64),
        'latents': tf.TensorSpec((3, 4, 32, 32), tf.float16),
        'caption': tf.TensorSpec((), tf.string),
        'text_embedding': tf.TensorSpec((640,), tf.float16),
    }


def test_the_builders_own_class_reads_what_is_on_disk(tmp_path: pathlib.Path):
    """It cannot know dtype and width from its config, so it must take them from the files."""
    embeddings = torch.ones(20, 9)
    source = made_sources.write_source(
        tmp_path / 'source', [range(20)], 'bfloat16', {'embeddings': embeddings}
    )
    config = Coyo11mConfig(name='x', source=str(source), text_vectors='pt', num_workers=1)
    first = Builder(data_dir=tmp_path / 'out', config=config)
    first.download_and_prepare()
    again = Builder(data_dir=tmp_path / 'out', config=config)
    for builder in (first, again):
        spec = builder.as_dataset('train').element_spec
        assert spec['latents'].dtype == tf.bfloat16
        assert spec['text_embedding'].shape == (9,)
        assert builder.info.metadata['text_embedding_dim'] == 9


def test_a_built_data_set_is_reused_unless_it_is_to_be_overwritten(tmp_path: pathlib.Path):
    vectors = {'embeddings': torch.ones(20, 4)}
    source = made_sources.write_source(tmp_path / 'source', [range(20)], replace=vectors)
    build(source, tmp_path / 'out', text_vectors='pt')
    made_sources.write_source(source, [range(30)], 'bfloat16')

    again = build(source, tmp_path / 'out', text_vectors='pt')
    assert again.info.splits.total_num_examples == 20

    config = Coyo11mConfig(name='x', source=str(source), num_workers=1)
    again = Builder(data_dir=tmp_path / 'out', config=config)
    assert again.info.metadata['text_encoder'] == 'pt'
    mode = tfds.GenerateMode.REUSE_CACHE_IF_EXISTS
    again.download_and_prepare(download_config=tfds.download.DownloadConfig(download_mode=mode))
    assert again.info.splits.total_num_examples == 30
    assert again.info.metadata['latent_dtype'] == 'bfloat16'
    assert 'text_encoder' not in again.info.metadata
    assert len(read(again, 'train')) == again.info.splits['train'].num_examples


def test_the_same_source_gives_the_same_files(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(40), range(40, 60)])
    made = [build(source, tmp_path / name, validation_fraction=0.2) for name in 'ab']
    files = [
        {path.name: path.read_bytes() for path in pathlib.Path(builder.data_dir).iterdir()}
        for builder in made
    ]
    assert files[0] == files[1]
    assert {'dataset_info.json', 'features.json', 'metadata.json'} < files[0].keys()
    assert {'chunk_index-train.npy', 'chunk_index-validation.npy'} < files[0].keys()


def test_without_a_validation_fraction_there_is_one_split(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    builder = build(source, tmp_path / 'out', validation_fraction=0)
    assert list(builder.info.splits) == ['train']


def test_manual_dir_is_the_source_by_default(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    builder = build(source, tmp_path / 'out', {'manual_dir': source}, source='')
    assert builder.info.splits.total_num_examples == 20


def test_a_limit_of_examples_is_honoured(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(40)])
    builder = build(
        source, tmp_path / 'out', {'max_examples_per_split': 3}, validation_fraction=0.5
    )
    assert {name: s.num_examples for name, s in builder.info.splits.items()} == {
        'train': 3,
        'validation': 3,
    }


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'num_shards': 4}, 'num_shards=4 is not supported; set shard_bytes'),
        ({'max_shard_size': 1 << 20}, 'max_shard_size=1048576 is not supported; set shard_bytes'),
        ({'ignore_duplicates': True}, 'ignore_duplicates=True is not supported'),
        ({'max_examples_per_split': 0}, 'max_examples_per_split=0: expected at least 1'),
    ],
)
def test_options_without_effect_are_refused(tmp_path: pathlib.Path, options: dict, message: str):
    source = made_sources.write_source(tmp_path / 'source', [range(5)])
    with pytest.raises(ValueError, match=message):
        build(source, tmp_path / 'out', options)


def test_other_file_formats_are_refused(tmp_path: pathlib.Path):
    source = made_sources.write_source(tmp_path / 'source', [range(5)])
    config = Coyo11mConfig(name='x', source=str(source))
    builder = Builder(data_dir=tmp_path / 'out', config=config, file_format='array_record')
    with pytest.raises(ValueError, match='file_format=array_record is not supported'):
        builder.download_and_prepare()


def test_it_can_be_mocked_before_it_is_built(tmp_path: pathlib.Path):
    config = Coyo11mConfig(name='x', text_vectors='pt')
    with tfds.testing.mock_data(num_examples=3):
        data = tfds.load('coyo11m_tfds', split='train', data_dir=tmp_path)
        with_text = Builder(data_dir=tmp_path, config=config).as_dataset(split='train')
    assert {example['latents'].shape for example in tfds.as_numpy(data)} == {(3, 4, 32, 32)}
    assert len(list(data)) == 3
    assert with_text.element_spec['text_embedding'].shape == (schema.DEFAULT_TEXT_DIM,)
