"""Batches gathered row by row from TFRecord files in memory, without TensorFlow.

Rows are located for a block of batches at a time. A batch then takes a few calls of NumPy, which
copy only the requested values.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.chunk_index import run_digests
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.records import RecordLayout, ValueAddresses, caption_head
from coyo11m_tfds.dataset.stored_dataset import IndexedSplit
from coyo11m_tfds.dataset.texts import TextMixture
from coyo11m_tfds.reading import damage, framing, order, raw_memory
from coyo11m_tfds.reading.batches import CROP, DROP_TEXT, MASK, NOISE_SEED, ArraySpec
from coyo11m_tfds.reading.column_reader import ColumnReader
from coyo11m_tfds.reading.features import BatchFeatures
from coyo11m_tfds.reading.files import FetchedFiles, MappedFiles, Range
from coyo11m_tfds.reading.raw_memory import LazyArray, LazyBatch

_STRIDE = schema.CHUNK_STRIDE


class LocatedRecords(NamedTuple):
    """Where some records lie in memory; arrays are int64 `(n,)` if they are not described."""

    epoch: np.ndarray  # that reads each record
    shard: np.ndarray
    record: np.ndarray  # number in the shard
    number: np.ndarray  # in the split
    begin: np.ndarray  # addresses of the serialized records; both 0 where the framing is damaged
    end: np.ndarray
    values: ValueAddresses  # also of columns, int64 `(n, pieces)`

    def rows(self, rows: slice) -> 'LocatedRecords':
        *arrays, (*values, places) = self
        places = {name: x[rows] for name, x in places.items()}
        in_rows = ValueAddresses._make([*(x[rows] for x in values), places])
        return LocatedRecords._make([*(x[rows] for x in arrays), in_rows])


class RowReader:
    def __init__(
        self,
        split: IndexedSplit,
        features: BatchFeatures,
        layout: RecordLayout,
        *,
        verify: str,
        bad_records: damage.BadRecords,
        columns: Mapping[str, ColumnReader],
        files: FetchedFiles | None,
    ):
        lengths = split.index.shard_lengths
        self._split, self._features = split, features
        self._files = files or MappedFiles(split.file, len(lengths))
        self._layout, self.columns = layout, columns
        self._checks = damage.Checks(verify, int(lengths.sum()))
        self._bad_records = bad_records

    def locate(self, epoch: np.ndarray, shard: np.ndarray, record: np.ndarray) -> LocatedRecords:
        """Locates records in memory; `epoch` is the epoch that reads each. All are int64 `(n,)`."""
        # Records of one run are located together, as the index has an offset for each run.
        runs, run_index = np.unique(_run_keys(shard, record), return_inverse=True)
        shards, first, count, offset, nbytes = self._run_ranges(runs)
        start, limit = self._files.locate(shards, offset, nbytes)
        begins, ends = framing.locate_records(start, count, limit)
        # Records of another build may have the same sizes: their checksums tell them apart, with
        # or without `verify`.
        crcs = framing.stored_crcs(np.where(ends > 0, ends, raw_memory.ZEROS))
        is_other = run_digests(crcs) != self._split.index.digests(shards, first)
        begins[is_other] = ends[is_other] = 0
        begin, end = (x[run_index, record % _STRIDE] for x in (begins, ends))
        in_records = self._layout.find(functools.partial(_gather_from, begin), begin, end)
        number = self._split.first_numbers[shard] + record
        in_columns = {name: x.locate(number) for name, x in self.columns.items()}
        values = in_records._replace(places=in_records.places | in_columns)
        return LocatedRecords(epoch, shard, record, number, begin, end, values)

    def ranges_ahead(self, shard: np.ndarray, record: np.ndarray) -> list[Range]:
        """Returns the ranges of shards with some records, for `will_need`."""
        runs = np.unique(_run_keys(shard, record))
        shards, first, count, offset, nbytes = self._run_ranges(runs)
        number = self._split.first_numbers[shards] + first
        # At once, because the rows of columns are fewer.
        for column in self.columns.values():
            column.will_need(number, number + count - 1)
        # Adjacent runs form one range.
        is_first = np.diff(runs, prepend=-2) != 1
        is_last = np.append(is_first[1:], True)[: len(runs)]
        ends = (offset + nbytes)[is_last]
        ranges = zip(
            shards[is_first].tolist(), offset[is_first].tolist(), ends.tolist(), strict=True
        )
        return list(ranges)

    def will_need(self, shard_range: Range) -> None:
        if isinstance(self._files, MappedFiles):
            self._files.open(np.array(shard_range[:1]))
            self._files.will_need(*shard_range)

    def check(self, located: LocatedRecords) -> np.ndarray:
        """Returns True for readable rows, bool `(n,)`; compares checksums as `verify` says."""
        matches = functools.partial(self._match_checksums, located)
        return self._checks.check(located.begin > 0, located.number, matches)

    def read(self, located: LocatedRecords, good: np.ndarray) -> LazyBatch:
        """Reads some rows in their order, given the result of `check`; large values are lazy."""
        self._files.check_unchanged(located.shard)
        for column in self.columns.values():
            column.check_unchanged(located.number)
        # After the checksums, because damage also changes the layout.
        self._check_layout(located, good)
        if not good.all():
            self._report_bad(located, np.flatnonzero(~good))
        # The key of a bad record is undefined, and so would be the choices that depend on it.
        keys = np.where(good, located.values.keys, 0)
        names, crops = self._features.array_names, None
        if not self._features.all_crops and (schema.LATENTS in names or CROP in names):
            count = self._features.stored[schema.LATENTS].shape[0]
            crops = self._features.choose_crops(located.epoch, keys, count)
        return {name: self._array(name, located, good, keys, crops) for name in names}

    def _match_checksums(self, located: LocatedRecords, rows: np.ndarray) -> np.ndarray:
        good = framing.match_crcs(located.begin[rows], located.end[rows])
        for name, column in self.columns.items():
            good &= column.match_checksums(located.number[rows], located.values.places[name][rows])
        return good

    def _run_ranges(self, runs: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns shard, first record, number of records, first byte and size of each run."""
        shard, first = runs >> 32, (runs & 0xFFFFFFFF) * _STRIDE
        count = np.minimum(self._split.index.shard_lengths[shard] - first, _STRIDE)
        return shard, first, count, *self._split.index.byte_range(shard, first, count)

    def _check_layout(self, located: LocatedRecords, good: np.ndarray) -> None:
        """Marks damaged records in `good`; raises for an undamaged one of another layout."""
        for row in np.flatnonzero(good & ~located.values.regular).tolist():
            begin, end = located.begin[row : row + 1], located.end[row : row + 1]
            # Damage may be the reason, whatever `verify` says.
            good[row] = framing.match_crcs(begin, end)[0]
            if good[row]:
                raise self._layout_error(located, row)

    def _layout_error(self, located: LocatedRecords, row: int) -> DamagedError:
        return DamagedError(
            f'{self._split.file(int(located.shard[row]))}: record {located.record[row]} is not of '
            f'this data set, expected the features of {schema.FEATURES_FILE}. Build the data set '
            'again.'
        )

    def _report_bad(self, located: LocatedRecords, bad: np.ndarray) -> None:
        # An intact record is bad because of its row in a column.
        is_whole = located.begin[bad] > 0
        framed = bad[is_whole]
        is_whole[is_whole] = framing.match_crcs(located.begin[framed], located.end[framed])
        self._report_bad_columns(located, bad[is_whole])
        bad = bad[~is_whole]
        for shard in np.unique(located.shard[bad]).tolist():
            numbers = np.sort(located.record[bad][located.shard[bad] == shard])
            _, _, _, offset, nbytes = self._run_ranges(_run_keys(np.array(shard), numbers[0]))
            is_short = self._files.size[shard] < offset + nbytes
            problem = damage.TOO_SHORT if is_short else damage.DAMAGED
            self._bad_records.add(self._split.file(shard), shard, numbers.tolist(), problem)

    def _report_bad_columns(self, located: LocatedRecords, bad: np.ndarray) -> None:
        for name, column in self.columns.items():
            good = column.match_checksums(located.number[bad], located.values.places[name][bad])
            for index in bad[~good].tolist():
                path, row = column.place(int(located.number[index]))
                shard, record = int(located.shard[index]), int(located.record[index])
                self._bad_records.add(path, shard, [record], damage.DAMAGED_ROW, f'row {row}')

    def _array(
        self,
        name: str,
        located: LocatedRecords,
        good: np.ndarray,
        keys: np.ndarray,
        crops: np.ndarray | None,
    ) -> np.ndarray | LazyArray:
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
            values[rows, : text.size] = self._numbers(name, located, good & rows).gather()[rows]
        return values

    def _numbers(
        self,
        name: str,
        located: LocatedRecords,
        good: np.ndarray,
        crops: np.ndarray | None = None,
    ) -> LazyArray:
        """Values of a fixed size, from records or a column; zeros for bad rows.

        Of latents, one of the `crops` of each row, or all of them.
        """
        shape, dtype = self._features.stored[name]
        pieces = located.values.places[name].reshape(len(good), -1)
        addresses = pieces[:, 0]
        if name == schema.LATENTS:
            # A `.pt` file may keep each crop apart, as a piece of the row.
            count, shape = shape[0], shape[1:]
            in_piece = np.arange(count // pieces.shape[1]) * dtype.itemsize * math.prod(shape)
            addresses = (pieces[..., None] + in_piece).reshape(-1, count)
            if crops is not None:
                addresses = addresses[np.arange(len(good)), crops]
        # Transposed, because a row may have several addresses.
        addresses = np.where(good, addresses.T, raw_memory.ZEROS).T
        return LazyArray(addresses, ArraySpec(shape, dtype), [self])

    def _captions(self, located: LocatedRecords, good: np.ndarray) -> np.ndarray:
        captions = np.full(len(good), b'', object)
        rows = np.flatnonzero(good)
        begin, nbytes = located.begin[rows], (located.end - located.begin)[rows]
        views = raw_memory.views(begin, located.values.captions_end[rows])
        for row, view, record_nbytes in zip(rows.tolist(), views, nbytes.tolist(), strict=True):
            before_key = view.tobytes()
            head = caption_head(len(before_key), record_nbytes)
            if head is None or not before_key.startswith(head):
                raise self._layout_error(located, row)
            captions[row] = before_key[len(head) :]
        return captions


def _run_keys(shard: np.ndarray, record: np.ndarray) -> np.ndarray:
    """Returns a number for the run of each record; adjacent runs have consecutive numbers."""
    return (shard << 32) + record // _STRIDE


def _gather_from(begin: np.ndarray, addresses: np.ndarray, nbytes: int) -> np.ndarray:
    """Gathers from addresses; zeros for those before `begin`, of a record that is too short."""
    return raw_memory.gather(np.where(addresses < begin, raw_memory.ZEROS, addresses), nbytes)
