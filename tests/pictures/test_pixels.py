"""Tests reading images into pixels."""

import itertools
import math
import pickle
import zlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image, ImageCms

from coyo11m_tfds.pictures import pixels
from tests import children, hostile_images

SQUARE = pixels.Target(shapes=((64, 64),))
BUCKETS = pixels.Target(shapes=((48, 80), (64, 64), (80, 48)), crops=3)
# What is wrong with each hostile image; the others are read.
REASONS = {
    'empty': ['empty.jpg'],
    'not an image': [
        *(
            'ico.png',
            'ppm.jpg',
            'pdf.jpg',
            'eps.jpg',
            'byte.jpg',
            'page.jpg',
            'error.jpg',
            'drawing.jpg',
        ),
        *('text.png', 'zeros.jpg', 'random.webp', 'archive.jpg', 'start.jpg', 'flat.jpg'),
        *('start.png', 'checksum.png', 'flat.png', 'start.webp'),
    ],
    'GIF under another name': ['gif.jpg', 'animated.gif.png'],
    'TIFF under another name': ['tiff.jpg'],
    'BMP under another name': ['bmp.png'],
    'JPEG 2000 under another name': ['jpeg2000.jpg'],
    'damaged or cut off': [
        *('header.jpg', 'half.jpg', 'no-end.jpg', 'half.png', 'no-pixels.png', 'few-pixels.png'),
        *('half.webp', 'half-lossless.webp', 'length.webp', 'vast.webp'),
    ],
    'more than max_pixels': ['vast.jpg', 'vast.png', 'bits.png', 'line.png', 'negative.png'],
    'too many scans': ['scans.jpg', 'more-scans.jpg'],
    'too many parts': ['segments.jpg', 'end-first.jpg'],
    'too small': ['column.png'],
    'CMYK': ['print.jpg'],
    '16 bits': ['grey16.png', 'colour16.png'],
    'animation': ['animated.png', 'animated.webp'],
}


def read(image: Image.Image, target: pixels.Target = SQUARE, kind: str = 'PNG', **options):
    return pixels.read_pixels(hostile_images.encode(image, kind, **options), target)


def fit(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Reduces and crops an image by Pillow's own operations, to all of the shape."""
    scale = max(height / image.height, width / image.width)
    size = math.floor(image.width * scale + 1e-9), math.floor(image.height * scale + 1e-9)
    left, top = size[0] // 2 - width // 2, size[1] // 2 - height // 2
    reduced = image.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(reduced.crop((left, top, left + width, top + height)))


@pytest.mark.parametrize('size', [(300, 201), (201, 300), (64, 64), (65, 64), (1001, 70)])
@pytest.mark.parametrize('shape', [(64, 64), (64, 48), (40, 64)])
def test_are_those_of_pillow_in_the_centre(size, shape):
    image = hostile_images.photo(*size)
    crops = read(image, pixels.Target(shapes=(shape,))).crops
    assert crops.dtype == np.uint8
    np.testing.assert_array_equal(crops, fit(image, *shape)[None])


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(64, 64), (64, 48), (40, 64), (64, 128)])
def test_are_those_of_diffusers(shape):
    processor = pytest.importorskip('diffusers.image_processor').VaeImageProcessor()
    for height, width in itertools.product(range(64, 300, 37), range(128, 400, 41)):
        image = hostile_images.photo(height, width)
        crops = read(image, pixels.Target(shapes=(shape,))).crops
        theirs = processor.preprocess(image, *shape, resize_mode='crop').numpy()
        theirs = np.round((theirs + 1) * 127.5).astype(np.uint8).transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(crops, theirs)


