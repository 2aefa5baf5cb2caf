"""Decides what every shard will hold, before anything is written.

    plan = make_plan(sources.find('/data/coyo11m'), scratch_dir=..., shard_path=..., ...)
    plan.tasks     # one a shard, with the exact rows of its records
    plan.dropped   # {'no_row': 7, 'no_caption': 6}

Planning opens and checks every file of the source, joins captions and text vectors by key, and
chooses the split of each key, so that what is wrong is found before hours are spent on writing.
For 12 million rows it takes 12 s beside reading the files, and at most 1.5 GB of memory.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from coyo11m_tfds import captions, schema, sources, vectors
from coyo11m_tfds.keyed_random import splitmix64
from coyo11m_tfds.shard_writer import VECTORS_IN_PT, ShardTask, TextVectors
from coyo11m_tfds.source_latents import SourceLatents

NO_ROW, NO_CAPTION, NO_TEXT_VECTOR = 'no_row', 'no_caption', 'no_text_vector'

# If more of the source is dropped, its captions or vectors belong to other latents.
MAX_DROPPED_FRACTION = 0.5

_RECORD_OVERHEAD = 128  # bytes of a record besides latents, caption and text vector


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be written.

    Attributes:
        tasks: all shards; the tasks that read the same `.pt` file follow each other.
        num_bytes: their expected size, exact within 1%.
        latent_dtype: one of `schema.LATENT_DTYPES`.
        text_vectors: None where records hold no text vector.
        dropped: how many rows of the source are left out, by reason.
        source_fingerprint: hex digest of everything that is read.
    """

    tasks: tuple[ShardTask, ...]
    num_bytes: int
    latent_dtype: str
    text_vectors: TextVectors | None
    dropped: dict[str, int]
    source_fingerprint: str


def make_plan(
    source: sources.Source,
    *,
    caption_column: str,
    text_vectors: str,
    validation_fraction: float,
    shard_bytes: int,
    scratch_dir: str | os.PathLike[str],
    shard_path: Callable[[str, int, int], str],
    max_examples_per_split: int | None = None,
) -> Plan:
    """Plans the shards of a data set.

    Args:
        source: files to read.
        caption_column: column of the captions.
        text_vectors: '' for none, 'pt' for `embeddings` in the `.pt` files, or a sidecar's path.
        validation_fraction: share of the keys that goes to the validation split, in [0, 1).
        shard_bytes: a file's records of one split are cut into the fewest shards of at most
            about this size, nearly equal.
        scratch_dir: existing folder for the stores of captions and vectors; the tasks refer to it.
        shard_path: (split, index, number of shards) -> file to write.
        max_examples_per_split: keep only the first records of each split.

    Raises:
        ValueError: something is wrong with the source.
    """
    latents = SourceLatents.read(source.latent_files)
    logging.info('%d rows in %d .pt files', len(latents.keys), len(latents.paths))
    captions_dir = _folder(scratch_dir, 'captions')
    captions_digest = captions.build_store(source.captions_file, caption_column, captions_dir)
    store = captions.CaptionStore(captions_dir)
    logging.info('Read the captions of %s', source.captions_file)
    vector_source, vectors_digest = _prepare_vectors(
        text_vectors, caption_column, latents, scratch_dir
    )
    caption_rows = store.find(latents.keys)
    # Of a key without a row this is some other caption's length; NO_ROW keeps it out.
    caption_bytes = store.lengths(caption_rows)
    reasons = _drop_reasons(latents.keys, caption_rows, caption_bytes, vector_source)
    dropped = {name: int(mask.sum()) for name, mask in reasons.items()}
    kept = ~np.logical_or.reduce(list(reasons.values()))
    _check_dropped(dropped, kept, source.captions_file)

    tasks, num_bytes = [], 0
    for split, mask in _split_masks(latents.keys, kept, validation_fraction).items():
        rows = np.flatnonzero(mask)[:max_examples_per_split]
        sizes = _record_sizes(caption_bytes[rows], vector_source)
        num_bytes += int(sizes.sum())
        runs = _cut_into_runs(rows, sizes, latents.starts, shard_bytes)
        tasks += _make_tasks(split, runs, latents, shard_path, captions_dir, vector_source)
    if not any(task.split == schema.TRAIN for task in tasks):
        raise ValueError(f'{source.captions_file}: no record is left for the train split.')
    return Plan(
        tasks=tuple(sorted(tasks, key=lambda task: (task.latents_path, task.split, task.index))),
        num_bytes=num_bytes,
        latent_dtype=latents.dtype,
        text_vectors=vector_source,
        dropped=dropped,
        source_fingerprint=_digest([*latents.digests, captions_digest, vectors_digest]),
    )


