"""Makes the pictures and names of `coyo11m_tfds.pictures.emoji` from Noto Emoji.

    sudo apt-get install fonts-noto-color-emoji      # 2.042
    pip install emoji                                # 2.16
    python docs/emoji_atlas.py

It writes `emoji.webp` and `emoji.tsv`, in a few seconds, and the same bytes with the same versions
of the font, `emoji` and Pillow. Emoji that are newer than the font are left out.
"""

import re

import emoji as names_package
import numpy as np
from PIL import Image

from coyo11m_tfds import emoji_photos
from coyo11m_tfds.pictures import emoji
from coyo11m_tfds.process import command_line

# ':man_dark_skin_tone_red_hair:' is 'man red hair: dark skin tone' in the package.
_TONE = re.compile(r' ?\b(light|medium-light|medium|medium-dark|dark) skin tone')
# Letters of a country's code.
_FIRST_FLAG = '\U0001f1e6'
_LAST_FLAG = '\U0001f1ff'
_TAGGED_FLAG = '\U0001f3f4\U000e0067'  # England, Scotland and Wales


def main() -> None:
    """Writes the files of the package."""
    characters = []
    for text, data in names_package.EMOJI_DATA.items():
        if data['status'] == names_package.STATUS['fully_qualified']:
            characters.append(text)
    pictures = emoji_photos.draw_emoji(characters, emoji_photos.FONT, size=emoji.SIDE)
    lines = []
    for text in pictures:
        lines.append(f'{text}\t{write_caption(text)}\n')
    (emoji.FOLDER / emoji.NAMES_FILE).write_text(''.join(lines), encoding='utf-8')
    atlas = join_pictures(list(pictures.values()))
    atlas.save(emoji.FOLDER / emoji.ATLAS_FILE, lossless=True, quality=100, method=6)
    command_line.print_lines(f'{len(lines)} of {len(characters)} emoji')


def write_caption(text: str) -> str:
    """Returns the name of an emoji, with its skin tones at the end, as Unicode writes them."""
    name = names_package.EMOJI_DATA[text]['en'].strip(':').replace('_', ' ')
    if _FIRST_FLAG <= text[0] <= _LAST_FLAG or text.startswith(_TAGGED_FLAG):
        return f'flag: {name}'
    tones = [f'{tone} skin tone' for tone in _TONE.findall(name)]
    if not tones:
        return name
    return f'{_TONE.sub("", name)}: {", ".join(tones)}'


def join_pictures(pictures: list[np.ndarray]) -> Image.Image:
    """Returns pictures, uint8 `(SIDE, SIDE, 3)`, in rows of one, on white."""
    side = emoji.SIDE
    columns = emoji.ATLAS_COLUMNS
    num_rows = -(-len(pictures) // columns)
    cells = np.full((num_rows * columns, side, side, 3), 255, np.uint8)
    cells[: len(pictures)] = pictures
    rows = cells.reshape(num_rows, columns, side, side, 3).swapaxes(1, 2)
    return Image.fromarray(rows.reshape(num_rows * side, columns * side, 3))


if __name__ == '__main__':
    main()
