"""Batches gathered row by row from TFRecord files in memory, without TensorFlow.

Rows are located for a block of batches at a time. A batch then takes a few calls of NumPy, which
copy only the requested values.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.chunk_index import run_digests
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.records import RecordLayout, ValuePlaces, caption_head
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit
from coyo11m_tfds.dataset.texts import TextMixture
from coyo11m_tfds.reading import damage, framing, order
from coyo11m_tfds.reading.batches import CROP, DROP_TEXT, MASK, NOISE_SEED, Batch
from coyo11m_tfds.reading.column_reader import ColumnReader, OpenedColumn
from coyo11m_tfds.reading.features import BatchFeatures
from coyo11m_tfds.reading.files import HeldFiles, Range

_STRIDE = schema.CHUNK_STRIDE


# The ranges of files that hold a chunk of records, or a piece of one, and its rows in columns.
Chunk = tuple[Range, ...]


class LocatedRecords(NamedTuple):
    """Where some records lie in memory; arrays are int64 `(n,)` if they are not described."""

    epoch: np.ndarray  # that reads each record
    shard: np.ndarray
    record: np.ndarray  # number in the shard
    number: np.ndarray  # in the split
    begin: np.ndarray  # places of the serialized records; both 0 for records that are not whole
    end: np.ndarray
    codes: np.ndarray  # see `damage`, without a look at the checksums of values
    values: ValuePlaces  # also of columns, int64 `(n, pieces)`

    def rows(self, rows: slice) -> 'LocatedRecords':
        """Returns some of the records."""
        *arrays, (*values, places) = self
        places = {name: x[rows] for name, x in places.items()}
        in_rows = ValuePlaces._make([*(x[rows] for x in values), places])
        return LocatedRecords._make([*(x[rows] for x in arrays), in_rows])


class RowReader:
    """Locates, checks and gathers records of a split, in any order."""

    def __init__(
        self,
        split: IndexedSplit,
        features: BatchFeatures,
        layout: RecordLayout,
        *,
        verify: str,
        bad_records: damage.BadRecords,
        columns: Mapping[str, OpenedColumn],
        files: HeldFiles,
    ):
        """Takes the files of the split, to which it adds those of the columns."""
        self.files = files
        self._split = split
        self._features = features
        self._layout = layout
        self._columns = {name: ColumnReader(opened, files) for name, opened in columns.items()}
        self._checks = damage.Checks(verify, int(split.index.shard_lengths.sum()))
        self._bad_records = bad_records

    def find_chunks(
        self, shard: np.ndarray, record: np.ndarray, chunk: int, piece: int
    ) -> tuple[list[Chunk], np.ndarray]:
        """Returns the chunks that hold some records, and the number of each record's chunk.

        Chunks are in the order of shards and records. Of a chunk of `chunk` records, only pieces of
        `piece` records are included that hold some of the records.
        """
        piece_numbers = (shard << 32) + record // piece
        pieces = np.unique(piece_numbers)
        piece_shard = pieces >> 32
        piece_first = (pieces & 0xFFFFFFFF) * piece
        # Pieces of one chunk that touch are read together.
        touches = np.diff(pieces, prepend=-2) == 1
        touches &= np.diff(piece_first // chunk, prepend=-1) == 0
        starts = np.flatnonzero(~touches)
        stops = np.append(starts[1:], len(pieces)) - 1
        first = piece_first[starts]
        shards = piece_shard[starts]
        count = np.minimum(self._split.index.shard_lengths[shards], piece_first[stops] + piece)
        count -= first
        begin, nbytes = self._split.index.byte_range(shards, first, count)
        ends = (begin + nbytes).tolist()
        in_shards = zip(shards.tolist(), begin.tolist(), ends, strict=True)
        number = self._split.first_numbers[shards] + first
        in_columns = [column.ranges(number, count) for column in self._columns.values()]
        chunks = [
            (in_shard, *itertools.chain.from_iterable(rows))
            for in_shard, *rows in zip(in_shards, *in_columns, strict=True)
        ]
        return chunks, np.searchsorted(pieces[starts], piece_numbers, side='right') - 1

    def locate(self, epoch: np.ndarray, shard: np.ndarray, record: np.ndarray) -> LocatedRecords:
        """Locates records in memory; `epoch` is the epoch that reads each. All are int64 `(n,)`."""
        # Records of one run are located together, as the index has an offset for each run.
        runs, run_index = np.unique((shard << 32) + record // _STRIDE, return_inverse=True)
        shards = runs >> 32
        first = (runs & 0xFFFFFFFF) * _STRIDE
        count = np.minimum(self._split.index.shard_lengths[shards] - first, _STRIDE)
        offset, nbytes = self._split.index.byte_range(shards, first, count)
        start, limit = self.files.locate(shards, offset, nbytes)
        begins, ends = framing.locate_records(self.files, start, count, limit)
        # Records of another build may have the same sizes: their checksums tell them apart, with
        # or without `verify`.
        crcs = framing.stored_crcs(self.files, ends)
        is_other = run_digests(crcs) != self._split.index.digests(shards, first)
        begins[is_other] = 0
        ends[is_other] = 0
        begin = begins[run_index, record % _STRIDE]
        end = ends[run_index, record % _STRIDE]
        problem = np.where(limit - start < nbytes, damage.TOO_SHORT, damage.DAMAGED)
        codes = np.where(begin > 0, damage.GOOD, problem[run_index]).astype(damage.CODE_DTYPE)
        in_records = self._layout.find(functools.partial(self._gather_from, begin), begin, end)
        number = self._split.first_numbers[shard] + record
        in_columns = {name: column.locate(number) for name, column in self._columns.items()}
        values = in_records._replace(places=in_records.places | in_columns)
        return LocatedRecords(epoch, shard, record, number, begin, end, codes, values)

    def check(self, located: LocatedRecords) -> np.ndarray:
        """Returns what is wrong with each record, codes of `damage` `(n,)`.

        Compares checksums as `verify` says.
        """
        codes = located.codes.copy()
        due = self._checks.find_due(located.number, codes)
        if len(due):
            codes[due] = self._compare(located, due)
            self._checks.remember(located.number[due[codes[due] == damage.GOOD]])
        is_odd = (codes == damage.GOOD) & ~located.values.regular
        if is_odd.any():
            # Damage may be the reason, whatever `verify` says.
            is_intact = framing.match_crcs(self.files, located.begin[is_odd], located.end[is_odd])
            codes[is_odd] = np.where(is_intact, damage.OTHER_LAYOUT, damage.DAMAGED)
        return codes

    def read(self, located: LocatedRecords, codes: np.ndarray) -> Batch:
        """Reads some records in their order, given the result of `check`.

        Bad records give zeros and empty captions, or a `DamagedError`.
        """
        # Before the report, because damage may come from a change.
        self.files.check_unchanged(located.shard)
        for column in self._columns.values():
            column.check_unchanged(located.number)
        is_good = codes == damage.GOOD
        if not is_good.all():
            self._report(located, codes)
        # The key of a bad record is undefined, and so would be the choices that depend on it.
        keys = np.where(is_good, located.values.keys, 0)
        names = self._features.array_names
        crops = None
        if not self._features.all_crops and (schema.LATENTS in names or CROP in names):
            count = self._features.stored[schema.LATENTS].shape[0]
            crops = self._features.choose_crops(located.epoch, keys, count)
        return {name: self._array(name, located, is_good, keys, crops) for name in names}

    def _compare(self, located: LocatedRecords, rows: np.ndarray) -> np.ndarray:
        """Returns the codes of some of the records after all their checksums are compared."""
        is_good = framing.match_crcs(self.files, located.begin[rows], located.end[rows])
        codes = np.where(is_good, damage.GOOD, damage.DAMAGED)
        for number, (name, column) in enumerate(self._columns.items(), damage.DAMAGED_ROW):
            places = located.values.places[name][rows]
            is_good = column.match_checksums(located.number[rows], places)
            codes[~is_good & (codes == damage.GOOD)] = number
        return codes

    def _report(self, located: LocatedRecords, codes: np.ndarray) -> None:
        """Reports all bad records, those of columns first."""
        other_rows = np.flatnonzero(codes == damage.OTHER_LAYOUT)
        if len(other_rows):
            raise self._layout_error(located, int(other_rows[0]))
        for number, column in enumerate(self._columns.values(), damage.DAMAGED_ROW):
            problem = damage.PROBLEMS[damage.DAMAGED_ROW]
            for index in np.flatnonzero(codes == number).tolist():
                path, row = column.place(int(located.number[index]))
                shard = int(located.shard[index])
                record = int(located.record[index])
                self._bad_records.add(path, shard, [record], problem, f'row {row}')
        in_records = np.isin(codes, (damage.TOO_SHORT, damage.DAMAGED))
        for shard in np.unique(located.shard[in_records]).tolist():
            rows = np.flatnonzero(in_records & (located.shard == shard))
            rows = rows[np.argsort(located.record[rows])]
            problem = damage.PROBLEMS[int(codes[rows[0]])]
            numbers = located.record[rows].tolist()
            self._bad_records.add(self._split.file(shard), shard, numbers, problem)

    def _layout_error(self, located: LocatedRecords, row: int) -> DamagedError:
        return DamagedError(
            f'{self._split.file(int(located.shard[row]))}: record {located.record[row]} is not of '
            f'this data set, expected the features of {schema.FEATURES_FILE}. Build the data set '
            'again.'
        )

    def _array(
        self,
        name: str,
        located: LocatedRecords,
        good: np.ndarray,
        keys: np.ndarray,
        crops: np.ndarray | None,
    ) -> np.ndarray:
        features = self._features
        if name == schema.KEY:
            return keys
        if name == MASK:
            return good
        if name == DROP_TEXT:
            return features.choose_drops(located.epoch, keys)
        if name == NOISE_SEED:
            return order.sample_noise_seeds(features.seed, located.epoch, keys)
        if name == schema.CAPTION:
            return self._captions(located, good)
        if features.text and name == features.text.feature:
            return self._texts(features.text, located, good, keys)
        if name == CROP and crops is not None:
            middle = schema.middle_crop(features.stored[schema.LATENTS].shape[0])
            return np.where(good, crops - middle, 0).astype(np.int32)
        return self._numbers(name, located, good, crops)

    def _texts(
        self, mixture: TextMixture, located: LocatedRecords, good: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        choice = order.sample_texts(self._features.seed, located.epoch, keys, mixture.weights)
        values = np.zeros((len(keys), mixture.size), schema.TEXT_DTYPES[mixture.feature])
        values[good] = schema.TOKEN_PADDING
        for number, text in enumerate(mixture.texts):
            rows = choice == number
            name = text.name or mixture.feature
            values[rows, : text.size] = self._numbers(name, located, good & rows)[rows]
        return values

    def _numbers(
        self,
        name: str,
        located: LocatedRecords,
        good: np.ndarray,
        crops: np.ndarray | None = None,
    ) -> np.ndarray:
        """Values of a fixed size, from records or a column; zeros for bad rows.

        Of latents, one of the `crops` of each row, or all of them.
        """
        shape, dtype = self._features.stored[name]
        pieces = located.values.places[name].reshape(len(good), -1)
        places = pieces[:, 0]
        if name == schema.LATENTS:
            # A `.pt` file may keep each crop apart, as a piece of the row.
            count, shape = shape[0], shape[1:]
            in_piece = np.arange(count // pieces.shape[1]) * dtype.itemsize * math.prod(shape)
            places = (pieces[..., None] + in_piece).reshape(-1, count)
            if crops is not None:
                places = places[np.arange(len(good)), crops]
        if good.all():
            return self._gather_values(places, shape, dtype)
        values = np.zeros((*places.shape, *shape), dtype)
        values[good] = self._gather_values(places[good], shape, dtype)
        return values

    def _gather_values(
        self, places: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """Returns the value at each place, of a shape and a dtype."""
        rows = self.files.gather(places.ravel(), dtype.itemsize * math.prod(shape))
        return rows.view(dtype).reshape(*places.shape, *shape)

    def _gather_from(self, begin: np.ndarray, places: np.ndarray, nbytes: int) -> np.ndarray:
        """Gathers from places; zeros for those before `begin`, of a record that is too short."""
        return self.files.gather(np.where(places < begin, 0, places), nbytes)

    def _captions(self, located: LocatedRecords, good: np.ndarray) -> np.ndarray:
        captions = np.full(len(good), b'', object)
        rows = np.flatnonzero(good)
        begin = located.begin[rows]
        nbytes = (located.end[rows] - begin).tolist()
        views = self.files.views(begin, located.values.captions_end[rows])
        for row, view, record_nbytes in zip(rows.tolist(), views, nbytes, strict=True):
            before_key = view.tobytes()
            head = caption_head(len(before_key), record_nbytes)
            if head is None or not before_key.startswith(head):
                raise self._layout_error(located, row)
            captions[row] = before_key[len(head) :]
        return captions
