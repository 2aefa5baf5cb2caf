"""Batches gathered row by row from TFRecord files in memory, without TensorFlow.

Records are located for a block of batches at a time, as runs of `CHUNK_STRIDE` records, see
`framing`. The digest of the checksums behind the records, see `chunk_index.run_digests`, shows
whether they are the right ones. A batch then takes a few calls of NumPy, which copy only the
requested values. A *place* is the number of a byte in memory, see `HeldFiles`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import texts
from coyo11m_tfds.dataset.chunk_index import run_digests
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.dataset.records import RecordLayout, ValuePlaces, caption_head
from coyo11m_tfds.dataset.splits import IndexedSplit
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.dataset.texts import TextMixture
from coyo11m_tfds.memory.files import HeldFiles, Range
from coyo11m_tfds.reading import damage
from coyo11m_tfds.reading.batches import CROP, DROP_TEXT, MASK, NOISE_SEED, ArraySpec, Batch
from coyo11m_tfds.reading.column_reader import ColumnReader, OpenedColumn
from coyo11m_tfds.reading.framing import locate_records
from coyo11m_tfds.sampling import order

# --- Features: what a batch has of each record ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BatchFeatures:
    """The features of a batch, and the choices for each sample."""

    features: tuple[str, ...]
    # Of a stored row of each numeric feature, in records and columns; latents with all crops.
    stored: Mapping[str, ArraySpec]
    seed: int = 0  # of the choices for samples
    caption_dropout: float = 0.0  # share of samples that `drop_text` marks
    crop: int | None = None  # of all samples, 0 for the middle one; None: by (seed, epoch, key)
    all_crops: bool = False  # of each sample, instead of one
    with_mask: bool = False
    text: texts.TextMixture | None = None  # None for the text in the record of each sample

    @property
    def in_records(self) -> set[str]:
        """The features that records must hold, unless they are columns."""
        # The key is always read, because choices depend on it; crops and seeds are such choices.
        names = set(self.features)
        names.add(schema.KEY)
        names -= {CROP, NOISE_SEED}
        # All texts of a mixture may be columns.
        if self.text and '' not in self.text.names:
            names.discard(self.text.feature)
        return names

    @property
    def array_names(self) -> list[str]:
        """Names of the arrays in a batch: the features, and what says how to take them."""
        names = list(self.features)
        has_text = bool(schema.TEXT_DTYPES.keys() & set(self.features))
        if self.caption_dropout and has_text:
            names.append(DROP_TEXT)
        if self.with_mask:
            names.append(MASK)
        return names

    def spec(self, size: int) -> dict[str, ArraySpec]:
        """Returns shape and dtype of each array in a batch of `size` rows."""
        # Of every array that a batch can have; at the end, those of this one are taken.
        rows = dict(self.stored)
        rows |= {
            schema.KEY: ArraySpec((), np.dtype(np.int64)),
            schema.CAPTION: ArraySpec((), np.dtype(object)),
            CROP: ArraySpec((), np.dtype(np.int32)),
            NOISE_SEED: ArraySpec((), np.dtype(np.uint32)),
            DROP_TEXT: ArraySpec((), np.dtype(bool)),
            MASK: ArraySpec((), np.dtype(bool)),
        }
        # A sample shows one of the stored crops, unless all are read.
        if schema.LATENTS in rows and not self.all_crops:
            shape, dtype = rows[schema.LATENTS]
            rows[schema.LATENTS] = ArraySpec(shape[1:], dtype)
        # Tokens of several texts are padded to the longest.
        if self.text:
            dtype = np.dtype(schema.TEXT_DTYPES[self.text.feature])
            rows[self.text.feature] = ArraySpec((self.text.size,), dtype)
        specs = {}
        for name in self.array_names:
            shape, dtype = rows[name]
            specs[name] = ArraySpec((size, *shape), dtype)
        return specs

    def choose_crops(self, epoch: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
        """Returns the number of the crop of each key in its epoch; int64 `(n,)`."""
        if self.crop is not None:
            return np.full(len(keys), schema.middle_crop(count) + self.crop)
        return order.sample_crops(self.seed, epoch, keys, count)

    def choose_drops(self, epoch: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns whether the text of each key is dropped in its epoch; bool `(n,)`."""
        return order.sample_drops(self.seed, epoch, keys, self.caption_dropout)


