"""Makes images that are damaged, huge, of other kinds, or made to harm who reads them.

files = hostile_images.make()                       # name -> bytes, 67 of them
hostile_images.damage(data, np.random.default_rng(0))   # one of six random damages
"""

import io
import math
import re
import struct
import zlib

import numpy as np
from PIL import Image, ImageCms

PNG_SIGNATURE = b'\x89PNG\r\n\x1a\n'


def photo(height: int = 96, width: int = 128, seed: int = 0) -> Image.Image:
    """A picture with large and small structures, as a photograph has."""
    noise = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    """The bytes of a file of one of Pillow's kinds."""
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    crc = zlib.crc32(name + content)
    return struct.pack('>I', len(content)) + name + content + struct.pack('>I', crc)


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file of such a header, these chunks and an end."""
    header = struct.pack('>IIBBBBB', width, height, depth, colour, 0, 0, 0)
    return b''.join([PNG_SIGNATURE, chunk(b'IHDR', header), *chunks, chunk(b'IEND', b'')])


def segment(content: bytes, marker: int = 0xE1) -> bytes:
    """A segment of a JPEG file."""
    return struct.pack('>BBH', 0xFF, marker, len(content) + 2) + content


def exif_bomb() -> bytes:
    """An EXIF of 0.5 MB, each of whose 500 tags holds nearly all of it."""
    tags = [struct.pack('<HHII', 1000 + k, 7, 500_000, 8) for k in range(500)]
    return b''.join([b'II*\0\x08\0\0\0', struct.pack('<H', len(tags)), *tags, bytes(500_000)])


def scans(width: int, height: int, number: int) -> bytes:
    """A progressive JPEG with one of its scans so many times."""
    data = encode(Image.new('RGB', (width, height)), 'JPEG', progressive=True)
    starts = [match.start() for match in re.finditer(b'\xff\xda', data)]
    _, second, third, *_ = starts
    return data[:third] + data[second:third] * number + data[third:]


def make() -> dict[str, bytes]:
    """Files by name."""
    files = _of_no_kind() | _of_jpeg() | _of_png() | _of_webp()
    assert len(files) == 67, len(files)
    return files


def make_large(pixels: int) -> list[tuple[str, bytes]]:
    """Images of almost so many pixels that take the most memory, by suffix."""
    side = math.isqrt(pixels)
    image = photo(side, side)
    # Turned by 90 degrees, which takes a copy.
    exif = Image.Exif()
    exif[0x112] = 6
    return [
        ('png', encode(image.convert('RGBA'), 'PNG', compress_level=1, exif=exif)),
        ('webp', encode(image, 'WEBP', method=0, exif=exif)),
        ('jpg', encode(image, 'JPEG', progressive=True, subsampling=0, exif=exif)),
    ]


def damage(data: bytes, random: np.random.Generator) -> bytes:
    """The data, cut, or with bits flipped, or a stretch cleared, removed, repeated or replaced."""
    start, end = sorted(random.integers(0, len(data) + 1, 2).tolist())
    # A stretch of at most 63 bytes.
    near = min(end, start + int(random.integers(1, 64)))
    kind = random.integers(6)
    if kind == 0:
        return data[:start]
    if kind == 1:
        flipped = np.frombuffer(data, np.uint8).copy()
        for place in random.integers(0, len(data), random.integers(1, 20)):
            flipped[place] ^= 1 << random.integers(8)
        return flipped.tobytes()
    middle = {
        2: bytes(near - start),
        3: b'',
        4: data[start:near] * 3,
        5: random.bytes(near - start),
    }[int(kind)]
    return data[:start] + middle + data[near:]


def undamaged() -> list[bytes]:
    """Files of every kind that is read, to be damaged."""
    image = photo()
    exif = Image.Exif()
    exif[0x112] = 6
    profile = srgb_profile()
    return [
        encode(image, 'JPEG', exif=exif, icc_profile=profile),
        encode(image, 'JPEG', progressive=True),
        encode(image.convert('L'), 'JPEG'),
        encode(image, 'PNG', exif=exif, icc_profile=profile),
        encode(image.convert('RGBA'), 'PNG'),
        encode(image.quantize(64), 'PNG', transparency=3),
        encode(image, 'WEBP', exif=exif, icc_profile=profile),
        encode(image.convert('RGBA'), 'WEBP', lossless=True),
    ]


def srgb_profile() -> bytes:
    """An ICC profile of sRGB."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()