def test_three_crops_lie_along_the_longer_side():
    image = hostile_images.photo(64, 200)
    target = pixels.Target(shapes=((64, 64),), crops=3)
    wide, high = read(image, target), read(image.transpose(Image.Transpose.TRANSPOSE), target)
    assert (wide.width, wide.height, high.width, high.height) == (200, 64, 64, 200)
    strips = [np.asarray(image)[:, left : left + 64] for left in (0, 68, 136)]
    np.testing.assert_array_equal(wide.crops, strips)
    np.testing.assert_array_equal(high.crops, np.swapaxes(strips, 1, 2))


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_turns_images(kind, orientation):
    upright = Image.new('RGB', (96, 64), 'black')
    upright.paste('red', (0, 0, 32, 20))  # at the upper left
    # Each orientation is stored by the operation that the one of the reader undoes.
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = upright.transpose(stored[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x112] = orientation
    result = read(image, pixels.Target(((64, 96),)), kind, exif=exif)
    assert (result.width, result.height) == (96, 64)
    np.testing.assert_allclose(result.crops[0], np.asarray(upright), atol=170)
    np.testing.assert_allclose(result.crops[0][8, 8], (255, 0, 0), atol=40)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP'])
def test_damaged_exif_leaves_images_as_they_lie(kind):
    image = hostile_images.photo(64, 64)
    damaged = read(image, kind=kind, exif=b'Exif\0\0 of no kind').crops
    np.testing.assert_array_equal(damaged, read(image, kind=kind).crops)


def test_transparent_images_lie_over_white():
    image = Image.new('RGBA', (64, 64), (200, 0, 0, 0))
    image.paste((200, 0, 0, 255), (0, 0, 64, 16))
    image.paste((200, 0, 0, 51), (0, 48, 64, 64))
    crop = read(image).crops[0]
    assert [crop[y, 5].tolist() for y in (5, 32, 60)] == [
        [200, 0, 0],
        [255, 255, 255],
        [244, 204, 204],
    ]
    palette = Image.new('P', (64, 64), 1)
    palette.putpalette([0, 0, 0, 0, 0, 200])
    grey = Image.new('LA', (64, 64), (0, 0))
    assert read(palette).crops[0, 0, 0].tolist() == [0, 0, 200]
    assert read(palette, transparency=1).crops[0, 0, 0].tolist() == [255] * 3
    assert read(grey).crops[0, 0, 0].tolist() == [255] * 3


@pytest.mark.parametrize('mode', ['1', 'L', 'P'])
def test_images_of_fewer_colours_become_rgb(mode):
    image = hostile_images.photo(64, 64).convert(mode)
    np.testing.assert_array_equal(read(image).crops[0], np.asarray(image.convert('RGB')))


def edit_profile(**tags: tuple[str, bytes]) -> bytes:
    """The profile of sRGB with some tags renamed and filled anew: `rTRC=('kTRC', content)`."""
    profile = bytearray(hostile_images.srgb_profile())
    for entry in range(132, 132 + 12 * int.from_bytes(profile[128:132]), 12):
        name, content = tags.get(bytes(profile[entry : entry + 4]).decode(), ('', b''))
        if name:
            offset = int.from_bytes(profile[entry + 4 : entry + 8])
            profile[entry : entry + 4] = name.encode()
            profile[offset : offset + len(content)] = content
    return bytes(profile)


# The primaries of Display P3, adapted to D50.
P3 = np.array([[0.5151, 0.2920, 0.1571], [0.2412, 0.6922, 0.0666], [-0.0011, 0.0419, 0.7841]])


def wide_gamut() -> bytes:
    """A profile of Display P3."""
    fixed = [np.round(P3[:, k] * 65536).astype('>i4').tobytes() for k in range(3)]
    names = ('rXYZ', 'gXYZ', 'bXYZ')
    tags = {name: (name, b'XYZ \0\0\0\0' + x) for name, x in zip(names, fixed, strict=True)}
    return edit_profile(**tags)


def test_wide_gamut_becomes_srgb():
    # As above, those of sRGB.
    srgb = np.array([[0.4361, 0.3851, 0.1431], [0.2225, 0.7169, 0.0606], [0.0139, 0.0971, 0.7141]])
    colour = np.array([200, 90, 120])
    linear = np.linalg.inv(srgb) @ P3 @ ((colour / 255 + 0.055) / 1.055) ** 2.4
    expected = (1.055 * linear ** (1 / 2.4) - 0.055) * 255
    assert np.abs(expected - colour).max() > 9  # it differs from what it would be without a profile
    image = Image.new('RGB', (70, 70), tuple(colour.tolist()))
    for kind, tolerance in (('PNG', 1.01), ('JPEG', 3), ('WEBP', 4)):
        crop = read(image, kind=kind, icc_profile=wide_gamut()).crops[0]
        np.testing.assert_allclose(crop[9, 9], expected, atol=tolerance)


def test_grey_with_a_profile_becomes_srgb():
    profile = bytearray(edit_profile(rTRC=('kTRC', b'curv' + bytes(8))))  # linear
    profile[16:20] = b'GRAY'
    image = Image.new('L', (64, 64), 55)  # 0.216, which sRGB encodes as 0.502
    assert read(image, icc_profile=bytes(profile)).crops[0, 0, 0].tolist() == [128] * 3


@pytest.mark.parametrize('mode', ['L', 'RGB', 'RGBA', 'P'])
def test_profiles_of_no_use_are_ignored(mode, capfd):
    image = hostile_images.photo(64, 64).convert(mode)
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile('LAB')).tobytes()
    for profile in (b'garbage' * 50, hostile_images.srgb_profile()[:300], bytes(128), lab):
        np.testing.assert_array_equal(
            read(image, icc_profile=profile).crops[0], np.asarray(image.convert('RGB'))
        )
    assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize(('number', 'is_used'), [(10, True), (17, False)])
