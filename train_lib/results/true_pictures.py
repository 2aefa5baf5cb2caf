"""Compares what a model draws for the captions of a folder with the pictures of the folder."""

import json
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import logging
from etils import epath

from coyo11m_tfds import captioned_images, schema
from coyo11m_tfds.pictures import latent_rgb, pixels
from coyo11m_tfds.storage import model_files
from train_lib.lifecycle import workdirs
from train_lib.results import judge, previews, prompt_sets
from train_lib.results.artist import Artist

RoundTrip = Callable[[np.ndarray], np.ndarray]  # of pictures, uint8 `(n, H, W, 3)`

_SHOWN = 64  # whole pictures that are kept
_BATCH = 64  # pictures that are read at a time


class Comparison(NamedTuple):
    """What `compare` found."""

    table: dict[str, dict[str, np.ndarray]]  # see `judge.write_table`
    grid: str  # path of a PNG, each drawn picture beside its true one


class TruePictures(NamedTuple):
    """The pictures of a folder, in the order of their names."""

    names: list[str]
    captions: list[str]
    areas: np.ndarray  # float32 `(n, 3072)`, see `judge.mean_areas`
    returned: np.ndarray | None  # float32 `(n, 3072)`, of what comes back from latents
    shown: np.ndarray  # uint8 `(at most 64, H, W, 3)`, the first ones


def read_pictures(
    folder: str | os.PathLike[str],
    shape: tuple[int, int],
    most: int | None = None,
    round_trip: RoundTrip | None = None,
    needs_captions: bool = False,
) -> TruePictures:
    """Reads the pictures of a folder by `captioned_images.read_images`.

    Args:
        folder: Folder of pictures, perhaps with captions.
        shape: Height and width of the pictures; others are cropped and resized to it.
        most: Number of pictures to read; None for all.
        round_trip: Turns pictures into latents and back; see `make_round_trip`.
        needs_captions: Whether a picture without a caption is refused, with a ValueError.
    """
    names: list[str] = []
    captions: list[str] = []
    areas = []
    returned = []
    shown = []
    for batch in captioned_images.read_images(folder, shape, _BATCH, most):
        # At once: a round trip takes longer than all that is read.
        if needs_captions and '' in batch.captions:
            name = batch.names[batch.captions.index('')]
            raise ValueError(f'{folder}/{name} has no caption, expected one for each picture')
        # Of all others, the means of areas suffice: a folder may have many pictures.
        if len(names) < _SHOWN:
            shown.append(batch.pictures)
        names += batch.names
        captions += batch.captions
        areas.append(judge.mean_areas(batch.pictures))
        if round_trip:
            returned.append(judge.mean_areas(round_trip(batch.pictures)))
    return TruePictures(
        names=names,
        captions=captions,
        areas=np.concatenate(areas),
        returned=np.concatenate(returned) if round_trip else None,
        shown=np.concatenate(shown)[:_SHOWN],
    )


def make_round_trip(artist: Artist) -> RoundTrip | None:
    """Returns what turns pictures into latents and back, as the artist turns latents into pictures.

    None if it cannot be done: with a decoder that has no encoder, or did not make the latents.
    """
    if not artist.vae:
        # Of a data set without a VAE, such as the sample, the linear map made the latents, too.
        _, num_channels, _, _ = artist.facts.latents_shape
        if artist.facts.vae or num_channels != len(schema.RGB_FACTORS):
            return None
        return lambda pictures: artist.paint(latent_rgb.rgb_to_latents(pictures))
    if artist.facts.vae != model_files.public_name(artist.vae):
        return None
    # Here: JAX compiles it only for those who need it.
    from coyo11m_tfds.pictures.vae_encoder import VaeEncoder

    try:
        encoder = VaeEncoder(artist.vae)
    except (ValueError, LookupError) as error:
        logging.warning('What the VAE gives back is not compared: %s', error)
        return None
    return lambda pictures: artist.paint(encoder.encode(pictures)[0])


