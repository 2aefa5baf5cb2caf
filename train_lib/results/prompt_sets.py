"""Draws the prompts of a benchmark into a folder that the benchmark's own judge reads.

| prompts | pictures |
|---|---|
| a text file, a prompt in each line | `00000/samples/00000.png`, ..., `00000/metadata.jsonl` |
| `evaluation_metadata.jsonl` of GenEval | the same, with the metadata of GenEval |
| a folder of text files, as of DPG-Bench | `NAME.png` for `NAME.txt`, a grid of all its pictures |

GenEval: Ghosh et al., 2023, arXiv 2310.11513. DPG-Bench: Hu et al., 2024, arXiv 2403.05135.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from etils import epath

from coyo11m_tfds import storage
from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import json_digest
from train_lib.results import previews
from train_lib.results.artist import Artist

_GRID_WIDTH = 2  # the judge of DPG-Bench cuts a grid into two by two pictures


class Prompt(NamedTuple):
    """A text to draw, and the files that a judge expects of it."""

    text: str
    files: list[str]  # names, of one for each picture, or of one for the grid of all
    metadata: dict[str, str]  # content of a file for the judge, by name


def read_prompts(path: epath.PathLike, count: int) -> list[Prompt]:
    """Reads the prompts of a text file, of a file of GenEval, or of a folder of DPG-Bench.

    Args:
        path: File or folder, local or `gs://`.
        count: Number of pictures of each prompt.

    Raises:
        ValueError: There is no prompt, a line is none, or a grid does not hold so many pictures.
        OSError: A file cannot be read.
    """
    path = epath.Path(path)
    if storage.open_folder(path).exists():
        return _read_folder(path, count)
    prompts = []
    for number, line in enumerate(read_captions(path)):
        # A line of text becomes what GenEval would have of it.
        metadata = {'prompt': line}
        try:
            if path.suffix == '.jsonl':
                metadata = json.loads(line)
            text = metadata['prompt'].strip()
            # Half of a surrogate pair, which JSON can write, would end hours of drawing.
            text.encode()
            if not text:
                raise ValueError('blank')
        # What is no JSON or nested too deeply, no object, without a prompt, or with no such text.
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            problem = f'{line[:80]!r} is not JSON like {{"prompt": "a red circle"}}'
            raise ValueError(f'{path}: {problem}') from error
        folder = f'{number:05}'
        files = [f'{folder}/samples/{picture:05}.png' for picture in range(count)]
        metadata_files = {f'{folder}/metadata.jsonl': json.dumps(metadata)}
        prompts.append(Prompt(text, files, metadata_files))
    return prompts


def _read_folder(path: epath.Path, count: int) -> list[Prompt]:
    """Reads a prompt from each text file of a folder; its pictures will be one grid."""
    if not 1 <= count <= _GRID_WIDTH**2:
        problem = f'expected 1 to {_GRID_WIDTH**2}, for the grids of {path}'
        raise ValueError(f'pictures_per_prompt={count}: {problem}')
    prompts = []
    # Sorted, because the place of a prompt decides its noise.
    for name in sorted(storage.list_folder(path)):
        if not name.endswith('.txt'):
            continue
        # A prompt may be wrapped.
        text = ' '.join(read_captions(path / name))
        stem = name.removesuffix('.txt')
        prompts.append(Prompt(text, [f'{stem}.png'], metadata={}))
    if not prompts:
        raise ValueError(f'{path} holds no prompt; expected one in each NAME.txt.')
    return prompts


def draw_prompts(
    artist: Artist, prompts: list[Prompt], count: int, place: epath.PathLike, name: str
) -> str:
    """Draws the missing ones of `count` pictures a prompt; returns their folder.

    The folder is `PLACE/prompts_NAME_STEP_ID` (ID: a digest of prompts and settings, which are next
    to it as JSON). Picture k of prompt n has the noise of the number `n * count + k`.

    Args:
        artist: Draws the pictures.
        prompts: Prompts, as of `read_prompts`.
        count: Number of pictures of each prompt.
        place: Folder for results, local or `gs://`.
        name: Name of the set of prompts; a long one is cut.

    Raises:
        ValueError: The model takes no texts, or not one of these.
        OSError: A file cannot be written, or the weights cannot be read.
    """
    # Before hours of drawing: those of a model of classes may not all be numbers of classes.
    artist.check_captions([prompt.text for prompt in prompts])
    settings = artist.settings | {
        'text_encoder': f'{artist.text_encoder.name} {artist.text_encoder.revision}',
        'prompts': json_digest.sha256(prompts),
        'pictures_per_prompt': count,
    }
    # Whatever a file of prompts is called, its pictures are not taken for results of `evaluate`.
    settings_id = json_digest.sha256(settings)[:8]
    name = f'prompts_{previews.cut_subject(name)}_{artist.step:06}_{settings_id}'
    folder = storage.open_writable_folder(place)
    folder.write(f'{name}.json', json.dumps(settings, indent=2).encode())
    # Under a name there is a complete file or none.
    present = folder.list(name, deep=True).keys()
    # Always the same prompts together, so that pictures are rounded as in an uninterrupted run.
    size = max(1, artist.batch_size // count)
    with Progress('Drawing', len(prompts), 'prompts') as progress:
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            expected: set[str] = set()
            for prompt in batch:
                expected.update(prompt.files, prompt.metadata)
            if present >= expected:
                progress.skip(len(batch))
                continue
            # Numbered by prompts and not by what is missing, or the noise would be another.
            number = first * count
            for prompt, pictures in _draw_each(artist, batch, count, number):
                files = _make_files(prompt, pictures)
                for file in files.keys() - present:
                    folder.write(f'{name}/{file}', files[file])
            progress.add(len(batch))
    return folder.path_of(name)


def _draw_each(
    artist: Artist, prompts: list[Prompt], count: int, number: int
) -> Iterator[tuple[Prompt, np.ndarray]]:
    """Yields each prompt with its pictures, uint8 `(count, H, W, 3)`.

    The first picture has the noise of `number`, and the others follow.
    """
    captions = []
    for prompt in prompts:
        captions += [prompt.text] * count
    pictures = artist.draw(captions, first=number)
    pictures_by_prompt = np.split(pictures, len(prompts))
    yield from zip(prompts, pictures_by_prompt, strict=True)


def _make_files(prompt: Prompt, pictures: np.ndarray) -> dict[str, bytes]:
    """Returns the contents of a prompt's files, by name."""
    files = {name: text.encode() for name, text in prompt.metadata.items()}
    # Each picture has a file of its own, or one file holds all of them.
    images = list(pictures)
    if len(prompt.files) != len(images):
        images = [_tile(pictures)]
    for name, image in zip(prompt.files, images, strict=True):
        files[name] = pixels.encode_png(image)
    return files


def _tile(pictures: np.ndarray) -> np.ndarray:
    """Puts up to four pictures, uint8 `(n, H, W, 3)`, into a grid without margins."""
    # The last row is filled with black.
    num_missing = -len(pictures) % _GRID_WIDTH
    cells = np.pad(pictures, [(0, num_missing), (0, 0), (0, 0), (0, 0)])
    rows = []
    for first in range(0, len(cells), _GRID_WIDTH):
        cells_of_row = list(cells[first : first + _GRID_WIDTH])
        rows.append(np.hstack(cells_of_row))
    return np.vstack(rows)


def read_captions(path: epath.Path) -> list[str]:
    """Reads a caption from each line of a file; raises a ValueError if it has none."""
    content = storage.describe_file(path).read()
    try:
        # Some editors begin with a byte order mark.
        text = content.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}: byte {error.start} is not UTF-8; save it as UTF-8.') from error
    # Not by `splitlines`: texts may hold other ends of lines, as U+2028.
    lines = [line.strip() for line in text.split('\n')]
    captions = [line for line in lines if line]
    if not captions:
        raise ValueError(f'{path} holds no caption; expected one a line.')
    return captions
