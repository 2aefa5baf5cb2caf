"""Draws captions with a trained model.

    python -m train_lib.draw --config=configs/demo.py --workdir=W \\
        --prompts=captions.txt --out=grid.png

The captions are the lines of a text file. They are encoded as those of the training data were:
`--encoder` has to be given where the data set's metadata does not say it in full, as for a model
in a local folder, and is refused where it is another one.
"""

import functools

import jax
import ml_collections
import numpy as np
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from coyo11m_tfds import preview, text_encoders
from train_lib import checkpoint, previews, process, sharding, workdirs
from train_lib.data import TrainingData
from train_lib.program import make_program

FLAGS = flags.FLAGS


class Artist:
    """The last checkpoint of a run, ready to draw.

    Attributes:
        step: of the checkpoint.
        encoder_name: what made the text vectors that the model learned from.
    """

    def __init__(self, config: ml_collections.ConfigDict, workdir: epath.PathLike):
        """Restores the checkpoint.

        Raises:
            ValueError: there is none in `workdir`.
            OSError: `workdir` does not exist or cannot be read.
            checkpoint.OtherRunError: it was not trained with this configuration.
        """
        workdirs.check_readable(workdir)
        self._mesh = sharding.make_mesh(**config.mesh)
        data = TrainingData(config, self._mesh)
        program = make_program(config, self._mesh, data.stats, latent_shape=data.latent_shape)
        with checkpoint.open_manager(workdir, config.keep_checkpoints) as manager:
            state = checkpoint.restore_state(manager, program.abstract_state, data.identity)
        if state is None:
            raise ValueError(f'{workdir} holds no checkpoint: train first, or name another one.')
        self.step = int(state.step)
        self.encoder_name = data.identity['text_encoder']['name']
        self._draw = functools.partial(program.draw, state.ema_params)

    def draw(self, captions: list[str], encoder: text_encoders.Encoder) -> np.ndarray:
        """Draws one picture a caption, uint8 `(n, H, W, 3)`.

        Raises:
            ValueError: the model was trained with another encoder.
        """
        if encoder.name != self.encoder_name:
            raise ValueError(
                f'the captions are encoded by {encoder.name!r}, but the model was trained with '
                f'{self.encoder_name!r}: name that one with --encoder.'
            )
        text = encoder.encode(captions).astype(np.float16)
        drawn = self._draw(jax.device_put(text, sharding.replicated(self._mesh)))
        return preview.latents_to_rgb(jax.device_get(drawn))


def main(argv: list[str]) -> None:
    """Reads captions and writes the grid."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {argv[1:]}')
    process.prepare()
    with process.errors_in_one_line():
        workdirs.check_writable(epath.Path(FLAGS.out).parent)
        captions = _read_captions(FLAGS.prompts)
        artist = Artist(FLAGS.config, FLAGS.workdir)
        encoder = text_encoders.make_encoder(FLAGS.encoder or artist.encoder_name)
        pictures = artist.draw(captions, encoder)
    previews.write_png(FLAGS.out, previews.make_grid([pictures], captions))
    print(f'pictures: {FLAGS.out}')


def _read_captions(path: str) -> list[str]:
    lines = [line.strip() for line in epath.Path(path).read_text().splitlines()]
    captions = [line for line in lines if line]
    if not captions:
        raise ValueError(f'{path} holds no caption; expected one in each line.')
    return captions


if __name__ == '__main__':
    flags.DEFINE_string('workdir', None, 'Folder of the training run.')
    flags.DEFINE_string('prompts', None, 'Text file with a caption in each line.')
    flags.DEFINE_string('out', None, 'PNG file to write.')
    flags.DEFINE_string('encoder', None, 'Text encoder; by default that of the data set.')
    config_flags.DEFINE_config_file('config', None, 'Configuration of the run.', lock_config=True)
    flags.mark_flags_as_required(['config', 'workdir', 'prompts', 'out'])
    app.run(main)