def compare(
    artist: Artist, place: epath.Path, truth: str, known: str | None, most: int
) -> Comparison:
    """Draws the captions of the first `most` pictures of the folder `truth`, and compares both.

    The drawn pictures, the grid and the means, `truth_NAME_STEP_ID.json`, are stored in `place`.
    What is there is not drawn again.

    Args:
        artist: Draws the pictures.
        place: Folder for results.
        truth: Folder of true pictures with captions.
        known: Folder of pictures that the model has seen; None for none.
        most: Number of pictures.

    Raises:
        ValueError: A picture has no caption, or a folder no pictures.
        OSError: A picture cannot be read, or a result cannot be written.
    """
    # First what may be missing, also what a run that goes on removes: the round trip of many
    # pictures takes as long as to draw them.
    _ = artist.text_encoder
    _ = artist.params
    known_pictures = None
    if known:
        # They need no captions.
        known_pictures = read_pictures(known, artist.picture_shape)
    round_trip = make_round_trip(artist)
    own = read_pictures(truth, artist.picture_shape, most, round_trip, needs_captions=True)
    # Numbers of the true pictures; the known ones come behind them.
    numbers = np.arange(len(own.captions))
    areas = own.areas
    if known_pictures is not None:
        areas = np.concatenate([areas, known_pictures.areas])
    is_known = np.arange(len(areas)) >= len(numbers)
    jury = judge.Judge(areas, is_known)

    # Drawn like a set of prompts, so that an interrupted comparison continues.
    prompts = []
    for number, caption in enumerate(own.captions):
        prompts.append(prompt_sets.Prompt(caption, [f'{number:05}.png'], {}))
    name = workdirs.absolute(truth).name
    folder = epath.Path(prompt_sets.draw_prompts(artist, prompts, 1, place, name))
    # The grid shows as many as have been kept whole.
    num_shown = len(own.shown)
    drawn_areas, first_drawn = _read_drawn(folder, prompts, num_shown)

    # `ceiling` is what the VAE loses, `floor` what a model gets that only repeats what it knows.
    drawn = jury.compare(drawn_areas, numbers)
    table = {'drawn': judge.list_columns(drawn)}
    if own.returned is not None:
        ceiling = jury.compare(own.returned, numbers)
        table['ceiling'] = judge.list_columns(ceiling)
    floor = jury.find_floor(numbers)
    if floor is not None:
        table['floor'] = judge.list_columns(floor)
    # Named as the folder of the drawn pictures, whose digest is of all settings.
    stem = place / folder.name.replace('prompts_', 'truth_', 1)
    grid = previews.make_grid([first_drawn, own.shown], own.captions[:num_shown])
    previews.write_png(f'{stem}.png', grid)
    result = {
        'num_pictures': len(numbers),
        'means': _average_columns(table),
        'settings': artist.settings,
    }
    epath.Path(f'{stem}.json').write_text(json.dumps(result, indent=2))
    return Comparison(table, f'{stem}.png')


def _average_columns(table: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Returns the mean of each column of each row; bools count as 0 and 1."""
    means: dict[str, dict[str, float]] = {}
    for row, columns in table.items():
        means[row] = {}
        for column, values in columns.items():
            # JSON takes no values of NumPy.
            means[row][column] = float(values.mean())
    return means


def _read_drawn(
    folder: epath.Path, prompts: list[prompt_sets.Prompt], num_shown: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the areas of all drawn pictures, and the first pictures."""
    areas = []
    shown: list[np.ndarray] = []
    for prompt in prompts:
        [file] = prompt.files
        # From the files, because a comparison that continues has not drawn all of them itself.
        picture = pixels.read_png((folder / file).read_bytes())
        areas.append(judge.mean_areas(picture[None]))
        # Of the others, the areas are enough.
        if len(shown) < num_shown:
            shown.append(picture)
    return np.concatenate(areas), np.stack(shown)
