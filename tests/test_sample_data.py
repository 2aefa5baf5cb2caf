"""The made-up data set: the layout of the real one, and pictures that show what they say."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from coyo11m_tfds import sample_data, schema
from coyo11m_tfds.pictures import latent_rgb, one_object
from coyo11m_tfds.source import captions, keyed_values


def _load(folder):
    files = sorted((folder / schema.LATENTS_FOLDER).iterdir())
    parts = [torch.load(file, weights_only=True) for file in files]
    table = pq.read_table(folder / schema.CAPTIONS_FILE).to_pandas()
    return [file.name for file in files], parts, table


@pytest.fixture(scope='module')
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp('sample')
    sample_data.make_sample(folder, num_samples=600, num_files=3, seed=1)
    return folder


def test_the_layout_is_that_of_the_real_source(sample):
    names, parts, table = _load(sample)
    assert names == ['000000-000009.pt', '000010-000019.pt', '000020-000029.pt']
    lengths = [len(part[schema.PT_KEYS]) for part in parts]
    assert sum(lengths) == 600
    assert len(set(lengths)) == 3
    for part, length in zip(parts, lengths, strict=True):
        assert part[schema.PT_KEYS].dtype == torch.int64
        assert part[schema.PT_LATENTS].dtype == torch.float16
        assert part[schema.PT_LATENTS].shape == (length, 3, 4, 32, 32)
    assert table.index.name == 'key'
    assert list(table.columns) == [
        'url', 'caption', 'caption_llava', 'caption_llava_short', 'tags_open_images', 'tags_booru',
    ]  # fmt: skip


def test_keys_are_unique_and_some_lack_a_row_or_a_caption(sample):
    _, parts, table = _load(sample)
    keys = np.concatenate([part[schema.PT_KEYS].numpy() for part in parts])
    assert len(set(keys)) == 600
    assert set(table.index) < set(keys)
    assert not np.array_equal(table.index, [key for key in keys if key in set(table.index)])
    captions = table[schema.DEFAULT_CAPTION_COLUMN]
    assert captions.isna().any()
    assert (captions.str.strip() == '').any()
    assert captions.str.contains(' ').mean() > 0.95


def test_damage_to_its_captions_would_be_noticed(sample, tmp_path):
    path = str(sample / schema.CAPTIONS_FILE)
    captions.join_texts({path: path}, 'caption', str(tmp_path / 'captions'))
    assert keyed_values.KeyedValues(tmp_path / 'captions').facts['has_checksums']


def test_every_crop_shows_what_its_caption_says(sample):
    _, parts, table = _load(sample)
    checked = 0
    for part in parts:
        pictures = latent_rgb.latents_to_rgb(part[schema.PT_LATENTS].float().numpy())
        for key, crops in zip(part[schema.PT_KEYS].numpy(), pictures, strict=True):
            if key not in table.index:
                continue
            colour, background = re.match(r'(\w+)_\w+, (\w+)_', table.tags_booru[key]).groups()
            for crop in crops:
                assert one_object.drawn_colours(crop) == (colour, background)
                checked += 1
    assert checked > 1700


def test_held_out_combinations_are_never_made(sample):
    made, held_out = one_object.split_scenes()
    assert len(made) + len(held_out) == 168
    assert not set(made) & set(held_out)
    _, _, table = _load(sample)
    shown = set(table.tags_booru)
    for [thing], background, _ in held_out:
        assert f'{thing.colour}_{thing.shape}, {background}_background' not in shown


def test_held_out_prompts_name_their_scene_and_repeat_for_a_seed():
    prompts = sample_data.held_out_prompts(64, seed=3)
    assert prompts == sample_data.held_out_prompts(64, seed=3) != sample_data.held_out_prompts(64)
    _, held_out = one_object.split_scenes()
    assert {scene for _, scene in prompts} == set(held_out)
    for caption, ([thing], background, _) in prompts:
        assert f'{thing.colour} {thing.shape}' in caption
        assert f'{background} background' in caption


def test_the_same_seed_gives_the_same_data_and_another_seed_other_data(sample, tmp_path):
    sample_data.make_sample(tmp_path / 'same', num_samples=600, num_files=3, seed=1)
    sample_data.make_sample(tmp_path / 'other', num_samples=12, dtype='bfloat16', seed=2)
    _, parts, table = _load(sample)
    _, same_parts, same_table = _load(tmp_path / 'same')
    _, other_parts, _ = _load(tmp_path / 'other')
    assert table.equals(same_table)
    for part, same, other in zip(parts, same_parts, other_parts, strict=True):
        assert torch.equal(part[schema.PT_LATENTS], same[schema.PT_LATENTS])
        assert other[schema.PT_LATENTS].dtype == torch.bfloat16
        rows = other[schema.PT_LATENTS].float()
        assert not torch.allclose(part[schema.PT_LATENTS][: len(rows)].float(), rows, atol=0.1)


@pytest.mark.parametrize(
    'arguments, message',
    [
        ({'dtype': 'float64'}, "dtype is 'float64'"),
        ({'num_samples': 7, 'num_files': 2}, '7 samples in 2 files'),
        ({'num_files': 0}, 'in 0 files'),
        ({'seed': -1}, 'seed is -1, expected at least 0'),
        ({'scene': 'three'}, "scene is 'three', expected one of"),
        ({'out_dir': 'gs://bucket/source'}, "'gs://bucket/source', expected a local folder"),
        ({'out_dir': ''}, "out_dir is '', expected a local folder"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        sample_data.make_sample(**{'out_dir': tmp_path} | arguments)
    assert not list(tmp_path.iterdir())
