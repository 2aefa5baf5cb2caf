"""Draws the prompts of a benchmark into a folder that the benchmark's own judge reads.

| prompts | pictures |
|---|---|
| a text file, a prompt in each line | `00000/samples/00000.png`, ..., `00000/metadata.jsonl` |
| `evaluation_metadata.jsonl` of GenEval | the same, with the metadata of GenEval |
| a folder of text files, as of DPG-Bench | `NAME.png` for `NAME.txt`, a grid of all its pictures |

GenEval: Ghosh et al., 2023, arXiv 2310.11513. DPG-Bench: Hu et al., 2024, arXiv 2403.05135.
"""

import json
from typing import NamedTuple

import numpy as np
from etils import epath

from coyo11m_tfds import storage
from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import json_digest
from train_lib.results.artist import Artist

_GRID_WIDTH = 2  # the judge of DPG-Bench cuts a grid into two by two pictures


class Prompt(NamedTuple):
    text: str
    files: list[str]  # names, of one for each picture, or of one for the grid of all
    metadata: dict[str, str]  # content of a file for the judge, by name


def read_prompts(path: epath.PathLike, count: int) -> list[Prompt]:
    """Reads prompts for `count` pictures each; raises a ValueError or an OSError for bad files."""
    path = epath.Path(path)
    if storage.open_folder(path).exists():
        if not 1 <= count <= _GRID_WIDTH**2:
            problem = f'expected 1 to {_GRID_WIDTH**2}, for the grids of {path}'
            raise ValueError(f'pictures_per_prompt={count}: {problem}')
        if not (names := sorted(x for x in storage.list_folder(path) if x.endswith('.txt'))):
            raise ValueError(f'{path} holds no prompt; expected one in each NAME.txt.')
        # A prompt may be wrapped.
        texts = [' '.join(read_captions(path / name)) for name in names]
        grids = [[f'{name.removesuffix(".txt")}.png'] for name in names]
        return [Prompt(text, grid, {}) for text, grid in zip(texts, grids, strict=True)]
    prompts = []
    for number, line in enumerate(read_captions(path)):
        try:
            metadata = json.loads(line) if path.suffix == '.jsonl' else {'prompt': line}
            text = metadata['prompt'].strip()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f'{line[:80]!r} is not JSON like {{"prompt": "a red circle"}}'
            raise ValueError(f'{path}: {problem}') from error
        files = [f'{number:05}/samples/{picture:05}.png' for picture in range(count)]
        prompts.append(Prompt(text, files, {f'{number:05}/metadata.jsonl': json.dumps(metadata)}))
    return prompts


def draw_prompts(
    artist: Artist, prompts: list[Prompt], count: int, place: epath.PathLike, name: str
) -> str:
    """Draws the missing ones of `count` pictures a prompt; returns their folder.

    The folder is `PLACE/prompts_NAME_STEP_ID` (ID: a digest of prompts and settings, which are next
    to it as JSON). Picture k of prompt n has the noise of the number `n * count + k`.
    """
    settings = artist.settings | {
        'text_encoder': f'{artist.text_encoder.name} {artist.text_encoder.revision}',
        'prompts': json_digest.sha256(prompts),
        'pictures_per_prompt': count,
    }
    # Whatever a file of prompts is called, its pictures are not taken for results of `evaluate`.
    name = f'prompts_{name}_{artist.step:06}_{json_digest.sha256(settings)[:8]}'
    folder = storage.open_writable_folder(place)
    folder.write(f'{name}.json', json.dumps(settings, indent=2).encode())
    # Under a name there is a complete file or none.
    present = folder.list(name, deep=True).keys()
    # Always the same prompts together, so that pictures are rounded as in an uninterrupted run.
    size = max(1, artist.batch_size // count)
    with Progress('Drawing', len(prompts), 'prompts') as progress:
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            if all(present >= {*x.files, *x.metadata} for x in batch):
                progress.skip(len(batch))
                continue
            captions = [x.text for x in batch for _ in range(count)]
            pictures = artist.draw(captions, first=first * count)
            for prompt, images in zip(batch, np.split(pictures, len(batch)), strict=True):
                # One file holds all of them, or each has its own.
                contents = images if len(prompt.files) == count else [_tile(images)]
                files = {file: text.encode() for file, text in prompt.metadata.items()}
                files |= dict(zip(prompt.files, map(pixels.encode_png, contents), strict=True))
                for file in files.keys() - present:
                    folder.write(f'{name}/{file}', files[file])
            progress.add(len(batch))
    return folder.path_of(name)


def _tile(pictures: np.ndarray) -> np.ndarray:
    """Puts up to four pictures, uint8 `(n, H, W, 3)`, into a grid without margins."""
    num_missing = -len(pictures) % _GRID_WIDTH
    cells = np.pad(pictures, [(0, num_missing), (0, 0), (0, 0), (0, 0)])
    rows = np.split(cells, len(cells) // _GRID_WIDTH)
    return np.vstack([np.hstack(list(row)) for row in rows])


def read_captions(path: epath.Path) -> list[str]:
    """Reads a caption from each line of a file; raises a ValueError if it has none."""
    try:
        # Some editors begin with a byte order mark.
        text = storage.describe_file(path).read().decode('utf-8-sig')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}: byte {error.start} is not UTF-8; save it as UTF-8.') from error
    # Not by `splitlines`: texts may hold other ends of lines, as U+2028.
    captions = [caption for line in text.split('\n') if (caption := line.strip())]
    if not captions:
        raise ValueError(f'{path} holds no caption; expected one a line.')
    return captions
