"""Makes a small source of simple pictures, in exactly the layout of the real source.

    python -m coyo11m_tfds.sample_data --out DIR [--num_samples 4096]

A picture shows one coloured shape on a coloured background, at some place and in some size. Three
crops of each picture go to `DIR/latents-3crop/*.pt` as raw latents, and the captions go to
`DIR/coyo11m-meta.parquet`. `coyo11m_tfds.pictures.latent_rgb` turns latents back into pictures. As
in the real source, the Parquet rows are in another order than the latents, a few keys have no row,
and a few captions are empty or null.

The program leaves out one in five of the combinations (colour, shape, background), so a trained
model can draw captions that are new to it.
"""

import dataclasses
import itertools
import os
import pathlib

import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.process import command_line

# Muted between green and magenta: there the preview is weak (the least singular value of
# `schema.RGB_FACTORS` is 0.08, the others are 0.85 and 0.29), so that a vivid green or purple would
# take latents many times larger than real ones.
COLOURS = {
    'red': (205, 75, 60),
    'green': (80, 135, 85),
    'blue': (45, 95, 185),
    'yellow': (240, 190, 95),
    'purple': (135, 90, 150),
    'cyan': (115, 190, 215),
    'white': (245, 245, 245),
    'black': (25, 25, 25),
}
SHAPES = ('circle', 'square', 'triangle')
WORDINGS = (
    'A {size} {colour} {shape} {place} of the picture, on a {background} background.',
    'There is one {colour} {shape} on a {background} background.',
    'The picture has a {background} background. Before it stands a {size} {colour} {shape}.',
    'A plain {background} background with a {colour} {shape} {place}.',
)
PLACES = ('at the left', 'in the middle', 'at the right')

HELD_OUT_SHARE = 5  # one combination in so many
NO_ROW_EVERY = 97  # one key in so many has no row in the Parquet file
EMPTY_CAPTION_EVERY = 89  # one caption in so many is empty or null

# A picture is a little wider than a crop; the crops are taken at its left, middle and right.
_HEIGHT, _WIDTH = 32, 40
_CROP_OFFSETS = (0, 4, 8)
RADII = (8.0, 12.0)  # pixels
_OVERSAMPLING = 4  # sub-pixels a side, for smooth edges
_COLOUR_JITTER = 6  # grey levels
_BATCH = 512  # pictures drawn at a time


@dataclasses.dataclass(frozen=True)
class Scene:
    """The scene of one picture."""

    colour: str
    shape: str
    background: str


def split_scenes() -> tuple[list[Scene], list[Scene]]:
    """Returns the combinations that are made and those that are held out, in a fixed order."""
    combinations = itertools.starmap(Scene, itertools.product(COLOURS, SHAPES, COLOURS))
    scenes = [scene for scene in combinations if scene.colour != scene.background]
    order = np.random.Generator(np.random.Philox(key=11)).permutation(len(scenes))
    cut = len(scenes) // HELD_OUT_SHARE
    return [scenes[i] for i in sorted(order[cut:])], [scenes[i] for i in sorted(order[:cut])]


def held_out_prompts(count: int, seed: int = 0) -> list[tuple[str, Scene]]:
    """Returns captions of combinations that no sample shows, with their scenes."""
    _, held_out = split_scenes()
    rng = np.random.Generator(np.random.Philox(key=seed))
    scenes = [held_out[i % len(held_out)] for i in rng.permutation(max(count, len(held_out)))]
    return [(_write_caption(scene, rng, 'large', PLACES[1]), scene) for scene in scenes[:count]]


def drawn_colours(picture: np.ndarray) -> tuple[str | None, str]:
    """Names the colours of the shape and of the background in a picture, uint8 `(H, W, 3)`.

    The background is the commonest colour along the border, the shape the commonest other one, if
    it covers a twentieth of the picture, as every shape in the data does.
    """
    palette = np.array(list(COLOURS.values()), np.float32)
    distance = np.linalg.norm(picture[:, :, None].astype(np.float32) - palette, axis=-1)
    colours = distance.argmin(-1)
    border = np.concatenate([colours[0], colours[-1], colours[1:-1, 0], colours[1:-1, -1]])
    background = np.bincount(border, minlength=len(palette)).argmax()
    counts = np.bincount(colours.ravel(), minlength=len(palette))
    counts[background] = 0
    names = list(COLOURS)
    shape = names[counts.argmax()] if counts.max() >= colours.size / 20 else None
    return shape, names[background]