def _prepare_vectors(
    text_vectors: str, caption_column: str, latents: SourceLatents, scratch_dir: os.PathLike | str
) -> tuple[TextVectors | None, str]:
    """Returns where to read text vectors, and a digest of them."""
    if not text_vectors:
        return None, ''
    if text_vectors == VECTORS_IN_PT:
        dim = latents.common_embedding_dim()
        return TextVectors(VECTORS_IN_PT, dim=dim, encoder=VECTORS_IN_PT), ''
    path = sources.local_path(text_vectors)
    if not os.path.isfile(path):
        raise ValueError(
            f"text_vectors: {path} is no file; expected '', 'pt' or the Parquet file that "
            'coyo11m_tfds.embed_captions made.'
        )
    header = vectors.read_header(path)
    if header.caption_column != caption_column:
        raise ValueError(
            f"{path}: its vectors were made of column '{header.caption_column}', but the captions "
            f"are '{caption_column}'. Embed that column, or set caption_column."
        )
    folder = _folder(scratch_dir, 'vectors')
    digest = vectors.build_store(path, folder)
    logging.info('Read the text vectors of %s', path)
    return TextVectors(folder, dim=header.dim, encoder=header.encoder), digest


def _drop_reasons(
    keys: np.ndarray,
    caption_rows: np.ndarray,
    caption_bytes: np.ndarray,
    vector_source: TextVectors | None,
) -> dict[str, np.ndarray]:
    """Returns bool `(n,)` for each reason to drop a key; at most one of them is true."""
    no_row = caption_rows < 0
    no_caption = ~no_row & (caption_bytes == 0)
    reasons = {NO_ROW: no_row, NO_CAPTION: no_caption}
    if vector_source:
        missing = np.zeros(len(keys), bool)
        if vector_source.store != VECTORS_IN_PT:
            missing = vectors.VectorStore(vector_source.store, vector_source.dim).find(keys) < 0
        reasons[NO_TEXT_VECTOR] = missing & ~no_row & ~no_caption
    return reasons


def _check_dropped(dropped: dict[str, int], kept: np.ndarray, captions_file: str) -> None:
    if sum(dropped.values()) > MAX_DROPPED_FRACTION * len(kept):
        reasons = ', '.join(f'{name}: {count:,}' for name, count in dropped.items())
        raise ValueError(
            f'{captions_file}: {sum(dropped.values()):,} of {len(kept):,} rows would be dropped '
            f'({reasons}), more than {MAX_DROPPED_FRACTION:.0%}. Do the captions (and text '
            'vectors) belong to these .pt files?'
        )


def unit_hash(keys: np.ndarray) -> np.ndarray:
    """Maps int64 keys to float64 in [0, 1) evenly: the upper 53 bits of their splitmix64."""
    return (splitmix64(keys.astype(np.uint64)) >> np.uint64(11)) * 2.0**-53


def _split_masks(
    keys: np.ndarray, kept: np.ndarray, validation_fraction: float
) -> dict[str, np.ndarray]:
    validation = unit_hash(keys) < validation_fraction
    return {schema.TRAIN: kept & ~validation, schema.VALIDATION: kept & validation}


def _record_sizes(caption_bytes: np.ndarray, vector_source: TextVectors | None) -> np.ndarray:
    """Returns the expected bytes of each record, int64 `(n,)`."""
    fixed = schema.NUM_CROPS * schema.LATENT_NBYTES + _RECORD_OVERHEAD
    vector = 2 * vector_source.dim if vector_source else 0
    return caption_bytes + (fixed + vector)


def _cut_into_runs(
    rows: np.ndarray, sizes: np.ndarray, file_starts: np.ndarray, shard_bytes: int
) -> list[tuple[int, np.ndarray]]:
    """Cuts ascending rows at the files' borders and then to size: `(file, rows)` for each shard."""
    borders = np.searchsorted(rows, file_starts)
    runs = []
    for file, (start, end) in enumerate(itertools.pairwise(borders)):
        if start < end:
            num_shards = -(-int(sizes[start:end].sum()) // shard_bytes)
            runs += [
                (file, run) for run in np.array_split(rows[start:end], min(num_shards, end - start))
            ]
    return runs


def _make_tasks(
    split: str,
    runs: Sequence[tuple[int, np.ndarray]],
    latents: SourceLatents,
    shard_path: Callable[[str, int, int], str],
    captions_dir: str,
    vector_source: TextVectors | None,
) -> list[ShardTask]:
    return [
        ShardTask(
            split=split,
            index=index,
            path=shard_path(split, index, len(runs)),
            latents_path=latents.paths[file],
            rows=(run - latents.starts[file]).astype(np.int32),
            captions_store=captions_dir,
            text_vectors=vector_source,
        )
        for index, (file, run) in enumerate(runs)
    ]


def _folder(parent: str | os.PathLike[str], name: str) -> str:
    folder = pathlib.Path(parent) / name
    folder.mkdir()
    return str(folder)


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()
