"""A grid holds every picture and caption, wherever they have room."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train_lib.results import previews


def _flat(colours):
    """Pictures of one colour each: uint8 `(n, 8, 8, 3)`."""
    return np.broadcast_to(np.asarray(colours, np.uint8)[:, None, None], (len(colours), 8, 8, 3))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 10), st.integers(1, 3))
def test_every_picture_is_in_the_grid_at_four_times_its_size(count, columns):
    number = np.arange(count * columns)
    colours = np.stack([number, 100 + number, np.full_like(number, 77)], axis=-1)
    pictures = [_flat(part) for part in colours.reshape(columns, count, 3)]
    grid = previews.make_grid(pictures, ['a caption'] * count)
    assert grid.dtype == np.uint8
    for colour in colours:
        assert (grid == colour).all(axis=-1).sum() == 32 * 32


def test_a_picture_for_which_there_is_no_room_is_named(tmp_path):
    (tmp_path / 'x.png').symlink_to('/dev/full')
    with pytest.raises(OSError, match='No space left') as error:
        previews.write_png(tmp_path / 'x.png', _flat([(1, 2, 3)])[0])
    assert error.value.filename == str(tmp_path / 'x.png')


def test_a_new_picture_has_a_name_that_a_file_can_have(tmp_path):
    stem = 'a-red-circle_000004_seed=1'
    (tmp_path / f'{stem}-3').mkdir()
    for name in (stem, f'{stem}-2', f'{stem}-4'):
        path = previews.find_free_path(tmp_path, 'a-red-circle', '000004_seed=1')
        assert path.name == f'{name}.png'
        path.touch()
    # The file of prompts may have a name to which nothing can be added.
    for subject in ('x' * 250, '猫' * 80):
        path = previews.find_free_path(tmp_path, subject, f'000004_vae={subject}')
        path.touch()
        assert path.name.startswith(subject[:50]) and f'_000004_vae={subject[:20]}' in path.name


@pytest.mark.parametrize('caption', ['', 'x' * 2000, 'word ' * 400, 'two\nlines', '猫'])
def test_any_caption_fits(caption):
    grid = previews.make_grid([_flat([(1, 2, 3)])], [caption])
    assert grid.shape[1] == 32 + 2 * 8
    assert grid.shape[0] < 200


@pytest.mark.parametrize('side', [1, 3])
def test_a_long_caption_below_a_picture_without_room_for_dots_is_cut(side):
    grid = previews.make_grid([_flat([(1, 2, 3)])[:, :side, :side]], ['a long caption'])
    assert grid.shape[1] == 4 * side + 2 * 8


def test_letters_that_no_font_has_are_told_once(caplog):
    picture = np.zeros((2, 8, 8, 3), np.uint8)
    for _ in range(2):
        previews.make_grid([picture], ['a \U000f0001 cat', 'a \U000f0002\n'])
    told = [line for line in caplog.messages if 'No font here has 2 letters' in line]
    assert len(told) == 1
    assert '\\U000f0001' in told[0]
    caplog.clear()
    previews.make_grid([picture], ['a\x85cat', 'ein\u2028Kätzchen'])
    assert not caplog.messages


@pytest.mark.parametrize('caption', ['ÀÉÎõüß', 'Łódź ğış', 'ΑΒΓ αβγ', 'Привет мир', 'שלום', '“—”…'])
def test_letters_beyond_ascii_are_drawn_as_themselves(caption):
    def drawn(text):
        return previews.make_grid([_flat([(1, 2, 3)] * 1).repeat(8, 2)], [text]).tobytes()

    letters = [letter for letter in caption if letter != ' ']
    pictures = {drawn(letter) for letter in letters}
    assert len(pictures) == len(set(letters))
    assert drawn('\ufffe') not in pictures  # which no font has: a box