def test_profiles_of_many_stages_are_ignored(number, is_used):
    image = hostile_images.photo(64, 64)
    crop = read(image, icc_profile=hostile_images.many_stages(number)).crops[0]
    assert (crop != np.asarray(image)).any() == is_used


def test_of_many_profiles_the_first_counts():
    image, profile = hostile_images.photo(64, 64), hostile_images.many_stages(10)
    data = hostile_images.encode(image, 'PNG', icc_profile=profile)
    second = b'x\0\0' + zlib.compress(hostile_images.srgb_profile())
    place = data.index(b'IDAT') - 4
    both = data[:place] + hostile_images.chunk(b'iCCP', second) + data[place:]
    crops = pixels.read_pixels(both, SQUARE).crops
    np.testing.assert_array_equal(crops, read(image, icc_profile=profile).crops)


# --- Buckets -------------------------------------------------------------------------------------


def with_chunks(data: bytes, *chunks: bytes) -> bytes:
    """A PNG with more chunks before its pixels."""
    at = data.index(b'IDAT') - 4
    return data[:at] + b''.join(chunks) + data[at:]


def test_texts_and_other_chunks_of_any_size_do_no_harm():
    """Pillow itself refuses the first five."""
    data = hostile_images.encode(hostile_images.photo(), 'PNG')
    expected = pixels.read_pixels(data, SQUARE).crops
    text = zlib.compress(b'All about the picture. ' * 100_000)
    noise = zlib.compress(np.random.default_rng(0).bytes(2 << 20))
    many = [hostile_images.chunk(b'zTXt', b'%d\0\0' % n + text) for n in range(40)]
    for chunks in (
        [hostile_images.chunk(b'zTXt', b'Comment\0\0' + text)],
        [hostile_images.chunk(b'iTXt', b'XML:com.adobe.xmp\0\1\0\0\0' + text)],
        [hostile_images.chunk(b'iTXt', b'Comment\0\1\0en\0x\0' + text)],
        [hostile_images.chunk(b'iCCP', b'ICC Profile\0\0' + noise)],
        [hostile_images.chunk(b'zTXt', b'Raw profile type exif\0\0' + text)],
        many,
        [hostile_images.chunk(b'tEXt', b'Comment\0' + bytes(3 << 20))],
        [hostile_images.chunk(b'iCCP', b'x\0\7' + noise)],
        [hostile_images.chunk(b'pHYs', b'1'), hostile_images.chunk(b'sRGB', b'')],
        [hostile_images.chunk(b'teST', bytes(9))[:-1] + b'\0'],
    ):
        changed = with_chunks(data, *chunks)
        np.testing.assert_array_equal(pixels.read_pixels(changed, SQUARE).crops, expected)


def test_a_large_profile_is_used():
    image, profile = hostile_images.photo(), wide_gamut()
    expected = read(image, icc_profile=profile).crops
    # Behind the profile, whose header says its size, and its table.
    large = (len(profile) + (2 << 20)).to_bytes(4) + profile[4:] + bytes(2 << 20)
    data = hostile_images.encode(image, 'PNG')
    chunk = hostile_images.chunk(b'iCCP', b'Large\0\0' + zlib.compress(large))
    found = pixels.read_pixels(with_chunks(data, chunk), SQUARE).crops
    np.testing.assert_array_equal(found, expected)
    assert (found != read(image).crops).any()


def test_an_orientation_in_texts_of_png_turns_images():
    image = hostile_images.photo()
    data, packet = hostile_images.encode(image, 'PNG'), b'<x tiff:Orientation="6"/>'
    expected = read(image.transpose(Image.Transpose.ROTATE_270)).crops
    for text in (b'\0\0\0\0' + packet, b'\1\0\0\0' + zlib.compress(packet)):
        chunk = hostile_images.chunk(b'iTXt', b'XML:com.adobe.xmp\0' + text)
        found = pixels.read_pixels(with_chunks(data, chunk), SQUARE).crops
        np.testing.assert_array_equal(found, expected)


