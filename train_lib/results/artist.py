"""A checkpoint of a run that draws captions."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from etils import epath

from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.pictures import vae_decoder
from coyo11m_tfds.process import jax_environment
from coyo11m_tfds.process.errors import FieldError, at_least
from coyo11m_tfds.storage import json_digest, model_files
from coyo11m_tfds.text.text_encoders import Encoder, Tokenizer
from train_lib.learning import models, sharding, step_encoder
from train_lib.learning.step import bind, make_draw, sampling_settings
from train_lib.lifecycle import checkpoint, compiled_programs, config_rules
from train_lib.results import caption_encoder

BATCH_SIZE = 64  # pictures that are drawn at a time


class Artist:
    """A checkpoint of a run, ready to draw on the devices of this process.

    Attributes:
        workdir: Folder of the run, without a step.
        step: Step of the checkpoint.
        settings: Plain values that decide the picture of a caption.
        encoder: Name of the text encoder; '' stands for that of the data set.
        vae: Name of the decoder; '' stands for the linear map.
        facts: Those of the training data.
        data_dir: Folder of the training data; '' for a mixture.
        paint: Turns raw latents `(n, C, H, W)` into pictures, uint8 `(n, height, width, 3)`.
        batch_size: Number of pictures that are drawn at a time.
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
        """Opens a checkpoint; reads the weights when they are needed.

        Args:
            place: Folder of the run, as for `checkpoint.open_run`.
            step: Step of the checkpoint; None for the last.
            average: Whether to draw with the moving average of the weights.
            seed: Seed of the noise; None for the run's.
            batch_size: Number of pictures to draw at a time.
            encoder: Folder or hub name of the text encoder; '' for the run's.
            vae: Folder or hub name of the decoder, '' for the linear map; None for that of the
                run's previews.
            **changes: Fields of the run's `config.preview`, such as `guidance`; None keeps the
                run's value.

        Raises:
            ValueError: The run has no such checkpoint, or a value is not one that it could have.
            OSError: The checkpoint or the decoder cannot be read.
        """
        # First: another setting of JAX would draw other pictures.
        jax_environment.check()
        self._saved = checkpoint.open_run(place, step)
        self.workdir = self._saved.workdir
        self.step = self._saved.step
        self.facts = DatasetStats.from_json(self._saved.description.facts)
        config = ml_collections.ConfigDict(self._saved.description.config)
        fields = {f'preview.{name}': value for name, value in changes.items()}
        fields['seed'] = seed
        _change_fields(config, fields)
        at_least(1).check('batch_size', batch_size)
        # The run's own values were checked when it began: this checks the changes.
        config_rules.check_config(config, needs_data=False)
        # JAX asks for its cache at the first compilation, which may be that of the decoder.
        compiled_programs.use_cache(config, self.workdir)
        self.vae: str = config.preview.vae if vae is None else vae
        _, num_channels, _, _ = self.facts.latents_shape
        self.paint = vae_decoder.make_painter(
            self.vae, num_channels, self.facts.vae, self.facts.latent_scale
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
        environment = jax_environment.describe()
        if environment:
            self.settings['environment'] = environment
        self._draw_batch = self._compile(config)

    def draw(
        self,
        captions: Sequence[str],
        encoder: Encoder | Tokenizer | None = None,
        first: int = 0,
    ) -> np.ndarray:
        """Draws one picture for each caption, uint8 `(n, H, W, 3)`.

        A picture is a function of the weights, the seed, the caption and its number, except for
        rounding.

        Args:
            captions: Captions.
            encoder: Encoder or tokenizer to encode them; `text_encoder` by default.
            first: Number of the first caption; the others follow.

        Raises:
            ValueError: These are no captions, or the encoder did not make the training texts.
        """
        captions = _list_captions(captions)
        if encoder is None:
            encoder = self.text_encoder
        caption_encoder.check(self.facts, encoder)
        texts = caption_encoder.encode(self.facts, encoder, captions)
        # Each device draws as many. Few captions make a smaller batch, rather than one of padding.
        num_devices = self._mesh.size
        num_at_once = min(self.batch_size, len(texts))
        size = math.ceil(num_at_once / num_devices) * num_devices
        pictures = []
        for start in range(0, len(texts), size):
            batch = texts[start : start + size]
            # The last batch is padded, or it would be compiled for a size of its own.
            num_missing = size - len(batch)
            padded = np.pad(batch, [(0, num_missing), (0, 0)])
            number = np.int32(first + start)
            latents = jax.device_get(self._draw_batch(padded, number))
            pictures.append(self.paint(latents[: len(batch)]))
        return np.concatenate(pictures)

    def check_captions(self, captions: Sequence[str]) -> None:
        """Raises a ValueError for captions that `draw` would refuse; computes no embeddings."""
        captions = _list_captions(captions)
        encoder = self.text_encoder
        if self.facts.vocabulary:
            caption_encoder.tokenize(self.facts, encoder, captions)

    @functools.cached_property
    def picture_shape(self) -> tuple[int, int]:
        """Height and width of a picture in pixels."""
        # Only the decoder knows how many pixels a latent becomes: it tries one.
        _, *shape = self.facts.latents_shape
        latents = np.zeros((1, *shape), np.float32)
        _, height, width, _ = self.paint(latents).shape
        return height, width

    @functools.cached_property
    def text_encoder(self) -> Encoder | Tokenizer:
        """The encoder, or the tokenizer, that made the texts of the training data."""
        return caption_encoder.load(self.facts, self.encoder)

    @functools.cached_property
    def params(self):
        """The weights, whole on every device."""
        replicated = sharding.replicated(self._mesh)
        return self._saved.restore_weights(replicated, average=self._average)

    def _compile(self, config: ml_collections.ConfigDict):
        """Returns the jitted function of texts and the number of the first one."""
        # A run without an encoder in its step has none here, either.
        spec = self.encoder if config.encoder else ''
        try:
            encoder = step_encoder.load_step_encoder(
                spec, self.facts, self._mesh, dtype=config.model.dtype
            )
        except ValueError as error:
            raise ValueError(
                f'{error}; with --encoder, name the one that the model was trained with'
            ) from error
        model = models.make_model(**config.model, vocabulary=self.facts.vocabulary)
        # Weights whole on every device, pictures shared out: no exchange within a step.
        model = model.clone(pin=sharding.RowPinning(self._mesh))
        draw = make_draw(config, model, self.facts, encoder)
        # Texts are shared out like the pictures; weights and the first number are not.
        replicated = sharding.replicated(self._mesh)
        rows = sharding.batch(self._mesh)
        draw_rows = bind(draw, encoder, replicated, rows, replicated, out_shardings=rows)
        # The weights are read at the first call: programs check much else before.
        return lambda texts, first: draw_rows(self.params, texts, first)


def _describe_vae(vae: str) -> str:
    """Returns name and revision of a decoder; '' for the linear map."""
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


def _list_captions(captions: Iterable[str]) -> list[str]:
    """Returns captions as a list; raises a ValueError for anything else, and for none."""
    texts = []
    # A single text would be drawn letter by letter.
    if isinstance(captions, Iterable) and not isinstance(captions, (str, bytes)):
        texts = list(captions)
    are_texts = all(isinstance(text, str) for text in texts)
    if not texts or not are_texts:
        raise ValueError(f'captions={captions!r}: expected a list of at least one text')
    for text in texts:
        # A command line may hold any bytes: no encoder and no file could take these.
        if not foreign_text.is_readable(text):
            raise ValueError(f'caption {text!r}: expected a text that is UTF-8')
    return texts
