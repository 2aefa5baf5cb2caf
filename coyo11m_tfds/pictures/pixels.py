"""Reads image files into pixels of the shapes that an encoder takes, and writes PNG.

    target = pixels.Target(shapes=((256, 256),))
    pixels.read_pixels(data, target).crops   # uint8 (1, 256, 256, 3), sRGB

Files come from anywhere: whatever is wrong with one is a `BadImageError`, and none takes more
memory than `Target.max_pixels` allows.
"""

import functools
import io
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageCms, ImageOps

from coyo11m_tfds.pictures import image_kinds, jpeg_segments, png_chunks

# The formats that photographs are kept in. Each further decoder of Pillow's forty is one more that
# files of strangers could attack.
_FORMATS = ('JPEG', 'PNG', 'WEBP')
_KINDS = ('JPEG', 'PNG', 'WebP')  # their names in `image_kinds`
# A progressive JPEG has ten scans, which each go over all pixels: 20 ms for 33 million of them.
_MAX_SCANS = 100
# Pillow parses segments of a JPEG, the bytes between them and chunks of a PNG in Python, in some
# microseconds each. The largest files have 1,100 segments and 8,200 chunks.
_MAX_SEGMENTS = 10_000
_MAX_SKIPPED = 1 << 20
_MAX_CHUNKS = 1 << 17
# Of a profile; the library of profiles reads no more tags.
_MAX_TAGS = 100
_MAX_STAGES = 16
# Each of the tags may hold all of the EXIF once more. A segment of a JPEG has less.
_MAX_EXIF = 1 << 16
_PNG_DEPTH = 24  # offset of the bits a channel in a PNG file

# Of the shapes of buckets: the largest ratio of their sides and the least share of the area.
_MAX_RATIO = 2
_LEAST_AREA = 0.9
_BUCKET_STEP = 64  # of their sides
# The least share of an image that its crop may keep.
_LEAST_CROP = 2 / 3
# A frame of 8K video, which takes 0.35 GB of memory as a JPEG or PNG and 0.55 GB as a WebP.
MAX_PIXELS = 2**25
# Pillow opens no larger image.
MOST_PIXELS = 178_956_970

# Reasons of a SmallImageError.
TOO_SMALL = 'too small'
TOO_NARROW = 'too narrow'


class BadImageError(ValueError):
    """An image that cannot be used for a `reason`, one of a few short phrases, for counts."""

    def __init__(self, reason: str, detail: str = ''):
        super().__init__(reason, detail)  # pickling needs the arguments of this method
        self.reason = reason

    def __str__(self):
        """Returns the reason and the detail, in one line."""
        text = ': '.join(filter(None, self.args))
        # In one line, whatever a library says of an image.
        return ' '.join(text.split())


class SmallImageError(BadImageError):
    """A good image, but `too small` (it would have to be enlarged) or `too narrow`."""

    def __init__(self, reason: str, detail: str = '', size: tuple[int, int] = (0, 0)):
        super().__init__(reason, detail)
        self.size = size  # (W, H)


class OtherImageError(BadImageError):
    """An image that is not taken, because of its format or its place."""


class Target(NamedTuple):
    """What images are made into."""

    shapes: tuple[tuple[int, int], ...]  # (H, W); an image gets that of the nearest aspect ratio
    crops: int = 1  # the centre, or 3: the start, centre and end of the longer side
    max_pixels: int = MAX_PIXELS


class Pixels(NamedTuple):
    """An image as the encoder takes it."""

    crops: np.ndarray  # uint8 (crops, H, W, 3), sRGB
    width: int  # of the original, once it is turned upright
    height: int


@functools.cache
def bucket_shapes(size: int, step: int = _BUCKET_STEP) -> tuple[tuple[int, int], ...]:
    """Returns the shapes `(H, W)` of nearly the area `size * size`, with sides of whole steps.

    For 1024 they are those of SDXL (https://arxiv.org/abs/2307.01952, appendix I), whose areas are
    between 0.9 and 1 times the square, up to a ratio of 2 instead of 4: each shape is one more
    step to compile. Raises a ValueError for a size that is no multiple of the step.
    """
    if size % step:
        raise ValueError(f'Buckets need a size that is a multiple of {step}, not {size}.')
    sides = range(step, _MAX_RATIO * size + 1, step)
    shapes = []
    for height, width in itertools.product(sides, sides):
        has_area = _LEAST_AREA * size**2 < height * width <= size**2
        has_ratio = max(height, width) <= _MAX_RATIO * min(height, width)
        if has_area and has_ratio:
            shapes.append((height, width))
    return tuple(shapes)


def read_pixels(data: bytes, target: Target) -> Pixels:
    """Decodes an image and brings it to the shape of the target that is nearest.

    It is turned upright by its EXIF, laid over white where it is transparent, reduced with
    antialiasing until it just covers the shape, cropped, and converted to sRGB from the profile
    that it may bring; a profile that cannot be used is ignored, as browsers do.

    The pixels are those of the image processor of diffusers with `resize_mode='crop'`. Raises a
    BadImageError for an image that is left out.
    """
    image = _decode(data, target)
    width, height = image.size
    shape, size = _choose_shape(width, height, target.shapes)
    reduced = image.resize(size, Image.Resampling.LANCZOS)
    # Only now: the few pixels that are left are converted faster than those of the original.
    pixels = np.asarray(_convert_to_srgb(reduced))
    return Pixels(_crop(pixels, shape, target.crops), width, height)


