"""Draws captions with a trained model.

    python -m train_lib.draw --workdir=W --prompts=captions.txt
    python -m train_lib.draw --workdir=gs://BUCKET/W --prompts=captions.txt \\
        --out=grid.png --step=20000 --guidance=5 --num_steps=100 --seed=1 \\
        --noaverage --encoder=hf:/models/gemma

The captions are the lines of a text file. Everything else comes from the run's
checkpoints, so the program needs neither the configuration nor the data set
nor the machines of the run. It encodes captions with the encoder of the
training data. Give `--encoder` if the data set does not record the place of
this encoder, such as a local folder. Another encoder is refused.
"""

import functools
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np
from absl import flags
from etils import epath

from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.pictures import vae_decoder
from coyo11m_tfds.storage import json_digest, model_files
from coyo11m_tfds.text.encoder import Encoder, Tokenizer
from train_lib import (
    caption_encoder,
    checkpoint,
    models,
    previews,
    run,
    sharding,
    step,
    workdirs,
)

FLAGS = flags.FLAGS

BATCH_SIZE = 64  # pictures that are drawn at a time


class Artist:
    """A checkpoint of a run, ready to draw on the devices of this process.

    Attributes:
        data_dir: Folder of its training data, local or `gs://`.
        encoder: Folder or hub name of the encoder in the run's step; '' for a run without one.
        paint: Turns raw latents `(n, C, H, W)` into pictures, uint8 `(n, height, width, 3)`.
        settings: Plain values that decide the picture of a caption.
    """

    def __init__(
        self,
        place: epath.PathLike,
        *,
        average: bool = True,
        seed: int | None = None,
        batch_size: int = BATCH_SIZE,
        encoder: str = '',
        vae: str | None = None,
        **changes: float | None,
    ):
        """Finds the checkpoint; the weights are read at their first use.

        Args:
            place: `WORKDIR` of the run, for its last checkpoint, or `WORKDIR@STEP`.
            average: Whether to draw with the moving average of the weights.
            seed: Seed of the noise; None for the run's seed.
            batch_size: Number of pictures to draw at a time, rounded up to a multiple of the
                devices.
            encoder: Folder or hub name of the encoder in the run's step; '' for the run's own.
            vae: VAE that decodes, see `vae_decoder.painter`; None for the VAE of the run's
                previews.
            **changes: Fields that replace those of the run's `config.preview`, such as `guidance`;
                None keeps a field.

        Raises:
            ValueError: The checkpoint does not exist; or as `caption_encoder.load` and
                `vae_decoder.load`.
            OSError: The workdir does not exist or cannot be read.
        """
        self._saved = checkpoint.open_run(place)
        self.step = self._saved.step
        self.facts = DatasetStats.from_json(self._saved.description.facts)
        config = ml_collections.ConfigDict(self._saved.description.config)
        config.preview.update({name: x for name, x in changes.items() if x is not None})
        config.seed = config.seed if seed is None else seed
        vae = config.preview.vae if vae is None else vae
        self.paint = vae_decoder.painter(vae)
        self.data_dir = config.data.dir
        self._mesh = sharding.make_mesh(devices=jax.local_devices())
        self._batch_size = batch_size
        self._average = average
        self.encoder = config.encoder and (encoder or config.encoder)
        self.settings = {
            'step': self.step,
            'average': average,
            'seed': config.seed,
            'config': json_digest.sha256(self._saved.description.config),
            'preview': step.sampling_settings(config.preview),
            'vae': vae and f'{model_files.public_name(vae)} {model_files.revision(vae)}',
        }
        self._draw = self._compile(config)

    def draw(
        self, captions: Sequence[str], encoder: Encoder | Tokenizer, first: int = 0
    ) -> np.ndarray:
        """Draws one picture for each caption, uint8 `(n, H, W, 3)`.

        A picture is a function of the weights, the seed, the caption and its place in the list,
        except for rounding, which depends on the number of pictures drawn at a time.

        Args:
            first: Place of the first caption, if the captions are part of a longer list.

        Raises:
            ValueError: The model was trained with another encoder.
        """
        caption_encoder.check(self.facts, encoder)
        text = caption_encoder.texts(self.facts, encoder, list(captions))
        devices = self._mesh.size
        size = -(-min(self._batch_size, len(text)) // devices) * devices
        pictures = []
        for begin in range(0, len(text), size):
            part = text[begin : begin + size]
            padded = np.pad(part, [(0, size - len(part)), (0, 0)])
            latents = jax.device_get(self._draw(padded, np.int32(first + begin)))
            pictures.append(self.paint(latents[: len(part)]))
        return np.concatenate(pictures)

    @functools.cached_property
    def params(self):
        """The weights, whole on every device."""
        abstract = self._saved.abstract_weights(sharding.replicated(self._mesh))
        return self._saved.restore_weights(abstract, average=self._average)

    def _compile(self, config: ml_collections.ConfigDict):
        """The jitted function; pictures are shared out over the devices, each has all weights."""
        dtype = config.model.dtype
        try:
            encoder = caption_encoder.load(self.encoder, self.facts, self._mesh, dtype=dtype)
        except ValueError as error:
            raise ValueError(
                f'{error}; name the one that the model was trained with by --encoder'
            ) from error
        model = models.make(**config.model, vocabulary=self.facts.vocabulary)
        model = model.clone(pin=sharding.Rows(self._mesh))
        draw = step.make_draw(config, model, self.facts, encoder)
        whole, rows = sharding.replicated(self._mesh), sharding.batch(self._mesh)
        bound = step.bind(draw, encoder, whole, rows, whole, out_shardings=rows)
        return lambda texts, first: bound(self.params, texts, first)


def artist_of_flags() -> Artist:
    """Makes an artist from the flags of `define_flags`; raises the errors of `Artist`."""
    workdir = workdirs.absolute(FLAGS.workdir)
    return Artist(
        workdir if FLAGS.step is None else f'{workdir}@{FLAGS.step}',
        average=FLAGS.average,
        seed=FLAGS.seed,
        batch_size=FLAGS.batch_size,
        encoder=FLAGS.encoder,
        vae=FLAGS.vae,
        guidance=FLAGS.guidance,
        num_steps=FLAGS.num_steps,
    )


def main() -> None:
    """Reads captions and writes the grid."""
    with run.errors_in_one_line():
        prompts = epath.Path(FLAGS.prompts)
        captions = _read_captions(prompts)
    run.prepare()
    with run.errors_in_one_line():
        previews_of_run = workdirs.absolute(FLAGS.workdir) / previews.FOLDER
        folder = epath.Path(FLAGS.out).parent if FLAGS.out else previews_of_run
        workdirs.check_writable(folder)
        artist = artist_of_flags()
        encoder = caption_encoder.make(artist.facts, artist.encoder or FLAGS.encoder)
        pictures = artist.draw(captions, encoder)
        out = FLAGS.out or folder / f'{prompts.stem}_{artist.step:06}.png'
        previews.write_png(out, previews.make_grid([pictures], captions))
        if FLAGS.singles:
            singles = epath.Path(out).with_suffix('')
            previews.write_singles(singles, pictures, captions)
    print(f'pictures: {out}' + (f' and {singles}/' if FLAGS.singles else ''))


def _read_captions(path: epath.Path) -> list[str]:
    try:
        text = path.read_bytes().decode('utf-8-sig')  # some editors begin with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}: byte {error.start} is not UTF-8; save it as UTF-8.') from error
    captions = [caption for line in text.splitlines() if (caption := line.strip())]
    if not captions:
        raise ValueError(f'{path} holds no caption; expected one a line.')
    return captions


def define_flags() -> None:
    """Defines the flags of programs that draw."""
    flags.DEFINE_string('workdir', None, 'Folder of the training run, local or gs://.')
    flags.DEFINE_string('encoder', '', 'Text encoder; default: that of the data set.')
    flags.DEFINE_string('vae', None, "VAE decoder; default: that of the run's previews.")
    flags.DEFINE_integer('step', None, 'Step of the checkpoint; default: the last.', lower_bound=0)
    flags.DEFINE_bool('average', True, 'Draw with the moving average of the weights.')
    flags.DEFINE_integer('seed', None, "Seed of the noise; default: the run's.", 0, 2**31 - 1)
    flags.DEFINE_float('guidance', None, "Strength of guidance; default: the run's.")
    flags.DEFINE_integer('num_steps', None, "Sampler steps; default: the run's.", lower_bound=1)
    flags.DEFINE_integer('batch_size', BATCH_SIZE, 'Pictures drawn at a time.', lower_bound=1)


if __name__ == '__main__':
    define_flags()
    flags.DEFINE_string('prompts', None, 'Text file with a caption in each line.')
    flags.DEFINE_string('out', None, 'PNG file to write; default: in WORKDIR/previews.')
    flags.DEFINE_bool('singles', False, 'Also write each picture and its caption to a folder.')
    run.start(main, required=['workdir', 'prompts'])
