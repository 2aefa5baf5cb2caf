"""Makes a synthetic source of any size in the layout of the real one, with little memory.

Latents are normal noise with the mean and deviation of real ones; captions are 200 to 600 bytes of
words. Every key has a caption, and the rows of the Parquet file are in another order than the
latents. The same arguments give the same numbers.
"""

import math
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema

SAMPLE_BYTES = schema.NUM_CROPS * schema.LATENT_NBYTES
_MIN_FILES = 4
_MAX_FILE_BYTES = 3 * 10**9
_ROWS_AT_ONCE = 1024
_ROW_GROUP = 2**20  # pandas' default
_CAPTION_BYTES = 200, 600


def num_samples_of(gigabytes: float) -> int:
    """Returns the number of samples of a source of some size."""
    return round(gigabytes * 1e9 / SAMPLE_BYTES)


def make(folder: pathlib.Path, num_samples: int, seed: int = 0) -> pathlib.Path:
    """Makes a source of `num_samples` in a folder, unless it exists; returns its folder."""
    source_dir = folder / f'source-{num_samples}-{seed}'
    if source_dir.exists():
        return source_dir
    print(f'making {num_samples:,} samples', file=sys.stderr, flush=True)
    unfinished = source_dir.with_suffix('.unfinished')
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / schema.LATENTS_FOLDER).mkdir(parents=True)
    random = np.random.default_rng(seed)
    # Distinct ones with gaps, in no order, as real ones are.
    keys = random.permutation(3 * num_samples)[:num_samples].astype(np.int64)
    num_full_files = -(-num_samples * SAMPLE_BYTES // _MAX_FILE_BYTES)  # rounded up
    num_files = max(_MIN_FILES, num_full_files)
    for number, keys_of_file in enumerate(np.array_split(keys, num_files)):
        # Such names have the files of the real source.
        name = f'{10 * number:06d}-{10 * number + 9:06d}.pt'
        path = unfinished / schema.LATENTS_FOLDER / name
        _write_latents(path, keys_of_file, seed * num_files + number)
    _write_captions(unfinished / schema.CAPTIONS_FILE, random.permutation(keys), random)
    # Only now, so that one that was interrupted is made again.
    return unfinished.rename(source_dir)


def num_samples(source_dir: str | os.PathLike[str]) -> int:
    """Returns the number of samples of a source that `make` made."""
    return int(pathlib.Path(source_dir).name.split('-')[1])


def pt_files(source_dir: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the files of latents of a source, in order."""
    return sorted(pathlib.Path(source_dir, schema.LATENTS_FOLDER).iterdir())


def samples(source_dir: pathlib.Path, limit: int) -> Iterator[tuple[int, np.ndarray, str]]:
    """Yields key, latents (mapped float16 `(3, 4, 32, 32)`) and caption of the first samples."""
    import torch

    # A dict of all captions, which only small sources can afford.
    columns = [schema.PARQUET_KEY, schema.DEFAULT_CAPTION_COLUMN]
    table = pq.read_table(source_dir / schema.CAPTIONS_FILE, columns=columns)
    all_keys = table.column(schema.PARQUET_KEY).to_pylist()
    all_captions = table.column(schema.DEFAULT_CAPTION_COLUMN).to_pylist()
    captions = dict(zip(all_keys, all_captions, strict=True))
    for path in pt_files(source_dir):
        tensors = torch.load(path, mmap=True, weights_only=True)
        keys = tensors[schema.PT_KEYS].tolist()
        latents = tensors[schema.PT_LATENTS].numpy()
        for key, row in zip(keys[:limit], latents, strict=False):
            yield key, row, captions[key]
        # What the next files may give yet.
        limit -= min(limit, len(keys))


def _write_latents(path: pathlib.Path, keys: np.ndarray, seed: int) -> None:
    """Writes a `.pt` file of keys and of latents with mean 1 and deviation 6."""
    import torch  # takes 1.5 s

    generator = torch.Generator().manual_seed(seed)
    shape = (len(keys), *schema.LATENTS_SHAPE)
    # In a mapped file, so that memory does not grow with the size of the source.
    scratch = path.with_suffix('.raw')
    size = math.prod(shape)
    numbers = torch.from_file(str(scratch), shared=True, size=size, dtype=torch.float16)
    latents = numbers.view(shape)
    for rows in latents.split(_ROWS_AT_ONCE):
        noise = torch.randn(rows.shape, generator=generator)
        rows.copy_(noise.mul_(6).add_(1))
    torch.save({schema.PT_KEYS: torch.from_numpy(keys), schema.PT_LATENTS: latents}, path)
    scratch.unlink()


def _write_captions(path: pathlib.Path, keys: np.ndarray, random: np.random.Generator) -> None:
    """Writes a Parquet file of captions, each a piece of 2 MB of random words."""
    words = []
    for length in random.integers(2, 11, 20_000):
        letters = random.integers(ord('a'), ord('z') + 1, length, np.uint8)
        words.append(bytes(letters).decode())
    numbers = random.integers(0, len(words), 300_000).tolist()
    text = ' '.join(words[number] for number in numbers)
    # Cut out of one text anywhere, which takes less time than to join words for each.
    lengths = random.integers(*_CAPTION_BYTES, len(keys), endpoint=True).tolist()
    starts = random.integers(0, len(text) - _CAPTION_BYTES[1], len(keys)).tolist()
    captions = []
    for start, length in zip(starts, lengths, strict=True):
        captions.append(text[start : start + length])
    columns = {
        schema.PARQUET_KEY: keys,
        'url': [f'https://example.org/{key}.jpg' for key in keys],
        schema.DEFAULT_CAPTION_COLUMN: pa.array(captions, pa.large_string()),
    }
    pq.write_table(pa.table(columns), path, row_group_size=_ROW_GROUP)