def make_sample(
    out_dir: str | os.PathLike,
    num_samples: int = 4096,
    num_files: int = 3,
    dtype: str = 'float16',
    seed: int = 0,
) -> None:
    """Writes `num_samples` samples into `num_files` `.pt` files of unequal length, and captions.

    `out_dir` is a local folder; the same arguments give the same latents, keys and captions.
    """
    # Here, as pandas below: `train_lib.demo` uses the scenes and needs neither.
    import torch

    folder = pathlib.Path(out_dir) / schema.LATENTS_FOLDER
    is_local = bool(storage.local_path(out_dir))
    is_new = not folder.exists() or not any(folder.iterdir())
    count = f'{num_samples} samples in {num_files} files'
    for is_valid, problem, expected in (
        (is_local, f'out_dir is {os.fspath(out_dir)!r}', 'a local folder (`mirror` copies it)'),
        (seed >= 0, f'seed is {seed}', 'at least 0'),
        (dtype in schema.LATENT_DTYPES, f'dtype is {dtype!r}', f'one of {schema.LATENT_DTYPES}'),
        (0 < 4 * num_files <= num_samples, count, 'at least 4 samples a file'),
        (is_new, f'{folder} is not empty', 'a new folder: remove it, or write somewhere else'),
    ):
        if not is_valid:
            raise ValueError(f'{problem}, expected {expected}.')
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.Philox(key=seed))
    keys = np.sort(rng.choice(np.int64(1) << 62, num_samples, replace=False))
    combinations, _ = split_scenes()
    scenes = [combinations[i] for i in rng.integers(len(combinations), size=num_samples)]
    geometry = _random_geometry(num_samples, rng)
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
    _save_captions(pathlib.Path(out_dir) / schema.CAPTIONS_FILE, keys, scenes, geometry, rng)


