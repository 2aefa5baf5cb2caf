"""The judge of the demo: what true pictures, and pictures of something else, are found to show."""

import numpy as np
import pytest

from coyo11m_tfds.pictures import emoji
from train_lib import demo
from train_lib.results import judge


@pytest.fixture(scope='module')
def jury():
    return demo.make_judge()


def _judge(jury, drawn, own):
    """What is right of pictures of the emoji `drawn` for the captions of `own`."""
    areas = judge.mean_areas(emoji.read_pictures()[drawn])
    own = np.array(own)
    columns = demo.list_columns(jury.compare(areas, own), own)
    return {name: values.mean() for name, values in columns.items()}


def _find(**fields):
    every = enumerate(emoji.read_emoji())
    return [n for n, one in every if all(getattr(one, name) == x for name, x in fields.items())]


@pytest.mark.parametrize('part', emoji.HELD_OUT)
def test_true_pictures_are_right_in_all(jury, part):
    own = emoji.find_part(part)
    right = _judge(jury, own, own)
    assert right.pop('distance') < 0.1
    assert list(right) == ['exact', 'first five', 'concept', 'tones', 'gender']
    assert right.pop('concept') > 0.97  # a few emoji look alike
    assert right.pop('gender') > 0.97
    assert set(right.values()) == {1}


@pytest.mark.parametrize(
    ('wrong', 'drawn', 'own'),
    [
        ('tones', {'concept': 'woman astronaut', 'tones': ('dark',)}, ('light',)),
        ('gender', {'concept': 'man astronaut', 'tones': ('light',)}, ('light',)),
        ('concept', {'concept': 'woman judge', 'tones': ('light',)}, ('light',)),
    ],
)
def test_pictures_of_another_emoji_are_wrong_in_that(jury, wrong, drawn, own):
    right = _judge(jury, _find(**drawn), _find(concept='woman astronaut', tones=own))
    are_right = {name: bool(right[name]) for name in demo.ASPECTS}
    # Another gender is another concept, too.
    expected_wrong = {wrong, 'concept'} if wrong == 'gender' else {wrong}
    assert {name for name, is_right in are_right.items() if not is_right} == expected_wrong
    assert right['exact'] == 0
    assert right['distance'] > 5


def test_the_floor_has_the_concept_in_another_tone(jury):
    own = np.array(emoji.find_part(emoji.HELD_OUT_TONE))
    floor = demo.list_columns(jury.find_floor(own), own)
    assert floor['exact'].mean() == 0
    assert floor['concept'].mean() > 0.9
    assert floor['tones'].mean() < 0.1
