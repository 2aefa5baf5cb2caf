"""Draws emoji as image files with captions, as photographs are.

    sudo apt-get install fonts-noto-color-emoji
    python -m coyo11m_tfds.emoji_photos --out EMOJI --size 128
    python -m coyo11m_tfds.encode_images --images=EMOJI/train --vae=VAE \\
        --out=SOURCE --size=128

The pictures are some 3,800 of Google's Noto Emoji, over white. `EMOJI/train` has
those to train on. `EMOJI/held_out` has one skin tone of everything that has
five, a fifth of the couples of two tones, and an eighth of the occupations as a
woman or as a man: `train_lib.evaluate --truth` compares them with what a model
draws for their captions, which are in each folder's `metadata.jsonl`.
"""

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from coyo11m_tfds import storage
from coyo11m_tfds.images import image_tables
from coyo11m_tfds.pictures import emoji, pixels
from coyo11m_tfds.process import command_line, errors
from coyo11m_tfds.process.sizes import format_count

FONT = '/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf'
TRAINING_FOLDER, HELD_OUT_FOLDER = 'train', 'held_out'
LARGEST = 128  # pixels across, of the pictures in the font

_SIZE_RULE = errors.FieldRule(f'from 16 to {LARGEST}', lambda size: 16 <= size <= LARGEST)
_TABLE, _ = image_tables.NAMES

# The pictures of the font, which come in one size: 136 x 128 pixels, with margins at both sides.
_FONT_SIZE = 109
_ADVANCE, _MARGIN = 136, 4


def draw_emoji(characters: Sequence[str], font: str, size: int) -> dict[str, np.ndarray]:
    """Returns the picture of each emoji, uint8 `(size, size, 3)`, over white.

    Emoji that the font lacks are left out. Raises a ValueError for a font of another kind, and if
    Pillow cannot join the characters of an emoji.
    """
    _SIZE_RULE.check('size', size)
    # Pillow draws without it, too: 'woman' and 'astronaut' as two pictures side by side.
    if not features.check('raqm'):
        raise ValueError(
            'Pillow has no raqm, which joins the characters of an emoji: install its wheel from '
            'the package index (pip install --force-reinstall pillow)'
        )
    try:
        glyphs = ImageFont.truetype(
            storage.expand_home(font), _FONT_SIZE, layout_engine=ImageFont.Layout.RAQM
        )
    except OSError as error:
        raise ValueError(
            f'{font}: {error}; expected the font of Noto Emoji with pictures of {LARGEST} pixels: '
            'install fonts-noto-color-emoji, or name its file by --font'
        ) from error
    pictures = {}
    for text in characters:
        # What the font lacks is wider than one picture, because it is not joined, or is white.
        if round(glyphs.getlength(text)) != _ADVANCE:
            continue
        picture = Image.new('RGB', (LARGEST, LARGEST), 'white')
        draw = ImageDraw.Draw(picture)
        draw.text((-_MARGIN, 0), text, font=glyphs, embedded_color=True)
        # Least and largest value of each channel.
        is_white = picture.getextrema() == ((255, 255),) * 3
        if is_white:
            continue
        # Means of areas; where four pixels make one, these are whole.
        reduced = picture.resize((size, size), Image.Resampling.BOX)
        pictures[text] = np.asarray(reduced)
    if not pictures:
        raise ValueError(f'{font}: has no picture of an emoji, expected the font of Noto Emoji')
    return pictures


def write_photos(out_dir: str | pathlib.Path, size: int, font: str = FONT) -> dict[str, int]:
    """Writes PNG files and tables of captions; returns the number of pictures of each folder.

    `out_dir` is a new local folder. Raises a ValueError for another folder and as `draw_emoji`
    does, and an OSError for a disk that is full or not writable.
    """
    if not storage.local_path(out_dir):
        raise ValueError(f'out is {str(out_dir)!r}, expected a local folder.')
    out_dir = pathlib.Path(storage.expand_home(out_dir))
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ValueError(f'{out_dir} is not empty, expected a new folder: choose another --out')
    all_emoji = emoji.read_emoji()
    # Before any folder is made: a wrong font or size leaves nothing behind.
    pictures = draw_emoji([one.characters for one in all_emoji], font, size)
    tables: dict[str, list[str]] = {TRAINING_FOLDER: [], HELD_OUT_FOLDER: []}
    for folder in tables:
        (out_dir / folder).mkdir(parents=True, exist_ok=True)
    for one in all_emoji:
        picture = pictures.get(one.characters)
        # The font lacks it.
        if picture is None:
            continue
        # A name in plain ASCII, whatever the emoji.
        code_points = [f'{ord(character):x}' for character in one.characters]
        name = f'{"-".join(code_points)}.png'
        folder = HELD_OUT_FOLDER
        if one.part == emoji.TRAINING:
            folder = TRAINING_FOLDER
        path = out_dir / folder / name
        storage.write_file(path, pixels.encode_png(picture))
        # A line of the table, as many tools write and read it.
        line = json.dumps({'file_name': name, 'caption': one.caption})
        tables[folder].append(line)
    for folder, lines in tables.items():
        text = ''.join(f'{line}\n' for line in lines)
        # Last: a folder without its table is one that was not finished.
        storage.write_file(out_dir / folder / _TABLE, text.encode())
    return {folder: len(lines) for folder, lines in tables.items()}


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.emoji_photos', __doc__)
    add = parser.add_argument
    add('--out', required=True, help='new local folder to write')
    add('--size', type=int, default=LARGEST, help='pixels across, 16 to %(default)s')
    add('--font', default=FONT, help='file of the font (%(default)s)')
    args = parser.parse_args()
    outlook = f'{args.out} is incomplete: remove it, then run the same command again'
    with command_line.ends_in_one_line(outlook):
        counts = write_photos(args.out, args.size, args.font)
    for folder, count in counts.items():
        command_line.print_lines(f'{format_count(count, "picture")}: {args.out}/{folder}')


if __name__ == '__main__':
    main()
