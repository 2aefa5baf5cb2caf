"""Makes a small source of emoji, laid out as the real one.

    python -m coyo11m_tfds.sample_data --out DIR

Each picture is an emoji, its caption is its name, such as "woman astronaut: dark skin tone". Three
crops of each picture, a pixel apart, go to `DIR/latents-3crop/*.pt` as raw latents, and the
captions go to `DIR/coyo11m-meta.parquet`. `coyo11m_tfds.pictures.latent_rgb` turns latents back
into pictures: one pixel is one position of the latents. As in the real source, the Parquet rows are
in another order than the latents, a few keys have no row, and a few captions are empty or null.

The program leaves out what `coyo11m_tfds.pictures.emoji` holds out, so a trained model can draw
captions that are new to it, of which the true pictures are known.
"""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.pictures import emoji, latent_rgb
from coyo11m_tfds.pictures.emoji import Emoji
from coyo11m_tfds.process import command_line
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import file_state

NO_ROW_EVERY = 97  # one key in so many has no row in the Parquet file
EMPTY_CAPTION_EVERY = 89  # one caption in so many is empty or null

# The middle crop is the whole picture, the others lack the first or the last column of its pixels.
CROP_OFFSETS = (0, 1, 2)  # pixels
_BORDER = 1  # white columns at each side of a picture


def make_sample(
    out_dir: str | os.PathLike,
    num_samples: int | None = None,
    num_files: int = 3,
    dtype: str = 'float16',
    seed: int = 0,
) -> int:
    """Writes samples into `num_files` `.pt` files of unequal length, and captions.

    `num_samples` is by default the number of emoji to train on; of more, emoji come again.
    `out_dir` is a local folder. The same arguments give the same latents, keys and captions.
    Returns the number of samples. Raises a ValueError for arguments out of range, an OSError for a
    full disk.
    """
    out_dir = storage.expand_home(out_dir)
    training = emoji.find_part(emoji.TRAINING)
    if num_samples is None:
        num_samples = len(training)
    _check_arguments(out_dir, num_samples, num_files, dtype, seed)
    # Here: they take seconds, and `train_lib.demo` draws and needs neither.
    import pandas as pd
    import torch

    folder = pathlib.Path(out_dir) / schema.LATENTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.Philox(key=seed))
    # Large ones, as in the real source, where keys are no row numbers.
    keys = np.sort(rng.choice(np.int64(1) << 62, num_samples, replace=False))
    numbers = _choose_pictures(training, num_samples, rng)
    # Named as in the real source, ten numbers to a file.
    for file_number, rows in enumerate(_cut_unequally(num_samples, num_files)):
        first = 10 * file_number
        name = f'{first:06d}-{first + 9:06d}.pt'
        pictures = emoji.read_pictures()[numbers[rows]]
        latents = _make_latents(pictures)
        tensors = {
            schema.PT_KEYS: torch.from_numpy(keys[rows]),
            schema.PT_LATENTS: torch.from_numpy(latents).to(getattr(torch, dtype)),
        }
        try:
            torch.save(tensors, folder / name)
        except RuntimeError as error:
            # torch raises it for a full disk.
            raise OSError(f'{folder / name}: cannot be written. Is the disk full?') from error
    # Rows in another order than the latents, of which a few are missing.
    order = []
    for row in rng.permutation(num_samples):
        if row % NO_ROW_EVERY != 1:
            order.append(row)
    shown = [emoji.read_emoji()[numbers[row]] for row in order]
    columns = _make_columns(order, keys[order], shown)
    # As pandas writes it: the key is the index column.
    table = pd.DataFrame(columns, index=pd.Index(keys[order], name=schema.PARQUET_KEY))
    path = pathlib.Path(out_dir) / schema.CAPTIONS_FILE
    with file_state.naming(path):
        # With checksums, by which a build finds damage; pandas writes none unless it is told to.
        table.to_parquet(path, write_page_checksum=True)
    return num_samples


