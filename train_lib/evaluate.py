"""Measures a model's pictures, or draws pictures for other judges.

    python -m train_lib.evaluate --workdir=W --features=/models/clip
    python -m train_lib.evaluate --workdir=gs://BUCKET/W \\
        --features=openai/clip-vit-base-patch32 --vae=stabilityai/sdxl-vae \\
        --num_pictures=10000 --guidance=3 --step=20000
    python -m train_lib.evaluate --workdir=W --truth=PICTURES
    python -m train_lib.evaluate --workdir=W \\
        --prompts=evaluation_metadata.jsonl

With `--features`, the program draws the captions of the first records of the
validation split as `train_lib.draw` does. It decodes the drawn latents and
those of the records with the same VAE, so that the VAE's errors are in both.
An image encoder of transformers computes features of all pictures. The program
compares these features: CMMD, Fréchet distance and, if the encoder also
encodes texts, CLIP score. It stores features in WORKDIR/evaluation as it
computes them.

With `--truth`, it draws the captions of a folder of pictures that the model
has not seen, and compares each drawn picture with all of the folder by the
means of 32 x 32 areas. Is the nearest its own (`exact`), is its own among the
five nearest, and how far apart are the two (`distance`, root mean square, 0 to
255)? Pictures of `--known`, a folder that the model was trained on, may be
nearest, too. The row `ceiling` has what comes back if the true pictures become
latents and pictures again, `floor` the most similar of the known pictures.

With `--prompts`, it draws the prompts of a text file, of GenEval or of
DPG-Bench into a folder in WORKDIR/evaluation that their own judges read:
`train_lib/results/prompt_sets.py` has the names.

After an interruption, or with a larger `--num_pictures`, the same command
continues. While the run still trains, name the checkpoint by `--step`: the
last one is soon another.
"""

from absl import flags

from coyo11m_tfds.process import command_line
from train_lib import draw, run
from train_lib.lifecycle import workdirs
from train_lib.results import evaluation, judge, prompt_sets, true_pictures
from train_lib.results.evaluation import FOLDER

FLAGS = flags.FLAGS


def main() -> None:
    """Evaluates in the way that one of the flags chooses."""
    # An empty one, as of a variable that is not set, is none.
    ways = list(filter(None, [FLAGS.features, FLAGS.truth, FLAGS.prompts]))
    if len(ways) != 1:
        raise ValueError('expected one of --features, --truth and --prompts')
    if FLAGS.known and not FLAGS.truth:
        raise ValueError('--known needs --truth, whose pictures are compared with those')
    count = FLAGS.pictures_per_prompt
    prompts = []
    # Before the imports, which take seconds: wrong prompts end the program at once.
    if FLAGS.prompts:
        prompts = prompt_sets.read_prompts(FLAGS.prompts, count)
    run.prepare()
    artist = draw.artist_of_flags()
    workdir = artist.workdir
    # Before hours of drawing whose features could not be written.
    workdirs.check_writable(workdir / FOLDER)
    if prompts:
        name = workdirs.absolute(FLAGS.prompts).stem
        folder = prompt_sets.draw_prompts(artist, prompts, count, workdir / FOLDER, name)
        command_line.print_lines(f'pictures: {folder}')
    elif FLAGS.truth:
        compared = true_pictures.compare(
            artist,
            workdir / FOLDER,
            truth=FLAGS.truth,
            known=FLAGS.known,
            most=FLAGS.num_pictures,
        )
        command_line.print_lines(f'pictures: {compared.grid}', *judge.write_table(compared.table))
    else:
        _compare_features(artist)


def _compare_features(artist: draw.Artist) -> None:
    """Prints how drawn pictures compare with those of the data, and the settings of the sampler."""
    count = FLAGS.num_pictures
    data = evaluation.open_validation(FLAGS.data_dir or artist.data_dir, count)
    # It imports torch, which takes seconds: not before the flags and the run are checked.
    from coyo11m_tfds.pictures.image_encoder import ImageEncoder

    image_encoder = ImageEncoder(FLAGS.features)
    result = evaluation.evaluate_pictures(artist, image_encoder, data, artist.workdir, count)
    settings = result.pop('settings')
    for name, value in settings['preview'].items():
        command_line.print_lines(f'{name}: {value}')
    for name, number in result.items():
        command_line.print_lines(f'{name}: {number:.6g}')


if __name__ == '__main__':
    draw.define_flags()
    flags.adopt_module_key_flags(draw)
    flags.DEFINE_string('features', None, 'Image encoder of transformers: a folder or hub name.')
    help_of_prompts = 'Text file, .jsonl of GenEval, or folder of DPG-Bench.'
    flags.DEFINE_string('prompts', None, help_of_prompts)
    help_of_truth = 'Folder of true pictures with captions, as encode_images takes them.'
    flags.DEFINE_string('truth', None, help_of_truth)
    help_of_known = 'Folder of pictures that the model was trained on; they need no captions.'
    flags.DEFINE_string('known', None, help_of_known)
    flags.DEFINE_integer('pictures_per_prompt', 4, 'Pictures of each prompt.', lower_bound=1)
    help_of_data = 'Data set to compare with; default: that of the run. A mixture has no default.'
    flags.DEFINE_string('data_dir', None, help_of_data)
    flags.DEFINE_integer(
        'num_pictures', 10_000, 'Number of records, or of true pictures, to compare.', lower_bound=2
    )
    run.start(main, required=['workdir'])
