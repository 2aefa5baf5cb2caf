"""Small images with captions and numbers, as folders, tars and Parquet files of others hold them.

It imports little, because workers that decode import it.
"""

import csv
import io
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from coyo11m_tfds.pictures import pixels

SUFFIXES = {'jpg': 'JPEG', 'png': 'PNG', 'webp': 'WEBP'}
END = b'this ends the worker'


class MadeImage(NamedTuple):
    """An image file, and what goes with it."""

    name: str
    data: bytes
    fields: dict[str, Any]  # key, caption, score


def make_images(
    count: int, sizes: Sequence[tuple[int, int]] = ((20, 30), (40, 17))
) -> list[MadeImage]:
    """Different images of some sizes (W, H), in all formats; every fourth is turned by EXIF."""
    random = np.random.default_rng(0)
    images = []
    for number in range(count):
        width, height = sizes[number % len(sizes)]
        coarse = random.integers(0, 256, (4, 4, 3), np.uint8)
        image = Image.fromarray(coarse).resize((width, height))
        exif = Image.Exif()
        # The orientation: to be turned by 90 degrees.
        if number % 4 == 3:
            exif[0x0112] = 6
        suffix = list(SUFFIXES)[number % 3]
        stream = io.BytesIO()
        image.save(stream, SUFFIXES[suffix], exif=exif)
        # Texts that readers of tables and lines may break.
        caption = {1: '1984', 2: 'A line\u2028 and another.'}.get(number, f'Image {number}.')
        fields = {'key': 1000 + number, 'caption': caption, 'score': number / 2}
        images.append(MadeImage(f'img.{number:04}.{suffix}', stream.getvalue(), fields))
    return images


def write(folder: pathlib.Path, kind: str, images: Sequence[MadeImage]) -> pathlib.Path:
    """Writes a source of images; only 'txt' has no numbers and keys."""
    folder.mkdir(parents=True)
    if kind == 'tar':
        from tests.fakes import latent_files

        for half, name in ((images[::2], '00000.tar'), (images[1::2], '00001.tar')):
            samples = {}
            for image in half:
                _, number, suffix = image.name.split('.')
                # As img2dataset writes it, a text with zeros in front.
                key = f'{image.fields["key"]:09}'
                fields = image.fields | {'key': key}
                caption = fields.pop('caption')
                samples[number] = {suffix: image.data, 'txt': caption, 'json': fields}
            latent_files.write_tar(folder / name, samples)
        return folder
    if kind == 'parquet':
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = []
        for image in images:
            row = dict(image.fields)
            caption = row.pop('caption')
            row |= {'image': {'bytes': image.data, 'path': image.name}, 'text': caption}
            rows.append(row)
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, folder / 'train-00000-of-00001.parquet', row_group_size=5)
        return folder
    rows = []
    for number, image in enumerate(images):
        name = f'{number % 2}/{image.name}'
        rows.append({'file_name': name} | image.fields)
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image.data)
        if kind == 'txt':
            path.with_suffix('.txt').write_text(image.fields['caption'])
        elif kind == 'json':
            path.with_suffix('.json').write_text(json.dumps(image.fields))
    if kind == 'jsonl':
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / 'metadata.jsonl').write_text('\n'.join(lines))
    elif kind == 'csv':
        with (folder / 'metadata.csv').open('w') as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


def read_or_end(data: bytes, target: pixels.Target) -> pixels.Pixels:
    """Reads an image as `pixels.read_pixels` does, but ends the process for one of them."""
    if data == END:
        os._exit(1)
    return pixels.read_pixels(data, target)
