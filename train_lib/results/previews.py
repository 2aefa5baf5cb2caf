"""Lays out the model's pictures with their captions, and writes them as PNG."""

import functools
import importlib.util
import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging
from etils import epath
from PIL import Image, ImageDraw, ImageFont

from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import file_state

FOLDER = 'previews'  # of a run's workdir

_NAME = re.compile(r'step_(\d{6,})\.png')
_PNG = b'\x89PNG\r\n\x1a\n'  # the first bytes of every file of this kind

_MAX_NAME_BYTES = 240  # of a picture, without a number and suffix; file systems allow about 255
_MAX_SUBJECT_BYTES = 150  # of what it shows, so that what follows in the name has room, too

# Pictures of fewer pixels across than `_LARGE` are enlarged: 32 become 128.
_LARGE = 64
_SCALE = 4
_MARGIN = 8  # pixels between and around the pictures
_FONT_SIZE = 12
_MAX_LINES = 7  # of a caption; a longer one is cut short

# A title has this share of the grid's width as its height: TensorBoard shrinks every grid to the
# same small width.
_TITLE_SHARE = 1 / 28

# What DejaVu lacks, above all Chinese, Japanese and Korean, is taken from the first of these that
# is installed: as the package of the extra `fonts`, or with the fonts of the system.
_CJK_PACKAGE = 'noto_cjk_sans_otc'
_CJK_FILE = 'NotoSansCJK-Regular.ttc'
_OTHER_FILES = (_CJK_FILE, 'DroidSansFallbackFull.ttf', 'wqy-zenhei.ttc')


def path_of_step(workdir: epath.Path, step: int) -> epath.Path:
    """Returns the path of the grid that a run draws after a step."""
    return workdir / FOLDER / f'step_{step:06}.png'


def is_of_run(path: epath.Path) -> bool:
    """Returns whether a path has the form of `path_of_step`; other pictures may lie there, too."""
    return bool(_NAME.fullmatch(path.name))


def find_free_path(folder: epath.Path, subject: str, ending: str) -> epath.Path:
    """Returns the path of a new picture: `SUBJECT_ENDING.png`, `SUBJECT_ENDING-2.png` and so on.

    Long names are cut, each of the two for itself.
    """
    stem = _cut(f'{cut_subject(subject)}_{ending}', _MAX_NAME_BYTES)
    path = folder / f'{stem}.png'
    number = 1
    # Nor one that a run will draw: prompts may be called `step`, too. A folder of the name may hold
    # single pictures, to which those of the new picture would be added.
    while path.exists() or is_of_run(path) or path.with_suffix('').exists():
        number += 1
        path = folder / f'{stem}-{number}.png'
    return path


def cut_subject(subject: str) -> str:
    """Returns the beginning of what a file or folder shows, which fits into its name."""
    return _cut(subject, _MAX_SUBJECT_BYTES)


def _cut(name: str, num_bytes: int) -> str:
    """Returns the beginning of a name that takes at most so many bytes in a file system."""
    return os.fsencode(name)[:num_bytes].decode('utf-8', 'ignore')


def find_nearest(workdir: epath.Path, step: int) -> tuple[int, bytes] | None:
    """Returns the step and the PNG of the grid that a run drew nearest to a step, if it drew any.

    Of two that are equally near it is the earlier one.
    """
    folder = workdir / FOLDER
    if not folder.exists():
        return None
    steps = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            steps.append(int(match[1]))
    by_distance = sorted(steps, key=lambda other: (abs(other - step), other))
    for nearest in by_distance:
        path = path_of_step(workdir, nearest)
        content = path.read_bytes() if path.is_file() else b''
        # A run that was killed may have left a file that is none.
        if content.startswith(_PNG):
            return nearest, content
    return None


def make_grid(
    pictures: Sequence[np.ndarray], captions: Sequence[str], title: str = ''
) -> np.ndarray:
    """Lays out a cell for each caption, in about as many columns as rows.

    Args:
        pictures: Pictures, uint8 `(n, H, W, 3)` each; every one of these arrays gives one picture
            to each cell.
        captions: Captions, which stand below the pictures.
        title: A line above all cells; '' for none.

    Returns:
        One picture, uint8 `(height, width, 3)`.
    """
    # Once for all captions, and before they are drawn: the boxes in a picture explain nothing.
    _check_letters(captions)
    cells = []
    for *cell_pictures, caption in zip(*pictures, captions, strict=True):
        cells.append(_make_cell(cell_pictures, caption))
    num_columns = math.ceil(math.sqrt(len(cells)))
    rows = []
    for first in range(0, len(cells), num_columns):
        cells_of_row = cells[first : first + num_columns]
        rows.append(_join_pictures(cells_of_row, axis=1))
    if title:
        # The last row may have fewer cells.
        width = max(row.shape[1] for row in rows)
        rows.insert(0, _write_title(title, width))
    margins = (_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0)
    return np.pad(_join_pictures(rows, axis=0), margins, constant_values=255)


