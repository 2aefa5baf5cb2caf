"""Makes a small source of simple pictures, laid out as the real one.

    python -m coyo11m_tfds.sample_data --out DIR
    python -m coyo11m_tfds.sample_data --out DIR --scene two

A picture shows one coloured shape on a coloured background, at some place and in some size; with
`--scene two` it shows two shapes and how they stand to each other. Three crops of each picture go
to `DIR/latents-3crop/*.pt` as raw latents, and the captions go to `DIR/coyo11m-meta.parquet`.
`coyo11m_tfds.pictures.latent_rgb` turns latents back into pictures. As in the real source, the
Parquet rows are in another order than the latents, a few keys have no row, and a few captions are
empty or null.

The program leaves out one in five of the combinations (colour, shape, background), so a trained
model can draw captions that are new to it.
"""

import os
import pathlib
from types import ModuleType
from typing import Any

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.pictures import latent_rgb, one_object, shapes, two_objects
from coyo11m_tfds.process import command_line
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import file_state

# Modules with the same functions and constants.
WORLDS: dict[str, ModuleType] = {'one': one_object, 'two': two_objects}

NO_ROW_EVERY = 97  # one key in so many has no row in the Parquet file
EMPTY_CAPTION_EVERY = 89  # one caption in so many is empty or null

_BATCH = 512  # pictures drawn at a time


def held_out_prompts(count: int, seed: int = 0, scene: str = 'one') -> list[tuple[str, Any]]:
    """Returns captions of combinations that no sample shows, with their scenes."""
    world = WORLDS[scene]
    _, held_out = world.split_scenes()
    rng = np.random.Generator(np.random.Philox(key=seed))
    scenes = [held_out[i % len(held_out)] for i in rng.permutation(max(count, len(held_out)))]
    geometry = world.PROMPT_GEOMETRY
    return [(world.write_caption(scene, geometry, rng), scene) for scene in scenes[:count]]


def make_sample(
    out_dir: str | os.PathLike,
    num_samples: int = 4096,
    num_files: int = 3,
    dtype: str = 'float16',
    seed: int = 0,
    scene: str = 'one',
) -> None:
    """Writes `num_samples` samples into `num_files` `.pt` files of unequal length, and captions.

    `out_dir` is a local folder; the same arguments give the same latents, keys and captions.
    """
    # Here: `train_lib.demo` uses the prompts and needs neither.
    import pandas as pd
    import torch

    folder = pathlib.Path(out_dir) / schema.LATENTS_FOLDER
    is_local = bool(storage.local_path(out_dir))
    is_new = not folder.exists() or not any(folder.iterdir())
    count = f'{format_count(num_samples, "sample")} in {format_count(num_files, "file")}'
    for is_valid, problem, expected in (
        (is_local, f'out_dir is {os.fspath(out_dir)!r}', 'a local folder (`mirror` copies it)'),
        (seed >= 0, f'seed is {seed}', 'at least 0'),
        (scene in WORLDS, f'scene is {scene!r}', f'one of {(*WORLDS,)}'),
        (dtype in schema.LATENT_DTYPES, f'dtype is {dtype!r}', f'one of {schema.LATENT_DTYPES}'),
        (0 < 4 * num_files <= num_samples, count, 'at least 4 samples a file'),
        (is_new, f'{folder} is not empty', 'a new folder: remove it, or write somewhere else'),
    ):
        if not is_valid:
            raise ValueError(f'{problem}, expected {expected}.')
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.Philox(key=seed))
    keys = np.sort(rng.choice(np.int64(1) << 62, num_samples, replace=False))
    world = WORLDS[scene]
    combinations, _ = world.split_scenes()
    scenes = [combinations[i] for i in rng.integers(len(combinations), size=num_samples)]
    geometry = world.random_geometry(scenes, rng)
    for number, rows in enumerate(_cut_unequally(num_samples, num_files)):
        name = f'{10 * number:06d}-{10 * number + 9:06d}.pt'
        latents = _make_latents(scenes[rows], geometry[rows], rng)
        tensors = {schema.PT_KEYS: torch.from_numpy(keys[rows])}
        tensors[schema.PT_LATENTS] = torch.from_numpy(latents).to(getattr(torch, dtype))
        try:
            torch.save(tensors, folder / name)
        except RuntimeError as error:
            # torch raises it for a full disk.
            raise OSError(f'{folder / name}: cannot be written. Is the disk full?') from error
    # Rows in another order than the latents, of which a few are missing.
    order = [i for i in rng.permutation(num_samples) if i % NO_ROW_EVERY != 1]
    captions = [world.write_caption(scenes[i], geometry[i], rng) for i in order]
    columns = _caption_columns(order, keys[order], captions, [scenes[i] for i in order])
    # As pandas writes it: the key is the index column.
    table = pd.DataFrame(columns, index=pd.Index(keys[order], name=schema.PARQUET_KEY))
    path = pathlib.Path(out_dir) / schema.CAPTIONS_FILE
    with file_state.naming(path):
        table.to_parquet(path, write_page_checksum=True)