def _check_arguments(
    out_dir: str | os.PathLike, num_samples: int, num_files: int, dtype: str, seed: int
) -> None:
    """Raises a ValueError for arguments of `make_sample` that are out of range."""
    folder = pathlib.Path(out_dir)
    if not storage.local_path(out_dir):
        raise ValueError(
            f'out_dir is {os.fspath(out_dir)!r}, expected a local folder (`mirror` copies it).'
        )
    if seed < 0:
        raise ValueError(f'seed is {seed}, expected at least 0.')
    if dtype not in schema.LATENT_DTYPES:
        names = ', '.join(schema.LATENT_DTYPES)
        raise ValueError(f'dtype is {dtype!r}, expected one of {names}.')
    # Files of unequal lengths, of which the shortest is not empty.
    if not 0 < 4 * num_files <= num_samples:
        samples = format_count(num_samples, 'sample')
        files = format_count(num_files, 'file')
        raise ValueError(f'{samples} in {files}, expected at least 4 samples a file.')
    # Whatever is there: a source also has captions, or an `encoding.json`, next to its latents.
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f'{folder} is not empty, expected a new folder: write somewhere else, or remove it.'
        )


def _choose_pictures(training: list[int], count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns numbers of emoji, each once before one comes again."""
    num_rounds = -(-count // len(training))
    rounds = [rng.permutation(training) for _ in range(num_rounds)]
    return np.concatenate(rounds)[:count]


def _cut_unequally(total: int, count: int) -> list[slice]:
    """Returns slices of `range(total)` whose lengths are in proportion 3, 4, 5, ..."""
    weights = np.arange(3, 3 + count)
    # The sum of all weights comes last, so the last end is the total.
    ends = np.cumsum(weights) * total // weights.sum()
    slices = []
    start = 0
    for end in ends.tolist():
        slices.append(slice(start, end))
        start = end
    return slices


def _make_latents(pictures: np.ndarray) -> np.ndarray:
    """Returns raw latents float32 `(n, 3, 4, 32, 32)` of three crops of every picture."""
    # Columns are the third axis of `(n, H, W, 3)`.
    widths = [(0, 0), (0, 0), (_BORDER, _BORDER), (0, 0)]
    wide = np.pad(pictures, widths, constant_values=255)
    crops = [wide[:, :, offset : offset + emoji.SIDE] for offset in CROP_OFFSETS]
    crops_of_all = np.stack(crops, axis=1)  # uint8 (n, 3, H, W, 3)
    latents = latent_rgb.rgb_to_latents(crops_of_all)
    # Those that are not contiguous cannot be read in place.
    return np.ascontiguousarray(latents)


def _make_columns(
    rows: list[int], keys: np.ndarray, shown: Sequence[Emoji]
) -> dict[str, list[str | None]]:
    """Returns columns as the real source has them, with a few captions empty or null."""
    captions: list[str | None] = [one.caption for one in shown]
    for number, row in enumerate(rows):
        # Half of them null, half of them blank: real sources have both.
        if row % EMPTY_CAPTION_EVERY == 2:
            captions[number] = None if row % 2 else '  '
    return {
        'url': [f'https://pictures.invalid/{key}.png' for key in keys],
        'caption': [one.caption.replace(' ', '-') + '.png' for one in shown],
        schema.DEFAULT_CAPTION_COLUMN: captions,
        'caption_llava_short': [one.concept for one in shown],
        'tags_open_images': [one.activity.capitalize() for one in shown],
        'tags_booru': [_write_tags(one) for one in shown],
    }


def _write_tags(one: Emoji) -> str:
    """Returns 'astronaut, woman, dark_skin_tone'."""
    tags = [one.activity.replace(' ', '_')]
    if one.gender:
        tags.append(one.gender)
    for tone in one.tones:
        tags.append(f'{tone}_skin_tone')
    return ', '.join(tags)


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    parser = command_line.Parser('coyo11m_tfds.sample_data', __doc__)
    add = parser.add_argument
    add('--out', required=True, help='new local folder to write')
    add('--num_samples', type=int, help='number of pictures (all emoji to train on, once)')
    args = parser.parse_args()
    outlook = f'{args.out} is incomplete: remove it, then run the same command again'
    with command_line.ends_in_one_line(outlook):
        num_samples = make_sample(args.out, args.num_samples)
    samples = format_count(num_samples, 'sample')
    command_line.print_lines(f'{samples}: {args.out}')


if __name__ == '__main__':
    main()
