"""Opens splits with a chunk index, and chooses how each is read: by rows or by chunks.

    opened = engines.open_sources(asked)                     # None without a chunk index

`rows` reads mapped local files, `chunks` fetches; see `split_reader`.
"""

from typing import NamedTuple

from coyo11m_tfds.dataset.stored_dataset import IndexedSplit, StoredDataset
from coyo11m_tfds.reading.files import MAX_FILES
from coyo11m_tfds.reading.settings import AUTO, CHUNKS, ROWS, TF_DATA, Reading


class Opened(NamedTuple):
    """A split with a chunk index, and the engine that reads it."""

    split: IndexedSplit
    engine: str


def open_sources(asked: Reading) -> list[Opened] | None:
    """Opens the split of each source; None for a single source without a chunk index.

    Raises:
        ValueError: As `open_split`; or a source has no chunk index although it is one of several or
            has a condition.
        OSError: A chunk index cannot be read.
    """
    found = [open_split(x.stored, asked.split, asked.engine) for x in asked.sources]
    if opened := [x for x in found if x]:
        if len(opened) == len(found):
            return opened
    elif len(found) == 1 and not asked.source.where:
        return None
    without = asked.sources[found.index(None)].stored.folder
    raise ValueError(
        f'{without}: cannot be mixed or filtered without a chunk index. Build it again.'
    )


def open_split(stored: StoredDataset, name: str, engine: str) -> Opened | None:
    """Opens a split to read it by rows or by chunks; None without a chunk index.

    Raises:
        ValueError: The split does not exist, or `engine` is 'rows' and its files cannot be mapped.
        OSError: The chunk index cannot be read.
    """
    split = None if stored.is_remote and engine == ROWS else stored.split(name)
    if split is None and engine == ROWS:
        raise ValueError(
            f'{stored.folder}: engine={ROWS!r} needs local files, also of latents in place, and a '
            f'chunk index of split {name!r}: set engine={CHUNKS!r}'
        )
    if split is None:
        return None
    if engine in (AUTO, TF_DATA):
        by_rows = not stored.is_remote and len(split.index.shard_lengths) <= MAX_FILES
        engine = ROWS if by_rows else CHUNKS
    return Opened(split, engine)