def _cut_unequally(total: int, count: int) -> list[slice]:
    """Cuts `range(total)` into slices whose lengths are in proportion 3, 4, 5, ..."""
    weights = np.arange(3, 3 + count)
    ends = np.cumsum(weights) * total // weights.sum()
    return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _make_latents(
    scenes: list[shapes.Scene], geometry: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Raw latents float32 `(n, 3, 4, 32, 32)` of the three crops of every scene."""
    latents = np.empty((len(scenes), *schema.LATENTS_SHAPE), np.float32)
    for start in range(0, len(scenes), _BATCH):
        rows = slice(start, start + _BATCH)
        pictures = shapes.draw_scenes(scenes[rows], geometry[rows], rng)
        for crop, offset in enumerate(shapes.CROP_OFFSETS):
            window = pictures[:, :, offset : offset + shapes.CROP_SIZE]
            latents[rows, crop] = latent_rgb.rgb_to_latents(window)
    return latents


def _caption_columns(
    rows: list[int], keys: np.ndarray, captions: list[str | None], scenes: list[shapes.Scene]
) -> dict[str, list[str | None]]:
    """The columns of the model case, with a few captions that are empty or null."""
    for number, row in enumerate(rows):
        if row % EMPTY_CAPTION_EVERY == 2:
            captions[number] = None if row % 2 else '  '
    names = [[f'{thing.colour} {thing.shape}' for thing in scene.objects] for scene in scenes]
    tags = [
        [*(name.replace(' ', '_') for name in row_names), f'{scene.background}_background']
        for row_names, scene in zip(names, scenes, strict=True)
    ]
    return {
        'url': [f'https://pictures.invalid/{key}.png' for key in keys],
        'caption': ['-'.join(x).replace(' ', '-') + '.png' for x in names],
        schema.DEFAULT_CAPTION_COLUMN: captions,
        'caption_llava_short': ['A ' + ' and a '.join(x) + '.' for x in names],
        'tags_open_images': [', '.join(x.shape.capitalize() for x in s.objects) for s in scenes],
        'tags_booru': [', '.join(x) for x in tags],
    }


def main() -> None:
    parser = command_line.Parser('coyo11m_tfds.sample_data', __doc__)
    add = parser.add_argument
    add('--out', required=True, help='new local folder to write')
    add('--num_samples', type=int, default=4096, help='number of pictures (%(default)s)')
    add('--scene', choices=[*WORLDS], default='one', help='objects a picture (%(default)s)')
    args = parser.parse_args()
    outlook = f'{args.out} is incomplete: remove it, then run the same command again'
    with command_line.ends_in_one_line(outlook):
        make_sample(args.out, args.num_samples, scene=args.scene)
    samples = format_count(args.num_samples, 'sample')
    command_line.print_lines(f'{samples}: {args.out}')


if __name__ == '__main__':
    main()
