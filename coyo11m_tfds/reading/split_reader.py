"""Reads blocks of rows of one split, by rows of mapped files or by chunks that are fetched.

By rows, no windows are held in memory: the plan names the records, and each batch is gathered from
the page cache when it is needed. The reader announces the rows of later batches to the system, so
that the disk reads them in advance. `chunk_reader` describes how chunks are read.
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.reading import damage, process_settings
from coyo11m_tfds.reading.batches import ArraySpec
from coyo11m_tfds.reading.chunk_reader import ChunkReader
from coyo11m_tfds.reading.column_reader import ColumnReader, open_column
from coyo11m_tfds.reading.damage import BadRecords
from coyo11m_tfds.reading.engines import Opened
from coyo11m_tfds.reading.files import FetchedFiles, ReadCounter
from coyo11m_tfds.reading.order import Block
from coyo11m_tfds.reading.row_reader import Part, RowChoices, RowReader
from coyo11m_tfds.reading.settings import ROWS, Reading


class SplitReader:
    """Reads blocks of rows of one split; counts bad records of all of them together.

    Attributes:
        asked: The settings.
    """

    def __init__(self, asked: Reading, opened: Opened, text: texts.Chosen, **choices: Any):
        """Opens the columns; `choices` are further fields of `RowChoices`.

        Raises:
            ValueError: Features or texts are not in the data set.
            DamagedError: A file of a column is missing or has changed.
        """
        self._split, self.asked, stored = opened.split, asked, asked.stored
        _check_text(stored.folder, text, asked)
        num_records = int(self._split.index.shard_lengths.sum())
        found = stored.find_columns(asked.features, text)
        where = stored.folder, asked.split, num_records
        try:
            self._columns = {name: open_column(found[name], *where) for name in found}
        except ValueError as error:
            raise DamagedError(*error.args) from error
        of_columns = {x: ArraySpec(c.shape, c.dtype) for x, c in self._columns.items()}
        self._choices = RowChoices(
            tuple(asked.features),
            _stored_rows(stored) | of_columns,
            text=text if text.in_columns or text.size > text.texts[0].size else None,
            **choices,
        )
        stored.check_features(sorted(self._choices.in_records))
        process_settings.keep_freed_memory()
        self._bad_records = BadRecords(
            asked.on_bad_records, asked.max_bad_fraction, num_records, asked.counter
        )
        self._mapped = self._row_reader(None) if opened.engine == ROWS else None

    @property
    def is_mapped(self) -> bool:
        """True if rows are read from mapped files, which takes no memory for windows."""
        return self._mapped is not None

    @property
    def raw_nbytes(self) -> int:
        """Bytes of a sample in the files."""
        of_columns = sum(column.row_nbytes for column in self._columns.values())
        return self._split.record_nbytes + of_columns

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Shape and dtype of each array in batches of `size` rows."""
        return self._choices.spec(size)

    def read_blocks(self, blocks: Iterator[Block], in_flight: int) -> Iterator[Part]:
        """Yields the batches of all blocks; fetches `in_flight` chunks at once."""
        split, counter = self._split, self.asked.counter
        if self._mapped:
            return _read_rows(self._mapped, blocks, counter)
        at_once = in_flight * (1 + len(self._columns))
        files = FetchedFiles(split.file, split.file_sizes, at_once, counter)
        reader = self._row_reader(files)
        return ChunkReader(split, reader, files, self.asked.chunk).read(blocks)

    def _row_reader(self, files: FetchedFiles | None) -> RowReader:
        return RowReader(
            self._split,
            self._choices,
            self.asked.stored.record_layout,
            verify=damage.ALWAYS if files else self.asked.verify,
            bad_records=self._bad_records,
            columns={name: ColumnReader(opened, files) for name, opened in self._columns.items()},
            files=files,
        )


def _stored_rows(stored: StoredDataset) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of the large features in the records of a data set.

    Raises:
        ValueError: The data set has no latents, or a feature of another shape or dtype.
    """
    dtype, shape = stored.latents
    known: dict[str, ArraySpec] = {
        schema.LATENTS: ArraySpec(shape, np.dtype(getattr(ml_dtypes, dtype, dtype))),
        schema.TEXT_EMBEDDING: ArraySpec((stored.text_dim,), np.dtype(np.float16)),
        schema.TOKENS: ArraySpec((stored.num_tokens,), np.dtype(np.int32)),
    }
    return {n: x for n, x in known.items() if n not in stored.columns and all(x.shape)}


def _check_text(folder: str, text: texts.Chosen, asked: Reading) -> None:
    """Raises a ValueError where texts of columns are asked for, and features of the other kind."""
    other = schema.TEXT_DTYPES.keys() & set(asked.features) - {text.feature}
    if text.in_columns and other:
        raise ValueError(
            f'{folder}: features has {min(other)!r}, but text={text.names[0] or texts.RECORDS!r} '
            f'holds {text.feature!r}, expected that.'
        )


def _read_rows(
    reader: RowReader, blocks: Iterator[Block], counter: ReadCounter | None
) -> Iterator[Part]:
    block = next(blocks, None)
    if block is not None:
        for run in reader.prefetch(block.shard.ravel(), block.record.ravel()):
            reader.will_need(run)
    while block is not None:
        steps, size = block.shard.shape
        rows = reader.find(*(x.ravel() for x in block))
        block = next(blocks, None)
        runs = [] if block is None else reader.prefetch(block.shard.ravel(), block.record.ravel())
        for step in range(steps):
            for run in runs[step::steps]:
                reader.will_need(run)
            some = rows.part(slice(step * size, (step + 1) * size))
            batch = reader.read(some, reader.check(some))
            if counter:
                counter.add(num_bytes=sum(x.nbytes for x in batch.values()))
            yield batch