def stored_specs(stored: StoredDataset) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of a row of the large features in the records."""
    dtype, shape = stored.latents
    # NumPy alone does not know bfloat16.
    latents_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    specs = {schema.LATENTS: ArraySpec(shape, latents_dtype)}
    # A width of 0 says that the data set has no such feature.
    if stored.text_dim:
        specs[schema.TEXT_EMBEDDING] = ArraySpec((stored.text_dim,), np.dtype(np.float16))
    if stored.num_tokens:
        specs[schema.TOKENS] = ArraySpec((stored.num_tokens,), np.dtype(np.int32))
    return specs


def check_text_feature(folder: str, text: texts.TextMixture, features: tuple[str, ...]) -> None:
    """Raises a ValueError if the features include another kind of text than `text`."""
    # The column would be ignored, and the records' own text read in its place.
    others = schema.TEXT_DTYPES.keys() & set(features) - {text.feature}
    if text.in_columns and others:
        name = text.names[0] or texts.RECORDS_TEXT
        raise ValueError(
            f'{folder}: features has {min(others)!r}, but text={name!r} holds {text.feature!r}; '
            'request that feature instead'
        )


_STRIDE = schema.CHUNK_STRIDE


# --- Rows -----------------------------------------------------------------------------------------

# The ranges of files that hold a chunk of records, or a piece of one, and its rows in columns.
Chunk = list[Range]


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
        values = self.values
        return LocatedRecords(
            epoch=self.epoch[rows],
            shard=self.shard[rows],
            record=self.record[rows],
            number=self.number[rows],
            begin=self.begin[rows],
            end=self.end[rows],
            codes=self.codes[rows],
            values=ValuePlaces(
                regular=values.regular[rows],
                keys=values.keys[rows],
                captions_end=values.captions_end[rows],
                places={name: places[rows] for name, places in values.places.items()},
            ),
        )


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
        """Adds the shards of the split and the files of its columns to others in memory."""
        self.files = files
        self._split = split
        self._first_file = files.add_shards(split.file, split.file_sizes)
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
        # Shard and piece in one number, so that sorting brings neighbours together: the shard in
        # the upper 32 bits.
        piece_numbers = (shard << 32) + record // piece
        pieces = np.unique(piece_numbers)
        piece_shard = pieces >> 32
        piece_first = (pieces & 0xFFFFFFFF) * piece
        # Pieces of one chunk that touch are read together. Values before the first piece make it
        # touch nothing.
        touches = np.diff(pieces, prepend=-2) == 1
        touches &= np.diff(piece_first // chunk, prepend=-1) == 0
        starts = np.flatnonzero(~touches)
        last_pieces = np.append(starts[1:], len(pieces)) - 1
        first = piece_first[starts]
        shards = piece_shard[starts]
        # The last piece of a shard may be short.
        full_end = piece_first[last_pieces] + piece
        end = np.minimum(self._split.index.shard_lengths[shards], full_end)
        count = end - first
        begin, nbytes = self._split.index.byte_range(shards, first, count)
        # Python's numbers: they become the keys of dicts and the arguments of requests.
        files = (self._first_file + shards).tolist()
        begins = begin.tolist()
        ends = (begin + nbytes).tolist()
        chunks = [[x] for x in zip(files, begins, ends, strict=True)]
        number = self._split.first_numbers[shards] + first
        # The rows of a chunk are neighbours in the file of each column, too: mostly one range.
        for column in self._columns.values():
            column_ranges = column.ranges(number, count)
            for ranges, in_column in zip(chunks, column_ranges, strict=True):
                ranges += in_column
        # A record is in the last chunk that does not begin behind it.
        num_begun = np.searchsorted(pieces[starts], piece_numbers, side='right')
        return chunks, num_begun - 1

    def locate(self, epoch: np.ndarray, shard: np.ndarray, record: np.ndarray) -> LocatedRecords:
        """Returns where records lie in memory; `epoch` is that of each. All are int64 `(n,)`."""
        # Records of one run are located together, as the index has an offset for each run.
        run_keys = (shard << 32) + record // _STRIDE
        runs, run_index = np.unique(run_keys, return_inverse=True)
        run_shard = runs >> 32
        run_first = (runs & 0xFFFFFFFF) * _STRIDE
        begins, ends, problem = self._locate_runs(run_shard, run_first)
        # From runs to records: `begins` has a row for each run, and a column for each record of it.
        index_in_run = record % _STRIDE
        begin = begins[run_index, index_in_run]
        end = ends[run_index, index_in_run]
        codes = np.where(begin > 0, damage.GOOD, problem[run_index]).astype(damage.CODE_DTYPE)
        gather = functools.partial(self._gather_from, begin)
        in_records = self._layout.find(gather, begin, end)
        number = self._split.first_numbers[shard] + record
        in_columns = {name: column.locate(number) for name, column in self._columns.items()}
        values = in_records._replace(places=in_records.places | in_columns)
        return LocatedRecords(epoch, shard, record, number, begin, end, codes, values)

    def _locate_runs(
        self, shard: np.ndarray, first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns where the records of runs begin and end, int64 `(n, CHUNK_STRIDE)`.

        Both are 0 for records that have no place; the third result, `(n,)`, has the code of what is
        wrong with those of each run. `first` is the first record of each run in its shard.
        """
        index = self._split.index
        num_left = index.shard_lengths[shard] - first
        count = np.minimum(num_left, _STRIDE)
        offset, nbytes = index.byte_range(shard, first, count)
        start, limit = self.files.locate(self._first_file + shard, offset, nbytes)
        begins, ends = locate_records(self.files, start, count, limit)
        # Records of another build may have the same sizes: their checksums tell them apart, with
        # or without `verify`.
        crcs = damage.stored_crcs(self.files, ends)
        is_other = run_digests(crcs) != index.digests(shard, first)
        begins[is_other] = 0
        ends[is_other] = 0
        # Of a run that the file does not hold whole, no digest is right.
        is_cut = limit - start < nbytes
        problem = np.where(is_cut, damage.TOO_SHORT, damage.DAMAGED)
        return begins, ends, problem

    def check(self, located: LocatedRecords) -> np.ndarray:
        """Returns what is wrong with each record, codes of `damage` `(n,)`.

        Compares checksums as `verify` says.
        """
        codes = located.codes.copy()
        due = self._checks.find_due(located.number, codes)
        if len(due):
            due_codes = self._compare(located, due)
            codes[due] = due_codes
            good = due[due_codes == damage.GOOD]
            self._checks.remember(located.number[good])
        # Records whose features are not where those of this data set are.
        is_odd = (codes == damage.GOOD) & ~located.values.regular
        if is_odd.any():
            # Damage may be the reason, whatever `verify` says.
            is_intact = damage.match_crcs(self.files, located.begin[is_odd], located.end[is_odd])
            codes[is_odd] = np.where(is_intact, damage.OTHER_LAYOUT, damage.DAMAGED)
        return codes

    def read(self, located: LocatedRecords, codes: np.ndarray) -> Batch:
        """Reads some records in their order, given the result of `check`.

        The batch has the places of latents, which `gather_latents` replaces. Bad records give
        zeros and empty captions, or a `DamagedError`.
        """
        # Before the report, because damage may come from a change.
        self.files.check_unchanged(self._first_file + located.shard)
        for column in self._columns.values():
            column.check_unchanged(located.number)
        is_good = codes == damage.GOOD
        # Before values are gathered, as a report may end the run.
        if not is_good.all():
            self._report(located, codes)
        # The key of a bad record is undefined, and so would be the choices that depend on it.
        keys = np.where(is_good, located.values.keys, 0)
        names = self._features.array_names
        # Chosen once for both: `latents` and `crop` of a sample must agree.
        crops = None
        if not self._features.all_crops and (schema.LATENTS in names or CROP in names):
            count = self._features.stored[schema.LATENTS].shape[0]
            crops = self._features.choose_crops(located.epoch, keys, count)
        return {name: self._array(name, located, is_good, keys, crops) for name in names}

    def gather_latents(self, batch: Batch) -> Batch:
        """Returns a batch of `read` with latents, also one that was joined of several readers.

        The readers have the same files, and latents of the same shape and dtype.
        """
        if schema.LATENTS not in batch:
            return batch
        shape, dtype = self._features.stored[schema.LATENTS]
        latents = self._gather_values(batch[schema.LATENTS], shape[1:], dtype)
        return batch | {schema.LATENTS: latents}

    def _compare(self, located: LocatedRecords, rows: np.ndarray) -> np.ndarray:
        """Returns the codes of some of the records after all their checksums are compared."""
        is_good = damage.match_crcs(self.files, located.begin[rows], located.end[rows])
        codes = np.where(is_good, damage.GOOD, damage.DAMAGED)
        for number, (name, column) in enumerate(self._columns.items(), damage.DAMAGED_ROW):
            places = located.values.places[name][rows]
            is_good = column.match_checksums(located.number[rows], places)
            # Of several damages, the first is reported.
            is_first_damage = ~is_good & (codes == damage.GOOD)
            codes[is_first_damage] = number
        return codes

    def _report(self, located: LocatedRecords, codes: np.ndarray) -> None:
        """Reports all bad records, those of columns first."""
        # No damage, but another data set: none of its records can be right.
        other_rows = np.flatnonzero(codes == damage.OTHER_LAYOUT)
        if len(other_rows):
            raise self._layout_error(located, int(other_rows[0]))
        for number, column in enumerate(self._columns.values(), damage.DAMAGED_ROW):
            for index in np.flatnonzero(codes == number).tolist():
                self._report_row(located, index, column)
        self._report_records(located, codes)

    def _report_row(self, located: LocatedRecords, index: int, column: ColumnReader) -> None:
        """Reports the damaged row of a column, which lies in another file than its record."""
        path, row = column.place(int(located.number[index]))
        shard = int(located.shard[index])
        record = int(located.record[index])
        problem = damage.PROBLEMS[damage.DAMAGED_ROW]
        self._bad_records.add(path, shard, [record], problem, f'row {row}')

    def _report_records(self, located: LocatedRecords, codes: np.ndarray) -> None:
        """Reports the bad records of each shard together."""
        in_records = np.isin(codes, (damage.TOO_SHORT, damage.DAMAGED))
        for shard in np.unique(located.shard[in_records]).tolist():
            in_shard = in_records & (located.shard == shard)
            rows = np.flatnonzero(in_shard)
            # The message names the first one in the file, whatever their order in the batch.
            by_record = np.argsort(located.record[rows])
            rows = rows[by_record]
            numbers = located.record[rows].tolist()
            first_code = int(codes[rows[0]])
            problem = damage.PROBLEMS[first_code]
            path = self._split.file(shard)
            self._bad_records.add(path, shard, numbers, problem)

    def _layout_error(self, located: LocatedRecords, row: int) -> DamagedError:
        path = self._split.file(int(located.shard[row]))
        return DamagedError(
            f'{path}: record {located.record[row]} is not of this data set, expected the features '
            f'of {schema.FEATURES_FILE}. Build the data set again.'
        )

    def _array(
        self,
        name: str,
        located: LocatedRecords,
        good: np.ndarray,
        keys: np.ndarray,
        crops: np.ndarray | None,
    ) -> np.ndarray:
        """Returns the array of a name in a batch, with a row for each record."""
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
        # Stored crops are counted from 0, those of a batch from the middle one.
        if name == CROP and crops is not None:
            middle = schema.middle_crop(features.stored[schema.LATENTS].shape[0])
            return np.where(good, crops - middle, 0).astype(np.int32)
        if name == schema.LATENTS:
            return self._latent_places(located, good, crops)
        return self._numbers(name, located, good)

    def _texts(
        self, mixture: TextMixture, located: LocatedRecords, good: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Returns the text that is chosen for each record, padded to the longest; zeros for bad."""
        choice = order.sample_texts(self._features.seed, located.epoch, keys, mixture.weights)
        values = np.zeros((len(keys), mixture.size), schema.TEXT_DTYPES[mixture.feature])
        # Embeddings all have one size, so only tokens keep some of the padding.
        values[good] = schema.TOKEN_PADDING
        for number, text in enumerate(mixture.texts):
            is_chosen = choice == number
            # The text without a name is the one in the records.
            name = text.name or mixture.feature
            text_values = self._numbers(name, located, good & is_chosen)
            values[is_chosen, : text.size] = text_values[is_chosen]
        return values

    def _latent_places(
        self, located: LocatedRecords, good: np.ndarray, crops: np.ndarray | None
    ) -> np.ndarray:
        """Returns the place of the chosen crop of each record, int64 `(n,)`; 0 for bad records.

        Without `crops`, those of all crops, `(n, crops)`.
        """
        (count, *shape), dtype = self._features.stored[schema.LATENTS]
        crop_nbytes = dtype.itemsize * math.prod(shape)
        pieces = located.values.places[schema.LATENTS].reshape(len(good), -1)
        # A `.pt` file may keep each crop apart, as a piece of the row. Elsewhere all crops of a row
        # are one piece.
        crops_per_piece = count // pieces.shape[1]
        in_piece = np.arange(crops_per_piece) * crop_nbytes
        places = (pieces[..., None] + in_piece).reshape(-1, count)
        places[~good] = 0
        if crops is None:
            return places
        return places[np.arange(len(good)), crops]

    def _numbers(self, name: str, located: LocatedRecords, good: np.ndarray) -> np.ndarray:
        """Returns values of a fixed size, from records or a column; zeros for bad records."""
        shape, dtype = self._features.stored[name]
        # Only latents lie in several pieces: of any other row, the first is all of it.
        pieces = located.values.places[name].reshape(len(good), -1)
        places = np.where(good, pieces[:, 0], 0)
        return self._gather_values(places, shape, dtype)

    def _gather_values(
        self, places: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """Returns the value at each place, of a shape and a dtype."""
        nbytes = dtype.itemsize * math.prod(shape)
        rows = self.files.gather(places.ravel(), nbytes)
        return rows.view(dtype).reshape(*places.shape, *shape)

    def _gather_from(self, begin: np.ndarray, places: np.ndarray, nbytes: int) -> np.ndarray:
        """Returns bytes from places; zeros before `begin`, as of a record that is too short."""
        places = np.where(places < begin, 0, places)
        return self.files.gather(places, nbytes)

    def _captions(self, located: LocatedRecords, good: np.ndarray) -> np.ndarray:
        """Returns the captions of good records, as bytes objects `(n,)`; b'' for bad ones."""
        captions = np.full(len(good), b'', object)
        rows = np.flatnonzero(good)
        begin = located.begin[rows]
        record_nbytes = located.end[rows] - begin
        # The caption is the first feature of a record; the next one is the key.
        views = self.files.views(begin, located.values.captions_end[rows])
        for row, view, nbytes in zip(rows.tolist(), views, record_nbytes.tolist(), strict=True):
            before_key = view.tobytes()
            # With these two lengths, only one head is right: nothing has to be parsed.
            head = caption_head(len(before_key), nbytes)
            if head is None or not before_key.startswith(head):
                raise self._layout_error(located, row)
            captions[row] = before_key[len(head) :]
        return captions