def test_buckets_are_those_of_sdxl_up_to_a_ratio_of_two():
    # https://arxiv.org/abs/2307.01952, appendix I, the rows of ratios from 0.5 to 1
    sdxl = {
        *((704, 1408), (704, 1344), (768, 1344), (768, 1280), (832, 1216), (832, 1152)),
        *((896, 1152), (896, 1088), (960, 1088), (960, 1024), (1024, 1024)),
    }
    assert set(pixels.bucket_shapes(1024)) == sdxl | {shape[::-1] for shape in sdxl}
    assert pixels.bucket_shapes(256) == ((192, 320), (256, 256), (320, 192))
    with pytest.raises(ValueError, match='multiple of 64, not 224'):
        pixels.bucket_shapes(224)


@hypothesis.given(
    width=st.integers(1, 900), height=st.integers(1, 900), size=st.sampled_from([128, 256])
)
def test_images_get_the_nearest_bucket_or_a_reason(width, height, size):
    shapes = pixels.bucket_shapes(size, step=32)
    image = Image.new('L', (width, height))
    try:
        crops = read(image, pixels.Target(shapes), compress_level=1).crops
    except pixels.SmallImageError as error:
        wide = [shape for shape in shapes if height >= shape[0] and width >= shape[1]]
        ratio = max(width / height, height / width) / max(w / h for h, w in shapes)
        assert {'too small': len(wide) < len(shapes), 'too narrow': ratio > 1.49}[error.reason]
    else:
        shape = crops.shape[1:3]
        assert shape in shapes and height >= shape[0] and width >= shape[1]
        # No other shape would keep more of the image.
        shares = {
            (h, w): min(width * h / (height * w), height * w / (width * h)) for h, w in shapes
        }
        assert shares[shape] == pytest.approx(max(shares.values())) and shares[shape] > 0.64


# --- Bad images ----------------------------------------------------------------------------------


def read_all(files: dict[str, bytes], target: pixels.Target) -> dict[str, str]:
    """The reasons of images that are not read; the others must have the shape of the target."""
    reasons = {}
    for name, data in files.items():
        try:
            result = pixels.read_pixels(data, target)
        except pixels.BadImageError as error:
            assert str(error).startswith(error.reason) and len(str(error).splitlines()) == 1
            reasons[name] = error.reason
        else:
            assert result.crops.shape[0] == target.crops and result.crops.shape[3] == 3
            assert result.crops.shape[1:3] in target.shapes
    return reasons


def test_each_hostile_image_is_read_or_has_a_reason():
    reasons = read_all(hostile_images.make(), SQUARE)
    assert reasons == {name: reason for reason, names in REASONS.items() for name in names}


def test_errors_can_be_pickled_and_have_one_line():
    for kind in (pixels.BadImageError, pixels.SmallImageError):
        error = pickle.loads(pickle.dumps(kind('damaged or cut off', 'two\nlines')))
        assert (type(error), error.reason) == (kind, 'damaged or cut off')
        assert str(error) == 'damaged or cut off: two lines'


def test_pixels_above_the_limit_are_refused():
    image = Image.new('L', (100, 80))
    assert read(image, SQUARE._replace(max_pixels=8000)).crops.shape == (1, 64, 64, 3)
    with pytest.raises(pixels.BadImageError, match='more than max_pixels: 100x80'):
        read(image, SQUARE._replace(max_pixels=7999))


@pytest.mark.parametrize('number', [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damages_leave_pixels_or_a_reason(number):
    # A child measures the memory, because this process has had its peak long before.
    code = f"""
        import pathlib
        import re
        import warnings
        import numpy as np
        from tests import hostile_images
        from tests.pictures.test_pixels import BUCKETS, SQUARE, read_all

        def peak():
            status = pathlib.Path('/proc/self/status').read_text()
            return int(re.search('VmHWM:(.*)kB', status)[1]) / 1024

        warnings.simplefilter('error')
        files, random = hostile_images.undamaged(), np.random.default_rng({number})
        damages = {{
            str(k): hostile_images.damage(files[k % len(files)], random) for k in range({number})
        }}
        hostile = hostile_images.make()
        assert not read_all(dict(enumerate(files)), SQUARE)
        pathlib.Path('/proc/self/clear_refs').write_text('5')  # forgets the peak
        before = peak()
        for target in SQUARE, BUCKETS:
            reasons = read_all(damages, target)
            assert {number} / 9 < len(reasons) < {number}, reasons
            read_all(hostile, target)
        print(peak() - before)
        """
    with children.python(code) as child:
        output, errors = child.communicate()
    assert not errors
    assert float(output) < 100  # MB; the rows of column.png would take 250
