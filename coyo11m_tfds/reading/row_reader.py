"""Batches gathered row by row out of TFRecord files in memory, without TensorFlow.

    choices = RowChoices(('key', 'latents'), 'float16', text_dim=640, seed=0)
    reader = RowReader(split, choices, RecordLayout(text_dim=640), verify='once', ...)
    rows = reader.find(epoch, shard, record)          # of many batches at once
    some = rows.part(slice(0, 256))
    batch = reader.read(some, reader.check(some))     # dict(key=(256,), latents=(256, 4, 32, 32))

Where rows lie is found for a block of batches at a time; a batch is then a few calls of NumPy that
copy what is asked for, and nothing else of a record, unless its checksum is compared.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import records
from coyo11m_tfds.dataset.columns import AddedColumn, Column
from coyo11m_tfds.dataset.records import RecordLayout
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit
from coyo11m_tfds.dataset.texts import Chosen
from coyo11m_tfds.reading import bad_records, framing, order, verified
from coyo11m_tfds.reading.bad_records import BadRecords
from coyo11m_tfds.reading.column_reader import ColumnReader
from coyo11m_tfds.reading.fetched_files import FetchedFiles
from coyo11m_tfds.reading.mapped_files import MappedFiles
from coyo11m_tfds.reading.names import DROP_TEXT, MASK

Batch = dict[str, np.ndarray]

# What `records.Found` calls the places of a feature.
_PLACES = {schema.LATENTS: 'latents', schema.TEXT_EMBEDDING: 'text', schema.TOKENS: 'tokens'}

# Bytes of a long caption as an object of Python, with its place in the array.
_CAPTION_NBYTES = 600

_DTYPES = {'float16': np.dtype(np.float16), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class RowChoices:
    """The features of a batch.

    Attributes:
        features: to be in the batch.
        latent_dtype: of the data set, 'float16' or 'bfloat16'.
        text_dim: width of the text embeddings in the records, 0 without them.
        seed: of the choices about samples.
        caption_dropout: share of samples that `drop_text` marks.
        fixed_crop: taken of all samples; None takes one by (seed, epoch, key).
        with_mask: whether `mask` is in the batch.
        num_tokens: of a text in the records, 0 without them.
        text: which text a sample takes; None for that of its record.
    """

    features: tuple[str, ...]
    latent_dtype: str
    text_dim: int
    seed: int = 0
    caption_dropout: float = 0.0
    fixed_crop: int | None = None
    with_mask: bool = False
    num_tokens: int = 0
    text: Chosen | None = None

    @property
    def in_records(self) -> set[str]:
        """What a record has to hold, unless it is a column."""
        elsewhere = {self.text.feature} if self.text and '' not in self.text.names else set()
        return {schema.KEY, *self.features} - elsewhere

    @property
    def text_nbytes(self) -> dict[str, int]:
        """Of what a record may hold of a text."""
        return {schema.TEXT_EMBEDDING: 2 * self.text_dim, schema.TOKENS: 4 * self.num_tokens}

    def row_nbytes(self, columns: Mapping[str, Column | AddedColumn]) -> int:
        """Bytes of a row in a batch; of its caption a guess. Takes the columns that are read."""
        sizes = {
            schema.KEY: 8,
            schema.CAPTION: _CAPTION_NBYTES,
            **self.text_nbytes,
            **({self.text.feature: self.text.row_nbytes} if self.text else {}),
            **{name: column.row_nbytes for name, column in columns.items()},
            schema.LATENTS: schema.LATENT_NBYTES,
        }
        return (
            sum(sizes[name] for name in self.features) + bool(self.caption_dropout) + self.with_mask
        )

    def crops(self, epoch: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The crop of each key in its epoch; int64 `(n,)`."""
        if self.fixed_crop is not None:
            return np.full(len(keys), self.fixed_crop)
        return order.sample_crops(self.seed, epoch, keys)


