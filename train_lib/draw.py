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

import functools
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import ml_collections
import numpy as np
from absl import flags, logging
from etils import epath
from PIL import Image

from coyo11m_tfds import storage
from coyo11m_tfds.dataset import word_list
from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.pictures import vae_decoder
from coyo11m_tfds.process import command_line, jax_environment
from coyo11m_tfds.process.errors import FieldError, at_least
from coyo11m_tfds.storage import file_state, json_digest, model_files
from coyo11m_tfds.text import text_encoders
from coyo11m_tfds.text.text_encoders import (
    DEFAULT_MAX_TOKENS,
    Encoder,
    HashEncoder,
    Tokenizer,
    split_words,
)
from train_lib import (
    caption_encoder,
    checkpoint,
    config_rules,
    models,
    previews,
    run,
    sharding,
    workdirs,
)
from train_lib.step import bind, make_draw, sampling_settings

FLAGS = flags.FLAGS

BATCH_SIZE = 64  # pictures that are drawn at a time

# Arguments of `Artist` that flags of the same names replace.
_CHANGES = (
    *('average', 'seed', 'encoder', 'vae', 'guidance', 'guidance_low', 'guidance_high'),
    *('num_steps', 'sampler', 'time_shift'),
)

_IN_PT = 'pt'  # embeddings that came with the latents, from an encoder that nothing names
_OF_FOLDER = 'sha256:'  # how the revision of a model in a local folder begins


