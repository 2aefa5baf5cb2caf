"""Times the encoding of images: the program, the work that it cannot avoid, and a diffusers loop.

    python -m benchmarks.images --dir /tmp/images --vae=madebyollin/taesdxl   # or a folder

The work that cannot be avoided is that of Pillow, which decodes and resizes the images, and that of
the encoder, one after the other in one process. All sides read the same JPEGs, and write float16
latents. Imports and compilation come before the clock starts.
"""

import pathlib
import shutil
import sys
from collections.abc import Iterator

import numpy as np
from PIL import Image

from benchmarks import runner
from benchmarks.runner import Figures, Meter, Side

SIZE = 256
BATCH = 8
_IMAGE_SIZE = 800, 600  # (W, H)
FLAGS = {
    'vae': ('madebyollin/taesdxl', 'folder or hub name of an AutoencoderTiny'),
    'images': (400, 'JPEGs of 800x600'),
}
COLUMNS = {
    'images/s': runner.column('rate', ',.1f'),
    'all runs': runner.all_runs('rate', ',.1f'),
    'CPU ms an image': runner.column('cpu_per_sample', ',.1f', 1e3),
}


def make_images(folder: pathlib.Path, count: int) -> pathlib.Path:
    """Makes JPEGs with structures of all sizes, and captions; returns their folder."""
    images = folder / f'images-{count}'
    images.mkdir(exist_ok=True)
    for number in range(count):
        # By its number: the first images are the same, however many there are.
        random = np.random.default_rng(number)
        width, height = _IMAGE_SIZE
        picture = np.zeros((height, width, 3))
        # The amplitudes of photographs fall with the frequency.
        for cells in (4, 16, 64, 256):
            noise = random.integers(0, 256, (cells, cells, 3), np.uint8)
            layer = Image.fromarray(noise).resize(_IMAGE_SIZE, Image.Resampling.BICUBIC)
            picture += np.asarray(layer) / cells**0.5
        picture *= 255 / picture.max()
        image = Image.fromarray(picture.astype(np.uint8))
        image.save(images / f'{number:06}.jpg', quality=90)
        (images / f'{number:06}.txt').write_text(f'Image {number}')
    return images


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Makes the images; returns what encodes them into an empty folder."""
    images = make_images(folder, flags.images)
    out = folder / 'out'

    def run_side(side: Side) -> Figures:
        """Encodes all images once; what a run has encoded, the next one must not keep."""
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        runner.prepare_cache([images], cold=False)
        return runner.run(side, images=images, vae=flags.vae, out=out)

    return run_side


def encode_images(*, images: str, vae: str, out: str) -> Figures:
    """Runs the function of the program, with the start of its processes."""
    from coyo11m_tfds import encode_images as program
    from coyo11m_tfds.encoding.settings import EncodingSettings
    from coyo11m_tfds.pictures import vae_encoder

    encoder = vae_encoder.VaeEncoder(vae)
    encoder.encode(np.zeros((1, SIZE, SIZE, 3), np.uint8))  # compiles
    meter = Meter()
    report = program.encode(images, encoder, out, EncodingSettings(size=SIZE))
    return meter.rate(report.num_encoded)


def pillow_and_encoder(*, images: str, vae: str, out: str) -> Figures:
    """Decodes, resizes, crops and encodes, and nothing else."""
    from coyo11m_tfds.pictures import vae_encoder

    encoder = vae_encoder.VaeEncoder(vae)
    encoder.encode(np.zeros((1, SIZE, SIZE, 3), np.uint8))
    meter = Meter()
    rows = []
    for batch in _batches(images):
        pixels = np.stack([_resize(image) for image in batch])
        latents, _ = encoder.encode(pixels)
        rows += list(latents)
    np.save(pathlib.Path(out, 'latents.npy'), np.stack(rows).astype(np.float16))
    return meter.rate(len(rows))


def diffusers_loop(*, images: str, vae: str, out: str) -> Figures:
    """The loop of diffusers' documentation, in batches on the CPU."""
    import diffusers
    import torch
    from diffusers.image_processor import VaeImageProcessor

    encoder = diffusers.AutoencoderTiny.from_pretrained(vae).eval()
    processor = VaeImageProcessor()
    meter = Meter()
    rows = []
    with torch.inference_mode():
        for batch in _batches(images):
            pixels = processor.preprocess(batch, height=SIZE, width=SIZE, resize_mode='crop')
            rows += list(encoder.encode(pixels).latents.numpy())
    np.save(pathlib.Path(out, 'latents.npy'), np.stack(rows).astype(np.float16))
    return meter.rate(len(rows))


def _batches(images: str) -> Iterator[list[Image.Image]]:
    """Yields all images of a folder, decoded, a few at a time."""
    paths = sorted(pathlib.Path(images).glob('*.jpg'))
    for first in range(0, len(paths), BATCH):
        batch = []
        for path in paths[first : first + BATCH]:
            # Pillow opens a file without decoding it; the conversion does that.
            batch.append(Image.open(path).convert('RGB'))
        yield batch


def _resize(image: Image.Image) -> np.ndarray:
    """Returns the centre of an image, uint8 `(SIZE, SIZE, 3)`, reduced to just this height."""
    scale = SIZE / min(image.size)
    width = round(image.width * scale)
    height = round(image.height * scale)
    left = (width - SIZE) // 2
    top = (height - SIZE) // 2
    reduced = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(reduced.crop((left, top, left + SIZE, top + SIZE)))


SIDES = {
    'encode_images': Side('`encode_images`', encode_images, ours=True),
    'parts': Side('Pillow and the encoder alone', pillow_and_encoder),
    'diffusers': Side('loop with diffusers', diffusers_loop),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, COLUMNS, FLAGS, prepare))
