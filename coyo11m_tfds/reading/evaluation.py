"""Reads all records of a split once, or the records that a condition keeps."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.reading import damage
from coyo11m_tfds.reading.batches import MASK, ArraySpec, Batch, Batches
from coyo11m_tfds.reading.engines import OpenedSplit, SplitReader, engine_name, open_splits
from coyo11m_tfds.reading.filters import KeptRecords, find_kept
from coyo11m_tfds.reading.mixture import BatchShares, Cursor, Position
from coyo11m_tfds.reading.options import ReadOptions
from coyo11m_tfds.reading.order import eval_blocks
from coyo11m_tfds.storage import json_digest

# How keys are read that a condition compares.
_KEYS_CHUNK, _KEYS_IN_FLIGHT = 256, 16


def kept_records(options: ReadOptions) -> KeptRecords | None:
    """Returns the records of a split that the condition of its source keeps; None for all."""
    source, split = options.source, options.stored.split(options.split)
    if source.where is None or split is None:
        return None
    # A run plans, trains and evaluates with the same source: it reads the columns once.
    if options.split not in source.kept:
        lengths = split.index.shard_lengths
        read_keys = functools.partial(read_split_keys, options, int(lengths.sum()))
        source.kept[options.split] = find_kept(
            source.where, source.stored, options.split, lengths, read_keys
        )
    return source.kept[options.split]


def read_split_keys(options: ReadOptions, num_records: int, size: int) -> Iterator[np.ndarray]:
    """Yields the keys of all records, `size` at a time; masked where a bad record is skipped."""
    key_options = ReadOptions(
        data=options.stored,
        batch_size=size,
        features=(schema.KEY,),
        split=options.split,
        chunk=_KEYS_CHUNK,
        parallel_reads=_KEYS_IN_FLIGHT,
        on_bad_records=options.on_bad_records,
        max_bad_fraction=options.max_bad_fraction,
        verify=damage.ALWAYS,
    )
    splits = open_splits(key_options)
    assert splits, 'a source with a condition has a chunk index'
    for batch in EvalReader(key_options, splits[0]).read():
        # Zeros fill the last batch.
        keys, is_readable = batch[schema.KEY][:num_records], batch[MASK][:num_records]
        yield keys if is_readable.all() else np.ma.array(keys, mask=~is_readable)
        num_records -= len(keys)


def read_split(options: ReadOptions, opened: OpenedSplit) -> Batches:
    reader = EvalReader(options, opened)
    spec = reader.spec(options.local_batch_size)
    engine = engine_name(options, [opened])
    return resumable_eval(options, spec, reader.num_batches, reader.read, engine)


def resumable_eval(
    options: ReadOptions,
    spec: Mapping[str, ArraySpec],
    num_batches: int,
    read: Callable[[int], Iterator[Batch]],
    engine: str,
) -> Batches:
    """Returns all batches of an evaluation; `read(n)` yields those after the first n."""
    identity = [options.source.identity(options.split), options.batch_size, options.process_count]
    digest = json_digest.sha256(identity)[:16]
    # The samples in a state count those of all processes, as if one lane had them.
    cursor = Cursor(Position(0, (0,)), BatchShares(options.batch_size), (digest,))
    return Batches(
        lambda cursor: read(cursor.position.step),
        cursor,
        spec,
        num_batches,
        options.process,
        options.batches_ahead,
        options.describe(engine),
    )


class EvalReader(SplitReader):
    """Reads one process's share of all records once, in the order of the shards."""

    def __init__(self, options: ReadOptions, opened: OpenedSplit):
        options = options.for_source(options.source)
        self._kept = kept_records(options)
        lengths = opened.indexed.index.shard_lengths
        self._lengths = lengths if self._kept is None else self._kept.lengths
        num_records = int(self._lengths.sum())
        if not num_records:
            raise ValueError(
                f'{options.stored.folder}: split {options.split!r} is empty; name another split, '
                'or build with a larger validation_fraction'
            )
        # The same for all processes.
        self.num_batches = -(-num_records // options.batch_size)
        per_process = self.num_batches * options.local_batch_size
        # Consecutive records, so that each process reads few chunks of the others.
        self._own_records = range(num_records)[options.process_index * per_process :][:per_process]
        text = options.stored.choose_texts(options.text).first
        super().__init__(options, opened, text, crop=0, with_mask=True)

    def read(self, start: int = 0) -> Iterator[Batch]:
        """Returns the batches after the first `start`, with rows of zeros to fill the last ones."""
        size = self.options.local_batch_size
        records = self._own_records[start * size :]
        blocks = eval_blocks(self._lengths, records.start, records.stop, size, self._kept)
        no_rows = {name: np.zeros(*spec) for name, spec in self.spec(0).items()}
        # Processes at the end of the split have fewer records, but as many batches.
        batches = itertools.chain(
            self.read_blocks(blocks, self.options.parallel_reads), itertools.repeat(no_rows)
        )
        for batch in itertools.islice(batches, self.num_batches - start):
            yield {name: _pad_rows(x, size) for name, x in batch.items()}


def _pad_rows(x: np.ndarray, size: int) -> np.ndarray:
    """Puts rows of zeros, or of empty strings, after those of an array."""
    if len(x) == size:
        return x
    shape = (size - len(x), *x.shape[1:])
    padding = np.full(shape, b'', object) if x.dtype == object else np.zeros(shape, x.dtype)
    return np.concatenate([x, padding])
