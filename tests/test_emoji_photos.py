"""Emoji as image files: what a font draws, with captions, in the folders of their parts."""

import json
import os

import numpy as np
import pytest
from PIL import Image, features

from coyo11m_tfds import emoji_photos
from coyo11m_tfds.pictures import emoji

EVERY = 8  # emoji: all of them take seconds


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    if not os.path.exists(emoji_photos.FONT) or not features.check('raqm'):
        pytest.skip(f'{emoji_photos.FONT} or raqm is absent')
    folder = tmp_path_factory.mktemp('photos')
    some = emoji.read_emoji()[::EVERY]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emoji, 'read_emoji', lambda: some)
        return folder, emoji_photos.write_photos(folder, size=64)


def test_files_and_captions_are_those_of_their_parts(photos):
    folder, counts = photos
    parts = {one.caption: one.part for one in emoji.read_emoji()}
    true = dict(zip(parts, emoji.read_pictures(), strict=True))
    assert sum(counts.values()) > 3_500 / EVERY
    for name, is_training in (('train', True), ('held_out', False)):
        lines = (folder / name / 'metadata.jsonl').read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == counts[name] == len(list((folder / name).glob('*.png')))
        assert {parts[row['caption']] == emoji.TRAINING for row in rows} == {is_training}
        for row in rows[::8]:
            picture = Image.open(folder / name / row['file_name'])
            assert picture.size == (64, 64)
            # Fonts of other versions draw a few emoji otherwise.
            difference = np.asarray(picture.reduce(2), int) - true[row['caption']]
            assert np.median(np.abs(difference)) <= 1


def test_a_folder_with_files_stays_as_it_is(photos):
    folder, _ = photos
    with pytest.raises(ValueError, match='is not empty, expected a new folder'):
        emoji_photos.write_photos(folder, size=64)


REFUSED = {
    'too small': (15, emoji_photos.FONT, 'size=15: expected from 16 to 128'),
    'too large': (256, emoji_photos.FONT, 'size=256: expected from 16 to 128'),
    'a font that is not there': (
        64,
        'no.ttf',
        r'no\.ttf: cannot open .* install fonts-noto-color-emoji',
    ),
    'a font without emoji': (64, 'train_lib/fonts/DejaVuSans.ttf', 'no picture of an emoji'),
}


@pytest.mark.parametrize('out', ['gs://bucket/photos', ''])
def test_a_folder_that_is_not_local_is_refused(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"out is '{out}', expected a local folder"):
        emoji_photos.write_photos(out, size=64)


@pytest.mark.parametrize(('size', 'font', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(tmp_path, size, font, message):
    with pytest.raises(ValueError, match=message):
        emoji_photos.write_photos(tmp_path / 'new', size, font)
    assert not (tmp_path / 'new').exists()
