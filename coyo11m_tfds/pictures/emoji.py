"""Emoji: some 3,800 small pictures by artists, with their names, which the sample is made of.

    emoji = read_emoji()
    emoji[0].caption, read_pictures()[0]

The pictures are those of Google's Noto Emoji, the names are those of Unicode. Pictures of a few
people in a few skin tones are held out, by a hash of their names. A model that has seen neither can
only draw them if it has learned what the words mean, and the artists' own pictures tell how well.
"""

import collections
import functools
import hashlib
import io
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE = 32  # pixels
TONES = ('light', 'medium-light', 'medium', 'medium-dark', 'dark')

# Parts. Of each picture that is not of `TRAINING`, training shows others of the same kind.
TRAINING = 'training'
HELD_OUT_TONE = 'tone'  # one skin tone of everything that has five
HELD_OUT_PAIR = 'pair'  # a fifth of the couples of two different tones
HELD_OUT_GENDER = 'gender'  # an eighth of the occupations, as a woman or as a man
HELD_OUT = (HELD_OUT_TONE, HELD_OUT_PAIR, HELD_OUT_GENDER)

_PAIR_SHARE = 1 / 5
_GENDER_SHARE = 1 / 8

FOLDER = pathlib.Path(__file__).parent / 'noto_emoji'
ATLAS_FILE = 'emoji.webp'  # rows of `ATLAS_COLUMNS` pictures, without a loss
NAMES_FILE = 'emoji.tsv'  # the characters and the caption of each, in the order of the atlas
ATLAS_COLUMNS = 62

# 'woman astronaut: dark skin tone', 'kiss: light skin tone, dark skin tone', 'flag: Guatemala'.
_TONE = re.compile(r'([a-z-]+) skin tone')
_GENDERS = {
    'woman': 'woman',
    'women': 'woman',
    'man': 'man',
    'men': 'man',
    'person': 'person',
    'people': 'person',
}


class Emoji(NamedTuple):
    """What an emoji shows."""

    characters: str
    caption: str  # 'woman astronaut: dark skin tone'
    concept: str  # 'woman astronaut': the caption without its tones
    tones: tuple[str, ...]  # of `TONES`; none, one, or those of two people
    activity: str  # 'astronaut': the concept without its gender
    gender: str  # 'woman', 'man' or 'person'; '' where the name says none
    part: str  # `TRAINING`, or why it is held out


def describe_emoji(names: Sequence[tuple[str, str]]) -> list[Emoji]:
    """Returns what each emoji shows, and its part, of the characters and captions of all."""
    # First the genders of all: whether one is held out depends on the others.
    genders = collections.defaultdict(set)
    for _, caption in names:
        concept, _ = _split_caption(caption)
        activity, gender = _split_concept(concept)
        genders[activity].add(gender)
    emoji = []
    for characters, caption in names:
        concept, tones = _split_caption(caption)
        activity, gender = _split_concept(concept)
        part = TRAINING
        if _is_held_out_gender(activity, gender, genders[activity]):
            part = HELD_OUT_GENDER
        elif _is_held_out_tone(concept, tones):
            part = HELD_OUT_TONE
        elif _is_held_out_pair(concept, tones):
            part = HELD_OUT_PAIR
        emoji.append(Emoji(characters, caption, concept, tones, activity, gender, part))
    return emoji


def _split_caption(caption: str) -> tuple[str, tuple[str, ...]]:
    """Returns concept and tones."""
    tones = tuple(_TONE.findall(caption))
    concept = caption
    # Flags have a colon, too, and no tones.
    if tones:
        concept, _, _ = caption.rpartition(': ')
    return concept, tones


def _split_concept(concept: str) -> tuple[str, str]:
    """Returns activity and gender of a concept that is one person, or several of one gender."""
    words = concept.split(' ')
    people = [word for word in words if word in _GENDERS]
    # 'kiss woman man' and 'family man boy' have no single gender, 'man' is no activity.
    if len(people) != 1 or len(words) == 1 or words[0] == 'family':
        return concept, ''
    words.remove(people[0])
    return ' '.join(words), _GENDERS[people[0]]


def _is_held_out_gender(activity: str, gender: str, genders: set[str]) -> bool:
    """Whether the activity of a gender is held out; `genders` are all that it has."""
    # Training must show the activity by the other gender.
    if not {'woman', 'man'} <= genders:
        return False
    if _fraction(f'gender of {activity}') >= _GENDER_SHARE:
        return False
    held_out = 'woman' if _fraction(f'which gender of {activity}') < 1 / 2 else 'man'
    return gender == held_out


def _is_held_out_tone(concept: str, tones: tuple[str, ...]) -> bool:
    """Whether a single tone is the one of five in which its concept is held out."""
    if len(tones) != 1:
        return False
    held_out = int(_fraction(f'tone of {concept}') * len(TONES))
    return tones[0] == TONES[held_out]


def _is_held_out_pair(concept: str, tones: tuple[str, ...]) -> bool:
    """Whether a couple of two different tones is held out."""
    if len(set(tones)) != 2:
        return False
    return _fraction(f'pair of {concept} {" ".join(tones)}') < _PAIR_SHARE


def _fraction(name: str) -> float:
    """Returns a number in [0, 1) that depends on the name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little') / 2**64


@functools.cache
def read_emoji() -> list[Emoji]:
    """Returns all emoji of the package, in the order of `read_pictures`."""
    lines = (FOLDER / NAMES_FILE).read_text(encoding='utf-8').splitlines()
    names = []
    for line in lines:
        characters, caption = line.split('\t')
        names.append((characters, caption))
    return describe_emoji(names)


@functools.cache
def read_pictures() -> np.ndarray:
    """Returns the pictures of all emoji, over white, uint8 `(n, 32, 32, 3)`; do not write to it."""
    data = (FOLDER / ATLAS_FILE).read_bytes()
    image = Image.open(io.BytesIO(data)).convert('RGB')
    atlas = np.asarray(image)
    # From rows of pixels to rows of pictures.
    rows = atlas.reshape(-1, SIDE, ATLAS_COLUMNS, SIDE, 3).swapaxes(1, 2)
    pictures = rows.reshape(-1, SIDE, SIDE, 3)
    # The last row of the atlas is not full.
    pictures = pictures[: len(read_emoji())]
    # All callers share it, because it is read once.
    pictures.flags.writeable = False
    return pictures


def find_part(part: str) -> list[int]:
    """Returns the numbers of the emoji of a part, in an order that is random and always the same.

    What training shows under another name, too, tells nothing and is left out of other parts.
    """
    emoji = read_emoji()
    pictures = read_pictures()
    trained = set()  # contents of the pictures that training shows
    if part != TRAINING:
        trained = {pictures[number].tobytes() for number in find_part(TRAINING)}
    numbers = []
    for number, one in enumerate(emoji):
        if one.part == part and pictures[number].tobytes() not in trained:
            numbers.append(number)
    return sorted(numbers, key=lambda number: _fraction(emoji[number].caption))
