"""The parts of an encoding: which images are encoded together, and how they get into tars.

    for places in divide_images(sizes, num_pixels=256**2): ...

    with PartTars(folder, encoder, settings, kept_latents={}) as tars:
        tars.encode(decoders.decode_all(images), progress)
    tars.paths, tars.counts   # {'256x256': FOLDER/256x256.tar}, and what became of the images

A tar has two members for each image: `000000.npy` with its latents, and `000000.json` with key,
caption, sizes and the name of the image.
"""

import collections
import contextlib
import io
import json
import math
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.encoding.decoders import DecodedImage
from coyo11m_tfds.encoding.image_counts import NO_SIZE, ImageCounts
from coyo11m_tfds.encoding.settings import EncodingSettings
from coyo11m_tfds.foreign import tar_members
from coyo11m_tfds.images.source_image import SourceImage
from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.pictures.pixels import BadImageError, Pixels, SmallImageError
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import file_state

# Of images in files. A stop loses the part that it is at, and each part is a tar. So a part has a
# 256th of all images, whatever the speed. But it has as many as two slow cores encode with SDXL's
# VAE in 10 to 20 seconds (32 of 256 pixels), or decode in about as long, and no more than a tar.
_SHARES_OF_IMAGES = 256
_LEAST_PIXELS = 32 * 256**2
_LEAST_BYTES = 256 << 20
_MOST_IMAGES = 4096  # 45 MB of latents of 256 pixels

# Of the members of a tar: their suffixes, and the field with the name of the image.
_ARRAY = '.npy'
_FIELDS = '.json'
_FILE = 'file'


