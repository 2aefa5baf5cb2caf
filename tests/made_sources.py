"""Small sources for the tests of the conversion, with every value known."""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.source import captions, keyed_values


def make_latents(count: int, dtype: str = 'float16', seed: int = 0) -> torch.Tensor:
    """Random latents `(count, 3, 4, 32, 32)`."""
    generator = torch.Generator().manual_seed(seed)
    values = 6 * torch.randn(count, *schema.LATENTS_SHAPE, generator=generator) + 1
    return values.to(getattr(torch, dtype))


def write_pt(
    path: pathlib.Path,
    keys: Sequence[int],
    dtype: str = 'float16',
    replace: Mapping[str, Any] | None = None,
) -> None:
    """Writes a `.pt` file; `replace` adds or replaces entries of its dict, None removes one."""
    entries = {
        schema.PT_KEYS: torch.tensor(keys, dtype=torch.int64),
        schema.PT_LATENTS: make_latents(len(keys), dtype, seed=sum(keys)),
    } | (replace or {})
    content = {name: value for name, value in entries.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def write_captions(folder: pathlib.Path, texts: Mapping[int, str | None]) -> None:
    """Writes the Parquet file of captions."""
    keys = list(texts)
    short_texts = [f'short {key}' for key in keys]
    # With their types: some sources have no rows, or nulls alone.
    columns = {
        schema.PARQUET_KEY: pa.array(keys, pa.int64()),
        schema.DEFAULT_CAPTION_COLUMN: pa.array(list(texts.values()), pa.string()),
        'caption': pa.array(short_texts, pa.string()),
    }
    pq.write_table(pa.table(columns), folder / schema.CAPTIONS_FILE)


def write_source(
    folder: pathlib.Path,
    files: Sequence[Sequence[int]],
    dtype: str = 'float16',
    replace: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a whole source: `files` holds the keys of each `.pt` file; every key has a caption."""
    texts: dict[int, str | None] = {}
    for number, keys in enumerate(files):
        write_pt(latents_file(folder, number), keys, dtype, replace)
        for key in keys:
            texts[key] = f'Caption of {key}.'
    write_captions(folder, texts)
    return folder


def rename_columns(
    source: pathlib.Path, key: str, caption: str, parts: int = 0, latents: str = schema.PT_LATENTS
) -> str:
    """Gives keys, captions and latents other names; returns that of the file of captions.

    With `parts` the captions become so many files in a folder.
    """
    names = {schema.PT_KEYS: key, schema.PT_LATENTS: latents}
    for path in sorted((source / schema.LATENTS_FOLDER).iterdir()):
        content = torch.load(path, weights_only=True)
        renamed = {names.get(name, name): value for name, value in content.items()}
        torch.save(renamed, path)
    table = pq.read_table(source / schema.CAPTIONS_FILE)
    (source / schema.CAPTIONS_FILE).unlink()
    table = table.select([schema.PARQUET_KEY, schema.DEFAULT_CAPTION_COLUMN])
    table = table.rename_columns([key, caption])
    if not parts:
        pq.write_table(table, source / 'metadata.parquet')
        return 'metadata.parquet'
    (source / 'data').mkdir()
    rows = -(-len(table) // parts)
    for number in range(parts):
        path = source / 'data' / f'train-{number:05}-of-{parts:05}.parquet'
        pq.write_table(table.slice(number * rows, rows), path)
    return 'data'


def latents_file(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Path of the n-th `.pt` file."""
    return folder / schema.LATENTS_FOLDER / f'{10 * number:06d}-{10 * number + 9:06d}.pt'


def write_sidecar(
    path: pathlib.Path,
    embeddings: Mapping[int, np.ndarray],
    source: pathlib.Path | None = None,
    **metadata: str | None,
) -> pathlib.Path:
    """Writes text embeddings as float16, as of the captions of `source`; None drops `metadata`."""
    dim = len(next(iter(embeddings.values())))
    numbers = np.concatenate(list(embeddings.values())).astype(np.float16)
    flat = pa.array(numbers)
    entries = {
        schema.META_TEXT_ENCODER: 'made-up',
        schema.META_TEXT_REVISION: '1',
        schema.META_TEXT_MAX_TOKENS: '0',
        schema.META_TEXT_DIM: str(dim),
        schema.META_CAPTION_COLUMN: schema.DEFAULT_CAPTION_COLUMN,
        schema.META_CAPTIONS_DIGEST: 'made-up',
    } | metadata
    if source is not None:
        digest = captions_digest(source, entries[schema.META_CAPTION_COLUMN])
        entries[schema.META_CAPTIONS_DIGEST] = digest
    table = pa.table(
        {
            schema.PARQUET_KEY: pa.array(list(embeddings), pa.int64()),
            schema.TEXT_EMBEDDING: pa.FixedSizeListArray.from_arrays(flat, dim),
        }
    )
    entries = {name: value for name, value in entries.items() if value is not None}
    pq.write_table(table.replace_schema_metadata(entries), path)
    return path


def captions_digest(source: pathlib.Path, column: str = schema.DEFAULT_CAPTION_COLUMN) -> str:
    """What a sidecar that is made of these captions says of them."""
    path = str(source / schema.CAPTIONS_FILE)
    with tempfile.TemporaryDirectory() as folder:
        joined = f'{folder}/captions'
        captions.join_texts({path: path}, column, joined)
        return keyed_values.KeyedValues(joined).facts['digest']
