"""Encodes images into latents: a source that a build takes as it is.

    python -m coyo11m_tfds.encode_images --images=PHOTOS \\
        --vae=stabilityai/sdxl-vae --out=SOURCE
    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT \\
        --encoder=words --config='{"validation_fraction": 0.04}'

PHOTOS is a folder, local, on gs:// or on hf://, of images with captions next to them, of tars, or
of Parquet files (docs/images.md). SOURCE, local or on gs://, receives tars of latents. With
--buckets, images keep their aspect ratio, and each folder SOURCE/HEIGHTxWIDTH is a source. The
first command ends with the second for your folders, with a fraction that leaves at least about ten
images for validation.

The same command resumes an interrupted run: it keeps finished parts, and refuses those of another
VAE, of other options or of other images. Several processes, on one machine or on many, share the
work in a job of `torchrun`, `srun` or `mpirun`, or with `--part 0/4` to `--part 3/4`.

Images that are damaged or of a kind that is not taken are left out, counted and named; if they are
more than --max_bad of all, the run ends with an error after the part that it is at.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import time
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import BuildSettings, choose_validation_fraction
from coyo11m_tfds.encoding import parts as encoding_parts
from coyo11m_tfds.encoding.decoders import Decoders
from coyo11m_tfds.encoding.folder import EncodingFolder
from coyo11m_tfds.encoding.image_counts import ImageCounts
from coyo11m_tfds.encoding.parts import PartTars
from coyo11m_tfds.encoding.settings import EncodingSettings
from coyo11m_tfds.images import image_files
from coyo11m_tfds.images.image_files import FoundImages
from coyo11m_tfds.images.source_image import ImagePart
from coyo11m_tfds.pictures.pixels import OtherImageError
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from coyo11m_tfds.process import command_line, machine
from coyo11m_tfds.process import job as ranks
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage.scratch import Scratch, check_out, scratch_folder

# Of fewer images, a few bad ones do not stop a run before its end.
_MANY_IMAGES = 4096
_LEAST_ROWS = 100  # of a bucket in a mixture, so that its train split fills all lanes


@dataclasses.dataclass(frozen=True)
class EncodingReport:
    """The outcome of `encode`."""

    counts: ImageCounts  # of all finished parts, also of those of other processes and runs
    num_encoded: int  # images that this run encoded
    missing_parts: tuple[int, ...]  # that other processes have to make
    vae: str
    seconds: float

    def __str__(self) -> str:
        encoded = format_count(self.num_encoded, 'of them was', 'of them were')
        return (
            f'{self.counts}\n{encoded} encoded now by {self.vae} '
            f'({self.num_encoded / self.seconds:.1f} images/s)'
            f'{ranks.describe_missing_parts(self.missing_parts)}'
        )


def encode(
    images: str | os.PathLike[str],
    vae: str | os.PathLike[str] | VaeEncoder,
    out: str | os.PathLike[str],
    settings: EncodingSettings | None = None,
    *,
    share: tuple[int, int] = (0, 1),
) -> EncodingReport:
    """Encodes the images of a folder, except those of finished parts, into tars of latents.

    Args:
        images: Folder of images, of tars or of Parquet files (see `image_files`); local, on `gs://`
            or on `hf://`.
        vae: Folder or hub name of the VAE, or its encoder.
        out: A folder, local or on `gs://`.
        settings: By default those of `EncodingSettings`.
        share: `(i, n)` to make only the parts i, i + n, i + 2n, ...

    Raises:
        ValueError: A wrong argument, no image, too many bad images, or an encoding in `out` with
            another VAE, other settings or other images.
        OSError: A folder cannot be read or written.
        MemoryError: An image is too large for the memory that is left.
    """
    settings = settings or EncodingSettings()
    out = storage.expand_home(out).rstrip('/')
    ranks.check_share(share)
    check_out(out, settings.scratch_dir)
    # Before the listing, which takes minutes for millions of images.
    encoder = vae if isinstance(vae, VaeEncoder) else VaeEncoder(os.fspath(vae))
    settings.check_encoder(encoder)
    # Refuses an encoding of another kind.
    folder = EncodingFolder(out, settings.record(encoder))
    parts, left = _find_images(images, settings)
    if left:
        # Before hours of work, after which the report counts them by reason.
        logging.warning('%s:%s', images, image_files.describe_left(left))
    start = time.perf_counter()
    index, count = share
    own_parts = {number: parts[number] for number in range(index, len(parts), count)}
    # Refuses an encoding of other images, before anything is encoded.
    folder.begin(parts, own_parts)
    num_encoded = _encode_parts(folder, own_parts, encoder, settings, out)
    # Meanwhile other processes have made parts.
    folder.read_receipts()
    missing = [number for number in range(len(parts)) if number not in folder.receipts]
    counts = folder.counts
    # As long as parts are missing, a few images say nothing about all.
    least_images = _MANY_IMAGES if missing else 0
    counts.check_bad(settings.max_bad, least_images)
    # Files of other kinds are not bad, but the report says that they were left out.
    for name, reason in sorted(left.items()):
        counts.drop(name, OtherImageError(reason))
    if not missing:
        if not counts.shapes:
            raise ValueError(f'{images}: no image is left. {counts}')
        folder.finish()
    seconds = time.perf_counter() - start
    return EncodingReport(counts, num_encoded, tuple(missing), encoder.name, seconds)


def _find_images(images: str | os.PathLike[str], settings: EncodingSettings) -> FoundImages:
    """Returns the images of a folder in parts; a ValueError if two of them would have one key."""
    divide = functools.partial(
        encoding_parts.divide_images,
        # Those of a bucket have about as many pixels.
        num_pixels=settings.crops * settings.size**2,
        num_shapes=len(settings.target.shapes),
        most=settings.part_images,
    )
    found_images = image_files.find_images(
        images, settings.caption_column, divide, has_keys_of_paths=settings.has_keys_of_paths
    )
    image_files.check_first_images(found_images.parts)
    return found_images


def _encode_parts(
    folder: EncodingFolder,
    parts: Mapping[int, ImagePart],
    encoder: VaeEncoder,
    settings: EncodingSettings,
    out: str,
) -> int:
    """Encodes the parts that are missing, in turn; returns the number of images."""
    num_encoded = 0
    num_bytes = sum(part.num_bytes for part in parts.values())
    with (
        scratch_folder(out, settings.scratch_dir) as scratch_dir,
        Decoders(settings.target, settings.num_workers) as decoders,
        Progress('Encoding images', num_bytes, 'B', {'parts': len(parts)}) as progress,
    ):
        scratch = Scratch(scratch_dir)
        for number, part in parts.items():
            # It was finished by an earlier run.
            if number in folder.receipts:
                progress.skip(part.num_bytes, parts=1)
                continue
            # Before more hours are spent.
            folder.counts.check_bad(settings.max_bad, _MANY_IMAGES)
            # Of a part of which only texts have changed, the latents are still good.
            kept_latents = folder.read_latents(number, scratch)
            with (
                PartTars(scratch_dir, encoder, settings, kept_latents) as tars,
                part.open(scratch) as images,
                contextlib.closing(decoders.decode_all(images)) as decoded_images,
            ):
                tars.encode(decoded_images, progress)
            tars.counts.leave_texts(part.unused_texts)
            # Whatever else the files hold, such as captions.
            progress.add(part.num_bytes - tars.num_bytes, parts=1)
            # One after the other, so that a killed run has lost at most one part.
            folder.store_part(number, tars)
            num_encoded += tars.counts.shapes.total() - tars.num_kept
    return num_encoded


def describe_next(out: str, counts: ImageCounts, has_buckets: bool) -> str:
    """Returns the commands that build the data set or, of buckets, train on a mixture of them."""
    if counts.num_without_caption == counts.shapes.total():
        return (
            'No image has a caption. If their data have captions by another name, encode them into '
            'another folder with --caption_column; otherwise a build needs a Parquet file of '
            'captions by key (build --captions).'
        )
    if has_buckets:
        return _describe_buckets(out, counts)
    # Most builds need no more than the folder. A record needs a caption.
    config = _choose_config(counts.shapes.total() - counts.num_without_caption)
    command = _build_command(out, 'words')
    command.append(f'--manual_dir={out}')
    if config:
        command.append(f'--config={json.dumps(config)}')
    return shlex.join(command)


def _describe_buckets(out: str, counts: ImageCounts) -> str:
    """Returns commands that number words, build a data set of each bucket, and mix them."""
    # Of a small one, the train split may have fewer records than a mixture has lanes: streams that
    # all give the same number of samples to each batch.
    large = {}
    small = []
    for shape, count in sorted(counts.shapes.items()):
        if count >= _LEAST_ROWS:
            large[shape] = count
        else:
            small.append(shape)
    if not large:
        return f'Each bucket has fewer than {_LEAST_ROWS} images, too few to train on.'
    lines = []
    if small:
        lines.append(f'Too few images for the mixture: {", ".join(small)}')

    # The data sets of a mixture must number words alike: by those of all captions.
    embed = ['python', '-m', 'coyo11m_tfds.embed_captions', '--encoder=words', '--tokens_only']
    embed += [f'--source={out}/$shape', f'--out={out}-words/$shape']
    lines.append(_repeat_for_shapes(large, embed))
    encoder = ','.join(f'words:{out}-words/{shape}' for shape in large)

    config = _choose_config(min(large.values())) | {'name': '$shape', 'latents': 'in_place'}
    build = _build_command(out, encoder)
    build += [f'--manual_dir={out}/$shape', f'--config={json.dumps(config)}']
    lines.append(_repeat_for_shapes(large, build))

    # In shares of all images, in whole percents.
    num_images = sum(large.values())
    sources = []
    for seed, (shape, count) in enumerate(large.items()):
        source = {
            'dir': f'{_data_dir(out)}/{schema.NAME}/{shape}/{schema.VERSION}',
            'weight': max(1, round(100 * count / num_images)),
            # Different seeds, because buckets of equal numbers of images would come in lockstep.
            'seed': seed,
        }
        # As Python writes dicts, with double quotes; it has no escapes in two halves.
        sources.append(json.dumps(source, ensure_ascii=False))
    # The model of `default` is too large for a CPU.
    name = 'default' if machine.accelerators() else 'small'
    flags = [
        f'--config={name}',
        f'--workdir={out}-run',
        f'--config.data.mix=({", ".join(sources)},)',
    ]
    lines.append(f'python -m train_lib.main {shlex.join(flags)}')
    return '\n'.join(lines)


def _repeat_for_shapes(shapes: Iterable[str], command: Iterable[str]) -> str:
    """Returns a loop of the shell that replaces `$shape` in a command by each shape."""
    # The shell replaces the variable only outside of the quotes.
    command_of_shape = shlex.join(command).replace('$shape', "'$shape'")
    return f'for shape in {" ".join(shapes)}; do {command_of_shape}; done'


def _data_dir(out: str) -> str:
    """Returns the folder of data sets, which lies next to the source."""
    return f'{out}-data'


def _build_command(out: str, encoder: str) -> list[str]:
    """Returns the beginning of the command of a build, which lacks the source."""
    flags = [f'--encoder={encoder}', f'--data_dir={_data_dir(out)}']
    return ['python', '-m', 'coyo11m_tfds.build', *flags]


def _choose_config(num_records: int) -> dict[str, Any]:
    """Returns the fields of a build's config that must differ from their defaults."""
    fraction = choose_validation_fraction(num_records)
    # A small data set needs a larger part to have some images for validation.
    if fraction > BuildSettings.validation_fraction:
        return {'validation_fraction': fraction}
    return {}


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.encode_images', __doc__)
    add = parser.add_argument
    defaults = EncodingSettings()
    add('--images', required=True, help='folder of the images, local, gs:// or hf://')
    add('--vae', required=True, help='folder or hub name of the VAE')
    add('--out', required=True, help='folder to fill, local or gs://')
    hint = 'height and width in pixels (%(default)s)'
    add('--size', type=int, default=defaults.size, help=hint)
    add('--buckets', action='store_true', help='shapes of that area, the closest for each image')
    hint = '1 for the centre, 3 also for both ends (%(default)s)'
    add('--crops', type=int, default=defaults.crops, help=hint)
    add('--moments', action='store_true', help='write mean and deviation, from which steps draw')
    add('--dtype', default=defaults.dtype, help='of the latents: float16 or float32 (%(default)s)')
    add('--caption_column', default='', help='field of the captions (the usual names)')
    hint = 'data, or path for keys that are hashes of paths (%(default)s)'
    add('--keys', default=defaults.keys, help=hint)
    hint = 'largest share of images that may be bad (%(default)s)'
    add('--max_bad', type=float, default=defaults.max_bad, help=hint)
    hint = 'most pixels of an image (%(default)s)'
    add('--max_pixels', type=int, default=defaults.max_pixels, help=hint)
    ranks.add_share_flag(parser)
    hint = 'most images of a part, outside of tars and Parquet files (by their number and size)'
    add('--part_images', type=int, default=0, help=hint)
    add('--num_workers', type=int, default=0, help='processes that decode (one on each core)')
    add('--scratch_dir', default='', help='local folder for temporary files (in a local OUT)')
    options = vars(parser.parse_args())
    command_line.show_log()
    fixable = ValueError, OSError, RuntimeError, MemoryError
    with command_line.ends_in_one_line('the same command resumes it', fixable):
        share = options.pop('part') or ranks.index_and_count()
        images = options.pop('images')
        vae = options.pop('vae')
        out = options.pop('out')
        # What is left has the names of the fields.
        settings = EncodingSettings(**options)
        report = encode(images, vae, out, settings, share=share)
        command_line.print_lines(*f'{report}: {out}'.split('\n'))
        if not report.missing_parts:
            commands = describe_next(out.rstrip('/'), report.counts, settings.buckets)
            command_line.print_lines(*commands.split('\n'))


if __name__ == '__main__':
    main()
