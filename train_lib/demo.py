"""Draws captions that are new to the demo's model, and judges them.

    python -m train_lib.demo --workdir=demo/run

The captions are combinations of colour, shape and background that
`coyo11m_tfds.sample_data` leaves out of the data. The program prints the path
of the pictures and the shares of those that show what their captions say: the
colours of shape and background, the shape, and all three.
"""

from absl import flags
from etils import epath

from coyo11m_tfds import sample_data
from coyo11m_tfds.process import command_line
from train_lib import previews, run, workdirs
from train_lib.draw import Artist

FLAGS = flags.FLAGS


def main() -> None:
    run.prepare()
    # The same captions for every run: their seed is fixed.
    captions, scenes = zip(
        *sample_data.held_out_prompts(FLAGS.num_prompts, scene=FLAGS.scene), strict=True
    )
    folder = epath.Path(FLAGS.workdir) / previews.FOLDER
    workdirs.check_writable(folder)
    pictures = Artist(FLAGS.workdir).draw(captions)
    path = folder / 'held_out.png'
    previews.write_png(path, previews.make_grid([pictures], captions))

    command_line.print_lines(f'pictures: {path}')
    for name, is_right in sample_data.WORLDS[FLAGS.scene].score_pictures(pictures, scenes).items():
        share = f'{is_right.mean():.2f} ({is_right.sum()}/{len(scenes)})'
        command_line.print_lines(f'{name} right: {share}')


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the training run.')
    flags.DEFINE_enum('scene', 'one', list(sample_data.WORLDS), 'That of the sample data.')
    flags.DEFINE_integer('num_prompts', 64, 'Captions to draw.', lower_bound=1)
    run.start(main, required=['workdir'])