def find_smaller_size(width: int, height: int, target: Target, step: int) -> int:
    """Returns the largest size that would take an image which is too small for the target, or 0.

    It is a multiple of `step` or, if the target has buckets, of the step of these.
    """
    if len(target.shapes) == 1:
        return min(width, height) // step * step
    # That of the target, whose square is one of its shapes.
    size = max(map(min, target.shapes))
    for smaller_size in range(size - _BUCKET_STEP, 0, -_BUCKET_STEP):
        shapes = bucket_shapes(smaller_size)
        if len(shapes) > 1 and _fits(width, height, shapes):
            return smaller_size
    return 0


def _fits(width: int, height: int, shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether an image of some size can get one of some shapes."""
    try:
        _choose_shape(width, height, shapes)
    except SmallImageError:
        return False
    return True


def encode_png(pixels: np.ndarray, **options: Any) -> bytes:
    """Encodes a picture, uint8 `(H, W, 3)`; `options` are those of Pillow."""
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, 'PNG', **options)
    return encoded.getvalue()


def read_png(data: bytes) -> np.ndarray:
    """Decodes what `encode_png` made: uint8 `(H, W, 3)`."""
    image = Image.open(io.BytesIO(data), formats=('PNG',))
    return np.asarray(image.convert('RGB'))


def _decode(data: bytes, target: Target) -> Image.Image:
    """Returns an upright image of the mode `L` or `RGB`; BadImageError for one that is not good."""
    if not data:
        raise BadImageError('empty')
    try:
        profile = b''
        # Before Pillow parses what would take it long.
        if data.startswith(jpeg_segments.SIGNATURE):
            data = _check_segments(data)
        if data.startswith(png_chunks.SIGNATURE):
            _check_chunks(data)
            data, profile = png_chunks.keep_pixels(data)
        # Pillow warns of what it repairs, such as damaged EXIF.
        with warnings.catch_warnings(action='ignore'):
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            if profile:
                image.info['icc_profile'] = profile
            _check_header(data, image, target)
            image.load()
            return _flatten(_turn(image))
    # A lack of memory says nothing of the image.
    except (BadImageError, MemoryError):
        raise
    except PIL.UnidentifiedImageError as error:
        raise _describe_unidentified(data) from error
    except Image.DecompressionBombError as error:
        raise BadImageError('more than max_pixels', str(error)) from error
    except Exception as error:  # damage lets Pillow raise whatever its parsers stumble over
        raise BadImageError('damaged or cut off', str(error)) from error


def _describe_unidentified(data: bytes) -> BadImageError:
    """Returns the error for a file that Pillow does not know, with what it seems to be."""
    kind = image_kinds.find_kind(data[: image_kinds.HEAD_BYTES])
    if kind and kind not in _KINDS:
        return BadImageError(f'{kind} under another name')
    message = f'no header of a JPEG, PNG or WebP that can be read; it begins with {data[:12]!r}'
    return BadImageError('not an image', message)


def _check_header(data: bytes, image: Image.Image, target: Target) -> None:
    """Refuses an image before memory and time go into its pixels."""
    if math.prod(image.size) > target.max_pixels:
        raise BadImageError('more than max_pixels', f'{image.width}x{image.height}')
    # Too small for any shape, however it is turned.
    least_side = min(map(min, target.shapes))
    if min(image.size) < least_side:
        raise _describe_small(TOO_SMALL, *image.size)
    # The further frames of an MPO, a JPEG of a telephone, are previews and views for the other eye.
    if image.format != 'MPO' and getattr(image, 'is_animated', False):
        raise BadImageError('animation')
    if image.mode == 'CMYK':
        raise BadImageError('CMYK')
    if image.format == 'PNG' and data[_PNG_DEPTH] == 16:
        raise BadImageError('16 bits')


def _check_chunks(data: bytes) -> None:
    """Refuses a PNG of so many chunks that they take long, however small they are."""
    offset = len(png_chunks.SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        # Length, kind and checksum have four bytes each.
        offset += 12 + int.from_bytes(data[offset : offset + 4])
        if offset >= len(data):
            return
    raise BadImageError('too many parts', f'more than {_MAX_CHUNKS:,} chunks')


def _check_segments(data: bytes) -> bytes:
    """Returns a JPEG with its first EXIF alone; refuses one of so many segments that take long."""
    kept_parts = list[bytes]()
    kept_end = 0
    num_scans = 0
    num_exif = 0
    num_skipped = 0
    for number, segment in enumerate(jpeg_segments.list_segments(data)):
        num_skipped += segment.num_skipped
        if segment.kind == jpeg_segments.START_OF_SCAN:
            num_scans += 1
        if jpeg_segments.is_exif(data, segment):
            num_exif += 1
            # Pillow would join several.
            if num_exif > 1:
                kept_parts.append(data[kept_end : segment.start])
                kept_end = segment.end
        if num_scans > _MAX_SCANS:
            raise BadImageError('too many scans')
        if number > _MAX_SEGMENTS:
            raise BadImageError('too many parts', f'more than {_MAX_SEGMENTS:,} segments')
        if num_skipped > _MAX_SKIPPED:
            raise BadImageError('damaged or cut off', 'long gaps between its segments')
    kept_parts.append(data[kept_end:])
    return b''.join(kept_parts)


def _turn(image: Image.Image) -> Image.Image:
    """Turns an image upright by its EXIF."""
    # The orientation is among the first tags.
    for name in ('exif', 'Raw profile type exif'):
        if name in image.info:
            image.info[name] = image.info[name][:_MAX_EXIF]
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF leaves the image as it lies
        pass
    return image


def _flatten(image: Image.Image) -> Image.Image:
    """Lays an image over white and returns it in the mode `L` or `RGB`."""
    if image.has_transparency_data:
        layer = image if image.mode == 'RGBA' else image.convert('RGBA')
        white = Image.new('RGB', image.size, 'white')
        # Of a mask in RGBA, Pillow takes the alpha.
        white.paste(layer, mask=layer)
        # Among it is the profile of the colours.
        white.info = image.info
        return white
    if image.mode in ('L', 'RGB'):
        return image
    return image.convert('RGB')


def _describe_small(reason: str, width: int, height: int) -> SmallImageError:
    """Returns the error for an image that is too small or too narrow."""
    return SmallImageError(reason, f'{width}x{height}', (width, height))


def _choose_shape(
    width: int, height: int, shapes: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shape (H, W) of the nearest aspect ratio, and the size (W, H) that covers it.

    Raises a SmallImageError if the image would have to be enlarged or would lose too much.
    """

    def distance(shape: tuple[int, int]) -> float:
        """Returns how far the aspect ratio of a shape is from that of the image."""
        shape_height, shape_width = shape
        # Of ratios, so that twice as wide is as far as half as wide.
        return abs(math.log(width * shape_height / (height * shape_width)))

    shape = min(shapes, key=distance)
    if height < shape[0] or width < shape[1]:
        raise _describe_small(TOO_SMALL, width, height)
    size = _reduced_size(width, height, shape)
    # A single shape is what somebody chose, whatever it cuts off.
    if len(shapes) > 1 and math.prod(shape) < _LEAST_CROP * math.prod(size):
        raise _describe_small(TOO_NARROW, width, height)
    return shape, size


def _reduced_size(width: int, height: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the least (W, H) of an image's aspect ratio that covers a shape (H, W).

    It is rounded as in diffusers.
    """
    shape_height, shape_width = shape
    # A wider image gets the height of the shape, and is cropped at its sides.
    if width * shape_height > shape_width * height:
        return width * shape_height // height, shape_height
    return shape_width, height * shape_width // width


def _convert_to_srgb(image: Image.Image) -> Image.Image:
    """Returns an image in sRGB, by its profile if that can be used."""
    transform = _srgb_transform(image.info.get('icc_profile'), image.mode)
    if transform is None:
        return image.convert('RGB')
    return transform.apply(image)


@functools.lru_cache(maxsize=4)  # a camera writes the same profile into all its images
def _srgb_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Returns the transform of a profile's colours; None for a profile that cannot be used."""
    if not profile or _has_many_stages(profile):
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        srgb = ImageCms.createProfile('sRGB')
        return ImageCms.buildTransform(source, srgb, mode, 'RGB')
    except (ImageCms.PyCMSError, OSError):
        return None


def _has_many_stages(profile: bytes) -> bool:
    """Whether colours would pass so many stages that it takes minutes, or all memory."""
    # A tag `mpet` holds a list of stages (ICC.1:2022, 10.16), in which all entries may point at the
    # same bytes, so a small file can have any number. Other tags have few. The table of tags (7.3)
    # has 12 bytes each: name, offset and size.
    num_tags = min(_MAX_TAGS, int.from_bytes(profile[128:132]))
    for entry in range(132, 132 + 12 * num_tags, 12):
        start = int.from_bytes(profile[entry + 4 : entry + 8])
        kind = profile[start : start + 4]
        num_stages = int.from_bytes(profile[start + 12 : start + 16])
        if kind == b'mpet' and num_stages > _MAX_STAGES:
            return True
    return False


def _crop(pixels: np.ndarray, shape: tuple[int, int], crops: int) -> np.ndarray:
    """Returns crops, `(crops, height, width, 3)`; the pixels have the shape's height or width."""
    height, width = shape
    # Of the last crop; one of the two is 0.
    last_row = pixels.shape[0] - height
    last_column = pixels.shape[1] - width
    centre = (last_row // 2, last_column // 2)
    corners = [centre]
    # The centre stays in the middle, as it is the one that evaluations take.
    if crops == 3:
        corners = [(0, 0), centre, (last_row, last_column)]
    cut = []
    for row, column in corners:
        cut.append(pixels[row : row + height, column : column + width])
    return np.stack(cut)
