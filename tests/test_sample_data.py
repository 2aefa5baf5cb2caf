"""The sample: the layout of the real source, and pictures that show what their captions say."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from coyo11m_tfds import sample_data, schema
from coyo11m_tfds.pictures import emoji, latent_rgb
from coyo11m_tfds.source import captions, keyed_values


def _load(folder):
    files = sorted((folder / schema.LATENTS_FOLDER).iterdir())
    parts = [torch.load(file, weights_only=True) for file in files]
    table = pq.read_table(folder / schema.CAPTIONS_FILE).to_pandas()
    return [file.name for file in files], parts, table


def _texts_of(table):
    """The captions by key, without those that are empty."""
    captions = table[schema.DEFAULT_CAPTION_COLUMN].dropna()
    return captions[captions.str.strip() != ''].to_dict()


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
    assert captions.str.contains(' ').mean() > 0.8


def test_damage_to_its_captions_would_be_noticed(sample, tmp_path):
    path = str(sample / schema.CAPTIONS_FILE)
    captions.join_texts({path: path}, 'caption', str(tmp_path / 'captions'))
    assert keyed_values.KeyedValues(tmp_path / 'captions').facts['has_checksums']


def test_every_crop_shows_the_emoji_of_its_caption(sample):
    _, parts, table = _load(sample)
    texts = _texts_of(table)
    true = {one.caption: n for n, one in enumerate(emoji.read_emoji())}
    checked = 0
    for part in parts:
        pictures = latent_rgb.latents_to_rgb(part[schema.PT_LATENTS].float().numpy()).astype(int)
        for key, crops in zip(part[schema.PT_KEYS].numpy(), pictures, strict=True):
            if key not in texts:
                continue
            left, middle, right = crops
            expected = emoji.read_pictures()[true[texts[key]]].astype(int)
            # float16 rounds the latents.
            assert np.abs(middle - expected).max() <= 2
            assert np.abs(left[:, 1:] - expected[:, :-1]).max() <= 2
            assert np.abs(right[:, :-1] - expected[:, 1:]).max() <= 2
            checked += 1
    assert checked > 570


def test_what_is_held_out_is_never_shown(sample):
    _, _, table = _load(sample)
    training = {one.caption for one in emoji.read_emoji() if one.part == emoji.TRAINING}
    assert set(_texts_of(table).values()) <= training


def test_each_emoji_is_shown_before_one_comes_again(tmp_path):
    training = len(emoji.find_part(emoji.TRAINING))
    assert sample_data.make_sample(tmp_path / 'all') == training
    _, parts, _ = _load(tmp_path / 'all')
    latents = np.concatenate([part[schema.PT_LATENTS].numpy() for part in parts])
    different = {emoji.read_pictures()[n].tobytes() for n in emoji.find_part(emoji.TRAINING)}
    assert len({x.tobytes() for x in latents[:, 1]}) == len(different)
    sample_data.make_sample(tmp_path / 'more', num_samples=training + 5)
    _, parts, table = _load(tmp_path / 'more')
    assert table.caption.value_counts().max() == 2
    assert (table.caption.value_counts() == 2).sum() <= 5


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


REFUSED = {
    'a dtype of no latents': (
        {'dtype': 'float64'},
        "dtype is 'float64', expected one of float16, bfloat16, float32",
    ),
    'samples that do not fill the files': (
        {'num_samples': 7, 'num_files': 2},
        '7 samples in 2 files',
    ),
    'no files': ({'num_files': 0}, 'in 0 files'),
    'a negative seed': ({'seed': -1}, 'seed is -1, expected at least 0'),
    'a folder in a bucket': (
        {'out_dir': 'gs://bucket/source'},
        "'gs://bucket/source', expected a local folder",
    ),
    'no folder': ({'out_dir': ''}, "out_dir is '', expected a local folder"),
}


@pytest.mark.parametrize('arguments, message', REFUSED.values(), ids=REFUSED)
def test_values_out_of_range_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        sample_data.make_sample(**{'out_dir': tmp_path} | arguments)
    assert not list(tmp_path.iterdir())


def test_what_others_have_written_stays_alone(tmp_path):
    (tmp_path / schema.ENCODING_FILE).touch()
    with pytest.raises(ValueError, match='is not empty, expected a new folder'):
        sample_data.make_sample(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
