"""The emoji of the package: pictures that belong to their names, and what is held out of them."""

import collections

import numpy as np

from coyo11m_tfds.pictures import emoji
from coyo11m_tfds.pictures.emoji import HELD_OUT_GENDER, HELD_OUT_PAIR, HELD_OUT_TONE, TRAINING


def _picture_of(caption):
    captions = [one.caption for one in emoji.read_emoji()]
    return emoji.read_pictures()[captions.index(caption)]


def _describe(*captions):
    every = emoji.describe_emoji([(f'<{caption}>', caption) for caption in captions])
    return {one.caption: one for one in every}


def test_pictures_belong_to_their_names():
    pictures = emoji.read_pictures()
    assert pictures.shape == (len(emoji.read_emoji()), emoji.SIDE, emoji.SIDE, 3)
    assert len(pictures) > 3_500
    assert not (pictures == 255).all((1, 2, 3)).any(), 'no picture is empty'
    # Their colour in the middle of the picture.
    for caption, colour in (
        ('red circle', (229, 57, 53)),
        ('green square', (124, 179, 66)),
        ('flag: Japan', (190, 0, 45)),
    ):
        middle = _picture_of(caption)[14:18, 14:18].mean((0, 1))
        assert np.abs(middle - colour).max() < 40, caption


def test_a_name_says_what_the_picture_shows():
    names = _describe(
        'woman astronaut: medium-dark skin tone',
        'man astronaut',
        'kiss woman man: light skin tone, dark skin tone',
        'women wrestling',
        'man',
        'family man boy',
        'flag: Isle of Man',
    )
    shown = {caption: one[2:6] for caption, one in names.items()}
    assert shown == {
        'woman astronaut: medium-dark skin tone': (
            'woman astronaut', ('medium-dark',), 'astronaut', 'woman',
        ),
        'man astronaut': ('man astronaut', (), 'astronaut', 'man'),
        'kiss woman man: light skin tone, dark skin tone': (
            'kiss woman man', ('light', 'dark'), 'kiss woman man', '',
        ),
        'women wrestling': ('women wrestling', (), 'wrestling', 'woman'),
        'man': ('man', (), 'man', ''),
        'family man boy': ('family man boy', (), 'family man boy', ''),
        'flag: Isle of Man': ('flag: Isle of Man', (), 'flag: Isle of Man', ''),
    }  # fmt: skip


def test_one_tone_of_every_concept_is_held_out():
    by_concept = collections.defaultdict(list)
    for one in emoji.read_emoji():
        if len(one.tones) == 1 and one.part != HELD_OUT_GENDER:
            by_concept[one.concept].append(one)
    complete = {name: found for name, found in by_concept.items() if len(found) == 5}
    assert len(complete) > 300
    for name, found in complete.items():
        assert [one.part for one in found].count(HELD_OUT_TONE) == 1, name
    held_out = collections.Counter(
        one.tones for found in complete.values() for one in found if one.part == HELD_OUT_TONE
    )
    assert len(held_out) == 5
    assert min(held_out.values()) > 30, 'no tone is rare among those that are held out'


def test_shares_of_pairs_and_genders_are_held_out():
    parts = collections.Counter(one.part for one in emoji.read_emoji())
    pairs = sum(len(set(one.tones)) == 2 for one in emoji.read_emoji())
    assert 0.1 < parts[HELD_OUT_PAIR] / pairs < 0.3
    held_out = {
        (one.activity, one.gender) for one in emoji.read_emoji() if one.part == HELD_OUT_GENDER
    }
    shown = {(one.activity, one.gender) for one in emoji.read_emoji() if one.part == TRAINING}
    assert 5 < len(held_out) < 30
    for activity, gender in held_out:
        other = 'man' if gender == 'woman' else 'woman'
        assert (activity, gender) not in shown
        assert (activity, other) in shown, activity


def test_a_part_depends_on_the_name_alone_and_shows_nothing_that_training_shows():
    every, pictures = emoji.read_emoji(), emoji.read_pictures()
    names = [(one.characters, one.caption) for one in every]
    reversed_parts = {one.caption: one.part for one in emoji.describe_emoji(names[::-1])}
    assert reversed_parts == {one.caption: one.part for one in every}
    trained = {pictures[number].tobytes() for number in emoji.find_part(TRAINING)}
    for part in emoji.HELD_OUT:
        numbers = emoji.find_part(part)
        assert len(set(numbers)) == len(numbers) > 30
        assert {every[number].part for number in numbers} == {part}
        assert not trained & {pictures[number].tobytes() for number in numbers}
