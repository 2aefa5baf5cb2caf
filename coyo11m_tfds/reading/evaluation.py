"""Reads all records of a split once, or the records that a condition keeps."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading.batches import MASK, ArraySpec, Batch, Batches
from coyo11m_tfds.reading.engines import Opened, SplitReader, open_sources
from coyo11m_tfds.reading.filters import Kept, find_kept
from coyo11m_tfds.reading.mixture import BatchShares, Cursor, Position
from coyo11m_tfds.reading.options import ReadOptions
from coyo11m_tfds.reading.order import check_share, eval_blocks
from coyo11m_tfds.reading.row_reader import gathered
from coyo11m_tfds.storage import json_digest

# How keys are read that a condition compares.
_KEYS_CHUNK, _KEYS_IN_FLIGHT = 256, 16


def kept_records(options: ReadOptions) -> Kept | None:
    """Returns the records of a split that the condition of its source keeps; None for all.

    Raises the errors of `filters.find_kept`.
    """
    source, split = options.source, options.stored.split(options.split)
    if source.where is None or split is None:
        return None
    if options.split not in source.kept:
        lengths = split.index.shard_lengths
        keys = functools.partial(_read_keys, options, int(lengths.sum()))
        source.kept[options.split] = find_kept(
            source.where, source.stored, options.split, lengths, keys
        )
    return source.kept[options.split]


def _read_keys(options: ReadOptions, left: int, at_once: int) -> Iterator[np.ndarray]:
    """Yields the keys of all records, some at a time; masked where a bad record is skipped."""
    reading = ReadOptions(
        data=options.stored,
        batch_size=at_once,
        split=options.split,
        chunk=_KEYS_CHUNK,
        parallel_reads=_KEYS_IN_FLIGHT,
        on_bad_records=options.on_bad_records,
        max_bad_fraction=options.max_bad_fraction,
    )
    opened = open_sources(reading)
    assert opened, 'a source with a condition has a chunk index'
    for batch in EvalReader(reading, opened[0]).read():
        keys, readable = batch[schema.KEY][:left], batch[MASK][:left]
        yield keys if readable.all() else np.ma.array(keys, mask=~readable)
        left -= len(keys)


def eval_batches(options: ReadOptions, opened: Opened) -> Batches:
    """Implements `input_pipeline.eval_batches`."""
    reader = EvalReader(options, opened)
    return evaluation(options, reader.spec(options.local_size), reader.num_batches, reader.read)


def evaluation(
    options: ReadOptions,
    spec: Mapping[str, ArraySpec],
    num_batches: int,
    read: Callable[[int], Iterator[Batch]],
) -> Batches:
    """Returns all batches of an evaluation; `read(n)` yields those after the first n.

    The samples in a state count those of all processes.
    """
    parts = [options.source.identity(options.split), options.batch_size, options.process_count]
    digest = json_digest.sha256(parts)[:16]
    cursor = Cursor(Position(0, (0,)), BatchShares(options.batch_size), (digest,))
    return Batches(
        lambda cursor: read(cursor.position.step),
        cursor,
        spec,
        num_batches,
        options.process,
        options.batches_ahead,
    )


class EvalReader(SplitReader):
    """Reads one process's part of all records once, in the order of the shards.

    Attributes:
        num_batches: Number of batches that every process reads.
    """

    def __init__(self, options: ReadOptions, opened: Opened):
        """Raises a ValueError for settings that do not fit each other, and for an empty split."""
        options = options.alone(options.source)
        check_share(options.batch_size, *options.process)
        self._kept = kept_records(options)
        lengths = opened.split.index.shard_lengths
        self._lengths = lengths if self._kept is None else self._kept.lengths
        size = int(self._lengths.sum())
        if not size:
            raise ValueError(
                f'{options.stored.folder}: split {options.split!r} is empty; name another split, '
                'or build with a larger validation_fraction'
            )
        self.num_batches = -(-size // options.batch_size)
        each = self.num_batches * options.local_size
        self._own = range(size)[options.process_index * each :][:each]
        text = options.stored.choose_texts(options.text).first
        super().__init__(options, opened, text, middle_crop=True, with_mask=True)

    def read(self, start: int = 0) -> Iterator[Batch]:
        """Returns the batches after the first `start`, with rows of zeros to fill the last ones."""
        size = self.options.local_size
        own = self._own[start * size :]
        blocks = eval_blocks(self._lengths, own.start, own.stop, size, self._kept)
        blank = {name: np.zeros(*spec) for name, spec in self.spec(0).items()}
        batches = itertools.chain(
            self.read_blocks(blocks, self.options.parallel_reads), itertools.repeat(blank)
        )
        for batch in itertools.islice(batches, self.num_batches - start):
            yield {name: _filled_up(gathered(x), size) for name, x in batch.items()}


def _filled_up(x: np.ndarray, size: int) -> np.ndarray:
    """Puts rows of zeros, or of empty strings, after those of an array."""
    if len(x) == size:
        return x
    shape = (size - len(x), *x.shape[1:])
    pad = np.full(shape, b'', object) if x.dtype == object else np.zeros(shape, x.dtype)
    return np.concatenate([x, pad])
