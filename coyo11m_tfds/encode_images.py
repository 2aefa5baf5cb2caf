"""Encodes images into latents: a source that a build takes as it is.

    python -m coyo11m_tfds.encode_images --images=PHOTOS \\
        --vae=stabilityai/sdxl-vae --out=SOURCE
    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT \\
        --encoder=hash --config='{"validation_fraction": 0.04}'

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

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import shlex
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

import numpy as np
from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import BuildSettings, choose_validation_fraction
from coyo11m_tfds.pictures import image_kinds, pixels, vae_encoder
from coyo11m_tfds.pictures.pixels import (
    BadImageError,
    OtherImageError,
    Pixels,
    SmallImageError,
    Target,
)
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from coyo11m_tfds.process import command_line, errors, machine, workers
from coyo11m_tfds.process import job as ranks
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.shown_text import escape_for_terminal
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import image_files, tar_members
from coyo11m_tfds.source.encoding_file import EncodedState, Encoding
from coyo11m_tfds.source.file_names import MAX_NAMES, list_names
from coyo11m_tfds.source.image_files import ImagePart, SourceImage
from coyo11m_tfds.storage import file_state, json_digest
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.receipts import Receipt, Receipts
from coyo11m_tfds.storage.scratch import Scratch, check_out, scratch_folder

# Of images in files. A stop loses the part that it is at, and each part is a tar. So a part has a
# 256th of all images, whatever the speed. But it has as many as two slow cores encode with SDXL's
# VAE in 10 to 20 seconds (32 of 256 pixels), or decode in about as long, and no more than a tar.
_SHARES_OF_IMAGES = 256
_LEAST_PIXELS, _LEAST_BYTES = 32 * 256**2, 256 << 20
_MOST_IMAGES = 4096  # 45 MB of latents of 256 pixels
MAX_BAD = 0.01
KEYS_OF_DATA, KEYS_OF_PATHS = 'data', 'path'

_PARTS = '.encoded'  # folder of the receipts of parts
# NumPy's files have no name for bfloat16, and float16 rounds latents, which are small, less.
_DTYPES = 'float16', 'float32'
_NO_CAPTION = 'without a caption'
# Of the members of a tar: their suffixes, and the field with the name of the image.
_ARRAY, _FIELDS, _FILE = '.npy', '.json', 'file'
# Of the origin of a part: digests of its images, and of what may change without the latents.
_FILES, _TEXTS = 'files', 'texts'
# Of fewer images, a few bad ones do not stop a run before its end.
_MANY_IMAGES = 4096
# Reading waits for the storage, so there are more threads than workers.
_MORE_READS = 4
_IMAGES_AHEAD, _BYTES_AHEAD = 256, 256 << 20  # read and decoded while others are encoded
_Result = tuple[SourceImage, Pixels | BadImageError]
_Batch = list[tuple[str, SourceImage, Pixels]]  # with the names that images have in a tar
_LEAST_ROWS = 100  # of a bucket in a mixture, so that its train split fills all lanes


@dataclasses.dataclass
class ImageCounts:
    """Counts of the images of a part, or of several."""

    # Of encoded images: 'HEIGHTxWIDTH' of their pixels, and where their keys come from.
    shapes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    key_rules: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_without_caption: int = 0
    # Reasons of images that cannot be used, and of good ones that are too small or too narrow.
    bad: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    small: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # Reasons of images that are not taken, such as their formats; archives are among them.
    other: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # Reasons of texts in tars that belong to no image.
    texts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # the first by reason
    # Of those that are too small: the largest `size`, in decimal, that would take the image; '0' if
    # no size with buckets does.
    smaller_sizes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def count(self, image: SourceImage, shape: str) -> None:
        """Counts an encoded image."""
        self.shapes[shape] += 1
        self.key_rules[image.key_rule] += 1
        if not image.caption:
            self.num_without_caption += 1
            self._keep_name(_NO_CAPTION, image.name)

    def drop(self, name: str, error: BadImageError) -> None:
        """Counts an image that is left out."""
        counts = self.bad
        if isinstance(error, SmallImageError):
            counts = self.small
        elif isinstance(error, OtherImageError):
            counts = self.other
        counts[error.reason] += 1
        self._keep_name(error.reason, name)

    def leave_texts(self, reasons: Mapping[str, str]) -> None:
        """Counts texts that are not used, of which the reasons are given by their names."""
        for name, reason in reasons.items():
            self.texts[reason] += 1
            self._keep_name(reason, name)

    def _keep_name(self, reason: str, name: str) -> None:
        names = self.names.setdefault(reason, [])
        if len(names) < MAX_NAMES:
            names.append(name)

    def add(self, part: Mapping[str, Any]) -> None:
        """Adds the counts of a part, as `vars` gives them."""
        for name in ('shapes', 'key_rules', 'bad', 'small', 'other', 'texts', 'smaller_sizes'):
            getattr(self, name).update(part[name])
        self.num_without_caption += part['num_without_caption']
        for reason, names in part['names'].items():
            self.names[reason] = [*self.names.get(reason, ()), *names][:MAX_NAMES]

    def check_bad(self, max_bad: float, least: int = 0) -> None:
        """Raises a ValueError if more than `max_bad` of all images, at least `least`, are bad."""
        total = self.shapes.total() + self.bad.total() + self.small.total()
        if self.bad.total() > max_bad * max(total, least):
            are = 'is' if self.bad.total() == 1 else 'are'
            raise ValueError(
                f'{self.bad.total():,} of {format_count(total, "image")} {are} bad, more than '
                f'max_bad={max_bad}: '
                f'{self._list(self.bad)}. What is encoded is kept; raise max_bad to go on, or '
                'repair the images and choose another folder.'
            )

    def _list(self, counts: collections.Counter[str]) -> str:
        facts = []
        for reason, count in counts.most_common():
            # Reasons are words of any form, which a number cannot stand before.
            facts.append(f'{count:,} x {reason} ({self._list_names(reason, count)})')
        return '; '.join(facts)

    def _list_names(self, reason: str, count: int) -> str:
        return list_names(list(map(escape_for_terminal, self.names[reason])), count)

    def _advise_on_small(self) -> list[str]:
        """Says by which options images that are left out would be taken."""
        lines = []
        sizes = sorted(self.smaller_sizes.keys() - {'0'}, key=int, reverse=True)
        if sizes:
            taken = list(itertools.accumulate(self.smaller_sizes[size] for size in sizes))
            # One tiny image must not make the only advice a tiny size.
            half = next(n for n, count in enumerate(taken) if 2 * count >= taken[-1])
            places = sorted({half, len(sizes) - 1})
            ways = ' and '.join(f'--size={sizes[n]} would take {taken[n]:,}' for n in places)
            lines.append(f'Of those that are too small, {ways}.')
        if count := self.smaller_sizes['0']:
            too_small = format_count(count, 'is too small', 'are too small')
            lines.append(f'{too_small} for any buckets, but not without --buckets.')
        if self.small[pixels.TOO_NARROW]:
            lines.append('Without --buckets, those that are too narrow would be cropped.')
        return lines

    def __str__(self) -> str:
        facts = [format_count(self.shapes.total(), 'image')]
        facts += [f'{count:,} of {shape}' for shape, count in sorted(self.shapes.items())]
        for rule, count in self.key_rules.most_common():
            facts.append(f'{format_count(count, "key")} from {rule}')
        if self.num_without_caption:
            count = self.num_without_caption
            facts.append(f'{count:,} {_NO_CAPTION} ({self._list_names(_NO_CAPTION, count)})')
        lines = [', '.join(facts)]
        dropped = {'left out': self.small, 'bad': self.bad, 'not taken': self.other}
        for kind, counts in dropped.items():
            if counts:
                lines.append(f'{counts.total():,} {kind}: {self._list(counts)}')
        lines += self._advise_on_small()
        if self.other:
            lines.append(f'What is not taken: {image_kinds.ADVICE}.')
        if self.texts:
            texts = format_count(self.texts.total(), 'text')
            lines.append(f'{texts} not used: {self._list(self.texts)}')
        totals = {'encoded': self.shapes} | dropped
        num_found = sum(counts.total() for counts in totals.values())
        sums = ' + '.join(f'{counts.total():,} {kind}' for kind, counts in totals.items())
        lines.append(f'{num_found:,} found = {sums}')
        return '\n'.join(lines)


@dataclasses.dataclass(frozen=True)
class EncodingReport:
    """The outcome of `encode`."""

    counts: ImageCounts  # of all finished parts, also of those of other processes and runs
    num_encoded: int  # images that this run encoded
    missing_parts: tuple[int, ...]  # that other processes have to make
    vae: str
    seconds: float

    def __str__(self) -> str:
        return (
            f'{self.counts}\n{format_count(self.num_encoded, "of them was", "of them were")} '
            f'encoded now by {self.vae} '
            f'({self.num_encoded / self.seconds:.1f} images/s)'
            f'{ranks.describe_missing_parts(self.missing_parts)}'
        )


def encode(
    images: str | os.PathLike[str],
    vae: str | VaeEncoder,
    out: str | os.PathLike[str],
    *,
    size: int = 256,
    buckets: bool = False,
    crops: int = 1,
    moments: bool = False,
    dtype: str = 'float16',
    caption_column: str = '',
    keys: str = KEYS_OF_DATA,
    max_bad: float = MAX_BAD,
    max_pixels: int = pixels.MAX_PIXELS,
    share: tuple[int, int] = (0, 1),
    part_images: int = 0,
    num_workers: int = 0,
    scratch_dir: str | os.PathLike[str] = '',
) -> EncodingReport:
    """Encodes the images of a folder, except those of finished parts, into tars of latents.

    Args:
        images: Folder of images, of tars or of Parquet files (see `image_files`); local, on `gs://`
            or on `hf://`.
        vae: Folder or hub name of the VAE, or its encoder.
        out: A folder, local or on `gs://`.
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
        share: `(i, n)` to make only the parts i, i + n, i + 2n, ...
        part_images: Most images in a part, if they are not in tars or Parquet files; 0 for a number
            that depends on the images and the size, see `divide_images`.
        num_workers: Processes that decode images; 0 for one on each core.
        scratch_dir: Local folder for temporary files; '': a folder in `out` or, if that is remote,
            in the user's cache.
    """
    out = os.fspath(out).rstrip('/')
    ranks.check_share(share)
    check_out(out)
    errors.one_of(*_DTYPES).check('dtype', dtype)
    errors.one_of(KEYS_OF_DATA, KEYS_OF_PATHS).check('keys', keys)
    errors.UNIT_INTERVAL.check('max_bad', max_bad)
    errors.at_least(0).check('part_images', part_images)
    target = _make_target(size, buckets, crops, max_pixels)
    # Those of a bucket have about as many pixels.
    divide = functools.partial(
        divide_images, num_pixels=crops * size**2, num_shapes=len(target.shapes), most=part_images
    )
    parts, left = image_files.find_images(
        images, caption_column, divide, has_keys_of_paths=keys == KEYS_OF_PATHS
    )
    image_files.check_keys(parts)
    if left:
        # Before hours of work, after which the report counts them by reason.
        logging.warning('%s:%s', images, image_files.describe_left(left))
    encoder = vae_encoder.VaeEncoder(vae) if isinstance(vae, str) else vae
    if size % encoder.factor:
        raise ValueError(f'size={size}: expected a multiple of {encoder.factor}, as {vae} needs.')
    if moments and not encoder.has_moments:
        raise ValueError(f'moments={moments}: {vae} has none, expected an AutoencoderKL.')
    start = time.perf_counter()
    # What decides the bytes of the parts, but for the contents of their files.
    settings = {
        schema.META_VAE: encoder.name,
        'vae_revision': encoder.revision,
        schema.META_LATENT_SCALE: list(encoder.scale),
        'shapes': [f'{height}x{width}' for height, width in target.shapes],
        'crops': crops,
        'moments': moments,
        'dtype': dtype,
        'caption_column': caption_column,
        'keys': keys,
        'max_pixels': max_pixels,
    }
    chosen_parts = {number: parts[number] for number in range(len(parts))[share[0] :: share[1]]}
    encoding = _Encoding(out, settings, parts, chosen_parts)
    with scratch_folder(out, scratch_dir) as folder, _Decoders(target, num_workers) as decoders:
        tars_of_part = functools.partial(_PartTars, folder, encoder, target, moments, dtype)
        _encode_parts(encoding, chosen_parts, tars_of_part, Scratch(folder), decoders, max_bad)
    num_encoded = encoding.counts.shapes.total() - encoding.num_kept
    # Meanwhile other processes have made parts.
    encoding.read_receipts()
    missing = tuple(sorted({*range(len(parts))} - encoding.receipts.keys()))
    encoding.counts.check_bad(max_bad, _MANY_IMAGES if missing else 0)
    for name, reason in sorted(left.items()):
        encoding.counts.drop(name, OtherImageError(reason))
    if not encoding.counts.shapes and not missing:
        raise ValueError(f'{images}: no image is left. {encoding.counts}')
    if not missing:
        encoding.finish()
    seconds = time.perf_counter() - start
    return EncodingReport(encoding.counts, num_encoded, missing, encoder.name, seconds)


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
        most = min(_MOST_IMAGES, max(least, len(sizes) // _SHARES_OF_IMAGES))
    most_bytes = max(_LEAST_BYTES, sum(sizes) // _SHARES_OF_IMAGES)
    begin, num_bytes = 0, 0
    for place, size in enumerate(sizes):
        is_full = place - begin == most or num_bytes + size > most_bytes
        if place > begin and is_full:
            yield slice(begin, place)
            begin, num_bytes = place, 0
        num_bytes += size
    yield slice(begin, len(sizes))


def _make_target(size: int, buckets: bool, crops: int, max_pixels: int) -> Target:
    errors.FieldRule('1 or 3', lambda x: x in (1, 3)).check('crops', crops)
    errors.at_least(1).check('size', size)
    errors.at_least(1).check('max_pixels', max_pixels)
    shapes = pixels.bucket_shapes(size) if buckets else ((size, size),)
    if buckets and len(shapes) == 1:
        raise ValueError(f'size={size}: has only one bucket, expected e.g. 256, or no buckets.')
    return Target(shapes, crops, max_pixels)


def _encode_parts(
    encoding: '_Encoding',
    parts: Mapping[int, ImagePart],
    make_tars: Callable[[Mapping[str, np.ndarray]], '_PartTars'],
    scratch: Scratch,
    decoders: '_Decoders',
    max_bad: float,
) -> None:
    """Encodes the parts that are missing, in turn."""
    num_bytes = sum(part.num_bytes for part in parts.values())
    with Progress('Encoding images', num_bytes, 'B', {'parts': len(parts)}) as progress:
        for number, part in parts.items():
            if number in encoding.receipts:
                progress.skip(part.num_bytes, parts=1)
                continue
            # Before more hours are spent.
            encoding.counts.check_bad(max_bad, _MANY_IMAGES)
            kept_latents = encoding.read_latents(number, scratch)
            with (
                make_tars(kept_latents) as tars,
                part.open(scratch) as images,
                contextlib.closing(decoders.decode_all(images)) as results,
            ):
                tars.encode(results, progress)
            tars.counts.leave_texts(part.unused_texts)
            progress.add(part.num_bytes - tars.num_bytes, parts=1)
            encoding.store_part(number, tars)
            encoding.num_kept += tars.num_kept


class _Encoding:
    """The folder of an encoding: its settings, its parts and their receipts."""

    receipts: dict[int, Receipt]  # of finished parts, by number
    outdated: dict[int, Receipt]  # the same of those whose images have got other texts since
    counts: ImageCounts  # of the images of finished parts
    num_kept: int  # of images whose latents are of an earlier run

    def __init__(
        self,
        out: str,
        settings: Mapping[str, Any],
        parts: Sequence[ImagePart],
        own_parts: Collection[int],
    ):
        """Reads what is finished, and writes the settings; ValueError for another encoding."""
        self._folder, self._parts = storage.open_folder(out, to_write=True), parts
        self._receipts = Receipts(self._folder, _PARTS, _parse_counts)
        names = [sorted(part.files) for part in parts]
        digest = f'digest {json_digest.sha256(names)[:16]} of their names'
        num_files = sum(map(len, names))
        count = f'{format_count(num_files, "file")} in {format_count(len(parts), "part")}'
        self._settings = {**settings, 'images': f'{count}, {digest}'}
        stored = self._read_settings()
        if stored is not None:
            path = self._folder.path_of(schema.ENCODING_FILE)
            # The options first, because they decide about the number of parts.
            _check_same(settings, {k: x for k, x in stored.items() if k != 'images'}, path)
            _check_same(self._settings, stored, path)
        self.read_receipts(own_parts)
        self.num_kept = self.counts.shapes.total()
        if stored is None:
            self._write_encoding('')

    def _read_settings(self) -> dict[str, Any] | None:
        """Returns the stored settings; None if they cannot be read, in a folder for this command.

        Then the receipts of finished parts say whether these are of the same settings.
        """
        data = self._folder.read(schema.ENCODING_FILE)
        try:
            if data is not None:
                return dict(Encoding.parse(data).settings)
        except ValueError as error:
            path = self._folder.path_of(schema.ENCODING_FILE)
            logging.warning('%s: is damaged and written again (%s).', path, error)
        # Somebody's tars of images may have the names of parts, which would replace them.
        names = self._folder.sizes()
        tars = [name for name in names if name.endswith('.tar')]
        if tars and not any(name.startswith(f'{_PARTS}/') for name in names):
            path = self._folder.path_of(min(tars))
            raise ValueError(f'{path}: is not of this command. Choose another folder for out.')
        return None

    def read_receipts(self, own_parts: Collection[int] = ()) -> None:
        """Reads the receipts of finished parts; ValueError for one of another encoding.

        The tars of `own_parts` must have their checksums, those of others at least their sizes.
        """
        numbers = {f'{number:05}': number for number in range(len(self._parts))}
        receipts = self._receipts.read(numbers)
        for name, receipt in receipts.items():
            self._check_origin(numbers[name], receipt, self._receipts.path_of(name))
        own_receipts = {name: x for name, x in receipts.items() if numbers[name] in own_parts}
        intact = self._receipts.check_files(own_receipts, 'Checking finished parts')
        listing = self._folder.list(deep=True)
        self.receipts, self.outdated, self.counts = {}, {}, ImageCounts()
        for name, receipt in receipts.items():
            number = numbers[name]
            is_listed = all(
                tar in listing and listing[tar].state.agrees_with(state)
                for tar, state in receipt.files.items()
            )
            if not is_listed or (name in own_receipts and name not in intact):
                continue
            if receipt.origin.get(_TEXTS) == self._parts[number].texts_digest:
                self._add_receipt(number, receipt)
            else:
                self.outdated[number] = receipt
        if own_outdated := self.outdated.keys() & {*own_parts}:
            finished_parts = format_count(len(own_outdated), 'finished part')
            logging.info(f'The texts of {finished_parts} have changed, of which latents are kept.')

    def read_latents(self, number: int, scratch: Scratch) -> dict[str, np.ndarray]:
        """Reads the latents that a part has from before its texts changed, by names of images."""
        latents = dict[str, np.ndarray]()
        if number in self.outdated:
            for name in self.outdated[number].files:
                file = storage.describe_file(self._folder.path_of(name))
                with scratch.hold(file) as path:
                    latents |= _read_latents(path)
        return latents

    def store_part(self, number: int, tars: '_PartTars') -> None:
        """Stores the tars of a part, and then its receipt."""
        states = {}
        for shape, path in tars.paths.items():
            # With one shape, the folder itself is the source.
            sub_folder = shape if len(self._settings['shapes']) > 1 else ''
            name = os.path.join(sub_folder, f'{number:05}.tar')
            if self._folder.read(os.path.join(sub_folder, schema.ENCODING_FILE)) is None:
                self._write_encoding(sub_folder)
            states[name] = EncodedState(*file_state.compute_state(path))
            self._folder.store(path, name, states[name].crc32c)
        if number in self.outdated:
            self._folder.remove(self.outdated[number].files.keys() - states.keys())
        part = self._parts[number]
        origin = {**self._settings, _FILES: part.digest, _TEXTS: part.texts_digest}
        self._receipts.write(f'{number:05}', origin, states, vars(tars.counts))
        self._add_receipt(number, Receipt(origin, states, tars.counts))

    def finish(self) -> None:
        """Names all tars, by which the sources are complete and can be built."""
        states = dict[str, FileState]()
        for receipt in self.receipts.values():
            states.update(receipt.files)
        sub_folders = sorted({'', *map(os.path.dirname, states)})
        for sub_folder in sub_folders:
            prefix = f'{sub_folder}/' if sub_folder else ''
            files = {
                tar.removeprefix(prefix): EncodedState(*state)
                for tar, state in states.items()
                if tar.startswith(prefix)
            }
            self._write_encoding(sub_folder, files)
        for sub_folder in sub_folders:
            path = self._folder.path_of(sub_folder)
            storage.open_folder(path, to_write=True).sweep()

    def _add_receipt(self, number: int, receipt: Receipt) -> None:
        self.receipts[number] = receipt
        self.counts.add(vars(receipt.facts))

    def _check_origin(self, number: int, receipt: Receipt, path: str) -> None:
        """Raises a ValueError for a part of another encoding, or of other files."""
        decisive = {x: value for x, value in receipt.origin.items() if x not in (_FILES, _TEXTS)}
        _check_same(self._settings, decisive, path)
        if receipt.origin.get(_FILES) != self._parts[number].digest:
            raise ValueError(
                f'{path}: the files of part {number}, such as {min(self._parts[number].files)}, '
                'have changed since they were encoded. Remove this receipt to encode them again, '
                'or choose another folder.'
            )

    def _write_encoding(
        self, sub_folder: str, files: Mapping[str, EncodedState] | None = None
    ) -> None:
        name = os.path.join(sub_folder, schema.ENCODING_FILE)
        self._folder.write(name, Encoding(self._settings, files).to_bytes())


def _read_latents(path: str) -> dict[str, np.ndarray]:
    """Reads the latents in a local tar of `_PartTars`, by the names of their images."""
    latents = dict[str, np.ndarray]()
    with open(path, 'rb') as stream:

        def read(start: int, size: int) -> bytes:
            return os.pread(stream.fileno(), size, start)

        members = tar_members.list_members(path, os.path.getsize(path), read)
        contents = {name: read(start, size) for name, start, size in members}
    for name, content in contents.items():
        if name.endswith(_FIELDS):
            array = io.BytesIO(contents[name.removesuffix(_FIELDS) + _ARRAY])
            latents[json.loads(content)[_FILE]] = np.load(array)
    return latents


def _parse_counts(facts: Mapping[str, Any]) -> ImageCounts:
    counts = ImageCounts()
    counts.add(facts)
    return counts


def _check_same(expected: Mapping[str, Any], stored: Mapping[str, Any], path: str) -> None:
    errors.check_same_entries(expected, stored, path, 'is what this command makes')


class _PartTars:
    """Encodes the images of a part into tars, one for each shape; a context manager.

    Batches have one shape, and never images of two parts, so that the bytes of a part depend on
    nothing but its own images.
    """

    def __init__(
        self,
        folder: str,
        encoder: VaeEncoder,
        target: Target,
        moments: bool,
        dtype: str,
        kept_latents: Mapping[str, np.ndarray],
    ):
        """Takes besides the settings the latents of images, by name, that are not made again."""
        self.counts, self.paths = ImageCounts(), dict[str, str]()  # local files by shape
        self._kept_latents, self.num_kept = kept_latents, 0
        self._folder, self._encoder, self._target = folder, encoder, target
        self._num_crops = target.crops
        self._moments, self._dtype = moments, dtype
        self._tars, self._stack = dict[str, tarfile.TarFile](), contextlib.ExitStack()
        self.num_bytes = 0  # of the images

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with file_state.naming(self._folder):
            self._stack.close()

    def encode(self, results: Iterable[_Result], progress: Progress) -> None:
        """Encodes and writes images."""
        running = None
        for shape, batch in self._make_batches(self._drop_bad(results, progress)):
            # The devices compute one batch while the next is decoded.
            wait = self._start(batch)
            if running:
                self._write(*running, progress)
            running = shape, batch, wait
        if running:
            self._write(*running, progress)

    def _start(self, batch: _Batch) -> Callable[[], Iterable[np.ndarray]]:
        """Starts to encode a batch; returns a function that waits for the latents of its images."""
        names = [image.name for _, image, _ in batch]
        if self._kept_latents.keys() >= {*names}:
            self.num_kept += len(names)
            return lambda: [self._kept_latents[name] for name in names]
        wait = self._encoder.start(np.concatenate([decoded.crops for *_, decoded in batch]))
        return lambda: self._rows(*wait())

    def _drop_bad(
        self, results: Iterable[_Result], progress: Progress
    ) -> Iterator[tuple[SourceImage, Pixels]]:
        for image, decoded in results:
            if isinstance(decoded, BadImageError):
                self.counts.drop(image.name, decoded)
                self._count_smaller_size(decoded)
                self._count_done(image, progress)
            else:
                yield image, decoded

    def _count_smaller_size(self, error: BadImageError) -> None:
        if isinstance(error, SmallImageError) and error.reason == pixels.TOO_SMALL:
            size = pixels.find_smaller_size(*error.size, self._target, self._encoder.factor)
            if size or len(self._target.shapes) > 1:
                self.counts.smaller_sizes[str(size)] += 1

    def _count_done(self, image: SourceImage, progress: Progress) -> None:
        # Not before: what is only decoded has most of its work ahead.
        self.num_bytes += image.size
        progress.add(image.size, images=1)

    def _make_batches(
        self, decoded_images: Iterable[tuple[SourceImage, Pixels]]
    ) -> Iterator[tuple[str, _Batch]]:
        batches = collections.defaultdict[str, _Batch](list)
        # Unlike the names of images, these have no dots, folders or repetitions.
        names = (f'{number:06}' for number in itertools.count())
        for image, decoded in decoded_images:
            height, width = decoded.crops.shape[1:3]
            shape, batch_size = f'{height}x{width}', self._encoder.batch_size(height, width)
            batches[shape].append((next(names), image, decoded))
            # The crops of so many images fill whole batches of the encoder.
            if len(batches[shape]) == batch_size // math.gcd(batch_size, self._num_crops):
                yield shape, batches.pop(shape)
        yield from batches.items()

    def _write(
        self,
        shape: str,
        batch: _Batch,
        wait: Callable[[], Iterable[np.ndarray]],
        progress: Progress,
    ) -> None:
        for (name, image, decoded), latents in zip(batch, wait(), strict=True):
            self._count_done(image, progress)
            if not np.isfinite(latents).all():
                self.counts.drop(image.name, BadImageError('not finite latents'))
                continue
            if shape not in self._tars:
                self.paths[shape] = path = os.path.join(self._folder, f'{shape}.tar')
                self._tars[shape] = self._stack.enter_context(tarfile.TarFile(path, 'w'))
            array = io.BytesIO()
            np.lib.format.write_array(array, latents)
            fields = {**image.numbers, schema.KEY: image.key, schema.CAPTION: image.caption}
            fields |= {'width': decoded.width, 'height': decoded.height, _FILE: image.name}
            members = {_ARRAY: array.getvalue(), _FIELDS: json.dumps(fields).encode()}
            for suffix, data in members.items():
                with file_state.naming(self.paths[shape]):
                    tar_members.add_member(self._tars[shape], f'{name}{suffix}', data)
            self.counts.count(image, shape)

    def _rows(self, latents: np.ndarray, deviation: np.ndarray | None) -> np.ndarray:
        """Latents of images, `(n, C, H, W)` or, of several crops, `(n, crops, C, H, W)`."""
        if self._moments and deviation is not None:
            latents = np.concatenate([latents, deviation], axis=1)
        # Numbers that are too large become infinite, and their images are left out.
        with np.errstate(over='ignore'):
            rows = latents.astype(self._dtype)
        return rows if self._num_crops == 1 else rows.reshape(-1, self._num_crops, *rows.shape[1:])


class _Decoders(contextlib.ExitStack):
    """Worker processes that decode images, until the end of the context.

    An image that ends its worker, as damage may do to a decoder, is dropped like another bad one.
    """

    def __init__(self, target: Target, num_workers: int):
        super().__init__()
        self._target = target
        self._num_workers = workers.requested_workers(num_workers) or machine.usable_cpus()
        self._num_threads = self._num_workers + _MORE_READS
        nbytes = 3 * target.crops * max(map(math.prod, target.shapes))
        self._ahead = max(self._num_threads, min(_IMAGES_AHEAD, _BYTES_AHEAD // nbytes))
        self._processes, self._lock = self._open_pool(), threading.Lock()

    def decode_all(self, images: Iterable[SourceImage]) -> Generator[_Result, None, None]:
        """Reads and decodes images; yields them in order, with their pixels or what is wrong."""
        return workers.map_ahead(
            self._decode, images, self._num_threads, self._ahead, lambda x: x.size, _BYTES_AHEAD
        )

    def _open_pool(self) -> concurrent.futures.ProcessPoolExecutor:
        return self.enter_context(workers.open_pool(self._num_workers))

    def _decode(self, image: SourceImage) -> Pixels | BadImageError:
        try:
            data, processes = image.read(), self._processes
            try:
                return processes.submit(pixels.read_pixels, data, self._target).result()
            except BrokenProcessPool:
                return self._decode_alone(data, processes)
        except BadImageError as error:
            return error
        except MemoryError:
            raise MemoryError(
                f'{image.name}: not enough memory to decode it. Lower num_workers or max_pixels.'
            ) from None

    def _decode_alone(self, data: bytes, broken: concurrent.futures.ProcessPoolExecutor) -> Pixels:
        # Of the images that were lost with the pool, one has ended its worker; which one shows
        # only when each has a worker to itself.
        with self._lock:
            if self._processes is broken:
                self._processes = self._open_pool()
            with workers.open_pool(1) as process:
                try:
                    return process.submit(pixels.read_pixels, data, self._target).result()
                except BrokenProcessPool:
                    raise BadImageError('ends its decoder') from None


def describe_next(out: str, counts: ImageCounts, has_buckets: bool) -> str:
    """Returns the commands that build the data set or, of buckets, train on a mixture of them."""
    if counts.num_without_caption == counts.shapes.total():
        return (
            'No image has a caption. If their data have captions by another name, encode them into '
            'another folder with --caption_column; otherwise a build needs a Parquet file of '
            'captions by key (build --captions).'
        )
    large = {x: n for x, n in sorted(counts.shapes.items()) if n >= _LEAST_ROWS or not has_buckets}
    if not large:
        return f'Each bucket has less than {_LEAST_ROWS} images, too few to train on.'
    data = f'{out}-data'
    build = ['python', '-m', 'coyo11m_tfds.build', '--encoder=hash', f'--data_dir={data}']
    config: dict[str, Any] = {}
    fraction = choose_validation_fraction(min(large.values()))
    if fraction > BuildSettings.validation_fraction:
        config['validation_fraction'] = fraction
    if not has_buckets:
        flags = [f'--config={json.dumps(config)}'] if config else []
        return shlex.join([*build, f'--manual_dir={out}', *flags])
    # Different seeds, because buckets of equal numbers of images would come in lockstep.
    mix = [
        {
            'dir': f'{data}/{schema.NAME}/{shape}/{schema.VERSION}',
            'weight': max(1, round(100 * n / sum(large.values()))),
            'seed': seed,
        }
        for seed, (shape, n) in enumerate(large.items())
    ]
    sources = ', '.join(map(json.dumps, mix))  # as Python writes dicts, with double quotes
    train = 'default' if machine.accelerators() else 'small'
    flags = [f'--config={train}', f'--workdir={out}-run', f'--config.data.mix=({sources},)']
    config |= {'name': '$shape', 'latents': 'in_place'}
    flags_of_shape = shlex.join([f'--manual_dir={out}/$shape', f'--config={json.dumps(config)}'])
    build_all = f'{shlex.join(build)} {flags_of_shape}'.replace('$shape', "'$shape'")
    small = ', '.join(sorted(counts.shapes.keys() - large.keys()))
    return '\n'.join(
        [
            *([f'Too few images for the mixture: {small}'] if small else []),
            f'for shape in {" ".join(large)}; do {build_all}; done',
            f'python -m train_lib.main {shlex.join(flags)}',
        ]
    )


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.encode_images', __doc__)
    add = parser.add_argument
    add('--images', required=True, help='folder of the images, local, gs:// or hf://')
    add('--vae', required=True, help='folder or hub name of the VAE')
    add('--out', required=True, help='folder to fill, local or gs://')
    add('--size', type=int, default=256, help='height and width in pixels (%(default)s)')
    add('--buckets', action='store_true', help='shapes of that area, the closest for each image')
    add('--crops', type=int, default=1, help='1 for the centre, 3 also for both ends (%(default)s)')
    add('--moments', action='store_true', help='write mean and deviation, from which steps draw')
    add('--dtype', default='float16', help='of the latents: float16 or float32 (%(default)s)')
    add('--caption_column', default='', help='field of the captions (the usual names)')
    hint = 'data, or path for keys that are hashes of paths (%(default)s)'
    add('--keys', default=KEYS_OF_DATA, help=hint)
    hint = 'largest share of images that may be bad (%(default)s)'
    add('--max_bad', type=float, default=MAX_BAD, help=hint)
    hint = 'most pixels of an image (%(default)s)'
    add('--max_pixels', type=int, default=pixels.MAX_PIXELS, help=hint)
    ranks.add_share_flag(parser)
    hint = 'most images of a part, outside of tars and Parquet files (by their number and size)'
    add('--part_images', type=int, default=0, help=hint)
    add('--num_workers', type=int, default=0, help='processes that decode (one on each core)')
    add('--scratch_dir', default='', help='local folder for temporary files (in a local OUT)')
    options = vars(parser.parse_args())
    command_line.show_log()
    fixable = ValueError, OSError, RuntimeError, MemoryError
    with command_line.ends_in_one_line('the same command resumes it', fixable):
        part = options.pop('part') or ranks.index_and_count()
        report = encode(share=part, **options)
        command_line.print_lines(*f'{report}: {options["out"]}'.split('\n'))
        if not report.missing_parts:
            out = options['out'].rstrip('/')
            commands = describe_next(out, report.counts, options['buckets'])
            command_line.print_lines(*commands.split('\n'))


if __name__ == '__main__':
    main()