def _cut_unequally(total: int, count: int) -> list[slice]:
    """Cuts `range(total)` into slices whose lengths are in proportion 3, 4, 5, ..."""
    weights = np.arange(3, 3 + count)
    ends = np.cumsum(weights) * total // weights.sum()
    return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _random_geometry(count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns x and y of centres and radii in pixels, float32 `(count, 3)`."""
    radius = rng.uniform(*RADII, count)
    # The stretch that all crops have in common, less most of the radius.
    low, high = _CROP_OFFSETS[-1] + 0.7 * radius, _WIDTH - _CROP_OFFSETS[-1] - 0.7 * radius
    x = low + (high - low) * rng.random(count)
    y = radius + (_HEIGHT - 2 * radius) * rng.random(count)
    return np.stack([x, y, radius], axis=1).astype(np.float32)


def _make_latents(
    scenes: list[Scene], geometry: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Raw latents float32 `(n, 3, 4, 32, 32)` of the three crops of every scene."""
    latents = np.empty((len(scenes), *schema.LATENTS_SHAPE), np.float32)
    size = schema.LATENT_SHAPE[-1]
    for start in range(0, len(scenes), _BATCH):
        rows = slice(start, start + _BATCH)
        pictures = _draw_scenes(scenes[rows], geometry[rows], rng)
        for crop, offset in enumerate(_CROP_OFFSETS):
            window = pictures[:, :, offset : offset + size]
            latents[rows, crop] = latent_rgb.rgb_to_latents(window)
    return latents


def _draw_scenes(scenes: list[Scene], geometry: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws scenes as uint8 `(n, _HEIGHT, _WIDTH, 3)` with smooth edges."""
    cover = pixel_coverage([scene.shape for scene in scenes], geometry)[..., None]
    colours, backgrounds = (
        np.array([COLOURS[getattr(scene, field)] for scene in scenes], np.float32)
        + rng.uniform(-_COLOUR_JITTER, _COLOUR_JITTER, (len(scenes), 3))
        for field in ('colour', 'background')
    )
    pictures = cover * colours[:, None, None] + (1 - cover) * backgrounds[:, None, None]
    return np.round(np.clip(pictures, 0, 255)).astype(np.uint8)


def pixel_coverage(shapes: list[str], geometry: np.ndarray) -> np.ndarray:
    """Returns the shares of pixels, `(n, H, W)`, inside shapes of `(x, y, radius)` in pixels."""
    fine = _OVERSAMPLING
    rows = (np.arange(_HEIGHT * fine, dtype=np.float32) + 0.5) / fine
    columns = (np.arange(_WIDTH * fine, dtype=np.float32) + 0.5) / fine
    x, y, radius = (values[:, None, None] for values in geometry.T)
    dy, dx = (rows[None, :, None] - y) / radius, (columns[None, None, :] - x) / radius
    # In units of the radius. The sides make the three shapes about equally large.
    tests = {
        'circle': lambda x, y: x * x + y * y <= 1,
        'square': lambda x, y: np.maximum(abs(x), abs(y)) <= 0.88,
        'triangle': lambda x, y: (y <= 0.9) & (abs(x) <= 0.58 * (y + 1.1)),
    }
    inside = np.empty((len(shapes), len(rows), len(columns)), bool)
    for shape, test in tests.items():
        mask = np.array([name == shape for name in shapes])
        inside[mask] = test(dx[mask], dy[mask])
    blocks = inside.reshape(len(shapes), _HEIGHT, fine, _WIDTH, fine)
    return blocks.mean((2, 4), dtype=np.float32)


def _save_captions(
    path: pathlib.Path,
    keys: np.ndarray,
    scenes: list[Scene],
    geometry: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Writes the Parquet file as pandas does: `key` is the index column, rows shuffled."""
    import pandas as pd

    rows = [i for i in rng.permutation(len(keys)) if i % NO_ROW_EVERY != 1]
    middle_radius = sum(RADII) / 2
    captions: list[str | None] = []
    for i in rows:
        x, _, radius = geometry[i]
        size = 'large' if radius > middle_radius else 'small'
        captions.append(_write_caption(scenes[i], rng, size, PLACES[int(3 * x / _WIDTH)]))
        if i % EMPTY_CAPTION_EVERY == 2:
            captions[-1] = None if i % 2 else '  '
    row_scenes = [scenes[i] for i in rows]
    columns = {
        'url': [f'https://pictures.invalid/{keys[i]}.png' for i in rows],
        'caption': [f'{s.colour}-{s.shape}.png' for s in row_scenes],
        schema.DEFAULT_CAPTION_COLUMN: captions,
        'caption_llava_short': [f'A {s.colour} {s.shape}.' for s in row_scenes],
        'tags_open_images': [s.shape.capitalize() for s in row_scenes],
        'tags_booru': [f'{s.colour}_{s.shape}, {s.background}_background' for s in row_scenes],
    }
    index = pd.Index(keys[rows], name=schema.PARQUET_KEY)
    pd.DataFrame(columns, index=index).to_parquet(path, write_page_checksum=True)


def _write_caption(scene: Scene, rng: np.random.Generator, size: str, place: str) -> str:
    wording = WORDINGS[rng.integers(len(WORDINGS))]
    return wording.format(size=size, place=place, **dataclasses.asdict(scene))


def main() -> None:
    parser = command_line.Parser('coyo11m_tfds.sample_data', __doc__)
    add = parser.add_argument
    add('--out', required=True, help='new local folder to write')
    add('--num_samples', type=int, default=4096, help='number of pictures (%(default)s)')
    args = parser.parse_args()
    outlook = f'{args.out} is incomplete: remove it, then run the same command again'
    with command_line.ends_in_one_line(outlook):
        make_sample(args.out, args.num_samples)
    print(f'{args.num_samples} samples: {args.out}')


if __name__ == '__main__':
    main()
