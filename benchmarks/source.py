"""A made-up source of any size, in the layout of the real one; it takes little memory to make.

    source.make('/tmp/bench/source', num_samples=81_380, num_files=4)

Latents are normal noise of the real ones' mean and spread, captions are 200 to 600 bytes of words.
Every key has a caption, and the rows of the Parquet file are in another order than the latents. The
same arguments give the same numbers; what is there already from the same arguments is kept.
"""

import json
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema

SAMPLE_BYTES = schema.NUM_CROPS * schema.LATENT_NBYTES

STAMP = 'made.json'
_ROWS_AT_ONCE = 1024
_CAPTION_BYTES = (200, 600)
# Enough for captions that no compression shrinks to nothing.
_WORDS = (
    *('a', 'an', 'the', 'of', 'on', 'in', 'with', 'near', 'under', 'over', 'beside', 'cat', 'dog'),
    *('house', 'street', 'river', 'mountain', 'field', 'sky', 'woman', 'man', 'child', 'table'),
    *('window', 'light', 'shadow', 'red', 'blue', 'green', 'golden', 'large', 'small', 'old'),
    *('photograph', 'painting', 'background', 'standing', 'sitting', 'holding', 'wearing'),
)


def make(folder: pathlib.Path, num_samples: int, num_files: int, seed: int = 0) -> pathlib.Path:
    """Makes the source and returns its folder.

    Args:
        folder: is deleted first if it holds the source of other arguments.
        num_samples: in all files together.
        num_files: `.pt` files, of nearly equal length.
        seed: of everything random.

    Raises:
        ValueError: the folder holds something else.
    """
    stamp = folder / STAMP
    wanted = {'num_samples': num_samples, 'num_files': num_files, 'seed': seed}
    if folder.exists():
        if not stamp.exists():
            raise ValueError(f'{folder}: is no source made by this module; name another folder.')
        if json.loads(stamp.read_text()) == wanted:
            return folder
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    stamp.write_text('{}')  # what is half made is recognized and made again
    random = np.random.default_rng(seed)
    keys = random.permutation(3 * num_samples)[:num_samples].astype(np.int64)
    (folder / schema.LATENTS_FOLDER).mkdir()
    for number, of_file in enumerate(np.array_split(keys, num_files)):
        name = f'{10 * number:06d}-{10 * number + 9:06d}.pt'
        _write_latents(folder / schema.LATENTS_FOLDER / name, of_file, seed * num_files + number)
    _write_captions(folder / schema.CAPTIONS_FILE, random.permutation(keys), random)
    stamp.write_text(json.dumps(wanted))
    return folder


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files that a writer reads, the `.pt` files first."""
    return [*sorted((folder / schema.LATENTS_FOLDER).iterdir()), folder / schema.CAPTIONS_FILE]


def _write_latents(path: pathlib.Path, keys: np.ndarray, seed: int) -> None:
    """Saves a `.pt` file out of a mapped file, so that memory does not grow with it."""
    import torch  # takes 1.5 s, and `files` does not need it

    generator = torch.Generator().manual_seed(seed)
    scratch = path.with_suffix('.raw')
    shape = (len(keys), *schema.LATENTS_SHAPE)
    mapped = torch.from_file(
        str(scratch), shared=True, size=int(np.prod(shape)), dtype=torch.float16
    )
    latents = mapped.view(shape)
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        rows = latents[start : start + _ROWS_AT_ONCE]
        rows.copy_(torch.randn(rows.shape, generator=generator).mul_(6).add_(1))
    torch.save({schema.PT_KEYS: torch.from_numpy(keys), schema.PT_LATENTS: latents}, path)
    scratch.unlink()


def _write_captions(path: pathlib.Path, keys: np.ndarray, random: np.random.Generator) -> None:
    columns = pa.schema(
        {
            schema.PARQUET_KEY: pa.int64(),
            'url': pa.string(),
            'caption': pa.string(),
            schema.DEFAULT_CAPTION_COLUMN: pa.string(),
        }
    )
    with pq.ParquetWriter(path, columns) as file:
        for start in range(0, len(keys), 16 * _ROWS_AT_ONCE):
            of_batch = keys[start : start + 16 * _ROWS_AT_ONCE]
            urls = [f'https://example.org/{key}.jpg' for key in of_batch]
            long = list(_captions(len(of_batch), random))
            short = [text[:40] for text in long]
            file.write_table(
                pa.table([pa.array(of_batch), urls, short, long], schema=columns),
            )


def _captions(count: int, random: np.random.Generator) -> Iterator[str]:
    words = np.array(_WORDS)
    for length in random.integers(*_CAPTION_BYTES, count, endpoint=True):
        text = ' '.join(random.choice(words, 2 + length // 3))
        yield text[:length]
