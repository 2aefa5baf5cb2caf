"""Draws captions that are new to its model, beside the true pictures.

    python -m train_lib.demo --workdir=demo/run
    python -m train_lib.demo --workdir=demo/run --part=gender

The captions are those of emoji that `coyo11m_tfds.sample_data` leaves out: one
skin tone of everything that has five (`tone`), a fifth of the couples of two
tones (`pair`), and some occupations as a woman or as a man (`gender`). The
program prints the path of a grid, in which each drawn picture is beside the
artist's own, and a table:

- `exact`: of all emoji, that of the caption is nearest to the drawn picture
  (by the means of 32 x 32 areas)
- `first five`: that of the caption is among the five nearest
- `concept`, `tones`, `gender`: the nearest has those of the caption
- `distance` from that of the caption (root mean square, 0 to 255)

`ceiling` has what comes back if the true pictures become latents and pictures
again, `floor` the most similar emoji that training has shown.
"""

import numpy as np
from absl import flags

from coyo11m_tfds.pictures import emoji
from coyo11m_tfds.process import command_line
from train_lib import run
from train_lib.draw import Artist
from train_lib.lifecycle import workdirs
from train_lib.results import judge, previews, true_pictures
from train_lib.results.judge import Verdicts

FLAGS = flags.FLAGS

ASPECTS = 'concept', 'tones', 'gender'


def list_columns(verdicts: Verdicts, own: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the columns of `judge.write_table`, for emoji with the numbers `own`, int `(n,)`."""
    all_emoji = emoji.read_emoji()
    columns = judge.list_columns(verdicts)
    # It comes last, behind the aspects.
    distance = columns.pop('distance')
    for aspect in ASPECTS:
        is_right = []
        for number, nearest in zip(own, verdicts.nearest, strict=True):
            expected = getattr(all_emoji[number], aspect)
            is_right.append(getattr(all_emoji[nearest], aspect) == expected)
        columns[aspect] = np.array(is_right)
    return columns | {'distance': distance}


def make_judge() -> judge.Judge:
    """Returns the judge whose true pictures are all emoji, in their order."""
    is_known = np.array([one.part == emoji.TRAINING for one in emoji.read_emoji()])
    return judge.Judge(judge.mean_areas(emoji.read_pictures()), is_known)


def main() -> None:
    """Draws captions that are held out, and prints how the pictures compare with the true ones."""
    run.prepare()
    artist = Artist(FLAGS.workdir)
    # Of the run: its name may be followed by a step.
    folder = artist.workdir / previews.FOLDER
    # Before minutes of drawing whose pictures could not be written.
    workdirs.check_writable(folder)
    # The same captions for every run: their order is that of a hash.
    own = np.array(emoji.find_part(FLAGS.part)[: FLAGS.num_prompts])
    captions = [emoji.read_emoji()[number].caption for number in own]
    pictures = artist.draw(captions)
    truth = emoji.read_pictures()[own]
    path = folder / f'held_out_{FLAGS.part}.png'
    previews.write_png(path, previews.make_grid([pictures, truth], captions))

    # `ceiling` and `floor` say what the numbers of the drawn pictures can be.
    jury = make_judge()
    drawn = jury.compare(judge.mean_areas(pictures), own)
    table = {'drawn': list_columns(drawn, own)}
    round_trip = true_pictures.make_round_trip(artist)
    if round_trip is not None:
        returned_areas = judge.mean_areas(round_trip(truth))
        ceiling = jury.compare(returned_areas, own)
        table['ceiling'] = list_columns(ceiling, own)
    floor = jury.find_floor(own)
    if floor is not None:
        table['floor'] = list_columns(floor, own)
    command_line.print_lines(f'pictures: {path}', *judge.write_table(table))


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the training run.')
    flags.DEFINE_enum('part', emoji.HELD_OUT_TONE, list(emoji.HELD_OUT), 'What is held out.')
    flags.DEFINE_integer('num_prompts', 64, 'Captions to draw.', lower_bound=1)
    run.start(main, required=['workdir'])