class Rows(NamedTuple):
    """Where some records lie; arrays are int64 `(n,)` and, where they are places, addresses.

    Attributes:
        epoch: that reads each of them.
        shard, record: their numbers.
        number: of each record in the split.
        begin, end: of the serialized records; 0 where framing does not lead to one.
        values: where their values lie.
        columns: where those of each column lie.
    """

    epoch: np.ndarray
    shard: np.ndarray
    record: np.ndarray
    number: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    values: records.Found
    columns: Mapping[str, np.ndarray]

    def part(self, some: slice) -> Self:
        """Some of them."""
        names = ('epoch', 'shard', 'record', 'number', 'begin', 'end')
        return self._replace(
            **{name: getattr(self, name)[some] for name in names},
            values=records.Found(*(x[some] for x in self.values)),
            columns={name: places[some] for name, places in self.columns.items()},
        )


class RowReader:
    """Reads rows of one split.

    Attributes:
        columns: readers of the features that lie elsewhere than in the records.
    """

    def __init__(
        self,
        split: IndexedSplit,
        choices: RowChoices,
        layout: RecordLayout,
        *,
        verify: str,
        bad_records: BadRecords,
        columns: Mapping[str, ColumnReader],
        files: FetchedFiles | None,
    ):
        """Opens nothing.

        Args:
            split: of a data set.
            choices: what is in a batch.
            layout: of the records.
            verify: see `verified`.
            bad_records: is told of those that cannot be read.
            columns: features that lie elsewhere than in the records.
            files: the shards; None to map them, which are then local.

        Raises:
            ValueError: an argument is out of its range, or there are too many shards.
        """
        lengths = split.index.shard_lengths
        self._split, self._choices = split, choices
        self._files = files or MappedFiles(split.file, len(lengths))
        self._layout, self.columns = layout, columns
        # Of each feature the dtype and the shape of a row in a batch; of latents, one crop comes.
        self._kinds: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
            schema.TEXT_EMBEDDING: (np.dtype(np.float16), (choices.text_dim,)),
            schema.TOKENS: (np.dtype(np.int32), (choices.num_tokens,)),
            **{name: (column.dtype, column.shape) for name, column in self.columns.items()},
        }
        self._kinds[schema.LATENTS] = (_DTYPES[choices.latent_dtype], schema.LATENT_SHAPE)
        self._checks = verified.Checks(verify, int(lengths.sum()))
        self._bad_records = bad_records

    def find(self, epoch: np.ndarray, shard: np.ndarray, record: np.ndarray) -> Rows:
        """Finds records, int64 `(n,)`, in their files; `epoch` is the one that reads each.

        Raises:
            OSError: a file cannot be opened.
        """
        runs, of_run = np.unique(_run_numbers(shard, record), return_inverse=True)
        start, count, limit = self._places(runs)
        begins, ends = framing.find_records(self._files.memory, start, count, limit)
        in_run = record % schema.CHUNK_STRIDE
        begin, end = begins[of_run, in_run], ends[of_run, in_run]
        values = self._layout.find(self._files.memory, begin, end)
        number = self._split.first_numbers[shard] + record
        columns = {name: column.find(number) for name, column in self.columns.items()}
        return Rows(epoch, shard, record, number, begin, end, values, columns)

    def prefetch(self, shard: np.ndarray, record: np.ndarray) -> list[tuple[int, int, int]]:
        """Arguments of `will_need` that bring records into memory before they are asked for."""
        runs = np.unique(_run_numbers(shard, record))
        shards, first = _of_run_numbers(runs)
        count = np.minimum(self._split.index.shard_lengths[shards] - first, schema.CHUNK_STRIDE)
        offset, nbytes = self._split.index.byte_range(shards, first, count)
        number = self._split.first_numbers[shards] + first
        for column in self.columns.values():
            column.will_need(number, number + count - 1)
        # Runs that touch are one.
        starts = np.flatnonzero(np.diff(runs, prepend=-2) != 1)
        whole = np.add.reduceat(nbytes, starts)
        return list(
            zip(shards[starts].tolist(), offset[starts].tolist(), whole.tolist(), strict=True)
        )

    def will_need(self, run: tuple[int, int, int]) -> None:
        """Has the system read ahead a run of `prefetch`, where files are mapped.

        Raises:
            OSError: its file cannot be opened.
        """
        if isinstance(self._files, MappedFiles):
            self._files.open(np.array(run[:1]))
            self._files.will_need(*run)

    def check(self, rows: Rows) -> np.ndarray:
        """Which rows can be read; bool `(n,)`. Compares checksums as far as `verify` asks."""
        matches = functools.partial(self._matches, rows)
        return self._checks.check(rows.begin > 0, rows.number, matches)

    def read(self, rows: Rows, good: np.ndarray) -> Batch:
        """The batch of some rows, in their order, with what `check` says of them.

        Raises:
            ValueError: a record cannot be read and the policy is 'stop', too many cannot, or one
                is whole and lacks a value.
            OSError: a file has changed since it was opened.
        """
        self._files.check_unchanged(rows.shard)
        for column in self.columns.values():
            column.check_unchanged(rows.number)
        self._check_layout(rows, good)
        if not good.all():
            self._report_bad(rows, np.flatnonzero(~good))
        keys = np.where(good, rows.values.keys, 0)
        crops = self._choices.crops(rows.epoch, keys)
        batch = {
            name: self._feature(name, rows, good, keys, crops) for name in self._choices.features
        }
        if self._choices.caption_dropout and schema.TEXT_DTYPES.keys() & batch.keys():
            batch[DROP_TEXT] = order.sample_drops(
                self._choices.seed, rows.epoch, keys, self._choices.caption_dropout
            )
        if self._choices.with_mask:
            batch[MASK] = good
        return batch

    def _matches(self, rows: Rows, some: np.ndarray) -> np.ndarray:
        """Whether some records and their rows of columns have their checksums; bool `(n,)`."""
        good = verified.matches(self._files.memory, rows.begin[some], rows.end[some])
        for name, column in self.columns.items():
            # The whole row, of which one crop is taken: another epoch takes another one.
            good &= column.matches(rows.number[some], rows.columns[name][some])
        return good

    def empty(self) -> Batch:
        """A batch without rows."""
        nothing = np.zeros(0, np.int64)
        rows = self.find(nothing, nothing, nothing)
        return self.read(rows, self.check(rows))

    def _places(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each run its address, its records, and the address at which it ends."""
        shard, first = _of_run_numbers(runs)
        count = np.minimum(self._split.index.shard_lengths[shard] - first, schema.CHUNK_STRIDE)
        offset, nbytes = self._split.index.byte_range(shard, first, count)
        address, limit = self._files.locate(shard, offset, nbytes)
        return address, count, limit

    def _check_layout(self, rows: Rows, good: np.ndarray) -> None:
        """Marks damaged records in `good`; raises for a whole one of another layout."""
        for row in np.flatnonzero(good & ~rows.values.regular).tolist():
            begin, end = rows.begin[row : row + 1], rows.end[row : row + 1]
            # Damage may be the reason, whatever is verified.
            good[row] = verified.matches(self._files.memory, begin, end)[0]
            if good[row]:
                raise self._of_another_layout(rows, row)

    def _of_another_layout(self, rows: Rows, row: int) -> bad_records.DamagedError:
        return bad_records.DamagedError(
            f'{self._split.file(int(rows.shard[row]))}: record {rows.record[row]} is not of this '
            f'data set: expected the features of its {schema.FEATURES_FILE} in the layout that '
            'this project writes. Build the data set again.'
        )

    def _report_bad(self, rows: Rows, bad: np.ndarray) -> None:
        is_whole = rows.begin[bad] > 0
        whole = bad[is_whole]
        is_whole[is_whole] = verified.matches(
            self._files.memory, rows.begin[whole], rows.end[whole]
        )
        self._report_bad_columns(rows, bad[is_whole])
        bad = bad[~is_whole]
        for shard in np.unique(rows.shard[bad]).tolist():
            numbers = np.sort(rows.record[bad][rows.shard[bad] == shard])
            lengths = self._split.index.shard_lengths
            first = numbers[0] // schema.CHUNK_STRIDE * schema.CHUNK_STRIDE
            count = min(int(lengths[shard] - first), schema.CHUNK_STRIDE)
            expected = sum(self._split.index.byte_range(shard, first, count))
            is_short = self._files.size[shard] < expected
            problem = bad_records.TOO_SHORT if is_short else bad_records.DAMAGED
            self._bad_records.add(self._split.file(shard), shard, numbers.tolist(), problem)

    def _report_bad_columns(self, rows: Rows, bad: np.ndarray) -> None:
        for name, column in self.columns.items():
            wrong = bad[~column.matches(rows.number[bad], rows.columns[name][bad])]
            for at in wrong.tolist():
                path, row = column.place(int(rows.number[at]))
                self._bad_records.add(
                    path,
                    int(rows.shard[at]),
                    [int(rows.record[at])],
                    bad_records.DAMAGED_ROW,
                    f'row {row}',
                )

    def _feature(
        self,
        name: str,
        rows: Rows,
        good: np.ndarray,
        keys: np.ndarray,
        crops: np.ndarray,
    ) -> np.ndarray:
        """One feature of a batch; zeros or empty where there is no record."""
        if name == schema.KEY:
            return keys
        if name == schema.CAPTION:
            return self._captions(rows, good)
        if self._choices.text and name == self._choices.text.feature:
            return self._text(self._choices.text, rows, good, keys)
        return self._numbers(name, rows, good, crops if name == schema.LATENTS else None)

    def _text(self, chosen: Chosen, rows: Rows, good: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The text that each sample takes; tokens are padded to the longest of all texts."""
        picked = order.sample_texts(self._choices.seed, rows.epoch, keys, chosen.weights)
        found = np.zeros((len(keys), chosen.size), schema.TEXT_DTYPES[chosen.feature])
        found[good] = schema.TOKEN_PADDING
        for number, text in enumerate(chosen.texts):
            mine = picked == number
            values = self._numbers(text.name or chosen.feature, rows, good & mine)
            found[mine, : text.size] = values[mine]
        return found

    def _numbers(
        self, name: str, rows: Rows, good: np.ndarray, crops: np.ndarray | None = None
    ) -> np.ndarray:
        """Values of a fixed size, of records or of a column, of all crops one; else zeros."""
        in_column = name in self.columns
        places = rows.columns[name] if in_column else getattr(rows.values, _PLACES[name])
        dtype, shape = self._kinds[name]
        nbytes = dtype.itemsize * math.prod(shape)
        begin = np.zeros_like(rows.begin) if crops is None else crops * nbytes
        memory = self._files.memory
        values = memory.gather(np.where(good, places + begin, memory.zeros), nbytes)
        return values.view(dtype).reshape(len(good), *shape)

    def _captions(self, rows: Rows, good: np.ndarray) -> np.ndarray:
        captions = np.full(len(good), b'', object)
        memory = self._files.memory
        places = zip(
            rows.begin.tolist(), rows.values.captions_end.tolist(), rows.end.tolist(), strict=True
        )
        for row, (begin, key_begin, end) in enumerate(places):
            if not good[row]:
                continue
            before = memory.view(begin, key_begin).tobytes()
            head = records.caption_head(len(before), end - begin)
            if head is None or not before.startswith(head):
                raise self._of_another_layout(rows, row)
            captions[row] = before[len(head) :]
        return captions


def _run_numbers(shard: np.ndarray, record: np.ndarray) -> np.ndarray:
    """A number for the run that each record is in; of runs that touch, numbers that do."""
    return (shard << 32) + record // schema.CHUNK_STRIDE


def _of_run_numbers(runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shard of each run and its first record."""
    return runs >> 32, (runs & 0xFFFFFFFF) * schema.CHUNK_STRIDE