def divide_images(
    sizes: Sequence[int], num_pixels: int, num_shapes: int = 1, most: int = 0
) -> Iterator[slice]:
    """Divides images, in order, into parts of limited work; yields the places of each part.

    The parts depend on nothing else, because the bytes of an encoding do.

    Args:
        sizes: Of the images, in bytes.
        num_pixels: That are encoded of an image.
        num_shapes: That images may get. Each has batches of its own, which small parts do not fill.
        most: Images in a part; 0 for a number by the work.
    """
    if not most:
        least = max(1, num_shapes * _LEAST_PIXELS // num_pixels)
        share = len(sizes) // _SHARES_OF_IMAGES
        most = min(_MOST_IMAGES, max(least, share))
    most_bytes = max(_LEAST_BYTES, sum(sizes) // _SHARES_OF_IMAGES)
    begin = 0
    num_bytes = 0
    for place, size in enumerate(sizes):
        is_full = place - begin == most or num_bytes + size > most_bytes
        # An image that is larger than a part has one to itself.
        if place > begin and is_full:
            yield slice(begin, place)
            begin = place
            num_bytes = 0
        num_bytes += size
    yield slice(begin, len(sizes))


class _BatchImage(NamedTuple):
    """An image that waits for its batch."""

    name: str  # of the members in the tar
    source: SourceImage
    pixels: Pixels


class _Batch(NamedTuple):
    """Images of one shape that are encoded at once."""

    shape: str  # 'HEIGHTxWIDTH' of the pixels
    images: list[_BatchImage]


class PartTars:
    """Encodes the images of a part into tars, one for each shape; a context manager.

    Batches have one shape, and never images of two parts, so that the bytes of a part depend on
    nothing but its own images.
    """

    counts: ImageCounts  # of all images of the part
    paths: dict[str, str]  # of the tars, by their shapes
    num_bytes: int  # of the images, as far as they are encoded or left out
    num_kept: int  # of images whose latents were not made again

    def __init__(
        self,
        folder: str,
        encoder: VaeEncoder,
        settings: EncodingSettings,
        kept_latents: Mapping[str, np.ndarray],
    ):
        """Takes a local folder for the tars.

        `kept_latents` are those of a part whose texts alone have changed, by the names of their
        images; they are not made again.
        """
        self.counts = ImageCounts()
        self.paths = {}
        self.num_bytes = 0
        self.num_kept = 0
        self._folder = folder
        self._encoder = encoder
        self._settings = settings
        self._target = settings.target
        self._kept_latents = kept_latents
        self._tars = dict[str, tarfile.TarFile]()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        # This writes the ends of the tars, for which a disk may be too full.
        with file_state.naming(self._folder):
            self._stack.close()

    def encode(self, decoded_images: Iterable[DecodedImage], progress: Progress) -> None:
        """Encodes and writes images; raises an OSError that names the folder for a full disk."""
        running = None
        for batch in self._make_batches(self._drop_bad(decoded_images, progress)):
            # The devices compute one batch while the next is decoded.
            wait = self._start(batch)
            if running:
                self._write(*running, progress)
            running = batch, wait
        if running:
            self._write(*running, progress)

    def _drop_bad(
        self, decoded_images: Iterable[DecodedImage], progress: Progress
    ) -> Iterator[tuple[SourceImage, Pixels]]:
        """Yields the images that could be decoded, and counts the others."""
        for image, decoded in decoded_images:
            if isinstance(decoded, BadImageError):
                self.counts.drop(image.name, decoded)
                self._count_smaller_size(decoded)
                self._count_done(image, progress)
            else:
                yield image, decoded

    def _count_smaller_size(self, error: BadImageError) -> None:
        """Counts the size that would take an image which is too small."""
        # A smaller size is no remedy for an image that is too narrow.
        if not isinstance(error, SmallImageError) or error.reason != pixels.TOO_SMALL:
            return
        size = pixels.find_smaller_size(*error.size, self._target, self._encoder.factor)
        has_buckets = len(self._target.shapes) > 1
        if size:
            self.counts.smaller_sizes[str(size)] += 1
        elif has_buckets:
            self.counts.smaller_sizes[NO_SIZE] += 1

    def _count_done(self, image: SourceImage, progress: Progress) -> None:
        """Counts an image that is encoded or left out."""
        # Not before: what is only decoded has most of its work ahead.
        self.num_bytes += image.size
        progress.add(image.size, images=1)

    def _make_batches(
        self, decoded_images: Iterable[tuple[SourceImage, Pixels]]
    ) -> Iterator[_Batch]:
        """Yields full batches as their images come, and at the end those that are not full."""
        waiting_images = collections.defaultdict[str, list[_BatchImage]](list)
        for number, (image, decoded) in enumerate(decoded_images):
            # Unlike the names of images, this has no dots, folders or repetitions.
            name = f'{number:06}'
            height, width = decoded.crops.shape[1:3]
            shape = f'{height}x{width}'
            images_of_shape = waiting_images[shape]
            images_of_shape.append(_BatchImage(name, image, decoded))
            batch_size = self._encoder.batch_size(height, width)
            # The crops of so many images fill whole batches of the encoder: their number is the
            # least common multiple of both.
            num_images = batch_size // math.gcd(batch_size, self._target.crops)
            if len(images_of_shape) == num_images:
                yield _Batch(shape, waiting_images.pop(shape))
        for shape, images in waiting_images.items():
            yield _Batch(shape, images)

    def _start(self, batch: _Batch) -> Callable[[], Iterable[np.ndarray]]:
        """Starts to encode a batch; returns a function that waits for the latents of its images."""
        names = {image.source.name for image in batch.images}
        # If one is missing, all are made again: the batch decides the bytes of each.
        if names <= self._kept_latents.keys():
            self.num_kept += len(batch.images)
            return lambda: [self._kept_latents[image.source.name] for image in batch.images]
        crops = np.concatenate([image.pixels.crops for image in batch.images])
        wait = self._encoder.start(crops)
        return lambda: self._arrange(*wait())

    def _arrange(self, latents: np.ndarray, deviation: np.ndarray | None) -> np.ndarray:
        """Returns latents of images, `(n, C, H, W)` or, of several crops, `(n, crops, C, H, W)`."""
        if self._settings.moments and deviation is not None:
            latents = np.concatenate([latents, deviation], axis=1)
        # Numbers that are too large become infinite, and their images are left out.
        with np.errstate(over='ignore'):
            rows = latents.astype(self._settings.dtype)
        num_crops = self._target.crops
        if num_crops > 1:
            rows = rows.reshape(-1, num_crops, *rows.shape[1:])
        return rows

    def _write(
        self, batch: _Batch, wait: Callable[[], Iterable[np.ndarray]], progress: Progress
    ) -> None:
        """Writes the images of a batch into the tar of its shape, once they are encoded."""
        for image, latents in zip(batch.images, wait(), strict=True):
            self._count_done(image.source, progress)
            # A build would drop them: better now, with the name of the image.
            if not np.isfinite(latents).all():
                self.counts.drop(image.source.name, BadImageError('not finite latents'))
                continue
            tar = self._open_tar(batch.shape)
            members = _make_members(image, latents)
            with file_state.naming(self.paths[batch.shape]):
                for suffix, data in members.items():
                    tar_members.add_member(tar, f'{image.name}{suffix}', data)
            self.counts.count(image.source, batch.shape)

    def _open_tar(self, shape: str) -> tarfile.TarFile:
        """Returns the tar of a shape, which the first image of this shape makes."""
        if shape not in self._tars:
            path = os.path.join(self._folder, f'{shape}.tar')
            self.paths[shape] = path
            self._tars[shape] = self._stack.enter_context(tarfile.TarFile(path, 'w'))
        return self._tars[shape]


def _make_members(image: _BatchImage, latents: np.ndarray) -> dict[str, bytes]:
    """Returns the members of an image, by their suffixes."""
    array = io.BytesIO()
    np.lib.format.write_array(array, latents)
    fields = {
        # First, so that a number of the same name does not replace one of the others.
        **image.source.numbers,
        schema.KEY: image.source.key,
        schema.CAPTION: image.source.caption,
        'width': image.pixels.width,
        'height': image.pixels.height,
        _FILE: image.source.name,
    }
    return {_ARRAY: array.getvalue(), _FIELDS: json.dumps(fields).encode()}


def read_latents(path: str) -> dict[str, np.ndarray]:
    """Returns the latents in a local tar of `PartTars`, by the names of their images."""
    latents = dict[str, np.ndarray]()
    with open(path, 'rb') as stream:

        def read(start: int, size: int) -> bytes:
            """Returns some bytes of the tar."""
            return os.pread(stream.fileno(), size, start)

        members = tar_members.list_members(path, os.path.getsize(path), read)
        contents = {name: read(start, size) for name, start, size in members}
    # The fields say of which image the array of the same name is.
    for name, content in contents.items():
        if name.endswith(_FIELDS):
            image = json.loads(content)[_FILE]
            array_name = name.removesuffix(_FIELDS) + _ARRAY
            latents[image] = np.load(io.BytesIO(contents[array_name]))
    return latents
