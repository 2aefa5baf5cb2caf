"""Splits with their chunk indexes, and which engine reads them."""

from collections.abc import Sequence
from typing import NamedTuple

from coyo11m_tfds.dataset.splits import IndexedSplit
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.memory.files import MAX_FILES
from coyo11m_tfds.process.errors import FieldError
from coyo11m_tfds.reading.options import CHUNKS, ROWS, TF_DATA, ReadOptions


class OpenedSplit(NamedTuple):
    """A split with its chunk index, and the way in which it is read."""

    indexed: IndexedSplit
    is_mapped: bool  # whether its files are mapped and read by rows, or fetched by chunks


def open_splits(options: ReadOptions, lanes: int | None = None) -> tuple[OpenedSplit, ...] | None:
    """Opens the split of each source; None for a single source without a chunk index.

    `lanes` is the number of streams that give each batch an equal share; None for evaluation.
    """
    splits = []
    # A cache is for what comes over a network: of local files it would be a second copy.
    if options.cache_dir and all(x.stored.can_map for x in options.sources):
        problem = 'expected none for a local data set, which is read where it is'
        raise FieldError('cache_dir', options.cache_dir, problem)
    for source in options.sources:
        split = _open_split(source.stored, options.split, options.engine)
        if split:
            splits.append(split)
        # Only a single whole data set can be left to TFDS.
        elif len(options.sources) > 1 or source.where:
            raise ValueError(
                f'{source.stored.folder}: cannot be mixed or filtered without a chunk index. '
                'Build it again.'
            )
    if not splits:
        if options.cache_dir:
            problem = 'expected none for a data set without a chunk index, which TFDS reads'
            raise FieldError('cache_dir', options.cache_dir, problem)
        # Without a chunk index there are no lanes.
        options.check_shares(None)
        return None
    options.check_shares(lanes)
    return tuple(splits)


def engine_name(options: ReadOptions, splits: Sequence[OpenedSplit] | None) -> str:
    """Returns the engine that reads opened splits; CHUNKS if it reads one of several."""
    if splits is None or options.engine == TF_DATA:
        return TF_DATA
    return ROWS if all(x.is_mapped for x in splits) else CHUNKS


def _open_split(stored: StoredDataset, name: str, engine: str) -> OpenedSplit | None:
    """Opens a split with its chunk index; None without one, a ValueError if ROWS cannot be."""
    split = None
    # No index is read, perhaps from a bucket, for an engine that cannot read the files.
    if engine != ROWS or stored.can_map:
        split = stored.split(name)
    if engine == ROWS:
        if split is None:
            raise ValueError(
                f'{stored.folder}: engine={ROWS!r} needs local files, also of latents in place, '
                f'and a chunk index of split {name!r}: set engine={CHUNKS!r}'
            )
        return OpenedSplit(split, is_mapped=True)
    if split is None:
        return None
    # Too many files are read by chunks unless the caller wants an error.
    can_map = stored.can_map and len(split.index.shard_lengths) <= MAX_FILES
    return OpenedSplit(split, is_mapped=can_map and engine != CHUNKS)
