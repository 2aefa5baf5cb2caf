"""The settings of an encoding: what images become, and which of them may be bad."""

import dataclasses
import math
import os
from typing import Any

from coyo11m_tfds import schema
from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.pictures.pixels import Target
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from coyo11m_tfds.process import arguments, errors

_KEYS_OF_DATA = 'data'
_KEYS_OF_PATHS = 'path'

# NumPy's files have no name for bfloat16, and float16 rounds latents, which are small, less.
_DTYPES = 'float16', 'float32'

_RULES = {
    'size': errors.at_least(1),
    'crops': errors.FieldRule('1 or 3', lambda crops: crops in (1, 3)),
    'dtype': errors.one_of(*_DTYPES),
    'keys': errors.one_of(_KEYS_OF_DATA, _KEYS_OF_PATHS),
    'max_bad': errors.UNIT_INTERVAL,
    'max_pixels': errors.FieldRule(
        f'from 1 to {pixels.MOST_PIXELS}', lambda number: 1 <= number <= pixels.MOST_PIXELS
    ),
    'part_images': errors.at_least(0),
    'num_workers': errors.at_least(0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """What images become; a ValueError for a value of another type, or out of range.

    Attributes:
        size: Height and width of the pixels that are encoded, or with `buckets` the square root of
            their number.
        buckets: Whether each image gets the shape, of many, that is closest to its own.
        crops: 1 for the centre of the image, 3 also for its two ends.
        moments: Whether to write the mean and the standard deviation of the latents, `(2C, H, W)`,
            instead of the mean.
        dtype: Of the latents, 'float16' or 'float32'.
        caption_column: Field or column of the captions; '' for the usual names.
        keys: 'data' takes the keys in the data of images or the numbers that are their names, where
            there are such; 'path' takes hashes of their paths.
        max_bad: Largest share of images that may be bad.
        max_pixels: Most pixels of an image.
        part_images: Most images in a part, if they are not in tars or Parquet files; 0 for a number
            that depends on the images and the size, see `parts.divide_images`.
        num_workers: Processes that decode images; 0 for one on each core.
        scratch_dir: Local folder for temporary files; '': a folder in the output or, if that is
            remote, in the user's cache.
    """

    size: int = 256
    buckets: bool = False
    crops: int = 1
    moments: bool = False
    dtype: str = 'float16'
    caption_column: str = ''
    keys: str = _KEYS_OF_DATA
    max_bad: float = 0.01
    max_pixels: int = pixels.MAX_PIXELS
    part_images: int = 0
    num_workers: int = 0
    scratch_dir: str | os.PathLike[str] = ''

    def __post_init__(self):
        # Before the rules, which compare numbers.
        arguments.convert_fields(self)
        for field, rule in _RULES.items():
            rule.check(field, getattr(self, field))
        # No image is large enough and has so few. Nor are shapes listed that nobody can use.
        if self.size**2 > self.max_pixels:
            largest = math.isqrt(self.max_pixels)
            problem = f'expected at most {largest}, because of max_pixels={self.max_pixels}'
            raise errors.FieldError('size', self.size, problem)
        if self.buckets and len(pixels.bucket_shapes(self.size)) == 1:
            raise ValueError(
                f'size={self.size}: has only one bucket, expected e.g. 256, or no buckets.'
            )

    @property
    def target(self) -> Target:
        """The shapes that images are brought to."""
        shapes: tuple[tuple[int, int], ...] = ((self.size, self.size),)
        if self.buckets:
            shapes = pixels.bucket_shapes(self.size)
        return Target(shapes, self.crops, self.max_pixels)

    @property
    def has_keys_of_paths(self) -> bool:
        """Whether all keys are hashes of paths."""
        return self.keys == _KEYS_OF_PATHS

    def check_encoder(self, encoder: VaeEncoder) -> None:
        """Raises a ValueError for a VAE that cannot encode such pixels, or has no moments."""
        if self.size % encoder.factor:
            raise ValueError(
                f'size={self.size}: expected a multiple of {encoder.factor}, as {encoder.name} '
                'needs.'
            )
        if self.moments and not encoder.has_moments:
            raise ValueError(
                f'moments={self.moments}: {encoder.name} has none, expected an AutoencoderKL.'
            )

    def record(self, encoder: VaeEncoder) -> dict[str, Any]:
        """Returns what decides the bytes of the parts, but for their images, as plain values."""
        return {
            schema.META_VAE: encoder.name,
            'vae_revision': encoder.revision,
            schema.META_LATENT_SCALE: list(encoder.scale),
            'shapes': [f'{height}x{width}' for height, width in self.target.shapes],
            'crops': self.crops,
            'moments': self.moments,
            'dtype': self.dtype,
            'caption_column': self.caption_column,
            'keys': self.keys,
            'max_pixels': self.max_pixels,
        }
