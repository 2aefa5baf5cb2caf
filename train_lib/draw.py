"""Draws captions with a trained model.

    python -m train_lib.draw --workdir=W --prompts='a red circle'
    python -m train_lib.draw --workdir=gs://BUCKET/W --prompts=captions.txt \\
        --out=grid.png --step=20000 --guidance=5 --num_steps=100 --seed=1 \\
        --noaverage --encoder=jax:/models/Qwen3-0.6B

`--prompts` is a text file with a caption in each line, or a caption.
Everything else comes from the run's checkpoints, so the program needs neither
the configuration nor the data set nor the machines of the run. It encodes
captions with the encoder of the training data. Give `--encoder` if the data
set does not record the place of this encoder, such as a local folder. Another
encoder is refused.

In Python, and so in a notebook:

    pictures = draw.draw_pictures('W', ['a red circle'], guidance=5)
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from etils import epath
from PIL import Image

from coyo11m_tfds import storage
from coyo11m_tfds.process import command_line
from coyo11m_tfds.storage import file_state
from train_lib import run
from train_lib.lifecycle import workdirs
from train_lib.results import previews, prompt_sets
from train_lib.results.artist import BATCH_SIZE, Artist

FLAGS = flags.FLAGS

# Arguments of `Artist` that flags of the same names replace.
_CHANGES = (
    'average',
    'seed',
    'encoder',
    'vae',
    'guidance',
    'guidance_low',
    'guidance_high',
    'num_steps',
    'sampler',
    'time_shift',
)


def draw_pictures(
    place: epath.PathLike, captions: Sequence[str], **options: Any
) -> list[Image.Image]:
    """Draws one picture for each caption with the checkpoint of `WORKDIR` or `WORKDIR@STEP`.

        pictures = draw_pictures('W', ['a red circle', 'a blue square'], guidance=3, seed=1)

    Takes the options of `Artist`, which draws more captions later without loading it all again.
    Raises a ValueError for a wrong option or encoder, and an OSError without a checkpoint.
    """
    pictures = Artist(place, **options).draw(captions)
    return [Image.fromarray(picture) for picture in pictures]


def artist_of_flags() -> Artist:
    """Returns the artist of the flags that `define_flags` has defined."""
    workdir = workdirs.absolute(FLAGS.workdir)
    names = ['step', 'batch_size']
    names += _CHANGES
    options: dict[str, Any] = {name: FLAGS[name].value for name in names}
    return Artist(workdir, **options)


def main() -> None:
    """Draws the captions of `--prompts` into one picture and, with `--singles`, into several."""
    # Before the imports, which take seconds: a wrong file of captions ends the program at once.
    captions, name = _read_prompts(FLAGS.prompts)
    run.prepare()
    artist = artist_of_flags()
    folder = artist.workdir / previews.FOLDER
    out = FLAGS.out
    # Before minutes of drawing whose pictures could not be written.
    if out:
        out = storage.expand_home(out)
        check_out(out, len(captions) if FLAGS.singles else 0)
    else:
        workdirs.check_writable(folder)
    pictures = artist.draw(captions)
    # A name of its own, so that no picture is replaced.
    if not out:
        out = previews.find_free_path(folder, name, f'{artist.step:06}{_name_changes()}')
    previews.write_png(out, previews.make_grid([pictures], captions))
    places = str(out)
    if FLAGS.singles:
        singles = _name_singles(out)
        _write_singles(singles, pictures, captions)
        places = f'{out} and {singles}/'
    command_line.print_lines(f'pictures: {places}')


def check_out(out: str, num_singles: int) -> None:
    """Checks that `--out` can be written and, of so many single pictures, the folder beside it.

    Raises a ValueError or an OSError if not, and a ValueError if the folder holds other files.
    """
    storage.check_writable_file(out)
    if not num_singles:
        return
    folder = _name_singles(out)
    if folder == epath.Path(out):
        raise ValueError(
            f'--out={out}: expected a name with a suffix, such as {out}.png: the folder of '
            '--singles has the name without it'
        )
    workdirs.check_writable(folder)
    own_names = set[str]()
    for number in range(num_singles):
        own_names.update(_name_single(number))
    # The same command replaces its pictures. Those of more captions would lie among the new ones.
    other_names = storage.list_folder(folder, missing_ok=True).keys() - own_names
    if other_names:
        raise ValueError(
            f'{folder / min(other_names)}: is none of the files of --singles, which would lie '
            'beside it; remove the folder, or choose another --out'
        )


def _name_singles(out: epath.PathLike) -> epath.Path:
    """Returns the folder of single pictures beside the grid `out`."""
    return epath.Path(out).with_suffix('')


def _write_singles(folder: epath.Path, pictures: np.ndarray, captions: Sequence[str]) -> None:
    """Writes each picture and its caption: `00000.png`, `00000.txt` and so on."""
    for number, picture in enumerate(pictures):
        picture_name, caption_name = _name_single(number)
        previews.write_png(folder / picture_name, picture)
        path = folder / caption_name
        with file_state.naming(path):
            path.write_bytes(f'{captions[number]}\n'.encode())


def _name_single(number: int) -> tuple[str, str]:
    """Returns the names of a picture and of its caption."""
    return f'{number:05}.png', f'{number:05}.txt'


def _name_changes() -> str:
    """Returns the changes by flags for the name of a file, such as `_seed=1_vae=sdxl`."""
    parts = []
    for name in _CHANGES:
        if FLAGS[name].present:
            # Of a folder, its last part: a name of a file holds no slash.
            value = os.path.basename(str(FLAGS[name].value))
            parts.append(f'_{name}={value}')
    return ''.join(parts)


def _read_prompts(prompts: str) -> tuple[list[str], str]:
    """Returns the captions of a file or a single one, and a name for their pictures."""
    # A name of a text file that does not exist is a mistake, and no caption.
    has_name_of_file = prompts.startswith('gs://') or prompts.endswith('.txt')
    if has_name_of_file or os.path.exists(storage.expand_home(prompts)):
        path = epath.Path(prompts)
        return prompt_sets.read_captions(path), path.stem
    # As the name of a file.
    words = re.sub(r'\W+', '-', prompts)
    name = words[:50].strip('-')
    return [prompts], name or 'prompt'


def define_flags() -> None:
    """Defines the flags of all programs that draw."""
    flags.DEFINE_string('workdir', None, 'Folder of the training run, local or gs://.')
    flags.DEFINE_string('encoder', '', 'Text encoder; default: that of the data set.')
    flags.DEFINE_string('vae', None, "VAE decoder; default: that of the run's previews.")
    flags.DEFINE_integer('step', None, 'Step of the checkpoint; default: the last.', lower_bound=0)
    flags.DEFINE_bool('average', True, 'Draw with the moving average of the weights.')
    flags.DEFINE_integer('seed', None, "Seed of the noise; default: the run's.", 0, 2**31 - 1)
    flags.DEFINE_float('guidance', None, "Strength of guidance; default: the run's.")
    flags.DEFINE_float('guidance_low', None, "Lowest time of guidance; default: the run's.")
    flags.DEFINE_float('guidance_high', None, "Highest time of guidance; default: the run's.")
    flags.DEFINE_integer('num_steps', None, "Sampler steps; default: the run's.")
    flags.DEFINE_string('sampler', None, "'euler' or 'heun'; default: the run's.")
    flags.DEFINE_float('time_shift', None, "Shift to noisy times; default: the run's.")
    flags.DEFINE_integer('batch_size', BATCH_SIZE, 'Pictures to draw at a time.', lower_bound=1)


if __name__ == '__main__':
    define_flags()
    flags.DEFINE_string('prompts', None, 'Text file with a caption in each line, or a caption.')
    flags.DEFINE_string('out', None, 'PNG file to write or replace; default: in WORKDIR/previews.')
    flags.DEFINE_bool('singles', False, 'Also write each picture and its caption to a folder.')
    run.start(main, required=['workdir', 'prompts'])