def write_png(path: epath.PathLike, picture: np.ndarray) -> None:
    """Writes a picture, uint8 `(height, width, 3)`, to a local or `gs://` path."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_state.naming(path):
        path.write_bytes(pixels.encode_png(picture))


def _write_title(title: str, width: int) -> np.ndarray:
    """Returns a picture of the title of a grid of a width in pixels."""
    size = max(_FONT_SIZE, round(width * _TITLE_SHARE))
    # A title may be longer than a narrow grid, which then grows.
    width_of_title = _FONT_SIZE * len(title)
    return _write_lines([title], max(width, width_of_title), 'gray', size)


def _make_cell(pictures: Sequence[np.ndarray], caption: str) -> np.ndarray:
    """Returns pictures in a row, with their caption below."""
    row = _join_pictures([_enlarge(picture) for picture in pictures], axis=1)
    width = row.shape[1]
    lines = _wrap(caption, width)
    text = _write_lines(lines, width, 'black')
    return np.concatenate([row, text])


def _write_lines(
    lines: Sequence[str], width: int, colour: str, size: int = _FONT_SIZE
) -> np.ndarray:
    """Returns a picture of lines of text on white; `size` is that of the font in pixels."""
    line_height = round(1.25 * size)
    height = line_height * len(lines) + _MARGIN // 2
    image = Image.new('RGB', (width, height), 'white')
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        # By their baseline: the heights of two fonts differ.
        x = 0.0
        baseline = _MARGIN // 2 + number * line_height + size
        for font, letters in _split_by_font(line, size):
            draw.text((x, baseline), letters, colour, font, anchor='ls')
            x += font.getlength(letters)
    return np.asarray(image)


def _wrap(caption: str, width: int) -> list[str]:
    """Breaks a caption into lines of at most `width` pixels: between words, else anywhere."""
    lines = ['']
    for word in re.findall(r'\S+', caption):
        longer_line = f'{lines[-1]} {word}'
        if _text_width(longer_line) <= width:
            # The first word of a line has nothing before it.
            lines[-1] = longer_line.lstrip()
            continue
        # A word longer than a line, as in languages without spaces, is broken anywhere.
        lines.append('')
        for letter in word:
            if _text_width(lines[-1] + letter) > width:
                lines.append('')
            lines[-1] += letter
    # The first line is empty where its first word did not fit.
    lines = list(filter(None, lines))
    if len(lines) > _MAX_LINES:
        lines = lines[:_MAX_LINES]
        # Shortened until the dots fit behind it; below the smallest pictures they fit nowhere.
        last = lines.pop()
        while last and _text_width(f'{last} ...') > width:
            last = last[:-1]
        lines.append(f'{last} ...')
    return lines or ['(no caption)']


def _text_width(text: str) -> float:
    """Returns the pixels that a line of a caption takes."""
    return sum(font.getlength(letters) for font, letters in _split_by_font(text, _FONT_SIZE))


def _split_by_font(text: str, size: int) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
    """Yields stretches of a text, each with the first font that has its letters."""
    fonts = _load_fonts(size)
    for number, letters in itertools.groupby(text, _find_font):
        # What no font has is a box of the first one.
        yield fonts[number or 0], ''.join(letters)


@functools.cache
def _find_font(letter: str) -> int | None:
    """Returns the number of the first font that has a letter; None if none has."""
    for number, font in enumerate(_load_fonts(_FONT_SIZE)):
        # A font draws a letter that it lacks like a code point without a letter.
        if _draw_letter(font, letter) != _draw_letter(font, '\uffff'):
            return number
    return None


def _draw_letter(font: ImageFont.FreeTypeFont, letter: str) -> tuple[tuple[int, int], bytes]:
    """Returns the size and the pixels of a letter."""
    mask = font.getmask(letter)
    return mask.size, bytes(mask)


def _check_letters(captions: Sequence[str]) -> None:
    """Warns of letters of captions that no font has."""
    # Those of words: spaces of no kind are drawn.
    words = ' '.join(captions).split()
    letters = set(''.join(words))
    # In one order, so that equal letters are the same argument.
    missing = [letter for letter in sorted(letters) if _find_font(letter) is None]
    if missing:
        _warn_of_missing(''.join(missing))


@functools.cache  # the same captions are drawn again and again
def _warn_of_missing(letters: str) -> None:
    """Warns of letters that no font has."""
    logging.warning(
        'No font here has %s of the captions in the previews, such as %r; the extra '
        "`fonts` brings Chinese, Japanese and Korean (pip install -e '.[fonts]').",
        format_count(len(letters), 'letter'),
        letters[:10],
    )


@functools.cache
def _load_fonts(size: int) -> list[ImageFont.FreeTypeFont]:
    """Returns DejaVu Sans, and a font with further letters if one is installed."""
    dejavu = pathlib.Path(__file__).parents[1] / 'fonts' / 'DejaVuSans.ttf'
    fonts = [ImageFont.truetype(dejavu, size)]
    files = list(_OTHER_FILES)
    # First the package: the user has installed it for this.
    package = importlib.util.find_spec(_CJK_PACKAGE)
    if package and package.origin:
        file_of_package = pathlib.Path(package.origin).with_name(_CJK_FILE)
        files.insert(0, str(file_of_package))
    for file in files:
        try:
            fonts.append(ImageFont.truetype(file, size))
            break
        except OSError:  # not installed
            continue
    return fonts


def _enlarge(picture: np.ndarray) -> np.ndarray:
    """Returns a picture, enlarged if it is small."""
    image = Image.fromarray(picture)
    if image.width >= _LARGE:
        return picture
    size = image.width * _SCALE, image.height * _SCALE
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


def _join_pictures(pictures: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Puts pictures next to one another on white, with a margin between them.

    Below each other along the axis 0, side by side along the axis 1.
    """
    sizes = [picture.shape[:2] for picture in pictures]
    largest = np.max(sizes, axis=0)
    last = len(pictures) - 1
    padded = []
    for number, picture in enumerate(pictures):
        # Across the axis, all become as large as the largest; along it, each gets the margin.
        pad = largest - sizes[number]
        pad[axis] = 0 if number == last else _MARGIN
        widths = [(0, pad[0]), (0, pad[1]), (0, 0)]
        padded.append(np.pad(picture, widths, constant_values=255))
    return np.concatenate(padded, axis)
