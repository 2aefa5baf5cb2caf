"""Asks the demo's model for what it has never seen, and measures what it draws.

    python -m train_lib.demo --workdir=demo/run

The captions are those of combinations of colour, shape and background that
`coyo11m_tfds.sample_data` leaves out of the data. Prints where the pictures
are, and the share of them in which the shape has the caption's colour and
stands on the caption's background, in which the shape is the caption's, and in
which all three are right (see `demo_scores`).
"""

from absl import flags
from etils import epath

from coyo11m_tfds import sample_data
from train_lib import caption_encoder, demo_scores, previews, process, workdirs
from train_lib.draw import Artist

FLAGS = flags.FLAGS

NUM_PROMPTS = 64


def main() -> None:
    """Draws, measures and prints."""
    process.prepare()
    captions, scenes = zip(*sample_data.held_out_prompts(NUM_PROMPTS), strict=True)
    folder = epath.Path(FLAGS.workdir) / previews.FOLDER
    with process.errors_in_one_line():
        workdirs.check_writable(folder)
        artist = Artist(FLAGS.workdir)
        pictures = artist.draw(captions, caption_encoder.make(artist.facts))
        path = folder / 'held_out.png'
        previews.write_png(path, previews.make_grid([pictures], captions))

    scores = demo_scores.judge(pictures, scenes)
    print(f'pictures: {path}')
    for name in ('colours', 'shape', 'all_three'):
        share = getattr(scores, name)
        count = round(NUM_PROMPTS * share)
        print(f'{name.replace("_", " ")} right: {share:.2f} ({count}/{NUM_PROMPTS})')


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the training run.')
    process.run(main, required=['workdir'])