def many_stages(number: int) -> bytes:
    """An ICC profile that adds 0.001 to the red of all colours so many times."""
    # A matrix of 3 x 3, and what is added.
    stage = struct.pack('>4sIHH', b'matf', 0, 3, 3)
    stage += struct.pack('>12f', 1, 0, 0, 0, 1, 0, 0, 0, 1, 0.001, 0, 0)
    # All places are that of the one stage, behind them.
    places = struct.pack('>II', 16 + 8 * number, len(stage)) * number
    stages = struct.pack('>4sIHHI', b'mpet', 0, 3, 3, number) + places + stage
    # The only tag is that of colours to be shown.
    tags = struct.pack('>I4sII', 1, b'D2B0', 144, len(stages))
    header = bytearray(srgb_profile()[:128])
    header[:4] = struct.pack('>I', 144 + len(stages))
    return bytes(header) + tags + stages


def _of_no_kind() -> dict[str, bytes]:
    image = photo()
    frames = [photo(seed=seed) for seed in (1, 2)]
    kinds = {
        'gif.jpg': ('GIF', {}),
        'animated.gif.png': ('GIF', {'save_all': True, 'append_images': frames}),
        'tiff.jpg': ('TIFF', {}),
        'bmp.png': ('BMP', {}),
        'ico.png': ('ICO', {}),
        'ppm.jpg': ('PPM', {}),
        'jpeg2000.jpg': ('JPEG2000', {}),
        'pdf.jpg': ('PDF', {}),
        'eps.jpg': ('EPS', {}),
    }
    files = {name: encode(image, kind, **options) for name, (kind, options) in kinds.items()}
    return files | {
        'empty.jpg': b'',
        'byte.jpg': b'\xff',
        'page.jpg': b'<!DOCTYPE html><html><body>404 Not Found</body></html>',
        'error.jpg': b'{"error": "AccessDenied"}',
        'drawing.jpg': b'<svg xmlns="http://www.w3.org/2000/svg"><image href="/etc/passwd"/></svg>',
        'text.png': 'Ein Bild: ü\n'.encode() * 100,
        'zeros.jpg': bytes(10_000),
        'random.webp': np.random.default_rng(0).bytes(10_000),
        'archive.jpg': b'PK\x03\x04' + bytes(1000),
    }