class Artist:
    """A checkpoint of a run, ready to draw on the devices of this process.

    Its `workdir` is the run's, without a step. Its `settings` are plain values that decide the
    picture of a caption; its `encoder` names the text encoder, '' stands for that of the data set;
    `vae` is the decoder, '' the linear map; `facts` are those of the training data;
    `paint` turns raw latents `(n, C, H, W)` into pictures, uint8 `(n, height, width, 3)`.
    """

    def __init__(
        self,
        place: epath.PathLike,
        *,
        step: int | None = None,
        average: bool = True,
        seed: int | None = None,
        batch_size: int = BATCH_SIZE,
        encoder: str = '',
        vae: str | None = None,
        **changes: float | str | None,
    ):
        """Opens a checkpoint, see `checkpoint.open_run`; reads the weights when needed.

        `encoder` is a folder or hub name. `changes` replace fields of the run's `config.preview`,
        such as `guidance`; '' and None keep the run's values.
        """
        jax_environment.check()
        self._saved = checkpoint.open_run(place, step)
        self.workdir, self.step = self._saved.workdir, self._saved.step
        self.facts = DatasetStats.from_json(self._saved.description.facts)
        config = ml_collections.ConfigDict(self._saved.description.config)
        changes = {f'preview.{name}': value for name, value in changes.items()}
        _change_fields(config, changes | {'seed': seed})
        at_least(1).check('batch_size', batch_size)
        # The run's own values were checked when it began: this checks the changes.
        config_rules.check_config(config, needs_data=False)
        self.vae: str = config.preview.vae if vae is None else vae
        self.paint = vae_decoder.make_painter(
            self.vae, self.facts.latents_shape[1], self.facts.vae, self.facts.latent_scale
        )
        self.data_dir = config.data.dir
        self.encoder = encoder or config.encoder
        self.batch_size = batch_size
        self._mesh = sharding.make_mesh(devices=jax.local_devices())
        self._average = average
        self.settings = {
            'step': self.step,
            'average': average,
            'seed': config.seed,
            'config': json_digest.sha256(self._saved.description.config),
            'preview': sampling_settings(config.preview),
            'vae': _describe_vae(self.vae),
        }
        # Only where there is something to say: the settings name what `evaluate` stores.
        if environment := jax_environment.describe():
            self.settings['environment'] = environment
        self._draw_batch = self._compile(config)

    def draw(
        self,
        captions: Sequence[str],
        encoder: Encoder | Tokenizer | None = None,
        first: int = 0,
    ) -> np.ndarray:
        """Draws one picture for each caption, uint8 `(n, H, W, 3)`; None is `text_encoder`.

        A picture is a function of the weights, the seed, the caption and its place in the list
        (`first` is that of the first caption), except for rounding. Raises a ValueError for
        anything else than captions.
        """
        captions = _list_captions(captions)
        encoder = self.text_encoder if encoder is None else encoder
        check_text_encoder(self.facts, encoder)
        texts = encode_captions(self.facts, encoder, captions)
        devices = self._mesh.size
        size = -(-min(self.batch_size, len(texts)) // devices) * devices
        pictures = []
        for start in range(0, len(texts), size):
            batch = texts[start : start + size]
            # The last batch is padded, or it would be compiled for a size of its own.
            padded = np.pad(batch, [(0, size - len(batch)), (0, 0)])
            latents = jax.device_get(self._draw_batch(padded, np.int32(first + start)))
            pictures.append(self.paint(latents[: len(batch)]))
        return np.concatenate(pictures)

    @functools.cached_property
    def picture_shape(self) -> tuple[int, int]:
        """Height and width of a picture in pixels."""
        _, *shape = self.facts.latents_shape
        _, height, width, _ = self.paint(np.zeros((1, *shape), np.float32)).shape
        return height, width

    @functools.cached_property
    def text_encoder(self) -> Encoder | Tokenizer:
        """The encoder, or the tokenizer, that made the texts of the training data."""
        return load_caption_encoder(self.facts, self.encoder)

    @functools.cached_property
    def params(self):
        """The weights, whole on every device."""
        replicated = sharding.replicated(self._mesh)
        return self._saved.restore_weights(replicated, average=self._average)

    def _compile(self, config: ml_collections.ConfigDict):
        """The jitted function; pictures are shared out over the devices, each has all weights."""
        dtype = config.model.dtype
        try:
            encoder = caption_encoder.load_step_encoder(
                config.encoder and self.encoder, self.facts, self._mesh, dtype=dtype
            )
        except ValueError as error:
            raise ValueError(
                f'{error}; with --encoder, name the one that the model was trained with'
            ) from error
        model = models.make_model(**config.model, vocabulary=self.facts.vocabulary)
        # Weights whole on every device, pictures shared out: no exchange within a step.
        model = model.clone(pin=sharding.RowPinning(self._mesh))
        draw = make_draw(config, model, self.facts, encoder)
        replicated, rows = sharding.replicated(self._mesh), sharding.batch(self._mesh)
        draw_rows = bind(draw, encoder, replicated, rows, replicated, out_shardings=rows)
        return lambda texts, first: draw_rows(self.params, texts, first)


def _describe_vae(vae: str) -> str:
    if not vae:
        return ''
    return f'{model_files.public_name(vae)} {model_files.revision(vae)}'


def _change_fields(config: ml_collections.ConfigDict, changes: Mapping[str, Any]) -> None:
    """Changes fields of a configuration, as `preview.guidance`; None stands for the run's value."""
    values = config_rules.flatten_fields(config.to_dict())
    for name, value in changes.items():
        if value is None:
            continue
        if name not in values:
            raise FieldError(name, value, 'there is no such field')
        # A bool would be taken for a number.
        problem = f'expected a value of the kind of {values[name]!r}'
        if isinstance(value, bool):
            raise FieldError(name, value, problem)
        try:
            config.update_from_flattened_dict({name: value})
        except TypeError as error:
            raise FieldError(name, value, problem) from error


def draw_pictures(
    place: epath.PathLike, captions: Sequence[str], **options: Any
) -> list[Image.Image]:
    """Draws one picture for each caption with the checkpoint of `WORKDIR` or `WORKDIR@STEP`.

        pictures = draw_pictures('W', ['a red circle', 'a blue square'], guidance=3, seed=1)

    Takes the options of `Artist`, which draws more captions later without loading it all again.
    Raises a ValueError for a wrong option or encoder, and an OSError without a checkpoint.
    """
    return [Image.fromarray(picture) for picture in Artist(place, **options).draw(captions)]


# --- Captions ---------------------------------------------------------------------------------


def load_caption_encoder(facts: DatasetStats, spec: str = '') -> Encoder | Tokenizer:
    """Loads the encoder, or the tokenizer, that made the texts of a data set.

    `spec` names it; with '' the metadata of the data set do, which do not hold a local folder.
    """
    if not (facts.vocabulary or facts.text_dim):
        raise ValueError(
            'the model was trained without text and knows no captions; its pictures are in the '
            f'folder {previews.FOLDER} of the run.'
        )
    expected = facts.text_encoder
    if not spec and expected == _IN_PT:
        raise ValueError(
            'the text embeddings came with the latents, and the data set does not name the encoder '
            'that made them: name it with --encoder.'
        )
    if not spec and facts.text_revision.startswith(_OF_FOLDER):
        runner, _, folder = expected.partition(':')
        raise ValueError(
            f'the model was trained on text embeddings of {expected}, whose files are in a folder '
            f'named {folder} ({facts.text_revision}): give it with '
            f'--encoder={runner}:/path/to/{folder}.'
        )
    spec = spec or expected
    runner, colon, model = spec.partition(':')
    # By its name, before loading it takes minutes.
    if colon and expected != _IN_PT:
        caption_encoder.check_same_encoder(facts, f'{runner}:{model_files.public_name(model)}')
    max_tokens = facts.text_max_tokens or DEFAULT_MAX_TOKENS
    encoder: Encoder | Tokenizer
    if facts.vocabulary:
        encoder = text_encoders.make_tokenizer(spec, max_tokens, facts.text_words)
    else:
        encoder = text_encoders.make_encoder(spec, max_tokens)
    check_text_encoder(facts, encoder)
    return encoder


def _list_captions(captions: Iterable[str]) -> list[str]:
    # A single text would be drawn letter by letter.
    is_several = isinstance(captions, Iterable) and not isinstance(captions, (str, bytes))
    texts = list(captions) if is_several else []
    if not (texts and all(isinstance(text, str) for text in texts)):
        raise ValueError(f'captions={captions!r}: expected a list of at least one text')
    return texts


def encode_captions(
    facts: DatasetStats, encoder: Encoder | Tokenizer, captions: Sequence[str]
) -> np.ndarray:
    """Encodes captions: embeddings float16 `(n, D)`, or token ids int32 `(n, T)`."""
    if unknown := unknown_words(facts, encoder, captions):
        # The list of words that have numbers lacks rare ones if it is full.
        is_full = facts.text_words.count(' ') + 1 == word_list.MAX_WORDS
        logging.warning(
            '%s caption of the training data has %s: the model does not know what %s.',
            'Hardly a' if is_full else 'No',
            ', '.join(map(repr, unknown)),
            'it means' if len(unknown) == 1 else 'they mean',
        )
    # Float16, as the data set stores them: the model has seen no others.
    if not facts.vocabulary:
        return cast(Encoder, encoder).encode(captions).astype(np.float16)
    ids = text_encoders.pad(encoder.tokenize(captions), encoder.max_tokens)
    if ids.max(initial=0) >= facts.vocabulary:
        index = ids.max(axis=1).argmax()
        raise ValueError(
            f'{captions[index]!r} has token {ids[index].max()}, expected one of the '
            f'{facts.vocabulary} tokens of the training data, numbered from 0.'
        )
    return ids


def unknown_words(facts: DatasetStats, encoder: Tokenizer, captions: Sequence[str]) -> list[str]:
    """Returns words that training captions lack; with `hash` misses some that share buckets."""
    words = list(dict.fromkeys(w for caption in captions for w in split_words(caption)))
    if facts.text_encoder == HashEncoder.name:
        # A bucket without mean and deviation got no word of any caption.
        is_empty = (facts.text_mean == 0) & (facts.text_std == 0)
        is_unknown = np.any(cast(Encoder, encoder).encode(words)[:, is_empty], axis=1).tolist()
    elif facts.text_words:
        known_words = set(word_list.parse(facts.text_words))
        is_unknown = [word not in known_words for word in words]
    else:
        return []
    return [word for word, unknown in zip(words, is_unknown, strict=True) if unknown]


def check_text_encoder(facts: DatasetStats, encoder: Encoder | Tokenizer) -> None:
    # Nothing names the encoder of embeddings that came with the latents: their width must do.
    if facts.text_encoder == _IN_PT and cast(Encoder, encoder).dim == facts.text_dim:
        logging.warning(
            'The data set does not say whether %s made its text embeddings.', encoder.name
        )
        return
    caption_encoder.check_same_encoder(facts, encoder.name, encoder.revision)


# --- The program ---------------------------------------------------------------------------------


def artist_of_flags() -> Artist:
    workdir = workdirs.absolute(FLAGS.workdir)
    names = 'step', 'batch_size', *_CHANGES
    options: dict[str, Any] = {name: FLAGS[name].value for name in names}
    return Artist(workdir, **options)


def main() -> None:
    # Before the imports, which take seconds: a wrong file of captions ends the program at once.
    captions, name = _read_prompts(FLAGS.prompts)
    run.prepare()
    artist = artist_of_flags()
    folder = epath.Path(FLAGS.out).parent if FLAGS.out else artist.workdir / previews.FOLDER
    # Before minutes of drawing whose pictures could not be written.
    workdirs.check_writable(folder)
    pictures = artist.draw(captions)
    out = FLAGS.out or _free_path(folder, f'{name}_{artist.step:06}{_changes()}')
    previews.write_png(out, previews.make_grid([pictures], captions))
    singles = epath.Path(out).with_suffix('')
    if FLAGS.singles:
        for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            path = singles / f'{number:05}.png'
            previews.write_png(path, picture)
            path = path.with_suffix('.txt')
            with file_state.naming(path):
                path.write_text(f'{caption}\n')
    places = f'{out} and {singles}/' if FLAGS.singles else out
    command_line.print_lines(f'pictures: {places}')


def _changes() -> str:
    """What the flags change of the run's settings, for the name of a file: `_seed=1_vae=sdxl`."""
    values = {name: FLAGS[name].value for name in _CHANGES if FLAGS[name].present}
    return ''.join(f'_{name}={os.path.basename(str(x))}' for name, x in values.items())


def _free_path(folder: epath.Path, stem: str) -> epath.Path:
    """The path of a new picture: `STEM.png`, `STEM-2.png` and so on."""
    for number in itertools.count(1):
        path = folder / (f'{stem}.png' if number == 1 else f'{stem}-{number}.png')
        # Nor one that a run will draw: prompts may be called `step`, too.
        if not path.exists() and not previews.is_of_run(path):
            return path
    raise AssertionError  # `count` has no end


def _read_prompts(prompts: str) -> tuple[list[str], str]:
    """Returns the captions of a file or a single one, and a name for their pictures."""
    is_file = prompts.startswith('gs://') or prompts.endswith('.txt') or os.path.exists(prompts)
    if not is_file:
        return [prompts], re.sub(r'\W+', '-', prompts)[:50].strip('-') or 'prompt'
    path = epath.Path(prompts)
    return read_captions(path), path.stem


def read_captions(path: epath.Path) -> list[str]:
    """Reads a caption from each line of a file; raises a ValueError if it has none."""
    try:
        # Some editors begin with a byte order mark.
        text = storage.describe_file(path).read().decode('utf-8-sig')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}: byte {error.start} is not UTF-8; save it as UTF-8.') from error
    # Not by `splitlines`: texts may hold other ends of lines, as U+2028.
    captions = [caption for line in text.split('\n') if (caption := line.strip())]
    if not captions:
        raise ValueError(f'{path} holds no caption; expected one a line.')
    return captions


def define_flags() -> None:
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
