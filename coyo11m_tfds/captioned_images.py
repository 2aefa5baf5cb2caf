"""Reads the images of a folder with their captions, as `encode_images` finds and crops them.

for batch in read_images('PHOTOS', (256, 256), batch_size=64):
    batch.captions, batch.pictures
"""

import contextlib
import itertools
import os
from collections.abc import Generator, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.images import image_files
from coyo11m_tfds.images.source_image import SourceImage
from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.pictures.pixels import BadImageError, OtherImageError
from coyo11m_tfds.storage.scratch import Scratch, user_cache


class Images(NamedTuple):
    """Some images of a folder."""

    names: list[str]  # paths within the folder
    captions: list[str]  # '' where there is none
    pictures: np.ndarray  # uint8 `(n, H, W, 3)`


def read_images(
    folder: str | os.PathLike[str],
    shape: tuple[int, int],
    batch_size: int,
    most: int | None = None,
) -> Iterator[Images]:
    """Yields at most `most` images, reduced to the shape `(H, W)` and cropped at their centres.

    Their order is that of their names. What looks like an image and is not taken is logged. Raises
    a ValueError for a folder without images, and for an image that is bad or too small.
    """
    target = pixels.Target((shape,))
    # Closed at the end, or when the caller stops: parts may be downloads on the disk.
    with contextlib.closing(_read_all(folder, target)) as all_images:
        images = itertools.islice(all_images, most)
        while batch := list(itertools.islice(images, batch_size)):
            pictures = [picture for _, picture in batch]
            yield Images(
                names=[image.name for image, _ in batch],
                captions=[image.caption for image, _ in batch],
                pictures=np.stack(pictures),
            )


def _read_all(
    folder: str | os.PathLike[str], target: pixels.Target
) -> Generator[tuple[SourceImage, np.ndarray]]:
    """Yields the images of a folder with their crops, uint8 `(H, W, 3)`."""
    # All images are one part: nobody divides the work here.
    parts, left = image_files.find_images(folder, '', lambda sizes: [slice(None)])
    _tell_left(folder, left)
    # In the user's cache: there is no output whose folder could hold downloads.
    scratch = Scratch(user_cache(schema.NAME, 'images'))
    has_images = False
    for part in parts:
        left_of_part = dict[str, str]()
        with part.open(scratch) as images:
            for image in images:
                try:
                    picture = _read_picture(folder, image, target)
                except OtherImageError as error:
                    # A part tells of these only where its images are read.
                    left_of_part[image.name] = error.reason
                else:
                    yield image, picture
                    has_images = True
        _tell_left(folder, left_of_part)
    if not has_images:
        raise ValueError(f'{folder}: has no images that are taken, expected at least one.')


def _tell_left(folder: str | os.PathLike[str], left: Mapping[str, str]) -> None:
    """Logs what looks like an image and is not taken, with the reasons by name."""
    if left:
        logging.warning('%s:%s', folder, image_files.describe_left(left))


def _read_picture(
    folder: str | os.PathLike[str], image: SourceImage, target: pixels.Target
) -> np.ndarray:
    """Returns the crop of an image, uint8 `(H, W, 3)`; a ValueError that names a bad image."""
    try:
        # A target of one shape and one crop.
        [picture] = pixels.read_pixels(image.read(), target).crops
    except OtherImageError:
        raise
    except BadImageError as error:
        [(height, width)] = target.shapes
        raise ValueError(
            f'{folder}/{image.name}: {error}; expected what encode_images takes, of at least '
            f'{width} x {height} pixels'
        ) from error
    return picture
