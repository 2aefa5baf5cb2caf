"""What is wrong with records: codes, when they are compared, and whether damage stops a run."""

from collections.abc import Sequence

import google_crc32c
import numpy as np
from absl import logging

from coyo11m_tfds.dataset import records
from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.memory.files import HeldFiles
from coyo11m_tfds.memory.read_counts import ReadCounter
from coyo11m_tfds.process.sizes import exceeds_share

# When a record is compared: its rows are gathered without reading the rest of it.
ONCE, ALWAYS, NEVER = MODES = ('once', 'always', 'never')
STOP, SKIP = 'stop', 'skip'

DEFAULT_MAX_FRACTION = 0.001

# This many never stop a run: damage to a length costs a run of 32 records, even in a small data
# set.
_ALWAYS_ALLOWED = 64

# Before a record. The length is not a number here, because its checksum is that of its bytes.
_HEADER = np.dtype([('length', 'V8'), ('crc', '<u4')])

# By n from 0 to 7, the byte of which only the n-th bit is set.
_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)

# What is wrong with a record. A damaged row of column n has the code `DAMAGED_ROW + n`.
CODE_DTYPE = np.uint16
GOOD, TOO_SHORT, DAMAGED, OTHER_LAYOUT, DAMAGED_ROW = range(5)
PROBLEMS = {
    TOO_SHORT: 'the file is shorter than its chunk index says',
    DAMAGED: 'its checksum is wrong, or its file has other records than its chunk index says',
    DAMAGED_ROW: 'its checksum is wrong',
}


class Checks:
    """Remembers, with one bit for each record of a split, whether it was compared."""

    def __init__(self, mode: str, num_records: int):
        self._mode = mode
        # A bit and not a byte: 10^9 records take 125 MB, and every process has its own.
        num_bytes = 0
        if mode == ONCE:
            num_bytes = -(-num_records // 8)
        self._checked_bits = np.zeros(num_bytes, np.uint8)

    def find_due(self, number: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Returns the indices of the good records that have to be compared, int64 `(k,)`.

        `number` is the number of each record in its split, int64 `(n,)`.
        """
        is_due = codes == GOOD
        if self._mode == NEVER:
            is_due[:] = False
        if self._mode == ONCE:
            own_bits = self._checked_bits[number >> 3] & _BITS[number & 7]
            is_due &= own_bits == 0
        return np.flatnonzero(is_due)

    def remember(self, number: np.ndarray) -> None:
        """Remembers records that were compared and are good; others may be repaired."""
        if self._mode == ONCE:
            # `at`, because several of the records may share a byte.
            np.bitwise_or.at(self._checked_bits, number >> 3, _BITS[number & 7])


class BadRecords:
    """Counts the bad records of a split, each once, in however many epochs it occurs."""

    def __init__(
        self, policy: str, max_fraction: float, num_records: int, counter: ReadCounter | None
    ):
        self._stops = policy == STOP
        self._max_fraction = max_fraction
        self._num_records = num_records
        self._counter = counter
        self._records: set[tuple[int, int]] = set()  # (shard, record)
        self._reported_paths: set[str] = set()

    def add(
        self, path: str, shard: int, numbers: Sequence[int], problem: str, place: str = ''
    ) -> None:
        """Counts bad records of a shard; warns once for each file, or raises a `DamagedError`.

        `place` names the first one if it lies in another file than the shard.
        """
        message = f'{path}: {place or f"record {numbers[0]}"} cannot be read: {problem}.'
        if self._stops:
            raise DamagedError(
                f'{message} Restore the file or build the data set again. Batches leave such '
                f"records out with on_bad_records='{SKIP}'."
            )
        self._records.update((shard, number) for number in numbers)
        # The counter is of reads, and counts a record in each epoch; the limit counts it once.
        if self._counter:
            self._counter.add(bad_records=len(numbers))
        num_bad = len(self._records)
        are_many = exceeds_share(num_bad, self._max_fraction, self._num_records)
        if num_bad > _ALWAYS_ALLOWED and are_many:
            raise DamagedError(
                f'{message} With it, {num_bad} of {self._num_records} records are bad, more '
                f'than max_bad_fraction={self._max_fraction:g} (and more than {_ALWAYS_ALLOWED}). '
                'Restore the files that python -m coyo11m_tfds.verify names, or raise '
                'max_bad_fraction.'
            )
        # Once for each file: a damaged disk would fill the log otherwise.
        if path not in self._reported_paths:
            self._reported_paths.add(path)
            logging.warning('%s It is left out, like other bad records of this file.', message)


def stored_crcs(files: HeldFiles, end: np.ndarray) -> np.ndarray:
    """Returns the masked checksums behind the ends of records; uint32, same shape."""
    trailers = files.gather(end.ravel(), records.TRAILER_NBYTES)
    return trailers.view('<u4').reshape(end.shape)


def match_crcs(files: HeldFiles, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns True where records and their lengths match the checksums behind them; bool `(n,)`."""
    header_begin = begin - records.HEADER_NBYTES
    headers = files.gather(header_begin, records.HEADER_NBYTES).view(_HEADER)
    # TFRecord files have two checksums for each record: of its length, and of its data.
    crcs_of_lengths = map(google_crc32c.value, headers['length'].tolist())
    length_crcs = np.fromiter(crcs_of_lengths, np.uint32, len(begin))
    is_length_good = records.mask_crc32c(length_crcs) == headers['crc']
    record_crcs = records.mask_crc32c(files.crc32c(begin, end))
    is_record_good = record_crcs == stored_crcs(files, end)
    return is_length_good & is_record_good
