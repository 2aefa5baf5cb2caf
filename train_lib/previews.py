"""Pictures of what the model draws, with their captions, as one PNG.

    grid = previews.make_grid([data, drawn], captions, title='left: data, right: model')
    previews.write_png(workdir / previews.FOLDER / 'step_000500.png', grid)

No VAE is needed: latents become small pictures by a linear map (`coyo11m_tfds.preview`).
"""

import io
import math
import textwrap
from collections.abc import Sequence

import numpy as np
from etils import epath
from PIL import Image, ImageDraw, ImageFont

FOLDER = 'previews'  # of a run's workdir

_SCALE = 4  # a 32-pixel picture becomes 128 pixels wide
_MARGIN = 8  # pixels between and around the pictures
_FONT_SIZE = 12
_LINE_HEIGHT = 15
_MAX_LINES = 7  # of a caption; a longer one is cut short


def make_grid(
    pictures: Sequence[np.ndarray], captions: Sequence[str], title: str = ''
) -> np.ndarray:
    """Lays out a cell for each caption: its pictures side by side, the caption below them.

    Args:
        pictures: arrays uint8 `(n, H, W, 3)`; each gives one picture to every cell.
        captions: n strings. The font knows Latin letters; others become boxes.
        title: above the cells.

    Returns:
        uint8 `(height, width, 3)`.
    """
    cells = [_make_cell(cell, caption) for *cell, caption in zip(*pictures, captions, strict=True)]
    across = math.ceil(math.sqrt(len(cells)))
    rows = [_join(cells[i : i + across], axis=1) for i in range(0, len(cells), across)]
    if title:
        rows.insert(0, _write_lines([title], _FONT_SIZE * len(title), 'gray'))
    return _pad(_join(rows, axis=0), _MARGIN, _MARGIN)


def write_png(path: epath.PathLike, picture: np.ndarray) -> None:
    """Writes uint8 `(height, width, 3)` to a local or `gs://` path; makes its folder."""
    encoded = io.BytesIO()
    Image.fromarray(picture).save(encoded, 'PNG')
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded.getvalue())


def _make_cell(pictures: Sequence[np.ndarray], caption: str) -> np.ndarray:
    joined = _join([_enlarge(picture) for picture in pictures], axis=1)
    width = joined.shape[1]
    return np.concatenate([joined, _write_lines(_wrap(caption, width), width, 'black')])


def _write_lines(lines: Sequence[str], width: int, colour: str) -> np.ndarray:
    image = Image.new('RGB', (width, _LINE_HEIGHT * len(lines) + _MARGIN // 2), 'white')
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((0, _MARGIN // 2 + number * _LINE_HEIGHT), line, colour, _font())
    return np.asarray(image)


def _wrap(caption: str, width: int) -> list[str]:
    """Breaks a caption into lines of about `width` pixels."""
    letters = 'abcdefghijklmnopqrstuvwxyz '
    characters = int(width / _font().getlength(letters) * len(letters))
    lines = textwrap.wrap(caption, characters, max_lines=_MAX_LINES, placeholder=' ...')
    return lines or ['(no caption)']


def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(_FONT_SIZE)


def _enlarge(picture: np.ndarray) -> np.ndarray:
    image = Image.fromarray(picture)
    size = (image.width * _SCALE, image.height * _SCALE)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


def _join(pictures: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Puts pictures next to one another, a margin between them, at the upper left of each place."""
    other = 1 - axis
    extent = max(picture.shape[other] for picture in pictures)
    padded = []
    for number, picture in enumerate(pictures):
        after = [0, 0]
        after[other] = extent - picture.shape[other]
        after[axis] = _MARGIN if number + 1 < len(pictures) else 0
        padded.append(_pad(picture, (0, after[0]), (0, after[1])))
    return np.concatenate(padded, axis=axis)


def _pad(picture: np.ndarray, rows, columns) -> np.ndarray:
    """Adds white pixels; `rows` and `columns` as in `numpy.pad`."""
    pairs = [np.broadcast_to(amount, 2) for amount in (rows, columns)]
    return np.pad(picture, [*pairs, (0, 0)], constant_values=255)