def _of_jpeg() -> dict[str, bytes]:
    image = photo()
    data = encode(image, 'JPEG')
    body = data[2:]
    frame = data.index(b'\xff\xc0') + 5  # height and width, two bytes each

    def sized(height: int, width: int) -> bytes:
        return data[:frame] + struct.pack('>HH', height, width) + data[frame + 4 :]

    def with_exif(tags: bytes) -> bytes:
        return b'\xff\xd8' + segment(b'Exif\0\0' + tags) + body

    def with_profile(number: int, count: int, profile: bytes) -> bytes:
        header = b'ICC_PROFILE\0' + bytes([number, count])
        return b'\xff\xd8' + segment(header + profile, 0xE2) + body

    bomb = exif_bomb()
    pieces = [b'Exif\0\0' + bomb[k : k + 65_000] for k in range(0, len(bomb), 65_000)]
    mpo = encode(image, 'MPO', save_all=True, append_images=[photo(seed=3)])
    offset = mpo.index(b'MPF\0')
    return {
        'start.jpg': b'\xff\xd8',
        'header.jpg': data[:frame],
        'half.jpg': data[: len(data) // 2],
        'no-end.jpg': data[:-2],
        'vast.jpg': sized(65500, 65500),
        'higher.jpg': sized(9600, 128),
        'flat.jpg': sized(0, 128),
        'print.jpg': encode(image.convert('CMYK'), 'JPEG'),
        'scans.jpg': scans(512, 512, 30_000),
        'more-scans.jpg': scans(128, 96, 95),
        'video.jpg': data + b'\xff\xda' * 1000,
        'segments.jpg': b'\xff\xd8' + segment(b'', 0xE5) * 50_000 + body,
        'end-first.jpg': b'\xff\xd8\xff\xd9' + segment(b'', 0xE5) * 50_000 + body,
        'exif-bomb.jpg': b'\xff\xd8' + b''.join(map(segment, pieces)) + body,
        'exif-garbage.jpg': with_exif(np.random.default_rng(1).bytes(500)),
        'exif-loop.jpg': with_exif(b'II*\0\x08\0\0\0\0\0\x08\0\0\0'),
        'exif-99.jpg': with_exif(
            b'II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0'
        ),
        'exif-count.jpg': with_exif(
            b'II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\xff\x1a\0\0\0\0\0\0\0'
        ),
        'profile-garbage.jpg': with_profile(1, 1, bytes(range(256)) * 3),
        'profile-lacks-parts.jpg': with_profile(2, 9, srgb_profile()),
        'two-frames.jpg': mpo,
        'two-frames-broken.jpg': mpo[: offset + 8] + b'\xff' * 40 + mpo[offset + 48 :],
    }


def _of_png() -> dict[str, bytes]:
    image = photo()
    data = encode(image, 'PNG')
    pixels = chunk(b'IDAT', zlib.compress(bytes(385 * 96)))
    bomb = zlib.compress(bytes(20_000_000))
    frames = [photo(seed=seed) for seed in (4, 5)]
    return {
        'start.png': PNG_SIGNATURE,
        'half.png': data[: len(data) // 2],
        'checksum.png': data[:29] + b'\0\0\0\0' + data[33:],
        'no-pixels.png': png(128, 96),
        'few-pixels.png': png(128, 96, chunk(b'IDAT', zlib.compress(bytes(1000)))),
        'more-pixels.png': png(128, 96, chunk(b'IDAT', bomb)),
        'vast.png': png(60_000, 60_000, pixels),
        'bits.png': png(
            20_000, 20_000, chunk(b'IDAT', zlib.compress(bytes(5_000_000))), depth=1, colour=0
        ),
        'line.png': png(100_000_000, 1, pixels),
        'column.png': png(1, 33_000_000, pixels),
        'flat.png': png(0, 96, pixels),
        'negative.png': png(0xFFFFFFFF, 0xFFFFFFFF, pixels),
        'text-bomb.png': png(128, 96, chunk(b'zTXt', b'a\0\0' + bomb), pixels),
        'international-bomb.png': png(128, 96, chunk(b'iTXt', b'a\0\1\0\0\0' + bomb), pixels),
        'profile-bomb.png': png(128, 96, chunk(b'iCCP', b'a\0\0' + bomb), pixels),
        'exif-bomb.png': encode(image, 'PNG', exif=exif_bomb()),
        'profile-stages.png': encode(image, 'PNG', icc_profile=many_stages(20_000)),
        'chunks.png': png(128, 96, *[chunk(b'tEXt', b'a\0b')] * 100_000, pixels),
        'grey16.png': encode(Image.fromarray(np.zeros((96, 128), np.uint16)), 'PNG'),
        'colour16.png': png(128, 96, chunk(b'IDAT', zlib.compress(bytes(769 * 96))), depth=16),
        'animated.png': encode(image, 'PNG', save_all=True, append_images=frames),
    }


def _of_webp() -> dict[str, bytes]:
    image = photo()
    frames = [photo(seed=seed) for seed in (6, 7)]
    lossy = encode(image, 'WEBP')
    lossless = encode(image, 'WEBP', lossless=True)
    vast = struct.pack('<4sI', b'VP8X', 10) + bytes(4) + b'\xfe\x3f\x00' * 2  # 16,383 pixels a side
    content = b'WEBP' + vast + lossy[12:]
    return {
        'start.webp': lossy[:12],
        'half.webp': lossy[: len(lossy) // 2],
        'half-lossless.webp': lossless[: len(lossless) // 2],
        'length.webp': lossy[:4] + b'\xff\xff\xff\x7f' + lossy[8:],
        'vast.webp': b'RIFF' + struct.pack('<I', len(content)) + content,
        'animated.webp': encode(image, 'WEBP', save_all=True, append_images=frames),
    }
